"""Option types that several commands share, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.config import RunConfig

Flat = Annotated[RunConfig, tyro.conf.arg(name="")]
"""A run config whose options have no prefix: --model.n-code, not --run.model.n-code."""

Config = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="FILE",
        help="Config file (.toml or .json), or a run folder whose config is used. Options "
        "on the command line override the file, which overrides PRESET.",
    ),
]
Checkpoint = Annotated[str, tyro.conf.arg(help="best, last, or the number of a step.")]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, cuda:1, ...; auto uses a GPU if available.")]
Json = Annotated[bool, tyro.conf.arg(help="Print one JSON object as the last line of stdout.")]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace an existing output file.")]
