"""The figure of `tvq bench compress`: bits per byte of all models as bars."""

from __future__ import annotations

from pathlib import Path

from transformer_vq.bench.compress_records import CompressionRecord, Training, row_name
from transformer_vq.training.plot_style import BLUE, GREEN, LINE, MUTED, ORANGE, new_figure

COLORS: dict[Training, tuple[str, str]] = {
    "weights": ("trained model", BLUE),
    "counts": ("counts of the training files", GREEN),
    "primed": ("after the training files", ORANGE),
    "none": ("without training files", LINE),
}
"""Name and color by use of training text, in the order of the legend."""


def plot_compression(record: CompressionRecord, path: Path) -> None:
    """Plot the bits per byte over all files, the lowest first."""
    rows = sorted(record["compression"], key=lambda row: row["bits_per_byte"])
    values = [row["bits_per_byte"] for row in rows]
    with new_figure(path, height=2.0 + 0.27 * len(rows)) as (figure, (axes,)):
        for training, (label, color) in COLORS.items():
            places = [i for i, row in enumerate(rows) if row["training"] == training]
            if places:
                axes.barh(places, [values[i] for i in places], 0.7, color=color, label=label)
        for bars in axes.containers:
            axes.bar_label(bars, fmt="%.3f", padding=4, color=MUTED)
        axes.set_yticks(range(len(rows)), [row_name(row) for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.1, y=0.02)
        axes.set_title("Bits per byte, lower is better")
        axes.grid(visible=False, axis="y")
        figure.legend(loc="outside lower center", ncols=2)
        n_bytes = sum(file["bytes"] for file in record["files"])
        sizes = f"measured text: {n_bytes / 1e6:,.1f} MB"
        if record["train_bytes"]:
            sizes += f", training files: {record['train_bytes'] / 1e6:,.1f} MB"
        axes.set_xlabel(sizes)
