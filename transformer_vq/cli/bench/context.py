"""tvq bench context: training steps with context parallelism under a memory limit."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.bench.defaults import CONTEXT_TIME_LIMIT
from transformer_vq.cli.bench.common import Out, parse_with_output, print_result
from transformer_vq.cli.options import Json, Overwrite


@dataclass(frozen=True)
class Context:
    """Measure context parallelism: the bytes that processes send, and the lengths they can train.

    A training step runs in one process and in four processes on this machine, each with the same
    memory limit.
    """

    time_limit: float = CONTEXT_TIME_LIMIT
    """Seconds per number of processes, for all lengths together."""
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False


def run(arguments: list[str]) -> None:
    """Measure training steps in one and in several processes; print a table."""
    options = parse_with_output(Context, arguments, "context")

    from transformer_vq.bench.context import measure, table

    record = measure(options.time_limit)
    print_result(record, table(record), options.out, options.json)
