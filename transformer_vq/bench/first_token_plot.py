"""The figure of `tvq bench first-token`: time to the first token by length of the document."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from transformer_vq.bench.first_token_records import BaselineRow, FirstTokenRecord
from transformer_vq.errors import UserError
from transformer_vq.training.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    label_end,
    log_lengths,
    log_values,
    new_figure,
    note,
)

ServedKey = Literal["prompt_seconds", "context_seconds", "restarted_seconds"]
SERVED: dict[ServedKey, tuple[str, str]] = {
    "prompt_seconds": ("Transformer-VQ,\nfirst time", BLUE),
    "context_seconds": ("stored context", SKY),
    "restarted_seconds": ("stored context,\nafter a restart", ORANGE),
}
"""Name and color of the lines of the server."""


def plot_first_token(record: FirstTokenRecord, path: Path) -> None:
    """Plot seconds to the first token by length; predictions are open circles."""
    served = [row for row in record["first_token"] if "failed" not in row]
    if not served and not any("seconds" in row for row in record["gpt2"]):
        raise UserError("no document was measured; repeat the benchmark")
    lengths = {row["tokens"] for row in (*record["first_token"], *record["gpt2"])}
    with new_figure(path, height=4.0) as (figure, (axes,)):
        for key, (name, color) in SERVED.items():
            line = [row["tokens"] for row in served], [row[key] for row in served]
            axes.plot(*line, color=color, marker="o")
            if served:
                label_end(axes, line, name, color)
        has_predictions = _draw_gpt2(axes, record["gpt2"])
        axes.set_title("Seconds to the first token")
        axes.margins(y=0.1)
        log_lengths(axes, sorted(lengths), "length of the document (tokens)")
        log_values(axes)
        predicted = "Open circles: predicted from shorter documents, not run. "
        gpt2 = "GPT-2: about as many parameters, KV cache, no server."
        note(figure, predicted * has_predictions + gpt2 * bool(record["gpt2"]))


def _draw_gpt2(axes: Any, rows: list[BaselineRow]) -> bool:
    """Draw the measured and the predicted times; return whether there are predictions."""
    measured = [(row["tokens"], row["seconds"]) for row in rows if "seconds" in row]
    predicted = [
        (row["tokens"], seconds)
        for row in rows
        if (seconds := row.get("estimated_seconds")) is not None
    ]
    line = [n for n, _ in measured], [seconds for _, seconds in measured]
    axes.plot(*line, color=GREEN, marker="s")
    if predicted:
        joined = [*measured[-1:], *predicted]
        dotted = [n for n, _ in joined], [seconds for _, seconds in joined]
        axes.plot(*dotted, color=GREEN, linestyle=(0, (1, 2)), lw=1.6)
        ends = [n for n, _ in predicted], [seconds for _, seconds in predicted]
        axes.plot(*ends, "o", color=GREEN, mfc="white", mew=1.6)
        line = ends
    if line[0]:
        label_end(axes, line, "GPT-2", GREEN)
    return bool(predicted)
