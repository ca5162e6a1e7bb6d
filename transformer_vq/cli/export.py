"""tvq export: write a run as a folder for Hugging Face transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.cli.arguments import RUN_HINT, first_word, parse
from transformer_vq.cli.options import Checkpoint


@dataclass(frozen=True)
class ExportOptions:
    """Export a run to a folder for Hugging Face transformers."""

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """New folder for config, safetensors and tokenizer."""
    checkpoint: Checkpoint = "best"


def run(arguments: list[str]) -> None:
    """Export a run."""
    name, rest = first_word(arguments, "export", "RUN", RUN_HINT, ExportOptions)
    options = parse(ExportOptions, rest, f"export {name}")

    from transformer_vq.hf.export import export

    export(Path(name), options.folder, options.checkpoint)
    print(f"{options.folder}: load it with transformers after `import transformer_vq.hf`")
