"""tvq info: parameters, FLOPs per token, memory and traffic of a preset, file or run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformer_vq.cli.arguments import Config, Flat, Json, Start, parse, starting_point
from transformer_vq.cli.output import print_json
from transformer_vq.config import RunConfig
from transformer_vq.progress import short

if TYPE_CHECKING:
    from transformer_vq.sizes import Sizes


@dataclass(frozen=True)
class InfoOptions:
    """Show the parameters, FLOPs per token, memory and traffic of a preset, config file or run.

    Options show the effect of other settings.
    """

    run: Flat
    config: Config = None
    json: Json = False
    preset: Start = None


def run(arguments: list[str]) -> None:
    """Print the sizes of a preset, config file or run."""
    name, config = starting_point(arguments, "info")
    options = parse(InfoOptions, arguments, "info", InfoOptions(config))

    from transformer_vq.sizes import sizes

    result = sizes(options.run)
    print(sizes_table(name, options.run, result))
    print_json({"name": name, **vars(result), "train_bytes": result.train_bytes}, options.json)


def sizes_table(name: str, config: RunConfig, result: Sizes) -> str:
    """Return the memory and compute requirements of a run, as text."""
    tokens, steps = config.train.batch_size * config.train.backprop_len, config.train.steps
    forward, training = short(result.forward_flops), short(result.train_flops)
    sizes = {
        "weights": result.weight_bytes,
        "averaged weights": result.average_bytes,
        "gradients": result.gradient_bytes,
        "gathered": result.gathered_bytes,
        "optimizer": result.optimizer_bytes,
        "activations": result.activation_bytes,
        "carried states": result.carried_bytes,
    }
    n, flops = config.parallel.n_processes, result.train_flops * tokens * steps
    rows = {
        "parameters": f"{result.parameters:,}",
        "codebook values": f"{result.codebooks:,}",
        "FLOPs per token": f"{forward} forward, {training} training",
        "tokens per step": f"{tokens:,}",
        "steps": f"{steps:,} ({short(tokens * steps)} tokens, {flops:.2e} FLOPs)",
        "state per sequence": _bytes(result.state_bytes),
        "training, estimate": _total(sizes, f" on each of {n} devices" if n > 1 else ""),
    }
    if n > 1:
        rows["sent per step"] = _total(result.sent_bytes, " by each device")
    title = f"{name}: {config.model.head_type}, {config.model.attention} attention"
    return "\n".join([title, *(f"  {label:<22} {value}" for label, value in rows.items())])


def _total(sizes: dict[str, int], note: str) -> str:
    parts = "".join(f"\n    {what:<20} {_bytes(n)}" for what, n in sizes.items() if n)
    return _bytes(sum(sizes.values())) + note + parts


def _bytes(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e8 else f"{n / 1e6:.2f} MB"
