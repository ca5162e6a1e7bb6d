"""Read config files in TOML, YAML or JSON.

A file has a table per section of a run config, and optionally the name of a preset to start from:

    preset = "tiny"

    [train]
    steps = 500
"""

from __future__ import annotations

import json
import re
import tomllib
import types
from collections.abc import Iterable
from dataclasses import MISSING, Field, asdict, dataclass, fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from transformer_vq.config.checks import shown
from transformer_vq.config.run import RunConfig
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import CorruptFileError, read_verified_json

FileFormat = Literal["toml", "yaml", "json"]
SECTIONS = ("data", "train", "model", "optim", "parallel")
"""Sections of a run config; those that change most come first."""
SUFFIXES: dict[str, FileFormat] = {
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
}
ABOUT_RUN = {"format", "tokenizer_sha256", "sha256"}
"""Keys of a run's config.json that are not settings."""
NONE = "None"  # TOML has no null; YAML reads None as text


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
        return self.path.absolute().parent.name if self._is_of_run else self.path.stem

    @property
    def _is_of_run(self) -> bool:
        return self.path.name == "config.json"

    def apply(self, base: RunConfig | None) -> RunConfig:
        """Return `base` with these settings; None starts from the defaults of all settings."""
        values = {} if base is None else {name: asdict(getattr(base, name)) for name in SECTIONS}
        for section, settings in self.values.items():
            values[section] = values.get(section, {}) | settings
        self._check_complete(values)
        try:
            return RunConfig.from_dict(values)
        except UserError as error:
            raise ConfigFileError(f"{self.path}: {error}") from error

    def _check_complete(self, values: dict[str, dict[str, Any]]) -> None:
        required = (name for name, field, _ in config_fields() if not _has_default(field))
        missing = []
        for name in required:
            section, _, key = name.partition(".")
            if key not in values.get(section, {}):
                missing.append(name)
        if missing:
            raise ConfigFileError(
                f"{self.path}: {', '.join(missing)} missing; give a value, or start from a preset: "
                'preset = "tiny"'
            )


def read_config_file(path: Path) -> ConfigFile:
    """Read a config file, or the config.json of a run folder; raise ConfigFileError if invalid.

    Keys may be written with dashes. `None` written as text means None.
    """
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigFileError(f"{path} is not a run folder (no config.json)")
        path = path / "config.json"
        _check_run_config(path)
    values = _parse(path)
    if not isinstance(values, dict):
        raise ConfigFileError(f"{path}: must contain sections such as [model], not {shown(values)}")
    hints = _types()
    preset: str | None = None
    found: dict[str, dict[str, Any]] = {}
    for section, settings in values.items():
        if section == "preset":
            if not isinstance(settings, str):
                raise ConfigFileError(f"{path}: preset={shown(settings)}: must be text")
            preset = settings
        elif section in SECTIONS:
            if not isinstance(settings, dict):
                raise ConfigFileError(
                    f"{path}: {section}={shown(settings)}: must be a section with options"
                )
            found[section] = {}
            for written, value in settings.items():
                key = written.replace("-", "_") if isinstance(written, str) else written
                name = f"{section}.{key}"
                if name not in hints:
                    raise ConfigFileError(f"{path}: {_unknown(section, key)}")
                if key in found[section]:
                    raise ConfigFileError(f"{path}: {name} is given twice")
                found[section][key] = None if value == NONE and _optional(hints[name]) else value
        elif section not in ABOUT_RUN:
            raise ConfigFileError(f"{path}: {_unknown('', section)}")
    return ConfigFile(path, preset, found)


def _unknown(section: str, key: object) -> str:
    """Return the message for a key that is not a setting, with a suggestion."""
    shown_key = key if isinstance(key, str) and key.isprintable() and len(key) < 80 else shown(key)
    name = f"{section}.{shown_key}" if section else str(shown_key)
    plain = str(key).replace("-", "_")
    names = ["preset", *SECTIONS]
    if section:
        names = [x.partition(".")[2] for x in _types() if x.startswith(f"{section}.")]
    close = get_close_matches(plain, names, n=1)
    if not close:  # a setting without its section, or in the wrong one
        close = [full for full in _types() if full.partition(".")[2] == plain]
    return f"{name} is not an option{f' (did you mean {close[0]}?)' if close else ''}"


def _check_run_config(path: Path) -> None:
    """Raise ConfigFileError if the config of a run is corrupt. A copy of it may be edited."""
    try:
        read_verified_json(path)
    except CorruptFileError as error:
        raise ConfigFileError(
            f"{error}; to use an edited config, copy it and give the file as --config"
        ) from error


def _parse(path: Path) -> Any:
    if not path.exists():
        raise ConfigFileError(f"{path} does not exist; `tvq config tiny > my.toml` writes one")
    kind = SUFFIXES.get(path.suffix.lower())
    if not path.is_file() or kind is None:
        raise ConfigFileError(
            f"{path} is not a config file; use a .toml, .yaml or .json file, or a run folder"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigFileError(f"{path} is not valid {kind.upper()}: it is not UTF-8") from None
    except OSError as error:
        raise ConfigFileError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        if kind == "toml":
            return tomllib.loads(text)
        if kind == "json":
            return json.loads(text, object_pairs_hook=_without_duplicates)
        return _parse_yaml(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise ConfigFileError(f"{path} is not valid {kind.upper()}: {error}") from error


def _without_duplicates(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} is given twice")
        found[key] = value
    return found


def _parse_yaml(text: str) -> Any:
    """Parse YAML; unlike PyYAML alone, reject duplicate keys and read 3e-4 as a number."""
    try:
        import yaml
    except ImportError:
        raise missing_extra("a YAML config file", "pyyaml") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers = yaml.SafeLoader.yaml_implicit_resolvers.copy()

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for number, key in enumerate(keys):
                if key in keys[:number]:
                    line = node.value[number][0].start_mark.line + 1
                    raise ValueError(f"line {line}: {shown(key)} is given twice")
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    number = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" (at line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(f"{error.problem}{where}") from error
    except (yaml.YAMLError, TypeError) as error:  # TypeError: a key that cannot be compared
        raise ValueError(str(error)) from error


@cache
def config_fields() -> tuple[tuple[str, Field[Any], Any], ...]:
    """Return all settings of a run config: name such as model.n_code, field and type."""
    hints = get_type_hints(RunConfig)
    found = []
    for section in SECTIONS:
        kinds = get_type_hints(hints[section], include_extras=True)
        found += [(f"{section}.{f.name}", f, kinds[f.name]) for f in fields(hints[section])]
    return tuple(found)


@cache
def _types() -> dict[str, Any]:
    return {name: hint for name, _, hint in config_fields()}


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _optional(hint: Any) -> bool:
    hint = hint.__origin__ if get_origin(hint) is Annotated else hint
    return get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)
