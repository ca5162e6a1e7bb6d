"""A power law with a floor, y = floor + scale * x^-exponent, and its bootstrap confidence band."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transformer_vq.bench.trial_records import Fit

EXPONENTS = np.geomspace(0.02, 4.0, 400)
SAMPLES = 1000
BAND = (2.5, 97.5)  # percentiles


def fit_power_law(groups: Mapping[float, Sequence[float]], seed: int = 0) -> Fit:
    """Fit a power law to several values per x; `groups` maps x to the values of its seeds.

    Least squares over the exponent on a grid, with the floor and the scale in closed form; both are
    at least 0. The band and the intervals contain 95% of the fits to bootstrap samples: seeds drawn
    with replacement, separately for every x. They describe the spread over seeds, not whether the
    form of the law is right. At least three x are needed.
    """
    if len(groups) < 3:
        raise ValueError(f"a power law with a floor needs at least 3 points, not {len(groups)}")
    x = np.array(sorted(groups), dtype=float)
    values = [np.asarray(groups[at], dtype=float) for at in x]
    floor, scale, exponent = _fit(x, np.array([v.mean() for v in values]))
    generator = np.random.default_rng(seed)
    fits = np.array(
        [
            _fit(x, np.array([generator.choice(v, len(v)).mean() for v in values]))
            for _ in range(SAMPLES)
        ]
    )
    grid = np.geomspace(x[0], x[-1], 33)
    curves = fits[:, :1] + fits[:, 1:2] * grid ** -fits[:, 2:3]
    low, high = np.percentile(curves, BAND, axis=0)
    factors = _doubling(fits[:, 0], fits[:, 1], fits[:, 2], x[-1])
    return {
        "floor": float(floor),
        "scale": float(scale),
        "exponent": float(exponent),
        "x": grid.tolist(),
        "low": low.tolist(),
        "high": high.tolist(),
        "exponent_interval": _interval(fits[:, 2]),
        "factor_per_doubling": float(_doubling(floor, scale, exponent, x[-1])),
        "factor_interval": _interval(factors),
    }


def curve(fit: Fit) -> list[float]:
    """Return the fitted values at `fit["x"]`."""
    return [fit["floor"] + fit["scale"] * x ** -fit["exponent"] for x in fit["x"]]


def _doubling(
    floor: np.ndarray, scale: np.ndarray, exponent: np.ndarray, last: float
) -> np.ndarray:
    """Return the ratio of the fitted values at the largest x and at half of it."""
    at = floor + scale * last**-exponent
    half = floor + scale * (last / 2) ** -exponent
    ratio: np.ndarray = at / half
    return ratio


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, BAND)
    return float(low), float(high)


def _fit(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return floor, scale and exponent with the least squared error."""
    powers = x ** -EXPONENTS[:, None]  # [exponents, points]
    centred = powers - powers.mean(1, keepdims=True)
    scale = (centred * (y - y.mean())).sum(1) / (centred**2).sum(1)
    floor = y.mean() - scale * powers.mean(1)
    # The best fit may have a negative scale or floor; then that parameter is 0.
    free = (scale >= 0) & (floor >= 0)
    no_floor = (powers * y).sum(1) / (powers**2).sum(1)
    scale, floor = (
        np.where(free, scale, np.where(scale < 0, 0.0, no_floor)),
        np.where(free, floor, np.where(scale < 0, y.mean(), 0.0)),
    )
    errors = ((floor[:, None] + scale[:, None] * powers - y) ** 2).sum(1)
    best = int(errors.argmin())
    return floor[best], scale[best], EXPONENTS[best]
