"""Prefill: run prompts of any length through a model, in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from transformer_vq.device import evaluating, to_device
from transformer_vq.errors import UserError
from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ

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

    Start each prompt with the tokenizer's `bos` token, unless it continues `context`. `advance`
    receives the number of tokens processed.
    """
    check_prompts(prompts)
    device = next(model.parameters()).device
    longest = max(map(len, prompts))

    def run(start: int, stop: int, state: ModelState, n_last: int) -> tuple[Tensor, ModelState]:
        tokens = torch.zeros(len(prompts), stop - start, dtype=torch.int64)
        valid = torch.zeros_like(tokens, dtype=torch.bool)
        for row, prompt in enumerate(prompts):  # padded on the left
            missing = longest - len(prompt)
            part = prompt[max(start - missing, 0) : max(stop - missing, 0)]
            if len(part) > 0:
                tokens[row, -len(part) :] = torch.as_tensor(part)
                valid[row, -len(part) :] = True
        if device.type != "cpu":  # while they are on the host; the model checks them on a CPU
            model.check_tokens(tokens)
        known = None if valid.all() else to_device(valid, device)
        output: ModelOutput = model(to_device(tokens, device), state, known, n_logits=n_last)
        return output.logits, output.state

    state = model.init_state(len(prompts)) if context is None else context.state
    with evaluating(model):
        logits, state = run_segments(run, longest, state, n_last=1, advance=advance)
    return Context(logits[:, -1], state)


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Raise UserError for empty prompts, and for other things than token ids."""
    if not prompts or any(len(prompt) == 0 for prompt in prompts):
        raise UserError("a prompt has no tokens; start it with the tokenizer's bos")
    if not all(isinstance(prompt[0], Integral | Tensor) for prompt in prompts):
        raise UserError("a prompt is a sequence of token ids; use tokenizer.encode(text) for text")


def segments(seq_len: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the first column of each segment and the one after it; here prompts are cut."""
    for begin in range(start, seq_len, SEGMENT_LEN):
        yield begin, min(begin + SEGMENT_LEN, seq_len)


def run_segments(
    run: Callable[[int, int, ModelState, int], tuple[Tensor, ModelState]],
    seq_len: int,
    state: ModelState,
    *,
    n_last: int,
    advance: Callable[[int], None] = lambda n: None,
) -> tuple[Tensor, ModelState]:
    """Run a long input through a model in segments.

    run(start, stop, state, n) processes these columns and returns the output of the last n of them
    and the next state. Return the outputs of the last `n_last` columns, and the last state: the
    outputs of a long prompt could fill the memory.
    """
    outputs: list[Tensor] = []
    for start, stop in segments(seq_len):
        n_wanted = max(stop - max(start, seq_len - n_last), 0)
        output, state = run(start, stop, state, n_wanted)
        if n_wanted > 0:
            outputs.append(output)
        advance(stop - start)
    return torch.cat(outputs, dim=1), state
