"""What goes over the wire: errors, and the bodies of requests.

Bodies have the fields of the OpenAI API that a language model like this can honor. Fields that
would change the result but are not supported are rejected, not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

MAX_MESSAGES = 10_000
MAX_SAMPLES = 128
MAX_STOP = 16
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_NAME = 200  # characters
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


class APIError(HTTPException):
    """A request that cannot be answered. message: one sentence; param: the field it is about."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message)
        kind = KINDS.get(status, "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """Return the response; clients may repeat a request that came at a bad time."""
        headers = {"Retry-After": str(RETRY_SECONDS)} if self.status_code in (429, 503) else {}
        if self.status_code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body, self.status_code, headers)


def invalid_field(error: Mapping[str, Any]) -> APIError:
    """Return the answer to an error of pydantic, in plain words."""
    param = ".".join(str(x) for x in error["loc"] if x not in ("body", "path", "query")) or None
    known = {"missing": "is missing", "extra_forbidden": "is not a known field; remove it"}
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    message = known.get(error["type"], message)
    return APIError(400, f"{param}: {message}" if param else message, param)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value or []


Word = Annotated[str, Field(min_length=1)]
Stop = Annotated[list[Word], Field(max_length=MAX_STOP), BeforeValidator(_as_list)]
"""Strings that end a text; a single one need not be in a list."""


class Body(BaseModel):
    """A JSON object whose fields are all known, with the types as given."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted for compatibility; nothing is obfuscated."""


class GenerationBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Not part of the OpenAI API: sample from the k most likely tokens only."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stop: Stop = []
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    context: str | None = None
    """Not part of the OpenAI API: id of a stored context that the prompt continues."""
    user: str | None = None
    """Accepted and not used."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Any = None

    @model_validator(mode="after")
    def _check_options(self) -> GenerationBody:
        for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported; leave it out")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given, but stream is not true")
        return self

    @property
    def n_new_tokens(self) -> int | None:
        """The maximum number of tokens to generate, if it is given."""
        return getattr(self, "max_completion_tokens", None) or self.max_tokens


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Any = ""
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False


class ChatPart(Body):
    """A part of a message; only text."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message; fields that a template may use are kept."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ChatPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message for the template, with its content as one text."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        role = "system" if self.role == "developer" else self.role
        return self.model_dump(exclude_unset=True) | {"role": role, "content": text}


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given, but logprobs is not true")
        return self


class ContextBody(Body):
    """Body of POST /v1/contexts and of a branch: a document to read."""

    text: str | None = None
    tokens: list[Any] | None = None
    name: Annotated[str, Field(max_length=MAX_NAME)] = ""

    @model_validator(mode="after")
    def _check_one(self) -> ContextBody:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self


class InspectBody(Body):
    """Body of POST /v1/inspect: what to look inside at."""

    text: str = ""
    tokens: list[Any] | None = None
    context: str | None = None
    """Id of a stored context that the text continues."""
    n_codes: Annotated[int, Field(ge=1, le=32)] = 5
