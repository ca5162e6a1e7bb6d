"""What attention carries from one segment of a sequence to the next.

The last L tokens are kept as they are (the window), everything older in the cache. Full attention
is the same thing with a window that grows and no cache. Rows are independent of each other and may
stand at different positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from transformer_vq.ops.cache import CacheStats


class RowState:
    """What can be done to any state. Its tensors have the batch first; all zeros means empty."""

    def detach(self) -> Self:
        """The same values without a gradient: the cut between windows of truncated BPTT."""
        return _map(Tensor.detach, self)

    def select(self, rows: Tensor) -> Self:
        """The given rows, in that order; a row may be repeated. rows: [n] of int64."""
        return _map(lambda x: x.index_select(0, rows), self, only_rows=True)

    def reset(self, rows: Tensor) -> Self:
        """Empty the rows where `rows` is True: a new sequence begins there. rows: [b] of bool."""

        def clear(x: Tensor) -> Tensor:
            return torch.where(rows.view(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x), x)

        return _map(clear, self, only_rows=True)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Every tensor moved or cast as by `Tensor.to`; meant for moving to another device."""
        return _map(lambda x: x.to(*args, **kwargs), self)

    @property
    def n_bytes(self) -> int:
        """Memory that all tensors of the state take."""
        return sum(x.numel() * x.element_size() for x in _tensors(self))


@dataclass(frozen=True)
class AttentionState(RowState):
    """k: [b, h, L, k], v: [b, h, L, v], position: [b]; for VQ also z: [b, h, L] and the cache.

    k holds quantized keys for VQ attention. `position` is the number of tokens of its document that
    a row has seen. The newest token stands last in the window; slots that were never filled, or
    that belong to an earlier document, come first.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    z: Tensor | None = None
    cache: CacheStats | None = None
    document: Tensor | None = None
    """Id of the document in which each row stands, [b]; None if no ids were ever given."""
    sinusoid_mask: Tensor | None = field(default=None, metadata={"shared_by_rows": True})
    """Dropout on the sinusoids, [d, d_model]: drawn once and kept for the whole sequence."""

    @classmethod
    def empty(
        cls,
        batch_size: int,
        n_head: int,
        window_len: int,
        d_k: int,
        d_v: int,
        n_code: int | None = None,
        *,
        compressive_cache: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> AttentionState:
        """A state that has seen nothing; without `n_code` one for full attention."""
        lead = (batch_size, n_head)
        is_vq = n_code is not None
        return cls(
            k=torch.zeros(*lead, window_len, d_k, dtype=dtype, device=device),
            v=torch.zeros(*lead, window_len, d_v, dtype=dtype, device=device),
            position=torch.zeros(batch_size, dtype=torch.int64, device=device),
            z=torch.zeros(*lead, window_len, dtype=torch.int64, device=device) if is_vq else None,
            cache=CacheStats.empty(*lead, n_code, d_v, dtype=dtype, device=device)
            if n_code is not None and compressive_cache
            else None,
        )

    @property
    def window_valid(self) -> Tensor:
        """Which slots of the window hold a token: [b, L]."""
        window_len = self.k.shape[-2]
        slots = torch.arange(window_len, device=self.position.device)
        return slots >= window_len - self.position.unsqueeze(-1)


def _map(fn: Callable[[Tensor], Tensor], tree: Any, only_rows: bool = False) -> Any:
    """Apply `fn` to all tensors in nested dataclasses and tuples, or only to those with rows."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple):
        return tuple(_map(fn, item, only_rows) for item in tree)
    if tree is None:
        return tree
    chosen = [f.name for f in fields(tree) if not (only_rows and f.metadata.get("shared_by_rows"))]
    return replace(tree, **{name: _map(fn, getattr(tree, name), only_rows) for name in chosen})


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    _map(note, tree)
    return found
