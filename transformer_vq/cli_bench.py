"""tvq bench WHAT: one measurement = one call of the library; a table on stdout, JSON if asked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from transformer_vq.arguments import UsageError, find_preset, first_word, nearest, parse
from transformer_vq.bench import decode
from transformer_vq.commands import Json
from transformer_vq.files import write_json
from transformer_vq.nn.device import find_device

Out = Annotated[
    Path | None, tyro.conf.arg(help="JSON file for the measurements; `tvq plot` draws it.")
]


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
    device: str = "auto"
    out: Out = None
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
    command = parse(Decode, arguments, "bench decode")
    for name in ("contexts", "batches"):
        if not getattr(command, name) or min(getattr(command, name)) < 1:
            raise UsageError(f"--{name}: give numbers from 1 up")
    result = decode.run(
        find_preset(command.preset).model,
        contexts=command.contexts,
        batches=command.batches,
        kinds=command.kinds,
        prefills=command.prefills,
        compiled=command.compile,
        memory_gb=command.memory_gb,
        device=find_device(command.device),
    )
    _report(result, decode.table(result), command.out, command.json)


def _report(result: dict[str, Any], table: str, out: Path | None, as_json: bool) -> None:
    if out is not None:
        write_json(out, result)
    print(table)
    if as_json:
        print(json.dumps(result))


BENCHES: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "decode": (decode_, "tokens per second, state and memory of decoding against context"),
}
