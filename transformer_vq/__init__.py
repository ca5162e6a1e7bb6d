"""Transformer-VQ in PyTorch: dense softmax attention in linear time (Lingle, ICLR 2024)."""

from transformer_vq.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from transformer_vq.generate import Context, Sampling, generate, read_prompts, stream
from transformer_vq.interop import load_official
from transformer_vq.nn.attention import FullAttention, VQAttention
from transformer_vq.nn.heads import AttentionOutput
from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ
from transformer_vq.nn.quantizer import CodebookHealth, CodeUsage, VectorQuantizer
from transformer_vq.ops.ragged import document_ids_from_starts
from transformer_vq.ops.state import AttentionState
from transformer_vq.presets import PRESETS
from transformer_vq.snapshot import load_context, save_context

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AttentionOutput",
    "AttentionState",
    "CodeUsage",
    "CodebookHealth",
    "Context",
    "DataConfig",
    "FullAttention",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "OptimConfig",
    "RunConfig",
    "Sampling",
    "TrainConfig",
    "TransformerVQ",
    "VQAttention",
    "VectorQuantizer",
    "document_ids_from_starts",
    "generate",
    "load_context",
    "load_official",
    "read_prompts",
    "save_context",
    "stream",
]
