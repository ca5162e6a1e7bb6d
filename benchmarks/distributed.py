"""Distributed training: memory, checkpoints, traffic and host time of a rank, on several meshes.

Four gloo processes on this machine train a small model on every mesh. Bytes are those of the rank
with the most; traffic is that of rank 0. Nothing here depends on the speed of the machine, except
for the host times.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from common import Output, Record, check_positive, main
from context import run_processes
from traffic import LiveBytes, StepTraffic
from transformer_vq.config import (
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from transformer_vq.data.batches import Batch
from transformer_vq.errors import UserError
from transformer_vq.files import read_json, write_json
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.shards import Shard, read_index
from transformer_vq.parallel.world import World
from transformer_vq.sizes import sizes
from transformer_vq.training.checkpoint import checkpoint_folder, save_checkpoint
from transformer_vq.training.step import Trainer

TIME_LIMIT = 900.0  # seconds
N_PROCESSES = 4
MESHES = {
    "one process": ParallelConfig(dp=1),
    "fsdp 4": ParallelConfig(dp=1, fsdp=4),
    "fsdp 2 x tp 2": ParallelConfig(dp=1, fsdp=2, tp=2),
    "cp 4": ParallelConfig(dp=1, cp=4),
}
MODEL = ModelConfig(vocab_size=256, d_model=128, n_layer=2, d_k=64, n_code=64, block_len=64)
TRAIN = TrainConfig(batch_size=8, seq_len=512, backprop_len=256)
LENGTHS = (1_024, 4_096)
"""Spans on which the bytes of context parallelism are measured."""
NARROW = ModelConfig(vocab_size=256, d_model=128, n_layer=24, d_k=128, n_code=16, block_len=16)
"""As many tensors as the 1.3B preset has, but smaller ones: the host has the same work."""
N_TIMED = 3
"""Timed optimizer steps of each kind."""


def one_step(config: RunConfig, world: World) -> tuple[Trainer, StepTraffic]:
    """Train one step on random tokens; return the trainer, and what rank 0 has sent."""
    torch.manual_seed(0)
    trainer = Trainer(TransformerVQ(config.model), config, world.device, world)
    shape = (2, config.train.batch_size, config.train.backprop_len)
    tokens, targets = torch.randint(config.model.vocab_size, shape)
    with StepTraffic(trainer) as traffic:
        trainer.step(Batch(tokens, targets), 0, begins=True)
    return trainer, traffic


def of_mesh(mesh: ParallelConfig, folder: Path) -> Record:
    """Measure a rank of a mesh; with a single process, all ranks do the same."""
    config = RunConfig(MODEL, train=TRAIN, parallel=mesh)
    world = World(mesh) if mesh.n_processes > 1 else World()
    trainer, traffic = one_step(config, world)
    accumulating = replace(config, train=replace(TRAIN, accumulate=2))
    _, accumulated = one_step(accumulating, world)
    found = sizes(config)
    parameters = list(trainer.strategy.parameters.values())
    states = trainer.optimizer.state.values()
    moments = [x for state in states for x in state.values() if x.ndim]
    codebooks = n_bytes(x for x in trainer.model.buffers() if x.is_floating_point())
    record = {
        "ranks": mesh.n_processes,
        "parameters": n_bytes(parameters),
        "parameters_calculated": found.weight_bytes - codebooks,
        "parameters_total": 4 * found.parameters,
        "optimizer": n_bytes(moments),
        "optimizer_calculated": found.optimizer_bytes,
        "reduce_scatters": [gradient_reductions(x) for x in (traffic, accumulated)],
        "sent": {name: n for name, n in traffic.purposes.items() if n},
        "sent_calculated": {name: n for name, n in found.sent_bytes.items() if n},
        **checkpoint_bytes(trainer, folder),
    }
    if mesh.cp > 1:
        n_layers = MODEL.n_layer * MODEL.n_attention
        runs = [replace(config, train=of_length(n)) for n in LENGTHS]
        sent = [one_step(run, world)[1].purposes["context parallel"] for run in runs]
        record["context_parallel_per_layer"] = [n // n_layers for n in sent]
    return record


def of_length(n: int) -> TrainConfig:
    return replace(TRAIN, batch_size=1, seq_len=n, backprop_len=n)


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of this rank's shards."""
    return sum(Shard(x).local.nbytes for x in tensors)


def gradient_reductions(traffic: StepTraffic) -> int:
    """Return the number of reduce-scatters of gradients; context parallelism has others."""
    kind = "reduce_scatter"
    return traffic.calls[kind] - traffic.functional_calls[kind]


def checkpoint_bytes(trainer: Trainer, folder: Path) -> Record:
    """Return the largest number of bytes in new tensors while saving and while loading."""
    tensors = trainer.tensors()
    record = {
        "shards": n_bytes(tensors.values()),
        "largest_tensor": max(x.numel() * x.element_size() for x in tensors.values()),
    }
    if trainer.world.is_single_process:
        folder = folder / str(dist.get_rank())
    group = trainer.world.checkpoint_group
    with LiveBytes() as saving:
        save_checkpoint(folder, 1, tensors, {}, 1, group=group)
    dist.barrier()
    saved = checkpoint_folder(folder, 1)
    new = Trainer(TransformerVQ(MODEL), trainer.config, trainer.device, trainer.world)
    with LiveBytes() as loading:
        new.load(saved, read_index(saved))
    return record | {"saving": saving.peak, "loading": loading.peak}


def optimizer_milliseconds(optimizer: str, n_layer: int) -> Record:
    """Return the host time of an optimizer step with plain tensors and with DTensors."""
    model = replace(NARROW, n_layer=n_layer)
    found: Record = {"optimizer": optimizer}
    decay = {"optimizer": optimizer, "lr": 1e-3, "weight_decay": 0.0}
    config = RunConfig(model, optim=OptimConfig(**decay))  # type: ignore[arg-type]
    for kind, world in (("plain", World()), ("sharded", World(MESHES["fsdp 4"]))):
        config = replace(config, train=replace(TRAIN, batch_size=world.mesh.n_rows))
        torch.manual_seed(0)
        trainer = Trainer(TransformerVQ(model), config, world.device, world)
        for p in trainer.strategy.parameters.values():
            p.grad = torch.full_like(p, 1e-3)
        times = []
        for _ in range(N_TIMED + 1):
            dist.barrier()
            start = time.perf_counter()
            trainer.optimizer.step()
            times.append(1e3 * (time.perf_counter() - start))
        found[kind] = median(times[1:])
        found["tensors"] = len(trainer.strategy.parameters)
    return found


def largest_of_ranks(record: Record) -> Record:
    """Return the record of rank 0 with the largest value of any rank for every number."""
    gathered: list[Record] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, record)
    first = gathered[0]
    kept = {k: v for k, v in first.items() if not isinstance(v, (int, float))}
    return first | {k: max(x[k] for x in gathered) for k in first if k not in kept}


def _work(n_layer: int, rank: int, n_processes: int, folder: str) -> None:
    """Measure everything in one of n processes; rank 0 writes the record."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_processes)
    rows = []
    for number, (name, mesh) in enumerate(MESHES.items()):
        measured = of_mesh(mesh, Path(folder, str(number)))
        rows.append({"mesh": name} | largest_of_ranks(measured))
    optimizers = [optimizer_milliseconds(optimizer, n_layer) for optimizer in ("adafactor", "muon")]
    if rank == 0:
        write_json(Path(folder, "record.json"), {"rows": rows, "optimizers": optimizers})
    dist.barrier()
    dist.destroy_process_group()


def measure(n_layer: int = NARROW.n_layer, time_limit: float = TIME_LIMIT) -> Record:
    """Measure all meshes.

    n_layer: of the model whose optimizer steps are timed. time_limit: seconds in total.
    """
    check_positive(n_layer=n_layer, time_limit=time_limit)
    with tempfile.TemporaryDirectory() as folder:
        failed = run_processes(partial(_work, n_layer), N_PROCESSES, folder, time_limit)
        if failed is not None:
            raise UserError(f"the processes were stopped: {failed}")
        record = read_json(Path(folder, "record.json"))
    about = {"batch_size": TRAIN.batch_size, "backprop_len": TRAIN.backprop_len}
    return {"model": vars(MODEL), "train": about, "lengths": list(LENGTHS), **record}


def table(record: Record) -> str:
    """Return Markdown tables."""
    rows = record["rows"]
    lines = [
        "Bytes of parameters and optimizer on the largest rank:",
        "",
        "| mesh | parameters | total / ranks | replicated rest | calculated "
        "| optimizer | calculated |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        share = row["parameters_total"] // row["ranks"]
        numbers = row["parameters"], share, row["parameters"] - share, row["parameters_calculated"]
        lines.append(_line(row["mesh"], *numbers, row["optimizer"], row["optimizer_calculated"]))
    lines += [
        "",
        "Largest number of bytes in new tensors during a checkpoint; reduce-scatters of gradients:",
        "",
        "| mesh | shards | largest tensor | new while saving | new while loading "
        "| reduce-scatters, accumulate 1 | accumulate 2 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        numbers = row["shards"], row["largest_tensor"], row["saving"], row["loading"]
        lines.append(_line(row["mesh"], *numbers, *row["reduce_scatters"]))
    lines += [
        "",
        "Bytes that rank 0 sends per step:",
        "",
        "| mesh | purpose | measured | calculated |",
        "| --- | --- | ---: | ---: |",
    ]
    for row in rows:
        for purpose, n in row["sent"].items():
            lines.append(_line(row["mesh"], purpose, n, row["sent_calculated"].get(purpose, "")))
    lines += ["", "| mesh | tokens per sequence | bytes of context parallelism per layer |"]
    lines.append("| --- | ---: | ---: |")
    for row in rows:
        for n_tokens, n in zip(
            record["lengths"], row.get("context_parallel_per_layer", ()), strict=False
        ):
            lines.append(_line(row["mesh"], n_tokens, n))
    lines += [
        "",
        "Host time of an optimizer step, median:",
        "",
        "| optimizer | tensors | ms, plain tensors | ms, DTensors (fsdp 4) | ratio |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in record["optimizers"]:
        ratio = f"{row['sharded'] / row['plain']:.2f}"
        times = (f"{row[kind]:.0f}" for kind in ("plain", "sharded"))
        lines.append(_line(row["optimizer"], row["tensors"], *times, ratio))
    return "\n".join(lines)


def _line(*cells: object) -> str:
    found = (f"{x:,}" if isinstance(x, int) else str(x) for x in cells)
    return f"| {' | '.join(found)} |"


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure distributed training: memory, checkpoints, traffic and host time on several meshes.

    Four processes run on this machine.
    """

    n_layer: int = NARROW.n_layer
    """Layers of the model whose optimizer steps are timed."""
    time_limit: float = TIME_LIMIT
    """Seconds for all measurements together."""


if __name__ == "__main__":
    main(Options, lambda options: measure(options.n_layer, options.time_limit), table)
