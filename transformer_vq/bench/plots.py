"""Figures from the JSON that the other files of `bench` write; nothing here measures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformer_vq.bench import run_main


def plot_scaling(result: dict[str, Any], path: Path) -> None:
    """Time per token and peak memory against the length of the sequence."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install 'transformer-vq[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    rows = [row for row in result["rows"] if "failed" not in row]
    names = {"vq": "VQ attention (linear)", "full": "full attention (quadratic)"}
    for attention, marker in (("vq", "o"), ("full", "s")):
        of_kind = [row for row in rows if row["attention"] == attention]
        lengths = [row["seq_len"] for row in of_kind]
        for axes, key in ((left, "us_per_token"), (right, "peak_gb")):
            axes.plot(lengths, [row[key] for row in of_kind], marker=marker, label=names[attention])
    left.set_ylabel("microseconds per token")
    left.set_title("time of forward + backward, per token")
    right.set_ylabel("GB")
    right.set_title("peak memory")
    ticks = sorted({row["seq_len"] for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
        axes.set_xlabel("tokens in the sequence")
        axes.grid(alpha=0.3)
    left.set_ylim(bottom=0)
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter(lambda gb, _: f"{gb:g}")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit("usage: python -m transformer_vq.bench.plots RESULT.json FIGURE.png")
    plot_scaling(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))


if __name__ == "__main__":
    run_main(main)
