"""tvq bench profile: the time of a training step by part."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.bench import defaults
from transformer_vq.cli.arguments import check_range
from transformer_vq.cli.bench.common import (
    MAX_REPEATS,
    Out,
    parse_with_output,
    preset_or,
    print_result,
)
from transformer_vq.cli.options import Flat, Json, Overwrite


@dataclass(frozen=True)
class Profile:
    """Profile a training step: matrix products, softmax, cache, codebooks, optimizer, ...

    The parts add up to the step. Without a preset, the model is one layer of the paper's 190M
    model; every setting is an option.
    """

    run: Flat
    steps: int = 4
    """Training steps to profile."""
    time_limit: float = 600.0
    """Seconds for the entire profile, including the preparation of the data."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Profile training steps; print tables."""
    base, rest = preset_or(defaults.PROFILE_BASE, arguments)
    options = parse_with_output(Profile, rest, "profile [PRESET]", Profile(base))
    check_range("--steps", options.steps, 1, MAX_REPEATS)

    from transformer_vq.bench.profile import run as measure
    from transformer_vq.bench.profile import table

    record = measure(options.run, options.steps, options.time_limit)
    print_result(record, table(record), options.out, options.json)
