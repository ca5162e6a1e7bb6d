"""Counts the collectives that a rank takes part in, and the bytes that it sends in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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
            n = next((n for n in map(_group_size, args) if n is not None), 1)
            if kind is not None and n > 1:
                largest = max(map(_n_bytes, (*args, result)))
                self.calls[kind] += 1
                self.bytes[kind] += int(KINDS[kind](n) * largest)
                if library == "_c10d_functional":
                    self.functional_bytes[kind] += int(KINDS[kind](n) * largest)
        return result


def _group_size(x: Any) -> int | None:
    """Return the number of ranks if x is a process group, in one of three forms."""
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
    return x.size() if isinstance(x, dist.ProcessGroup) else None


def _n_bytes(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    return sum(map(_n_bytes, x)) if isinstance(x, (list, tuple)) else 0
