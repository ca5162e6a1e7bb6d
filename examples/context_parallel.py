"""Shard one sequence over several processes (context parallelism).

Every process trains on its shard of each sequence. A shard depends on earlier tokens only through a
state of constant size, so the messages between processes do not grow with the length. Rank 0 then
repeats the run as a single process. The losses are the same up to rounding.

Run:     torchrun --nproc-per-node 2 examples/context_parallel.py
         python examples/context_parallel.py
Prints:  the training loss of every step and, with several processes, the largest relative
         difference from a single process
"""

import argparse
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from transformer_vq import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
    train,
)
from transformer_vq.parallel.world import leave

BLOCK_LEN, STEPS, TOKENS_PER_STEP = 32, 5, 512


def losses(run: Path) -> list[float]:
    """Return the training loss of every step in nats per byte, from the metrics of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["nats_per_token"] for row in rows if row["kind"] == "train"]


torch.set_num_threads(1)
n_processes = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
rank = int(os.environ.get("RANK", 0))
folder = [tempfile.mkdtemp() if rank == 0 else ""]
if n_processes > 1:
    dist.init_process_group("gloo")
    dist.broadcast_object_list(folder)
out = Path(folder[0])

config = RunConfig(
    model=ModelConfig(256, 64, 1, d_k=32, n_code=64, block_len=BLOCK_LEN),
    data=DataConfig(path=argparse.__file__, cache=str(out / "cache")),  # any text file
    optim=OptimConfig(lr=3e-3, warmup=2, grad_clip=1.0),
    train=TrainConfig(
        steps=STEPS,
        batch_size=1,
        seq_len=2 * TOKENS_PER_STEP,
        backprop_len=TOKENS_PER_STEP,
        eval_tokens=1000,
        device="cpu",
    ),
    parallel=ParallelConfig(cp=n_processes),
)
train(config, out / "sharded")
if n_processes > 1:
    dist.barrier()
    dist.destroy_process_group()
if rank > 0:
    leave()

sharded = losses(out / "sharded")
print(f"processes: {n_processes}, tokens per process: {TOKENS_PER_STEP // n_processes}")
print("losses:", *(f"{loss:.4f}" for loss in sharded))
if n_processes > 1:
    del os.environ["WORLD_SIZE"]  # continue as a single process
    train(replace(config, parallel=ParallelConfig()), out / "single")
    pairs = zip(sharded, losses(out / "single"), strict=True)
    difference = max(abs(a - b) / b for a, b in pairs)
    print(f"largest relative difference from a single process: {difference:.1e}")
shutil.rmtree(out)
