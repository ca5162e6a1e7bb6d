"""Compiled training in one process: the same steps, parameter names and checkpoints.

The backend "aot_eager" traces forward and backward as the default one does, without a C++ compiler.
"""

from dataclasses import replace

import pytest
import torch
from helpers import assert_close, assert_same_runs, interrupted, losses, tiny_config, tiny_run
from torch._dynamo.testing import CompileCounterWithBackend

from transformer_vq import TransformerVQ
from transformer_vq.config import OptimConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.device import evaluating
from transformer_vq.parallel import strategy
from transformer_vq.training.run import resume, train
from transformer_vq.training.step import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Return the counter of compiled graphs."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(strategy, "COMPILER", counter)
    yield counter
    torch.compiler.reset()


def make_trainer(compile, **model):
    torch.manual_seed(0)
    train = TrainConfig(batch_size=2, seq_len=16, backprop_len=8, compile=compile)
    config = RunConfig(tiny_config(**model), optim=OptimConfig(warmup=0, lr=1e-2), train=train)
    return Trainer(TransformerVQ(config.model).double(), config, torch.device("cpu"))


def test_all_layers_share_one_graph_and_train_like_eager_ones(graphs):
    eager, compiled = make_trainer(None, n_layer=3), make_trainer(True, n_layer=3)
    assert (eager.strategy.is_compiled, compiled.strategy.is_compiled) == (False, True)
    assert list(compiled.model.state_dict()) == list(eager.model.state_dict())
    for step in range(4):
        tokens, targets = torch.randint(17, (2, 2, 8))
        batch = Batch(tokens, targets)
        want, got = (x.step(batch, step, begins=step % 2 == 0) for x in (eager, compiled))
        assert got.nats_per_token == pytest.approx(want.nats_per_token, rel=1e-12)
    for name, x in eager.model.state_dict().items():
        assert_close(name, compiled.model.state_dict()[name], x, 1e-10)
    assert graphs.frame_count == 1


def test_evaluation_of_a_compiled_model_stays_eager(graphs):
    trainer = make_trainer(True, n_layer=1)
    with evaluating(trainer.model):
        for n_tokens in (3, 8, 21):
            trainer.model(torch.randint(17, (1, n_tokens)))
    assert graphs.frame_count == 0


@pytest.mark.slow
def test_compiled_runs_resume_exactly_and_exchange_checkpoints_with_eager_runs(tmp_path):
    def stopped(config, name):
        interrupted(3, train, config, tmp_path / name)
        return tmp_path / name

    exact = tiny_run(tmp_path, train={"compile": True, "steps": 6})  # with all dropout
    train(exact, tmp_path / "whole")
    assert resume(stopped(exact, "stopped")).finished
    assert_same_runs(tmp_path / "stopped", tmp_path / "whole")

    model = {"p_dropsin": 0.0, "p_dropres": 0.0, "p_droplyr": 0.0, "revive_below": 0.0}
    eager = tiny_run(tmp_path, model=model, optim={"eps": 1e-3}, train={"steps": 6})
    compiled = replace(eager, train=replace(eager.train, compile=True))
    train(eager, tmp_path / "eager")
    for first, second in ((compiled, eager), (eager, compiled)):
        run = stopped(first, f"first-{first.train.compile}")
        second = replace(second, train=replace(second.train, compile=bool(second.train.compile)))
        assert resume(run, second).finished
        for (*_, got), (*_, want) in zip(losses(run), losses(tmp_path / "eager"), strict=True):
            assert got == pytest.approx(want, rel=1e-5)
