"""Figures from what runs and benchmarks have written; nothing here measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_vq.bench.steps import kind
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import CorruptFileError, read_json, read_verified_json
from transformer_vq.training.metrics import read_metrics


def pyplot() -> Any:
    """matplotlib, drawing to files only."""
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("a figure", "matplotlib", "plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def plot_path(path: Path, out: Path | None = None) -> list[Path]:
    """Draw what lies there: the curves and evaluations of a run, or a recorded benchmark.

    Returns the figures that were written.
    """
    if path.is_file():
        out = out or path.with_suffix(".png")
        plot_record(_read(path), out)
        return [out]
    if not path.exists():
        raise UserError(f"{path} does not exist; give a run folder or a JSON file of measurements")
    rows = read_metrics(path)
    if not rows:
        raise UserError(f"{path} is not a run folder with metrics, nor a file of measurements")
    out = out or path / "curves.png"
    plot_curves({path.name: rows}, out)
    written = [out]
    for evaluation in sorted(path.glob("evaluation-*.json")):
        try:
            result = read_verified_json(evaluation)
        except CorruptFileError as error:
            raise UserError(f"{error}; write it again with `tvq eval {path}`") from error
        plot_positions(result, evaluation.with_suffix(".png"))
        written.append(evaluation.with_suffix(".png"))
    return written


def plot_record(result: dict[str, Any], path: Path) -> None:
    """The figure of a file that a benchmark wrote; what it measured is the name of a part."""
    draw = next(draw for part, draw in FIGURES.items() if part in result)
    try:
        draw(result, path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        # Whatever a file lacks that is not from a benchmark, drawing it stumbles over.
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"the measurements are incomplete ({why}); repeat them") from error


def _read(path: Path) -> dict[str, Any]:
    result = read_json(path)
    if not isinstance(result, dict) or not result.keys() & FIGURES.keys():
        raise UserError(f"{path} does not hold measurements; give a JSON file from benchmarks/")
    return result


def plot_curves(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Bits per byte of training and validation, and the health of the codebooks."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number}"
        train = [row for row in rows if row["kind"] == "train"]
        steps = [row["step"] for row in train]
        left.plot(steps, smooth([r["bits_per_byte"] for r in train]), color=color, alpha=0.4, lw=1)
        valid = [row for row in rows if row["kind"] == "validation"]
        left.plot(
            [row["step"] for row in valid],
            [row["bits_per_byte"] for row in valid],
            color=color,
            marker="o",
            ms=3,
            label=f"{name}, validation",
        )
        health = [row for row in train if "share_in_use" in row]
        for key, style in (("share_in_use", "-"), ("relative_error", ":")):
            if health:
                right.plot(
                    [row["step"] for row in health],
                    smooth([row[key] for row in health]),
                    style,
                    color=color,
                    label=f"{name}, {key.replace('_', ' ')}",
                )
    left.set_title("loss (pale: training, smoothed)")
    left.set_ylabel("bits per byte")
    right.set_title("codebooks, mean over layers")
    right.set_ylim(0, 1.02)
    for axes in (left, right):
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    if not right.lines:
        right.text(0.5, 0.5, "full attention has none", ha="center", transform=right.transAxes)
    _save(figure, path)


def plot_positions(evaluation: dict[str, Any], path: Path) -> None:
    """Loss against the number of tokens that stand before a token in its context."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for name, result in evaluation["protocols"].items():
        bins = result["by_position"]
        middles = [((row["first"] + 1) * (row["last"] + 1)) ** 0.5 for row in bins]
        bits = [row["nats_per_token"] / math.log(2) for row in bins]
        label = f"{name}: {result['bits_per_byte']:.3f} bits per byte"
        axes.plot(middles, bits, marker="o", ms=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens before it in the context, plus one")
    axes.set_ylabel("bits per token")
    axes.set_title(f"loss by position, {evaluation['split']} split")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    _save(figure, path)


def smooth(values: list[float], share: float = 0.02) -> list[float]:
    """Running mean over about `share` of all values."""
    decay = 1 - 1 / max(1.0, share * len(values))
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot().close(figure)


def plot_decode(result: dict[str, Any], path: Path) -> None:
    """Tokens per second and size of the state against the context, a line per model and batch."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["decode"]:
        if "failed" not in row:
            name = f"{row['kind']}, compiled" if row["compiled"] else row["kind"]
            lines.setdefault((name, row["batch"]), []).append(row)
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in lines))}
    for (name, batch), rows in lines.items():
        style = {
            "color": colors[name],
            "marker": "o" if batch == 1 else "s",
            "linestyle": "-" if batch == 1 else "--",
            "label": f"{name}, batch {batch}",
        }
        contexts = [row["context"] for row in rows]
        left.plot(contexts, [row["tokens_per_second"] for row in rows], **style)
        right.plot(contexts, [row["state_bytes"] / 1e6 for row in rows], **style)
    left.set_ylabel("tokens per second")
    right.set_ylabel("state, MB")
    for axes in (left, right):
        axes.set_xlabel("tokens read before")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    _save(figure, path)


def plot_train(result: dict[str, Any], path: Path) -> None:
    """Tokens per second and peak memory against length, a line per head type and kind."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if "failed" not in row:
            lines.setdefault((row["head_type"], kind(row)), []).append(row)
    kinds = list(dict.fromkeys(name for _, name in lines))
    styles = {"shga": ("o", "-"), "mqa": ("s", "--"), "mha": ("^", ":")}
    for (head_type, name), rows in lines.items():
        marker, line = styles[head_type]
        style = {
            "color": f"C{kinds.index(name)}",
            "marker": marker,
            "ms": 4,
            "linestyle": line,
            "label": f"{head_type} {name}",
        }
        again = [row for row in rows if row["checkpoint_activations"]]
        star = {"color": style["color"], "marker": "*", "ms": 12, "linestyle": ""}
        for shown, look in ((rows, style), (again, star)):
            lengths = [row["seq_len"] for row in shown]
            left.plot(lengths, [1e6 / row["us_per_token"] for row in shown], **look)
            right.plot(lengths, [row["peak_gb"] for row in shown], **look)
    some_again = any(row["checkpoint_activations"] for rows in lines.values() for row in rows)
    left.set_ylabel("tokens per second")
    left.set_title("training" + " (star: activations computed again)" * some_again)
    right.set_ylabel("GB")
    right.set_title("peak memory")
    ticks = sorted({row["seq_len"] for rows in lines.values() for row in rows})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axes.set_xlabel("tokens in the sequence")
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    _save(figure, path)


def plot_ablation(result: dict[str, Any], path: Path) -> None:
    """Validation loss of every seed and its mean, and latency, by setting."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    rows = result["ablation"]
    names = [f"{r['n_code']}" + ("" if r["compressive_cache"] else ",\nno cache") for r in rows]
    for place, row in enumerate(rows):
        bits = row["bits_per_byte"]
        left.plot([place] * len(bits), bits, "o", color="C0", ms=4, alpha=0.6)
        left.plot([place - 0.2, place + 0.2], [row["mean_bits_per_byte"]] * 2, color="C1", lw=2)
    right.bar(range(len(rows)), [row["latency"] for row in rows], color="C0")
    left.set_ylabel("validation bits per byte")
    left.set_title("seeds (dots) and their mean")
    right.set_ylabel(f"{result['config']['model']['n_code']} codes = 1")
    right.set_title("time of an update")
    for axes in (left, right):
        axes.set_xticks(range(len(rows)), names)
        axes.set_xlabel("codes")
        axes.grid(alpha=0.3, axis="y")
    _save(figure, path)


def plot_profile(result: dict[str, Any], path: Path) -> None:
    """The parts of a training step as bars."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    parts = result["profile"]
    whole = result["profiled_seconds_per_step"]
    bars = axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()])
    axes.bar_label(bars, [f"{seconds / whole:.1%}" for seconds in parts.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("milliseconds")
    axes.set_title(f"a training step of {1e3 * whole:,.0f} ms")
    axes.grid(alpha=0.3, axis="x")
    _save(figure, path)


FIGURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "runs": lambda result, path: plot_curves(
        {name: run["curve"] for name, run in result["runs"].items()}, path
    ),
    "decode": plot_decode,
    "ablation": plot_ablation,
    "profile": plot_profile,
    "rows": plot_train,
    "protocols": plot_positions,
}
"""What a file of measurements holds, and how that is drawn."""
