"""Run Triton kernels in the interpreter, with detectors for faults that it does not report.

- The address of every load and store must belong to a tensor of the launch.
- Programs run in random order, and none may read or write what another one writes.

Import this module only where TRITON_INTERPRET=1 is set.
"""

import random
from itertools import product

import numpy as np
import torch
from triton.runtime import interpreter

from transformer_vq.ops.triton import launch


class Accesses:
    """Addresses that the programs of one launch touched."""

    def __init__(self, call: launch.Launch, rng: random.Random) -> None:
        self.order = list(product(*map(range, (*call.grid, 1, 1)[:3])))
        rng.shuffle(self.order)
        self.program = -1
        self.seen: dict[str, list[np.ndarray]] = {"read": [], "write": []}
        ends: dict[int, int] = {}  # by start; a tensor may be passed twice
        for x in call.arguments.values():
            if isinstance(x, torch.Tensor) and x.numel():
                last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
                end = x.data_ptr() + (last + 1) * x.element_size()
                ends[x.data_ptr()] = max(end, ends.get(x.data_ptr(), 0))
        self.starts, self.ends = np.array(sorted(ends.items()), np.uint64).T

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
        assert inside.all(), f"{kind} outside of all tensors: {(~inside).sum()} elements"
        self.seen[kind].append(np.stack([used, np.full_like(used, self.program)]))

    def check_races(self) -> None:
        written = np.concatenate(self.seen["write"], axis=1)
        if not written.size:  # every element was masked
            return
        addresses, programs = written[:, np.argsort(written[0], kind="stable")]
        same = addresses[1:] == addresses[:-1]
        assert not (same & (programs[1:] != programs[:-1])).any(), "two programs write one address"
        read, readers = np.concatenate(self.seen["read"], axis=1)
        at = np.searchsorted(addresses, read).clip(max=len(addresses) - 1)
        others = (addresses[at] == read) & (programs[at] != readers)
        assert not others.any(), "a program reads what another one writes"


def install_detectors(patch, seed: int = 0) -> None:
    """Check every launch until the monkeypatch is undone."""
    builder, run = interpreter.interpreter_builder, launch.run
    load, store = builder.create_masked_load, builder.create_masked_store
    set_index = builder.set_grid_idx
    accesses: Accesses | None = None
    rng = random.Random(seed)

    def checked_load(pointers, mask, *rest):
        accesses.note("read", pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers, value, mask, *rest):
        accesses.note("write", pointers, mask)
        return store(pointers, value, mask, *rest)

    def checked_run(call):
        nonlocal accesses
        accesses = Accesses(call, rng)
        run(call)
        accesses.check_races()

    patch.setattr(builder, "create_masked_load", checked_load)
    patch.setattr(builder, "create_masked_store", checked_store)
    patch.setattr(builder, "set_grid_idx", lambda *_: set_index(*accesses.start()))
    patch.setattr(launch, "run", checked_run)


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
