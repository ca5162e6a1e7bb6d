"""tvq config: print a config file to start from."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.cli.options import Config, Flat
from transformer_vq.cli.output import one_line
from transformer_vq.cli.starting_point import StartingPoint, parse_from, starting_point
from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.config_files import FileFormat
from transformer_vq.presets import PRESETS


@dataclass(frozen=True)
class ConfigOptions:
    """Print a config file with all settings, their help texts and the given options applied.

    Save it and train with it: tvq config tiny > my.toml; tvq train --config my.toml
    """

    run: Flat
    config: Config = None
    format: FileFormat = "toml"
    """Format to print; JSON has no comments."""
    changed_only: bool = False
    """Print only what differs from the preset, and the name of the preset."""


def run(arguments: list[str]) -> None:
    """Print a config file."""
    example = ConfigOptions(PRESETS["tiny"])
    start, rest = starting_point(arguments, "config", ConfigOptions, example, runs=True)
    options = parse_from(start, rest, f"config {start.name}", ConfigOptions(PRESETS["tiny"]))

    from transformer_vq.config_files import config_text

    preset, base = None, None
    if options.changed_only:
        preset, base = start.preset, _base(start, options.run)
    title = (
        f"Config of {one_line(start.name)}. Train with: tvq train --config FILE --out RUN\n"
        "Options on the command line override this file. Paths are relative to the working "
        "directory."
    )
    text = config_text(options.run, options.format, title=title, preset=preset, base=base)
    print(text, end="")


def _base(start: StartingPoint, run: RunConfig) -> RunConfig:
    """Return the preset, or else the defaults of all settings that have one."""
    if start.preset is not None:
        return PRESETS[start.preset]
    model = run.model
    return RunConfig(ModelConfig(model.vocab_size, model.d_model, model.n_layer))
