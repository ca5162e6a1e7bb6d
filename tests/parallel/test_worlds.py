"""Compare losses, gradients, codebooks and checkpoints of 2 and 4 processes with those of one.

Compiled training on two processes equals eager training; its checkpoints are the same.
"""

import checks
import compiled_checks
import pytest
from checks import tiny
from helpers import losses
from worlds import run_checks

from transformer_vq.config import ParallelConfig
from transformer_vq.training.checkpoint import load_model
from transformer_vq.training.run import read_history, resume, train

CASES = [
    pytest.param((module.__name__, n), name, marks=[pytest.mark.slow] * check.is_slow)
    for module in (checks, compiled_checks)
    for name, check in vars(module).items()
    if name.startswith("check_")
    for n in check.worlds
]


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Return a function that runs the selected checks of a world once and returns its reports."""
    done = {}

    def reports_of(world):
        if world not in done:
            module, n_processes = world
            folder = tmp_path_factory.mktemp(f"{module}-{n_processes}")
            items = [item for item in request.session.items if item.path == request.path]
            params = [item.callspec.params for item in items if hasattr(item, "callspec")]
            names = [p["check"] for p in params if p["world"] == world]
            done[world] = run_checks(n_processes, module, names, folder), folder
        return done[world]

    return reports_of


@pytest.mark.parametrize(("world", "check"), CASES)
def test_check_passes_on_every_rank(reports, world, check):
    failure = reports(world)[0][check]
    if failure:
        pytest.fail(failure, pytrace=False)


@pytest.mark.slow
def test_one_process_resumes_a_run_of_two_with_the_same_losses(reports):
    folder = reports(("checks", 2))[1]
    single = ParallelConfig(dp=1)
    assert resume(folder / "meshes", tiny(folder, single)).finished
    train(tiny(folder, single), folder / "single")
    got, want = losses(folder / "meshes"), losses(folder / "single")
    assert [row[:2] for row in got] == [row[:2] for row in want]
    for (kind, step, a), (_, _, b) in zip(got, want, strict=True):
        assert a == pytest.approx(b, rel=1e-5), (kind, step)
    assert load_model(folder / "meshes")[1] == "best"
    steps = [row["step"] for row in read_history(folder / "meshes") if row["event"] == "stop"]
    assert steps == [2, 4, 5, 7, 9]
