"""Samples of a run: text that streams, pictures in a grid."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from transformer_vq.data.images import N_TOKENS, SIDE, to_pictures, to_tokens
from transformer_vq.data.pictures import decode
from transformer_vq.data.tokenizer import Tokenizer
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import written_whole
from transformer_vq.generate import Context, Sampling, read_prompts, stream
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import progress_bar


class TextStream:
    """From tokens to text as they come; characters split over tokens are put together.

    What might become a stop string is held back until it is clear that it does not.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = [word for word in stop if word]
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more token."""
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
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


def _overlap(text: str, word: str) -> int:
    """How many characters at the end of the text are the beginning of the word."""
    return next((n for n in range(min(len(text), len(word)), 0, -1) if text.endswith(word[:n])), 0)


def read_text(
    model: TransformerVQ, tokenizer: Tokenizer, prompt: str, context: Context | None = None
) -> Context:
    """Read a prompt with progress; it begins a document unless `context` was read before it."""
    tokens = tokenizer.encode(prompt)
    if context is None:
        tokens = [tokenizer.bos, *tokens]
    if not tokens:
        assert context is not None
        return context
    with progress_bar("reading", len(tokens), "tokens") as advance:
        return read_prompts(model, [tokens], context, advance=advance)


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
    """One text per row of the context. write: gets the text of the first row as it comes."""
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


def sample_pictures(
    model: TransformerVQ,
    bos: int,
    sampling: Sampling,
    *,
    n: int = 1,
    begun: Sequence[Path] = (),
    keep: float = 0.5,
    seed: int | None = None,
    compiled: bool = False,
) -> np.ndarray:
    """Pictures, [n, 64, 64, 3]: from nothing, or with the upper part of those in `begun`."""
    prompts: list[list[int]] = [[bos]] * n
    if begun:
        if not 0 < keep < 1:
            raise UserError(f"keep={keep}: must be above 0 and below 1")
        n_kept = min(round(keep * SIDE), SIDE - 1) * SIDE * 3  # whole rows of pixels
        rows = to_tokens(np.stack([_decode(path) for path in begun]))
        prompts = [[bos, *row[:n_kept].tolist()] for row in rows for _ in range(n)]
    n_new = N_TOKENS - len(prompts[0]) + 1
    context = read_prompts(model, prompts)
    drawn = []
    with progress_bar("drawing", n_new, "tokens") as advance:
        for tokens in stream(model, context, n_new, sampling, seed, compiled=compiled):
            drawn.append(tokens)
            advance(1)
    finished = np.concatenate([np.array(prompts)[:, 1:], np.array(drawn).T], axis=1)
    return to_pictures(finished.astype(np.uint8))


def _decode(path: Path) -> np.ndarray:
    try:
        return decode(path)
    except UserError:
        raise
    except Exception as error:  # broken files make Pillow raise errors of almost any kind
        why = getattr(error, "strerror", None) or "it is not an image, or it is corrupt"
        raise UserError(f"cannot read {path}: {why}; give another image") from error


def save_grid(pictures: np.ndarray, path: Path, scale: int = 4) -> None:
    """All pictures in one PNG, about as wide as high, enlarged so that pixels can be seen."""
    try:
        from PIL import Image
    except ImportError:
        raise missing_extra("a PNG file", "Pillow", "image") from None
    n, height, width, _ = pictures.shape
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    grid = np.full((rows * height, columns * width, 3), 255, dtype=np.uint8)
    for i, picture in enumerate(pictures):
        y, x = divmod(i, columns)
        grid[y * height : (y + 1) * height, x * width : (x + 1) * width] = picture
    grid = grid.repeat(scale, 0).repeat(scale, 1)
    with written_whole(path) as partial:
        Image.fromarray(grid).save(partial, format="PNG")
