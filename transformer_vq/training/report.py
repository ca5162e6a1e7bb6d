"""An HTML page about a run: curves, evaluations, samples, config and history in one file."""

from __future__ import annotations

import base64
import os
import platform
import statistics
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from transformer_vq.config import RunConfig
from transformer_vq.config.file_text import config_text
from transformer_vq.errors import UserError
from transformer_vq.files import atomic_write
from transformer_vq.presets import PRESETS
from transformer_vq.progress import duration, short
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.plots import positions
from transformer_vq.training.report_charts import evaluation_section, finite, training_section
from transformer_vq.training.report_page import details, figures, note, page, section, table, text
from transformer_vq.training.rows import read_rows
from transformer_vq.training.run_list import (
    RunSummary,
    dataset_name,
    read_run_config,
    summarize,
)

SAMPLE_TOKENS = 400
MAX_IMAGE = 500_000
"""Largest image that is embedded, in bytes."""

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
        training_section(rows),
        evaluation_section(run),
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
    valid = [row for row in finite(rows, "bits_per_byte") if row["kind"] == "validation"]
    best = min(valid, key=lambda row: row["bits_per_byte"], default=None)
    speeds = [row["tokens_per_second"] for row in finite(rows, "tokens_per_second")]
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
    # A carriage return has no glyph; browsers would show it as an unknown character.
    return [generated.text.replace("\r\n", "\n").replace("\r", "\n") for generated in texts]


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
    from transformer_vq.device import cpu_name  # imports torch

    rows = [
        ("Transformer-VQ", __version__),
        ("PyTorch", metadata.version("torch")),
        ("Python", platform.python_version()),
        ("system", platform.platform(terse=True)),
        ("CPU", f"{cpu_name()}, {os.cpu_count()} cores"),
    ]
    return rows


def _footer() -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"<footer>Written by tvq report, {text(now)}.</footer>"
