"""The HTTP application: all routes, errors, metrics, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from transformer_vq.errors import UserError
from transformer_vq.generation.inspection import inspect_tokens
from transformer_vq.serve.completions import completions_router, token_name
from transformer_vq.serve.contexts import contexts_router
from transformer_vq.serve.engine import EngineStoppedError, QueueFullError
from transformer_vq.serve.guard import OTHER_VALUES, BodyRoute, Guard
from transformer_vq.serve.schema import MAX_INSPECTED, APIError, InspectBody, invalid_field
from transformer_vq.serve.service import Service, check_connected

PAGE = Path(__file__).parent / "page"
MAX_CHARACTERS = 64 * MAX_INSPECTED  # longer texts are rejected before they are encoded
MAX_INSPECTIONS = 8  # being computed or waiting


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
        Guard,
        api_key=service.api_key,
        max_bytes=service.limits.body_bytes,
        max_values=service.limits.prompt_tokens + OTHER_VALUES,
        hosts=hosts,
    )
    accepted = ["*"] if hosts is None else sorted(hosts)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=accepted, www_redirect=False)
    _add_error_handlers(app)
    for router in (information_router, completions_router, contexts_router, inspection_router):
        app.include_router(router(service))
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error with the same kind of JSON object."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return APIError(400, "the body is not valid JSON").response()
        return invalid_field(first).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"{request.method} {request.scope['path']} does not exist; see /openapi.json"
        return APIError(error.status_code, message).response()

    def answer(error: Exception) -> APIError:
        match error:
            case APIError():
                return error
            case UserError():
                return APIError(400, str(error))
            case QueueFullError():
                message = f"the server is busy: {error}; try again later"
                return APIError(429, message, code="queue_full")
            case EngineStoppedError():
                return APIError(503, str(error), code="shutting_down")
        return APIError(500, "internal error; the log of the server has details")

    async def handle(request: Request, error: Exception) -> JSONResponse:
        return answer(error).response()

    for kind in (APIError, UserError, QueueFullError, EngineStoppedError, Exception):
        app.add_exception_handler(kind, handle)


def information_router(service: Service) -> APIRouter:
    """Return the page, and routes about the model and the server."""
    router = APIRouter(tags=["information"])
    engine, registry = service.engine, CollectorRegistry()
    registry.register(EngineCollector(service))
    state = engine.model.init_state(1)
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "transformer_vq",
        "parameters": sum(x.numel() for x in engine.model.parameters()),
        "vocab_size": service.vocab_size,
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
    async def health() -> dict[str, Any]:
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
        """Return counters and gauges for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model of this server."""
        return {"object": "list", "data": [model]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """Describe the model."""
        service.check_model(name)
        return model

    return router


class EngineCollector(Collector):
    """Reads the counters of the engine when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        engine = self._service.engine
        count = engine.counters
        for name, text, value in (
            ("tvq_prompt_tokens", "Tokens of prompts that were processed.", count.prompt_tokens),
            ("tvq_cached_tokens", "Reused tokens of prompts and contexts.", count.cached_tokens),
            ("tvq_generated_tokens", "Tokens that were generated.", count.new_tokens),
            ("tvq_decoding_steps", "Decoding steps of all slots.", count.steps),
        ):
            yield CounterMetricFamily(name, text, value)
        finished = CounterMetricFamily("tvq_requests", "Finished texts.", labels=["reason"])
        for reason, n in sorted(count.finished.items()):
            finished.add_metric([reason], n)
        yield finished
        for histogram in (count.queue_wait, count.first_token, count.next_token, count.duration):
            yield from histogram.collect()
        contexts = self._service.contexts.list()
        for name, text, value in (
            ("tvq_slots", "Maximum number of concurrent requests.", engine.n_slots),
            ("tvq_active_requests", "Requests that are being processed.", engine.n_active),
            ("tvq_waiting_requests", "Requests that wait for a slot.", engine.n_waiting),
            ("tvq_state_bytes", "Size of the state of one slot.", engine.state_bytes),
            ("tvq_prefix_bytes", "Stored prefixes in memory.", engine.prefixes.n_bytes),
            ("tvq_contexts", "Stored contexts.", len(contexts)),
            ("tvq_context_bytes", "Size of all stored contexts.", sum(x.bytes for x in contexts)),
        ):
            yield GaugeMetricFamily(name, text, value)


def inspection_router(service: Service) -> APIRouter:
    """Return the route /v1/inspect: one inspection at a time, and a short queue."""
    router = APIRouter(tags=["information"], route_class=BodyRoute)
    turn = asyncio.Lock()
    n_requests = 0

    @router.post("/v1/inspect")
    async def inspect(body: InspectBody, client: Request) -> dict[str, Any]:
        """Look inside: surprisal, codes and division of attention for every token of a text."""
        nonlocal n_requests
        if n_requests >= MAX_INSPECTIONS:
            raise QueueFullError(f"{n_requests} inspections are waiting")
        n_requests += 1
        try:
            async with turn:
                await check_connected(client)
                return await _inspect(service, body, client)
        finally:
            n_requests -= 1

    return router


async def _inspect(service: Service, body: InspectBody, client: Request) -> dict[str, Any]:
    def check_size(size: int, unit: str, limit: int) -> None:
        if size > limit:
            message = f"the text has {size:,} {unit}; at most {limit:,} are shown"
            raise APIError(413, message, "text")

    start = await service.open_context(body.context)
    check_size(len(body.text), "characters", MAX_CHARACTERS)
    tokens = await service.tokens_of(body.text, body.tokens, client, start)
    check_size(len(tokens), "tokens", MAX_INSPECTED)

    def work() -> dict[str, Any]:
        context = None if start is None else start.context
        found = inspect_tokens(service.engine.model, tokens, context=context, n_codes=body.n_codes)
        return found.to_dict()

    found = await asyncio.to_thread(work)  # not in the thread pool of all other requests
    names = [token_name(service.tokenizer, token) for token in tokens]
    position = 0 if start is None else start.n_tokens
    return {"position": position, "tokens": tokens, "texts": names} | found
