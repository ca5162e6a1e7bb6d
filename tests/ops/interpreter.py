"""Run Triton kernels in the interpreter, with detectors for faults that it does not report.

- The address of every load and store must belong to a tensor of the launch.
- Programs run in random order, and none may read or write what another one writes.

Import this module only where TRITON_INTERPRET=1 is set.
"""

import random
from contextlib import contextmanager
from itertools import product

import numpy as np
import torch
from triton.runtime import interpreter

from transformer_vq.ops.triton import launch


class OutOfBoundsError(AssertionError):
    """An access outside of all tensors of the launch."""


class RaceError(AssertionError):
    """Programs that depend on each other's order."""


class Accesses:
    """Addresses that the programs of one launch touched."""

    def __init__(self, tensors: list[torch.Tensor], order: list[tuple[int, ...]]) -> None:
        self.order = order
        self.program = -1
        self.addresses: dict[str, list[np.ndarray]] = {"read": [], "write": []}
        self.programs: dict[str, list[np.ndarray]] = {"read": [], "write": []}
        ends: dict[int, int] = {}  # by start; a tensor may be passed twice
        for x in tensors:
            last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
            end = x.data_ptr() + (last + 1) * x.element_size()
            ends[x.data_ptr()] = max(end, ends.get(x.data_ptr(), 0))
        ranges = zip(*sorted(ends.items()), strict=True)
        self.starts, self.ends = (np.array(x, np.uint64) for x in ranges)

    def start(self) -> tuple[int, ...]:
        """Return the index of the next program."""
        self.program += 1
        return self.order[self.program]

    def note(self, kind: str, pointers, mask) -> None:
        n_bytes = pointers.get_element_ty().primitive_bitwidth // 8
        used = pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        used = used.astype(np.uint64).ravel()
        at = np.searchsorted(self.starts, used, side="right").astype(np.int64) - 1
        inside = (at >= 0) & (used + np.uint64(n_bytes) <= self.ends[np.maximum(at, 0)])
        if not inside.all():
            raise OutOfBoundsError(f"{kind} outside of all tensors: {(~inside).sum()} elements")
        self.addresses[kind].append(used)
        self.programs[kind].append(np.full(used.shape, self.program))

    def check_races(self) -> None:
        addresses, programs = (np.concatenate(x["write"]) for x in (self.addresses, self.programs))
        if not len(addresses):  # every element was masked
            return
        order = np.argsort(addresses, kind="stable")
        addresses, programs = addresses[order], programs[order]
        same = addresses[1:] == addresses[:-1]
        if (same & (programs[1:] != programs[:-1])).any():
            raise RaceError("two programs write the same address")
        read, readers = (np.concatenate(x["read"]) for x in (self.addresses, self.programs))
        at = np.searchsorted(addresses, read).clip(max=len(addresses) - 1)
        if ((addresses[at] == read) & (programs[at] != readers)).any():
            raise RaceError("a program reads what another one writes")


@contextmanager
def detectors(seed: int = 0):
    """Check every launch inside of this context."""
    builder, run = interpreter.interpreter_builder, launch.run
    accesses: Accesses | None = None
    rng = random.Random(seed)
    names = ("create_masked_load", "create_masked_store", "set_grid_idx")
    load, store, set_index = (getattr(builder, name) for name in names)

    def checked_load(pointers, mask, *rest):
        accesses.note("read", pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers, value, mask, *rest):
        accesses.note("write", pointers, mask)
        return store(pointers, value, mask, *rest)

    def checked_run(call):
        nonlocal accesses
        tensors = [x for x in call.arguments.values() if isinstance(x, torch.Tensor) and x.numel()]
        order = list(product(*map(range, (*call.grid, 1, 1)[:3])))
        rng.shuffle(order)
        accesses = Accesses(tensors, order)
        run(call)
        accesses.check_races()

    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store
    builder.set_grid_idx = lambda *_: set_index(*accesses.start())
    launch.run = checked_run
    try:
        yield
    finally:
        for name in names:
            delattr(builder, name)
        launch.run = run


_patched: set[int] = set()


def _call_device_function(self, *arguments, **options):
    """Call a helper of a kernel; the original patches the language every time, which takes longer.

    The launch has patched `triton.language`; helpers of Triton itself also use its core.
    """
    if id(self.fn.__globals__) not in _patched:
        _patched.add(id(self.fn.__globals__))
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*arguments, **options)


interpreter.InterpretedFunction.__call__ = _call_device_function
