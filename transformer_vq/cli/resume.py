"""tvq resume: resume a run from its newest checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformer_vq.cli.arguments import RUN_HINT, config_fields, first_word, parse
from transformer_vq.cli.options import Flat, Json
from transformer_vq.cli.output import out_of_memory_advice, print_training_result
from transformer_vq.config.run import FREE_FIELDS
from transformer_vq.presets import PRESETS

# Fields that cannot change when a run is resumed.
FIXED_FIELDS = config_fields() - FREE_FIELDS


@dataclass(frozen=True)
class ResumeOptions:
    """Resume a run from its newest checkpoint, bit for bit as if it had not been interrupted.

    Only settings that do not affect the result may change. Another device or process mesh,
    train.compile, train.reduction and train.checkpoint-activations may change the rounding.
    """

    run: Flat
    json: Json = False


def run(arguments: list[str]) -> int:
    """Resume a run; return the exit status."""
    example = ResumeOptions(PRESETS["tiny"])
    name, rest = first_word(
        arguments, "resume", "RUN", RUN_HINT, ResumeOptions, example, FIXED_FIELDS
    )

    from transformer_vq.device import keep_freed_memory
    from transformer_vq.training.checkpoint import read_config
    from transformer_vq.training.run import resume

    default = ResumeOptions(read_config(Path(name)))
    options = parse(ResumeOptions, rest, f"resume {name}", default, hidden=FIXED_FIELDS)
    keep_freed_memory()
    with out_of_memory_advice("use --train.checkpoint-activations"):
        return print_training_result(resume(Path(name), options.run), options.json)
