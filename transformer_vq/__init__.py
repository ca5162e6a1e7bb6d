"""Transformer-VQ in PyTorch: dense softmax attention in linear time (Lingle, ICLR 2024).

Names are imported on first use, so that `tvq --help` does not have to wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_vq.config import (
        AttentionConfig,
        DataConfig,
        ModelConfig,
        OptimConfig,
        ParallelConfig,
        RunConfig,
        TrainConfig,
    )
    from transformer_vq.conversion.convert import convert
    from transformer_vq.data.corpus import Corpus, Split
    from transformer_vq.data.prepare import prepare
    from transformer_vq.errors import UserError
    from transformer_vq.evaluation import Evaluation, score
    from transformer_vq.generation.decode import generate, stream
    from transformer_vq.generation.inspection import Inspection, inspect_tokens
    from transformer_vq.generation.prefill import Context, prefill
    from transformer_vq.generation.sampling import Sampling
    from transformer_vq.generation.snapshot import load_context, save_context
    from transformer_vq.generation.text import generate_text, sample_images, save_grid
    from transformer_vq.interop import load_official, official_names
    from transformer_vq.nn.attention import AttentionOutput, FullAttention, VQAttention
    from transformer_vq.nn.model import ModelOutput, ModelState, TransformerVQ
    from transformer_vq.nn.quantizer import CodebookHealth, CodeUsage, VectorQuantizer
    from transformer_vq.nn.rotary import RotaryFullAttention, RotaryVQAttention
    from transformer_vq.ops.blockwise import encoder_attention, vq_attention
    from transformer_vq.ops.packing import document_ids_from_starts
    from transformer_vq.ops.state import AttentionState, FullState, RotaryState, VQState
    from transformer_vq.presets import PRESETS
    from transformer_vq.progress import Reporter, TerminalReporter
    from transformer_vq.training.checkpoint import LoadedRun, TrainingResult, load_run
    from transformer_vq.training.evaluate import RunEvaluation, evaluate
    from transformer_vq.training.metrics import read_metrics
    from transformer_vq.training.run import read_history, resume, train

__version__ = "0.3.0"

_MODULES = {
    "config": (
        "AttentionConfig DataConfig ModelConfig OptimConfig ParallelConfig RunConfig TrainConfig"
    ),
    "conversion.convert": "convert",
    "data.corpus": "Corpus Split",
    "data.prepare": "prepare",
    "errors": "UserError",
    "evaluation": "Evaluation score",
    "generation.decode": "generate stream",
    "generation.inspection": "Inspection inspect_tokens",
    "generation.prefill": "Context prefill",
    "generation.sampling": "Sampling",
    "generation.snapshot": "load_context save_context",
    "generation.text": "generate_text sample_images save_grid",
    "interop": "load_official official_names",
    "nn.attention": "AttentionOutput FullAttention VQAttention",
    "nn.model": "ModelOutput ModelState TransformerVQ",
    "nn.rotary": "RotaryFullAttention RotaryVQAttention",
    "nn.quantizer": "CodeUsage CodebookHealth VectorQuantizer",
    "ops.blockwise": "encoder_attention vq_attention",
    "ops.packing": "document_ids_from_starts",
    "ops.state": "AttentionState FullState RotaryState VQState",
    "presets": "PRESETS",
    "progress": "Reporter TerminalReporter",
    "training.checkpoint": "LoadedRun TrainingResult load_run",
    "training.evaluate": "RunEvaluation evaluate",
    "training.metrics": "read_metrics",
    "training.run": "read_history resume train",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [  # noqa: RUF022
    "AttentionConfig",
    "AttentionOutput",
    "AttentionState",
    "CodeUsage",
    "CodebookHealth",
    "Context",
    "Corpus",
    "DataConfig",
    "Evaluation",
    "FullAttention",
    "FullState",
    "Inspection",
    "LoadedRun",
    "ModelConfig",
    "ModelOutput",
    "ModelState",
    "OptimConfig",
    "PRESETS",
    "ParallelConfig",
    "Reporter",
    "RotaryFullAttention",
    "RotaryState",
    "RotaryVQAttention",
    "RunConfig",
    "RunEvaluation",
    "Sampling",
    "Split",
    "TerminalReporter",
    "TrainConfig",
    "TrainingResult",
    "TransformerVQ",
    "UserError",
    "VQAttention",
    "VQState",
    "VectorQuantizer",
    "convert",
    "document_ids_from_starts",
    "encoder_attention",
    "evaluate",
    "generate",
    "generate_text",
    "inspect_tokens",
    "load_context",
    "load_official",
    "load_run",
    "official_names",
    "prefill",
    "prepare",
    "read_history",
    "read_metrics",
    "resume",
    "sample_images",
    "save_context",
    "save_grid",
    "score",
    "stream",
    "train",
    "vq_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
