"""The figure of `tvq bench recall`: accuracy by context length, a panel per task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformer_vq.bench.recall_records import (
    Candidate,
    RecallRecord,
    RecallRow,
    RecallTask,
    accuracies,
    by_task,
)
from transformer_vq.training.plot_style import (
    GREEN,
    MUTED,
    VERMILION,
    log_lengths,
    new_figure,
    note,
)

TITLES: dict[RecallTask, str] = {
    "mqar": "mqar: {pairs} pairs",
    "copy": "copy: {copied} tokens",
    "needle": "needle: {value_len} tokens",
}
STYLES: dict[str, dict[str, Any]] = {
    "full": {"color": VERMILION, "marker": "s"},
    "window": {"color": MUTED, "marker": "v", "linestyle": "--"},
    "mamba": {"color": GREEN, "marker": "D", "linestyle": "-."},
}
LIGHT, DARK = (0x8F, 0xC4, 0xE6), (0x00, 0x3F, 0x6B)  # from few codes to many
MAX_TICKS = 5  # context lengths that fit below a narrow panel


def plot_recall(record: RecallRecord, path: Path) -> None:
    """Plot the mean accuracy over seeds, with bands of one standard deviation."""
    tasks = by_task(record)
    settings = record["settings"]
    models = sorted({model for found in tasks.values() for model in found}, key=lambda x: x.place)
    styles = _styles(models)
    with new_figure(path, columns=len(tasks), height=3.9) as (figure, panels):
        lines: dict[Candidate, Any] = {}
        for axes, (task, found) in zip(panels, tasks.items(), strict=True):
            for model, rows in found.items():
                (line,) = _draw(axes, rows, styles[model])
                lines[model] = line
            axes.axvline(settings["train_len"], color=MUTED, linestyle=":", lw=1.4, zorder=1)
            axes.set_title(TITLES[task].format(**settings))
            axes.set_ylim(-3, 103)
            lengths = sorted({row["context"] for rows in found.values() for row in rows})
            shown = lengths[:: -(-len(lengths) // MAX_TICKS)]
            log_lengths(axes, shown, "context length (tokens)")
            axes.margins(x=0.1)
        panels[0].set_ylabel("accuracy (%)")
        for axes in panels[1:]:
            axes.set_yticklabels([])
        handles, names = [lines[model] for model in models], [model.name for model in models]
        figure.legend(handles, names, loc="outside upper center", ncols=min(len(models), 3))
        note(figure, _explain(record))


def _draw(axes: Any, rows: list[RecallRow], style: dict[str, Any]) -> Any:
    """Draw a line with its band; return the line."""
    lengths = sorted({row["context"] for row in rows})
    found = [accuracies(rows, n) for n in lengths]
    means = [100 * mean for mean, _ in found]
    spreads = [100 * (spread or 0) for _, spread in found]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    axes.fill_between(lengths, low, high, color=style["color"], alpha=0.15, lw=0)
    return axes.plot(lengths, means, **style)


def _styles(models: list[Candidate]) -> dict[Candidate, dict[str, Any]]:
    """Return the style of every line; vq is darker with more codes."""
    vq = [model for model in models if model.model == "vq"]
    found = {model: STYLES[model.model] for model in models if model.model != "vq"}
    for i, model in enumerate(vq):
        share = i / (len(vq) - 1) if len(vq) > 1 else 1.0
        rgb = (round(a + share * (b - a)) for a, b in zip(LIGHT, DARK, strict=True))
        found[model] = {"color": "#" + "".join(f"{x:02x}" for x in rgb), "marker": "o"}
    return found


def _explain(record: RecallRecord) -> str:
    """Return the note below the figure."""
    n_seeds = len({row["seed"] for row in record["recall"]})
    bands = f"Bands: standard deviation of {n_seeds} seeds. " if n_seeds > 1 else ""
    longest = record["settings"]["train_len"]
    return f"{bands}Dotted line: longest training sequence, {longest:,} tokens."
