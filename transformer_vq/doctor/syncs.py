"""Count how often the host waits for the GPU in a training step and in decoding."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import transformer_vq
from transformer_vq.config import OptimConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.doctor.findings import Syncs, explain
from transformer_vq.doctor.models import make_model, random_tokens
from transformer_vq.doctor.samples import Sizes
from transformer_vq.generation.decoder import Decoder
from transformer_vq.training.step import Trainer

NEEDS_CUDA = "needs CUDA"
SIGN = "synchronizing CUDA operation"  # in the warnings of PyTorch
N_TOKENS = 8
PACKAGE = Path(transformer_vq.__file__).parent


def count_syncs(sizes: Sizes, device: torch.device) -> Iterator[Callable[[], Syncs]]:
    """Yield a function per kind of work that counts its syncs."""
    for what, prepare in (
        ("one training step", training_step),
        (f"decoding {N_TOKENS} tokens", decoding),
    ):
        yield lambda what=what, prepare=prepare: _count(  # type: ignore[misc]
            what, lambda: prepare(sizes, device), device
        )


def _count(what: str, prepare: Callable[[], Callable[[], object]], device: torch.device) -> Syncs:
    if device.type != "cuda":
        return Syncs(what, None, note=f"skipped: {NEEDS_CUDA}")
    try:
        work = prepare()
        work()  # a warm-up: the first call initializes libraries
        torch.cuda.synchronize(device)
        with counting() as found:
            work()
    except Exception as error:
        status, note = explain(error)
        return Syncs(what, None, note=note, failed=status == "FAILED")
    return Syncs(what, sum(found.values()), dict(found.most_common()))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the syncs in the context by the line that caused them."""
    found: Counter[str] = Counter()

    def note(message: Warning | str, category: Any, *_: Any, **__: Any) -> None:
        if SIGN in str(message):
            found[_place()] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _place() -> str:
    """Return the innermost line of this package on the stack, outside the doctor.

    The backward pass of PyTorch's own operations runs in a thread without Python code.
    """
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "doctor"):
            return f"{path.relative_to(PACKAGE.parent).as_posix()}:{frame.lineno}"
    return "outside of transformer_vq"


def training_step(sizes: Sizes, device: torch.device) -> Callable[[], object]:
    """Return a training step as in `tvq train`."""
    model = sizes.model("shga")
    n = sizes.seq_len // sizes.block_len * sizes.block_len
    train = TrainConfig(batch_size=sizes.batch_size, seq_len=n, backprop_len=n)
    trainer = Trainer(make_model(model), RunConfig(model, optim=OptimConfig(), train=train), device)
    tokens = random_tokens(model, sizes)[:, :n]
    batch = Batch(tokens, tokens.roll(-1, dims=1), torch.arange(n).expand(tokens.shape))
    return lambda: trainer.step(batch, 0, begins=True)


def decoding(sizes: Sizes, device: torch.device) -> Callable[[], object]:
    """Return a function that decodes a few tokens, each the most likely one."""
    model = make_model(sizes.model("shga")).to(device).eval()
    decoder = Decoder(model, model.init_state(sizes.batch_size))
    start = torch.zeros(sizes.batch_size, dtype=torch.int64, device=device)

    def run() -> None:
        tokens = start
        for _ in range(N_TOKENS):
            tokens = decoder.step(tokens).argmax(-1)

    return run
