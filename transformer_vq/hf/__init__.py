"""Adapters for Hugging Face transformers.

Importing this package registers the model with the Auto classes. They and pipelines can then load a
folder written by `transformer_vq.hf.export`.
"""

from transformer_vq.errors import missing_extra

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise missing_extra("transformer_vq.hf", "transformers>=5") from error

from transformer_vq.hf.cache import TransformerVQCache
from transformer_vq.hf.codebooks import CodebookCallback
from transformer_vq.hf.configuration import TransformerVQConfig
from transformer_vq.hf.modeling import (
    TransformerVQForCausalLM,
    TransformerVQModel,
    TransformerVQModelOutput,
    TransformerVQOutput,
    TransformerVQPreTrainedModel,
)
from transformer_vq.hf.tokenization import TransformerVQTokenizer

AutoConfig.register(TransformerVQConfig.model_type, TransformerVQConfig, exist_ok=True)
AutoModel.register(TransformerVQConfig, TransformerVQModel, exist_ok=True)
AutoModelForCausalLM.register(TransformerVQConfig, TransformerVQForCausalLM, exist_ok=True)
AutoTokenizer.register(TransformerVQConfig, TransformerVQTokenizer, exist_ok=True)

__all__ = [
    "CodebookCallback",
    "TransformerVQCache",
    "TransformerVQConfig",
    "TransformerVQForCausalLM",
    "TransformerVQModel",
    "TransformerVQModelOutput",
    "TransformerVQOutput",
    "TransformerVQPreTrainedModel",
    "TransformerVQTokenizer",
]
