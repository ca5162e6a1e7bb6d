"""The residual branches as layers that transformers can find, checkpoint and place on devices."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.layers import FeedForward
from transformer_vq.nn.stack import BranchTypes


class _CheckpointedBranch(GradientCheckpointingLayer):
    """Lets `gradient_checkpointing_enable` select the activation checkpointing of the branch.

    The branch checkpoints each segment of the sequence by itself. Recomputing all tokens of a
    branch at once, as the base class does, would need more memory the longer the sequence is.
    """

    checkpoint_activations: bool
    __call__ = nn.Module.__call__

    @property
    def gradient_checkpointing(self) -> bool:
        return self.checkpoint_activations

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.checkpoint_activations = enable


class TransformerVQAttention(_CheckpointedBranch, VQAttention):
    """`VQAttention` for transformers."""


class TransformerVQFullAttention(_CheckpointedBranch, FullAttention):
    """`FullAttention` for transformers."""


class TransformerVQFeedForward(_CheckpointedBranch, FeedForward):
    """`FeedForward` for transformers."""


BRANCH_TYPES = BranchTypes(
    TransformerVQAttention, TransformerVQFullAttention, TransformerVQFeedForward
)
