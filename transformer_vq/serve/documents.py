"""Routes of /v1/contexts: read a document once, then continue from it, branch it, or move it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import ValidationError

from transformer_vq.serve.contexts import StoredContext
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Finished
from transformer_vq.serve.schema import ContextBody, GenerationBody
from transformer_vq.serve.service import Service, check_finished

SNAPSHOT_TYPES = ("application/octet-stream", "application/x-safetensors")


def contexts_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/contexts", tags=["contexts"])

    @router.get("")
    async def list_contexts() -> dict[str, Any]:
        """List all stored contexts, the newest first."""
        data = [entry.plain() for entry in service.contexts.list()]
        return {"object": "list", "data": data}

    @router.post("", status_code=201)
    async def create_context(client: HTTPRequest, name: str = "") -> dict[str, Any]:
        """Read a document and store the context after it.

        The body is JSON with `text` or `tokens`, plain text (text/plain), or a context that was
        downloaded before (application/octet-stream).
        """
        kind = client.headers.get("content-type", "").partition(";")[0].strip().lower()
        content = await client.body()
        if kind in SNAPSHOT_TYPES:
            return (await run_in_threadpool(service.contexts.upload, content, name)).plain()
        if kind == "text/plain":
            try:
                body = ContextBody(text=content.decode(), name=name)
            except UnicodeDecodeError:
                raise APIError(400, "the document is not valid UTF-8") from None
        else:
            body = parse_body(content)
        return (await _read(service, body, client, None)).plain()

    @router.get("/{context}")
    async def get_context(context: str) -> dict[str, Any]:
        """Describe a stored context."""
        return service.contexts.get(context).plain()

    @router.post("/{context}/branch", status_code=201)
    async def branch_context(
        context: str, body: ContextBody, client: HTTPRequest
    ) -> dict[str, Any]:
        """Append text to a context and store the result as another one."""
        return (await _read(service, body, client, service.contexts.get(context))).plain()

    @router.get("/{context}/content", response_class=FileResponse)
    async def download_context(context: str) -> FileResponse:
        """Download a context as a safetensors file, for `load_context` or another server."""
        path = service.contexts.content(context)
        return FileResponse(path, media_type=SNAPSHOT_TYPES[0], filename=f"{context}.safetensors")

    @router.delete("/{context}")
    async def delete_context(context: str) -> dict[str, Any]:
        """Delete a stored context."""
        service.contexts.delete(context)
        return {"id": context, "object": "context", "deleted": True}

    return router


def parse_body(content: bytes) -> ContextBody:
    """Return a JSON body; raise APIError with one sentence if it is not one."""
    try:
        return ContextBody.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(x) for x in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise APIError(400, f"{place}: {message}" if place else message, place or None) from None


async def _read(
    service: Service, body: ContextBody, client: HTTPRequest, parent: StoredContext | None
) -> StoredContext:
    """Prefill a document and store its context."""
    tokens = body.tokens
    if tokens is None:
        tokens = await service.encode(body.text or "", "text")
        if parent is None:
            tokens = [service.tokenizer.bos, *tokens]
    service.check_tokens(tokens, "text" if body.tokens is None else "tokens")
    if not tokens:
        raise APIError(400, "the document is empty; give text or tokens")
    start = await service.start(None if parent is None else parent.id)
    request = service.request(GenerationBody(), tokens, 0, start=start, keeps_context=True)
    async with service.events([request], client) as events:
        async for _, event in events:
            if isinstance(event, Finished):
                check_finished(event)
                assert event.context is not None
                n_tokens = len(tokens) + (0 if parent is None else parent.tokens)
                return await run_in_threadpool(
                    service.contexts.add,
                    event.context,
                    n_tokens,
                    body.name,
                    None if parent is None else parent.id,
                )
    raise APIError(400, "the client disconnected")
