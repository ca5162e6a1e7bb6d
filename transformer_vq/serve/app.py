"""The HTTP server: routes of the OpenAI API, stored contexts, metrics and the page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from transformer_vq.serve.chat import chat_router
from transformer_vq.serve.completions import completions_router
from transformer_vq.serve.docs import add_docs
from transformer_vq.serve.documents import contexts_router
from transformer_vq.serve.errors import add_error_handlers
from transformer_vq.serve.guard import Guard
from transformer_vq.serve.inspection import inspection_router
from transformer_vq.serve.metrics import registry_of
from transformer_vq.serve.service import Service

PAGE = Path(__file__).parent / "page"


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
        docs_url=None,  # FastAPI's own loads scripts from another server
        redoc_url=None,
    )
    app.add_middleware(
        Guard, api_key=service.api_key, max_bytes=service.limits.body_bytes, hosts=hosts
    )
    add_error_handlers(app)
    add_docs(app)
    _add_information(app, service)
    for router in (completions_router, chat_router, contexts_router, inspection_router):
        app.include_router(router(service))
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app


def _add_information(app: FastAPI, service: Service) -> None:
    engine, registry = service.engine, registry_of(service)
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

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> FileResponse:
        return FileResponse(PAGE / "icon.svg", media_type="image/svg+xml")

    @app.get("/health", tags=["information"])
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

    @app.get("/metrics", tags=["information"])
    async def metrics() -> Response:
        """Return counters and gauges for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", tags=["information"])
    async def models() -> dict[str, Any]:
        """List the one model of this server."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", tags=["information"])
    async def one_model(name: str) -> dict[str, Any]:
        """Describe the model."""
        service.check_model(name)
        return model
