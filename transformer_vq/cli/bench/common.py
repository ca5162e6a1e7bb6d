"""Options and functions that several benchmarks share."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import tyro

from transformer_vq.bench.defaults import Shape
from transformer_vq.cli.arguments import find_preset, parse
from transformer_vq.cli.output import print_json
from transformer_vq.config import RunConfig

MAX_REPEATS, MAX_TOKENS = 10_000, 2**40  # larger numbers are mistakes

Out = Annotated[
    Path | None, tyro.conf.arg(help="JSON file for the measurements; `tvq plot` plots it.")
]
FlatShape = Annotated[Shape, tyro.conf.arg(name="")]
"""A shape whose options have no prefix: --d-model, not --shape.d-model."""


class WithOutput(Protocol):
    """Options with an output file."""

    @property
    def out(self) -> Path | None: ...

    @property
    def overwrite(self) -> bool: ...


T = TypeVar("T", bound=WithOutput)


def parse_with_output(
    kind: type[T], arguments: list[str], name: str, default: T | None = None
) -> T:
    """Return the options of a benchmark; raise UserError if --out cannot be written."""
    options = parse(kind, arguments, f"bench {name}", default)

    from transformer_vq.files import check_can_write

    check_can_write("--out", options.out, options.overwrite)
    return options


def preset_or(base: RunConfig, arguments: list[str]) -> tuple[RunConfig, list[str]]:
    """Return the preset named by the first argument, by default `base`, and the other arguments."""
    if not arguments or arguments[0].startswith("-"):
        return base, arguments
    return find_preset(arguments[0]), arguments[1:]


def print_result(record: Mapping[str, object], table: str, out: Path | None, as_json: bool) -> None:
    """Write the record to a file if one is given; print the table, and JSON on request."""
    from transformer_vq.files import write_json

    if out is not None:
        write_json(out, record)
    print(table)
    print_json(dict(record), as_json)


def print_trials(
    record: Mapping[str, object], table: str, stopped: bool, as_json: bool
) -> int | None:
    """Print the finished trials of a grid; return the exit status."""
    if stopped:
        print("stopped and saved; run the same command again to continue")
    print_result(record, table, None, as_json)
    return 128 + signal.SIGINT if stopped else None
