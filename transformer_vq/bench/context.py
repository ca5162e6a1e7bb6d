"""Context parallel, measured: what crosses between processes, and lengths that one cannot hold.

    python -m transformer_vq.bench.context --out benchmarks/context.json

Four gloo processes on this machine, each with a limit on its memory. The same limit is then given
to one process alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from transformer_vq.bench import run_main
from transformer_vq.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.files import write_json
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.context_parallel import Exchange
from transformer_vq.parallel.world import World
from transformer_vq.training.step import Trainer

LENGTHS = (8_192, 65_536)
N_PROCESSES = 4
MEGABYTES = 2_000  # that a process may take beside what it has when it begins
MODEL = ModelConfig(vocab_size=256, d_model=128, n_layer=1, d_k=64, n_code=256, block_len=256)


def one_update(seq_len: int, world: World) -> tuple[float, int]:
    """Loss of an update on one sequence, and bytes sent by this process for one attention layer."""
    torch.manual_seed(0)
    train = TrainConfig(batch_size=1, seq_len=seq_len, backprop_len=seq_len)
    trainer = Trainer(TransformerVQ(MODEL), RunConfig(MODEL, train=train), world.device, world)
    tokens = torch.randint(MODEL.vocab_size, (2, 1, seq_len))
    batch = Batch(tokens[0], tokens[1], positions=torch.zeros_like(tokens[0]))
    loss = trainer.update(batch, 0, begins=True).nats_per_token
    layer = next(b for b in trainer.model.branches if isinstance(b, VQAttention))
    return loss, layer.exchange.sent if isinstance(layer.exchange, Exchange) else 0


def _limit_memory() -> None:
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    limit = (held << 10) + MEGABYTES * 10**6
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _work(rank: int, n_processes: int, folder: str) -> None:
    torch.set_num_threads(1)
    world = World()
    if n_processes > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_processes)
        world = World(ParallelConfig(cp=n_processes))
    _limit_memory()
    rows = []
    for seq_len in LENGTHS:
        row: dict[str, Any] = {"processes": n_processes, "seq_len": seq_len}
        try:
            row["loss"], row["bytes_per_layer"] = one_update(seq_len, world)
        except RuntimeError as error:
            if "alloc" not in str(error):
                raise
            row["loss"] = row["bytes_per_layer"] = None
        rows.append(row)
    Path(folder, f"{n_processes}-{rank}.json").write_text(json.dumps(rows))
    if n_processes > 1:
        dist.destroy_process_group()


def measure() -> dict[str, Any]:
    """Per number of processes and length: the loss, or None without memory, and bytes sent."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in (1, N_PROCESSES):
            spawn(_work, args=(n, folder), nprocs=n)
            found = [json.loads(Path(folder, f"{n}-{rank}.json").read_text()) for rank in range(n)]
            for same in zip(*found, strict=True):
                sent = [row["bytes_per_layer"] for row in same]
                rows.append(same[0] | {"bytes_per_layer": None if None in sent else max(sent)})
    return {"megabytes": MEGABYTES, "model": vars(MODEL), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The measurement for the README."""
    lines = [
        "| processes | tokens in a sequence | loss of an update | bytes sent per layer |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        loss = "out of memory" if row["loss"] is None else f"{row['loss']:.4f}"
        sent = f"{row['bytes_per_layer']:,}" if row["bytes_per_layer"] else ""
        lines.append(f"| {row['processes']} | {row['seq_len']:,} | {loss} | {sent} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_vq.bench.context", description=__doc__
    )
    parser.add_argument("--out", type=Path, help="write the measurements to this JSON file")
    options = parser.parse_args()
    result = measure()
    if options.out:
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    run_main(main)
