"""Recall against context length: what the compressive cache remembers, next to other models.

Every model is trained on sequences up to `train_len` and evaluated on longer ones. Finished
trainings are added to the record file, so an interrupted benchmark can be resumed. All transformers
start with full attention on short sequences: with quantized keys from the first step, they take
much longer to find the attention pattern that recall needs. The other models use the same lengths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn

from common import Device, Output, Record, check_positive, log_lengths, main
from measure import machine
from recall_models import (
    build,
    check_transformers,
    fast_mamba,
    n_parameters,
    quantized,
    state_bytes,
)
from recall_tasks import (
    WINDOW_CODES,
    Candidate,
    RecallData,
    RecallModel,
    RecallSettings,
    RecallTask,
    check_lengths,
    read_text,
)
from transformer_vq.device import evaluating, find_device
from transformer_vq.errors import TrainingError, UserError
from transformer_vq.files import check_can_write, file_digest, read_json, write_json
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.plots import GREEN, MUTED, VERMILION, new_figure, note
from transformer_vq.progress import Advance, info, progress_bar

WARMUP = 50  # steps


GRAD_CLIP = 1.0


EVAL_TOKENS = 8192  # per forward pass


FULL = Candidate("full")


def run(options: Options) -> Record:
    """Train and evaluate every model on every task with seeds 0, 1, ...; return the record.

    The record file is updated after each training. Trainings that it contains are skipped.
    """
    for name in ("tasks", "models", "codes"):
        if not getattr(options, name):
            raise UserError(f"--{name}: give at least one value")
    check_positive(seeds=options.seeds, codes=options.codes)
    out, settings, tasks, text = options.out, options.settings, options.tasks, options.text
    models = candidates(options.models, options.codes)
    check_lengths(tasks, settings)
    if "mamba" in options.models:
        check_transformers()
    for candidate in models:  # check all sizes before the first training
        settings.model(candidate, vocab_size=2)
    found = None if text is None else read_text(text, max(*settings.lengths, settings.train_len))
    device = find_device(options.device)
    wanted = {**settings.record(), "text": None if text is None else file_digest(text)}
    record = _open(out, wanted, device)
    todo = [
        (seed, task, model) for seed in range(options.seeds) for task in tasks for model in models
    ]
    for number, (seed, task, candidate) in enumerate(todo, start=1):
        if _has(record, task, candidate, seed):
            continue
        info(f"[{number}/{len(todo)}] {task}, {candidate.name}, seed {seed}")
        rows = measure(RecallData(task, settings, found), candidate, seed, device)
        info(", ".join(f"{row['context']:,} tokens: {row['accuracy']:.1%}" for row in rows))
        record = _open(out, wanted, device)  # another process may have added other trainings
        if not _has(record, task, candidate, seed):
            record["recall"] += rows
            write_json(out, record)
    return record


def _has(record: Record, task: RecallTask, candidate: Candidate, seed: int) -> bool:
    """Return whether a record contains a training."""
    return any(
        (row["task"], candidate_of(row), row["seed"]) == (task, candidate, seed)
        for row in record["recall"]
    )


def _open(out: Path, wanted: dict[str, Any], device: torch.device) -> Record:
    """Return the record in a file, or an empty one; raise UserError if it has other settings."""
    out.parent.mkdir(parents=True, exist_ok=True)
    check_can_write("--out", out, overwrite=True)
    if not out.exists():
        return {
            "what": "accuracy of recall by context length",
            "machine": machine(device),
            "settings": wanted,
            "recall": [],
        }
    record = read_json(out)
    if not isinstance(record, dict) or not {"settings", "recall"} <= record.keys():
        raise UserError(f"--out {out}: the file is not a record of this benchmark; use another one")
    stored = record["settings"]
    if stored != wanted:
        changes = [name for name in wanted if stored.get(name) != wanted[name]]
        raise UserError(f"--out {out} has other settings: {', '.join(changes)}; use another file")
    return record


def measure(
    data: RecallData, candidate: Candidate, seed: int, device: torch.device
) -> list[Record]:
    """Train one model and return its accuracy at every context length."""
    settings = data.settings
    start = time.perf_counter()
    with fast_mamba(device) if candidate.model == "mamba" else nullcontext():
        model = train(data, candidate, seed, device)
        seconds = time.perf_counter() - start
        rows: list[Record] = []
        for length in sorted(set(settings.lengths)):
            accuracy, n_bytes = evaluate(model, data, length)
            rows.append(
                {
                    "task": data.task,
                    "model": candidate.model,
                    "n_code": candidate.n_code,
                    "seed": seed,
                    "context": length,
                    "accuracy": accuracy,
                    "state_bytes": n_bytes,
                    "parameters": n_parameters(model),
                    "seconds": round(seconds, 1),
                }
            )
    return rows


def train(data: RecallData, candidate: Candidate, seed: int, device: torch.device) -> nn.Module:
    """Train one model: transformers first with full attention, then with their own."""
    settings = data.settings
    torch.manual_seed(seed)
    is_transformer = candidate.model != "mamba"
    model = build(FULL if is_transformer else candidate, settings, data.vocab_size).to(device)
    n_full = round(settings.full_share * settings.steps)
    with progress_bar(candidate.name, settings.steps, "steps") as advance:
        lengths = settings.train_lengths(quantized=False)
        _train_part(model, data, [seed, 0], n_full, lengths, advance, decays=False)
        if isinstance(model, TransformerVQ):
            model = quantized(model, candidate, settings).to(device)
        lengths = settings.train_lengths(quantized=True)
        _train_part(model, data, [seed, 1], settings.steps - n_full, lengths, advance, decays=True)
    return model


def _train_part(
    model: nn.Module,
    data: RecallData,
    seed: list[int],
    steps: int,
    lengths: list[int],
    advance: Advance,
    decays: bool,
) -> None:
    """Train on sequences of random length; longer ones follow in the first half of the steps.

    decays: whether the learning rate follows a cosine to zero.
    """
    settings = data.settings
    random = np.random.default_rng([2, *seed])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    device = next(model.parameters()).device
    model.train()
    for step in range(steps):
        n_allowed = min(1 + int(2 * len(lengths) * step / steps), len(lengths))
        length = lengths[random.integers(n_allowed)]
        sized = RecallData(data.task, settings.at(length), data.text)
        batch = sized.batch([*seed, step], max(settings.step_tokens // length, 1), length)
        scored = batch.scored.to(device)
        output = model(batch.tokens.to(device))
        loss = F.cross_entropy(output.logits[scored], batch.targets.to(device)[scored])
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss is {float(loss.detach())}; use a smaller --lr")
        total = loss
        if isinstance(model, TransformerVQ):
            total = loss + model.config.commit_coef * output.commit_loss
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        lr = settings.lr * min(1.0, (step + 1) / WARMUP)
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * step / steps)) / 2 if decays else lr
        optimizer.step()
        if isinstance(model, TransformerVQ):
            model.update_codebooks(output.code_usage)
        advance(1, note=f"{length} tokens, loss {float(loss.detach()):.3f}")


def evaluate(model: nn.Module, data: RecallData, length: int) -> tuple[float, int]:
    """Return the accuracy on held-out sequences, the same for all models, and the state size."""
    n = data.settings.eval_sequences
    batch = data.batch([length], n, length, held_out=True)
    device = next(model.parameters()).device
    n_rows = max(EVAL_TOKENS // length, 1)
    n_correct, n_bytes = 0, 0
    with evaluating(model):
        for i in range(0, n, n_rows):
            tokens = batch.tokens[i : i + n_rows].to(device)
            output = model(tokens)
            correct = output.logits.argmax(-1).cpu() == batch.targets[i : i + n_rows]
            n_correct += int(correct[batch.scored[i : i + n_rows]].sum())
            n_bytes = state_bytes(model, output, len(tokens))
    return n_correct / int(batch.scored.sum()), n_bytes


def table(record: Record) -> str:
    """Return a Markdown table per task: models as rows, context lengths as columns."""
    return "\n\n".join(_table(task, rows, record) for task, rows in by_task(record).items())


def _table(task: RecallTask, models: dict[Candidate, list[Record]], record: Record) -> str:
    lengths = sorted(set(record["settings"]["lengths"]))
    n_seeds = len({row["seed"] for rows in models.values() for row in rows})
    seeds = f"mean (standard deviation) of {n_seeds} seeds" if n_seeds > 1 else "one seed"
    title = f"{task}: accuracy in %, {seeds}"
    columns = " | ".join(f"{n:,} tokens" for n in lengths)
    lines = [
        f"| {title} | parameters | state KB at {lengths[-1]:,} tokens | {columns} |",
        "| --- " + "| ---: " * (2 + len(lengths)) + "|",
    ]
    for candidate, rows in models.items():
        cells = []
        for n in lengths:
            average, spread = accuracies(rows, n)
            cells.append(
                f"{100 * average:.1f}" + ("" if spread is None else f" ({100 * spread:.1f})")
            )
        state = max(row["state_bytes"] for row in rows) / 1e3
        lines.append(
            f"| {candidate.name} | {rows[0]['parameters']:,} | {state:,.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


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


def plot_recall(record: Record, path: Path) -> None:
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


def _draw(axes: Any, rows: list[Record], style: dict[str, Any]) -> Any:
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


def _explain(record: Record) -> str:
    """Return the note below the figure."""
    n_seeds = len({row["seed"] for row in record["recall"]})
    bands = f"Bands: standard deviation of {n_seeds} seeds. " if n_seeds > 1 else ""
    longest = record["settings"]["train_len"]
    return f"{bands}Dotted line: longest training sequence, {longest:,} tokens."


def candidates(models: Sequence[RecallModel], codes: Sequence[int]) -> list[Candidate]:
    """Return the models to compare, vq once per codebook size, in the order of the tables."""
    sizes: dict[str, Sequence[int | None]] = {"window": [WINDOW_CODES], "vq": codes}
    found = {Candidate(model, n) for model in models for n in sizes.get(model, [None])}
    return sorted(found, key=lambda candidate: candidate.place)


def candidate_of(row: Record) -> Candidate:
    """Return the model of a row."""
    return Candidate(row["model"], row["n_code"])


def by_task(record: Record) -> dict[RecallTask, dict[Candidate, list[Record]]]:
    """Return the rows of every model, by task."""
    rows = sorted(record["recall"], key=lambda row: candidate_of(row).place)
    found: dict[RecallTask, dict[Candidate, list[Record]]] = {}
    for row in rows:
        found.setdefault(row["task"], {}).setdefault(candidate_of(row), []).append(row)
    return {task: found[task] for task in get_args(RecallTask) if task in found}


def accuracies(rows: Sequence[Record], length: int) -> tuple[float, float | None]:
    """Return mean and standard deviation over seeds at one context length; None for one seed."""
    values = [row["accuracy"] for row in rows if row["context"] == length]
    return mean(values), stdev(values) if len(values) > 1 else None


FlatSettings = Annotated[RecallSettings, tyro.conf.arg(name="")]
"""Settings whose options have no prefix."""
DEFAULTS = RecallSettings()


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure recall by context length and codebook size, next to other models of equal size.

    Small models are trained on tasks that are generated on the fly, and evaluated on longer
    contexts. Finished trainings are stored in --out. If interrupted, run the same command again to
    continue. The defaults take about two hours on one core.
    """

    settings: FlatSettings = DEFAULTS
    tasks: tuple[RecallTask, ...] = ("mqar", "copy", "needle")
    """mqar: values of several keys; copy: a string after noise; needle: a marked value in text."""
    models: tuple[RecallModel, ...] = ("full", "window", "vq", "mamba")
    """full: full attention; window: VQ attention without the cache; vq: VQ attention; mamba: the
    state-space model of Hugging Face transformers with about as many parameters."""
    codes: tuple[int, ...] = (8, 32, 128)
    """Codebook sizes of vq."""
    seeds: int = 3
    """Trainings per task and model."""
    text: Path | None = None
    """Text file to hide the value of needle in; by default random words."""
    out: Path = Path("runs/recall.json")
    """JSON file for the results. Results that it contains are kept."""
    overwrite: bool = True
    """Add results to an existing record."""
    device: Device = "cpu"


if __name__ == "__main__":
    main(Options, run, table, plot_recall)
