"""Measures what a rank does: its collectives, the bytes that it sends, and its new tensors."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from transformer_vq.training.step import Trainer

# Bytes sent per rank by ring algorithms, as multiples of the largest tensor of a call; n ranks.
KINDS: dict[str, Callable[[int], float]] = {
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all": lambda n: 1.0,  # to one other rank, as in context parallelism
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}


class Traffic(TorchDispatchMode):
    """A context in which `calls` and `bytes` count collectives by kind.

    Collectives inside a compiled graph are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.functional_calls: Counter[str] = Counter()
        self.functional_bytes: Counter[str] = Counter()
        """Those of differentiable collectives, which FSDP does not use."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # counted when it calls a collective of its local tensor
        result = func(*args, **(kwargs or {}))
        library, _, name = func._schema.name.partition("::")
        if library in ("c10d", "_c10d_functional"):
            short = name.replace("allgather", "all_gather").replace("allreduce", "all_reduce")
            short = short.replace("alltoall", "all_to_all")
            kind = next((kind for kind in KINDS if kind in short), None)
            group = next((group for group in map(_group, args) if group is not None), None)
            if kind is not None and group is not None and group.size() > 1:
                n_bytes = int(KINDS[kind](group.size()) * max(map(_n_bytes, (*args, result))))
                self.count(kind, n_bytes, group, library == "_c10d_functional")
        return result

    def count(self, kind: str, n_bytes: int, group: dist.ProcessGroup, functional: bool) -> None:
        """Count a call. functional: whether the collective is differentiable."""
        self.calls[kind] += 1
        self.bytes[kind] += n_bytes
        if functional:
            self.functional_calls[kind] += 1
            self.functional_bytes[kind] += n_bytes


class StepTraffic(Traffic):
    """Counts the bytes of training steps of a trainer by purpose, as `Sizes.sent_bytes` names them.

    `purposes` also has "numbers": the losses and the gradient norm.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.trainer = trainer
        self.purposes: Counter[str] = Counter()
        self._purpose = ""
        self._patches = ExitStack()

    def __enter__(self) -> StepTraffic:
        strategy, trainer = self.trainer.strategy, self.trainer
        self._assign(strategy, "carry", "context parallel")
        self._assign(strategy, "sum_usages", "codebooks")
        self._assign(strategy, "sum_losses", "numbers")
        self._assign(trainer, "_clip_gradients", "numbers")
        self._assign(trainer.optimizer, "step", "optimizer")
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def _assign(self, owner: Any, name: str, purpose: str) -> None:
        """Count what a method sends under a purpose."""
        method = getattr(owner, name)

        @wraps(method)
        def assigned(*args: Any, **kwargs: Any) -> Any:
            self._purpose = purpose
            try:
                return method(*args, **kwargs)
            finally:
                self._purpose = ""

        self._patches.enter_context(patch.object(owner, name, assigned))

    def count(self, kind: str, n_bytes: int, group: dist.ProcessGroup, functional: bool) -> None:
        super().count(kind, n_bytes, group, functional)
        purpose = self._purpose
        if not purpose and functional:  # FSDP does not use differentiable collectives
            world = self.trainer.world
            # Compared by ranks: DTensor may use a group of an earlier, equal mesh.
            ranks = dist.get_process_group_ranks
            is_tp = world.size("tp") > 1 and ranks(group) == ranks(world.group("tp"))
            purpose = "tensor parallel" if is_tp else "context parallel"
        elif not purpose:
            purpose = "parameters" if kind == "all_gather" else "gradients"
        self.purposes[purpose] += n_bytes


class LiveBytes(TorchDispatchMode):
    """A context that finds the largest number of bytes in new tensors at any time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        given = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and _address(x) not in given | self._seen | {0}:
                address, n_bytes = _address(x), x.untyped_storage().nbytes()
                self._seen.add(address)
                self.live += n_bytes
                self.peak = max(self.peak, self.live)
                weakref.finalize(x.untyped_storage(), self._free, address, n_bytes)
        return result

    def _free(self, address: int, n_bytes: int) -> None:
        self._seen.discard(address)
        self.live -= n_bytes


def _address(x: Tensor) -> int:
    is_real = not (x.is_meta or isinstance(x, FakeTensor))
    return x.untyped_storage().data_ptr() if is_real else 0


def _group(x: Any) -> dist.ProcessGroup | None:
    """Return x if it is a process group, in one of three forms."""
    if isinstance(x, torch.ScriptObject):
        try:
            x = dist.ProcessGroup.unbox(x)
        except (RuntimeError, TypeError):
            return None
    if isinstance(x, str):
        try:
            x = _resolve_process_group(cast(Any, x))
        except (RuntimeError, ValueError, LookupError):
            return None
    return x if isinstance(x, dist.ProcessGroup) else None


def _n_bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(_n_bytes, x)) if isinstance(x, (list, tuple)) else 0
