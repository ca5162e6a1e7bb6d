"""Decode token by token after a prefill.

    context = prefill(model, [prompt])         # logits after the prompt, and the state
    for tokens in stream(model, context, 100, Sampling(top_p=0.9), seed=0):
        ...                                    # one token per row and step

`generate` does both for a single prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from transformer_vq.device import HostCopy, compile_decoding, to_device
from transformer_vq.errors import UserError
from transformer_vq.generation.decoder import Decoder
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.generation.sampling import NOT_FINITE, Sampling, mark_not_finite
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.nn.quantizer import NotFiniteError

CHUNK = 64  # number of steps whose random numbers are copied to the device together


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
    torch.compile, which takes half a minute and then decodes faster. Raises NotFiniteError at the
    first token without finite logits.
    """
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens}: must not be negative")
    if compiled and model.config.attention == "full":
        raise UserError("compiled=True: the state of full attention grows; use attention='vq'")
    seed = secrets.randbits(63) if seed is None else seed
    decoder = Decoder(model, context.state, max_new_tokens)
    step: Callable[[Tensor], Tensor] = decoder.step
    if compiled:
        step = compile_decoding(step, context.logits.device, decoder.tensors())
    uniform = _uniform_numbers(seed, context.logits, max_new_tokens)
    choose, is_ahead = (sampling or Sampling()).choose, runs_ahead(context.logits)

    def decode() -> Iterator[list[int | None]]:
        logits = context.logits
        tokens = choose(logits, next(uniform))
        done = [False] * len(tokens)
        for number in range(max_new_tokens):
            fetched = HostCopy(mark_not_finite(tokens, logits))
            is_last = number + 1 == max_new_tokens
            if is_ahead and not is_last:
                logits = step(tokens)
                tokens = choose(logits, next(uniform))
            found = list(zip(fetched.tolist(), done, strict=True))
            if any(token == NOT_FINITE and not over for token, over in found):
                raise NotFiniteError("the logits are NaN or infinite; check weights and codebooks")
            yield [None if over else token for token, over in found]
            done = [over or token in stop_tokens for token, over in found]
            if all(done) or is_last:
                return
            if not is_ahead:
                logits = step(tokens)
                tokens = choose(logits, next(uniform))

    return decode() if max_new_tokens else iter(())


def runs_ahead(logits: Tensor) -> bool:
    """Return whether the next step is launched before the tokens of the current one are read.

    So a GPU never waits for the host; the price is one step too many after the last stop token. On
    a CPU, every token would only be returned one step later.
    """
    return logits.device.type != "cpu"


def _uniform_numbers(seed: int, logits: Tensor, n: int) -> Iterator[Tensor]:
    """Yield n times a random number in [0, 1) for each row of logits, on their device.

    Row i has a generator of its own. Numbers are copied a chunk at a time.
    """
    generators = [np.random.default_rng([seed, row]) for row in range(len(logits))]
    for start in range(0, n, CHUNK):
        drawn = np.stack([rng.random(min(CHUNK, n - start)) for rng in generators], axis=1)
        yield from to_device(torch.from_numpy(drawn).to(logits.dtype), logits.device)


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
