"""Run Triton kernels in the interpreter, with detectors for faults that it does not report.

- Tensors are placed between guards of NaN (or an impossible integer), so that a number read from
  outside spoils the result; guards that were overwritten are an error.
- The address of every load and store must belong to a tensor of the launch.
- Programs run in random order, and none may read or write what another one writes.

Import this module only where TRITON_INTERPRET=1 is set.
"""

import random
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from triton.runtime import interpreter

from transformer_vq.ops.triton import launch

GUARD = 64  # elements before and after each tensor


class OutOfBoundsError(AssertionError):
    """An access outside of all tensors of the launch."""


class RaceError(AssertionError):
    """Programs that depend on each other's order."""


@dataclass
class Accesses:
    """Addresses that the programs of one launch touched."""

    ranges: list[tuple[int, int]]
    order: list[tuple[int, int, int]]
    program: int = -1

    def __post_init__(self):
        self.reads: list[np.ndarray] = []
        self.writes: list[np.ndarray] = []
        self.readers: list[np.ndarray] = []
        self.writers: list[np.ndarray] = []
        starts, ends = zip(*sorted(self.ranges), strict=True)
        self.starts, self.ends = np.array(starts, np.uint64), np.array(ends, np.uint64)

    def start(self) -> tuple[int, int, int]:
        """Return the index of the next program."""
        self.program += 1
        return self.order[self.program]

    def note(self, pointers, mask, n_bytes: int, is_write: bool) -> None:
        used = (
            pointers[np.broadcast_to(mask.astype(bool), pointers.shape)].astype(np.uint64).ravel()
        )
        at = np.searchsorted(self.starts, used, side="right").astype(np.int64) - 1
        inside = (at >= 0) & (used + np.uint64(n_bytes) <= self.ends[np.maximum(at, 0)])
        if not inside.all():
            kind = "write" if is_write else "read"
            raise OutOfBoundsError(f"{kind} outside of all tensors: {(~inside).sum()} elements")
        if used.size == 0:
            return
        (self.writes if is_write else self.reads).append(used)
        who = np.full(used.shape, self.program)
        (self.writers if is_write else self.readers).append(who)

    def check_races(self) -> None:
        if not self.writes:
            return
        addresses, programs = np.concatenate(self.writes), np.concatenate(self.writers)
        order = np.argsort(addresses, kind="stable")
        addresses, programs = addresses[order], programs[order]
        same = addresses[1:] == addresses[:-1]
        if (same & (programs[1:] != programs[:-1])).any():
            raise RaceError("two programs write the same address")
        if self.reads:
            read, readers = np.concatenate(self.reads), np.concatenate(self.readers)
            at = np.searchsorted(addresses, read).clip(max=len(addresses) - 1)
            if ((addresses[at] == read) & (programs[at] != readers)).any():
                raise RaceError("a program reads what another one writes")


def _guarded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a copy of x inside of a larger buffer, the buffer, and the memory of x, flat."""
    extent = (
        0
        if x.numel() == 0
        else 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    )
    flat = x.detach().as_strided((extent,), (1,), x.storage_offset())
    filler = torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max
    buffer = torch.full((extent + 2 * GUARD,), filler, dtype=x.dtype)
    buffer[GUARD : GUARD + extent] = flat
    return buffer.as_strided(x.shape, x.stride(), GUARD), buffer, flat


@contextmanager
def detectors(seed: int = 0, check_accesses: bool = True):
    """Check every launch inside of this context; without check_accesses, only by guards."""
    builder, run = interpreter.interpreter_builder, launch.run
    accesses: Accesses | None = None
    rng = random.Random(seed)
    names = ("create_masked_load", "create_masked_store", "set_grid_idx")
    load, store, set_index = (getattr(builder, name) for name in names)

    def checked_load(pointers, mask, *rest):
        n_bytes = pointers.get_element_ty().primitive_bitwidth // 8
        accesses.note(pointers.data, mask.data, n_bytes, is_write=False)
        return load(pointers, mask, *rest)

    def checked_store(pointers, value, mask, *rest):
        n_bytes = pointers.get_element_ty().primitive_bitwidth // 8
        accesses.note(pointers.data, mask.data, n_bytes, is_write=True)
        return store(pointers, value, mask, *rest)

    def checked_run(call):
        nonlocal accesses
        placed, arguments = {}, {}
        for name, x in call.arguments.items():
            if isinstance(x, torch.Tensor):
                key = (x.data_ptr(), x.dtype, tuple(x.shape), x.stride())
                placed.setdefault(key, _guarded(x))
                arguments[name] = placed[key][0]
            else:
                arguments[name] = x
        grid = (*call.grid, 1, 1)[:3]
        order = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
        rng.shuffle(order)
        ranges = [
            (x.data_ptr(), x.data_ptr() + flat.numel() * flat.element_size())
            for x, _, flat in placed.values()
        ]
        accesses = Accesses(ranges if check_accesses else [(0, 2**63)], order)
        before = {key: buffer.clone() for key, (_, buffer, _) in placed.items()}
        run(replace(call, arguments=arguments))
        if check_accesses:
            accesses.check_races()
        for key, (_, buffer, flat) in placed.items():
            n, old = flat.numel(), before[key]
            for part in (slice(0, GUARD), slice(GUARD + n, None)):
                same = torch.equal(buffer[part].view(torch.uint8), old[part].view(torch.uint8))
                assert same, "a guard was overwritten"
            if not torch.equal(buffer.view(torch.uint8), old.view(torch.uint8)):
                flat.copy_(buffer[GUARD : GUARD + n])  # only outputs: autograd counts versions

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
