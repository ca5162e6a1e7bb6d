"""Prompts: how texts, tokens, messages and documents of requests are checked and converted."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi.concurrency import run_in_threadpool

from transformer_vq.data.chat_template import compile_chat_template
from transformer_vq.data.tokenizers import CHUNK_CHARS, divide
from transformer_vq.serve.requests import Start
from transformer_vq.serve.schema import APIError, ChatBody, CompletionBody
from transformer_vq.serve.service import Service, check_connected

MAX_TEXTS = 256  # per request: prompts times n
MAX_SCORES = 100_000  # log probabilities of prompts per request; each takes about 700 bytes
MAX_CHARACTERS = 64  # per token of the limit; longer texts are rejected before they are encoded


class PromptReader:
    """Reads the prompts of one HTTP request; `open` comes first.

    limit: of the tokens of all prompts together. All methods raise APIError for what is invalid or
    too long, and if the client has disconnected.
    """

    def __init__(self, service: Service, client: HTTPRequest, limit: int | None = None) -> None:
        self._service, self._client = service, client
        self._tokenizer = service.tokenizer
        self._bos: list[int] = []
        self._limit = service.limits.prompt_tokens if limit is None else limit
        self._n_tokens = 0

    async def open(self, context: str | None) -> Start | None:
        """Return the stored context that prompts continue; without one, texts start with bos."""
        if context is not None:
            return await run_in_threadpool(self._service.contexts.open, context)
        self._bos = [self._tokenizer.bos]
        return None

    async def completions(self, body: CompletionBody) -> list[tuple[Sequence[int], str]]:
        """Return the tokens of all prompts, and the texts to echo."""
        given = body.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
            given = [given]
        if not isinstance(given, list) or not given:
            message = "give a text, a list of texts, a list of token ids, or a list of these"
            raise APIError(400, f"prompt: {message}", "prompt")
        self.check_number(len(given) * body.n)
        found: list[tuple[Sequence[int], str]] = []
        for item in given:
            if isinstance(item, str):
                tokens = await self._text(item, "prompt")
                found.append((tokens, item if body.echo else ""))
            elif isinstance(item, list) and item:  # with bos if the client wants it
                text = await run_in_threadpool(self._check_tokens, item, "prompt", body.echo)
                found.append((item, text))
            else:
                message = "prompt: every entry must be a text or a list of token ids"
                raise APIError(400, message, "prompt")
        if body.echo and body.logprobs is not None:
            check_scores(self._n_tokens * body.n, body.logprobs)
        return found

    async def document(self, text: str, tokens: list[int] | None) -> Sequence[int]:
        """Return the tokens of a document: those of a text, or tokens to use as they are."""
        if tokens is None:
            tokens = await self._text(text, "text")
        else:
            await run_in_threadpool(self._check_tokens, tokens, "text")
        if not tokens:
            raise APIError(400, "the text is empty; give text or tokens")
        return tokens

    async def messages(self, body: ChatBody) -> Sequence[int]:
        """Return the prompt of a conversation.

        Names of special tokens are tokens in the template, and text in the messages.
        """
        template = self._service.chat_template
        if template is None:
            message = "this model has no chat template; use /v1/completions"
            raise APIError(400, message, code="no_chat_template")
        self.check_number(body.n)
        special: dict[str, int] = getattr(self._tokenizer, "special_tokens", {})
        names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
        # Divides names in messages while they are rendered; unknown to clients, and without
        # letters, which a template may change.
        mark = str(secrets.randbits(128))

        def divided(value: Any) -> Any:
            if isinstance(value, dict):
                return {divided(key): divided(x) for key, x in value.items()}
            if isinstance(value, list):
                return [divided(x) for x in value]
            if isinstance(value, str) and names:
                return re.sub(names, lambda name: mark.join(name[0]) + mark, value)
            return value

        def render() -> str:
            named: dict[int | None, str] = {token: name for name, token in special.items()}
            try:
                return compile_chat_template(template).render(
                    messages=[divided(message.plain()) for message in body.messages],
                    add_generation_prompt=True,
                    bos_token=named.get(self._tokenizer.bos, ""),
                    eos_token=named.get(self._tokenizer.eod, ""),
                )
            except Exception as error:  # whatever a template does with unexpected fields
                reason = " ".join(str(error).split())
                message = f"messages: the chat template rejects them: {reason:.200}"
                raise APIError(400, message, "messages") from error

        text = await run_in_threadpool(render)
        tokens: list[int] = []
        for part in re.split(f"({names})", text) if names else [text]:
            if part in special:
                tokens.append(special[part])
            elif part:
                tokens += await self._encode(part.replace(mark, ""), "messages")
        prompt = tokens if tokens[:1] == [self._tokenizer.bos] else self._bos + tokens
        self._count(len(prompt) - self._n_tokens, "messages")  # special tokens
        return prompt

    def check_number(self, n: int) -> None:
        """Raise APIError if a request asks for more texts than can ever be queued."""
        limit = min(MAX_TEXTS, self._service.engine.max_waiting)
        if n > limit:
            message = f"{n} texts are requested (prompts times n), but at most {limit} are accepted"
            raise APIError(400, message, "n")

    async def _text(self, text: str, param: str) -> list[int]:
        """Return the tokens of a text, after bos unless it continues a context."""
        self._count(len(self._bos), param)
        return self._bos + await self._encode(text, param)

    async def _encode(self, text: str, param: str) -> list[int]:
        """Return the tokens of a text, without bos; long ones don't block other requests."""

        def encode(part: str) -> list[int]:
            part.encode()
            found: list[int] = self._tokenizer.encode_batch([part])[0].tolist()
            return found

        if len(text) > MAX_CHARACTERS * self._limit:
            self._count(self._limit + 1, param)
        cuts, parts, tokens = self._tokenizer.cuts, [text], list[int]()
        if cuts is not None and len(text) > CHUNK_CHARS:
            parts = await run_in_threadpool(divide, text, CHUNK_CHARS, cuts)
        try:
            for part in parts:
                await check_connected(self._client)
                found = await run_in_threadpool(encode, part)
                self._count(len(found), param)
                tokens += found
        except UnicodeEncodeError:
            message = f"{param}: is not valid Unicode (a lone surrogate)"
            raise APIError(400, message, param) from None
        return tokens

    def _check_tokens(self, tokens: list[Any], param: str, is_decoded: bool = False) -> str:
        """Check the tokens of a prompt; return their text if it is wanted."""
        self._count(len(tokens), param)
        if any(type(x) is not int for x in tokens):
            message = f"{param}: every entry must be a text or a list of token ids"
            raise APIError(400, message, param)
        last = self._service.engine.model.config.vocab_size - 1
        if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
            message = f"{param}: token ids must be from 0 to {last}"
            raise APIError(400, message, param)
        return self._tokenizer.decode(tokens).decode(errors="replace") if is_decoded else ""

    def _count(self, n: int, param: str) -> None:
        """Count tokens of prompts; raise APIError above the limit."""
        self._n_tokens += n
        if self._n_tokens > self._limit:
            message = f"{param}: has more than {self._limit:,} tokens; send a shorter text"
            raise APIError(413, message, param, "prompt_too_long")


def check_scores(n_tokens: int, n_top: int) -> None:
    """Raise APIError if too many log probabilities of prompts are requested."""
    if n_tokens * (1 + n_top) > MAX_SCORES:
        message = (
            f"echo with logprobs={n_top}: the prompts have {n_tokens:,} tokens, but at most "
            f"{MAX_SCORES // (1 + n_top):,} are scored; send fewer at a time"
        )
        raise APIError(400, message, "logprobs")
