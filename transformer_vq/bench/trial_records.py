"""Types of the records of `tvq bench variants` and `tvq bench scaling`. Does not import torch."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from transformer_vq.bench.records import ConfigRecord, Machine


class Spread(TypedDict):
    """The mean of several seeds, and their standard deviation; None for a single seed."""

    mean: float
    deviation: float | None


class TrialRow(TypedDict):
    """One training run of a grid, and its evaluation on the validation and the test split."""

    name: str
    variant: str
    seed: int
    config: ConfigRecord
    corpus: str
    """Checksum of the tokens."""
    parameters: int
    tokens: int
    minutes: float
    validation: float
    """Bits per byte of the best checkpoint."""
    test: float
    by_position: list[dict[str, Any]]
    """Loss on the test split by position in the context."""
    position_len: int
    curve: list[dict[str, Any]]
    machine: Machine


class VariantsRecord(TypedDict):
    """All trials of `tvq bench variants`; the first variant is what the others are compared to."""

    what: str
    variants: list[str]
    trials: list[TrialRow]


class Fit(TypedDict):
    """bits per byte = floor + scale * x^-exponent, and a confidence band by bootstrap."""

    floor: float
    scale: float
    exponent: float
    x: list[float]
    low: list[float]
    high: list[float]
    exponent_interval: tuple[float, float]
    factor_per_doubling: float
    factor_interval: tuple[float, float]


class ScalingRecord(TypedDict):
    """Trials by codebook size and by model size, and the power laws fitted to them."""

    what: str
    trials: list[TrialRow]
    codes: NotRequired[Fit]
    sizes: NotRequired[Fit]
    scaling: list[str]
    """The grids that were run: codes, sizes or both."""
