"""Sampling: read a prompt in segments, then go on token by token from the same state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from transformer_vq.nn.model import ModelState, TransformerVQ

PREFILL = 2048  # tokens of the prompt read at a time; memory does not depend on its length


def generate(
    model: TransformerVQ,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> list[int]:
    """New tokens that follow the prompt; see `stream`."""
    return list(stream(model, prompt_tokens, max_new_tokens, temperature, top_p, top_k, seed))


def stream(
    model: TransformerVQ,
    prompt_tokens: Sequence[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
) -> Iterator[int]:
    """Yield new tokens one by one. temperature 0 takes the likeliest.

    The prompt begins with what stands before a document (`bos` of the tokenizer) unless it goes on
    in the middle of one.
    """
    if not prompt_tokens:
        raise ValueError("the prompt has no tokens; begin with the tokenizer's bos")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must not be negative")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: must be at least 1, or None")
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        logits, state = _read(model, torch.tensor(prompt_tokens, device=device))
        for _ in range(max_new_tokens):
            token = _choose(logits, temperature, top_p, top_k, generator)
            yield int(token)
            with torch.no_grad():
                output = model(token.view(1, 1), state)
            logits, state = output.logits[0, -1], output.state
    finally:
        model.train(was_training)


@torch.no_grad()
def _read(model: TransformerVQ, prompt: Tensor) -> tuple[Tensor, ModelState]:
    """The logits after the prompt, [vocab_size], and the state."""
    state = model.init_state(1)
    for segment in prompt.split(PREFILL):
        output = model(segment.unsqueeze(0), state)
        state = output.state
    return output.logits[0, -1], state


def _choose(
    logits: Tensor, temperature: float, top_p: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    """One token from the scores of all: the likeliest, or a draw from those that are left."""
    if temperature == 0:
        return logits.argmax()
    p, order = (logits / temperature).softmax(-1).sort(descending=True)
    before = p.cumsum(-1) - p  # mass of the likelier ones: the likeliest is always left
    p = p.masked_fill(before >= top_p, 0.0)
    if top_k is not None:
        p[top_k:] = 0.0
    return order[torch.multinomial(p, 1, generator=generator)]
