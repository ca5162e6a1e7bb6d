"""tvq train: train a model from a preset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import PRESET_HINT, find_preset, first_word, parse
from transformer_vq.cli.options import Flat, Json
from transformer_vq.cli.output import out_of_memory_advice, print_training_result
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class TrainOptions:
    """Train a model from a preset; every setting of the preset is an option."""

    run: Flat
    out: Path
    """Output folder; must not already contain a run."""
    json: Json = False


def run(arguments: list[str]) -> int:
    """Train a model; return the exit status."""
    example = TrainOptions(PRESETS["tiny"], Path("runs/tiny"))
    name, rest = first_word(arguments, "train", "PRESET", PRESET_HINT, TrainOptions, example)
    default = TrainOptions(find_preset(name), Path("runs") / name)
    options = parse(TrainOptions, rest, f"train {name}", default)

    from transformer_vq.device import keep_freed_memory
    from transformer_vq.training.run import train
    from transformer_vq.training.sizes import memory_hint

    keep_freed_memory()
    with out_of_memory_advice(memory_hint(options.run)):
        return print_training_result(train(options.run, options.out), options.json)
