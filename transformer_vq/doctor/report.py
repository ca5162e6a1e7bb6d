"""The report: Markdown for an issue, one sentence, and a JSON record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from transformer_vq.doctor.examine import Diagnosis
from transformer_vq.doctor.findings import Check, Repeat, Syncs
from transformer_vq.doctor.speed import Speed

MAX_LOCATIONS = 12


def markdown(diagnosis: Diagnosis) -> str:
    """Return the report, to be pasted into an issue."""
    known = diagnosis.environment
    quick = " --quick" if diagnosis.quick else ""
    sections = {
        "Device": _facts(known.device),
        "Versions": _facts(known.versions),
        "Settings": _facts(known.settings),
        "Results, compared with float64": _checks(diagnosis.checks),
        "Determinism": _repeats(diagnosis.repeats),
        "Host syncs": _syncs(diagnosis.syncs),
        "Speed": _speeds(diagnosis),
    }
    parts = [f"# tvq doctor{quick}"]
    for title, text in sections.items():
        parts += [f"## {title}", text]
    return "\n\n".join([*parts, summary(diagnosis)])


def summary(diagnosis: Diagnosis) -> str:
    """Return the result in one sentence."""
    device, failed = diagnosis.environment.device["device"], diagnosis.failed
    skipped = [x.status == "skipped" for x in diagnosis.checks]
    skipped += [x.status == "skipped" for x in diagnosis.repeats]
    skipped += [x.count is None for x in diagnosis.syncs]
    skipped += [bool(x.failed) for x in diagnosis.speeds]
    n_skipped, n_checked = sum(skipped), len(skipped) - sum(skipped)
    took = f"in {diagnosis.seconds:.0f} s"
    if failed:
        more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        names = f"{', '.join(failed[:3])}{more}"
        return f"{len(failed)} of the checks on {device} FAILED {took}: {names}."
    differing = [x.path for x in diagnosis.repeats if x.status == "differs"]
    same = "repeated steps are bitwise equal"
    if differing:
        same = f"repeated steps differ in {len(differing)} paths"
    return (
        f"No check failed on {device}: {n_checked} passed and {n_skipped} were skipped {took}, "
        f"and {same}."
    )


def record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return everything as plain values for JSON."""
    return {
        **asdict(diagnosis),
        "ok": not diagnosis.failed,
        "failed": diagnosis.failed,
        "summary": summary(diagnosis),
    }


def _facts(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def _checks(checks: Sequence[Check]) -> str:
    rows = (
        [x.path, x.dtype, _number(x.error), _number(x.tolerance), x.status, _cases(x)]
        for x in checks
    )
    head = ("path", "dtype", "largest relative RMS error", "tolerance", "result", "details")
    return _table(head, "--rr--", rows)


def _cases(check: Check) -> str:
    if check.status != "ok":
        return check.note
    cases = "1 case" if check.n_cases == 1 else f"{check.n_cases} cases"
    return f"{cases}, {check.note}"


def _repeats(repeats: Sequence[Repeat]) -> str:
    rows = ([x.path, x.status, x.note] for x in repeats)
    return _table(("path", "repeated", "details"), "---", rows)


def _syncs(syncs: Sequence[Syncs]) -> str:
    lines = []
    for found in syncs:
        result = found.note if found.count is None else f"{found.count}"
        lines.append(f"- {found.what}: {'FAILED: ' * found.failed}{result}")
        places = list(found.locations.items())
        lines += [f"    - {n} x {place}" for place, n in places[:MAX_LOCATIONS]]
        if len(places) > MAX_LOCATIONS:
            lines.append(f"    - {len(places) - MAX_LOCATIONS} more places")
    return "\n".join(lines)


def _speeds(diagnosis: Diagnosis) -> str:
    if not diagnosis.speeds:
        return "skipped: --quick" if diagnosis.quick else "not measured"
    rate = diagnosis.matmul_rate
    best = "not measured" if rate is None else f"{rate / 1e9:,.0f} GFLOP/s"
    rows = (_speed(x) for x in diagnosis.speeds)
    head = ("what", "tokens", "batch", "dtype", "tokens/s", "peak GB", "share")
    return "\n\n".join(
        [
            f"Fastest matrix product, {diagnosis.precision}: {best}. Share: model FLOPs over this "
            "rate for training; bytes of weights and state over the read bandwidth for decoding.",
            _table(head, "-rr-rrr", rows),
        ]
    )


def _speed(speed: Speed) -> list[str]:
    start = [speed.what, f"{speed.tokens:,}", str(speed.batch_size), speed.precision]
    if speed.failed:
        return [*start, speed.failed, "", ""]
    found = {",.0f": speed.tokens_per_second, ".2f": speed.peak_gb, ".3f": speed.share}
    return [*start, *("" if x is None else f"{x:{style}}" for style, x in found.items())]


def _table(head: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. sides: "r" for columns that are aligned right."""
    rules = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.1e}"
