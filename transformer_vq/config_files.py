"""Config files in TOML or JSON.

A file has a table per section of a run config, and optionally the name of a preset to start from:

    preset = "tiny"

    [train]
    steps = 500
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from transformer_vq.checks import nearest, shown
from transformer_vq.config import ModelConfig, RunConfig
from transformer_vq.errors import UserError
from transformer_vq.presets import PRESETS

SECTIONS = ("data", "train", "model", "optim", "parallel")
"""Sections of a run config; those that change most come first."""
ABOUT_RUN = {"format", "tokenizer_sha256", "sha256"}
"""Keys of a run's config.json that are not settings."""
NONE = "None"  # TOML has no null
COMMENT_WIDTH = 88


class ConfigFileError(UserError):
    """An invalid config file; the message names keys as they are written in the file."""


@dataclass(frozen=True)
class ConfigFile:
    """The settings that a config file gives, by section."""

    path: Path
    preset: str | None
    values: dict[str, dict[str, Any]]

    @property
    def name(self) -> str:
        """The name of the file, or that of the run folder that it is in."""
        is_of_run = self.path.name == "config.json"
        return self.path.absolute().parent.name if is_of_run else self.path.stem

    @property
    def has_model(self) -> bool:
        """Whether the file gives every setting of the model, as the config of a run does."""
        return self.values.get("model", {}).keys() >= {field.name for field in fields(ModelConfig)}

    def apply(self, base: RunConfig | None = None) -> RunConfig:
        """Return `base` with these settings; None starts from the preset of the file, if any."""
        if base is None and self.preset is not None:
            base = find_preset(self.preset)
        values = {} if base is None else base.to_dict()
        for section, settings in self.values.items():
            values[section] = values.get(section, {}) | settings
        try:
            return RunConfig.from_dict(values)
        except UserError as error:
            hint = '; a file may start from a preset: preset = "tiny"' if base is None else ""
            raise ConfigFileError(f"{self.path}: {error}{hint}") from error


def find_preset(name: str) -> RunConfig:
    """Return a preset by its name."""
    if name not in PRESETS:
        hint = nearest(name, PRESETS)
        raise UserError(f"unknown preset {name!r}{hint}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def read_config_file(path: Path) -> ConfigFile:
    """Read a config file, or the config.json of a run folder; raise ConfigFileError if invalid.

    Keys may be written with dashes. `None` written as text means None.
    """
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigFileError(f"{path.parent} is not a run folder (no config.json)")
    parse = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix.lower())
    if parse is None:
        raise ConfigFileError(f"{path} is not a config file; use a .toml or .json file")
    if not path.exists():
        raise ConfigFileError(f"{path} does not exist; `tvq config tiny > my.toml` writes one")
    try:
        values: Any = parse(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigFileError(f"{path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(values, dict):
        values = {shown(values): None}
    preset = values.pop("preset", None)
    found: dict[str, dict[str, Any]] = {}
    for section, settings in values.items():
        if section in ABOUT_RUN:
            continue
        if not isinstance(settings, dict):
            names = ", ".join(SECTIONS)
            raise ConfigFileError(f"{path}: {section} is not a section with options; use {names}")
        found[section] = {
            k.replace("-", "_"): x if x != NONE else None for k, x in settings.items()
        }
    return ConfigFile(path, None if preset is None else str(preset), found)


def config_text(config: RunConfig, title: str = "") -> str:
    """Return a TOML file that `read_config_file` reads back; comments explain every setting."""
    lines = [f"# {line}" for line in title.splitlines()]
    for section in SECTIONS:
        part = getattr(config, section)
        lines += ["", "", f"[{section}]"]
        kind: Any = type(part)
        hints, docs = get_type_hints(kind), field_docs(kind)
        for field in fields(part):
            text, hint, value = docs[field.name], hints[field.name], getattr(part, field.name)
            if get_origin(hint) is Literal:
                text += f" One of {', '.join(get_args(hint))}."
            wrapped = textwrap.wrap(text, COMMENT_WIDTH, break_on_hyphens=False)
            is_unset = value is None and field.default is None
            lines += ["", *(f"# {line}" for line in wrapped)]
            lines.append(f"{'# ' if is_unset else ''}{field.name} = {_toml(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)  # TOML has the numbers and strings of JSON


@cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases, on one line."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
