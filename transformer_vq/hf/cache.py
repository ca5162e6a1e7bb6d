"""Adapter that lets a `ModelState` serve as the `past_key_values` of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from transformer_vq.nn.model import ModelState


class StateLayer(CacheLayerMixin):
    """The state of all model layers as a single cache layer.

    Batch rows can be selected, reordered and repeated. Tokens cannot be removed.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: ModelState | None = None
        self.n_columns = 0
        """Tokens processed so far, including padding; the sequence length in transformers."""

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
            problem = f"cannot remove {abs(tokens_to_remove)} tokens: the state has merged them"
            raise ValueError(f"{problem}; copy the cache before, or run the prompt again")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: there are no key and value tensors to allocate."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise TypeError("this cache stores a ModelState; only the model can update it")


class TransformerVQCache(Cache):
    """`past_key_values` of `TransformerVQForCausalLM`; its size does not depend on the length."""

    def __init__(self) -> None:
        super().__init__(layers=[StateLayer()])

    @property
    def state(self) -> ModelState | None:
        layer: StateLayer = self.layers[0]
        return layer.state

    def advance(self, state: ModelState, n_columns: int) -> None:
        """Store the state after `n_columns` more tokens."""
        layer: StateLayer = self.layers[0]
        layer.state, layer.is_initialized = state, True
        layer.n_columns += n_columns

    def detach(self) -> None:
        """Detach the state from the graph, as between the windows of truncated BPTT."""
        if self.state is not None:
            self.layers[0].state = self.state.detach()
