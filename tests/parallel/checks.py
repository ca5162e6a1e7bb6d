"""What is true of every process of a world; run by worlds.py, reported by test_worlds.py."""

import os
import signal
from dataclasses import replace

import torch
import torch.distributed as dist
from helpers import assert_close, tiny_config, tiny_run
from torch.distributed.tensor import DTensor
from worlds import for_worlds

from transformer_vq import TransformerVQ
from transformer_vq.config import OptimConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.parallel.world import World
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.run import resume, train
from transformer_vq.training.sizes import sizes
from transformer_vq.training.step import Trainer

EXACT = 1e-10


def run_config(model=None, optim=None, **train):
    sizes = {"batch_size": 4, "seq_len": 64, "backprop_len": 32, "steps": 10}
    return RunConfig(
        tiny_config(**({"n_layer": 1} | (model or {}))),
        optim=OptimConfig(**({"lr": 1e-2, "warmup": 0, "weight_decay": 1e-3} | (optim or {}))),
        train=TrainConfig(**(sizes | train)),
    )


def windows(config, n, documents=False, padding=False):
    """The windows of n updates: random tokens, documents of random lengths, rows that end early."""
    generator = torch.Generator().manual_seed(1)
    train = config.train
    batches = []
    ids = torch.zeros(train.batch_size, 1, dtype=torch.int64)
    for number in range(n):
        shape = (train.batch_size, train.backprop_len)
        tokens, targets = torch.randint(config.model.vocab_size, (2, *shape), generator=generator)
        starts = torch.rand(shape, generator=generator) < 0.1
        ids = ids[:, -1:] + starts.cumsum(1)
        is_last = (number + 1) * train.backprop_len % train.seq_len == 0
        ends = torch.tensor([train.backprop_len] * (train.batch_size - 1) + [13])
        valid = torch.arange(train.backprop_len) < ends[:, None] if is_last else None
        batches.append(
            Batch(
                tokens,
                targets,
                positions=torch.zeros_like(tokens),
                valid=valid if padding else None,
                document_ids=ids if documents else None,
            )
        )
    return batches


def trainer(config, layout=None, dtype=torch.float64):
    torch.manual_seed(3)
    model = TransformerVQ(config.model).to(dtype)
    return Trainer(model, config, torch.device("cpu"), World(layout))


def update(trained, batch, step):
    n_windows = trained.config.train.seq_len // trained.config.train.backprop_len
    return trained.update(batch, step, begins=step % n_windows == 0)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(one, many, tolerance=EXACT):
    """Gradients, weights, codebooks, moments and carried states."""
    for name, p in one.strategy.parameters.items():
        got = many.strategy.parameters[name]
        if p.grad.norm() > 1e-12:  # the first codebook has not been used for all distances
            assert_close(f"gradient of {name}", whole(got.grad), p.grad, tolerance)
    model, tensors = many.strategy.whole_model(), many.tensors()
    if not many.world.is_rank_zero:
        return
    got = model.state_dict()
    for name, x in one.model.state_dict().items():
        assert_close(name, got[name], x, tolerance)
    alone = one.tensors()
    for name, x in alone.items():
        got = tensors[name]
        if name.startswith("state"):
            x, got = x[:-1], got[:-1]  # the last row may have come to its end
        if name.endswith("cache/mean"):  # without a count it means nothing
            in_use = alone[name.replace("mean", "count")][:-1].unsqueeze(-1) > 0
            x, got = x * in_use, got * in_use
        if not name.startswith("rng"):
            assert_close(name, got, x, tolerance)


def same_as_one_process(config, layout, dtype=torch.float64, **kind):
    """Five updates with this layout and five by one process alone give the same."""
    tolerance = EXACT
    if dtype == torch.float32:  # without Adam's way of blowing up gradients that are all rounding
        config, tolerance = replace(config, optim=replace(config.optim, eps=1e-3)), 1e-5
    one, many = trainer(config, None, dtype), trainer(config, layout, dtype)
    for step, batch in enumerate(windows(config, 5, **kind)):
        want, got = update(one, batch, step), update(many, batch, step)
        for name in ("nats_per_token", "commit_loss", "grad_norm", "tokens"):
            a, b = getattr(got, name), getattr(want, name)
            assert abs(a - b) <= tolerance * abs(b), (step, name, a, b)
    assert_same(one, many, tolerance)


@for_worlds(2)
def check_data_parallel(folder):
    same_as_one_process(run_config(accumulate=2), ParallelConfig(), documents=True, padding=True)
    same_as_one_process(run_config(optim={"optimizer": "adafactor"}), ParallelConfig(dp=2))
    same_as_one_process(run_config(), ParallelConfig(), torch.float32)


@for_worlds(4)
def check_data_parallel_over_four(folder):
    same_as_one_process(run_config(model={"head_type": "mha"}), ParallelConfig())


@for_worlds(2)
def check_context_parallel(folder):
    layout = ParallelConfig(cp=2)
    same_as_one_process(run_config(), layout)
    same_as_one_process(run_config(checkpoint_activations=True), layout, documents=True)
    same_as_one_process(run_config(accumulate=2), layout, documents=True, padding=True)
    same_as_one_process(run_config({"head_type": "mqa"}), layout)
    same_as_one_process(run_config({"absolute_positions": True}), layout, padding=True)
    same_as_one_process(run_config({"grad_through_cache": False}), layout)
    same_as_one_process(run_config({"compressive_cache": False}), layout)
    same_as_one_process(run_config(), layout, torch.float32)


@for_worlds(4)
def check_context_parallel_over_four(folder):
    layout = ParallelConfig(cp=4)
    same_as_one_process(run_config(), layout, documents=True)
    same_as_one_process(run_config({"head_type": "mha"}), layout)


@for_worlds(4)
def check_data_and_context_parallel(folder):
    same_as_one_process(run_config(), ParallelConfig(dp=2, cp=2), documents=True, padding=True)


@for_worlds(2)
def check_sharded(folder):
    layout = ParallelConfig(fsdp=2)
    same_as_one_process(
        run_config(accumulate=2, checkpoint_activations=True), layout, documents=True
    )
    same_as_one_process(run_config({"head_type": "mqa", "absolute_positions": True}), layout)
    wide = {"d_model": 128, "n_layer": 1, "tie_embeddings": True, "vocab_size": 130}
    same_as_one_process(run_config(wide, {"optimizer": "adafactor", "grad_clip": None}), layout)
    same_as_one_process(run_config(), layout, torch.float32)


@for_worlds(4)
def check_sharded_with_copies_and_contexts(folder):
    same_as_one_process(run_config(), ParallelConfig(dp=2, fsdp=2))
    same_as_one_process(run_config(), ParallelConfig(fsdp=2, cp=2), documents=True)


@for_worlds(2)
def check_tensor_parallel(folder):
    for head_type in ("shga", "mqa", "mha", "gqa"):
        same_as_one_process(run_config({"head_type": head_type}), ParallelConfig(tp=2))
    wide = {"d_model": 128, "n_layer": 1, "d_k": 64}
    adafactor = {"optimizer": "adafactor", "grad_clip": None}
    same_as_one_process(run_config(wide, adafactor), ParallelConfig(tp=2))
    same_as_one_process(run_config({"attention": "full"}), ParallelConfig(tp=2))
    same_as_one_process(run_config(), ParallelConfig(tp=2), torch.float32)


@for_worlds(4)
def check_tensor_parallel_with_others(folder):
    same_as_one_process(run_config(), ParallelConfig(dp=2, tp=2), documents=True)
    same_as_one_process(run_config({"head_type": "mha"}), ParallelConfig(dp=2, tp=2))
    same_as_one_process(run_config(), ParallelConfig(cp=2, tp=2))


@for_worlds(2)
def check_memory_by_arithmetic(folder):
    """Weights and moments that lie on a device are those that `sizes` tells."""
    for layout in (ParallelConfig(fsdp=2), ParallelConfig(tp=2), ParallelConfig(dp=2)):
        for head_type in ("shga", "mha"):
            even = {"head_type": head_type, "vocab_size": 18}  # shards of the same size
            config = replace(run_config(even), parallel=layout)
            many = trainer(config, layout, torch.float32)
            update(many, windows(config, 1)[0], 0)
            got = sum(local(p).numel() for p in many.strategy.parameters.values())
            kept = [x for s in many.optimizer.state.values() for x in s.values() if x.ndim]
            assert sum(local(x).numel() for x in kept) == 2 * got
            assert sizes(config).optimizer_bytes == 4 * 2 * got


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


@for_worlds(4)
def check_what_crosses_does_not_depend_on_the_length(folder):
    sent = []
    for seq_len in (64, 512):
        config = run_config(seq_len=seq_len, backprop_len=seq_len, batch_size=1)
        many = trainer(config, ParallelConfig(cp=4), torch.float32)
        update(many, windows(config, 1)[0], 0)
        exchange = many.model.branches[1].exchange
        sent.append(exchange.sent)
    # Window of 4 tokens with keys of 8, values of 32 and codes; means of 7 codes, and up the ranks
    # also their counts and the carry.
    window, means, rank = 4 * (8 + 32) * 4, 7 * 32 * 4, exchange.rank
    stats = means + (7 + 1) * 8
    up = [window + 4 * 8, stats, stats, *([stats] if rank < 2 else [])] if rank < 3 else []
    down = [window, means, means, *([means] if rank > 1 else [])] if rank > 0 else []
    assert sent == [sum(up) + sum(down)] * 2, (sent, up, down)


@for_worlds(4)
def check_dropout_agrees_where_it_must(folder):
    """LayerDrop by sequence, sinusoids for all, residual dropout by token."""
    noisy = {"p_dropsin": 0.5, "p_droplyr": 0.5, "p_dropres": 0.5}
    config = run_config(noisy)
    many = trainer(config, ParallelConfig(dp=2, cp=2))
    for step, batch in enumerate(windows(config, 2)):
        update(many, batch, step)
        state = many.carried[0]
        rows = [torch.empty_like(state.branch_keep) for _ in range(4)]
        dist.all_gather(rows, state.branch_keep.to(rows[0].dtype))
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[2], rows[3])
        assert not torch.equal(rows[0], rows[2])
        masks = torch.stack([layer.sinusoid_mask for layer in state.layers]).to(torch.uint8)
        everywhere = [torch.empty_like(masks) for _ in range(4)]
        dist.all_gather(everywhere, masks)
        assert all(torch.equal(masks, other) for other in everywhere)
        assert not torch.equal(masks[0], masks[1])
    drawn = torch.rand(4)  # goes on from the stream of residual dropout
    streams = [torch.empty(4) for _ in range(4)]
    dist.all_gather(streams, drawn)
    assert len({tuple(x.tolist()) for x in streams}) == 4


REVIVING = {"codebook_init": "keys", "revive_below": 0.1}


@for_worlds(2)
def check_codes_from_keys_are_those_of_one_process(folder):
    for layout in (ParallelConfig(dp=2), ParallelConfig(cp=2), ParallelConfig(fsdp=2)):
        same_as_one_process(run_config(REVIVING, accumulate=2), layout, documents=True)
    same_as_one_process(run_config(REVIVING), ParallelConfig(dp=2), padding=True)
    heads = {"head_type": "mha", **REVIVING}
    same_as_one_process(run_config(heads), ParallelConfig(tp=2))


@for_worlds(4)
def check_codes_from_keys_are_those_of_one_process_over_four(folder):
    for layout in (ParallelConfig(dp=4), ParallelConfig(dp=2, cp=2), ParallelConfig(cp=4)):
        same_as_one_process(run_config(REVIVING), layout)


@for_worlds(2)
def check_rows_without_tokens_give_no_codes(folder):
    """One process has nothing but padding: codes come from the keys of the other."""
    config = run_config(REVIVING, batch_size=2)
    (batch,) = windows(config, 1)
    empty = torch.tensor([[False], [True]]).expand_as(batch.tokens)
    one, many = trainer(config), trainer(config, ParallelConfig(dp=2))
    for trained in (one, many):
        update(trained, replace(batch, valid=empty), 0)
    assert_same(one, many)


@for_worlds(2)
def check_half_precision_learns_alike(folder):
    """bf16 is not exact: a few updates end near those of float32, with every layout."""
    plain = trainer(run_config(), None, torch.float32)
    batches = windows(run_config(), 3)
    want = [update(plain, batch, i).nats_per_token for i, batch in enumerate(batches)]
    for layout in (ParallelConfig(fsdp=2), ParallelConfig(tp=2), ParallelConfig(cp=2)):
        many = trainer(run_config(precision="bf16"), layout, torch.float32)
        got = [update(many, batch, i).nats_per_token for i, batch in enumerate(batches)]
        assert all(abs(a - b) < 0.03 * b for a, b in zip(got, want, strict=True)), (got, want)


def tiny(folder, layout=None, **changes):
    """A run of ten updates on text; nothing random in it unless asked for."""
    still = {"p_dropsin": 0.0, "p_dropres": 0.0, "p_droplyr": 0.0, "revive_below": 0.0}
    changes = {"model": still, "optim": {"eps": 1e-3}, **changes}
    return replace(tiny_run(folder, **changes), parallel=layout or ParallelConfig())


def losses(run):
    return [(row["kind"], row["step"], row["nats_per_token"]) for row in read_metrics(run)]


def until(step, work):
    """Do some work of a run until a signal comes to the last process during that update."""
    update = Trainer.update

    def and_signal(self, batch, at, begins):
        if at == step - 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, batch, at, begins)

    Trainer.update = and_signal
    try:
        result = work()
    finally:
        Trainer.update = update
    assert (result.step, result.finished) == (step, False)


def shared(folder):
    """The data of runs; the first process writes them."""
    if dist.get_rank() == 0:
        tiny(folder)
    dist.barrier()
    return folder


@for_worlds(2)
def check_a_run_stops_everywhere_and_goes_on_bit_for_bit(folder):
    run, data = folder / "exact", shared(folder)
    for layout in (ParallelConfig(dp=2), ParallelConfig(cp=2)):
        config = tiny_run(data, model={"p_droplyr": 0.3})  # all kinds of dropout, revival of codes
        config = replace(config, parallel=layout)
        whole, cut = run / f"whole-{layout.cp}", run / f"cut-{layout.cp}"
        assert train(config, whole).finished
        until(2, lambda cut=cut, config=config: train(config, cut))
        until(7, lambda cut=cut: resume(cut))
        assert resume(cut).finished
        assert losses(cut) == losses(whole)
        assert len(losses(whole)) == 13


@for_worlds(2)
def check_a_run_goes_on_with_another_layout(folder):
    data = shared(folder)
    run = folder / "layouts"
    until(2, lambda: train(tiny(data, ParallelConfig(dp=2)), run))
    until(4, lambda: resume(run, tiny(data, ParallelConfig(tp=2))))
    until(5, lambda: resume(run, tiny(data, ParallelConfig(cp=2))))
    until(7, lambda: resume(run, tiny(data, ParallelConfig(fsdp=2))))  # one process does the rest
