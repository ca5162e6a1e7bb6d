"""`TransformerVQ` as transformers models, for `generate`, `Trainer`, pipelines and other tools.

This module only adapts interfaces: attention masks become `valid`, the cache stores the
`ModelState`, and labels give the training loss. All mathematics is in the core model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from transformer_vq.generation.prefill import SEGMENT_LEN, run_segments
from transformer_vq.hf.branches import BRANCH_TYPES
from transformer_vq.hf.cache import TransformerVQCache
from transformer_vq.hf.codebooks import CodebookUpdates
from transformer_vq.hf.configuration_transformer_vq import TransformerVQConfig
from transformer_vq.hf.inputs import check_inputs, document_ids_of, valid_tokens
from transformer_vq.hf.pretrained import TransformerVQPreTrainedModel
from transformer_vq.hf.sharing import share_tensors, shared_module
from transformer_vq.nn.layers import Head
from transformer_vq.nn.model import TransformerVQ, last_columns, scaled_features
from transformer_vq.nn.stack import Stack, StackOutput
from transformer_vq.nn.state import ModelState


@dataclass
class TransformerVQModelOutput(BaseModelOutputWithPast):
    """Adds commit_loss: the core model's, or None if a long prompt was run in segments."""

    commit_loss: Tensor | None = None


@dataclass
class TransformerVQOutput(CausalLMOutputWithPast):
    """Adds commit_loss: the core model's, or None if a long prompt was run in segments."""

    commit_loss: Tensor | None = None


class TransformerVQModel(CodebookUpdates, TransformerVQPreTrainedModel, Stack):
    """The model without a head: returns features for each token (`last_hidden_state`).

    Codebooks are buffers, not parameters. They are updated after each optimizer step with the
    statistics of all training passes since the last one; see `transformer_vq.hf.codebooks`.
    """

    def __init__(self, config: TransformerVQConfig) -> None:
        PreTrainedModel.__init__(self, config)
        self.build(config.to_model_config(), types=BRANCH_TYPES)
        self.post_init()  # type: ignore[operator]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformerVQCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        return_dict: bool | None = None,
        n_last: int | None = None,
        **kwargs: Any,
    ) -> TransformerVQModelOutput | tuple[Any, ...]:
        """Return features, cache and commitment loss.

        input_ids: [b, t], only the tokens that are not yet in `past_key_values`; or instead
        inputs_embeds: [b, t, hidden_size].
        attention_mask: [b, t] or longer, 0 for padding; only the last t columns are used.
        output_hidden_states: return the embeddings and the features after each layer.
        document_ids: [b, t], ids of packed documents; tokens attend within their document only.
        position_ids: [b, t], another way to describe packed documents: each begins at position 0.
            They are ignored after the first call with a cache, which knows the positions.
        n_last: number of last tokens to return features for; all by default.
        """
        given = check_inputs(input_ids, inputs_embeds, kwargs)
        n_rows, seq_len = given.shape[:2]
        cache = self._cache(past_key_values, use_cache)
        state = None if cache is None else cache.state
        valid = valid_tokens(attention_mask, given)
        if document_ids is None and state is None:
            document_ids = document_ids_of(position_ids)
        keep_hidden = (
            self.config.output_hidden_states
            if output_hidden_states is None
            else output_hidden_states
        )
        is_prefill = not torch.is_grad_enabled() and not keep_hidden
        if n_last is not None and is_prefill and seq_len > SEGMENT_LEN:
            output = self._run_prompt(input_ids, inputs_embeds, state, valid, document_ids, n_last)
            commit_loss = None
        else:
            uses_priority = self.training and self.uses_candidates
            priority = self.key_priority(n_rows, seq_len, valid) if uses_priority else None
            output = self.run(
                input_ids,
                state,
                valid,
                document_ids,
                priority,
                embeds=inputs_embeds,
                keep_hidden=bool(keep_hidden),
            )
            commit_loss = output.commit_loss
        if self.training and torch.is_grad_enabled():
            self.add_usage(output.code_usage)
        if cache is not None:
            cache.advance(output.state, seq_len)
        result = TransformerVQModelOutput(
            last_hidden_state=output.x if n_last is None else last_columns(output.x, n_last),
            past_key_values=cache,
            hidden_states=output.hidden,
            commit_loss=commit_loss,
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
        tokens: Tensor | None,
        embeds: Tensor | None,
        state: ModelState | None,
        valid: Tensor | None,
        document_ids: Tensor | None,
        n_last: int,
    ) -> StackOutput:
        """Run a long prompt in segments; the features of the last `n_last` tokens are kept."""
        given = embeds if tokens is None else tokens
        assert given is not None

        def run(start: int, stop: int, state: ModelState, n: int) -> tuple[Tensor, ModelState]:
            columns = [
                None if x is None else x[:, start:stop]
                for x in (tokens, valid, document_ids, embeds)
            ]
            output = self.run(columns[0], state, columns[1], columns[2], embeds=columns[3])
            return last_columns(output.x, n), output.state

        if state is None:
            state = self.init_state(given.shape[0], given.device)
        x, state = run_segments(run, given.shape[1], state, n_last=n_last)
        return StackOutput(x, state, x.new_zeros(()), ())


class TransformerVQForCausalLM(TransformerVQPreTrainedModel, GenerationMixin):
    """A causal language model: `TransformerVQModel` and an output head."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed.weight"}

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config)
        self.model = TransformerVQModel(config)
        bias = not config.tie_word_embeddings
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias)
        self.post_init()

    @classmethod
    def from_core(cls, model: TransformerVQ, **kwargs: Any) -> TransformerVQForCausalLM:
        """Wrap a core model, sharing its tensors; `kwargs` are passed to the config."""
        with torch.device("meta"):
            wrapped = cls(TransformerVQConfig.from_model_config(model.config, **kwargs))
        share_tensors(model, wrapped.model)
        wrapped.lm_head = shared_module(model.head, wrapped.lm_head)
        wrapped.train(model.training)
        return wrapped

    def to_core(self) -> TransformerVQ:
        """Return the core model with the same tensors, for `generate`, `evaluate` and others."""
        with torch.device("meta"):
            core = TransformerVQ(self.config.to_model_config())
        share_tensors(self.model, core)
        core.head = shared_module(self.lm_head, core.head)
        return core.train(self.training)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformerVQCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TransformerVQOutput | tuple[Any, ...]:
        """Return loss, logits, cache and commitment loss.

        labels: [b, t], shifted internally, -100 for positions without a target. The loss is
            cross-entropy plus the weighted commitment loss.
        logits_to_keep: number of last positions to return logits for (0: all), or their indices.
        The other arguments are those of `TransformerVQModel.forward`.
        """
        n_last = logits_to_keep if isinstance(logits_to_keep, int) else 0
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            document_ids,
            n_last=n_last if n_last > 0 and labels is None else None,
            return_dict=True,
            **kwargs,
        )
        x = output.last_hidden_state
        kept = slice(-n_last, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(scaled_features(x[:, kept], self.config.logit_scale))
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, output.commit_loss, **kwargs)
        result = TransformerVQOutput(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            commit_loss=output.commit_loss,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()

    def _loss(self, logits: Tensor, labels: Tensor, commit_loss: Tensor, **kwargs: Any) -> Tensor:
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if kwargs.get("num_items_in_batch") is not None:
            # With gradient accumulation, this batch is only a fraction of the optimizer step.
            targets = kwargs.get("shift_labels")
            targets = labels[:, 1:] if targets is None else targets
            n_targets = (targets != -100).sum()
            commit_loss = commit_loss * n_targets / kwargs["num_items_in_batch"]
        total: Tensor = loss + self.config.commit_coef * commit_loss
        return total

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize the vocabulary as in transformers; logits stay in float32."""
        embeddings: nn.Module = super().resize_token_embeddings(*args, **kwargs)
        old = self.lm_head
        if not isinstance(old, Head):
            with torch.device("meta"):
                self.lm_head = Head(old.in_features, old.out_features, old.bias is not None)
            share_tensors(old, self.lm_head)
            self.lm_head._is_hf_initialized = True  # keep its weights in `init_weights`
        return embeddings

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

    @property
    def init_continuous_batching(self) -> Any:
        """Not available, so that `transformers serve` generates without continuous batching."""
        raise AttributeError("continuous batching needs paged attention")

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Reject continuous batching, which pages the keys and values of each token."""
        raise ValueError("continuous batching is not supported; use generate without a paged cache")
