"""tvq config: print a config file to start from."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.cli.arguments import Config, Flat, Start, parse, starting_point
from transformer_vq.cli.output import one_line
from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.config_files import FileFormat, config_text
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
    preset: Start = None


def run(arguments: list[str]) -> None:
    """Print a config file."""
    start = starting_point(arguments, "config")
    options = parse(ConfigOptions, arguments, "config", ConfigOptions(start.run))
    preset, base = None, None
    if options.changed_only:
        model = options.run.model
        preset = start.preset
        base = RunConfig(ModelConfig(model.vocab_size, model.d_model, model.n_layer))
        base = base if preset is None else PRESETS[preset]
    title = (
        f"Config of {one_line(start.name)}. Train with: tvq train --config FILE --out RUN\n"
        "Options on the command line override this file. Paths are relative to the working "
        "directory."
    )
    text = config_text(options.run, options.format, title=title, preset=preset, base=base)
    print(text, end="")
