"""How tyro shows the options of a command in --help."""

from __future__ import annotations

import dataclasses
import io
import shutil
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, get_origin

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from transformer_vq.cli.arguments import value_type
from transformer_vq.cli.messages import is_flag
from transformer_vq.config import RunConfig
from transformer_vq.config_files import SECTIONS

METAVARS: dict[Any, str] = {str: "STR", int: "INT", float: "FLOAT", Path: "PATH"}


class HelpText(io.StringIO):
    """A buffer for --help; tyro wraps the help texts of options, but not the description."""

    def __init__(self) -> None:
        super().__init__()
        self._output = sys.stdout  # determines colors and the characters of frames

    def isatty(self) -> bool:
        return self._output.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._output.encoding

    def wrapped(self) -> str:
        """Return the text with its description wrapped to the width of the terminal."""
        width = shutil.get_terminal_size().columns
        fill = textwrap.TextWrapper(width, break_on_hyphens=False).fill
        lines = self.getvalue().split("\n")
        return "\n".join(fill(x) if x[:1].isalpha() else x for x in lines)


def option_rules(hidden: Collection[str] = ()) -> ConstructorRegistry:
    """Return rules for tyro: sections in order, help texts without line breaks in a sentence.

    hidden: fields of a run config, such as "model.n_code", that are not options; they keep their
    defaults.
    """
    registry = ConstructorRegistry()
    is_nested = False

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_nested
        if is_nested or not dataclasses.is_dataclass(info.type):
            return None
        is_nested = True  # apply tyro's own rule
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_nested = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        found = [_as_flag(_with_metavar(_with_help(field))) for field in spec.fields]
        if info.type is RunConfig:
            found.sort(key=lambda field: SECTIONS.index(field.name))
        section = _section(info.type)
        shown = [_hidden(x) if f"{section}.{x.name}" in hidden else x for x in found]
        return dataclasses.replace(spec, fields=tuple(shown))

    return registry


def _section(kind: Any) -> str:
    """Return the section of a run config that has this type, or an empty string."""
    names = {RunConfig.__annotations__[name]: name for name in SECTIONS}
    return names.get(kind.__name__, "")


def _hidden(field: StructFieldSpec) -> StructFieldSpec:
    kind: Any = Annotated[field.type, tyro.conf.Suppress]
    return dataclasses.replace(field, type=kind)


def _with_metavar(field: StructFieldSpec) -> StructFieldSpec:
    """Show an option that takes any number of values as `--lengths INT ...`."""
    hint: Any = field.type
    inner = value_type(hint)
    if inner not in METAVARS or get_origin(hint) is not tuple:
        return field
    name = "PATH" if field.name.endswith("path") else METAVARS[inner]
    mark = tyro.conf.arg(metavar=f"{name} ...", help_behavior_hint=_default_text)
    kind: Any = Annotated[hint, mark]
    return dataclasses.replace(field, type=kind)


def _as_flag(field: StructFieldSpec) -> StructFieldSpec:
    """Make an option with the values true, false and None a pair of flags; None is its default."""
    if field.type is bool or not is_flag(field.type):
        return field
    mark = tyro.conf.arg(
        help_behavior_hint="(default: automatic)" if field.default is None else None
    )
    kind: Any = Annotated[field.type, tyro.conf.DisallowNone, mark]
    return dataclasses.replace(field, type=kind)


def _default_text(default: str) -> str:
    return f"(default: {default or 'none'})"


def _with_help(field: StructFieldSpec) -> StructFieldSpec:
    """Join the lines of a help text, except after the end of a sentence."""

    def joined() -> str | None:
        text = field.helptext() if callable(field.helptext) else field.helptext
        if text is None:
            return None
        return text.replace(".\n", "\0").replace("\n", " ").replace("\0", ".\n")

    return dataclasses.replace(field, helptext=joined)
