"""What a transformers `Trainer` needs so that codebooks learn."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from transformer_vq.hf.modeling_transformer_vq import TransformerVQForCausalLM
from transformer_vq.parallel.data_parallel import default_group, total_usage


class CodebookCallback(TrainerCallback):
    """Moves codebooks once per optimizer step: `Trainer(..., callbacks=[CodebookCallback()])`.

    What all micro-batches of the step said is added up, over all processes too, whatever the
    accumulation or gradient checkpointing. If the optimizer skipped the step, so do codebooks.
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
