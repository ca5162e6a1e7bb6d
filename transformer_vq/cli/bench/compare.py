"""tvq bench compare: curves and test results of several runs in one record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_vq.cli.arguments import UsageError
from transformer_vq.cli.bench.common import Out, parse_with_output, print_result
from transformer_vq.cli.options import Json, Overwrite

Runs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")]


@dataclass(frozen=True)
class Compare:
    """Compare evaluated runs: their curves and test results in one record. Measures nothing."""

    runs: Runs
    """Run folders, evaluated with `tvq eval`."""
    split: Literal["train", "validation", "test"] = "test"
    """Split of the evaluation."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Compare runs; print a table."""
    options = parse_with_output(Compare, arguments, "compare")
    if not options.runs:
        raise UsageError("bench compare needs at least one RUN; RUN is a run folder")

    from transformer_vq.bench.compare import record, table

    result = record(options.runs, options.split)
    print_result(result, table(result), options.out, options.json)
