"""Line charts as SVG for HTML pages: no dependencies, colors from CSS, readable on a phone.

The page defines the classes: `line-0` to `line-3`, `faint`, `grid`, `tick` and `key-0` to `key-3`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 36
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_POINTS = 300
MAX_DOTS = 40


@dataclass(frozen=True)
class Line:
    """A line of a chart; points that are not finite are left out."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: int = 0
    """Number of the CSS class."""
    is_faint: bool = False
    has_dots: bool = False

    def points(self) -> list[tuple[float, float]]:
        """Return the points to draw: at most MAX_POINTS, with the last one."""
        found = [
            (float(x), float(y))
            for x, y in zip(self.xs, self.ys, strict=True)
            if math.isfinite(x) and math.isfinite(y)
        ]
        every = max(1, math.ceil(len(found) / MAX_POINTS))
        return found[(len(found) - 1) % every :: every] if found else []


@dataclass(frozen=True)
class _Scale:
    """A linear map from values to places in the chart."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    y_limits: tuple[float | None, float | None] = (None, None),
    log_x: bool = False,
) -> str:
    """Return a figure with a title, a key and the lines; an empty text if there are no points.

    y_limits: ends of the y axis; None uses the lowest and highest value. log_x: use powers of two.
    """
    points = [line.points() for line in lines]
    drawn = [(line, found) for line, found in zip(lines, points, strict=True) if found]
    if not drawn:
        return ""
    transform: Callable[[float], float] = (lambda x: math.log2(max(x, 1))) if log_x else float
    xs = [transform(x) for _, found in drawn for x, _ in found]
    ys = [y for _, found in drawn for _, y in found]
    x_scale = _Scale(*_limits(min(0, *xs), max(xs), pad=False), LEFT, LEFT + PLOT_WIDTH)
    low = min(ys) if y_limits[0] is None else y_limits[0]
    high = max(ys) if y_limits[1] is None else y_limits[1]
    y_scale = _Scale(*_limits(low, high, pad=None in y_limits), TOP + PLOT_HEIGHT, TOP)
    parts = [*_y_axis(y_scale), *_x_axis(x_scale, log_x, x_label)]
    parts.append(
        f'<svg x="{LEFT - 4}" y="{TOP - 4}" width="{PLOT_WIDTH + 8}" height="{PLOT_HEIGHT + 8}" '
        f'viewBox="{LEFT - 4} {TOP - 4} {PLOT_WIDTH + 8} {PLOT_HEIGHT + 8}">'
    )
    for line, found in drawn:
        places = [(x_scale(transform(x)), y_scale(y)) for x, y in found]
        parts += _drawing(line, found, places)
    keys = [
        f'<span class="key-{line.color}{" faint" if line.is_faint else ""}">{escape(line.label)}'
        "</span>"
        for line, _ in drawn
        if line.label
    ]
    name = escape(title)
    return (
        f"<figure><figcaption><b>{name}</b>{''.join(keys)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        f"{''.join(parts)}</svg></svg></figure>"
    )


def _drawing(
    line: Line, points: list[tuple[float, float]], places: list[tuple[float, float]]
) -> list[str]:
    kind = f"line-{line.color}{' faint' if line.is_faint else ''}"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline class="{kind}" points="{path}"/>']
    if (line.has_dots and len(points) <= MAX_DOTS) or len(points) == 1:
        parts += [
            f'<circle class="dot-{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
            f"<title>{number(point[0])}: {number(point[1])}</title></circle>"
            for point, (x, y) in zip(points, places, strict=True)
        ]
    return parts


def _y_axis(scale: _Scale) -> list[str]:
    parts = []
    for value in ticks(scale.low, scale.high):
        y = scale(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{LEFT + PLOT_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number(value)}'
            "</text>"
        )
    return parts


def _x_axis(scale: _Scale, is_log: bool, label: str) -> list[str]:
    y = TOP + PLOT_HEIGHT
    values = ticks(scale.low, scale.high)
    if is_log:
        values = [value for value in values if value == int(value)]
    parts = []
    for value in values:
        text = f"{2**value:,.0f}" if is_log else number(value)
        parts.append(
            f'<text class="tick" x="{scale(value):.1f}" y="{y + 17}" text-anchor="middle">{text}'
            "</text>"
        )
    x = LEFT + PLOT_WIDTH
    parts.append(
        f'<text class="tick" x="{x}" y="{y + 33}" text-anchor="end">{escape(label)}</text>'
    )
    return parts


def _limits(low: float, high: float, pad: bool) -> tuple[float, float]:
    """Return the ends of an axis, which must differ."""
    if not high > low:
        margin = abs(low) * 0.1 or 0.5
        return low - margin, low + margin
    margin = 0.04 * (high - low) if pad else 0.0
    return low - margin, high + margin


def ticks(low: float, high: float, n: int = 6) -> list[float]:
    """Return about n round numbers from low to high."""
    rough = (high - low) / n
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number for a tick label: 8,192, 125k, 0.5 or 3e-4."""
    if value and abs(value) < 0.01:
        digits, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(exponent)}"
    if abs(value) >= 1e4:
        unit, letter = (1e6, "M") if abs(value) >= 1e6 else (1e3, "k")
        return f"{value / unit:,.4g}{letter}"
    return f"{value:,.4g}" if value % 1 else f"{value:,.0f}"
