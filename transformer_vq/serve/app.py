"""The HTTP application: errors, information, metrics, contexts, inspection, and the page."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect

from transformer_vq.errors import UserError
from transformer_vq.generation.inspection import inspect_tokens
from transformer_vq.serve import guard, schema
from transformer_vq.serve.completions import completions_router, token_name
from transformer_vq.serve.engine import EngineStoppedError, QueueFullError
from transformer_vq.serve.schema import APIError
from transformer_vq.serve.service import Service, check_connected

PAGE = Path(__file__).parent / "page"
CHUNK_BYTES = 2**18  # of a download
MAX_INSPECTED = 4096  # tokens
MAX_INSPECTIONS = 8  # being computed or waiting
JSON = dict[str, Any]


def create_app(service: Service, hosts: frozenset[str] | None = None) -> FastAPI:
    """Return the application; its lifespan starts and stops the engine.

    hosts: accepted host names; None accepts all.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await run_in_threadpool(service.engine.stop)

    app = FastAPI(
        title="Transformer-VQ",
        description="Completions of the OpenAI API, and stored contexts.",
        lifespan=lifespan,
        docs_url=None,  # these load scripts from another server
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(
        guard.Guard,
        api_key=service.api_key,
        max_bytes=service.limits.body_bytes,
        max_values=service.limits.prompt_tokens + guard.OTHER_VALUES,
        hosts=hosts,
    )
    accepted = ["*"] if hosts is None else sorted(hosts)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=accepted, www_redirect=False)
    for kind in (HTTPException, RequestValidationError, ValidationError, *ANSWERS):
        app.add_exception_handler(kind, handle_error)
    for router in (information_router, completions_router, contexts_router, inspection_router):
        app.include_router(router(service))
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app


ANSWERS: dict[type[Exception], tuple[int, str | None, str]] = {
    UserError: (400, None, "{}"),
    ClientDisconnect: (400, None, "the client disconnected"),
    QueueFullError: (429, "queue_full", "the server is busy: {}; try again later"),
    EngineStoppedError: (503, "shutting_down", "{}"),
    Exception: (500, None, "internal error; the log of the server has details"),
}
"""Status, code and message for errors of the library."""


async def handle_error(request: Request, error: Exception) -> JSONResponse:
    """Answer every error with the same kind of JSON object."""
    match error:
        case APIError():
            return error.response()
        case RequestValidationError() | ValidationError():
            return schema.invalid_field(error.errors()[0]).response()
        case HTTPException(status_code=404):
            message = f"{request.method} {request.scope['path']} does not exist; see /openapi.json"
            return APIError(404, message).response()
        case HTTPException():
            return APIError(error.status_code, str(error.detail)).response()
    status, code, message = next(ANSWERS[kind] for kind in ANSWERS if isinstance(error, kind))
    return APIError(status, message.format(error), code=code).response()


def information_router(service: Service) -> APIRouter:
    """Return the page, and routes about the model and the server."""
    router = APIRouter(tags=["information"])
    engine, contexts = service.engine, service.contexts
    for name, text, value in (
        ("slots", "Maximum number of concurrent requests.", lambda: engine.n_slots),
        ("active_requests", "Requests that are being processed.", lambda: engine.n_active),
        ("waiting_requests", "Requests that wait for a slot.", lambda: engine.n_waiting),
        ("state_bytes", "Size of the state of one slot.", lambda: engine.state_bytes),
        ("prefix_bytes", "Stored prefixes in memory.", lambda: engine.prefixes.n_bytes),
        ("contexts", "Stored contexts.", lambda: len(contexts.list())),
        ("context_bytes", "Of all contexts.", lambda: sum(x.bytes for x in contexts.list())),
    ):
        engine.metrics.gauge(name, text, value)
    state = engine.model.init_state(1)
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "transformer_vq",
        "parameters": sum(x.numel() for x in engine.model.parameters()),
        "vocab_size": engine.model.config.vocab_size,
        "state_bytes": engine.state_bytes,
        "kv_bytes_per_token": sum(x.k[:, :, 0].nbytes + x.v[:, :, 0].nbytes for x in state.layers),
        "block_len": engine.model.config.block_len,
        "has_chat_template": service.chat_template is not None,
    }

    @router.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @router.get("/favicon.ico", include_in_schema=False)
    async def icon() -> FileResponse:
        return FileResponse(PAGE / "icon.svg", media_type="image/svg+xml")

    @router.get("/health")
    async def health() -> JSON:
        """Return the status of the server and its load."""
        n_prefilled, n_prompt = engine.prefill_progress
        return {
            "status": "ok",
            "model": service.name,
            "slots": engine.n_slots,
            "active": engine.n_active,
            "waiting": engine.n_waiting,
            "prefill": {"tokens": n_prefilled, "total": n_prompt},
        }

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return counters, gauges and histograms for Prometheus."""
        return Response(generate_latest(engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> JSON:
        """List the one model of this server."""
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> JSON:
        """Describe the model."""
        service.check_model(name)
        return model

    return router


def contexts_router(service: Service) -> APIRouter:
    """Return the routes of /v1/contexts."""
    router = APIRouter(prefix="/v1/contexts", tags=["contexts"], route_class=guard.BodyRoute)
    store = service.contexts

    async def add_document(body: schema.ContextBody, client: Request, parent: str | None) -> JSON:
        """Prefill a document, after that of a parent if given; store its context."""
        prompts = await service.prompts(client, parent)
        tokens, start = await prompts.document(body.text, body.tokens), prompts.start
        requests = service.requests(schema.GenerationBody(max_tokens=0), tokens, start)
        (*_, (_, last)) = [event async for event in service.events(requests, client)]
        assert last.end is not None
        assert last.end.context is not None
        n_tokens = len(tokens) + (0 if start is None else start.n_tokens)
        add = partial(store.add, last.end.context, n_tokens, body.name, parent)
        return (await run_in_threadpool(add)).plain()

    # Functions that are not async run in a thread, so that slow disks do not delay other requests.

    @router.get("")
    def list_contexts() -> JSON:
        """List all stored contexts, the newest first."""
        return {"object": "list", "data": [entry.plain() for entry in store.list()]}

    @router.post("", status_code=201)
    async def create_context(
        client: guard.BodyRequest, name: Annotated[str, Query(max_length=schema.MAX_NAME)] = ""
    ) -> JSON:
        """Prefill a document and store the context after it.

        The body is JSON with `text` or `tokens`, plain text (text/plain), or a context that was
        downloaded before (application/octet-stream).
        """
        kind = guard.media_type(client.headers)
        if kind in guard.SNAPSHOT_TYPES:
            return (await run_in_threadpool(store.upload, await client.body(), name)).plain()
        if kind != "text/plain":
            body = schema.ContextBody.model_validate(await client.json())
            return await add_document(body, client, None)
        try:
            text = (await client.body()).decode()
        except UnicodeDecodeError:
            raise APIError(400, "the document is not valid UTF-8") from None
        return await add_document(schema.ContextBody(text=text, name=name), client, None)

    @router.get("/{context}")
    async def get_context(context: str) -> JSON:
        """Describe a stored context."""
        return store.get(context).plain()

    @router.post("/{context}/branch", status_code=201)
    async def branch_context(context: str, body: schema.ContextBody, client: Request) -> JSON:
        """Append text to a context and store the result as another one."""
        return await add_document(body, client, context)

    @router.get("/{context}/content", response_class=StreamingResponse)
    def download_context(context: str) -> StreamingResponse:
        """Download a context as a safetensors file, for `load_context` or another server."""
        file = store.content(context)
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": f'attachment; filename="{context}.safetensors"',
        }
        return StreamingResponse(_chunks(file), headers=headers, media_type=guard.SNAPSHOT_TYPES[0])

    @router.delete("/{context}")
    def delete_context(context: str) -> JSON:
        """Delete a stored context."""
        store.delete(context)
        return {"id": context, "object": "context", "deleted": True}

    return router


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def inspection_router(service: Service) -> APIRouter:
    """Return the route /v1/inspect: one inspection at a time, and a short queue."""
    router = APIRouter(tags=["information"], route_class=guard.BodyRoute)
    turn = asyncio.Lock()
    n_requests = 0

    async def work(body: schema.InspectBody, client: Request) -> JSON:
        prompts = await service.prompts(client, body.context, MAX_INSPECTED)
        tokens, start = await prompts.document(body.text, body.tokens), prompts.start
        context, position = (None, 0) if start is None else (start.context, start.n_tokens)
        inspect = partial(inspect_tokens, service.engine.model, tokens, n_codes=body.n_codes)
        # Not in the thread pool of all other requests.
        found = await asyncio.to_thread(lambda: inspect(context=context).to_dict())
        names = [token_name(service.tokenizer, token) for token in tokens]
        return {"position": position, "tokens": tokens, "texts": names} | found

    @router.post("/v1/inspect")
    async def inspect(body: schema.InspectBody, client: Request) -> JSON:
        """Look inside: surprisal, codes and division of attention for every token of a text."""
        nonlocal n_requests
        if n_requests >= MAX_INSPECTIONS:
            raise QueueFullError(f"{n_requests} inspections are waiting")
        n_requests += 1
        try:
            async with turn:
                await check_connected(client)
                return await work(body, client)
        finally:
            n_requests -= 1

    return router
