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
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from transformer_vq.bench.cells import machine
from transformer_vq.bench.recall_models import (
    build,
    check_transformers,
    fast_mamba,
    n_parameters,
    quantized,
    state_bytes,
)
from transformer_vq.bench.recall_records import (
    Candidate,
    RecallRecord,
    RecallRow,
    RecallSettings,
    RecallTask,
    accuracies,
    by_task,
    candidate_of,
    check_lengths,
    is_recall_record,
)
from transformer_vq.bench.recall_tasks import RecallData, read_text
from transformer_vq.config.checks import shown
from transformer_vq.device import evaluating
from transformer_vq.errors import TrainingError, UserError
from transformer_vq.files import check_can_write, file_digest, read_json, write_json
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.progress import Advance, info, progress_bar

WARMUP = 50  # steps
GRAD_CLIP = 1.0
EVAL_TOKENS = 8192  # per forward pass
FULL = Candidate("full")


def run(
    out: Path,
    tasks: Sequence[RecallTask],
    models: Sequence[Candidate],
    seeds: int,
    settings: RecallSettings,
    text: Path | None = None,
    device: torch.device | None = None,
) -> RecallRecord:
    """Train and evaluate every model on every task with seeds 0, 1, ...; return the record.

    out: the record file, which is updated after each training. Trainings that it contains are
    skipped. text: a file to hide the key-value pairs of needle in.
    """
    check_lengths(tasks, settings)
    if any(candidate.model == "mamba" for candidate in models):
        check_transformers()
    for candidate in models:  # check all sizes before the first training
        settings.model(candidate, vocab_size=2)
    found = None if text is None else read_text(text, max(*settings.lengths, settings.train_len))
    device = device or torch.device("cpu")
    digest = None if text is None else file_digest(text)
    wanted = {**settings.record(), "text": digest}
    record = _open(out, wanted, device)
    todo = [(seed, task, model) for seed in range(seeds) for task in tasks for model in models]
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


def _has(record: RecallRecord, task: RecallTask, candidate: Candidate, seed: int) -> bool:
    """Return whether a record contains a training."""
    return any(
        (row["task"], candidate_of(row), row["seed"]) == (task, candidate, seed)
        for row in record["recall"]
    )


def _open(out: Path, wanted: dict[str, Any], device: torch.device) -> RecallRecord:
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
    if not is_recall_record(record):
        raise UserError(f"--out {out}: the file is not a record of this benchmark; use another one")
    stored = record["settings"]
    if stored != wanted:
        changes = ", ".join(
            f"--{name.replace('_', '-')} ({shown(stored.get(name))} -> {shown(wanted.get(name))})"
            for name in {**wanted, **stored}
            if stored.get(name) != wanted.get(name)
        )
        raise UserError(f"--out {out} has other settings: {changes}; keep them or use another file")
    return record


def measure(
    data: RecallData, candidate: Candidate, seed: int, device: torch.device
) -> list[RecallRow]:
    """Train one model and return its accuracy at every context length."""
    settings = data.settings
    start = time.perf_counter()
    with fast_mamba(device) if candidate.model == "mamba" else nullcontext():
        model = train(data, candidate, seed, device)
        seconds = time.perf_counter() - start
        rows: list[RecallRow] = []
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


def table(record: RecallRecord) -> str:
    """Return a Markdown table per task: models as rows, context lengths as columns."""
    return "\n\n".join(_table(task, rows, record) for task, rows in by_task(record).items())


def _table(task: RecallTask, models: dict[Candidate, list[RecallRow]], record: RecallRecord) -> str:
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
