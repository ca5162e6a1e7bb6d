"""Prefill: run prompts of any length through a model, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

import torch
from torch import Tensor

from transformer_vq.device import evaluating
from transformer_vq.errors import UserError
from transformer_vq.nn.model import ModelOutput, TransformerVQ
from transformer_vq.nn.state import ModelState

SEGMENT_LEN = 2048
"""Tokens per forward pass, so that memory does not depend on the length of a prompt."""


@dataclass(frozen=True)
class Context:
    """The result of a prefill: logits of the next token, [b, vocab_size], and the state."""

    logits: Tensor
    state: ModelState

    def repeat(self, n: int) -> Context:
        """Return n copies of every row, to draw several samples from one prompt."""
        rows = torch.arange(len(self.logits), device=self.logits.device).repeat_interleave(n)
        return Context(self.logits.index_select(0, rows), self.state.select(rows))


def prefill(
    model: TransformerVQ,
    prompts: Sequence[Sequence[int]],
    context: Context | None = None,
    *,
    advance: Callable[[int], None] = lambda n: None,
) -> Context:
    """Run one prompt per row through the model; prompts may differ in length.

    Start each prompt with the tokenizer's `bos` token, unless it continues `context`. `advance` is
    called with the number of tokens processed.
    """
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise UserError("a prompt has no tokens; start it with the tokenizer's bos")
    if not all(isinstance(prompt[0], Integral | Tensor) for prompt in prompts):
        raise UserError("a prompt is a sequence of token ids; use tokenizer.encode(text) for text")
    device = next(model.parameters()).device
    longest = max(map(len, prompts))

    def segment(start: int, stop: int) -> tuple[Tensor, Tensor | None, None]:
        tokens, valid = _left_padded(prompts, start, stop, longest)
        return tokens.to(device), None if valid.all() else valid.to(device), None

    state = model.init_state(len(prompts)) if context is None else context.state
    with evaluating(model):
        output = run_segments(model, segment, longest, state, n_last=1, advance=advance)
    return Context(output.logits[:, -1], output.state)


def run_segments(
    model: TransformerVQ,
    segment: Callable[[int, int], tuple[Tensor, Tensor | None, Tensor | None]],
    seq_len: int,
    state: ModelState | None,
    *,
    n_last: int,
    advance: Callable[[int], None] = lambda n: None,
) -> ModelOutput:
    """Run a long input through the model in segments; the one place where prompts are cut.

    segment(start, stop) returns tokens, valid and document_ids of these columns, on the device of
    the model. Return the last output, with logits for the last `n_last` columns only: the logits of
    a long prompt could fill the memory.
    """
    logits: list[Tensor] = []
    for start in range(0, seq_len, SEGMENT_LEN):
        stop = min(start + SEGMENT_LEN, seq_len)
        tokens, valid, document_ids = segment(start, stop)
        output: ModelOutput = model(tokens, state, valid, document_ids)
        state = output.state
        n_wanted = stop - max(start, seq_len - n_last)
        if n_wanted > 0:
            logits.append(output.logits[:, -n_wanted:])
        advance(stop - start)
    return replace(output, logits=torch.cat(logits, dim=1))


def _left_padded(
    prompts: Sequence[Sequence[int]], start: int, stop: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Return columns start to stop of all prompts, and which of them hold a token."""
    tokens = torch.zeros(len(prompts), stop - start, dtype=torch.int64)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        missing = longest - len(prompt)
        part = prompt[max(start - missing, 0) : max(stop - missing, 0)]
        if len(part) > 0:
            tokens[row, -len(part) :] = torch.as_tensor(part)
            valid[row, -len(part) :] = True
    return tokens, valid
