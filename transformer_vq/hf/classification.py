"""Sequence classification: features of the last token of each row, and a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from transformer_vq.hf.cache import TransformerVQCache
from transformer_vq.hf.configuration_transformer_vq import TransformerVQConfig
from transformer_vq.hf.modeling_transformer_vq import TransformerVQModel
from transformer_vq.hf.pretrained import TransformerVQPreTrainedModel


class TransformerVQForSequenceClassification(TransformerVQPreTrainedModel):
    """Classifies sequences of any length by the features of their last token."""

    def __init__(self, config: TransformerVQConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = TransformerVQModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TransformerVQCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """Return the loss and one row of logits per sequence: [b, num_labels].

        The last token of a row is the last one that `attention_mask` includes; without a mask, the
        last one that is not `config.pad_token_id`. labels: [b] classes or values, or
        [b, num_labels]; the kind of loss is `config.problem_type`.
        """
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        x = output.last_hidden_state
        last = self._last_token(input_ids, attention_mask, x)
        logits = self.score(x[torch.arange(len(x), device=x.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, pooled_logits=logits, config=self.config
            )
            loss = loss + self.config.commit_coef * output.commit_loss
        result = SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return result if return_dict else result.to_tuple()

    def _last_token(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, x: Tensor
    ) -> Tensor:
        """Return the index of the last token of each row: [b]."""
        n_rows, seq_len = x.shape[:2]
        columns = torch.arange(seq_len, device=x.device)
        counted = torch.ones(n_rows, seq_len, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            counted = attention_mask[:, -seq_len:].bool()
        elif input_ids is not None and self.config.pad_token_id is not None:
            counted = input_ids != self.config.pad_token_id
        return (columns * counted).argmax(-1)
