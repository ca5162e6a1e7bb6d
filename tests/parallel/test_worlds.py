"""Losses, gradients, codebooks and checkpoints of 2 and 4 processes against those of one."""

import pytest
from worlds import checks_for, run_checks

SIZES = (2, 4)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Results of all checks in a world of so many processes; each world is started once."""
    done = {}

    def of(n_processes):
        if n_processes not in done:
            folder = tmp_path_factory.mktemp(f"world-{n_processes}")
            done[n_processes] = run_checks(n_processes, "checks", folder)
        return done[n_processes]

    return of


@pytest.mark.parametrize(
    ("n_processes", "check"), [(n, name) for n in SIZES for name in checks_for(n, "checks")]
)
def test_of(reports, n_processes, check):
    trouble = reports(n_processes)[check]
    if trouble:
        pytest.fail(trouble, pytrace=False)
