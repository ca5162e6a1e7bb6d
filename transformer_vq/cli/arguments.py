"""Parse command lines with tyro, and the option types that several commands share.

tyro reports unknown options and values of the wrong type. Configs and `check_fields` report values
that are out of range, as everywhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_type_hints

import tyro
from tyro.conf import subcommand
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from transformer_vq.checks import check_fields
from transformer_vq.cli.output import HELP, config_fields
from transformer_vq.config import Dataset, ModelConfig, RunConfig
from transformer_vq.config_files import (
    SECTIONS,
    ConfigFile,
    field_docs,
    find_preset,
    read_config_file,
)
from transformer_vq.errors import UserError
from transformer_vq.presets import PRESETS
from transformer_vq.progress import IS_SILENT

T = TypeVar("T")
COMMON_FIELDS = frozenset(
    {
        *("data.dataset", "data.path", "data.tokenizer"),
        *("train.steps", "train.batch_size", "train.seq_len", "train.init_from"),
        *("train.device", "train.precision", "train.seed"),
        *("model.d_model", "model.n_layer", "model.head_type"),
        *("optim.lr", "optim.warmup"),
    }
)
"""Fields of a run config that --help shows; --help-all shows all."""
MORE_HELP = """\
--help lists the settings that are used most, --help-all lists all of them.
Defaults that depend on PRESET or RUN are those of the preset tiny.
`tvq config PRESET` prints all settings of a preset as a file."""

Flat = Annotated[RunConfig, tyro.conf.arg(name="")]
"""A run config whose options have no prefix: --model.n-code, not --run.model.n-code."""
Start = Annotated[
    str | None,
    tyro.conf.Positional,
    tyro.conf.arg(
        metavar="PRESET",
        help=f"{', '.join(PRESETS)}; or a run folder, whose config is used. Comes first.",
    ),
]
Config = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="FILE",
        help="Config file (.toml or .json), or a run folder whose config is used. Options "
        "on the command line override the file, which overrides PRESET.",
    ),
]
Run = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
Checkpoint = Annotated[str, tyro.conf.arg(help="best, last, or the number of a step.")]
Device = Annotated[str, tyro.conf.arg(help="cpu, cuda, cuda:1, ...; auto uses a GPU if available.")]
Json = Annotated[bool, tyro.conf.arg(help="Print one JSON object as the last line of stdout.")]
Overwrite = Annotated[bool, tyro.conf.arg(help="Replace an existing output file.")]


def parse(
    kind: type[T],
    arguments: list[str],
    command: str,
    default: T | None = None,
    hidden: Collection[str] = (),
) -> T:
    """Return the options that the arguments give; --help and mistakes exit.

    default: options that have not been given. hidden: fields of a run config that are not options.
    """
    description = inspect.getdoc(kind)
    if HELP & set(arguments):
        if get_type_hints(kind).get("run") is RunConfig:
            description = f"{description}\n\n{MORE_HELP}"
            if "--help-all" not in arguments:
                hidden = {*hidden, *(config_fields() - COMMON_FIELDS)}
        arguments = ["--help"]
    try:
        options = tyro.cli(
            kind,
            args=arguments,
            prog=f"tvq {command}",
            description=description,
            default=tyro.MISSING if default is None else default,
            registry=_rules(hidden),
            console_outputs=not IS_SILENT,
        )
    except _RejectedError as rejected:
        raise rejected.error from None
    check_fields(options)
    return options


def run_name(arguments: list[str], command: str, example: Any, hidden: Collection[str] = ()) -> str:
    """Return RUN, whose config has the defaults of the options; --help and mistakes exit."""
    if arguments and not arguments[0].startswith("-") and not HELP & set(arguments):
        return arguments[0]
    parse(type(example), arguments, command, example, hidden)
    raise UserError(f"give RUN first: tvq {command} RUN ...")


class _RejectedError(Exception):
    """Carries a UserError through tyro, which would catch a ValueError."""

    def __init__(self, error: UserError) -> None:
        self.error = error


def _rules(hidden: Collection[str] = ()) -> ConstructorRegistry:
    """Return rules for tyro: lists are not empty, and dataclasses are shown as we like it.

    Help texts of fields have no line breaks, and sections that change most come first.
    """
    registry = ConstructorRegistry()
    sections = {kind: name for name, kind in get_type_hints(RunConfig).items()}

    @registry.primitive_rule
    def list_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type not in (tuple[str, ...], tuple[Path, ...]):
            return None
        inner = get_args(info.type)[0]

        def read(words: list[str]) -> tuple[Any, ...]:
            if not words:  # as with an empty shell variable
                raise ValueError("give one value or more")
            return tuple(map(inner, words))

        return PrimitiveConstructorSpec(
            nargs="*",
            metavar=f"{inner.__name__.upper()} ...",
            instance_from_str=read,
            is_instance=lambda value: isinstance(value, tuple),
            str_from_instance=lambda value: list(map(str, value)),
        )

    @registry.struct_rule
    def dataclass_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        kind: Any = info.type
        if not dataclasses.is_dataclass(info.type) or kind.__module__.startswith("tyro."):
            return None
        hints, found = get_type_hints(kind, include_extras=True), []
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            if hint == bool | None:
                hint = Annotated[hint, tyro.conf.DisallowNone]  # --compile and --no-compile
            if f"{sections.get(kind)}.{field.name}" in hidden:
                hint = Annotated[hint, tyro.conf.Suppress]
            default = getattr(info.default, field.name, _default(field))
            text = field_docs(kind).get(field.name)
            found.append(StructFieldSpec(field.name, hint, default, text))
        if kind is RunConfig:
            found.sort(key=lambda field: SECTIONS.index(field.name))

        def build(**values: Any) -> Any:
            try:
                return kind(**values)
            except UserError as error:
                raise _RejectedError(error) from None

        return StructConstructorSpec(build, tuple(found))

    return registry


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return tyro.MISSING if field.default is dataclasses.MISSING else field.default


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """The config that `tvq train`, `info` and `config` start from, before options apply."""

    name: str
    """Of the preset, file or run."""
    preset: str | None
    run: RunConfig


def starting_point(arguments: list[str], command: str) -> StartingPoint:
    """Find the preset, run folder and config file in the arguments, and read them.

    The later of these override the earlier ones: preset, the model of --train.init-from, file.
    """
    word = arguments[0] if arguments and not arguments[0].startswith("-") else None
    given = _value(arguments, "--config")
    if HELP & set(arguments):
        word, given = "tiny", None
    file = None if given is None else read_config_file(Path(given))
    if word is not None and word not in PRESETS and Path(word).is_dir():
        if file is not None:
            raise UserError(f"give the run {word} or --config {given}, not both")
        file, word = read_config_file(Path(word)), None
    if word is None and file is None:
        raise UserError(
            f"give a PRESET first, or --config FILE: tvq {command} PRESET ...; PRESET is one of "
            f"{', '.join(PRESETS)}, or a run folder"
        )
    preset = word if file is None or word is not None else file.preset
    base = None if preset is None else find_preset(preset)
    init_from = _value(arguments, "--train.init-from") or _init_from(file)
    if init_from is not None and not (file is not None and file.has_model):
        base = _with_initial_model(base, init_from)
    if file is not None:
        return StartingPoint(file.name, preset, file.apply(base))
    assert preset is not None
    assert base is not None
    return StartingPoint(preset, preset, base)


def _value(arguments: list[str], option: str) -> str | None:
    """Return the last value of an option, which determines the defaults of others."""
    found = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, is_attached, value = argument.partition("=")
        if name.replace("_", "-") == option:
            found = value if is_attached else following
    return found


def _init_from(file: ConfigFile | None) -> str | None:
    path = None if file is None else file.values.get("train", {}).get("init_from")
    return path if isinstance(path, str) else None


def _with_initial_model(base: RunConfig | None, init_from: str) -> RunConfig:
    """Return a config with the model of a run or file, and without a tokenizer of its own."""
    from transformer_vq.training.loading import InitialModel

    model: ModelConfig = InitialModel(init_from).config
    base = RunConfig(model) if base is None else dataclasses.replace(base, model=model)
    data = dataclasses.replace(base.data, tokenizer=None)
    if model.vocab_size in (256, 257):  # bytes, without and with an end of documents
        data = dataclasses.replace(data, end_of_document=model.vocab_size == 257)
    return dataclasses.replace(base, data=data)


def option_classes() -> dict[str, Any]:
    """Return the option dataclass of every command."""
    from transformer_vq.cli.main import COMMANDS

    return {
        name: getattr(import_module(module), f"{name.title()}Options")
        for name, (module, _) in COMMANDS.items()
    }


def print_completion(shell: str) -> None:
    """Print tyro's completion script for all commands.

    tyro does not complete positional arguments, so presets and datasets become subcommands here,
    with the same options. Without matches, bash completes file names.
    """
    commands = option_classes()
    for name, choices in {"train": PRESETS, "prepare": get_args(Dataset)}.items():
        kind = commands[name]
        options: Any = Annotated[kind, tyro.conf.arg(name="")]
        word: Any = Union[tuple(Annotated[kind, subcommand(name=x)] for x in choices)]  # noqa: UP007
        commands[name] = NamedTuple(name, [("options", options), ("word", word)])
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="tvq",
            args=["--tyro-print-completion", shell],
            config=(tyro.conf.OmitSubcommandPrefixes,),
            registry=_rules(),
        )
    except SystemExit as stop:
        if stop.code:
            raise
        if shell == "bash":
            print('_tvq() { _tyro_tvq; [[ "${COMPREPLY[*]}" ]] || COMPREPLY=(); }')
            print("complete -o default -F _tvq tvq")
