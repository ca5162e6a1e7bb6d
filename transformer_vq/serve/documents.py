"""Routes of /v1/contexts: read a document once, then continue from it, branch it, or move it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

from fastapi import APIRouter, Query
from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from transformer_vq.serve.bodies import check_values
from transformer_vq.serve.contexts import StoredContext
from transformer_vq.serve.errors import APIError
from transformer_vq.serve.requests import Finished
from transformer_vq.serve.schema import MAX_NAME, ContextBody, GenerationBody
from transformer_vq.serve.service import Service, check_finished

CHUNK_BYTES = 2**18  # of a download
JSON_BODY = {"content": {"application/json": {"schema": ContextBody.model_json_schema()}}}
SNAPSHOT_TYPES = ("application/octet-stream", "application/x-safetensors")


def contexts_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter(prefix="/v1/contexts", tags=["contexts"])

    # Functions that are not async run in a thread, so that slow disks do not delay other requests.

    @router.get("")
    def list_contexts() -> dict[str, Any]:
        """List all stored contexts, the newest first."""
        data = [entry.plain() for entry in service.contexts.list()]
        return {"object": "list", "data": data}

    @router.post("", status_code=201)
    async def create_context(
        client: HTTPRequest, name: Annotated[str, Query(max_length=MAX_NAME)] = ""
    ) -> dict[str, Any]:
        """Read a document and store the context after it.

        The body is JSON with `text` or `tokens`, plain text (text/plain), or a context that was
        downloaded before (application/octet-stream).
        """
        kind = client.headers.get("content-type", "").partition(";")[0].strip().lower()
        content = await client.body()
        if kind in SNAPSHOT_TYPES:
            return (await run_in_threadpool(service.contexts.upload, content, name)).plain()
        if kind != "text/plain":
            check_values(content, service.limits.prompt_tokens)
        body = await run_in_threadpool(parse_body, content, name if kind == "text/plain" else None)
        return (await _read(service, body, client, None)).plain()

    @router.get("/{context}")
    async def get_context(context: str) -> dict[str, Any]:
        """Describe a stored context."""
        return service.contexts.get(context).plain()

    @router.post("/{context}/branch", status_code=201, openapi_extra={"requestBody": JSON_BODY})
    async def branch_context(context: str, client: HTTPRequest) -> dict[str, Any]:
        """Append text to a context and store the result as another one.

        The body is JSON with `text` or `tokens`.
        """
        parent = service.contexts.get(context)
        content = await client.body()
        check_values(content, service.limits.prompt_tokens)
        body = await run_in_threadpool(parse_body, content)
        return (await _read(service, body, client, parent)).plain()

    @router.get("/{context}/content", response_class=StreamingResponse)
    def download_context(context: str) -> StreamingResponse:
        """Download a context as a safetensors file, for `load_context` or another server."""
        file = service.contexts.content(context)
        headers = {
            "Content-Length": str(os.fstat(file.fileno()).st_size),
            "Content-Disposition": f'attachment; filename="{context}.safetensors"',
        }
        return StreamingResponse(_chunks(file), headers=headers, media_type=SNAPSHOT_TYPES[0])

    @router.delete("/{context}")
    def delete_context(context: str) -> dict[str, Any]:
        """Delete a stored context."""
        service.contexts.delete(context)
        return {"id": context, "object": "context", "deleted": True}

    return router


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def parse_body(content: bytes, name_of_text: str | None = None) -> ContextBody:
    """Return a JSON body, or a plain text with its name; raise APIError if it is invalid."""
    try:
        if name_of_text is not None:
            return ContextBody(text=content.decode(), name=name_of_text)
        return ContextBody.model_validate_json(content)
    except UnicodeDecodeError:
        raise APIError(400, "the document is not valid UTF-8") from None
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
        tokens = await service.encode(body.text or "", "text", client)
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
