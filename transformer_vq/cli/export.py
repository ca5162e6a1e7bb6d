"""tvq export: write a run as a folder for Hugging Face transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_vq.cli.arguments import Checkpoint, Run, parse


@dataclass(frozen=True)
class ExportOptions:
    """Export a run to a folder for Hugging Face transformers."""

    run: Run
    """Run folder, or books, the model in the package."""
    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """New folder for config, safetensors, tokenizer and model card."""
    checkpoint: Checkpoint = "best"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; codebooks are always float32."""
    chat_template: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Jinja chat template, for apply_chat_template. None uses that of the run, if it has one."""
    license: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """License of the model for its card, named as on the Hub, such as mit or cc-by-4.0. None states
    a license only for models in the package."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the model in its card, such as me/my-model. None uses the name of the folder."""


def run(arguments: list[str]) -> None:
    """Export a run."""
    options = parse(ExportOptions, arguments, "export")

    from transformer_vq.hf.export import export
    from transformer_vq.training.packaged import find_run

    which = export(
        find_run(options.run),
        options.folder,
        options.checkpoint,
        dtype=options.dtype,
        chat_template=options.chat_template,
        name=options.name,
        license_id=options.license,
    )
    print(f"{options.folder}: {which} of {options.run}, with a model card in README.md")
    print("load it with transformers, either after the import or with trust_remote_code=True:")
    print("  import transformer_vq.hf")
    print(f"  AutoModelForCausalLM.from_pretrained({str(options.folder)!r})")
