"""The HTML page of a report: style sheet, and small functions for its elements.

Everything that comes from files or users passes through `text`, which escapes it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

LONG = 24
"""Cells with more characters may be broken anywhere."""
STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --ink: #1f2328; --muted: #5b636d; --rule: #e3e5e8;
  --c0: #0072b2; --c1: #d55e00; --c2: #00815f; --c3: #9a3d8a; --good: #1a7f4b; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --card: #1c2025; --ink: #e4e7ea; --muted: #9aa3ad; --rule: #30363d;
    --c0: #5bb0e8; --c1: #f0935a; --c2: #4cc3a0; --c3: #d58cc7; --good: #5cc48d; --bad: #f08b83;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 64rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.75rem 0 0.75rem; }
h3 { font-size: 0.95rem; margin: 1.25rem 0 0.5rem; }
p { margin: 0.4rem 0; font-size: 0.95rem; }
.muted, small { color: var(--muted); }
.status {
  font-size: 0.8rem; font-weight: 600; border: 1px solid; border-radius: 1rem;
  padding: 0.1rem 0.6rem; vertical-align: 0.3rem; white-space: nowrap; color: var(--c1);
}
.status.finished, .status.running { color: var(--good); }
.status.corrupt { color: var(--bad); }
.figures {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: 0.75rem;
  margin: 1.75rem 0 0; padding: 0;
}
.figures div, figure, .sample, .table {
  background: var(--card); border: 1px solid var(--rule); border-radius: 0.5rem;
}
.figures div { padding: 0.7rem 0.9rem; }
.figures dt { font-size: 0.8rem; color: var(--muted); }
.figures dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures small { display: block; font-size: 0.75rem; font-weight: 400; }
.charts {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
  gap: 0.75rem; margin: 0.75rem 0;
}
figure { margin: 0; padding: 0.8rem 0.9rem 0.5rem; break-inside: avoid; }
figcaption {
  display: flex; flex-wrap: wrap; gap: 0 0.75rem; font-size: 0.85rem; margin-bottom: 0.4rem;
}
figcaption span { white-space: nowrap; font-weight: 600; }
figcaption span.faint { font-weight: 400; opacity: 0.8; }
svg { display: block; width: 100%; height: auto; overflow: hidden; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
polyline.faint { stroke-width: 1.2; opacity: 0.6; }
.grid { stroke: var(--rule); stroke-width: 1; }
.tick { fill: var(--muted); font-size: 12px; font-variant-numeric: tabular-nums; }
.line-0 { stroke: var(--c0); } .dot-0 { fill: var(--c0); } .key-0 { color: var(--c0); }
.line-1 { stroke: var(--c1); } .dot-1 { fill: var(--c1); } .key-1 { color: var(--c1); }
.line-2 { stroke: var(--c2); } .dot-2 { fill: var(--c2); } .key-2 { color: var(--c2); }
.line-3 { stroke: var(--c3); } .dot-3 { fill: var(--c3); } .key-3 { color: var(--c3); }
.table { overflow-x: auto; }
.table + .table { margin-top: 0.75rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.875rem; }
th, td { text-align: left; padding: 0.4rem 0.9rem; border-top: 1px solid var(--rule); }
thead th { border-top: 0; font-weight: 600; color: var(--muted); font-size: 0.8rem; }
td { vertical-align: top; }
td:first-child { white-space: nowrap; }
.long { overflow-wrap: anywhere; min-width: 14rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: 0.8rem; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.45; }
.sample { padding: 0.8rem 0.9rem; margin-bottom: 0.75rem; max-height: 26rem; overflow-y: auto; }
.sample b { color: var(--c0); font-weight: 600; }
.sample img { max-width: 100%; image-rendering: pixelated; display: block; }
details { margin-top: 0.75rem; }
summary { cursor: pointer; color: var(--muted); font-size: 0.875rem; }
details pre { margin-top: 0.6rem; }
footer { margin-top: 3rem; font-size: 0.8rem; color: var(--muted); }
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --muted: #555; --rule: #ccc; }
  main { max-width: none; padding: 0; }
  .sample { max-height: none; }
  h2 { break-after: avoid; }
  tr, .figures div { break-inside: avoid; }
}
"""


def page(title: str, body: Iterable[str]) -> str:
    """Return a complete HTML page, which needs no other file and no network."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def text(value: object) -> str:
    """Return any value as escaped text; characters that cannot be shown are replaced."""
    shown = "".join(x if x.isprintable() or x in "\n\t" else "\ufffd" for x in str(value))
    return html.escape(shown)


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; an empty text if it has no content."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>" if content else ""


def table(
    heads: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()
) -> str:
    """Return a table; an empty text if it has no rows. numbers: columns that are aligned right."""

    def row(tag: str, cells: Sequence[object]) -> str:
        kinds = [_cell_class(str(x), i in numbers) for i, x in enumerate(cells)]
        found = [f"<{tag}{k}>{text(x)}</{tag}>" for x, k in zip(cells, kinds, strict=True)]
        return f"<tr>{''.join(found)}</tr>"

    body = "\n".join(row("td", cells) for cells in rows)
    if not body:
        return ""
    head = f"<thead>{row('th', heads)}</thead>" if any(heads) else ""
    return f'<div class="table"><table>{head}<tbody>\n{body}\n</tbody></table></div>'


def _cell_class(content: str, is_number: bool) -> str:
    if is_number:
        return ' class="number"'
    return ' class="long"' if len(content) > LONG else ""


def figures(values: Iterable[tuple[str, str, str]]) -> str:
    """Return the key figures: name, value and a remark each; those without a value are left out."""
    found = [
        f"<div><dt>{text(name)}</dt><dd>{text(value)}"
        + (f"<small>{text(remark)}</small>" if remark else "")
        + "</dd></div>"
        for name, value, remark in values
        if value
    ]
    return f'<dl class="figures">{"".join(found)}</dl>'


def note(message: str) -> str:
    """Return a paragraph of explanation."""
    return f'<p class="muted">{text(message)}</p>'


def details(title: str, content: str) -> str:
    """Return a block that is closed at first."""
    return f"<details><summary>{text(title)}</summary><pre>{text(content)}</pre></details>"
