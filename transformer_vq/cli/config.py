"""tvq config: print a config file to start from."""

from __future__ import annotations

from dataclasses import dataclass

from transformer_vq.cli.arguments import Config, Flat, Start, parse, starting_point
from transformer_vq.cli.output import one_line
from transformer_vq.config_files import config_text


@dataclass(frozen=True)
class ConfigOptions:
    """Print a config file with all settings, their help texts and the given options applied.

    Save it and train with it: tvq config tiny > my.toml; tvq train --config my.toml
    """

    run: Flat
    config: Config = None
    preset: Start = None


def run(arguments: list[str]) -> None:
    """Print a config file."""
    name, config = starting_point(arguments, "config")
    options = parse(ConfigOptions, arguments, "config", ConfigOptions(config))
    title = f"Config of {one_line(name)}. Train with: tvq train --config FILE --out RUN\n"
    title += "Options on the command line override this file. Paths are relative to the working "
    print(config_text(options.run, f"{title}directory."), end="")
