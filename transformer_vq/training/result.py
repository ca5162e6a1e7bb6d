"""How far a run is, and how it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from transformer_vq.config import RunConfig
from transformer_vq.training.checkpoint import Checkpoint


@dataclass(frozen=True)
class Progress:
    """The progress of a run, as stored in its checkpoints."""

    step: int = 0
    """Number of completed steps."""
    validated_at: int = 0
    """Step of the last validation; 0 before the first one."""
    logged_at: int = 0
    """Step of the last training row in metrics.jsonl; 0 before the first one."""
    best_loss: float = math.inf
    """Lowest validation loss, in nats per token."""
    best_bits_per_byte: float = math.inf
    """The same loss in bits per byte; infinite if the checkpoint does not contain it."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Progress:
        """Return the progress of a run at a checkpoint."""
        metadata = checkpoint.metadata
        best_loss, best_bits = metadata["best_loss"], metadata.get("best_bits_per_byte")
        return cls(
            checkpoint.step,
            metadata["validated_at"],
            metadata.get("logged_at", 0),
            math.inf if best_loss is None else best_loss,
            math.inf if best_bits is None else best_bits,
        )

    def is_finished(self, config: RunConfig) -> bool:
        """Return whether all steps of a run and its last validation are done."""
        return self.step == self.validated_at == config.train.steps


@dataclass(frozen=True)
class TrainingResult:
    """The result of `train` or `resume`."""

    run: Path
    """The run folder."""
    step: int
    """Number of completed steps."""
    finished: bool
    """Whether all steps and the last validation are done."""
    stopped_by: int | None
    """Number of the signal that stopped the run, on any rank; None if it finished."""
    best_loss: float
    """Lowest validation loss since the start of the run, in nats per token."""
    best_bits_per_byte: float = math.inf
    """The same loss in bits per byte; infinite before the first validation."""
