"""tvq export: write a run as a folder for Hugging Face transformers, or as ONNX graphs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from transformer_vq.cli.arguments import Checkpoint, Run, parse
from transformer_vq.errors import UserError


@dataclass(frozen=True)
class ExportOptions:
    """Export a run to a folder for Hugging Face transformers, or as ONNX graphs."""

    run: Run
    """Run folder, or books, the model in the package."""
    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="FOLDER")]]
    """New folder for config, safetensors, tokenizer and model card, or for ONNX files."""
    checkpoint: Checkpoint = "best"
    format: Literal["hf", "onnx"] = "hf"
    """hf: for transformers. onnx: the graphs forward, prefill and decode, without a tokenizer."""
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
    if options.format == "onnx":
        _export_onnx(options)
        return

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


def _export_onnx(options: ExportOptions) -> None:
    plain = ExportOptions(options.run, options.folder, options.checkpoint, "onnx")
    if ignored := [n for n, x in vars(plain).items() if getattr(options, n) != x]:
        raise UserError(f"--{ignored[0].replace('_', '-')}: not with --format onnx")

    from transformer_vq.generation.export import export_onnx
    from transformer_vq.training.checkpoint import load_model
    from transformer_vq.training.packaged import find_run

    model, which = load_model(find_run(options.run), options.checkpoint)
    has_state = model.config.attention == "vq"
    export_onnx(
        model, options.folder, ("forward", "prefill", "decode") if has_state else ("forward",)
    )
    print(f"{options.folder}: {which} of {options.run} as ONNX; run it with onnxruntime")
