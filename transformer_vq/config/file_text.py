"""Write config files in TOML, YAML or JSON, with the help texts as comments."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from transformer_vq.config.files import NONE, SECTIONS, FileFormat, config_fields
from transformer_vq.config.run import RunConfig

COMMENT_WIDTH = 88


def config_text(
    config: RunConfig,
    kind: FileFormat = "toml",
    *,
    title: str = "",
    preset: str | None = None,
    base: RunConfig | None = None,
) -> str:
    """Return a config file that `read_config_file` reads back.

    TOML and YAML explain every option in a comment. title: a comment at the top. preset: written
    as the preset to start from. base: write only the settings that differ from it, and without a
    preset those that have no default.
    """

    def is_written(setting: _Setting) -> bool:
        is_required = preset is None and setting.default is MISSING
        return base is None or is_required or _differs(setting, base)

    found = {s: [x for x in _settings(config, s) if is_written(x)] for s in SECTIONS}
    found = {section: settings for section, settings in found.items() if settings}
    if kind == "json":
        first = {} if preset is None else {"preset": preset}
        plain = {section: {x.key: x.value for x in found[section]} for section in found}
        return json.dumps(first | plain, indent=2) + "\n"
    lines = [f"# {line}" for line in title.splitlines()]
    if preset is not None:
        lines += ["", f"preset = {_toml(preset)}" if kind == "toml" else f"preset: {_yaml(preset)}"]
    for section, settings in found.items():
        lines += ["", "", f"[{section}]" if kind == "toml" else f"{section}:"]
        for setting in settings:
            lines += ["", *_commented(setting, kind)]
    return "\n".join(lines).lstrip("\n") + "\n"


@dataclass(frozen=True)
class _Setting:
    section: str
    key: str
    value: Any
    default: Any
    help: str


def _settings(config: RunConfig, section: str) -> Iterator[_Setting]:
    part = getattr(config, section)
    kind: Any = type(part)
    helps = _help_texts(kind)
    for name, field, hint in config_fields():
        if name.startswith(f"{section}."):
            key = field.name
            choices = _choices(hint)
            text = helps.get(key, "") + (f" One of {', '.join(choices)}." if choices else "")
            yield _Setting(section, key, getattr(part, key), field.default, text)


def _differs(setting: _Setting, base: RunConfig) -> bool:
    return bool(setting.value != getattr(getattr(base, setting.section), setting.key))


def _commented(setting: _Setting, kind: FileFormat) -> list[str]:
    indent = "" if kind == "toml" else "  "
    width = COMMENT_WIDTH - len(indent)
    lines = [
        f"{indent}# {line}" for line in textwrap.wrap(setting.help, width, break_on_hyphens=False)
    ]
    if kind == "yaml":
        return [*lines, f"{indent}{setting.key}: {_yaml(setting.value)}"]
    if setting.value is None and setting.default is None:
        return [*lines, f"# {setting.key} = {_toml(None)}"]
    return [*lines, f"{setting.key} = {_toml(setting.value)}"]


def _toml(value: Any) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return _scalar(value)


def _yaml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    # Numbers and strings are those of JSON, except that DEL must be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _choices(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


@cache
def _help_texts(kind: type) -> dict[str, str]:
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
