"""Context parallel, measured: what crosses between processes, and lengths that one cannot hold.

    python -m transformer_vq.bench.context --out benchmarks/context.json

Four gloo processes on this machine, each with a limit on its memory. The same limit is then given
to one process alone.
"""

from __future__ import annotations

import argparse
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from transformer_vq.bench import run_main
from transformer_vq.bench.cells import OUT_OF_MEMORY, check_limits, over_time
from transformer_vq.config import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import Batch
from transformer_vq.errors import is_out_of_memory
from transformer_vq.files import check_can_write, read_json, write_json
from transformer_vq.nn.attention import VQAttention
from transformer_vq.nn.model import TransformerVQ
from transformer_vq.parallel.context_parallel import Exchange
from transformer_vq.parallel.world import World
from transformer_vq.training.step import Trainer

LENGTHS = (8_192, 65_536)
N_PROCESSES = 4
TIME_LIMIT = 600.0  # seconds
SECONDS_BETWEEN_CHECKS = 0.5
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
    for seq_len in LENGTHS:
        row: dict[str, Any] = {"processes": n_processes, "seq_len": seq_len}
        try:
            row["loss"], row["bytes_per_layer"] = one_update(seq_len, world)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            row |= _failed(OUT_OF_MEMORY)
        write_json(_path(folder, n_processes, rank, seq_len), row)
    if n_processes > 1:
        dist.destroy_process_group()


def _path(folder: str, n_processes: int, rank: int, seq_len: int) -> Path:
    return Path(folder, f"{n_processes}-{rank}-{seq_len}.json")


def _failed(why: str) -> dict[str, Any]:
    return {"loss": None, "bytes_per_layer": None, "failed": why}


def measure(time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """Per number of processes and length: the loss, or None and why it failed, and bytes sent.

    time_limit: seconds that one number of processes may take for all lengths.
    """
    check_limits(time_limit=time_limit)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in (1, N_PROCESSES):
            failed = run_processes(_work, n, folder, time_limit)
            for seq_len in LENGTHS:
                paths = [_path(folder, n, rank, seq_len) for rank in range(n)]
                found = [read_json(path) for path in paths if path.exists()]
                if len(found) < n and not any("failed" in row for row in found):
                    assert failed is not None
                    found.append({"processes": n, "seq_len": seq_len} | _failed(failed))
                rows.append(_merged(found))
    return {"megabytes": MEGABYTES, "model": vars(MODEL), "rows": rows}


def run_processes(
    work: Callable[[int, int, str], None], n: int, folder: str, time_limit: float
) -> str | None:
    """Run `work(rank, n, folder)` in n processes; return why they were killed, or None."""
    deadline = time.monotonic() + time_limit
    context = spawn(work, args=(n, folder), nprocs=n, join=False)
    try:
        while not context.join(timeout=SECONDS_BETWEEN_CHECKS):
            if time.monotonic() > deadline:
                return over_time(time_limit)
        return None
    except ProcessExitedException as error:
        if error.exit_code != -signal.SIGKILL:
            raise
        return OUT_OF_MEMORY  # killed by the system
    finally:  # Ctrl-C too
        for process in context.processes:
            process.kill()
            process.join()


def _merged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for all ranks: the first failure, else the largest number of bytes."""
    for row in rows:
        if "failed" in row:
            return row
    return rows[0] | {"bytes_per_layer": max(row["bytes_per_layer"] for row in rows)}


def table(result: dict[str, Any]) -> str:
    """The measurement for the README."""
    lines = [
        "| processes | tokens in a sequence | loss of an update | bytes sent per layer |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        failed = row.get("failed", OUT_OF_MEMORY)
        loss = failed if row["loss"] is None else f"{row['loss']:.4f}"
        sent = f"{row['bytes_per_layer']:,}" if row["bytes_per_layer"] else ""
        lines.append(f"| {row['processes']} | {row['seq_len']:,} | {loss} | {sent} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_vq.bench.context", description=__doc__
    )
    parser.add_argument("--out", type=Path, help="write the measurements to this JSON file")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing output file")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT,
        help="seconds per number of processes (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    check_can_write("--out", options.out, options.overwrite)
    result = measure(options.time_limit)
    if options.out:
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    run_main(main)
