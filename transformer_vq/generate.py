"""Generation: read a prompt of any length in constant memory, then go on token by token.

    context = read_prompts(model, [prompt])            # logits after the prompt, and the state
    for tokens in stream(model, context, 100, Sampling(top_p=0.9), seed=0):
        ...                                    # one token per row, as they come

`generate` does both for a single prompt.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from transformer_vq.errors import UserError
from transformer_vq.nn.decoder import Decoder
from transformer_vq.nn.device import evaluating
from transformer_vq.nn.model import ModelState, TransformerVQ

SEGMENT = 2048  # tokens of a prompt read at a time: memory does not depend on its length


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the scores of all."""

    temperature: float = 1.0
    """Below 1 likely tokens become likelier; 0 always takes the likeliest."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability (nucleus sampling)."""
    top_k: int | None = None
    """Keep at most so many of the likeliest tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature}: must be a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: must be at least 1, or None")

    def choose(self, logits: Tensor, chance: Tensor) -> Tensor:
        """logits: [b, vocab_size], chance: [b] numbers from 0 to 1 -> tokens: [b]."""
        if self.temperature < 1e-30:  # the quotient would not be finite
            return logits.argmax(-1)
        p, order = (logits / self.temperature).softmax(-1).sort(descending=True, stable=True)
        before = p.cumsum(-1) - p  # mass of the likelier ones: the likeliest is always kept
        p = p.masked_fill(before >= self.top_p, 0.0)
        if self.top_k is not None:
            p[..., min(self.top_k, p.shape[-1]) :] = 0.0
        cumulative = p.cumsum(-1)
        drawn = (cumulative <= (chance.to(p) * cumulative[..., -1]).unsqueeze(-1)).sum(-1)
        return order.gather(-1, drawn.clamp(max=p.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Context:
    """What a model has read: logits of the next token, [b, vocab_size], and the state."""

    logits: Tensor
    state: ModelState

    def repeat(self, n: int) -> Context:
        """n copies of every row, to draw several samples from one prompt."""
        rows = torch.arange(len(self.logits), device=self.logits.device).repeat_interleave(n)
        return Context(self.logits.index_select(0, rows), self.state.select(rows))


def read_prompts(
    model: TransformerVQ,
    prompts: Sequence[Sequence[int]],
    context: Context | None = None,
    *,
    advance: Callable[[int], None] = lambda n: None,
) -> Context:
    """Read a prompt per row, in segments; prompts may differ in length.

    A prompt begins with what stands before a document (the tokenizer's `bos`), unless `context`
    says what was read before it.
    """
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise UserError("a prompt has no tokens; begin with the tokenizer's bos")
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    state = model.init_state(len(prompts)) if context is None else context.state
    with evaluating(model):
        for start in range(0, longest, SEGMENT):
            stop = min(start + SEGMENT, longest)
            tokens, valid = _segment(prompts, start, stop, longest)
            whole = bool(valid.all())
            output = model(tokens.to(device), state, None if whole else valid.to(device))
            state = output.state
            advance(stop - start)
    return Context(output.logits[:, -1], state)


def _segment(
    prompts: Sequence[Sequence[int]], start: int, stop: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Tokens start to stop of all prompts, shorter ones padded before their first token."""
    tokens = torch.zeros(len(prompts), stop - start, dtype=torch.int64)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        missing = longest - len(prompt)
        part = prompt[max(start - missing, 0) : max(stop - missing, 0)]
        if len(part) > 0:
            tokens[row, -len(part) :] = torch.as_tensor(part)
            valid[row, -len(part) :] = True
    return tokens, valid


def stream(
    model: TransformerVQ,
    context: Context,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int | None = None,
    stop_tokens: Sequence[int] = (),
    *,
    compiled: bool = False,
) -> Iterator[list[int | None]]:
    """Yield the next token of every row; None for rows that have come to a stop token.

    What row i draws depends on the seed and on i alone, whatever the other rows are.
    compiled: by torch.compile, which takes half a minute and then decodes faster.
    """
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
    if compiled and model.config.attention == "full":
        raise UserError("full attention grows with every token and cannot be compiled")
    sampling = sampling or Sampling()
    return _stream(model, context, max_new_tokens, sampling, seed, set(stop_tokens), compiled)


def _stream(
    model: TransformerVQ,
    context: Context,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int | None,
    stop_tokens: set[int],
    compiled: bool,
) -> Iterator[list[int | None]]:
    logits = context.logits
    seed = secrets.randbits(63) if seed is None else seed
    dice = [np.random.default_rng([seed, row]) for row in range(len(logits))]
    step = Decoder(model, context.state, room=max_new_tokens).step
    if compiled:
        step = torch.compile(step, fullgraph=True)
    done = [False] * len(logits)
    for number in range(max_new_tokens):
        chance = torch.tensor([die.random() for die in dice], dtype=torch.float64)
        tokens = sampling.choose(logits, chance.to(logits.device, logits.dtype))
        found = tokens.tolist()
        yield [None if over else token for token, over in zip(found, done, strict=True)]
        done = [over or token in stop_tokens for token, over in zip(found, done, strict=True)]
        if all(done) or number + 1 == max_new_tokens:
            return
        logits = step(tokens)


def generate(
    model: TransformerVQ,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    stop_tokens: Sequence[int] = (),
    *,
    compiled: bool = False,
) -> list[int]:
    """New tokens that follow a prompt, a stop token included."""
    sampling = Sampling(temperature, top_p, top_k)
    context = read_prompts(model, [prompt_tokens])
    steps = stream(model, context, max_new_tokens, sampling, seed, stop_tokens, compiled=compiled)
    return [token for (token,) in steps if token is not None]
