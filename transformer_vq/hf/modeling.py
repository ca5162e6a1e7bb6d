"""`TransformerVQ` as transformers models, for `generate`, `Trainer`, pipelines and other tools.

Each model holds the embeddings and layers of the core (`model`) and a head. This module
only adapts interfaces: attention masks become `valid`, the cache stores the `ModelState`, and
labels give the training loss. All mathematics is in the core model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import CONFIG_NAME
from transformers.utils.generic import can_return_tuple

from transformer_vq.errors import UserError
from transformer_vq.generation.prefill import SEGMENT_LEN, run_segments
from transformer_vq.hf.cache import TransformerVQCache
from transformer_vq.hf.codebooks import CodebookUpdates
from transformer_vq.hf.configuration import FixedAutoMap, TransformerVQConfig
from transformer_vq.nn.attention import AttentionLayer
from transformer_vq.nn.layers import Head, ScaledSinusoids, init_linear
from transformer_vq.nn.model import (
    ModelState,
    StackOutput,
    TransformerVQ,
    check_finite,
    last_columns,
    scaled_features,
)
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer
from transformer_vq.training.loading import WEIGHTS, check_export

SHARED = ("embed", "positions", "branches", "norm")
"""The modules of a `Stack`, which core models and adapters share."""


@dataclass
class TransformerVQModelOutput(BaseModelOutputWithPast):
    """Adds commit_loss: the core model's, or None if a long prompt was run in segments."""

    commit_loss: Tensor | None = None


@dataclass
class TransformerVQOutput(CausalLMOutputWithPast):
    """Adds commit_loss: the core model's, or None if a long prompt was run in segments."""

    commit_loss: Tensor | None = None


class TransformerVQLayers(CodebookUpdates):
    """The embeddings and layers of the core, called with the arguments of transformers models."""

    _tp_plan: ClassVar[dict[str, str]] = {}  # transformers asks every base model for them
    _pp_plan: ClassVar[dict[str, str]] = {}

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config.to_model_config())
        self.settings = config

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
        n_last: int | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> TransformerVQModelOutput:
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
        if output_attentions:
            raise ValueError("output_attentions is not supported: there is no such matrix")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        given = inputs_embeds if input_ids is None else input_ids
        assert given is not None
        n_rows, seq_len = given.shape[:2]
        if use_cache is None:
            use_cache = self.settings.use_cache and not self.training
        cache = TransformerVQCache() if past_key_values is None and use_cache else past_key_values
        state = None if cache is None else cache.state
        valid = _valid_tokens(attention_mask, given)
        if document_ids is None and position_ids is not None and state is None:
            document_ids = (position_ids == 0).cumsum(-1)
        if output_hidden_states is None:
            output_hidden_states = self.settings.output_hidden_states
        is_prefill = not torch.is_grad_enabled() and not output_hidden_states
        if n_last is not None and is_prefill and seq_len > SEGMENT_LEN:

            def run(start: int, stop: int, state: ModelState, n: int) -> tuple[Tensor, ModelState]:
                all_columns = (input_ids, valid, document_ids, inputs_embeds)
                ids, mask, documents, x = (
                    y if y is None else y[:, start:stop] for y in all_columns
                )
                output = self.run(ids, state, mask, documents, embeds=x)
                return last_columns(output.x, n), output.state

            state = self.init_state(n_rows, given.device) if state is None else state
            x, state = run_segments(run, seq_len, state, n_last=n_last)
            output, commit_loss = StackOutput(x, state, x.new_zeros(()), ()), None
        else:
            uses_priority = self.training and self.uses_candidates
            output = self.run(
                input_ids,
                state,
                valid,
                document_ids,
                self.key_priority(n_rows, seq_len, valid) if uses_priority else None,
                embeds=inputs_embeds,
                keep_hidden=bool(output_hidden_states),
            )
            commit_loss = output.commit_loss
        if self.training and torch.is_grad_enabled():
            self.add_usage(output.code_usage)
        if cache is not None:
            cache.advance(output.state, seq_len)
        return TransformerVQModelOutput(
            last_hidden_state=output.x if n_last is None else last_columns(output.x, n_last),
            past_key_values=cache,
            hidden_states=output.hidden,
            commit_loss=commit_loss,
        )


class TransformerVQPreTrainedModel(FixedAutoMap, PreTrainedModel):
    """What all models have in common: layers, initial weights, codebook updates and saving.

    Codebooks are buffers, not parameters. They are updated after each optimizer step with the
    statistics of all training passes since the last one; see `transformer_vq.hf.codebooks`.
    """

    config_class = TransformerVQConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _is_stateful = True
    _input_embed_layer = "embed"
    _no_split_modules: ClassVar = ["VQAttention", "FullAttention", "FeedForward"]
    _skip_keys_device_placement: ClassVar = ["past_key_values"]
    _keep_in_fp32_modules_strict: ClassVar = ["c_sum", "c_count"]

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config)
        self.model = TransformerVQLayers(config)

    @property
    def code_usage(self) -> tuple[CodeUsage, ...] | None:
        """Codebook statistics of the training passes since the last optimizer step, or None."""
        return self.model.code_usage

    def update_codebooks(self) -> None:
        """Apply the code usage now; otherwise this happens after the next optimizer step."""
        self.model.update_codebooks()

    def drop_code_usage(self) -> None:
        """Discard the code usage since the last optimizer step."""
        self.model.drop_code_usage()

    def freeze_codebooks(self, freeze: bool = True) -> None:
        """Select whether training leaves the codebooks unchanged."""
        self.model.codebooks_frozen = freeze

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the initial weights of the core model, including its codebooks."""
        if isinstance(module, nn.Linear):
            init_linear(module)
        elif isinstance(module, nn.Embedding | VectorQuantizer):
            module.reset_parameters()
        elif isinstance(module, AttentionLayer):
            init.zeros_(module.u)
            init.zeros_(module.v)
        elif isinstance(module, ScaledSinusoids):
            init.zeros_(module.scale)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Use the core's own checkpoints: one per segment, so memory does not grow with it."""
        self.gradient_checkpointing = enable
        for i, branch in enumerate(self.model.branches):
            branch.checkpoint_activations = enable and i % every_n_layers == 0  # type: ignore[assignment]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize the vocabulary as in transformers."""
        embeddings: nn.Module = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.config.to_model_config()
        return embeddings

    @classmethod
    def from_pretrained(
        cls, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """Load a model as in transformers, but reject incomplete or corrupt folders.

        A head may be missing, as in transformers: it gets new weights. Other missing tensors are
        an error, unless the caller asks for them with `output_loading_info`.
        """
        folder = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        check_export(folder, CONFIG_NAME, "generation_config.json", *WEIGHTS)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        missing = sorted(n for n in info["missing_keys"] if n.startswith(cls.base_model_prefix))
        if missing and kwargs.get("state_dict") is None and not output_loading_info:
            problem = f"the folder has no {missing[0]} and lacks {len(missing) - 1} more tensors"
            raise UserError(f"{problem}; export the model again")
        _align(model)
        plain = {n: x for n, x in model.state_dict().items() if type(x) is Tensor}
        check_finite(folder, {n: x for n, x in plain.items() if x.device.type == "cpu"})
        return (model, info) if output_loading_info else model


class TransformerVQModel(TransformerVQPreTrainedModel):
    """The model without a head: returns features for each token (`last_hidden_state`)."""

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> TransformerVQModelOutput | tuple[Any, ...]:
        """Return features, cache and commitment loss; see `TransformerVQLayers.forward`."""
        output: TransformerVQModelOutput = self.model(input_ids, attention_mask, **kwargs)
        return output


class TransformerVQForCausalLM(TransformerVQPreTrainedModel, GenerationMixin):
    """A causal language model: features and an output head."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed.weight"}

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, not config.tie_word_embeddings)
        self.post_init()

    @classmethod
    def from_core(cls, model: TransformerVQ, **kwargs: Any) -> TransformerVQForCausalLM:
        """Wrap a core model, sharing its modules; `kwargs` are passed to the config."""
        with torch.device("meta"):
            wrapped = cls(TransformerVQConfig.from_model_config(model.config, **kwargs))
        for name in SHARED:
            setattr(wrapped.model, name, getattr(model, name))
        wrapped.lm_head = model.head
        wrapped.train(model.training)
        return wrapped

    def to_core(self) -> TransformerVQ:
        """Return the core model with the same modules, for `generate`, `evaluate` and others."""
        with torch.device("meta"):
            core = TransformerVQ(self.config.to_model_config())
        for name in SHARED:
            setattr(core, name, getattr(self.model, name))
        core.head = self.lm_head
        return core.train(self.training)

    @can_return_tuple  # type: ignore[untyped-decorator]
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
        **kwargs: Any,
    ) -> TransformerVQOutput | tuple[Any, ...]:
        """Return loss, logits, cache and commitment loss.

        labels: [b, t], shifted internally, -100 for positions without a target. The loss is
            cross-entropy plus the weighted commitment loss.
        logits_to_keep: number of last positions to return logits for (0: all), or their indices.
        The other arguments are those of `TransformerVQLayers`.
        """
        n_last = logits_to_keep if isinstance(logits_to_keep, int) else 0
        output: TransformerVQModelOutput = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            document_ids,
            n_last=n_last if n_last > 0 and labels is None else None,
            **kwargs,
        )
        x = output.last_hidden_state
        kept = slice(-n_last, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(scaled_features(x[:, kept], self.config.logit_scale))
        loss = None
        if labels is not None:
            assert output.commit_loss is not None  # labels need all features: no segments
            loss = self._loss(logits, labels, output.commit_loss, **kwargs)
        shared = {x: output[x] for x in output if x != "last_hidden_state"}
        return TransformerVQOutput(loss=loss, logits=logits, **shared)

    def _loss(self, logits: Tensor, labels: Tensor, commit_loss: Tensor, **kwargs: Any) -> Tensor:
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if kwargs.get("num_items_in_batch") is not None:
            # With gradient accumulation, this batch is only a fraction of the optimizer step.
            shifted = kwargs.get("shift_labels")
            n_targets = ((labels[:, 1:] if shifted is None else shifted) != -100).sum()
            commit_loss = commit_loss * n_targets / kwargs["num_items_in_batch"]
        total: Tensor = loss + self.config.commit_coef * commit_loss
        return total

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Resize the vocabulary as in transformers; logits stay in float32."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.lm_head.__class__ = Head  # transformers has put an nn.Linear there
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

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Reject continuous batching, which pages the keys and values of each token."""
        raise ValueError("continuous batching is not supported; use generate without a paged cache")


def _valid_tokens(attention_mask: Tensor | None, given: Tensor) -> Tensor | None:
    """Return the mask of tokens that are not padding, [b, t], or None if there is no padding.

    given: [b, t, ...] tokens or embeddings.
    """
    if attention_mask is None:
        return None
    n_rows, n_columns = given.shape[:2]
    if attention_mask.shape != (n_rows, max(n_columns, attention_mask.shape[-1])):
        found, least = tuple(attention_mask.shape), f"[{n_rows}, {n_columns}]"
        raise ValueError(f"attention_mask has shape {found}, expected at least {least}")
    valid = attention_mask[:, -n_columns:].bool()
    # Waits for a GPU; but a mask without padding, the usual one, would cost more in every layer.
    return None if not torch.compiler.is_compiling() and valid.all() else valid


def _align(model: nn.Module) -> None:
    """Copy tensors of a mapped file to aligned memory.

    Matrix products round by alignment, so without this the logits could differ from the run's.
    """
    for x in (*model.parameters(), *model.buffers()):
        if x.device.type == "cpu" and x.data_ptr() % 64 != 0:
            x.data = x.data.clone()
