"""Cross-entropy loss of the next token; the training step adds the commitment loss."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from transformer_vq.data.batches import Batch
from transformer_vq.nn.model import ModelOutput


def token_loss(output: ModelOutput, batch: Batch) -> Tensor:
    """Return the summed cross-entropy of all valid targets, in nats (float32)."""
    losses = F.cross_entropy(
        output.logits.flatten(0, 1), batch.targets.flatten(), reduction="none"
    ).view_as(batch.targets)
    return losses.sum() if batch.valid is None else (losses * batch.valid).sum()
