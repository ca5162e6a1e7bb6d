"""Optional callback for a transformers `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from transformer_vq.hf.modeling_transformer_vq import TransformerVQModel


class CodebookCallback(TrainerCallback):
    """Discards the code usage of optimizer steps that were skipped, as with fp16 gradient scaling.

    Codebooks are updated after each optimizer step without a callback. Without this one, the
    statistics of a skipped step are applied together with those of the next step.
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for module in kwargs["model"].modules():
            if not isinstance(module, TransformerVQModel):
                continue
            if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
                module.drop_code_usage()
            else:
                module.update_codebooks()  # for optimizers that are not from torch.optim
