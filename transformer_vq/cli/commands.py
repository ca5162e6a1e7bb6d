"""The options of every command; field docstrings are their help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_vq.config import DataConfig, Dataset, RunConfig

Flat = Annotated[RunConfig, tyro.conf.arg(name="")]
Json = Annotated[bool, tyro.conf.arg(help="Make the last line of stdout one JSON object.")]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace an existing output file.")]


@dataclass(frozen=True)
class Train:
    """Train a model from a preset; every part of it can be changed by an option."""

    run: Flat
    out: Path
    """Folder of the run, which must not hold one yet."""
    json: Json = False


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its newest checkpoint, bit for bit as if it had not been interrupted.

    Options may change what does not make it another run, such as train.save-every; train.device,
    train.checkpoint-activations and train.compile may then change the last bits.
    """

    run: Flat
    json: Json = False


@dataclass(frozen=True)
class Eval:
    """Score a split: bits per byte, word-level perplexity, loss by position in context."""

    data: DataConfig
    """Other data than the run was trained on may be given."""
    split: Literal["train", "validation", "test"] = "test"
    protocol: Literal["windowed", "streaming", "both", "auto"] = "auto"
    """windowed: fresh state every seq-len tokens, as in the paper. streaming: one state through
    every whole document. auto: both, or only windowed for full attention, whose cost grows."""
    checkpoint: str = "best"
    """best, last, or the number of a step."""
    seq_len: int | None = None
    """Tokens per context of the windowed protocol; the run's own by default."""
    batch_size: int | None = None
    """Contexts worked on at a time; the result does not depend on it."""
    max_tokens: int | None = None
    """Score only the start of the split."""
    out: Path | None = None
    """JSON file for the results; by default RUN/evaluation-SPLIT.json if the run's own data were
    scored whole, else none."""
    overwrite: Overwrite = False
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    json: Json = False


@dataclass(frozen=True)
class Sample:
    """Let a run write text that streams to the terminal, or draw images into a PNG."""

    prompt: str | None = None
    """Text to go on from; without any prompt a document is begun."""
    prompt_file: Path | None = None
    """File with the text to go on from, however long: the model reads it in constant memory."""
    tokens: int = 500
    """How many tokens to write."""
    temperature: float = 1.0
    """Below 1 likely tokens become likelier; 0 always takes the likeliest."""
    top_p: float = 0.95
    """Keep the likeliest tokens that together reach this probability (nucleus sampling)."""
    top_k: int | None = None
    """Keep at most so many of the likeliest tokens."""
    seed: int | None = None
    """The same seed gives the same samples."""
    batch: int = 1
    """How many samples."""
    stop: tuple[str, ...] = ()
    """End a sample where one of these texts appears."""
    save_state: Path | None = None
    """Write what was read to this file, to go on from it later."""
    load_state: Path | None = None
    """Go on from such a file; a prompt is then read after it."""
    images: tuple[Path, ...] = ()
    """For runs on images: complete the lower part of these."""
    keep: float = 0.5
    """The upper part of given images that is kept."""
    out: Path | None = None
    """For runs on images: the PNG to write; by default RUN/samples.png, which is replaced."""
    overwrite: Overwrite = False
    checkpoint: str = "best"
    """best, last, or the number of a step."""
    compile: bool = False
    """Compile the decoding: half a minute at first (a C++ compiler is needed), then faster."""
    device: str = "auto"
    json: Json = False


@dataclass(frozen=True)
class Prepare:
    """Turn material into a corpus of tokens; training does this on its own when needed.

    Downloads enwik8 if no path is given for it; nothing else is ever fetched.
    """

    dataset: tyro.conf.Positional[Dataset] = "text"
    path: str | None = None
    """File or folder that holds the material."""
    tokenizer: str | None = None
    """An existing SentencePiece .model for books."""
    vocab_size: int | None = None
    """Size of the vocabulary to be learned for books; by default 32,000."""
    cache: str = DataConfig.cache
    """Folder in which corpora and downloads are kept."""
    json: Json = False


@dataclass(frozen=True)
class Export:
    """Write a run as a folder for Hugging Face transformers."""

    folder: tyro.conf.Positional[Path]
    """New folder for config, safetensors and tokenizer."""
    checkpoint: str = "best"
    """best, last, or the number of a step."""


@dataclass(frozen=True)
class Info:
    """Parameters, FLOPs per token, state and memory of a preset with changes, or of a run."""

    run: Flat
    json: Json = False


@dataclass(frozen=True)
class Plot:
    """Draw the loss curves and codebook health of a run, or the figure of a recorded benchmark."""

    path: tyro.conf.Positional[Path]
    """Folder of a run, or a JSON file from benchmarks/."""
    out: Path | None = None
    """PNG to write; by default next to the data, where an older figure is replaced."""
    overwrite: Overwrite = False
