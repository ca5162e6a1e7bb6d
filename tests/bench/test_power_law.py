"""The fit of a power law with a floor."""

import numpy as np
import pytest

from scaling import curve, fit_power_law

X = [16.0, 32.0, 64.0, 128.0, 256.0]


@pytest.mark.parametrize(
    ("floor", "scale", "exponent"), [(1.0, 2.0, 0.5), (0.0, 3.0, 0.2), (2.0, 50.0, 1.5)]
)
def test_fit_recovers_an_exact_law(floor, scale, exponent):
    fit = fit_power_law({x: [floor + scale * x**-exponent] * 2 for x in X})
    assert fit["exponent"] == pytest.approx(exponent, rel=0.02)
    assert fit["floor"] == pytest.approx(floor, abs=0.05)
    want = [floor + scale * x**-exponent for x in fit["x"]]
    np.testing.assert_allclose(curve(fit), want, rtol=1e-3)
    np.testing.assert_allclose(fit["low"], fit["high"])  # no spread, no band


def test_rising_values_are_fitted_by_a_constant():
    fit = fit_power_law({x: [1 + x / 1000] for x in X})
    assert fit["scale"] == 0
    assert fit["factor_per_doubling"] == 1


def test_band_contains_the_truth_and_grows_with_the_spread():
    generator = np.random.default_rng(0)

    def noisy(spread):
        return fit_power_law({x: 1 + 2 * x**-0.5 + spread * generator.normal(size=5) for x in X})

    narrow, wide = noisy(0.001), noisy(0.02)
    for fit in (narrow, wide):
        low, high = fit["exponent_interval"]
        assert low < high
    width = np.subtract(wide["high"], wide["low"]).mean()
    assert width > 5 * np.subtract(narrow["high"], narrow["low"]).mean()
    truth = [1 + 2 * x**-0.5 for x in wide["x"]]
    inside = [a <= t <= b for a, t, b in zip(wide["low"], truth, wide["high"], strict=True)]
    assert np.mean(inside) > 0.5


def test_fit_needs_three_points():
    with pytest.raises(ValueError, match="at least 3"):
        fit_power_law({16.0: [1.0], 32.0: [0.9]})
