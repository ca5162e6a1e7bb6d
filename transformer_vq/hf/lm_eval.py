"""The model `tvq` of lm-evaluation-harness: documents of any length, in constant memory.

    python -m transformer_vq.hf.lm_eval --model tvq --model_args pretrained=my-model --tasks NAME

takes all options of the `lm_eval` command.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from transformer_vq.errors import missing_extra
from transformer_vq.generation.prefill import SEGMENT_LEN
from transformer_vq.hf.cache import TransformerVQCache

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm
except ImportError as error:
    raise missing_extra("transformer_vq.hf.lm_eval", "lm-eval>=0.4.13") from error


@register_model("tvq")
class TransformerVQLM(HFLM):
    """The model `hf` of lm-evaluation-harness, for documents of any length.

    `loglikelihood_rolling` computes the logits of one segment at a time, so memory does not depend
    on the length. It puts exactly one bos token before a text; `hf` puts two, and scores one.
    """

    @property
    def eot_token_id(self) -> int:
        """The token at which generation stops; bos if the model has no eos token."""
        eos: int | None = self.tokenizer.eos_token_id
        return self.tokenizer.bos_token_id if eos is None else eos

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each document, given bos; nothing is truncated."""
        results = []
        for request in tqdm(requests, disable=disable_tqdm or self.rank != 0):
            (text,) = request.args
            results.append(self._score(self.tok_encode(text, add_special_tokens=False)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), results[-1])
        return results

    @torch.no_grad()
    def _score(self, tokens: list[int]) -> float:
        inputs = torch.tensor([[self.prefix_token_id, *tokens]], device=self.device)
        dtype, cache, nats = self.mixed_precision_dtype, TransformerVQCache(), 0.0
        for start in range(0, len(tokens), SEGMENT_LEN):
            segment = inputs[:, start : start + SEGMENT_LEN + 1]  # with the last target
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                logits = self.model(segment[:, :-1], past_key_values=cache).logits
            losses = F.cross_entropy(logits[0], segment[0, 1:], reduction="none")
            nats += float(losses.double().sum())
        return -nats

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        """Return the largest number of rows; without requests, of one segment each."""
        n_rows: int = super()._detect_batch_size(requests or [(None, [0], [0] * SEGMENT_LEN)], pos)
        return n_rows


if __name__ == "__main__":
    cli_evaluate()
