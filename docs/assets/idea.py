"""Draw idea.svg: how a query attends to the cache, the window and its block.

Run `python docs/assets/idea.py` from any folder; the figure is written next to this file.
"""

from pathlib import Path

WIDTH, HEIGHT = 800, 364
INK, MUTED, LINE, PANEL = "#1f2328", "#57606a", "#8c959f", "#f3f5f7"
CODES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"]  # color-blind safe
OLDER = [0, 1, 0, 2, 3, 0, 1, 2, 0, 1, 3, 0]
WINDOW = [2, 0, 1, 3, 0, 1]
BLOCK = [1, 0, 3, 2]  # the last one is the query; two later tokens are masked
N_MASKED = 2
STEP, SIZE, STRIP = 28, 24, 66
WEIGHTS = [30, 17, 24, 9, 7, 15, 6, 10, 19, 8, 13, 22, 9, 17]
CAPTION = (
    "A code with n tokens and mean value m contributes n exp(q&#183;c) m: "
    "exactly what its tokens would."
)
VALUES = ["#d0d7de", "#6e7781", "#afb8c1", "#424a53", "#8c959f"]


def text(x: float, y: float, content: str, size: int = 13, **style: str) -> str:
    """Return a line of text."""
    attributes = {"fill": INK} | {key.replace("_", "-"): value for key, value in style.items()}
    joined = " ".join(f'{key}="{value}"' for key, value in attributes.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {joined}>{content}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, **style: str) -> str:
    """Return a rectangle."""
    attributes = {"fill": fill} | {key.replace("_", "-"): value for key, value in style.items()}
    joined = " ".join(f'{key}="{value}"' for key, value in attributes.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {joined}/>'


def arrow(path: str, color: str = LINE, marker: str = "head") -> str:
    """Return a line with an arrowhead."""
    style = f'stroke="{color}" stroke-width="1.8" fill="none" marker-end="url(#{marker})"'
    return f'<path d="{path}" {style}/>'


def group(x: float, width: float, heading: str) -> list[str]:
    """Return the panel of a group of tokens with its heading."""
    return [
        box(x - 8, 24, width + 16, 78, PANEL, rx="8"),
        text(x, 48, heading, font_weight="600"),
    ]


def draw() -> str:
    """Return the figure as SVG text."""
    older_x, window_x, block_x = 28, 400, 600
    parts = [box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "#ffffff", rx="12", stroke="#d0d7de")]

    # Tokens: older ones are filled with the color of their code, recent ones carry a dot.
    parts += group(older_x, 12 * STEP - 4, "older tokens, colored by code")
    for i, code in enumerate(OLDER):
        parts.append(box(older_x + i * STEP, STRIP, SIZE, SIZE, CODES[code], rx="4"))
    parts += group(window_x, 6 * STEP - 4, "window: last L tokens")
    parts += group(block_x, 6 * STEP - 4, "current block")
    recent = [(window_x + i * STEP, code) for i, code in enumerate(WINDOW)]
    recent += [(block_x + i * STEP, code) for i, code in enumerate(BLOCK)]
    for x, code in recent:
        parts.append(box(x, STRIP, SIZE, SIZE, "#ffffff", rx="4", stroke=LINE))
        parts.append(f'<circle cx="{x + 12}" cy="{STRIP + 12}" r="5" fill="{CODES[code]}"/>')
    query_x = block_x + (len(BLOCK) - 1) * STEP
    parts.append(box(query_x, STRIP, SIZE, SIZE, INK, rx="4"))
    style = {"text_anchor": "middle", "font_weight": "600", "fill": "#ffffff"}
    parts.append(text(query_x + 12, STRIP + 17, "q", 14, **style))
    for i in range(N_MASKED):
        x = query_x + (i + 1) * STEP
        parts.append(
            box(x + 0.5, STRIP + 0.5, 23, 23, "none", rx="4", stroke=LINE, stroke_dasharray="3 3")
        )

    # The cache: a row per code.
    top, left = 152, 52
    parts.append(arrow(f"M110,102 V{top - 12}"))
    parts.append(text(120, 128, "keys quantized, merged by code", fill=MUTED))
    parts.append(box(left - 16, top - 8, 300, 143, "#ffffff", rx="8", stroke=LINE))
    for x, heading in ((0, "code c"), (76, "count n"), (158, "mean value m")):
        parts.append(text(left + x, top + 14, heading, font_weight="600"))
    for row, color in enumerate(CODES):
        y = top + 24 + row * 27
        parts.append(f'<path d="M{left - 16},{y - 1} h300" stroke="#d8dee4"/>')
        parts.append(box(left, y + 5, 16, 16, color, rx="8"))
        parts.append(text(left + 76, y + 18, str(OLDER.count(row))))
        for i in range(5):
            cell = VALUES[(2 * row + i * (row + 1)) % 5]
            parts.append(box(left + 158 + i * 17, y + 6, 15, 14, cell, rx="2"))
    parts.append(text(left - 16, top + 156, "cache: S rows at any sequence length", fill=MUTED))

    # One softmax over S codes and the recent tokens.
    box_x, box_y, base = 412, 168, 246
    parts.append(arrow(f"M{left + 284},212 H{box_x - 6}"))
    parts.append(arrow(f"M484,102 V{box_y - 6}"))
    parts.append(text(494, 138, "uncompressed", fill=MUTED))
    parts.append(arrow(f"M628,102 V{box_y - 6}"))
    parts.append(arrow(f"M{query_x + 12},{STRIP + SIZE} V{box_y - 6}", INK, "query"))
    parts.append(text(query_x + 22, 138, "query", font_weight="600"))
    parts.append(box(box_x, box_y, 344, 112, "#ffffff", rx="8", stroke=INK, stroke_width="1.6"))
    parts.append(text(box_x + 14, box_y + 24, "one softmax", font_weight="600"))
    parts.append(f'<path d="M{box_x + 14},{base + 0.5} h316" stroke="{LINE}"/>')
    x = box_x + 20
    for i, weight in enumerate(WEIGHTS):
        fill = CODES[i] if i < len(CODES) else "#afb8c1"
        parts.append(box(x, base - weight, 14, weight, fill))
        x += 36 if i in (3, 9) else 19
    style = {"text_anchor": "middle", "fill": MUTED}
    for x, label in ((468, "codes"), (583, "window"), (701, "block")):
        parts.append(text(x, base + 20, label, **style))
    parts.append(arrow(f"M584,{box_y + 112} V{box_y + 134}", INK, "query"))
    parts.append(text(594, box_y + 132, "output of q", font_weight="600"))

    # The caption.
    parts.append(f'<path d="M20,320 H{WIDTH - 20}" stroke="#d8dee4"/>')
    parts.append(text(WIDTH / 2, 346, CAPTION, 15, text_anchor="middle"))
    size = {"width": WIDTH, "height": HEIGHT}
    return SVG.format(**size, ink=INK, line=LINE, marker=MARKER, body="\n".join(parts))


MARKER = 'viewBox="0 0 8 8" refX="5" refY="4" markerWidth="5" markerHeight="5" orient="auto"'
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"
 width="{width}" height="{height}" role="img" aria-labelledby="title description"
 font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif">
<title id="title">Attention with a cache of codes</title>
<desc id="description">The keys of older tokens are quantized. The cache keeps a count and a mean
value per code. A query attends to the cache, the window and its block under one softmax.</desc>
<defs>
<marker id="head" {marker}>
<path d="M0,0 L8,4 L0,8 z" fill="{line}"/></marker>
<marker id="query" {marker}>
<path d="M0,0 L8,4 L0,8 z" fill="{ink}"/></marker>
</defs>
{body}
</svg>
"""

if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
