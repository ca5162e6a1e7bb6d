"""What the engine is asked for, and what it reports back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from transformer_vq.generation.prefill import Context
from transformer_vq.generation.sampling import Sampling

Reason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Why a request ended. stop: the model ended the document, or a stop string occurred."""


@dataclass(frozen=True)
class Start:
    """A context to continue from, and what identifies it."""

    context: Context
    digest: bytes
    n_tokens: int = 0


@dataclass(frozen=True)
class Request:
    """One text to generate.

    The result depends on nothing else: not on other requests, nor on when it is processed.
    """

    prompt: Sequence[int]
    """Tokens; they start with the tokenizer's bos unless they continue `start`."""
    max_new_tokens: int
    """0 only reads the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    sample: int = 0
    """Number of this text among the samples of a prompt; they share the seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_at_end: bool = True
    """Whether the end-of-document token ends the text."""
    n_logprobs: int | None = None
    """Report the log probability of each token, and this many of the most likely ones."""
    scores_prompt: bool = False
    """Report log probabilities of the prompt too."""
    keeps_context: bool = False
    """Return the context after the prompt."""
    start: Start | None = None
    deadline: float | None = None
    """Time of `time.monotonic` at which the request ends with reason "timeout"."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log probability of a token, and the most likely tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """Event: the prompt is processed and the first token follows.

    scores: one entry per token of the prompt, None for the first, if they were asked for.
    """

    scores: tuple[TokenScore | None, ...] = ()


@dataclass(frozen=True)
class NewToken:
    """Event: a token, and the text that is final with it."""

    token: int
    text: str
    score: TokenScore | None = None


@dataclass(frozen=True)
class Finished:
    """Event: the last one of every request."""

    reason: Reason
    text: str
    """The rest of the text, which was held back as the possible start of a stop string."""
    n_prompt: int
    n_cached: int
    """Tokens of the prompt that were not processed again."""
    n_new: int
    context: Context | None = None
    error: str | None = None


Event = PromptRead | NewToken | Finished
