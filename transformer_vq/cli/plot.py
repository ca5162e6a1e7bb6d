"""tvq plot: draw the figures of a run or a recorded benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from transformer_vq.cli.arguments import UsageError, parse
from transformer_vq.cli.options import Overwrite


@dataclass(frozen=True)
class PlotOptions:
    """Plot the loss curves and codebook health of a run, or the figure of a recorded benchmark."""

    path: tyro.conf.Positional[Path]
    """Run folder, or a JSON file written by `tvq bench`."""
    out: Path | None = None
    """PNG file to write. None writes it next to the data and replaces an older figure."""
    overwrite: Overwrite = False


def run(arguments: list[str]) -> None:
    """Write figures and print their paths."""
    options = parse(PlotOptions, arguments, "plot")
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise UsageError(f"--out {options.out}: figures are PNG files; use a name ending in .png")

    from transformer_vq.bench.plots import plot_path
    from transformer_vq.files import check_can_write

    check_can_write("--out", options.out, options.overwrite)
    for path in plot_path(options.path, options.out):
        print(path)
