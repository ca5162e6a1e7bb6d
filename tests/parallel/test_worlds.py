"""Losses, gradients, codebooks and checkpoints of 2 and 4 processes against those of one."""

import pytest
from checks import losses, tiny
from worlds import checks_for, run_checks

from transformer_vq.config import ParallelConfig
from transformer_vq.training.checkpoint import load_model
from transformer_vq.training.run import resume, train

SIZES = (2, 4)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Results of all checks in a world of so many processes; each world is started once."""
    done = {}

    def of(n_processes):
        if n_processes not in done:
            folder = tmp_path_factory.mktemp(f"world-{n_processes}")
            done[n_processes] = run_checks(n_processes, "checks", folder), folder
        return done[n_processes]

    return of


@pytest.mark.parametrize(
    ("n_processes", "check"), [(n, name) for n in SIZES for name in checks_for(n, "checks")]
)
def test_of(reports, n_processes, check):
    trouble = reports(n_processes)[0][check]
    if trouble:
        pytest.fail(trouble, pytrace=False)


def test_one_process_goes_on_with_a_run_of_two_and_both_are_one_curve(reports):
    folder = reports(2)[1]
    alone = ParallelConfig(dp=1)
    assert resume(folder / "layouts", tiny(folder, alone)).finished
    train(tiny(folder, alone), folder / "alone")
    got, want = losses(folder / "layouts"), losses(folder / "alone")
    assert [row[:2] for row in got] == [row[:2] for row in want]
    for (kind, step, a), (_, _, b) in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-5), (kind, step)
    assert load_model(folder / "layouts")[1] == "best"
