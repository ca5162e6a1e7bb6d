"""tvq runs: list the runs in a folder."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from transformer_vq.cli.arguments import UsageError, parse
from transformer_vq.cli.options import Json
from transformer_vq.cli.output import print_json
from transformer_vq.progress import short

if TYPE_CHECKING:
    from transformer_vq.training.run_list import RunSummary

STYLES = {"running": "green", "finished": "", "corrupt": "red"}
"""Color of a status; others are yellow."""
COLUMNS = ("run", "status", "steps", "bits/byte", "params", "data", "size", "changed")
LEFT = ("run", "status", "data")
"""Columns that are aligned left."""
DATA = COLUMNS.index("data")
GAP, MIN_NAME, MAX_DATA = 2, 8, 12
"""Characters between two columns, and limits of columns that are shortened."""


@dataclass(frozen=True)
class RunsOptions:
    """List the runs in a folder and its subfolders: status, steps, loss, size, last change."""

    folder: tyro.conf.Positional[Annotated[Path | None, tyro.conf.arg(metavar="[DIR]")]] = None
    """Folder to search. None searches runs/ if it exists, otherwise the working directory."""
    sort: Literal["time", "loss", "step", "name"] = "time"
    """Order: last changed first, lowest validation loss first, most steps first, or by name."""
    json: Json = False


def run(arguments: list[str]) -> None:
    """Print a table of runs."""
    options = parse(RunsOptions, arguments, "runs")
    folder = options.folder
    if folder is None:
        folder = Path("runs") if Path("runs").is_dir() else Path(".")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; give a folder that contains runs")

    from transformer_vq.training.run_list import find_runs, summarize

    found = sorted(map(summarize, find_runs(folder)), key=ORDERS[options.sort])
    if found:
        _print_table(found, folder)
    else:
        print(f"no runs in {folder}; start one with: tvq train tiny --out runs/tiny")
    runs = [{"name": _name(x, folder)} | x.to_dict() for x in found]
    print_json({"folder": str(folder), "runs": runs}, options.json)


ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "time": lambda x: (-x.changed, str(x.path)),
    "loss": lambda x: (
        math.inf if x.best_bits_per_byte is None else x.best_bits_per_byte,
        str(x.path),
    ),
    "step": lambda x: (-(x.step or 0), str(x.path)),
    "name": lambda x: str(x.path),
}


def _print_table(runs: list[RunSummary], folder: Path) -> None:
    """Print a row per run; on a terminal, long names are shortened to its width."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    rows = [list(COLUMNS), *(_cells(run, folder) for run in runs)]
    if console.is_terminal:
        for row in rows:
            row[DATA] = _shortened(row[DATA], MAX_DATA)
        others = sum(max(map(len, column)) + GAP for column in list(zip(*rows, strict=True))[1:])
        for row in rows:
            row[0] = _shortened(row[0], max(console.width - others, MIN_NAME))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        aligned = [
            cell.ljust(width) if name in LEFT else cell.rjust(width)
            for name, cell, width in zip(COLUMNS, row, widths, strict=True)
        ]
        line = Text((" " * GAP).join(aligned).rstrip(), "" if number else "bold")
        if number:
            start = widths[0] + GAP
            line.stylize(STYLES.get(row[1], "yellow"), start, start + widths[1])
        console.print(line, soft_wrap=True)


def _cells(run: RunSummary, folder: Path) -> list[str]:
    return [
        _printable(_name(run, folder)),
        run.status,
        _steps(run),
        "-" if run.best_bits_per_byte is None else f"{run.best_bits_per_byte:.4f}",
        "-" if run.parameters is None else short(run.parameters),
        _printable(run.dataset or "-"),
        short_bytes(run.bytes),
        _age(time.time() - run.changed),
    ]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _name(run: RunSummary, folder: Path) -> str:
    name = str(run.path.relative_to(folder))
    return run.path.absolute().name if name == "." else name


def _printable(text: str) -> str:
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def _steps(run: RunSummary) -> str:
    if run.steps is None:
        return "-"
    step = 0 if run.step is None else run.step
    return short(step) if step == run.steps else f"{short(step)}/{short(run.steps)}"


def short_bytes(n: int) -> str:
    """Return a size with two or three digits, such as 4.6 MB."""
    for unit, divisor in (("GB", 1e9), ("MB", 1e6)):
        if n >= divisor:
            return f"{n / divisor:.{1 if n < 10 * divisor else 0}f} {unit}"
    return f"{n / 1e3:.0f} kB"


def _age(seconds: float) -> str:
    """Return the time since the last change, such as 5 min ago."""
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / divisor:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} d ago"
