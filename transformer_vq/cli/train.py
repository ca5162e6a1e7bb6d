"""tvq train: train a model from a preset or a config file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.options import Config, Flat, Json
from transformer_vq.cli.output import out_of_memory_advice, print_training_result
from transformer_vq.cli.starting_point import parse_from, starting_point
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class TrainOptions:
    """Train a model from a preset or a config file; every setting is an option."""

    run: Flat
    out: Path
    """Output folder; must not already contain a run."""
    config: Config = None
    json: Json = False


def run(arguments: list[str]) -> int:
    """Train a model; return the exit status."""
    example = TrainOptions(PRESETS["tiny"], Path("runs/tiny"))
    start, rest = starting_point(arguments, "train", TrainOptions, example)
    default = TrainOptions(PRESETS["tiny"], Path("runs") / start.name)
    options = parse_from(start, rest, f"train {start.name}", default)

    from transformer_vq.device import keep_freed_memory
    from transformer_vq.sizes import memory_hint
    from transformer_vq.threads import share_cores
    from transformer_vq.training.run import train

    keep_freed_memory()
    share_cores()
    with out_of_memory_advice(memory_hint(options.run)):
        return print_training_result(train(options.run, options.out), options.json)
