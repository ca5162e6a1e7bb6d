"""tvq bench WHAT: one measurement = one call of the library; a table on stdout, JSON if asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from transformer_vq.bench import ablate, decode, documents, profile, train
from transformer_vq.cli.arguments import (
    UsageError,
    check_range,
    find_preset,
    first_word,
    nearest,
    parse,
)
from transformer_vq.cli.commands import Flat, Json
from transformer_vq.config import HeadType, Precision, RunConfig
from transformer_vq.device import find_device
from transformer_vq.files import check_can_write, write_json

T = TypeVar("T")
MAX_REPEATS, MAX_ROWS, MAX_TOKENS = 10_000, 2**24, 2**40  # more cannot be meant
Out = Annotated[
    Path | None, tyro.conf.arg(help="JSON file for the measurements; `tvq plot` draws it.")
]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace an existing output file.")]


@dataclass(frozen=True)
class Decode:
    """Tokens per second, state and memory of decoding against the length of what was read."""

    preset: str = "small"
    """Size of the model."""
    contexts: tuple[int, ...] = (1024, 8192, 65536, 524288)
    """Tokens read before the steps that are timed."""
    batches: tuple[int, ...] = (1, 8)
    """Rows that are decoded at a time."""
    kinds: tuple[decode.Kind, ...] = ("vq", "full", "gpt2")
    """vq; full: the same with full attention and a key-value cache; gpt2: Hugging Face's."""
    prefills: tuple[int, ...] = (65536, 1048576)
    """Lengths of prompts for which the peak memory of reading them is measured."""
    compile: bool = False
    """Measure compiled decoding as well."""
    memory_gb: float = 16.0
    """Memory that a measurement may take."""
    time_limit: float = 1200.0
    """Seconds per measurement, including reading the context; a longer one is ended and reported
    as failed."""
    device: str = "auto"
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


@dataclass(frozen=True)
class Shape:
    """Which model is trained; the defaults are a layer of the paper's 190M model."""

    d_model: int = 768
    """Width of the residual stream."""
    n_layer: int | None = None
    """Transformer layers; by default 1 on a CPU, elsewhere the paper's 24."""
    d_k: int = 128
    """Width of queries and keys, per head."""
    n_kv_head: int | None = None
    """Key/value heads of gqa."""
    n_code: int = 512
    """Codewords per codebook."""
    block_len: int = 512
    """Tokens per block."""
    vocab_size: int = 256
    """Number of different tokens."""
    batch_size: int = 1
    """Sequences per step."""
    precision: Precision = "fp32"
    """fp32, or bf16 for matrix products."""
    device: str = "auto"
    """cpu, cuda, ...; auto takes a GPU if there is one."""

    def fields(self) -> dict[str, Any]:
        """As a cell takes them."""
        if self.n_layer is not None:
            return vars(self)
        return vars(self) | {"n_layer": 1 if find_device(self.device).type == "cpu" else 24}


FlatShape = Annotated[Shape, tyro.conf.arg(name="")]


@dataclass(frozen=True)
class Train:
    """Training throughput and memory by head type, kind of attention and length: Tables 6-9.

    Every cell is a process of its own that times whole training steps: forward, backward through
    the whole sequence, optimizer, codebooks. All cells are measured once per round.
    """

    shape: FlatShape = Shape()
    head_types: tuple[HeadType, ...] = train.HEAD_TYPES
    """Single-head gated, multi-query, multi-head attention."""
    kinds: tuple[train.Kind, ...] | None = None
    """full: quadratic attention as in the paper; sdpa: MHA by PyTorch's fused attention; the
    others: VQ attention with that reduction. All by default."""
    lengths: tuple[int, ...] | None = None
    """Tokens per sequence; by default 2048 8192 32768 131072."""
    checkpoint_activations: train.Checkpointing = "auto"
    """Activation checkpointing; auto: where a cell would otherwise be out of memory."""
    compile: bool = False
    """Use torch.compile."""
    repeats: int | None = None
    """Rounds; the best and the median of a cell are told. By default 3."""
    quick: bool = False
    """Only full, sdpa and auto at 2048 and 8192 tokens in 2 rounds, unless told otherwise: some
    minutes on two cores."""
    memory_gb: float | None = None
    """Memory that a cell may take, by default nearly all there is; more is out of memory."""
    time_limit: float = 300.0
    """Seconds that a step may take; cells that would take longer are skipped, with an estimate.
    A measurement that runs for longer than 600 seconds and three such steps is ended."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


@dataclass(frozen=True)
class Documents:
    """What packed documents cost: a training step without documents, with one, and with many."""

    shape: FlatShape = Shape(d_model=256, n_layer=2)
    seq_len: int = 32768
    """Tokens in the sequence."""
    document_len: int = 1000
    """Tokens per document, where there are many."""
    repeats: int = 3
    """Rounds; the best counts."""
    memory_gb: float | None = None
    """Memory that a measurement may take, by default nearly all there is."""
    time_limit: float = 300.0
    """Seconds per step; a measurement that runs for longer than 600 seconds and three such steps is
    ended and reported as failed."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


@dataclass(frozen=True)
class Ablate:
    """Tables 1 and 2: validation loss and latency by codebook size, with and without the cache.

    Every setting is a training in a folder of its own; interrupted, the same command goes on. As
    it stands it takes more than an hour on two cores.
    """

    run: Flat
    out: Path = Path("runs/ablation")
    """Folder for the trainings and for ablation.json, which `tvq plot` draws."""
    codes: tuple[int, ...] = ablate.CODES
    """Codewords per codebook; model.n-code is the base, always among them, and loses its cache."""
    seeds: int = 3
    """Trainings per setting."""
    json: Json = False


@dataclass(frozen=True)
class Profile:
    """Where the time of a training step goes: matrix products, softmax, cache, optimizer, ...

    The parts add up to the step. Sizes are those of a preset, without one those of a layer of the
    paper's 190M model; every part can be changed by an option.
    """

    run: Flat
    steps: int = 4
    """Training steps that are profiled."""
    time_limit: float = 600.0
    """Seconds for the whole profile, including the preparation of the data."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def bench(arguments: list[str]) -> None:
    """Run one benchmark by its name."""
    overview = "\n".join(f"  {name:<9} {what}" for name, (_, what) in BENCHES.items())
    name, rest = first_word(arguments, "bench", "WHAT", f"WHAT is one of\n{overview}")
    if name not in BENCHES:
        raise UsageError(
            f"there is no benchmark {name!r}{nearest(name, BENCHES)}; choose one of "
            f"{', '.join(BENCHES)}"
        )
    BENCHES[name][0](rest)


def decode_(arguments: list[str]) -> None:
    command = _parse(Decode, arguments, "decode")
    for name in ("contexts", "batches", "prefills"):
        numbers = getattr(command, name)
        if min(numbers, default=1) < 1 or (not numbers and name != "prefills"):
            raise UsageError(f"--{name}: give numbers from 1 up")
        for number in numbers:
            check_range(f"--{name}", number, 1, MAX_ROWS if name == "batches" else MAX_TOKENS)
    result = decode.run(
        find_preset(command.preset).model,
        contexts=command.contexts,
        batches=command.batches,
        kinds=command.kinds,
        prefills=command.prefills,
        compiled=command.compile,
        memory_gb=command.memory_gb,
        time_limit=command.time_limit,
        device=find_device(command.device),
    )
    _report(result, decode.table(result), command.out, command.json)


def train_(arguments: list[str]) -> None:
    command = _parse(Train, arguments, "train")
    check_range("--repeats", command.repeats, 1, MAX_REPEATS)
    kinds, lengths, repeats = (
        (train.QUICK_KINDS, train.QUICK_LENGTHS, 2)
        if command.quick
        else (train.KINDS, train.LENGTHS, 3)
    )
    cells = train.grid(
        command.head_types,
        kinds if command.kinds is None else command.kinds,
        lengths if command.lengths is None else command.lengths,
        compile=command.compile,
        **command.shape.fields(),
    )
    repeats = repeats if command.repeats is None else command.repeats
    try:
        result = train.run(
            cells, repeats, command.memory_gb, command.time_limit, command.checkpoint_activations
        )
    except train.Interrupted as stop:
        if stop.result["rows"]:
            _report(stop.result, train.table(stop.result), command.out, command.json)
        raise
    _report(result, train.table(result), command.out, command.json)


def documents_(arguments: list[str]) -> None:
    command = _parse(Documents, arguments, "documents")
    check_range("--repeats", command.repeats, 1, MAX_REPEATS)
    check_range("--document-len", command.document_len, 1, MAX_TOKENS)
    cells = documents.cells(command.seq_len, command.document_len, **command.shape.fields())
    result = train.run(cells, command.repeats, command.memory_gb, command.time_limit)
    _report(result, documents.table(result), command.out, command.json)


def ablate_(arguments: list[str]) -> None:
    base, rest = _preset(arguments, ablate.BASE)
    command = parse(Ablate, rest, "bench ablate [PRESET]", Ablate(base))
    check_range("--seeds", command.seeds, 1, MAX_REPEATS)
    wanted = (command.run, command.out, command.codes, command.seeds)
    stopped_by = ablate.train_all(*wanted)
    if stopped_by is not None:
        print("stopped and saved; the same command goes on from there")
        sys.exit(128 + stopped_by)
    result = ablate.record(*wanted)
    _report(result, ablate.table(result), command.out / "ablation.json", command.json)


def profile_(arguments: list[str]) -> None:
    base, rest = _preset(arguments, profile.BASE)
    command = _parse(Profile, rest, "profile [PRESET]", Profile(base))
    check_range("--steps", command.steps, 1, MAX_REPEATS)
    result = profile.run(command.run, command.steps, command.time_limit)
    _report(result, profile.table(result), command.out, command.json)


def _preset(arguments: list[str], base: RunConfig) -> tuple[RunConfig, list[str]]:
    """The preset that the first word names, if one does, and the other words."""
    if not arguments or arguments[0].startswith("-"):
        return base, arguments
    return find_preset(arguments[0]), arguments[1:]


def _parse(kind: type[T], arguments: list[str], name: str, default: T | None = None) -> T:
    """The options of a benchmark that may write to a file."""
    command = parse(kind, arguments, f"bench {name}", default)
    check_can_write("--out", command.out, command.overwrite)  # type: ignore[attr-defined]
    return command


def _report(result: dict[str, Any], table: str, out: Path | None, as_json: bool) -> None:
    if out is not None:
        write_json(out, result)
    print(table)
    if as_json:
        print(json.dumps(result))


BENCHES: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "train": (train_, "training throughput and memory against length: Tables 6-9"),
    "ablate": (ablate_, "loss and latency by codebook size, and without the cache: Tables 1, 2"),
    "profile": (profile_, "where the time of a training step goes"),
    "documents": (documents_, "what packed documents cost in training"),
    "decode": (decode_, "tokens per second, state and memory of decoding against context"),
}
