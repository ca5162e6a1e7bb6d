"""GPT-2 next to the server: prefill by length, and predictions for lengths that exceed a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from transformer_vq.bench import gpt2
from transformer_vq.bench.cells import in_subprocess
from transformer_vq.bench.first_token_records import BaselineRow, BaselineTiming, NotRun
from transformer_vq.bench.records import Failure
from transformer_vq.config import ModelConfig
from transformer_vq.errors import MissingExtraError

START = 120.0  # seconds of a subprocess for imports, warm-up and repeated short prefills


def baseline_rows(
    config: ModelConfig,
    lengths: Sequence[int],
    time_limit: float,
    memory_gb: float,
    device: torch.device,
) -> Iterator[BaselineRow]:
    """Yield the prefill of every length, the shortest first, each in a subprocess.

    A length that would take longer than `time_limit` seconds, or more memory, is not run. Without
    transformers, all rows say so.
    """
    try:
        gpt2.check_installed()
    except MissingExtraError as error:
        for n in sorted(lengths):
            yield {"tokens": n, "failed": f"not run: {error}"}
        return
    measured: dict[int, float] = {}
    failed: Failure | None = None
    for n in sorted(lengths):
        row: BaselineRow = {"tokens": n}
        found: BaselineTiming | NotRun | Failure
        if predicted := not_run(config, n, measured, time_limit, memory_gb):
            found = predicted
        elif failed is not None:
            found = failed
        else:
            found = in_subprocess(
                gpt2.time_prefill,
                config,
                n,
                device,
                memory_gb=memory_gb if device.type == "cpu" else None,
                seconds=START + time_limit,
            )
            if "failed" in found:  # longer ones would fail too
                failed = Failure(failed=f"not run: {n:,} tokens failed")
            else:
                measured[n] = found["seconds"]
        yield {**row, **found}


def not_run(
    config: ModelConfig,
    n_tokens: int,
    measured: dict[int, float],
    time_limit: float,
    memory_gb: float,
) -> NotRun | None:
    """Return why a length should not be run, or None.

    measured: seconds by length, for shorter ones.
    """
    seconds = predict_seconds(config, measured, n_tokens)
    needed = gpt2.kv_bytes(config, n_tokens)
    reasons = []
    if seconds is not None and seconds > time_limit:
        reasons.append(f"would take about {about(seconds)}")
    if needed > 1e9 * memory_gb:
        reasons.append(f"needs {needed / 1e9:,.3g} GB for keys and values")
    if not reasons:
        return None
    why = f"not run: {' and '.join(reasons)} (prediction)"
    return {"failed": why, "estimated_seconds": seconds, "estimated_bytes": needed}


def predict_seconds(config: ModelConfig, measured: dict[int, float], n_tokens: int) -> float | None:
    """Return the predicted time of a prefill from those of shorter prompts; None if there are none.

    The time is a * n + b * n^2, through the two longest measured prompts. If there is only one, or
    the times of short prompts are too noisy to separate the two parts, the ratio of the FLOPs is
    used instead.
    """
    if not measured:
        return None
    *rest, longest = sorted(measured)
    if rest:
        shorter = rest[-1]
        per_token = {n: measured[n] / n for n in (shorter, longest)}
        b = (per_token[longest] - per_token[shorter]) / (longest - shorter)
        a = per_token[longest] - b * longest
        if a >= 0 and b > 0:
            return a * n_tokens + b * n_tokens**2
    return measured[longest] * prefill_flops(config, n_tokens) / prefill_flops(config, longest)


def prefill_flops(config: ModelConfig, n_tokens: int) -> int:
    """Return the FLOPs of a prefill: matrices, and causal attention."""
    width, n_layer = gpt2.shape(config)
    return n_layer * (24 * width**2 * n_tokens + 2 * width * n_tokens**2)


def about(seconds: float) -> str:
    """Format a long time: 90 s, 12 minutes, 3.4 hours."""
    if seconds < 120:
        return f"{seconds:,.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.3g} hours" if seconds < 3.6e6 else f"{seconds / 86400:,.0f} days"
