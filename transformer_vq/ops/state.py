"""The state that attention carries from one segment of a sequence to the next.

For VQ attention the window holds the last L tokens uncompressed, the cache everything older. Full
attention has a window that grows, and no cache. Rows are independent and may be at different
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_with_path

from transformer_vq.ops.cache import CacheStats
from transformer_vq.ops.runtime import tensor_tree

T = TypeVar("T")


class RowState:
    """Operations on any state: tensors with the batch first, where all zeros is an empty state."""

    def detach(self) -> Self:
        """Return the same values without gradients, as between spans of truncated BPTT."""
        return _map(Tensor.detach, self)

    def select(self, rows: Tensor) -> Self:
        """Return the given rows in that order; a row may be repeated. rows: [n] of int64."""
        return _map(lambda x: x.index_select(0, rows), self, only_rows=True)

    def reset(self, rows: Tensor) -> Self:
        """Return a state whose selected rows are empty, for new sequences. rows: [b] of bool."""

        def clear(x: Tensor) -> Tensor:
            return torch.where(rows.view(-1, *[1] * (x.ndim - 1)), torch.zeros_like(x), x)

        return _map(clear, self, only_rows=True)

    def with_row(self, row: int, other: Self) -> Self:
        """Return a copy in which a row is replaced by a state of one row."""

        def replaced(x: Any, new: Any) -> Any:
            index = torch.tensor([row], device=x.device)
            return x.index_copy(0, index, new.to(x.dtype))

        mapped: Self = tree_map(replaced, self, other)
        return mapped

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move all tensors to another device, with the arguments of `Tensor.to`."""
        return _map(lambda x: x.to(*args, **kwargs), self)

    @property
    def n_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(x.numel() * x.element_size() for x in tree_leaves(self) if isinstance(x, Tensor))


@dataclass(frozen=True)
class AttentionState(RowState):
    """What `VQState` and `FullState` share: k: [b, h, L, k], v: [b, h, L, v], position: [b].

    `position` is the number of tokens of the current document that a row has seen. The newest token
    is the last in the window; slots that are empty or belong to an earlier document come first.
    """

    k: Tensor
    v: Tensor
    position: Tensor
    document: Tensor | None = field(default=None, kw_only=True)
    """Id of the current document of each row, [b]; None if no ids were given."""
    sinusoid_mask: Tensor | None = field(default=None, kw_only=True)
    """Dropout mask of the sinusoids, [d, d_model]: drawn once per sequence, shared by all rows."""

    @property
    def window_valid(self) -> Tensor:
        """Which slots of the window hold a token: [b, L]."""
        window_len = self.k.shape[-2]
        slots = torch.arange(window_len, device=self.position.device)
        return slots >= window_len - self.position.unsqueeze(-1)


@tensor_tree
@dataclass(frozen=True)
class VQState(AttentionState):
    """The state of VQ attention: k holds quantized keys, z: [b, h, L] their codes.

    Without a cache, attention is limited to the last L tokens.
    """

    z: Tensor
    cache: CacheStats | None = None

    @classmethod
    def empty(
        cls,
        batch_size: int,
        n_head: int,
        window_len: int,
        d_k: int,
        d_v: int,
        n_code: int,
        *,
        compressive_cache: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> VQState:
        """Return the state before the first token."""
        lead = (batch_size, n_head)
        cache = CacheStats.empty(*lead, n_code, d_v, dtype=dtype, device=device)
        return cls(
            k=torch.zeros(*lead, window_len, d_k, dtype=dtype, device=device),
            v=torch.zeros(*lead, window_len, d_v, dtype=dtype, device=device),
            position=torch.zeros(batch_size, dtype=torch.int64, device=device),
            z=torch.zeros(*lead, window_len, dtype=torch.int64, device=device),
            cache=cache if compressive_cache else None,
        )


@tensor_tree
@dataclass(frozen=True)
class Slots:
    """Evicted tokens that stay exact: attention sinks first, then others, the newest last.

    k: [b, h, e, k], v: [b, h, e, v], z: [b, h, e] their codes, age: [b, h, e] distance to the next
    token, 0 for an empty slot.
    """

    k: Tensor
    v: Tensor
    z: Tensor
    age: Tensor


@tensor_tree
@dataclass(frozen=True)
class RotaryState(VQState):
    """The state of VQ attention with rotary positions: k holds keys before their rotation.

    kind: [b, h, L] of int8, what happens to a token of the window when it is evicted: CODED tokens
    are merged into the cache, EXACT and SINK tokens move to a slot.
    """

    kind: Tensor = field(kw_only=True)
    slots: Slots = field(kw_only=True)

    @classmethod
    def with_slots(cls, state: VQState, n_slot: int) -> RotaryState:
        """Return an empty state with n_slot slots. state: an empty state without slots."""

        def empty(x: Tensor) -> Tensor:
            return x.new_zeros(*x.shape[:2], n_slot, *x.shape[3:])

        k, v, z = state.k, state.v, state.z
        slots = Slots(empty(k), empty(v), empty(z), empty(z))
        return cls(k, v, state.position, z, state.cache, kind=z.to(torch.int8), slots=slots)


CODED, EXACT, SINK = 0, 1, 2  # kinds of tokens in the window of a `RotaryState`


@tensor_tree
@dataclass(frozen=True)
class FullState(AttentionState):
    """The state of full attention: all keys and values."""


def _map(fn: Callable[[Tensor], Tensor], state: T, only_rows: bool = False) -> T:
    """Apply `fn` to all tensors of a state, or only to those with a batch."""

    def apply(path: tuple[Any, ...], x: Any) -> Any:
        is_shared = only_rows and path[-1].name == "sinusoid_mask"
        return fn(x) if isinstance(x, Tensor) and not is_shared else x

    mapped: T = tree_map_with_path(apply, state)
    return mapped
