"""Types of the JSON record of `tvq bench compress`; this module does not import torch."""

from __future__ import annotations

from typing import Literal, TypedDict

from transformer_vq.bench.records import Machine

Training = Literal["none", "weights", "counts", "primed"]
"""How a model uses training text.

weights: a trained run, which may have been trained on other text. counts: an n-gram model of the
training files. primed: a compressor that has compressed the training files first.
"""


class TextFile(TypedDict):
    """A file that was measured; its size is that of the text, without compression or markup."""

    name: str
    bytes: int


class CompressionRow(TypedDict):
    """One model or compressor: the bits of each file, and bits per byte over all files."""

    name: str
    training: Training
    bits: list[float]
    bits_per_byte: float


class CompressionRecord(TypedDict):
    """Models and compressors on the same files."""

    files: list[TextFile]
    train_bytes: int
    """Size of the training files; 0 if there are none."""
    compression: list[CompressionRow]
    machine: Machine


def row_name(row: CompressionRow) -> str:
    """Return the name of a row in figures, which also says whether a compressor was primed."""
    return f"{row['name']}, primed" if row["training"] == "primed" else row["name"]
