"""`ModelState` where transformers expects its cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from transformer_vq.nn.state import ModelState


class StateLayer(CacheLayerMixin):
    """The state of the whole model as one layer; rows can be picked, tokens not taken back."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: ModelState | None = None
        self.n_columns = 0
        """Tokens given so far, padding included: what transformers calls the length."""
        self.device: torch.device | None = None

    def advance(self, state: ModelState, n_columns: int) -> None:
        """The state after `n_columns` more tokens."""
        self.state = state
        self.n_columns += n_columns
        self.device = state.position.device
        self.is_initialized = True

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else int(self.state.position.shape[0])

    def get_seq_length(self) -> int:
        return self.n_columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_columns + query_length, 0

    def reset(self) -> None:
        self.state, self.n_columns, self.is_initialized = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(beam_idx.to(self.state.position.device))

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.as_tensor(indices)
        self.reorder_cache(rows.nonzero().flatten() if rows.dtype == torch.bool else rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(max(self.batch_size, 0)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove != 0:
            raise ValueError(
                f"cannot take {abs(tokens_to_remove)} tokens back: they are merged into the state; "
                "copy the cache before going on, or read the prompt again"
            )

    def offload(self) -> None:
        if self.state is not None:
            self.state = self.state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        if self.state is not None:
            self.state = self.state.to(self.device, non_blocking=True)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """A state has no keys and values to begin with."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("this cache holds a ModelState; the model itself sets it")


class TransformerVQCache(Cache):
    """`past_key_values` of `TransformerVQForCausalLM`; its size does not grow with the text."""

    def __init__(self) -> None:
        super().__init__(layers=[StateLayer()])

    @property
    def state(self) -> ModelState | None:
        return self.layers[0].state

    def advance(self, state: ModelState, n_columns: int) -> None:
        self.layers[0].advance(state, n_columns)

    def detach(self) -> None:
        """Cut the gradient: between the windows of truncated BPTT."""
        if self.state is not None:
            self.layers[0].state = self.state.detach()
