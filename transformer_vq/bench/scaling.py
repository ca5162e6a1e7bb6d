"""Bits per byte by codebook size S and by model size, fitted with power laws.

The paper reports that doubling S multiplies the validation loss by about 0.995 (Table 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformer_vq.bench.power_law import fit_power_law
from transformer_vq.bench.trial_records import Fit, ScalingRecord, TrialRow
from transformer_vq.bench.trials import spread
from transformer_vq.config import RunConfig
from transformer_vq.errors import UserError

PAPER_FACTOR = 0.995  # validation loss per doubling of S, enwik8
MIN_POINTS = 3  # of a fit
CODES, SIZES = "codes", "sizes"


def code_variants(base: RunConfig, codes: Sequence[int]) -> dict[str, RunConfig]:
    """Return the base with each codebook size."""
    if base.model.attention != "vq":
        raise UserError("full attention has no codebooks; use --model.attention vq")
    found = {}
    for n_code in sorted(set(codes)):
        if n_code < 1:
            raise UserError(f"--codes {n_code}: must be at least 1")
        found[f"codes-{n_code}"] = replace(base, model=replace(base.model, n_code=n_code))
    return found


def size_variants(base: RunConfig, sizes: Sequence[str]) -> dict[str, RunConfig]:
    """Return the base with other widths and depths; a size such as "128x2" is d_model x n_layer."""
    found = {}
    for size in sizes:
        width, separator, depth = size.partition("x")
        if not (separator and width.isdecimal() and depth.isdecimal()):
            raise UserError(f"--sizes {size!r}: write d_model x n_layer, such as 128x2")
        model = replace(base.model, d_model=int(width), n_layer=int(depth))
        found[f"size-{size}"] = replace(base, model=model)
    return found


def record(rows: list[TrialRow]) -> ScalingRecord:
    """Return the record of finished trials, with fits where there are enough points."""
    result: ScalingRecord = {
        "what": "test bits per byte by codebook size and by number of parameters",
        "trials": rows,
        "scaling": [kind for kind in (CODES, SIZES) if points(rows, kind)],
    }
    for kind in (CODES, SIZES):
        groups = points(rows, kind)
        if len(groups) >= MIN_POINTS:
            result[kind] = fit_power_law(groups)  # type: ignore[literal-required]
    return result


def points(rows: Sequence[TrialRow], kind: str) -> dict[float, list[float]]:
    """Return the test bits per byte of all seeds, by codebook size or by number of parameters."""
    prefix = "codes-" if kind == CODES else "size-"
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["variant"].startswith(prefix):
            x = row["config"]["model"]["n_code"] if kind == CODES else row["parameters"]
            found.setdefault(float(x), []).append(row["test"])
    return dict(sorted(found.items()))


def table(record: ScalingRecord) -> str:
    """Return a Markdown table per grid, and the fitted laws."""
    parts = []
    for kind, title in ((CODES, "codes"), (SIZES, "parameters")):
        groups = points(record["trials"], kind)
        if not groups:
            continue
        lines = [
            f"| {title} | seeds | test bits per byte | relative to the previous row |",
            "| ---: | ---: | ---: | ---: |",
        ]
        before: float | None = None
        for x, values in groups.items():
            found = spread(values)
            deviation = "" if found["deviation"] is None else f" ± {found['deviation']:.4f}"
            ratio = "" if before is None else f"{found['mean'] / before:.4f}"
            lines.append(f"| {x:,.0f} | {len(values)} | {found['mean']:.4f}{deviation} | {ratio} |")
            before = found["mean"]
        parts.append("\n".join(lines))
        if kind in record:
            parts.append(_law(record[kind], "S" if kind == CODES else "N"))  # type: ignore[literal-required]
    return "\n\n".join(parts)


def _law(fit: Fit, symbol: str) -> str:
    if fit["scale"] == 0:
        return f"Fit: {fit['floor']:.4f}, without a dependence on {symbol}."
    low, high = fit["exponent_interval"]
    first, last = fit["factor_interval"]
    text = (
        f"Fit: {fit['floor']:.4f} + {fit['scale']:.4g} {symbol}^-{fit['exponent']:.3f} "
        f"(95% of bootstrap samples: exponent {low:.3f} to {high:.3f}); the last doubling of "
        f"{symbol} multiplies the loss by {fit['factor_per_doubling']:.4f} "
        f"({first:.4f} to {last:.4f})"
    )
    return text + (f"; the paper reports about {PAPER_FACTOR} on enwik8." if symbol == "S" else ".")
