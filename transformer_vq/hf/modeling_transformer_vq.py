"""`TransformerVQ` as a transformers model, for `generate`, `Trainer` and pipelines.

This module only adapts interfaces: attention masks become `valid`, the cache stores the
`ModelState`, and labels give the training loss. All mathematics is in the core model.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from transformer_vq.errors import UserError
from transformer_vq.generation.prefill import SEGMENT_LEN, run_segments
from transformer_vq.hf.cache import TransformerVQCache
from transformer_vq.hf.checksums import check_folder, write_checksums
from transformer_vq.hf.configuration_transformer_vq import TransformerVQConfig
from transformer_vq.nn.model import ModelOutput, TransformerVQ
from transformer_vq.nn.quantizer import CodeUsage, add_usages, token_priority
from transformer_vq.nn.state import ModelState
from transformer_vq.parallel.data_parallel import default_group

_UNSUPPORTED = {
    "inputs_embeds": "pass token ids as input_ids instead",
    "position_ids": "positions follow from attention_mask; use document_ids for packed documents",
    "output_attentions": "the attention matrix is never computed",
    "output_hidden_states": "hidden states are not stored",
}


@dataclass
class TransformerVQOutput(CausalLMOutputWithPast):
    """Adds commit_loss: the core model's, or None if a long prompt was run in segments."""

    commit_loss: Tensor | None = None


class TransformerVQForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model for transformers that wraps the `TransformerVQ` in `self.model`.

    Codebooks are buffers, not parameters. In training, each forward pass adds its statistics to
    `code_usage`; call `update_codebooks` once per optimizer step to apply them. With a `Trainer`,
    `CodebookCallback` does that.
    """

    config_class = TransformerVQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _input_embed_layer = "embed"
    _no_split_modules: ClassVar = ["VQAttention", "FullAttention", "FeedForward"]
    _keep_in_fp32_modules_strict: ClassVar = ["c_sum", "c_count"]

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config)
        self.model = TransformerVQ(config.to_model_config())
        self.gradient_checkpointing = False
        self._n_micro_batches = 0
        self.code_usage: tuple[CodeUsage, ...] | None = None
        """Sum over the training passes since the last `update_codebooks`, or None."""
        self.post_init()

    @classmethod
    def from_core(cls, model: TransformerVQ, **kwargs: Any) -> TransformerVQForCausalLM:
        """Wrap an existing model without copying it; `kwargs` are passed to the config."""
        with torch.device("meta"):
            wrapped = cls(TransformerVQConfig.from_model_config(model.config, **kwargs))
        wrapped.model = model
        wrapped.train(model.training)
        return wrapped

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformerVQCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TransformerVQOutput | tuple[Any, ...]:
        """Return loss, logits, cache and commitment loss.

        input_ids: [b, t], only the tokens that are not yet in `past_key_values`.
        attention_mask: [b, t] or longer, 0 for padding; only the last t columns are used.
        labels: [b, t], shifted internally, -100 for positions without a target. The loss is
            cross-entropy plus the weighted commitment loss.
        document_ids: [b, t], ids of packed documents; tokens attend within their document only.
        logits_to_keep: number of last positions to return logits for (0: all), or their indices.
        """
        for name, why in _UNSUPPORTED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"{name} is not supported: {why}")
        if input_ids is None:
            raise ValueError("input_ids is required")
        cache = self._cache(past_key_values, use_cache)
        state = None if cache is None else cache.state
        valid = _valid(attention_mask, input_ids)
        n_last = logits_to_keep if isinstance(logits_to_keep, int) else 0
        is_prefill = n_last > 0 and labels is None and not torch.is_grad_enabled()
        if is_prefill and input_ids.shape[1] > SEGMENT_LEN:
            output = self._run_prompt(input_ids, state, valid, document_ids, n_last)
        else:
            priority = self._key_priority(input_ids, valid)
            output = self.model(input_ids, state, valid, document_ids, priority)
        if self.training and torch.is_grad_enabled():
            self._add_usage(output.code_usage)
        if cache is not None:
            cache.advance(output.state, input_ids.shape[1])
        kept = slice(-n_last, None) if isinstance(logits_to_keep, int) else logits_to_keep
        result = TransformerVQOutput(
            loss=None if labels is None else self._loss(output, labels, **kwargs),
            logits=output.logits[:, kept],
            past_key_values=cache,
            commit_loss=output.commit_loss,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()

    def _cache(
        self, given: TransformerVQCache | None, use_cache: bool | None
    ) -> TransformerVQCache | None:
        if given is not None and not isinstance(given, TransformerVQCache):
            raise TypeError(
                f"past_key_values is a {type(given).__name__}; pass the TransformerVQCache that "
                "this model returned, or None"
            )
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return TransformerVQCache() if given is None and wanted else given

    def _run_prompt(
        self,
        tokens: Tensor,
        state: ModelState | None,
        valid: Tensor | None,
        document_ids: Tensor | None,
        n_last: int,
    ) -> ModelOutput:
        """Run a long prompt in segments, because the logits of all tokens may not fit in memory."""

        def segment(start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
            parts = [None if x is None else x[:, start:stop] for x in (valid, document_ids)]
            return tokens[:, start:stop], parts[0], parts[1]

        output = run_segments(self.model, segment, tokens.shape[1], state, n_last=n_last)
        return replace(output, commit_loss=None)  # type: ignore[arg-type]

    def _loss(self, output: ModelOutput, labels: Tensor, **kwargs: Any) -> Tensor:
        loss = self.loss_function(output.logits, labels, self.config.vocab_size, **kwargs)
        commit_loss = output.commit_loss
        if kwargs.get("num_items_in_batch") is not None:
            # With gradient accumulation, this batch is only a fraction of the optimizer step.
            targets = kwargs.get("shift_labels")
            targets = labels[:, 1:] if targets is None else targets
            n_targets = (targets != -100).sum()
            commit_loss = commit_loss * n_targets / kwargs["num_items_in_batch"]
        total: Tensor = loss + self.config.commit_coef * commit_loss
        return total

    def _key_priority(self, tokens: Tensor, valid: Tensor | None) -> Tensor | None:
        """Return the priority of keys as candidates for new codes, or None if it is not needed.

        The result is the same for any number of micro-batches and ranks. Rows are numbered in the
        order in which a `Trainer` distributes them: by micro-batch, then by rank.
        """
        if not (self.training and self.model.uses_candidates):
            return None
        group = default_group()
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        n_rows, seq_len = tokens.shape
        first_row = (self._n_micro_batches * size + rank) * n_rows
        return token_priority(n_rows, seq_len, valid, tokens.device, first_row)

    def _add_usage(self, usages: tuple[CodeUsage, ...]) -> None:
        self._n_micro_batches += 1
        self.code_usage = add_usages(self.code_usage, usages)

    def update_codebooks(self, code_usage: Sequence[CodeUsage] | None = None) -> None:
        """Move the codebooks towards the keys of `code_usage`; call once per optimizer step.

        By default, the code usage of all training passes since the last call.
        """
        code_usage = self.code_usage if code_usage is None else code_usage
        if code_usage is not None:
            self.model.update_codebooks(code_usage)
        self.drop_code_usage()

    def drop_code_usage(self) -> None:
        """Discard the code usage since the last `update_codebooks`."""
        self.code_usage, self._n_micro_batches = None, 0

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> TransformerVQForCausalLM | tuple[TransformerVQForCausalLM, dict[str, Any]]:
        """Load a model as in transformers, but reject incomplete or corrupt folders."""
        check_folder(args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if info["missing_keys"]:
            names = ", ".join(sorted(info["missing_keys"]))
            raise UserError(f"the folder has no {names}; export the model again")
        _align(model)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as in transformers; warn if code usage has not been applied."""
        if self.code_usage is not None:
            warnings.warn(
                "the codebooks were not updated after training; add CodebookCallback() to the "
                "Trainer, or call update_codebooks() after each optimizer step",
                stacklevel=2,
            )
        super().save_pretrained(*args, **kwargs)
        write_checksums(args[0] if args else kwargs["save_directory"])

    def get_output_embeddings(self) -> nn.Module:
        return self.model.embed if self.model.head is None else self.model.head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"the vocabulary has {self.config.vocab_size} tokens and cannot be resized"
            )
        return self.model.embed

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the core model initializes its own weights."""

    def _set_gradient_checkpointing(self, enable: bool = True, **kwargs: Any) -> None:
        self.gradient_checkpointing = enable
        self.model.set_execution(checkpoint_activations=enable)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.use_cache is not False and not model_kwargs.get("past_key_values"):
            model_kwargs["past_key_values"] = TransformerVQCache()

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return a mask of ones: bos doubles as the padding token, so ids do not mark padding."""
        return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)


def _align(model: nn.Module) -> None:
    """Copy tensors of a mapped file to aligned memory.

    Matrix products round by alignment, so without this the logits could differ from the run's.
    """
    for x in (*model.parameters(), *model.buffers()):
        if x.device.type == "cpu" and x.data_ptr() % 64 != 0:
            x.data = x.data.clone()


def _valid(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Return the mask of tokens that are not padding, [b, t], or None if there is no padding."""
    if attention_mask is None:
        return None
    n_rows, n_columns = tokens.shape
    fits = attention_mask.ndim == 2 and attention_mask.shape[0] == n_rows
    if not fits or attention_mask.shape[1] < n_columns:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected at least "
            f"[{n_rows}, {n_columns}]; extra columns are for earlier tokens"
        )
    valid = attention_mask[:, -n_columns:].bool()
    return None if not torch.compiler.is_compiling() and valid.all() else valid
