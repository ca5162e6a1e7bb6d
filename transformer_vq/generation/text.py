"""Text and images: prefill a prompt, then decode and convert the tokens."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_vq.data.images import N_TOKENS, SIDE, decode_image, tokens_to_images
from transformer_vq.data.text import reading
from transformer_vq.data.tokenizers import Tokenizer
from transformer_vq.errors import UserError, import_extra
from transformer_vq.files import atomic_write
from transformer_vq.generation import NEW_TOKENS, TEMPERATURE, TOP_P
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import Context, prefill
from transformer_vq.generation.sampling import Sampling
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import progress_bar


class GeneratedText(NamedTuple):
    """A generated text, and why it ends."""

    text: str
    ended: bool
    """Whether the model ended the document; False at the maximum length or a stop string."""


class TextStream:
    """Convert a stream of tokens to text; characters split across tokens are reassembled.

    Text that could be the start of a stop string is held back until it is clear that it is not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [word for word in stop if word]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.text = ""  # all text that is final
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
        self.text += text
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
    elif not tokens:
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
    stop_at_end: bool = True,
    compiled: bool = False,
    write: Callable[[str], None] = lambda text: None,
) -> list[GeneratedText]:
    """Return one text per row of the context; `write` receives that of row 0 while decoding.

    stop: strings that end a text. stop_at_end: also end at the end-of-document token, if the
    tokenizer has one; otherwise the model continues with a new document.
    """
    streams = [TextStream(tokenizer, stop) for _ in range(len(context.logits))]
    ended = [False] * len(streams)
    ends = {*tokenizer.stops, *([] if tokenizer.eod is None else [tokenizer.eod])}
    stop_tokens = tuple(sorted(ends)) if stop_at_end else ()

    def show(row: int, text: str) -> None:
        if row == 0 and text:
            write(text)

    steps = stream(model, context, max_new_tokens, sampling, seed, stop_tokens, compiled=compiled)
    for tokens in steps:
        for row, token in enumerate(tokens):
            if token in stop_tokens and not streams[row].stopped:
                ended[row] = True
            elif token is not None:
                show(row, streams[row].push(token))
        if all(text.stopped or end for text, end in zip(streams, ended, strict=True)):
            break
    for row, text in enumerate(streams):
        show(row, text.end())
    return [GeneratedText(x.text, end) for x, end in zip(streams, ended, strict=True)]


def generate_text(
    model: TransformerVQ,
    tokenizer: Tokenizer,
    prompt: str = "",
    max_new_tokens: int = NEW_TOKENS,
    *,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    top_k: int | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
) -> str:
    """Return the text that follows a prompt; it ends with the document if the model ends it."""
    context = prefill_text(model, tokenizer, prompt)
    sampling = Sampling(temperature, top_p, top_k)
    texts = sample_text(model, tokenizer, context, max_new_tokens, sampling, seed=seed, stop=stop)
    return texts[0].text


def sample_images(
    model: TransformerVQ,
    bos: int,
    sampling: Sampling,
    *,
    n: int = 1,
    images: Sequence[Path] = (),
    keep: float = 0.5,
    seed: int | None = None,
    compiled: bool = False,
) -> np.ndarray:
    """Return images, [n, 64, 64, 3]: new ones, or completions of the upper part of `images`."""
    prompts: list[list[int]] = [] if images else [[bos]] * n
    if images:
        if not 0 < keep < 1:
            raise UserError(f"keep={keep}: must be above 0 and below 1")
        n_kept = min(round(keep * SIDE), SIDE - 1) * SIDE * 3  # whole rows of pixels
        for path in images:
            with reading(path):
                prompts += [[bos, *decode_image(path).flatten()[:n_kept].tolist()]] * n
    n_new = N_TOKENS - len(prompts[0]) + 1
    context = prefill(model, prompts)
    sampled = []
    with progress_bar("sampling", n_new, "tokens") as advance:
        for tokens in stream(model, context, n_new, sampling, seed, compiled=compiled):
            sampled.append(tokens)
            advance(1)
    finished = np.concatenate([np.array(prompts)[:, 1:], np.array(sampled).T], axis=1)
    return tokens_to_images(finished.astype(np.uint8))


def save_grid(images: np.ndarray, path: Path, scale: int = 4) -> None:
    """Write all images to one PNG, in a square grid, enlarged so that pixels are visible."""
    pil = import_extra("PIL.Image", "a PNG file", "pillow")
    n, height, width, _ = images.shape
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    grid = np.full((rows * height, columns * width, 3), 255, dtype=np.uint8)
    for i, image in enumerate(images):
        y, x = divmod(i, columns)
        grid[y * height : (y + 1) * height, x * width : (x + 1) * width] = image
    grid = grid.repeat(scale, 0).repeat(scale, 1)
    with atomic_write(path) as partial:
        pil.fromarray(grid).save(partial, format="PNG")
