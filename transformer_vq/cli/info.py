"""tvq info: parameters, FLOPs per token, state size and memory of a preset or run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_vq.cli.arguments import PRESET_HINT, find_preset, first_word, parse
from transformer_vq.cli.options import Flat, Json
from transformer_vq.cli.output import print_json
from transformer_vq.config import RunConfig
from transformer_vq.presets import PRESETS
from transformer_vq.progress import short

if TYPE_CHECKING:
    from transformer_vq.training.sizes import Sizes


@dataclass(frozen=True)
class InfoOptions:
    """Show the parameters, FLOPs per token, state size and memory of a preset or run.

    Options show the effect of other settings.
    """

    run: Flat
    json: Json = False


def run(arguments: list[str]) -> None:
    """Print the sizes of a preset or run."""
    hint = f"{PRESET_HINT}, or a run folder"
    example = InfoOptions(PRESETS["tiny"])
    name, rest = first_word(arguments, "info", "PRESET", hint, InfoOptions, example)
    options = parse(InfoOptions, rest, f"info {name}", InfoOptions(_find_config(name)))

    from transformer_vq.training.sizes import sizes

    result = sizes(options.run)
    print(sizes_table(name, options.run, result))
    print_json({"name": name, **vars(result), "train_bytes": result.train_bytes}, options.json)


def _find_config(name: str) -> RunConfig:
    """Return the config of a run folder or preset."""
    if not Path(name).is_dir():
        return find_preset(name)

    from transformer_vq.training.checkpoint import read_config

    return read_config(Path(name))


def sizes_table(name: str, config: RunConfig, result: Sizes) -> str:
    """Return the memory and compute requirements of a run, as text."""
    train = config.train
    tokens = train.batch_size * train.backprop_len
    flops = result.train_flops * tokens * train.steps
    forward, training = short(result.forward_flops), short(result.train_flops)
    parts = (
        f"weights and gradients {_bytes(2 * result.weight_bytes)}, optimizer "
        f"{_bytes(result.optimizer_bytes)}, activations {_bytes(result.activation_bytes)}"
    )
    n = config.parallel.n_processes
    where = f" on each of {n} devices" if n > 1 else ""
    rows = {
        "parameters": f"{result.parameters:,}",
        "codebook values": f"{result.codebooks:,}",
        "FLOPs per token": f"{forward} forward, {training} training",
        "tokens per step": f"{tokens:,}",
        "steps": f"{train.steps:,} ({short(tokens * train.steps)} tokens, {flops:.2e} FLOPs)",
        "state per sequence": _bytes(result.state_bytes),
        "weights": _bytes(result.weight_bytes) + where,
        "training, estimate": f"{_bytes(result.train_bytes)}{where}: {parts}",
    }
    title = f"{name}: {config.model.head_type}, {config.model.attention} attention"
    return "\n".join([title, *(f"  {label:<22} {value}" for label, value in rows.items())])


def _bytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"
