"""GET /docs: a description of the API without resources from other servers."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.95em ui-monospace, monospace; }
pre { overflow-x: auto; padding: 0.75rem; background: #8882; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 0.1rem 1rem 0.1rem 0; vertical-align: top; }
:root { color-scheme: light dark; }
"""


def add_docs(app: FastAPI) -> None:
    """Add the page; /openapi.json has the same for programs."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))


def page(schema: dict[str, Any]) -> str:
    """Return the page for an OpenAPI schema."""
    parts = [
        f"<h1>{escape(schema['info']['title'])}: API</h1>",
        f"<p>{escape(schema['info']['description'])} "
        "<a href='openapi.json'>OpenAPI schema</a> for programs.</p>",
    ]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            text = operation.get("description", "")
            parts += [f"<p>{escape(line)}</p>" for line in text.split("\n\n") if line]
            parts.append(_fields(operation, schema))
    body = "\n".join(filter(None, parts))
    title = escape(schema["info"]["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}: API</title>"
        "<meta name=viewport content='width=device-width'>"
        f"<style>{STYLE}</style><body>\n{body}\n</body></html>\n"
    )


def _fields(operation: dict[str, Any], schema: dict[str, Any]) -> str:
    """Return a table with the fields of the body of a request, if it has one."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    if not name:
        return ""
    fields = schema["components"]["schemas"][name].get("properties", {})
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code><td>{escape(_kind(value))}"
        f"<td>{escape(str(value.get('default', '')))}"
        for field, value in fields.items()
    )
    return f"<table><tr><th>field<th>type<th>default{rows}</table>"


def _kind(value: dict[str, Any]) -> str:
    """Return the type of a field in a few words."""
    if "anyOf" in value:
        return " or ".join(_kind(x) for x in value["anyOf"] if x.get("type") != "null")
    if value.get("type") == "array":
        return f"list of {_kind(value.get('items', {}))}"
    return str(value.get("type") or value.get("$ref", "any").rpartition("/")[2])
