"""Transformer-VQ in the Hugging Face world: importing this makes the `Auto` classes know it.

After `import transformer_vq.hf`, AutoConfig, AutoModelForCausalLM, AutoTokenizer and pipelines work
on a folder that `transformer_vq.hf.export` wrote.
"""

from transformer_vq.errors import missing_extra

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
except ImportError as error:
    raise missing_extra("transformer_vq.hf", "transformers 5 or newer", "hf") from error

from transformer_vq.hf.cache import TransformerVQCache
from transformer_vq.hf.configuration_transformer_vq import TransformerVQConfig
from transformer_vq.hf.modeling_transformer_vq import TransformerVQForCausalLM, TransformerVQOutput
from transformer_vq.hf.tokenization_transformer_vq import TransformerVQTokenizer
from transformer_vq.hf.trainer import CodebookCallback

AutoConfig.register(TransformerVQConfig.model_type, TransformerVQConfig, exist_ok=True)
AutoModelForCausalLM.register(TransformerVQConfig, TransformerVQForCausalLM, exist_ok=True)
AutoTokenizer.register(TransformerVQConfig, TransformerVQTokenizer, exist_ok=True)

__all__ = [
    "CodebookCallback",
    "TransformerVQCache",
    "TransformerVQConfig",
    "TransformerVQForCausalLM",
    "TransformerVQOutput",
    "TransformerVQTokenizer",
]
