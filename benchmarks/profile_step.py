"""The time of a training step by part, measured with torch.profiler.

Times are self times of operators, without the operators that they call, so they add up to the
step. Work inside the optimizer, the codebooks and the data loading counts as that part; all other
work is classified by operator. A gradient counts as the part of its forward operation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from common import Flat, Output, Record, check_positive, config_record, main, trainer_and_batches
from measure import OUT_OF_MEMORY, in_subprocess, machine, synchronize
from transformer_vq.config import ModelConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.errors import UserError
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer
from transformer_vq.plots import (
    BLUE,
    MUTED,
    new_figure,
)
from transformer_vq.progress import progress_bar
from transformer_vq.training.step import Trainer

PARTS = {
    "matrix products": "mm bmm addmm addmm_ baddbmm baddbmm_ mv dot",
    "softmax": "_softmax _softmax_backward_data",
    "cache": "index_add index_add_ index index_select lerp",
    "codebooks": "",
    "optimizer": "linalg_vector_norm",
    "data": "",
    "other": "",
}
"""The parts of a step, and the operators that always belong to a part."""


_BY_OPERATOR = {f"aten::{name}": part for part, names in PARTS.items() for name in names.split()}


_STEP = "tvq: step"


_GRADIENT = "autograd::engine::evaluate_function"


@dataclass
class Operator:
    """Total time and calls of one operator in one part."""

    name: str
    part: str
    seconds: float = 0.0
    calls: int = 0


def run(config: RunConfig, steps: int = 4, time_limit: float = 600.0) -> Record:
    """Profile training steps of a config on its data, in a subprocess.

    time_limit: seconds for the entire profile. Raises UserError if it takes longer.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: must be at least 1")
    check_positive(time_limit=time_limit)
    # Silences the profiler on stderr; must be set before the subprocess imports torch.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    result = in_subprocess(measure, config, steps, seconds=time_limit)
    if "failed" in result:
        fix = "a smaller batch or model"
        if result["failed"] != OUT_OF_MEMORY:
            fix += ", fewer --steps or a longer --time-limit"
        raise UserError(f"the profile failed: {result['failed']}; try {fix}")
    return result


def measure(config: RunConfig, steps: int) -> Record:
    """Profile training steps in this process."""
    trainer, batches = trainer_and_batches(config)
    with progress_bar("profile", 1 + 2 * steps, "steps") as advance, _scopes(trainer):

        def take_steps(first: int, n: int) -> float:
            start = time.perf_counter()
            for number in range(first, first + n):
                with record_function(_STEP):
                    _step(trainer, batches, number)
                advance(1)
            return (time.perf_counter() - start) / n

        take_steps(0, 1)  # warm-up
        seconds = take_steps(1, steps)
        activities = [ProfilerActivity.CPU]
        on_gpu = trainer.device.type == "cuda"
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            take_steps(1 + steps, steps)
    profiled, operators = summary(profiler.events(), on_gpu)
    return {
        "what": "time of a training step by part and by operator",
        "machine": machine(trainer.device),
        "config": config_record(config),
        "steps": steps,
        "seconds_per_step": seconds,
        "profiled_seconds_per_step": profiled / steps,
        "profile": {
            part: sum(op.seconds for op in operators if op.part == part) / steps for part in PARTS
        },
        "operators": [
            {"name": op.name, "part": op.part, "seconds": op.seconds / steps, "calls": op.calls}
            for op in sorted(operators, key=lambda op: -op.seconds)
        ],
    }


def _step(trainer: Trainer, batches: TrainingBatches, number: int) -> None:
    with record_function("tvq: data"):
        batch = batches[number]
    trainer.step(batch, number, batches.starts_sequences(number))
    synchronize(trainer.device)


def _scopes(trainer: Trainer) -> ExitStack:
    """Return a context in which the profile shows work on codebooks as a scope."""
    stack = ExitStack()
    open_scopes: list[ExitStack] = []

    def enter(*_: object) -> None:
        scope = ExitStack()
        scope.enter_context(record_function("tvq: codebooks"))
        open_scopes.append(scope)

    def leave(*_: object) -> None:
        open_scopes.pop().close()

    update_codebooks = trainer.model.update_codebooks

    def recorded(code_usage: Sequence[CodeUsage]) -> None:
        with record_function("tvq: codebooks"):
            update_codebooks(code_usage)

    trainer.model.update_codebooks = recorded
    stack.callback(delattr, trainer.model, "update_codebooks")
    if not trainer.strategy.is_compiled:  # hooks would break the graph
        for module in trainer.model.modules():
            if isinstance(module, VectorQuantizer):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
    return stack


def summary(events: EventList, on_gpu: bool = False) -> tuple[float, list[Operator]]:
    """Return the total seconds of all steps, and the time of every operator.

    Time outside all operators is attributed to Python. on_gpu: use the time of GPU kernels; the
    remaining time is waiting for the host.
    """
    nodes = _nodes(events)
    found: dict[tuple[str, str], Operator] = {}
    total = 0.0
    for event in events:
        if event.name == _STEP:
            total += event.time_range.elapsed_us() / 1e6
            continue
        own = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        part = _part(event, nodes)
        operator = found.setdefault((event.name, part), Operator(event.name, part))
        operator.seconds += own / 1e6
        operator.calls += 1
    rest = total - sum(operator.seconds for operator in found.values())
    name = "waiting for the host" if on_gpu else "Python"
    return total, [*found.values(), Operator(name, "other", rest, 1)]


def _part(event: FunctionEvent, nodes: dict[int, str]) -> str:
    """Return the part of an event: from the scopes around it, else from its name."""
    around: FunctionEvent | None = event
    while around is not None:
        if around.name.startswith("tvq: ") and around.name != _STEP:
            return around.name.removeprefix("tvq: ")
        if around.name.startswith("Optimizer."):
            return "optimizer"
        if around.name.startswith(_GRADIENT) and around.sequence_nr in nodes:
            return nodes[around.sequence_nr]
        if around.name == "aten::embedding":
            return "other"
        around = around.cpu_parent
    if event.name.startswith("aten::_foreach_"):
        return "optimizer"
    return _BY_OPERATOR.get(event.name, "other")


def _nodes(events: EventList) -> dict[int, str]:
    """Return the part of every autograd node of the cache and the codebooks, by sequence number.

    An operator has the sequence number of the next node. So the last operator with a number is the
    one that created the node.
    """
    created = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        parent = event.cpu_parent.name if event.cpu_parent else ""
        is_gradient = event.name.startswith(_GRADIENT) or parent.startswith(_GRADIENT)
        if event.sequence_nr >= 0 and not is_gradient:
            created[event.sequence_nr] = _part(event, {})
    return {number: part for number, part in created.items() if part in ("cache", "codebooks")}


def table(record: Record, n_operators: int = 10) -> str:
    """Return Markdown tables of the parts, which add up to the step, and the slowest operators."""
    total = record["profiled_seconds_per_step"]
    lines = ["| part of a step | ms | share |", "| --- | ---: | ---: |"]
    for part, seconds in (record["profile"] | {"total": total}).items():
        lines.append(f"| {part} | {1e3 * seconds:,.1f} | {seconds / total:.1%} |")
    plain = 1e3 * record["seconds_per_step"]
    lines += ["", f"Without the profiler, a step takes {plain:,.1f} ms.", ""]
    lines += ["| operator | part | ms | calls per step |", "| --- | --- | ---: | ---: |"]
    for row in record["operators"][:n_operators]:
        calls = row["calls"] / record["steps"]
        lines.append(
            f"| {row['name']} | {row['part']} | {1e3 * row['seconds']:,.1f} | {calls:,.0f} |"
        )
    return "\n".join(lines)


PROFILE_BASE = RunConfig(
    ModelConfig(vocab_size=256, d_model=768, n_layer=1),
    train=TrainConfig(batch_size=1, seq_len=8192, backprop_len=2048),
)
"""One layer of the paper's 190M model, with the backprop length of the paper."""


def plot_profile(record: Record, path: Path) -> None:
    """Plot the parts of a training step as bars."""
    parts = record["profile"]
    total = record["profiled_seconds_per_step"]
    with new_figure(path, height=3.0) as (_, (axes,)):
        bars = axes.barh(list(parts), [1e3 * seconds for seconds in parts.values()], 0.65)
        shares = [f"{seconds / total:.1%}" for seconds in parts.values()]
        axes.bar_label(bars, shares, padding=4, color=MUTED)
        for bar in bars:
            bar.set_color(BLUE)
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel("milliseconds")
        axes.set_title(f"Parts of a training step of {1e3 * total:,.0f} ms")
        axes.grid(visible=False, axis="y")


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Profile a training step: matrix products, softmax, cache, codebooks, optimizer, ...

    The parts add up to the step. Without a preset, the model is one layer of the paper's 190M
    model; every setting is an option.
    """

    run: Flat
    steps: int = 4
    """Training steps to profile."""
    time_limit: float = 600.0
    """Seconds for the entire profile, including the preparation of the data."""


if __name__ == "__main__":
    main(
        Options, lambda x: run(x.run, x.steps, x.time_limit), table, plot_profile, base=PROFILE_BASE
    )
