"""Configs of models and runs: frozen dataclasses that check their values when built."""

from transformer_vq.config.data import DataConfig, Dataset, Format
from transformer_vq.config.model import (
    AttentionConfig,
    AttentionType,
    Heads,
    HeadType,
    ModelConfig,
    Reduction,
)
from transformer_vq.config.run import (
    OptimConfig,
    ParallelConfig,
    Precision,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "AttentionConfig",
    "AttentionType",
    "DataConfig",
    "Dataset",
    "Format",
    "HeadType",
    "Heads",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Precision",
    "Reduction",
    "RunConfig",
    "TrainConfig",
]
