"""Decode token by token after a prefill.

    context = prefill(model, [prompt])         # logits after the prompt, and the state
    for tokens in stream(model, context, 100, Sampling(top_p=0.9), seed=0):
        ...                                    # one token per row and step

`generate` does both for a single prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from transformer_vq.errors import UserError
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn.model import TransformerVQ


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
    """Yield the next token of every row; None for rows that have reached a stop token.

    The tokens of row i depend on the seed and on i, never on the other rows. compiled: use
    torch.compile, which takes half a minute and then decodes faster.
    """
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
    if compiled and model.config.attention == "full":
        raise UserError("compiled=True: the state of full attention grows; use attention='vq'")
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
    generators = [np.random.default_rng([seed, row]) for row in range(len(logits))]
    step = Decoder(model, context.state, room=max_new_tokens).step
    if compiled:
        step = torch.compile(step, fullgraph=True)
    done = [False] * len(logits)
    for number in range(max_new_tokens):
        uniform = torch.tensor([rng.random() for rng in generators], dtype=torch.float64)
        tokens = sampling.choose(logits, uniform.to(logits.device, logits.dtype))
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
    """Return the new tokens that follow a prompt, including a stop token."""
    sampling = Sampling(temperature, top_p, top_k)
    context = prefill(model, [prompt_tokens])
    steps = stream(model, context, max_new_tokens, sampling, seed, stop_tokens, compiled=compiled)
    return [token for (token,) in steps if token is not None]
