"""What a transformers `Trainer` needs so that codebooks learn."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from transformers import TrainerCallback

from transformer_vq.hf.modeling_transformer_vq import TransformerVQForCausalLM
from transformer_vq.nn.quantizer import CodeUsage


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
                module.code_usage = None
            else:
                module.code_usage = tuple(_of_all_processes(usage) for usage in module.code_usage)
                module.update_codebooks()


def _of_all_processes(usage: CodeUsage) -> CodeUsage:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return usage

    def total(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    candidates = usage.candidates
    if candidates is not None:
        candidates = candidates.contiguous()
        dist.broadcast(candidates, src=0)
    return CodeUsage(
        total(usage.sum), total(usage.count), total(usage.error), total(usage.energy), candidates
    )
