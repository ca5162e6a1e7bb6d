"""Optional callback for a transformers `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from transformer_vq.hf.modeling_transformer_vq import TransformerVQModel


class CodebookCallback(TrainerCallback):
    """Handles optimizer steps that are skipped, and optimizers that are not from torch.optim.

    Other steps update the codebooks without a callback. If a step is skipped, as with fp16 gradient
    scaling, its code usage is discarded; without this callback, it is applied with the next step.
    For optimizers that PyTorch's hooks do not cover, as in DeepSpeed, this callback updates the
    codebooks.
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for module in kwargs["model"].modules():
            if not isinstance(module, TransformerVQModel):
                continue
            if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
                module.drop_code_usage()
            else:
                module.update_codebooks()  # does nothing if the hook has done it
