"""Where the time of a training step goes, by torch.profiler.

Times are those spent in an operator itself, not in operators that it calls, so they add up to the
step. Optimizer, codebooks and data are whatever runs within them; everything else is told apart
by the operator. A gradient belongs where its forward operation belongs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from transformer_vq.bench.cells import (
    OUT_OF_MEMORY,
    check_limits,
    in_subprocess,
    machine,
    synchronize,
)
from transformer_vq.bench.steps import trainer_and_batches
from transformer_vq.config import ModelConfig, RunConfig, TrainConfig
from transformer_vq.data.batches import TrainingBatches
from transformer_vq.errors import UserError
from transformer_vq.nn.quantizer import CodeUsage, VectorQuantizer
from transformer_vq.progress import progress_bar
from transformer_vq.training.step import Trainer

BASE = RunConfig(
    ModelConfig(vocab_size=256, d_model=768, n_layer=1),
    train=TrainConfig(batch_size=1, seq_len=8192, backprop_len=2048),
)
"""A layer of the paper's 190M model, with its window."""

PARTS = {
    "matrix products": "mm bmm addmm addmm_ baddbmm baddbmm_ mv dot",
    "softmax": "_softmax _softmax_backward_data",
    "cache": "index_add index_add_ index index_select lerp",
    "codebooks": "",
    "optimizer": "linalg_vector_norm",
    "data": "",
    "other": "",
}
"""The parts of a step, with the operators by which they are known."""
_BY_OPERATOR = {f"aten::{name}": part for part, names in PARTS.items() for name in names.split()}
_STEP = "tvq: step"
_GRADIENT = "autograd::engine::evaluate_function"


@dataclass
class Operator:
    """All calls of one operator in one part."""

    name: str
    part: str
    seconds: float = 0.0
    calls: int = 0


def run(config: RunConfig, steps: int = 4, time_limit: float = 600.0) -> dict[str, Any]:
    """Profile some updates of a run on its own data; nothing is written.

    time_limit: seconds that it may take altogether. Raises UserError if it takes longer.
    """
    if steps < 1:
        raise UserError(f"--steps {steps}: must be at least 1")
    check_limits(time_limit=time_limit)
    # The profiler announces itself on stderr, unless told otherwise before torch is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    result = in_subprocess(measure, config, steps, seconds=time_limit)
    if "failed" in result:
        fix = "a smaller batch or model"
        if result["failed"] != OUT_OF_MEMORY:
            fix += ", fewer --steps or a longer --time-limit"
        raise UserError(f"no profile: {result['failed']}; try {fix}")
    return result


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    """The same in this process."""
    trainer, batches = trainer_and_batches(config)
    with progress_bar("profile", 1 + 2 * steps, "updates") as advance, _scopes(trainer):

        def some(first: int, n: int) -> float:
            start = time.perf_counter()
            for number in range(first, first + n):
                with record_function(_STEP):
                    _step(trainer, batches, number)
                advance(1)
            return (time.perf_counter() - start) / n

        some(0, 1)  # warm-up
        seconds = some(1, steps)
        activities = [ProfilerActivity.CPU]
        on_gpu = trainer.device.type == "cuda"
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            some(1 + steps, steps)
    profiled, operators = summary(profiler.events(), on_gpu)
    values = config.to_dict()
    values["data"] = {"dataset": config.data.dataset}  # paths are nobody's business
    return {
        "what": "time of a training step by what it is spent on",
        "machine": machine(trainer.device),
        "config": values,
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
    trainer.update(batch, number, batches.begins(number))
    synchronize(trainer.device)


def _scopes(trainer: Trainer) -> ExitStack:
    """A context in which work on codebooks is named in the profile."""
    stack = ExitStack()
    open_scopes: list[record_function] = []

    def enter(*_: Any) -> None:
        open_scopes.append(record_function("tvq: codebooks"))
        open_scopes[-1].__enter__()

    def leave(*_: Any) -> None:
        open_scopes.pop().__exit__(None, None, None)

    update = trainer.model.update_codebooks

    def learn(code_usage: Sequence[CodeUsage]) -> None:
        with record_function("tvq: codebooks"):
            update(code_usage)

    trainer.model.update_codebooks = learn  # type: ignore[method-assign]
    stack.callback(delattr, trainer.model, "update_codebooks")
    if not trainer.config.train.compile:  # hooks would break the graph
        for module in trainer.model.modules():
            if isinstance(module, VectorQuantizer):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave).remove)
    return stack


def summary(events: EventList, on_gpu: bool = False) -> tuple[float, list[Operator]]:
    """Seconds of all steps together, and where they went; what no operator accounts for is Python.

    on_gpu: count the time of kernels; the rest of a step is then waiting.
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
    """Where an event belongs: to the scope around it, else by its name."""
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
    """The numbers of autograd nodes that belong to cache or codebooks, whatever operators they use.

    An operator carries the number that the next node gets; the last one with a number made it.
    """
    made = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        parent = event.cpu_parent.name if event.cpu_parent else ""
        is_gradient = event.name.startswith(_GRADIENT) or parent.startswith(_GRADIENT)
        if event.sequence_nr >= 0 and not is_gradient:
            made[event.sequence_nr] = _part(event, {})
    return {number: part for number, part in made.items() if part in ("cache", "codebooks")}


def table(result: dict[str, Any], n_operators: int = 10) -> str:
    """Markdown: the parts, which add up to the step, and the operators that take longest."""
    whole = result["profiled_seconds_per_step"]
    lines = ["| part of a step | ms | share |", "| --- | ---: | ---: |"]
    for part, seconds in (result["profile"] | {"whole step": whole}).items():
        lines.append(f"| {part} | {1e3 * seconds:,.1f} | {seconds / whole:.1%} |")
    plain = 1e3 * result["seconds_per_step"]
    lines += ["", f"Without the profiler a step takes {plain:,.1f} ms.", ""]
    lines += ["| operator | part | ms | calls per step |", "| --- | --- | ---: | ---: |"]
    for row in result["operators"][:n_operators]:
        calls = row["calls"] / result["steps"]
        lines.append(
            f"| {row['name']} | {row['part']} | {1e3 * row['seconds']:,.1f} | {calls:,.0f} |"
        )
    return "\n".join(lines)
