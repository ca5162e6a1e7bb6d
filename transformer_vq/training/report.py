"""An HTML page about a run: curves, evaluations, samples, config and history in one file."""

from __future__ import annotations

import base64
import math
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.config.file_text import config_text
from transformer_vq.errors import UserError
from transformer_vq.files import CorruptFileError, atomic_write, read_verified_json
from transformer_vq.presets import PRESETS
from transformer_vq.progress import duration, short
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.plots import MIN_TOKENS, positions, smooth
from transformer_vq.training.report_page import details, figures, note, page, section, table, text
from transformer_vq.training.rows import read_rows
from transformer_vq.training.run_list import RunSummary, dataset_name, read_run_config, summarize
from transformer_vq.training.svg_chart import Line, chart

SAMPLE_TOKENS = 400
MAX_IMAGE = 500_000
"""Largest image that is embedded, in bytes."""
CLIPPED = 0.1
"""Share of the training, at its start, that may be above the loss axis."""

Row = dict[str, Any]


def write_report(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    n_samples: int = 3,
    prompt: str = "",
    seed: int = 0,
) -> Path:
    """Write an HTML page about a run and return its path (default: RUN/report.html).

    n_samples: texts to generate with the best model, each a continuation of `prompt`; 0 generates
    none. Raises UserError if `run` is not a run folder.
    """
    run = Path(run)
    path = run / "report.html" if out is None else Path(out)
    content = report_html(run, n_samples=n_samples, prompt=prompt, seed=seed)
    with atomic_write(path) as partial:
        partial.write_bytes(content.encode("utf-8", "replace"))
    return path


def report_html(run: Path, *, n_samples: int = 3, prompt: str = "", seed: int = 0) -> str:
    """Return the page as text."""
    if not (run / "config.json").is_file():
        raise UserError(f"{run} is not a run folder (no config.json)")
    config, rows, summary = read_run_config(run), read_metrics(run), summarize(run)
    name = run.absolute().name
    history = read_rows(run / "history.jsonl")
    body = [
        _header(name, config, summary),
        _key_figures(rows, config, summary),
        _training(rows),
        _evaluations(run),
        _samples(run, config, n_samples, prompt, seed),
        _config(config),
        _history(history),
        _environment(history),
        _footer(),
    ]
    return page(f"{name} - Transformer-VQ run", body)


def _header(name: str, config: RunConfig, summary: RunSummary) -> str:
    model = config.model
    status = summary.status
    about = [
        f"{model.n_layer} layers of width {model.d_model}",
        f"{model.head_type} heads",
        f"{model.attention} attention"
        + (f" with {model.n_code} codes" if model.attention == "vq" else ""),
        f"trained on {dataset_name(config)}",
    ]
    return (
        f'<header>\n<h1>{text(name)} <span class="status {text(status.partition(" ")[0])}">'
        f"{text(status)}</span></h1>\n{note(', '.join(about))}\n</header>"
    )


def _key_figures(rows: list[Row], config: RunConfig, summary: RunSummary) -> str:
    valid = [row for row in _finite(rows, "bits_per_byte") if row["kind"] == "validation"]
    best = min(valid, key=lambda row: row["bits_per_byte"], default=None)
    speeds = [row["tokens_per_second"] for row in _finite(rows, "tokens_per_second")]
    tokens = positions(rows, "tokens")[-1] if rows else 0
    seconds = positions(rows, "time")[-1] if rows else 0
    step = max((row["step"] for row in rows), default=summary.step or 0)
    is_complete = step == config.train.steps
    return figures(
        [
            (
                "Best validation",
                "" if best is None else f"{best['bits_per_byte']:.4f}",
                "" if best is None else f"bits per byte, step {best['step']:,}",
            ),
            ("Steps", f"{step:,}", "" if is_complete else f"of {config.train.steps:,}"),
            ("Tokens", short(tokens) if tokens else "", "trained on"),
            ("Parameters", "" if summary.parameters is None else short(summary.parameters), ""),
            ("Time", duration(seconds) if seconds else "", "training and validation"),
            (
                "Speed",
                short(statistics.median(speeds)) if speeds else "",
                "tokens per second, median",
            ),
        ]
    )


def _training(rows: list[Row]) -> str:
    train = [row for row in _finite(rows, "bits_per_byte") if row["kind"] == "train"]
    valid = [row for row in _finite(rows, "bits_per_byte") if row["kind"] == "validation"]
    if not train and not valid:
        return section("Training", note("No metrics have been logged yet."))
    loss = Line("training, smoothed", *_smooth_line(train, "bits_per_byte"), 1, is_faint=True)
    validation = Line("validation", *_line(valid, "bits_per_byte"), 0, has_dots=True)
    later = [*loss.ys[int(CLIPPED * len(loss.ys)) :]]
    later += [y for x, y in zip(validation.xs, validation.ys, strict=True) if x > 0]
    low, top = (min(later), max(later)) if later else (None, None)
    if low is not None and top is not None:
        low, top = low - 0.05 * (top - low), top + 0.05 * (top - low)
    health = _finite([row for row in rows if row["kind"] == "train"], "share_in_use")
    charts = [
        chart("Loss, bits per byte", [loss, validation], y_limits=(low, top)),
        chart("Learning rate", [_of(rows, "lr")], y_limits=(0, None)),
        chart(
            "Codebooks, mean over layers",
            [
                Line("codes in use", *_smooth_line(health, "share_in_use"), 2),
                Line("quantization error", *_smooth_line(health, "relative_error"), 3),
            ],
            y_limits=(0, 1),
        ),
        chart(
            "Codebook perplexity",
            [Line("", *_smooth_line(health, "perplexity"), 2)],
            y_limits=(0, None),
        ),
        chart(
            "Gradient norm, smoothed", [_of(rows, "grad_norm", is_smooth=True)], y_limits=(0, None)
        ),
        chart("Tokens per second", [_of(rows, "tokens_per_second", True)], y_limits=(0, None)),
    ]
    return section("Training", _grid(charts))


def _grid(charts: Sequence[str]) -> str:
    found = [x for x in charts if x]
    return f'<div class="charts">{"".join(found)}</div>' if found else ""


def _of(rows: list[Row], key: str, is_smooth: bool = False) -> Line:
    """Return the line of one training metric."""
    found = _finite([row for row in rows if row["kind"] == "train"], key)
    return Line("", *(_smooth_line if is_smooth else _line)(found, key))


def _line(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
    return [row["step"] for row in rows], [row[key] for row in rows]


def _smooth_line(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
    found = _finite(rows, key)
    return [row["step"] for row in found], smooth([row[key] for row in found])


def _finite(rows: list[Row], key: str) -> list[Row]:
    """Return the rows that have a finite number for a key."""
    return [
        row for row in rows if isinstance(row.get(key), (int, float)) and math.isfinite(row[key])
    ]


def _evaluations(run: Path) -> str:
    results, charts, notes = [], [], []
    for path in sorted(run.glob("evaluation-*.json")):
        try:
            evaluation = read_verified_json(path)
            rows, figure = _evaluation(evaluation)
        except (CorruptFileError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = error if isinstance(error, CorruptFileError) else "it has an unknown format"
            notes.append(note(f"{path.name} is left out: {why}"))
            continue
        results += rows
        charts.append(figure)
    heads = ("split", "protocol", "bits per byte", "nats per token", "word perplexity", "tokens")
    return section("Evaluation", table(heads, results, range(2, 6)), _grid(charts), *notes)


def _evaluation(evaluation: Row) -> tuple[list[tuple[str, ...]], str]:
    """Return a row per protocol, and the chart of the loss by position."""
    rows: list[tuple[str, ...]] = []
    lines = []
    split = str(evaluation["split"])
    for number, (name, result) in enumerate(evaluation["protocols"].items()):
        words = result.get("word_perplexity")
        rows.append(
            (
                f"{split} ({evaluation['checkpoint']})",
                str(name),
                f"{result['bits_per_byte']:.4f}",
                f"{result['nats_per_token']:.4f}",
                "" if words is None else f"{words:,.4g}",
                f"{result['tokens']:,}",
            )
        )
        bins = [x for x in result["by_position"] if x["tokens"] >= MIN_TOKENS]
        middles = [((x["first"] + 1) * (x["last"] + 1)) ** 0.5 for x in bins]
        bits = [x["nats_per_token"] / math.log(2) for x in bins]
        lines.append(Line(str(name), middles, bits, number % 4, has_dots=True))
    title = f"Loss by position, {split} split, bits per token"
    return rows, chart(title, lines, x_label="position in the context", log_x=True)


def _samples(run: Path, config: RunConfig, n: int, prompt: str, seed: int) -> str:
    if config.data.has_images:
        return section("Samples", _image(run / "samples.png"))
    if n == 0:
        return ""
    try:
        texts = _generate(run, n, prompt, seed)
    except UserError as error:
        return section("Samples", note(f"No samples: {error}"))
    shown = [
        f'<div class="sample"><pre><b>{text(prompt)}</b>{text(sample.rstrip())}</pre></div>'
        for sample in texts
    ]
    how = f"Generated by the best model, temperature 0.8, top-p 0.95, seed {seed}."
    return section("Samples", note(how), *shown)


def _generate(run: Path, n: int, prompt: str, seed: int) -> list[str]:
    from transformer_vq.generation.sampling import Sampling
    from transformer_vq.generation.text import prefill_text, sample_text
    from transformer_vq.training.checkpoint import load_run

    model, tokenizer, _ = load_run(run)
    context = prefill_text(model, tokenizer, prompt).repeat(n)
    sampling = Sampling(temperature=0.8, top_p=0.95)
    texts = sample_text(model, tokenizer, context, SAMPLE_TOKENS, sampling, seed=seed)
    return [generated.text for generated in texts]


def _image(path: Path) -> str:
    """Return the image of samples, if there is one."""
    try:
        content = path.read_bytes()
    except OSError:
        return note(f"No images yet; `tvq sample {path.parent}` writes samples.png.")
    if len(content) > MAX_IMAGE:
        return note(f"{path.name} is too large for this page.")
    data = base64.b64encode(content).decode()
    return f'<div class="sample"><img alt="Samples" src="data:image/png;base64,{data}"></div>'


def _config(config: RunConfig) -> str:
    counts = {name: len(config.differences(preset)) for name, preset in PRESETS.items()}
    nearest = min(counts, key=lambda name: counts[name])
    rows = [
        (name, _value(ours), _value(theirs))
        for name, (ours, theirs) in config.differences(PRESETS[nearest]).items()
    ]
    same = note(f"All settings are those of the preset {nearest}.") if not rows else ""
    complete = details("Complete config, for tvq train --config", config_text(config))
    return section(
        "Config", table(("setting", "this run", f"preset {nearest}"), rows), same, complete
    )


def _value(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _history(history: list[Row]) -> str:
    rows = []
    for row in history:
        changed = row.get("changed")
        changes = [
            f"{name}: {_value(values[0])} -> {_value(values[1])}"
            for name, values in (changed.items() if isinstance(changed, dict) else ())
            if isinstance(values, list) and len(values) == 2
        ]
        when = str(row.get("time", "")).replace("T", " ").removesuffix("+00:00")
        rows.append((when, row.get("event", ""), row.get("step", ""), "; ".join(changes)))
    return section("History", table(("time (UTC)", "event", "step", "changes"), rows, (2,)))


def _environment(history: list[Row]) -> str:
    last = history[-1] if history else {}
    names = {
        "version": "Transformer-VQ",
        "torch": "PyTorch",
        "device": "device",
        "processes": "processes",
        "command": "command",
    }
    rows = [(label, str(last[key])) for key, label in names.items() if last.get(key) is not None]
    trained = table(("last training", ""), rows)
    return section("Environment", trained, table(("this report", ""), _this_machine()))


def _this_machine() -> list[tuple[str, str]]:
    from transformer_vq import __version__

    rows = [
        ("Transformer-VQ", __version__),
        ("PyTorch", metadata.version("torch")),
        ("Python", platform.python_version()),
        ("system", platform.platform(terse=True)),
        ("CPU", f"{_cpu_name()}, {os.cpu_count()} cores"),
    ]
    return rows


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _footer() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"<footer>Written by tvq report, {text(now)}.</footer>"
