"""The residual branches as layers that transformers can find, checkpoint and place on devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import FeedForward
from transformer_vq.nn.stack import BranchTypes


class _CheckpointedBranch(GradientCheckpointingLayer):
    """Applies the gradient checkpointing of transformers to a branch.

    A long sequence is checkpointed by segment. Recomputing all of its tokens at once, as the base
    class does, would need more memory the longer it is. Checkpoints are never reentrant, because
    the outputs of branches are not tuples.
    """

    checkpoint_activations: bool

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = partial(nn.Module.__call__, self)
        wanted = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        self.checkpoint_activations = wanted and self._n_segments(x) > 1
        if wanted and not self.checkpoint_activations:
            return checkpoint(call, x, *args, use_reentrant=False, **kwargs)
        return call(x, *args, **kwargs)

    def _n_segments(self, x: Tensor) -> int:
        """Return the number of segments in which the branch processes its input."""
        return 1


class TransformerVQAttention(_CheckpointedBranch, VQAttention):
    """`VQAttention` for transformers."""

    def _n_segments(self, x: Tensor) -> int:
        n_rows, seq_len = x.shape[:2]
        return -(-seq_len // self.segment_len(n_rows, seq_len, x.device))


class TransformerVQFullAttention(_CheckpointedBranch, FullAttention):
    """`FullAttention` for transformers."""


class TransformerVQFeedForward(_CheckpointedBranch, FeedForward):
    """`FeedForward` for transformers."""


BRANCH_TYPES = BranchTypes(
    TransformerVQAttention, TransformerVQFullAttention, TransformerVQFeedForward
)
