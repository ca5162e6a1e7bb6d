"""One style for all figures: size, fonts, colors, labels at line ends, notes. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformer_vq.errors import missing_extra
from transformer_vq.files import atomic_write

INK, MUTED, LINE, GRID = "#1f2328", "#57606a", "#8c959f", "#e4e8ec"
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, ROSE = (
    *("#0072b2", "#d55e00", "#009e73", "#aa4499", "#b8860b", "#3f9bd1", "#3b4048", "#e0709a"),
)
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, ROSE)
"""Colors that remain distinguishable with color blindness, in the order of their use."""

WIDTH = 8.0
"""Width of every figure in inches: 1,200 pixels, readable if shown 700 pixels wide."""
DPI = 150
END_LABEL = "end label"
"""Mark of the labels at line ends, which are moved apart."""
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.constrained_layout.w_pad": 0.12,
    "figure.constrained_layout.h_pad": 0.1,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": LINE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.handlelength": 3,
}


@contextmanager
def new_figure(path: Path, rows: int = 1, columns: int = 1, height: float = 3.4) -> Iterator[Any]:
    """Yield a figure and its axes, a list by row and column; then write it to a PNG file.

    The file is complete or absent. Nothing is written if the body raises.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("a figure", "matplotlib") from None
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(WIDTH, height * rows), dpi=DPI, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        yield figure, list(axes.flat)
        figure.draw_without_rendering()  # the layout, which label positions depend on
        for panel in axes.flat:
            _spread_labels(figure, panel)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            figure.savefig(partial, format="png")


def label_end(
    axes: Any, line: tuple[Sequence[float], Sequence[float]], text: str, color: str
) -> None:
    """Write the name of a line to the right of its last point; nearby labels are moved apart."""
    xs, ys = line
    if math.isfinite(ys[-1]):
        style = {"va": "center", "color": color, "linespacing": 1.25, "annotation_clip": False}
        offset = {"xytext": (10, 0), "textcoords": "offset points"}
        axes.annotate(text, (xs[-1], ys[-1]), gid=END_LABEL, **offset, **style)


def _spread_labels(figure: Any, axes: Any) -> None:
    """Move end labels apart vertically where they overlap, and inside the range of the axes."""
    labels = [text for text in axes.texts if text.get_gid() == END_LABEL]
    if not labels:
        return
    boxes = [label.get_window_extent() for label in labels]
    frame = axes.get_window_extent()
    shifts = [0.0] * len(labels)
    order = sorted(range(len(labels)), key=lambda i: boxes[i].y0 + boxes[i].y1)
    for _ in range(100):
        for i, box in enumerate(boxes):
            shifts[i] = max(shifts[i], frame.y0 - box.y0)
            shifts[i] = min(shifts[i], max(frame.y1 - box.y1, frame.y0 - box.y0))
        for number, i in enumerate(order):
            for j in order[number + 1 :]:
                low, high = boxes[i], boxes[j]
                overlap = low.y1 + shifts[i] - high.y0 - shifts[j]
                if overlap > 0 and low.x0 < high.x1 and high.x0 < low.x1:
                    shifts[i] -= overlap / 2
                    shifts[j] += overlap / 2
    for label, shift in zip(labels, shifts, strict=True):
        x, y = label.get_position()
        label.set_position((x, y + shift * 72 / figure.dpi))


def note(figure: Any, text: str) -> None:
    """Write an explanation below the figure, on the left."""
    if text:
        figure.supxlabel(text, x=0.015, ha="left", fontsize=9.5, color=MUTED)


def thousands(value: float, _: object = None) -> str:
    """Return a number for a tick label, for example 8,192 or 0.5."""
    return f"{value:,g}" if abs(value) < 1 or value % 1 else f"{value:,.0f}"


def log_lengths(axes: Any, lengths: Sequence[int], label: str) -> None:
    """Use a logarithmic x axis with a tick at every length that was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [thousands(n) for n in lengths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(label)


def log_values(axes: Any) -> None:
    """Use a logarithmic y axis with plain numbers; a wide range has fewer ticks."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if 0 < high < 2 * low:  # a narrow axis would exaggerate small differences
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(2), middle * math.sqrt(2)
        axes.set_ylim(low, high)
    if high / low > 300:
        digits: tuple[float, ...] = (1.0,)
    else:
        digits = (1.0, 2.0, 5.0) if high / low > 12 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axes.yaxis.set_major_locator(LogLocator(subs=digits))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(thousands)
