"""How a run fits into memory: the number of micro-batches, and an early check."""

from __future__ import annotations

import os
from dataclasses import replace

from transformer_vq.config import RunConfig
from transformer_vq.device import total_memory
from transformer_vq.errors import UserError
from transformer_vq.parallel.world import World
from transformer_vq.progress import warn
from transformer_vq.training.sizes import memory_hint, sizes

USABLE_MEMORY = 0.7  # fraction of a device's memory that `choose_accumulation` plans with


def choose_accumulation(config: RunConfig, memory: int, world: World | None = None) -> RunConfig:
    """Return the config with the fewest micro-batches that fit into `memory` bytes.

    A config with a fixed `train.accumulate` (not 0) is returned unchanged. world: the processes
    that share a batch; a single process by default.
    """
    if config.train.accumulate:
        return config
    world = World() if world is None else world
    n_rows = config.train.batch_size // world.mesh.n_rows
    for accumulate in (n for n in range(1, n_rows + 1) if n_rows % n == 0):
        chosen = replace(config, train=replace(config.train, accumulate=accumulate))
        needed = sizes(replace(chosen, parallel=world.mesh)).train_bytes
        if world.smallest(needed <= USABLE_MEMORY * memory):
            break
    else:
        warn(f"one sequence at a time may not fit in memory; {memory_hint(chosen)}")
    return chosen


def check_memory(config: RunConfig, world: World) -> None:
    """Raise UserError if not even the weights, gradients and optimizer fit into memory."""
    needed = sizes(replace(config, parallel=world.mesh))
    total = total_memory(world.device)
    if needed.fixed_bytes > total:
        raise UserError(
            "out of memory: weights, gradients and optimizer take "
            f"{needed.fixed_bytes / 1e9:,.1f} GB, this device has {total / 1e9:,.1f} GB; "
            f"{memory_hint(config)}"
        )


def memory_per_process(world: World) -> int:
    """Return the bytes of memory for this process; CPU processes of a machine share its memory."""
    n = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if world.device.type == "cpu" else 1
    return total_memory(world.device) // n
