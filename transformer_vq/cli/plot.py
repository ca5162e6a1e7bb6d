"""tvq plot: draw the figures of a run, or of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_vq.cli.arguments import UsageError, parse
from transformer_vq.cli.options import Overwrite

XAxis = Literal["step", "tokens", "time"]
COMPARISON = Path("comparison.png")
Paths = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH [PATH ...]")]


@dataclass(frozen=True)
class PlotOptions:
    """Plot the loss curves and codebook health of a run.

    Several runs are compared in one figure.
    """

    paths: Paths
    """Run folder, or several."""
    out: Path | None = None
    """PNG file to write. None writes it next to the data and replaces an older figure; for several
    runs, None writes comparison.png, and for a model in the package NAME.png."""
    x: XAxis = "step"
    """Several runs: what the loss is plotted against."""
    overwrite: Overwrite = False


def run(arguments: list[str]) -> None:
    """Write figures and print their paths."""
    options = parse(PlotOptions, arguments, "plot")
    if not options.paths:
        raise UsageError("PATH is missing: give a run folder, or several")
    if options.out is not None and options.out.suffix.lower() != ".png":
        raise UsageError(f"--out {options.out}: figures are PNG files; use a name ending in .png")
    is_comparison = len(options.paths) > 1
    if options.x != "step" and not is_comparison:
        raise UsageError(f"--x {options.x}: is for several runs; give more than one PATH")
    out = COMPARISON if is_comparison and options.out is None else options.out

    from transformer_vq.files import check_can_write
    from transformer_vq.training.packaged import find_run, is_packaged

    paths = [find_run(path) for path in options.paths]
    if out is None and is_packaged(paths[0]):
        out = Path(f"{paths[0].name}.png")
    check_can_write("--out", out, options.overwrite)
    if is_comparison:
        assert out is not None
        _compare(paths, out, options.x)
        return

    from transformer_vq.plots import plot_run

    if not paths[0].is_dir():
        raise UsageError(f"{paths[0]} is not a run folder")
    for path in plot_run(paths[0], out):
        print(path)


def _compare(runs: Sequence[Path], out: Path, x: XAxis) -> None:
    from transformer_vq.plots import compare_runs

    for path in runs:
        if not path.is_dir():
            raise UsageError(f"{path} is not a run folder; only runs can be compared")
    compare_runs(runs, out, x)
    print(out)
