"""The config that `tvq train`, `info` and `config` start from: a preset, a config file or a run.

The later of these override the earlier ones: preset, the model of --train.init-from, config file,
options.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol, TypeVar

from transformer_vq.cli.arguments import (
    HELP,
    PRESET_HINT,
    UsageError,
    expand_home,
    find_preset,
    first_word,
    nearest,
    parse,
)
from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.config_files import ConfigFile, ConfigFileError, read_config_file
from transformer_vq.presets import PRESETS

HINT = f"{PRESET_HINT}; or use --config FILE"
RUN_HINT = f"{PRESET_HINT}, or a run folder; or use --config FILE"


@dataclass(frozen=True)
class StartingPoint:
    """A preset, a config file, or both; the file overrides the preset."""

    name: str
    """Of the preset, file or run."""
    preset: str | None = None
    file: ConfigFile | None = None

    @property
    def init_from(self) -> str | None:
        """The weights that the file starts from, if any."""
        given = {} if self.file is None else self.file.values.get("train", {})
        path = given.get("init_from")
        return path if isinstance(path, str) else None

    @property
    def has_model(self) -> bool:
        """Whether the file gives every setting of the model, as the config of a run does."""
        given = {} if self.file is None else self.file.values.get("model", {})
        return given.keys() >= {field.name for field in fields(ModelConfig)}

    def config(self, model: ModelConfig | None = None) -> RunConfig:
        """Return the config.

        model: that of --train.init-from. It replaces the model of the preset, but not of the file;
        so does its tokenizer.
        """
        base = None if self.preset is None else find_preset(self.preset)
        if model is not None:
            base = RunConfig(model) if base is None else replace(base, model=model)
            data = replace(base.data, tokenizer=None)
            if model.vocab_size in (256, 257):  # bytes, without and with an end of documents
                data = replace(data, end_of_document=model.vocab_size == 257)
            base = replace(base, data=data)
        if self.file is not None:
            return self.file.apply(base)
        assert base is not None
        return base


def starting_point(
    arguments: list[str], command: str, options: type, example: object, runs: bool = False
) -> tuple[StartingPoint, list[str]]:
    """Return what the arguments of a command start from, and the arguments after the first word.

    runs: the first word may also be a run folder, whose config is used.
    """
    hint = RUN_HINT if runs else HINT
    given = _config_option(arguments)
    has_word = bool(arguments) and not arguments[0].startswith("-")
    if given is None or has_word or HELP & set(arguments):
        name, rest = first_word(arguments, command, "PRESET", hint, options, example)
        if runs and Path(name).is_dir():
            if given is not None:
                raise UsageError(f"give the run {name} or --config {given}, not both")
            return StartingPoint(name, None, read_config_file(Path(name))), rest
        find_preset(name)
        if given is None:
            return StartingPoint(name, name), rest
        file = read_config_file(given)
        return StartingPoint(file.name, name, file), rest
    file = read_config_file(given)
    if file.preset is not None and file.preset not in PRESETS:
        raise ConfigFileError(
            f"{file.path}: unknown preset {file.preset!r}{nearest(file.preset, PRESETS)}; choose "
            f"one of {', '.join(PRESETS)}"
        )
    return StartingPoint(file.name, file.preset, file), arguments


def _config_option(arguments: list[str]) -> Path | None:
    """Return the value of --config, which determines the defaults of all other options."""
    found = []
    for number, argument in enumerate(arguments):
        name, is_attached, value = argument.partition("=")
        if name == "--config":
            found += [value] if is_attached else arguments[number + 1 : number + 2]
            if not found or not found[-1] or found[-1].startswith("--"):
                raise UsageError("--config: give a file; --help lists the options")
    if len(found) > 1:
        raise UsageError("--config: give one file; it may name a preset to start from")
    return expand_home(Path(found[0])) if found else None


class WithRun(Protocol):
    """Options with a run config."""

    @property
    def run(self) -> RunConfig: ...


T = TypeVar("T", bound=WithRun)


def parse_from(start: StartingPoint, arguments: list[str], prog: str, default: T) -> T:
    """Parse the options of a command; `default` is used except for its run config.

    With --train.init-from, model and tokenizer are those of the given run, so that only explicit
    settings differ from it.
    """
    first = None if start.init_from is None or start.has_model else _model_of(start.init_from)
    options = parse(type(default), arguments, prog, _with_run(default, start.config(first)))
    path = options.run.train.init_from
    if path is None or path == start.init_from or start.has_model:
        return options
    model = _model_of(path)
    return parse(type(default), arguments, prog, _with_run(default, start.config(model)))


def _with_run(options: T, run: RunConfig) -> T:
    return replace(options, run=run)  # type: ignore[type-var]


def _model_of(init_from: str) -> ModelConfig:
    from transformer_vq.training.loading import initial_model_config

    return initial_model_config(init_from)
