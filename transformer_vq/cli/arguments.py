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
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from transformer_vq.checks import check_fields
from transformer_vq.cli.output import HELP, config_fields
from transformer_vq.config import ModelConfig, Precision, RunConfig
from transformer_vq.config_files import SECTIONS, field_docs, find_preset, read_config_file
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
LISTS = {"path", "validation-path", "test-path", "stop", "images", "allow-hosts"}
"""Options that take several values, without their section."""
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
Matmul = Annotated[Precision, tyro.conf.arg(help="fp32, or bf16 for matrix products.")]
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
    _check_lists(arguments)
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


def _check_lists(arguments: list[str]) -> None:
    """Raise UserError for a list that is empty, as with an empty shell variable, or given twice."""
    found = set()
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        option, is_attached, _ = word.replace("_", "-").partition("=")
        if not option.startswith("--") or option[2:].rpartition(".")[2] not in LISTS:
            continue
        if not is_attached and following.startswith("--"):
            raise UserError(f"{option}: give one value or more")
        if option in found:
            raise UserError(f"{option} is given twice; give all values at once: {option} A B")
        found.add(option)


class _RejectedError(Exception):
    """Carries a UserError through tyro, which would catch a ValueError."""

    def __init__(self, error: UserError) -> None:
        self.error = error


def _rules(hidden: Collection[str] = ()) -> ConstructorRegistry:
    """Return rules for tyro: hide fields, and list the sections that change most first."""
    registry = ConstructorRegistry()
    sections = {kind: name for name, kind in get_type_hints(RunConfig).items()}

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
            default = tyro.MISSING if field.default is dataclasses.MISSING else field.default
            default = getattr(info.default, field.name, default)
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


def starting_point(arguments: list[str], command: str) -> tuple[str, RunConfig]:
    """Return the name and the config of the given preset, run folder or config file.

    The later of these override the earlier ones: preset, the model of --train.init-from, file.
    """
    if HELP & set(arguments):
        return "tiny", PRESETS["tiny"]
    word = arguments[0] if arguments and not arguments[0].startswith("-") else None
    path = _value(arguments, "--config")
    if word is not None and word not in PRESETS and Path(word).is_dir():
        if path is not None:
            raise UserError(f"give the run {word} or --config {path}, not both")
        path, word = word, None
    file = None if path is None else read_config_file(Path(path))
    preset = file.preset if file is not None and word is None else word
    base = None if preset is None else find_preset(preset)
    init_from = _value(arguments, "--train.init-from")
    if file is not None:
        init_from = init_from or file.values.get("train", {}).get("init_from")
    if isinstance(init_from, str) and not (file is not None and file.has_model):
        base = _with_initial_model(base, init_from)
    if file is not None:
        return file.name, file.apply(base)
    if preset is None or base is None:
        use = f"give a PRESET first, or --config FILE: tvq {command} PRESET ..."
        raise UserError(f"{use}; PRESET is one of {', '.join(PRESETS)}, or a run folder")
    return preset, base


def _value(arguments: list[str], option: str) -> str | None:
    """Return the last value of an option, which determines the defaults of others."""
    found = None
    for argument, following in zip_longest(arguments, arguments[1:]):
        name, is_attached, value = argument.partition("=")
        if name.replace("_", "-") == option:
            found = value if is_attached else following
    return found


def _with_initial_model(base: RunConfig | None, init_from: str) -> RunConfig:
    """Return a config with the model of a run or file, and without a tokenizer of its own."""
    from transformer_vq.training.loading import InitialModel

    model: ModelConfig = InitialModel(init_from).config
    base = RunConfig(model) if base is None else base
    is_bytes = model.vocab_size in (256, 257)  # without and with an end of documents
    ends = model.vocab_size == 257 if is_bytes else base.data.end_of_document
    data = dataclasses.replace(base.data, tokenizer=None, end_of_document=ends)
    return dataclasses.replace(base, model=model, data=data)


def option_classes() -> dict[str, Any]:
    """Return the option dataclass of every command."""
    from transformer_vq.cli.main import COMMANDS

    return {
        name: getattr(import_module(module), f"{name.title()}Options")
        for name, (module, _) in COMMANDS.items()
    }


def print_completion(shell: str) -> None:
    """Print tyro's completion script for all commands; bash also completes file names."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            option_classes(), prog="tvq", args=["--tyro-print-completion", shell], registry=_rules()
        )
    except SystemExit as stop:
        if stop.code:
            raise
        if shell == "bash":
            print('_tvq() { _tyro_tvq; [[ "${COMPREPLY[*]}" ]] || COMPREPLY=(); }')
            print("complete -o default -F _tvq tvq")
