"""Recall tasks: sequences with scored tokens that are determined by earlier tokens.

Every batch is a pure function of a seed. `mqar` is multi-query associative recall (Arora et al.
2023, "Zoology"), `copy` repeats a string after noise, and `needle` hides a marked key-value pair in
text. In longer sequences only the noise grows, not what has to be remembered.

Distances are random, and some are within the window. Training needs those: keys in the compressive
cache receive no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transformer_vq.checks import Range, check_fields, shown
from transformer_vq.config import ModelConfig
from transformer_vq.errors import UserError

RecallTask = Literal["mqar", "copy", "needle"]
"""Multi-query associative recall, copying, or a key-value pair in text."""

RecallModel = Literal["full", "window", "vq", "mamba"]

N_KEYS, N_VALUES = 48, 48  # tokens that mqar and copy draw from

WINDOW_CODES = 128  # of the model without cache, whose keys are quantized as well

SHORTEST = 16  # tokens of the shortest training sequences

SHORT_BLOCKS = 4  # blocks of the longest training sequences with full attention

MAX_LEN = 2**20

Count = Annotated[int, Range(1, 10**9)]

Length = Annotated[int, Range(1, MAX_LEN)]


Array = npt.NDArray[np.int64]


Mask = npt.NDArray[np.bool_]


Bytes = npt.NDArray[np.uint8]


Shape = tuple[int, int]
"""Number of sequences, and their length."""


MARK = 0  # start of a string to copy, and of a key-value pair in text


FIRST_NOISE, FIRST_KEY = 1, 32


FIRST_VALUE = FIRST_KEY + N_KEYS


VOCAB_SIZE = FIRST_VALUE + N_VALUES


TEXT_VOCAB_SIZE = 1 + 256  # the mark and all bytes


PRINTABLE = (34, 128)  # tokens of the visible ASCII characters, which are byte + 1


TRAIN_SHARE = 0.9  # part of a text that is used for training


@dataclass(frozen=True)
class RecallBatch:
    """tokens, targets: [b, t] of int64, scored: [b, t] of bool.

    The targets are the next tokens. Those that are scored follow from the tokens before them.
    """

    tokens: Tensor
    targets: Tensor
    scored: Tensor


class RecallData:
    """Batches of one task. text: bytes to hide the pair of needle in; by default random words."""

    def __init__(
        self, task: RecallTask, settings: RecallSettings, text: Bytes | None = None
    ) -> None:
        self.task = task
        self.settings = settings
        self.text = text if task == "needle" else None
        self.vocab_size = VOCAB_SIZE if self.text is None else TEXT_VOCAB_SIZE

    def batch(
        self, seed: Sequence[int], batch_size: int, seq_len: int, held_out: bool = False
    ) -> RecallBatch:
        """Return the batch of a seed. held_out: use seeds and text that training never uses."""
        shortest = self.settings.min_len(self.task)
        if seq_len < shortest:
            raise UserError(f"seq_len={seq_len}: {self.task} needs at least {shortest} tokens")
        random = np.random.default_rng([int(held_out), *seed])
        shape = (batch_size, seq_len + 1)
        if self.task == "mqar":
            tokens, scored = _mqar(random, shape, self.settings.pairs)
        elif self.task == "copy":
            tokens, scored = _copy(random, shape, self.settings.copied)
        else:
            noise = self._text(random, shape, held_out)
            tokens, scored = _needle(random, noise, self.settings.value_len)
        found = torch.from_numpy(tokens)
        return RecallBatch(found[:, :-1], found[:, 1:], torch.from_numpy(scored[:, 1:]))

    def _text(self, random: np.random.Generator, shape: Shape, held_out: bool) -> Array:
        if self.text is None:
            return _random_words(random, shape)
        cut = int(TRAIN_SHARE * len(self.text))
        part = self.text[cut:] if held_out else self.text[:cut]
        starts = random.integers(len(part) - shape[1] + 1, size=(shape[0], 1))
        tokens: Array = part[starts + np.arange(shape[1])].astype(np.int64) + 1
        return tokens


def read_text(path: Path, max_len: int) -> Bytes:
    """Return the bytes of a text for needle; raise UserError if it is too short.

    max_len: length of the longest sequence.
    """
    text = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    needed = int(np.ceil((max_len + 2) / (1 - TRAIN_SHARE)))
    if len(text) < needed:
        raise UserError(
            f"--text {path}: has {len(text):,} bytes, but contexts of {max_len:,} tokens need "
            f"{needed:,}; use a longer text or shorter contexts"
        )
    return text


def _mqar(random: np.random.Generator, shape: Shape, n: int) -> tuple[Array, Mask]:
    """Return n pairs, then every key once more at a random place, followed by its value."""
    b, length = shape
    keys = FIRST_KEY + _distinct(random, b, N_KEYS, n)
    values = FIRST_VALUE + random.integers(N_VALUES, size=(b, n))
    tokens = random.integers(FIRST_NOISE, FIRST_KEY, size=shape)
    tokens[:, 0 : 2 * n : 2], tokens[:, 1 : 2 * n : 2] = keys, values
    places = 2 * n + 2 * _distinct(random, b, (length - 2 * n) // 2, n)
    rows = np.arange(b)[:, None]
    tokens[rows, places], tokens[rows, places + 1] = keys, values
    scored = np.zeros(shape, dtype=np.bool_)
    scored[rows, places + 1] = True
    return tokens, scored


def _copy(random: np.random.Generator, shape: Shape, n: int) -> tuple[Array, Mask]:
    """Return mark and string at a random depth of the noise, and again at the end.

    The tokens of a string are distinct.
    """
    b, _ = shape
    string = np.full((b, n + 1), MARK)
    string[:, 1:] = FIRST_KEY + _distinct(random, b, N_KEYS + N_VALUES, n)
    noise = random.integers(FIRST_NOISE, FIRST_KEY, size=shape)
    return _hidden_and_repeated(random, noise, string, n)


def _needle(random: np.random.Generator, noise: Array, n: int) -> tuple[Array, Mask]:
    """Return mark, key and value at a random depth of the noise, and again at the end."""
    pair = random.integers(*PRINTABLE, size=(len(noise), n + 2))
    pair[:, 0] = MARK
    return _hidden_and_repeated(random, noise, pair, n)


def _hidden_and_repeated(
    random: np.random.Generator, noise: Array, string: Array, n_scored: int
) -> tuple[Array, Mask]:
    """Write a string at a random depth into the noise, and at the end, where it is scored."""
    (b, length), n = noise.shape, string.shape[1]
    depth = random.integers(length - 2 * n + 1, size=(b, 1))
    tokens = noise.copy()
    tokens[np.arange(b)[:, None], depth + np.arange(n)] = string
    tokens[:, length - n :] = string
    scored = np.zeros(noise.shape, dtype=np.bool_)
    scored[:, length - n_scored :] = True
    return tokens, scored


def _random_words(random: np.random.Generator, shape: Shape) -> Array:
    """Return noise like text: a bigram process whose frequencies follow Zipf's law.

    The process is the same for all seeds.
    """
    n = VOCAB_SIZE - 1  # all tokens but the mark
    fixed = np.random.default_rng(0)
    ranking = 1 + np.argsort(fixed.random((VOCAB_SIZE, n)), axis=1)  # of the next tokens
    weights = 1 / np.arange(1, n + 1)
    ranks = random.choice(n, size=shape, p=weights / weights.sum())
    tokens = np.empty(shape, dtype=np.int64)
    last = random.integers(1, VOCAB_SIZE, size=shape[0])
    for t in range(shape[1]):
        last = tokens[:, t] = ranking[last, ranks[:, t]]
    return tokens


def _distinct(random: np.random.Generator, b: int, high: int, n: int) -> Array:
    """Return n distinct numbers below `high` for each of b rows, in random order."""
    return np.argsort(random.random((b, high)), axis=1)[:, :n]


@dataclass(frozen=True)
class Candidate:
    """One of the compared models; n_code: None for models without codebooks."""

    model: RecallModel
    n_code: int | None = None

    @property
    def name(self) -> str:
        """The name in tables and figures."""
        names = {"full": "full attention", "window": "window only", "mamba": "Mamba"}
        return names.get(self.model) or f"VQ, {self.n_code:,} codes"

    @property
    def place(self) -> tuple[int, int]:
        """The sort key in tables and figures."""
        return get_args(RecallModel).index(self.model), self.n_code or 0


@dataclass(frozen=True, kw_only=True)
class RecallSettings:
    """What determines an accuracy, apart from task, model and seed.

    Field docstrings are the help texts of `recall.py`.
    """

    lengths: tuple[Length, ...] = (128, 256, 512, 1024, 2048)
    """Context lengths to evaluate."""
    train_len: Length = 512
    """Longest training sequences. Training starts with 16 tokens."""
    steps: Count = 1000
    """Training steps per model."""
    full_share: Annotated[float, Range(0, 1)] = 0.5
    """Fraction of the steps in which vq and window train with full attention, on sequences of up to
    4 blocks, because quantized keys delay the start of learning."""
    step_tokens: Count = 2048
    """Tokens per training step."""
    lr: Annotated[float, Range(1e-9, 1)] = 3e-3
    """Peak learning rate of AdamW."""
    eval_sequences: Count = 64
    """Held-out sequences per context length."""
    pairs: Annotated[int, Range(1, N_KEYS)] = 16
    """Key-value pairs of mqar."""
    copied: Annotated[int, Range(1, N_KEYS + N_VALUES)] = 16
    """Tokens of the string of copy."""
    value_len: Length = 4
    """Tokens of the value of needle."""
    d_model: int = 64
    """Width of the residual stream."""
    n_layer: int = 2
    """Transformer layers; Mamba has twice as many."""
    d_k: int = 16
    """Width of queries and keys, per head."""
    block_len: int = 32
    """Tokens per block."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.lengths:
            raise UserError("lengths: give at least one context length")
        if self.train_len < SHORTEST:
            raise UserError(f"train_len={shown(self.train_len)}: must be at least {SHORTEST}")
        _ = self.model(Candidate("full"), vocab_size=2)  # checks the sizes

    def model(self, candidate: Candidate, vocab_size: int) -> ModelConfig:
        """Return the config of a transformer, without cache for `window`."""
        base = ModelConfig(
            vocab_size=vocab_size,
            d_model=self.d_model,
            n_layer=self.n_layer,
            head_type="mha",
            d_k=self.d_k,
            block_len=self.block_len,
            ema_decay=0.95,  # runs are short
            commit_coef=1e-4,
        )
        if candidate.n_code is None:
            return replace(base, attention="full")
        has_cache = candidate.model == "vq"
        return replace(base, n_code=candidate.n_code, compressive_cache=has_cache)

    def train_lengths(self, quantized: bool) -> list[int]:
        """Return the lengths of the training sequences with or without quantized keys."""
        powers = [SHORTEST << i for i in range(MAX_LEN.bit_length())]
        if quantized:
            shortest = min(2 * max(SHORTEST, self.block_len), self.train_len)
            return [*(n for n in powers if shortest <= n < self.train_len), self.train_len]
        longest = max(SHORTEST, min(SHORT_BLOCKS * self.block_len, self.train_len))
        return [n for n in powers if n <= longest]

    def record(self) -> dict[str, Any]:
        """Return plain values for a JSON record."""
        return {**asdict(self), "lengths": list(self.lengths)}

    def at(self, length: int) -> RecallSettings:
        """Return the settings for a short training sequence, which has less to remember."""
        return replace(
            self,
            pairs=min(self.pairs, max(length // 8, 1)),
            copied=min(self.copied, length // 8),
            value_len=min(self.value_len, length // 4),
        )

    def min_len(self, task: RecallTask) -> int:
        """Return the length of the shortest sequences of a task."""
        lengths: dict[RecallTask, int] = {
            "mqar": 4 * self.pairs,
            "copy": 2 * self.copied + 2,
            "needle": 2 * self.value_len + 4,
        }
        return lengths[task]


def check_lengths(tasks: Sequence[RecallTask], settings: RecallSettings) -> None:
    """Raise UserError if a context length is too short for a task."""
    for task in tasks:
        shortest = settings.min_len(task)
        for length in settings.lengths:
            if length < shortest:
                raise UserError(
                    f"lengths={shown(length)}: {task} needs at least {shortest} tokens; use longer "
                    "contexts or fewer tokens to remember"
                )
