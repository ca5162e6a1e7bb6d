"""tvq plot: draw the figures of a run, or of several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from transformer_vq.cli.arguments import Overwrite, parse
from transformer_vq.errors import UserError


@dataclass(frozen=True)
class PlotOptions:
    """Plot the loss curves and codebook health of a run; compare several runs in one figure."""

    paths: tyro.conf.Positional[tuple[Path, ...]]
    """Run folder, or several."""
    out: Path | None = None
    """PNG file to write. None writes it next to the data and replaces an older figure; for several
    runs, None writes comparison.png, and for a model in the package NAME.png."""
    x: Literal["step", "tokens", "time"] = "step"
    """Several runs: what the loss is plotted against."""
    overwrite: Overwrite = False


def run(arguments: list[str]) -> None:
    """Write figures and print their paths."""
    options = parse(PlotOptions, arguments, "plot")
    if not options.paths:
        raise UserError("give a run folder: tvq plot RUN ...")
    out, is_comparison = options.out, len(options.paths) > 1
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: figures are PNG files; use a name ending in .png")
    if options.x != "step" and not is_comparison:
        raise UserError(f"--x {options.x}: is for several runs; give more than one PATH")

    from transformer_vq.files import check_can_write
    from transformer_vq.training.packaged import find_run, is_packaged

    runs = [find_run(path) for path in options.paths]
    for path in runs:
        if not path.is_dir():
            raise UserError(f"{path} is not a run folder")
    if out is None and is_comparison:
        out = Path("comparison.png")
    elif out is None and is_packaged(runs[0]):
        out = Path(f"{runs[0].name}.png")
    check_can_write("--out", out, options.overwrite)

    from transformer_vq.plots import compare_runs, plot_run

    if is_comparison:
        assert out is not None
        compare_runs(runs, out, options.x)
        print(out)
    else:
        print(*plot_run(runs[0], out), sep="\n")
