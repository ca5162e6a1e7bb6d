"""Context parallelism: bytes sent between processes, and lengths that one process cannot train.

A training step runs in one process and in four gloo processes on this machine. Every process has
the same memory limit.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, spawn

from common import Output, Record, check_positive, main
from measure import OUT_OF_MEMORY, limit_memory, over_time, process_bytes
from traffic import Traffic
from transformer_vq.config import (
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from transformer_vq.data.batches import Batch
from transformer_vq.errors import is_out_of_memory
from transformer_vq.files import read_json, write_json
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.world import World
from transformer_vq.training.step import Trainer

CONTEXT_TIME_LIMIT = 600.0  # seconds


LENGTHS = (8_192, 65_536)


N_PROCESSES = 4


SECONDS_BETWEEN_CHECKS = 0.5


MEGABYTES = 2_000  # memory limit of a process, in addition to its memory at the start


MODEL = ModelConfig(vocab_size=256, d_model=128, n_layer=1, d_k=64, n_code=256, block_len=256)


def one_step(seq_len: int, world: World) -> tuple[float, int]:
    """Train one step on one sequence.

    Returns the loss, and the bytes that this process sent for one attention layer.
    """
    torch.manual_seed(0)
    train = TrainConfig(batch_size=1, seq_len=seq_len, backprop_len=seq_len)
    trainer = Trainer(TransformerVQ(MODEL), RunConfig(MODEL, train=train), world.device, world)
    tokens = torch.randint(MODEL.vocab_size, (2, 1, seq_len))
    batch = Batch(tokens[0], tokens[1])
    with Traffic() as traffic:
        loss = trainer.step(batch, 0, begins=True).nats_per_token
    sent = traffic.functional_bytes
    n_bytes = sent["all_to_all"] + sent["all_gather"] + sent["reduce_scatter"]
    return loss, n_bytes // len(trainer.model.branches)


def _work(rank: int, n_processes: int, folder: str) -> None:
    """Train one step at every length in one of n processes; write a row per length."""
    torch.set_num_threads(1)
    world = World()
    if n_processes > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n_processes)
        world = World(ParallelConfig(cp=n_processes))
    limit_memory(process_bytes("VmData") + MEGABYTES * 10**6)
    for seq_len in LENGTHS:
        row: Record
        try:
            loss, n_bytes = one_step(seq_len, world)
            row = {
                "processes": n_processes,
                "seq_len": seq_len,
                "loss": loss,
                "bytes_per_layer": n_bytes,
            }
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            row = _failed_row(n_processes, seq_len, OUT_OF_MEMORY)
        write_json(_path(folder, n_processes, rank, seq_len), row)
    if n_processes > 1:
        dist.destroy_process_group()


def _path(folder: str, n_processes: int, rank: int, seq_len: int) -> Path:
    return Path(folder, f"{n_processes}-{rank}-{seq_len}.json")


def _failed_row(n_processes: int, seq_len: int, why: str) -> Record:
    return {
        "processes": n_processes,
        "seq_len": seq_len,
        "loss": None,
        "bytes_per_layer": None,
        "failed": why,
    }


def measure(time_limit: float = CONTEXT_TIME_LIMIT) -> Record:
    """Measure a training step for every number of processes and every length.

    time_limit: seconds per number of processes, for all lengths together.
    """
    check_positive(time_limit=time_limit)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in (1, N_PROCESSES):
            failed = run_processes(_work, n, folder, time_limit)
            for seq_len in LENGTHS:
                paths = [_path(folder, n, rank, seq_len) for rank in range(n)]
                found: list[Record] = [read_json(path) for path in paths if path.exists()]
                if len(found) < n and not any("failed" in row for row in found):
                    assert failed is not None
                    found.append(_failed_row(n, seq_len, failed))
                rows.append(_merge_ranks(found))
    return {"megabytes": MEGABYTES, "model": vars(MODEL), "rows": rows}


def run_processes(
    work: Callable[[int, int, str], None], n: int, folder: str, time_limit: float
) -> str | None:
    """Run `work(rank, n, folder)` in n processes; return why they were killed, or None."""
    deadline = time.monotonic() + time_limit
    start: Callable[..., ProcessContext] = spawn
    context = start(work, args=(n, folder), nprocs=n, join=False)
    try:
        while not context.join(timeout=SECONDS_BETWEEN_CHECKS):
            if time.monotonic() > deadline:
                return over_time(time_limit)
        return None
    except ProcessExitedException as error:
        if error.exit_code != -signal.SIGKILL:
            raise
        return OUT_OF_MEMORY  # killed by the kernel
    finally:  # also on Ctrl-C
        for process in context.processes:
            process.kill()
            process.join()


def _merge_ranks(rows: list[Record]) -> Record:
    """Return one row for all ranks: the first failure, or the largest number of bytes."""
    for row in rows:
        if "failed" in row:
            return row
    return max(rows, key=lambda row: row["bytes_per_layer"] or 0)


def table(record: Record) -> str:
    """Return a Markdown table."""
    lines = [
        "| processes | sequence length | loss of a step | bytes sent per layer |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        failed = row.get("failed", OUT_OF_MEMORY)
        loss = failed if row["loss"] is None else f"{row['loss']:.4f}"
        sent = f"{row['bytes_per_layer']:,}" if row["bytes_per_layer"] else ""
        lines.append(f"| {row['processes']} | {row['seq_len']:,} | {loss} | {sent} |")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Measure context parallelism: the bytes that processes send, and the lengths they can train.

    A training step runs in one process and in four processes on this machine, each with the same
    memory limit.
    """

    time_limit: float = CONTEXT_TIME_LIMIT
    """Seconds per number of processes, for all lengths together."""


if __name__ == "__main__":
    main(Options, lambda options: measure(options.time_limit), table)
