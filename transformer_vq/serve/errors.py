"""Errors of the HTTP server, in the format of the OpenAI API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from transformer_vq.errors import UserError
from transformer_vq.serve.engine import EngineStoppedError, QueueFullError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
RETRY_SECONDS = 1  # a slot is free again within seconds unless all texts are very long


class APIError(Exception):
    """A request that cannot be answered. message: one sentence; param: the field it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        kind = KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the response; clients may repeat a request that came at a bad time."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with the same kind of JSON object."""

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        places = [str(x) for x in first["loc"] if x not in ("body", "path", "query")]
        if first["type"] == "json_invalid":
            return APIError(400, "the body is not valid JSON").response()
        param = ".".join(places) or None
        message = _sentence(first)
        return APIError(400, f"{param}: {message}" if param else message, param).response()

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"{request.method} {request.url.path} does not exist; see /docs"
        return APIError(error.status_code, message).response()

    @app.exception_handler(UserError)
    async def user_error(request: Request, error: UserError) -> JSONResponse:
        return APIError(400, str(error)).response()

    @app.exception_handler(QueueFullError)
    async def queue_full(request: Request, error: QueueFullError) -> JSONResponse:
        message = f"the server is busy: {error}; try again later"
        return APIError(429, message, code="queue_full").response()

    @app.exception_handler(EngineStoppedError)
    async def stopped(request: Request, error: EngineStoppedError) -> JSONResponse:
        return APIError(503, str(error), code="shutting_down").response()

    @app.exception_handler(Exception)
    async def internal(request: Request, error: Exception) -> JSONResponse:
        return APIError(500, "internal error; the log of the server has details").response()


def _sentence(error: dict[str, Any]) -> str:
    """Return one validation error in plain words."""
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return "is not a known field; remove it"
    message: str = error["msg"]
    return message.removeprefix("Value error, ").removeprefix("Input ")
