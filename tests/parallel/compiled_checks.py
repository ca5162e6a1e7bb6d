"""Checks of compiled training that every rank of a world runs; see test_worlds.py.

The backend "aot_eager" traces forward and backward as the default one does, without a C++ compiler.
"""

import warnings
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from checks import (
    assert_same,
    make_trainer,
    run_config,
    spans,
    stop_after,
    take_step,
    tiny,
    write_data,
)
from helpers import losses, tiny_run
from torch._dynamo.testing import CompileCounterWithBackend
from worlds import for_worlds

from transformer_vq.config import ParallelConfig
from transformer_vq.parallel import strategy
from transformer_vq.training.checkpoint import load_model
from transformer_vq.training.run import resume, train


def start_compiler():
    """Return a counter of the graphs that are compiled from now on."""
    torch.compiler.reset()
    # PyTorch hides this warning of its compiler, but tests turn warnings into errors before.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    strategy.COMPILER = CompileCounterWithBackend("aot_eager")
    return strategy.COMPILER


def compiled(config):
    return replace(config, train=replace(config.train, compile=True))


def assert_same_as_eager(config, mesh, n_graphs, n_steps=3):
    """Compare some steps of a compiled trainer with those of an eager one, in float64."""
    counter = start_compiler()
    eager, graph = make_trainer(config, mesh), make_trainer(compiled(config), mesh)
    for step, batch in enumerate(spans(config, n_steps)):
        want, got = take_step(eager, batch, step), take_step(graph, batch, step)
        for name in ("nats_per_token", "commit_loss", "grad_norm", "tokens"):
            a, b = getattr(got, name), getattr(want, name)
            assert abs(a - b) <= 1e-10 * abs(b), (step, name, a, b)
    for name, p in eager.strategy.parameters.items():
        assert name in graph.strategy.parameters
        torch.testing.assert_close(graph.strategy.parameters[name], p, rtol=1e-10, atol=1e-12)
    assert counter.frame_count == n_graphs, counter.frame_count


@for_worlds(2)
def check_compiled_training_equals_eager(folder):
    two_layers = run_config({"n_layer": 2})
    assert_same_as_eager(two_layers, ParallelConfig(dp=2), 1)
    assert_same_as_eager(two_layers, ParallelConfig(fsdp=2), 1)
    # The first branch has another graph under tp: its input is not the sum of two DTensors.
    for mesh, n_graphs in ((ParallelConfig(tp=2), 2), (ParallelConfig(cp=2), 1)):
        assert_same_as_eager(two_layers, mesh, n_graphs, 2)
        assert_same_as_eager(run_config(checkpoint_activations=True), mesh, n_graphs, 2)
    # Micro-batches have two rows: those of a single row need a second graph for other strides.
    config = run_config(batch_size=8, accumulate=2, checkpoint_activations=True)
    assert_same_as_eager(config, ParallelConfig(dp=2), 1, 2)


@for_worlds(2)
def check_compiled_fsdp_with_checkpointing_equals_one_eager_process(folder):
    start_compiler()
    config = run_config(checkpoint_activations=True)
    one, many = make_trainer(config), make_trainer(compiled(config), ParallelConfig(fsdp=2))
    for step, batch in enumerate(spans(config, 2)):
        take_step(one, batch, step)
        take_step(many, batch, step)
    assert_same(one, many)


def assert_runs_resume(folder, mesh):
    """Compiled runs resume exactly, and exchange checkpoints with eager runs."""
    start_compiler()
    folder = folder / f"fsdp-{mesh.fsdp}"
    write_data(folder)
    short = {"steps": 5, "save_every": 2, "eval_every": 5, "compile": True}
    exact = replace(tiny_run(folder, model={"n_layer": 1}, train=short), parallel=mesh)
    train(exact, folder / "whole")  # with all dropout
    stop_after(3, partial(train, exact, folder / "stopped"))
    assert resume(folder / "stopped").finished
    dist.barrier()  # rank 0 has written the last checkpoint
    assert losses(folder / "stopped") == losses(folder / "whole")
    models = [load_model(folder / name, "last")[0] for name in ("whole", "stopped")]
    whole, stopped = (model.state_dict() for model in models)
    assert not any("_orig_mod" in name for name in whole)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)

    graph = tiny(folder, mesh, train=short)  # without dropout
    eager = replace(graph, train=replace(graph.train, compile=False))
    train(eager, folder / "eager")
    for first, second in ((graph, eager), (eager, graph)):
        run = folder / f"compiled-{first.train.compile}"
        stop_after(3, partial(train, first, run))
        assert resume(run, second).finished
        for got, want in zip(losses(run), losses(folder / "eager"), strict=True):
            assert abs(got[2] - want[2]) < 1e-5 * want[2], (got, want)


@for_worlds(2)
def check_compiled_runs_resume(folder):
    assert_runs_resume(folder, ParallelConfig(dp=2))
    assert_runs_resume(folder, ParallelConfig(fsdp=2))
