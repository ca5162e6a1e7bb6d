"""tvq runs: list the runs in a folder."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from transformer_vq.cli.arguments import Json, parse
from transformer_vq.cli.output import one_line, print_json
from transformer_vq.errors import UserError
from transformer_vq.progress import short

if TYPE_CHECKING:
    from transformer_vq.training.run_list import RunSummary

WIDTH = 200  # characters of a table that is not printed on a terminal


@dataclass(frozen=True)
class RunsOptions:
    """List the runs in a folder and its subfolders: status, steps, loss, size, last change."""

    folder: tyro.conf.Positional[Path | None] = None
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
        raise UserError(f"{folder} is not a folder; give a folder that contains runs")

    from transformer_vq.training.run_list import find_runs, summarize

    found = sorted(map(summarize, find_runs(folder)), key=lambda x: _order(x, options.sort))
    if found:
        _print_table(found, folder)
    else:
        print(f"no runs in {folder}; start one with: tvq train tiny --out runs/tiny")
    runs = [{"name": _name(x, folder)} | x.to_dict() for x in found]
    print_json({"folder": str(folder), "runs": runs}, options.json)


def _order(run: RunSummary, key: str) -> tuple[float, str]:
    loss = math.inf if run.best_bits_per_byte is None else run.best_bits_per_byte
    orders = {"time": -run.changed, "loss": loss, "step": -(run.step or 0), "name": 0}
    return orders[key], str(run.path)


def _print_table(runs: list[RunSummary], folder: Path) -> None:
    """Print a row per run; on a terminal, long names are shortened to its width."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("run", "status", "steps", "bits/byte", "params", "data", "size", "changed"):
        is_text = name in ("run", "status", "data")
        table.add_column(
            name,
            justify="left" if is_text else "right",
            overflow="ellipsis" if name in ("run", "data") else "fold",
            no_wrap=True,
        )
    for run in runs:
        style = {"running": "green", "finished": "", "corrupt": "red"}.get(run.status, "yellow")
        cells: list[Any] = [
            Text(one_line(_name(run, folder))),
            Text(run.status, style),
            "-" if run.steps is None else f"{short(run.step or 0)}/{short(run.steps)}",
            "-" if run.best_bits_per_byte is None else f"{run.best_bits_per_byte:.4f}",
            "-" if run.parameters is None else short(run.parameters),
            Text(one_line(run.dataset or "-")),
            f"{run.bytes / 1e6:.1f} MB",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed)),
        ]
        table.add_row(*cells)
    is_terminal = sys.stdout.isatty()
    Console(file=sys.stdout, width=None if is_terminal else WIDTH).print(table)


def _name(run: RunSummary, folder: Path) -> str:
    name = str(run.path.relative_to(folder))
    return run.path.absolute().name if name == "." else name
