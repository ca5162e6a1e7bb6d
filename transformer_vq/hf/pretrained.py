"""What all Transformer-VQ models for transformers have in common."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init

from transformer_vq.hf.branches import BRANCH_TYPES
from transformer_vq.hf.configuration_transformer_vq import TransformerVQConfig
from transformer_vq.hf.saving import SavedModel
from transformer_vq.nn.layers import ScaledSinusoids
from transformer_vq.nn.projections import AttentionLayer
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer


class TransformerVQPreTrainedModel(SavedModel, PreTrainedModel):
    """Settings, initial weights and codebook updates of all Transformer-VQ models."""

    config_class = TransformerVQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _input_embed_layer = "embed"
    _no_split_modules: ClassVar = [vars(BRANCH_TYPES)[name].__name__ for name in vars(BRANCH_TYPES)]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _keep_in_fp32_modules_strict: ClassVar = ["c_sum", "c_count"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial weights of the core model, including its codebooks."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight)
        elif isinstance(module, AttentionLayer):
            init.zeros_(module.u)
            init.zeros_(module.v)
        elif isinstance(module, ScaledSinusoids):
            init.zeros_(module.scale)
        elif isinstance(module, VectorQuantizer):
            init.normal_(module.c_sum, std=module.c_sum.shape[1] ** -0.5)
            init.ones_(module.c_count)
            init.constant_(module.started, float(module.codebook_init == "random"))

    @property
    def code_usage(self) -> tuple[CodeUsage, ...] | None:
        """Codebook statistics of the training passes since the last optimizer step, or None."""
        return self.base_model.code_usage  # type: ignore[no-any-return]

    def update_codebooks(self, *args: Any) -> None:
        """Apply the code usage now; otherwise this happens after the next optimizer step."""
        self.base_model.update_codebooks(*args)

    def drop_code_usage(self) -> None:
        """Discard the code usage since the last optimizer step."""
        self.base_model.drop_code_usage()

    def freeze_codebooks(self, freeze: bool = True) -> None:
        """Select whether training leaves the codebooks unchanged."""
        self.base_model.codebooks_frozen = freeze

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False
