"""The plot of latency by load: one colour per server, p50 solid and p99 dashed, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

# For plots of bertie.evaluation.plots that stand alone.
STYLE = """<style>
svg { background: #fff; } text { fill: #1c2024; font: 11px system-ui, sans-serif; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .name { fill: #667079; } .grid { stroke: #dde1e5; }
polyline { fill: none; stroke-width: 1.8; } line.a, line.b { stroke-width: 2; }
.a { stroke: #1f5fa8; } .b { stroke: #b8500b; } .faint { stroke: #8a949c; stroke-width: 1.4; }
circle.a { fill: #1f5fa8; } circle.b { fill: #b8500b; } circle.faint { fill: #8a949c; }
</style><rect width="640" height="300" fill="#fff"/>"""

_COLOURS = ("#1f5fa8", "#b8500b", "#2e7d4f", "#7a3e9d", "#8a949c", "#a8891f")
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 18, 62, 48
_LOST = 0.01  # a share of requests refused or failed that is shown
_STYLE = """<style>
text { fill: #1c2024; font: 12px system-ui, sans-serif; } .small { font-size: 11px; fill: #667079; }
.end { text-anchor: end; } .mid { text-anchor: middle; } .grid { stroke: #e3e7ea; } .minor { stroke: #f1f3f5; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; } .dashed { stroke-dasharray: 5 4; stroke-width: 1.6; }
</style>"""


def latency_plot(rows: Sequence[dict[str, Any]], names: dict[str, str] | None = None) -> str:
    """Plot the latency of successful requests by offered load, as a self-contained SVG.

    Args:
        rows: with server, offered (requests per second), p50_ms, p99_ms, refused and failed (shares).
        names: what to call a server in the legend.
    """
    servers = list(dict.fromkeys(row["server"] for row in rows))
    values = [row[key] for row in rows for key in ("p50_ms", "p99_ms") if row[key]]
    decade = 10.0 ** math.floor(math.log10(min(values)))
    low, high = max(decade * step for step in (1, 2, 5) if decade * step <= min(values)), max(values) * 1.15
    right = max(row["offered"] for row in rows) * 1.03

    def x(load: float) -> float:
        return float(_LEFT + load / right * (_WIDTH - _LEFT - _RIGHT))

    def y(milliseconds: float) -> float:
        share = math.log(milliseconds / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    shapes = [*_grid(low, high, right, x, y)]
    for i, server in enumerate(servers):
        colour = _COLOURS[i % len(_COLOURS)]
        shapes += _legend(i, (names or {}).get(server, server), colour)
        points = sorted((row for row in rows if row["server"] == server), key=lambda row: float(row["offered"]))
        for key, style in (("p99_ms", "dashed"), ("p50_ms", "")):
            shown = [row for row in points if row[key]]
            path = " ".join(f"{x(row['offered']):.1f},{y(row[key]):.1f}" for row in shown)
            shapes.append(f'<polyline class="{style}" stroke="{colour}" points="{path}"/>')
            for row in shown:
                lost = row["refused"] + row["failed"]
                note = f"{server}, {row['offered']:.0f}/s: {key[:3]} {row[key]:.1f} ms"
                note += f", {lost:.1%} refused or failed" if lost else ""
                place = f'cx="{x(row["offered"]):.1f}" cy="{y(row[key]):.1f}" r="3.4"'
                paint = f'stroke="{colour}" stroke-width="1.6" fill="{"#fff" if lost > _LOST else colour}"'
                shapes.append(f"<circle {place} {paint}><title>{escape(note)}</title></circle>")
    alt = "Latency of successful requests by offered load: " + ", ".join(servers)
    shapes.append(
        f'<text class="small" x="{_LEFT}" y="{_TOP - 14}">solid: median, dashed: 99th percentile, '
        "hollow: more than 1% refused or failed</text>"
    )
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:{_WIDTH}px"'
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(alt)}" {size}>'
        f"<title>{escape(alt)}</title>{_STYLE}{ground}{''.join(shapes)}</svg>\n"
    )


def _grid(low: float, high: float, right: float, x: Any, y: Any) -> list[str]:
    shapes = []
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high))):
        for digit in range(1, 10):
            value = digit * 10.0**exponent
            if not low <= value <= high:
                continue
            kind = "grid" if digit in (1, 2, 5) else "minor"
            at = f'y1="{y(value):.1f}" y2="{y(value):.1f}"'
            shapes.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" {at}/>')
            if kind == "grid":
                shapes.append(f'<text class="end" x="{_LEFT - 7}" y="{y(value) + 4:.1f}">{value:,g}</text>')
    step = 10 ** math.floor(math.log10(right / 4))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if right / (step * factor) <= 8)
    for i in range(math.floor(right / step) + 1):
        at = x(i * step)
        shapes.append(f'<text class="mid" x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 17}">{i * step:,g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    shapes.append(f'<text class="mid" x="{middle:.0f}" y="{_HEIGHT - 10}">offered load, requests per second</text>')
    across = f"translate(15 {(_TOP + _HEIGHT - _BOTTOM) / 2:.0f}) rotate(-90)"
    shapes.append(f'<text class="mid" transform="{across}">latency, milliseconds</text>')
    return shapes


def _legend(i: int, name: str, colour: str) -> list[str]:
    x = _LEFT + 160 * (i % 4)
    y = 18 + 16 * (i // 4)
    return [
        f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2.4"/>',
        f'<text x="{x + 28}" y="{y + 4}">{escape(name)}</text>',
    ]
