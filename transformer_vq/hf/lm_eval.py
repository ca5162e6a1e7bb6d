"""The model `tvq` of lm-evaluation-harness: documents of any length, in constant memory.

    python -m transformer_vq.hf.lm_eval --model tvq --model_args pretrained=my-model --tasks NAME

takes all options of the `lm_eval` command.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

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

IGNORED = -100
"""Target of padding."""
T = TypeVar("T")


@register_model("tvq")
class TransformerVQLM(HFLM):
    """The model `hf` of lm-evaluation-harness with three differences.

    Logits are computed for one segment at a time, so memory does not depend on the length. Requests
    with the same context share its prefill. Every text has exactly one bos token before it, also in
    `loglikelihood_rolling`, where `hf` puts two before the text and scores the second one.
    """

    @property
    def eot_token_id(self) -> int:
        """The token at which generation stops; bos if the model has no eos token."""
        eos: int | None = self.tokenizer.eos_token_id
        return self.tokenizer.bos_token_id if eos is None else eos

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each document, given bos; nothing is truncated."""
        texts = [request.args[0] for request in requests]
        documents = [
            (None, [self.prefix_token_id], self.tok_encode(text, add_special_tokens=False))
            for text in texts
        ]
        results = [nats for nats, _ in self._loglikelihood_tokens(documents, disable_tqdm)]
        for text, result in zip(texts, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return results

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy search finds it.

        requests: (key for the cache of results, tokens of the context, tokens to score).
        """
        by_context = defaultdict(list)
        for index, (_, context, _) in enumerate(requests):
            by_context[tuple(context)].append(index)
        contexts = sorted(by_context, key=len, reverse=True)
        results = [(0.0, True)] * len(requests)
        n_rows = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        progress = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0)
        for group in _chunks(contexts, n_rows):
            cache = self._prefill([context[:-1] for context in group])
            rows = [(row, i) for row, context in enumerate(group) for i in by_context[context]]
            rows.sort(key=lambda item: -len(requests[item[1]][2]))
            for part in _chunks(rows, n_rows):
                pairs = [(requests[i][1][-1], requests[i][2]) for _, i in part]
                scores = self._score(cache, [row for row, _ in part], pairs)
                for (_, i), score in zip(part, scores, strict=True):
                    results[i] = score
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], score)
                progress.update(len(part))
        progress.close()
        return results

    def _prefill(self, contexts: list[Sequence[int]]) -> TransformerVQCache:
        """Run contexts through the model, left-padded; they may be empty."""
        longest = max(map(len, contexts))
        cache = TransformerVQCache()
        if longest == 0:
            return cache
        tokens = torch.tensor([[0] * (longest - len(c)) + list(c) for c in contexts])
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
        self._run(tokens, cache, attention_mask=mask.to(self.device), logits_to_keep=1)
        return cache

    def _score(
        self, prefilled: TransformerVQCache, rows: list[int], pairs: list[tuple[int, list[int]]]
    ) -> list[tuple[float, bool]]:
        """Score continuations of contexts, segment by segment.

        rows: the row of `prefilled` that each one continues. pairs: the last token of the context,
        which is not in `prefilled`, and the tokens to score; the longest come first.
        """
        cache = TransformerVQCache()
        if prefilled.state is not None:
            index = torch.tensor(rows, device=self.device)
            cache.advance(prefilled.state.select(index), prefilled.get_seq_length())
        longest = max(len(tokens) for _, tokens in pairs)
        inputs = torch.zeros(len(pairs), longest, dtype=torch.long)
        targets = torch.full_like(inputs, IGNORED)
        for row, (last, tokens) in enumerate(pairs):
            inputs[row, : len(tokens)] = torch.tensor([last, *tokens])[: len(tokens)]
            targets[row, : len(tokens)] = torch.tensor(tokens)
        nats = torch.zeros(len(pairs), dtype=torch.float64)
        greedy = torch.ones(len(pairs), dtype=torch.bool)
        for start in range(0, longest, SEGMENT_LEN):
            n = sum(len(tokens) > start for _, tokens in pairs)
            if start > 0:
                cache.batch_select_indices(torch.arange(n))
            logits = self._run(inputs[:n, start : start + SEGMENT_LEN], cache)
            wanted = targets[:n, start : start + SEGMENT_LEN].to(logits.device)
            losses = F.cross_entropy(logits.mT, wanted, ignore_index=IGNORED, reduction="none")
            nats[:n] += losses.double().sum(-1).cpu()
            hits = (logits.argmax(-1) == wanted) | (wanted == IGNORED)
            greedy[:n] &= hits.all(-1).cpu()
        return list(zip((-nats).tolist(), greedy.tolist(), strict=True))

    @torch.no_grad()
    def _run(self, tokens: Tensor, cache: TransformerVQCache, **options: Any) -> Tensor:
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            output = self.model(tokens.to(self.device), past_key_values=cache, **options)
        logits: Tensor = output.logits
        return logits if self.softmax_dtype is None else logits.to(self.softmax_dtype)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """Return the largest number of rows whose segments fit in memory."""
        n_rows: int = super()._detect_batch_size([(None, [0], [0] * SEGMENT_LEN)])
        return n_rows


def _chunks(items: list[T], n: int) -> list[list[T]]:
    return [items[i : i + n] for i in range(0, len(items), n)]


if __name__ == "__main__":
    cli_evaluate()
