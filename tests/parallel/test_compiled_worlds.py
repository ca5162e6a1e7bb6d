"""Compiled training on two processes equals eager training; its checkpoints are the same."""

import compiled_checks
import pytest
from worlds import checks_for, run_checks

SECONDS = 900  # compiling takes a while on a busy machine


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(name, marks=[pytest.mark.slow] * getattr(compiled_checks, name).is_slow)
        for name in checks_for(2, "compiled_checks")
    ],
)
def test_check_passes_on_every_rank(check, tmp_path):
    failure = run_checks(2, "compiled_checks", [check], tmp_path, SECONDS)[check]
    if failure:
        pytest.fail(failure, pytrace=False)
