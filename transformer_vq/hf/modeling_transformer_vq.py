"""`TransformerVQ` with the surface of a transformers model: `generate`, `Trainer`, pipelines.

Nothing is computed here that the core does not compute: masks become `valid`, the cache holds the
`ModelState`, labels give the training loss.
"""

from __future__ import annotations

import warnings
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

_REFUSED = {
    "inputs_embeds": "the model reads tokens: give input_ids",
    "position_ids": "positions follow from attention_mask; packed documents need document_ids",
    "output_attentions": "attention weights are never formed",
    "output_hidden_states": "hidden states are not kept",
}


@dataclass
class TransformerVQOutput(CausalLMOutputWithPast):
    """commit_loss: of the keys, as the core gives it; None if a prompt was read in pieces."""

    commit_loss: Tensor | None = None


class TransformerVQForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model for transformers, around a `TransformerVQ` in `self.model`.

    Codebooks are no parameters: in training, forward passes add up what they say about them in
    `code_usage`, and `update_codebooks` applies it, once per optimizer step. `CodebookCallback`
    does that for a `Trainer`.
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
        self._n_parts = 0
        self.code_usage: tuple[CodeUsage, ...] | None = None
        """Of all training passes since the last `update_codebooks`; None if there were none."""
        self.post_init()

    @classmethod
    def from_core(cls, model: TransformerVQ, **kwargs: Any) -> TransformerVQForCausalLM:
        """Around an existing model, which is not copied; `kwargs` go to the config."""
        with torch.device("meta"):
            wrapped = cls(TransformerVQConfig.from_model_config(model.config, **kwargs))
        wrapped.model = model
        return wrapped.train(model.training)

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
        """input_ids: [b, t], only those that `past_key_values` has not seen.

        attention_mask: [b, t] or longer, its last t columns count; 0 for padding. labels: [b, t],
        shifted here, -100 for no target; the loss is cross-entropy plus commitment. document_ids:
        [b, t], several documents in a row, each as if it stood alone. logits_to_keep: how many of
        the last positions get logits, or which; 0 for all.
        """
        for name, why in _REFUSED.items():
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"{name} is not supported: {why}")
        if input_ids is None:
            raise ValueError("input_ids are missing")
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
            self._note(output.code_usage)
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
                f"past_key_values is a {type(given).__name__}; this model needs a "
                "TransformerVQCache, as it returns, or None"
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
        """Run a long prompt in segments: the logits of all its tokens could fill the memory."""

        def segment(start: int, stop: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
            parts = [None if x is None else x[:, start:stop] for x in (valid, document_ids)]
            return tokens[:, start:stop], parts[0], parts[1]

        output = run_segments(self.model, segment, tokens.shape[1], state, n_last=n_last)
        return replace(output, commit_loss=None)  # type: ignore[arg-type]

    def _loss(self, output: ModelOutput, labels: Tensor, **kwargs: Any) -> Tensor:
        loss = self.loss_function(output.logits, labels, self.config.vocab_size, **kwargs)
        commit_loss = output.commit_loss
        if kwargs.get("num_items_in_batch") is not None:
            # With gradient accumulation this batch is only its share of an update.
            targets = kwargs.get("shift_labels")
            targets = labels[:, 1:] if targets is None else targets
            n_targets = (targets != -100).sum()
            commit_loss = commit_loss * n_targets / kwargs["num_items_in_batch"]
        return loss + self.config.commit_coef * commit_loss

    def _key_priority(self, tokens: Tensor, valid: Tensor | None) -> Tensor | None:
        """Which keys may become codes: the same for a batch in one process, in parts, or in many.

        Rows are numbered as a `Trainer` deals them out: part after part, rank after rank.
        """
        if not (self.training and self.model.uses_candidates):
            return None
        group = default_group()
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        n_rows, seq_len = tokens.shape
        first_row = (self._n_parts * size + rank) * n_rows
        return token_priority(n_rows, seq_len, valid, tokens.device, first_row)

    def _note(self, usages: tuple[CodeUsage, ...]) -> None:
        self._n_parts += 1
        self.code_usage = add_usages(self.code_usage, usages)

    def update_codebooks(self) -> None:
        """Move the codebooks by what the training passes since the last call say about them."""
        if self.code_usage is not None:
            self.model.update_codebooks(self.code_usage)
        self.drop_code_usage()

    def drop_code_usage(self) -> None:
        """Forget the training passes since the last `update_codebooks`."""
        self.code_usage, self._n_parts = None, 0

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> TransformerVQForCausalLM | tuple[TransformerVQForCausalLM, dict[str, Any]]:
        """As for every transformers model, but incomplete or damaged folders are rejected."""
        check_folder(args[0] if args else kwargs.get("pretrained_model_name_or_path"))
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if info["missing_keys"]:
            raise UserError(f"the folder has no {', '.join(sorted(info['missing_keys']))}")
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As for every transformers model; warns if the codebooks have been left behind."""
        if self.code_usage is not None:
            warnings.warn(
                "training passes were not applied to the codebooks: add CodebookCallback() to the "
                "Trainer, or call update_codebooks() after every optimizer step",
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
        """The core has drawn its own weights."""

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
        """Without a mask nothing is padding: the padding token is the bos token too."""
        return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)


def _valid(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Which of the tokens are no padding, [b, t]; None if all of them."""
    if attention_mask is None:
        return None
    n_rows, n_columns = tokens.shape
    fits = attention_mask.ndim == 2 and attention_mask.shape[0] == n_rows
    if not fits or attention_mask.shape[1] < n_columns:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, want [{n_rows}, {n_columns}] "
            "or more columns, for tokens before these"
        )
    valid = attention_mask[:, -n_columns:].bool()
    return None if not torch.compiler.is_compiling() and valid.all() else valid
