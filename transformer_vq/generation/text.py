"""Text generation: prefill a text prompt, then stream the text as it is decoded."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import progress_bar


class TextStream:
    """Convert a stream of tokens to text; characters split across tokens are reassembled.

    Text that could be the start of a stop string is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [word for word in stop if word]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that is final after one more token."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(self._tokenizer.decode([token]))
        places = [self._held.find(word) for word in self._stop if word in self._held]
        if places:
            self.stopped = True
            return self._release(min(places))
        longest = max((_overlap(self._held, word) for word in self._stop), default=0)
        return self._release(len(self._held) - longest)

    def end(self) -> str:
        """Return the text that was held back, when there are no more tokens."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the word."""
    return next((n for n in range(min(len(text), len(word)), 0, -1) if text.endswith(word[:n])), 0)


def prefill_text(
    model: TransformerVQ, tokenizer: Tokenizer, prompt: str, context: Context | None = None
) -> Context:
    """Prefill a text prompt, with progress; it starts a new document unless `context` is given."""
    tokens = tokenizer.encode(prompt)
    if context is None:
        tokens = [tokenizer.bos, *tokens]
    if not tokens:
        assert context is not None
        return context
    with progress_bar("prefill", len(tokens), "tokens") as advance:
        return prefill(model, [tokens], context, advance=advance)


def sample_text(
    model: TransformerVQ,
    tokenizer: Tokenizer,
    context: Context,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int | None = None,
    stop: Sequence[str] = (),
    compiled: bool = False,
    write: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Return one text per row of the context; `write` receives that of row 0 while decoding."""
    streams = [TextStream(tokenizer, stop) for _ in range(len(context.logits))]
    texts = [""] * len(streams)

    def add(row: int, text: str) -> None:
        texts[row] += text
        if row == 0 and text:
            write(text)

    for tokens in stream(model, context, max_new_tokens, sampling, seed, compiled=compiled):
        for row, token in enumerate(tokens):
            assert token is not None, "no stop tokens were given"
            add(row, streams[row].push(token))
        if all(text.stopped for text in streams):
            break
    for row, text in enumerate(streams):
        add(row, text.end())
    return texts
