"""Callback that updates the codebooks when training with a transformers `Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from transformer_vq.hf.modeling_transformer_vq import TransformerVQForCausalLM
from transformer_vq.parallel.data_parallel import default_group, total_usage


class CodebookCallback(TrainerCallback):
    """Updates codebooks once per optimizer step: `Trainer(..., callbacks=[CodebookCallback()])`.

    The code usage of all micro-batches is summed over the step and over all processes. Gradient
    accumulation and gradient checkpointing do not change the result. If the optimizer skips a
    step, the codebooks skip it too.
    """

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        skipped = getattr(kwargs.get("optimizer"), "step_was_skipped", False)
        for module in kwargs["model"].modules():
            if not isinstance(module, TransformerVQForCausalLM):
                continue
            if skipped or module.code_usage is None:
                module.drop_code_usage()
            else:
                module.code_usage = total_usage(module.code_usage, default_group())
                module.update_codebooks()
