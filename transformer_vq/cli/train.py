"""tvq train: train a model from a preset or a config file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import Config, Flat, Json, Start, parse, starting_point
from transformer_vq.cli.output import computing, print_training_result


@dataclass(frozen=True)
class TrainOptions:
    """Train a model from a preset or a config file; every setting is an option."""

    run: Flat
    out: Path | None = None
    """Output folder; must not already contain a run. None uses runs/NAME of the preset or file."""
    config: Config = None
    json: Json = False
    preset: Start = None


def run(arguments: list[str]) -> int:
    """Train a model; return the exit status."""
    name, config = starting_point(arguments, "train")
    options = parse(TrainOptions, arguments, "train", TrainOptions(config))

    from transformer_vq.sizes import MEMORY_HINT
    from transformer_vq.training.run import train

    out = Path("runs", name) if options.out is None else options.out
    with computing(MEMORY_HINT):
        return print_training_result(train(options.run, out), options.json)
