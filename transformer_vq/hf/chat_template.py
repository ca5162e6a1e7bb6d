"""Chat templates: Jinja files that convert messages to text, for `apply_chat_template`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformer_vq.data.hf_tokenizer import TEMPLATE_FILE
from transformer_vq.errors import UserError
from transformer_vq.files import write_text

Template = str | dict[str, str] | list[dict[str, str]]
"""One template, or several with names; transformers reads all of these."""


def read_chat_template(path: Path) -> str:
    """Return the template in a file; raise UserError if it cannot be read or is not valid Jinja."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a Jinja file") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a Jinja file") from None
    if not text.strip():
        raise UserError(f"{path} is empty; give a Jinja file")
    check_syntax(path, text)
    return text


def check_syntax(path: Path, text: str) -> None:
    """Raise UserError if a template is not valid Jinja."""
    from jinja2 import TemplateSyntaxError

    from transformer_vq.data.chat_template import compile_chat_template

    try:
        compile_chat_template(text)
    except TemplateSyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.message}; fix the template") from None


def writes_special_tokens(template: Template | None, names: Iterable[str]) -> bool:
    """Return whether a template contains special tokens, by variable or by name."""
    wanted = ("bos_token", "eos_token", "pad_token", *names)
    return any(name in text for text in _texts(template) for name in wanted)


def write_chat_template(template: Template | None, folder: Path) -> dict[str, Any]:
    """Write a template as transformers does; return what belongs in tokenizer_config.json."""
    if isinstance(template, str):
        write_text(folder / TEMPLATE_FILE, template)
        return {}
    return {} if template is None else {"chat_template": template}


def _texts(template: Template | None) -> list[str]:
    if isinstance(template, str):
        return [template]
    if isinstance(template, dict):
        return list(template.values())
    return [named["template"] for named in template or ()]
