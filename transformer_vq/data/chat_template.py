"""Chat templates: Jinja files that convert messages to text.

Export and server use the one environment here, which has the settings, the extensions and the
functions of transformers, so that a template that loads in one loads in the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transformer_vq.data.paths import error_reason
from transformer_vq.errors import UserError

Templates = str | dict[str, str] | list[dict[str, str]]
"""One template, or several with names; transformers reads all of these."""


class _Generation(Extension):
    """{% generation %}: marks what the model wrote, for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def compile_chat_template(text: str) -> Template:
    """Return a template; raise jinja2.TemplateSyntaxError if it is not valid."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(text)


def read_chat_template(path: Path) -> str:
    """Return the template in a file; raise UserError if it cannot be read or is not valid Jinja."""
    try:
        text = path.read_text("utf-8")
        compile_chat_template(text)
    except TemplateSyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.message}; fix the template") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error_reason(error)}; give a Jinja file") from None
    return text


def writes_special_tokens(templates: Templates | None, names: Iterable[str]) -> bool:
    """Return whether a template contains special tokens, by variable or by name."""
    wanted = ("bos_token", "eos_token", "pad_token", *names)
    text = "" if templates is None else json.dumps(templates, ensure_ascii=False)
    return any(name in text for name in wanted)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
