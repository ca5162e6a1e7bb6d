"""Checks that every rank of a world runs; started by worlds.py, reported by test_worlds.py."""

import os
import signal
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from helpers import assert_close, losses, tiny_config, tiny_run
from torch.distributed.tensor import DTensor
from worlds import for_worlds

from traffic import LiveBytes, StepTraffic, Traffic
from transformer_vq import TransformerVQ
from transformer_vq.config import OptimConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.data.prepare import prepare
from transformer_vq.evaluation import score
from transformer_vq.parallel.shards import read_index, read_whole
from transformer_vq.parallel.world import World
from transformer_vq.sizes import sizes
from transformer_vq.training.checkpoint import (
    checkpoint_folder,
    load_model,
    save_best,
    save_checkpoint,
)
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import resume, train
from transformer_vq.training.step import Trainer

EXACT = 1e-10


def run_config(model=None, optim=None, **train):
    sizes = {"batch_size": 4, "seq_len": 64, "backprop_len": 32, "steps": 10}
    return RunConfig(
        tiny_config(**({"n_layer": 1} | (model or {}))),
        optim=OptimConfig(**({"lr": 1e-2, "warmup": 0, "weight_decay": 1e-3} | (optim or {}))),
        train=TrainConfig(**(sizes | train)),
    )


def spans(config, n, documents=False, padding=False):
    """Return the spans of n steps: random tokens, optionally with documents and padding."""
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
                valid=valid if padding else None,
                document_ids=ids if documents else None,
            )
        )
    return batches


def make_trainer(config, mesh=None, dtype=torch.float64):
    torch.manual_seed(3)
    model = TransformerVQ(config.model).to(dtype)
    return Trainer(model, config, torch.device("cpu"), World(mesh))


def take_step(trainer, batch, step):
    n_spans = trainer.config.train.seq_len // trainer.config.train.backprop_len
    return trainer.step(batch, step, begins=step % n_spans == 0)


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_same(one, many, tolerance=EXACT):
    """Compare gradients, weights, codebooks, optimizer state and carried states."""
    for name, p in one.strategy.parameters.items():
        got = many.strategy.parameters[name]
        if p.grad.norm() > 1e-12:  # skip gradients that are zero up to rounding
            assert_close(f"gradient of {name}", full(got.grad), p.grad, tolerance)
    tensors = {name: full(x) for name, x in many.tensors().items()}
    wanted = one.tensors()
    assert tensors.keys() == wanted.keys()
    for name, x in wanted.items():
        got = tensors[name]
        if name.startswith("state"):
            x, got = x[:-1], got[:-1]  # the last row may have ended
        if name.endswith("cache/mean"):  # undefined where the count is 0
            in_use = wanted[name.replace("mean", "count")][:-1].unsqueeze(-1) > 0
            x, got = x * in_use, got * in_use
        if not name.startswith("rng"):
            assert_close(name, got, x, tolerance)


def assert_same_as_one_process(config, mesh, dtype=torch.float64, **kind):
    """Compare three steps on this mesh with three steps of a single process."""
    tolerance = EXACT
    if dtype == torch.float32:  # a large eps keeps Adam from amplifying rounding errors
        config, tolerance = replace(config, optim=replace(config.optim, eps=1e-3)), 1e-5
    one, many = make_trainer(config, None, dtype), make_trainer(config, mesh, dtype)
    for step, batch in enumerate(spans(config, 3, **kind)):
        want, got = take_step(one, batch, step), take_step(many, batch, step)
        for name in ("nats_per_token", "commit_loss", "grad_norm", "tokens"):
            a, b = getattr(got, name), getattr(want, name)
            assert abs(a - b) <= tolerance * abs(b), (step, name, a, b)
    assert_same(one, many, tolerance)


RAGGED = {"documents": True, "padding": True}
WIDE = {"d_model": 128, "vocab_size": 130}  # wide enough for factored moments
ADAFACTOR = {"optimizer": "adafactor", "grad_clip": None}
REVIVING = {"codebook_init": "keys", "revive_below": 0.1}
DP, CP, FSDP, TP = (ParallelConfig(**{axis: 2}) for axis in ("dp", "cp", "fsdp", "tp"))


@for_worlds(2, slow=False)
def check_every_axis_equals_one_process(folder):
    same = assert_same_as_one_process
    same(run_config(REVIVING, accumulate=2), DP, **RAGGED)
    same(run_config(REVIVING, checkpoint_activations=True), CP, **RAGGED)
    same(run_config(accumulate=2, checkpoint_activations=True), FSDP, documents=True)
    for head_type in ("shga", "gqa"):
        same(run_config({"head_type": head_type} | REVIVING), TP)


@for_worlds(2)
def check_options_of_every_axis_equal_one_process(folder):
    same = assert_same_as_one_process
    same(run_config(optim={"optimizer": "adafactor"}), DP)
    same(run_config(), CP)
    same(run_config(accumulate=2), CP, **RAGGED)
    same(run_config({"head_type": "mqa"}), CP)
    same(run_config({"absolute_positions": True}), CP, padding=True)
    same(run_config({"grad_through_cache": False}), CP)
    same(run_config({"compressive_cache": False}), CP)
    same(run_config({"head_type": "mqa", "absolute_positions": True}), FSDP)
    same(run_config(WIDE | {"tie_embeddings": True}, ADAFACTOR), FSDP)
    same(run_config(WIDE | {"d_k": 64}, ADAFACTOR), TP)
    same(run_config({"attention": "full"}), TP)
    same(run_config({"tie_embeddings": True, "absolute_positions": True}), TP, **RAGGED)
    for head_type in ("mqa", "mha"):
        same(run_config({"head_type": head_type}), TP)
    same(run_config(REVIVING, accumulate=2), FSDP, documents=True)


@for_worlds(2)
def check_float32_and_muon_equal_one_process(folder):
    for mesh in (DP, CP, FSDP, TP):
        assert_same_as_one_process(run_config(), mesh, torch.float32)
    for mesh in (DP, FSDP, TP):
        assert_same_as_one_process(run_config(optim={"optimizer": "muon"}), mesh)


@for_worlds(4)
def check_four_ranks_equal_one_process(folder):
    same = assert_same_as_one_process
    same(run_config(model={"head_type": "mha"}), ParallelConfig(dp=4))
    same(run_config(), ParallelConfig(cp=4), documents=True)
    same(run_config({"head_type": "mha"}), ParallelConfig(cp=4))
    for mesh in (ParallelConfig(dp=4), ParallelConfig(dp=2, cp=2), ParallelConfig(cp=4)):
        same(run_config(REVIVING), mesh)


@for_worlds(4)
def check_two_axes_equal_one_process(folder):
    same = assert_same_as_one_process
    same(run_config(), ParallelConfig(dp=2, cp=2), **RAGGED)
    same(run_config(), ParallelConfig(dp=2, fsdp=2))
    same(run_config(), ParallelConfig(fsdp=2, cp=2), documents=True)
    same(run_config(), ParallelConfig(dp=2, tp=2), documents=True)
    same(run_config({"head_type": "mha"}), ParallelConfig(dp=2, tp=2))
    same(run_config(), ParallelConfig(cp=2, tp=2), **RAGGED)


@for_worlds(4)
def check_fsdp_and_tp_equal_one_process(folder):
    same, mesh = assert_same_as_one_process, ParallelConfig(fsdp=2, tp=2)
    for head_type in ("shga", "mqa", "mha", "gqa"):
        same(run_config({"head_type": head_type} | REVIVING), mesh, **RAGGED)
    same(run_config({"attention": "full"}), mesh)
    same(run_config(WIDE | {"d_k": 64}, ADAFACTOR), mesh)
    same(run_config(optim={"optimizer": "muon"}), mesh)
    tied = {"tie_embeddings": True, "absolute_positions": True, "final_norm": True}
    same(run_config(tied, accumulate=2, checkpoint_activations=True), mesh, documents=True)


@for_worlds(8)
def check_three_axes_equal_one_process(folder):
    same = assert_same_as_one_process
    same(run_config(REVIVING, accumulate=2), ParallelConfig(fsdp=2, cp=2, tp=2), **RAGGED)
    same(run_config({"head_type": "gqa"}), ParallelConfig(dp=2, fsdp=2, tp=2))
    for head_type in ("mqa", "mha"):
        same(run_config({"head_type": head_type}), ParallelConfig(dp=2, cp=2, tp=2), **RAGGED)


@for_worlds(2)
def check_the_average_of_the_weights_equals_that_of_one_process(folder):
    config = run_config({"absolute_positions": True}, accumulate=2, weight_average=0.7)
    for mesh in (DP, FSDP, TP):
        assert_same_as_one_process(config, mesh)


@for_worlds(2)
def check_averaged_weights_do_not_stay_in_the_model(folder):
    """FSDP keeps gathered parameters after a pass without gradients."""
    config = run_config(weight_average=0.7)
    for mesh in (DP, FSDP, TP):
        one, many = make_trainer(config), make_trainer(config, mesh)
        for step, batch in enumerate(spans(config, 3)):
            take_step(one, batch, step)
            take_step(many, batch, step)
            with many.averaged_model() as model, torch.no_grad():
                model(batch.tokens)
        assert_same(one, many)


@for_worlds(2, 4)
def check_sizes_predict_the_memory_and_the_traffic_of_a_rank(folder):
    cases = [
        ("shga", "adamw", 1),
        ("shga", "adafactor", 2),
        ("gqa", "muon", 1),
        ("gqa", "adamw", 2),
    ]
    split = [ParallelConfig(**axes) for axes in ({"fsdp": 2}, {"cp": 2}, {"dp": 2, "fsdp": 2})]
    split = [replace(mesh, tp=4 // mesh.n_processes) for mesh in split]
    for mesh in [DP, FSDP, CP, TP] if dist.get_world_size() == 2 else split:
        for head_type, optimizer, accumulate in cases:
            model = {"head_type": head_type, "vocab_size": 20, "n_layer": 2}
            model |= REVIVING if accumulate > 1 else {}
            train = {"batch_size": 8, "accumulate": accumulate, "weight_average": 0.5}
            train |= {"checkpoint_activations": accumulate > 1}
            config = run_config(model, {"optimizer": optimizer}, **train)
            config = replace(config, parallel=mesh)
            many = make_trainer(config, mesh, torch.float32)
            with StepTraffic(many) as traffic:
                take_step(many, spans(config, 1)[0], 0)
            found, sent = sizes(config), traffic.purposes
            assert sent.pop("numbers") < 400  # losses and the gradient norm
            assert +sent == +Counter(found.sent_bytes), (mesh, config.train, +sent, found)
            parameters = [local(p) for p in many.strategy.parameters.values()]
            codebooks = n_bytes(x for x in many.model.buffers() if x.is_floating_point())
            moments = [x for state in many.optimizer.state.values() for x in state.values()]
            moments = n_bytes(local(x) for x in moments if isinstance(x, torch.Tensor) and x.ndim)
            assert found.weight_bytes == n_bytes(parameters) + codebooks
            assert found.average_bytes == n_bytes(map(local, many.average.values()))
            assert found.carried_bytes == sum(state.n_bytes for state in many.carried)
            assert moments <= found.optimizer_bytes < 2.01 * n_bytes(parameters)
            assert optimizer == "muon" or moments == found.optimizer_bytes
            gradients = n_bytes(local(p.grad) for p in many.strategy.parameters.values())
            assert accumulate > 1 or found.gradient_bytes == gradients + codebooks


def n_bytes(tensors):
    return sum(x.nbytes for x in tensors)


def local(x):
    return x.to_local() if isinstance(x, DTensor) else x


@for_worlds(4)
def check_bytes_sent_do_not_depend_on_the_sequence_length(folder):
    sent = []
    for seq_len in (64, 512):
        config = run_config(seq_len=seq_len, backprop_len=seq_len, batch_size=1)
        many = make_trainer(config, ParallelConfig(cp=4), torch.float32)
        with Traffic() as traffic:
            take_step(many, spans(config, 1)[0], 0)
        sent.append((traffic.calls, traffic.bytes))
    assert sent[0] == sent[1]
    # Per layer, the window has 4 tokens with keys of 8, values of 32 and a code each; the gradients
    # of keys and values go back.
    assert sent[0][1]["all_to_all"] == 2 * (2 * 4 * (8 + 32) * 4 + 4 * 8)


@for_worlds(4)
def check_ranks_share_dropout_masks_of_shared_sequences(folder):
    """LayerDrop differs by sequence and residual dropout by token; sinusoid masks are the same."""
    config = run_config({"p_dropsin": 0.5, "p_droplyr": 0.5, "p_dropres": 0.5})
    many = make_trainer(config, ParallelConfig(dp=2, cp=2))
    for step, batch in enumerate(spans(config, 2)):
        take_step(many, batch, step)
        state = many.carried[0]
        rows = [torch.empty_like(state.branch_keep) for _ in range(4)]
        dist.all_gather(rows, state.branch_keep.to(rows[0].dtype))
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[2], rows[3])
        assert not torch.equal(rows[0], rows[2])
        masks = torch.stack([layer.sinusoid_mask for layer in state.layers]).to(torch.uint8)
        gathered = [torch.empty_like(masks) for _ in range(4)]
        dist.all_gather(gathered, masks)
        assert all(torch.equal(masks, other) for other in gathered)
        assert not torch.equal(masks[0], masks[1])
    drawn = torch.rand(4)  # continues the RNG stream of residual dropout
    streams = [torch.empty(4) for _ in range(4)]
    dist.all_gather(streams, drawn)
    assert len({tuple(x.tolist()) for x in streams}) == 4


@for_worlds(2, slow=False)
def check_padding_never_becomes_a_code(folder):
    """One rank has only padding, so all codes come from the keys of the other."""
    config = run_config(REVIVING, batch_size=2)
    (batch,) = spans(config, 1)
    empty = torch.tensor([[False], [True]]).expand_as(batch.tokens)
    one, many = make_trainer(config), make_trainer(config, ParallelConfig(dp=2))
    for trainer in (one, many):
        take_step(trainer, replace(batch, valid=empty), 0)
    assert_same(one, many)


@for_worlds(2)
def check_bf16_losses_stay_close_to_float32(folder):
    plain = make_trainer(run_config(), None, torch.float32)
    batches = spans(run_config(), 3)
    want = [take_step(plain, batch, i).nats_per_token for i, batch in enumerate(batches)]
    for mesh in (FSDP, TP, CP):
        many = make_trainer(run_config(precision="bf16"), mesh, torch.float32)
        got = [take_step(many, batch, i).nats_per_token for i, batch in enumerate(batches)]
        assert all(abs(a - b) < 0.03 * b for a, b in zip(got, want, strict=True)), (got, want)


def save(trainer, folder, in_background=False):
    """Write a checkpoint of step 1; return a function that waits for it."""
    group = trainer.world.checkpoint_group
    return save_checkpoint(
        folder, 1, trainer.tensors(), {}, 1, group=group, in_background=in_background
    )


def saved(folder):
    folder = checkpoint_folder(folder, 1)
    return folder, read_index(folder)


def next_losses(trainer, batches):
    """Take all steps but the first; return their losses."""
    return [take_step(trainer, x, i).nats_per_token for i, x in enumerate(batches) if i > 0]


@for_worlds(4)
def check_checkpoints_are_read_on_any_mesh(folder):
    """Every rank writes and reads its shards in mid-sequence, and one process reads all."""
    meshes = [ParallelConfig(fsdp=2, tp=2), ParallelConfig(fsdp=4), ParallelConfig(dp=2, tp=2)]
    meshes += [ParallelConfig(dp=2, cp=2), ParallelConfig(cp=2, tp=2), None]
    tied = {"tie_embeddings": True, "absolute_positions": True}
    for model in ({"head_type": "shga"} | tied, {"head_type": "gqa"}):
        config = run_config(model, weight_average=0.7, accumulate=1)
        batches = spans(config, 4, documents=True)
        one = make_trainer(config)
        take_step(one, batches[0], 0)
        name = f"{model['head_type']}-one"
        if dist.get_rank() == 0:
            save(one, folder / name)
        dist.barrier()
        want = next_losses(one, batches)
        for mesh in meshes:
            many = make_trainer(config, mesh)
            many.load(*saved(folder / name))
            if mesh is not None:
                name = f"{model['head_type']}-{mesh.dp}{mesh.fsdp}{mesh.cp}{mesh.tp}"
                save(many, folder / name, in_background=mesh.fsdp > 1)()
                dist.barrier()
            got = next_losses(many, batches)
            assert all(abs(a - b) < 1e-12 * b for a, b in zip(got, want, strict=True)), (mesh, got)
    assert not list(folder.rglob("*.partial"))


@for_worlds(4)
def check_no_rank_holds_more_than_its_shards(folder):
    """While saving and loading, a rank needs memory for its shards and one full tensor."""
    config = run_config(WIDE | {"n_layer": 2})
    many = make_trainer(config, ParallelConfig(fsdp=4))
    take_step(many, spans(config, 1)[0], 0)
    shards = sum(local(x).nbytes for x in many.tensors().values())
    largest = max(x.nbytes for x in make_trainer(config).tensors().values())
    with LiveBytes() as saving:
        save(many, folder / "bounded")
    assert saving.peak <= largest, (saving.peak, largest)
    many = make_trainer(config, ParallelConfig(fsdp=4))
    with LiveBytes() as loading:
        many.load(*saved(folder / "bounded"))
    assert 0 < loading.peak <= shards + largest, (loading.peak, shards, largest)
    with LiveBytes() as best:
        save_best(folder, many.strategy.model_tensors(), {}, many.world.checkpoint_group)
    assert best.peak <= 2 * largest, (best.peak, largest)


@for_worlds(2)
def check_tensors_are_changed_after_a_background_save_starts(folder):
    config = run_config()
    many, batches = make_trainer(config, FSDP), spans(config, 3)
    take_step(many, batches[0], 0)
    want = {name: full(x).clone() for name, x in many.tensors().items()}
    finish = save(many, folder / "background", in_background=True)
    take_step(many, batches[1], 1)
    finish()
    got = read_whole(*saved(folder / "background"))
    assert all(got[name].equal(x) for name, x in want.items() if not name.startswith("rng"))


def tiny(folder, mesh=None, **changes):
    """Return the config of a run of ten steps on text, by default without dropout.

    Validation uses averaged weights, which must not stay in the model.
    """
    deterministic = {"p_dropsin": 0.0, "p_dropres": 0.0, "p_droplyr": 0.0, "revive_below": 0.0}
    changes = {"model": deterministic, "optim": {"eps": 1e-3, "lr": 0.02}, **changes}
    changes["train"] = {"weight_average": 0.7} | changes.get("train", {})
    return replace(tiny_run(folder, **changes), parallel=mesh or ParallelConfig())


def stop_after(n_steps, run):
    """Call `run` and send SIGTERM to the last rank during step n_steps."""
    train_step = Trainer.step

    def and_signal(self, batch, step, **options):
        if step == n_steps - 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, batch, step, **options)

    Trainer.step = and_signal
    try:
        result = run()
    finally:
        Trainer.step = train_step
    assert (result.step, result.finished) == (n_steps, False)


def write_data(folder):
    """Write the data of the runs on rank 0."""
    if dist.get_rank() == 0:
        tiny(folder)
    dist.barrier()


@for_worlds(2)
def check_a_signal_to_one_rank_stops_all_and_resuming_is_exact(folder):
    write_data(folder)
    for mesh in (DP, CP):
        config = tiny_run(folder, model={"p_droplyr": 0.3})  # all kinds of dropout, code revival
        config = replace(config, parallel=mesh)
        uninterrupted = folder / f"uninterrupted-{mesh.cp}"
        interrupted = folder / f"interrupted-{mesh.cp}"
        assert train(config, uninterrupted).finished
        stop_after(2, partial(train, config, interrupted))
        stop_after(7, partial(resume, interrupted))
        assert resume(interrupted).finished
        assert losses(interrupted) == losses(uninterrupted)
        assert len(losses(uninterrupted)) == 13


@for_worlds(2)
def check_a_slow_rank_does_not_reject_the_files_of_rank_zero(folder):
    write_data(folder)
    decide = World.from_rank_zero

    def decide_slowly(self, n):
        decision = decide(self, n)
        time.sleep(0.5 * dist.get_rank())
        return decision

    World.from_rank_zero = decide_slowly
    try:
        assert train(tiny(folder, DP, train={"steps": 1}), folder / "slow").finished
    finally:
        World.from_rank_zero = decide


@for_worlds(2)
def check_an_extended_run_equals_the_longer_run(folder):
    write_data(folder)
    wsd = {"model": {"n_layer": 1}, "optim": {"schedule": "wsd", "decay_share": 0.5}}
    short = tiny(folder, ParallelConfig(dp=2), **wsd, train={"steps": 8, "save_every": 7})
    long = replace(short, train=replace(short.train, steps=12))
    train(short, folder / "extended")
    resume(folder / "extended", long)
    train(long, folder / "long")
    assert losses(folder / "extended") == losses(folder / "long")


@for_worlds(2)
def check_a_run_resumes_on_other_meshes(folder):
    """Leave a run for test_worlds.py, where a single process resumes it."""
    write_data(folder)
    run = folder / "meshes"
    stop_after(2, lambda: train(tiny(folder, ParallelConfig(dp=2)), run))
    micro_batches = {"train": {"accumulate": 2}}
    stop_after(4, lambda: resume(run, tiny(folder, ParallelConfig(tp=2))))
    stop_after(5, lambda: resume(run, tiny(folder, ParallelConfig(dp=2), **micro_batches)))
    stop_after(7, lambda: resume(run, tiny(folder, ParallelConfig(cp=2))))
    stop_after(9, lambda: resume(run, tiny(folder, ParallelConfig(fsdp=2))))


class CountingReporter:
    """Counts what is done on this rank."""

    done = 0

    @contextmanager
    def progress(self, what, total, unit, done=0):
        yield self.advance

    def advance(self, n):
        self.done += n

    def info(self, message):
        pass

    warn = info


@for_worlds(2)
def check_ranks_share_an_evaluation(folder):
    """Every rank scores some contexts, also if their number is odd; the totals are those of one."""
    texts = folder / "evaluated" / "text"
    if dist.get_rank() == 0:
        texts.mkdir(parents=True)
        for n in range(15):
            (texts / f"{n}.txt").write_text(f"{n}: " + "the cat sat on the mat " * (n % 7 + 1))
    dist.barrier()
    run = folder / "evaluated" / "run"
    config = tiny(texts.parent, DP, train={"steps": 2, "batch_size": 2})
    train(config, run)
    model, split = load_model(run)[0], prepare(config.data).split("train")
    for protocol in ("windowed", "streaming"):
        counter = CountingReporter()
        options = {"split": "train", "protocols": [protocol], "batch_size": 2}
        got = evaluate(run, **options, reporter=counter).protocols[protocol]
        want = score(model, split, protocol, seq_len=config.train.seq_len, span=16)
        counts = (got.tokens, got.bytes, got.words)
        assert counts == (want.tokens, want.bytes, want.words)
        assert abs(got.nats - want.nats) < 1e-6 * want.nats
        for a, b in zip(got.by_position, want.by_position, strict=True):
            assert (a.first, a.last, a.tokens) == (b.first, b.last, b.tokens)
            assert abs(a.nats_per_token - b.nats_per_token) < 1e-5 * b.nats_per_token
        shares = torch.tensor([counter.done, counter.done])
        dist.all_reduce(shares[0])
        assert shares[0] == got.tokens
        assert 0.3 * got.tokens < shares[1] < 0.7 * got.tokens
