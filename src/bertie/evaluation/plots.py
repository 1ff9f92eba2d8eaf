"""Small SVG plots in the colours of the page's stylesheet, so that they follow its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bertie.evaluation.calibration import Bin
from bertie.evaluation.intervals import Score

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 44


STYLES = ("a", "b", "c", "d")  # of lines, in the stylesheet


@dataclass(frozen=True, slots=True)
class Line:
    """A line plot; `style` is one of the stylesheet's classes a, b, c, d and faint.

    `band` are the ends of the interval at each point.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "a"
    dots: bool = False
    band: Sequence[tuple[float, float]] = ()


def lines(alt: str, series: Sequence[Line], x: str, y: str, *, from_zero: bool = False) -> str:
    """Plot lines over shared axes; empty unless a line has two points. `from_zero`: the y axis begins at 0."""
    points = [point for line in series for point in line.points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if not any(len(line.points) > 1 for line in series) or not points:
        return ""
    ends = [end for line in series for pair in line.band for end in pair if math.isfinite(end)]
    axes = _Axes([p[0] for p in points], [*(p[1] for p in points), *ends, *([0.0] if from_zero else [])])
    shapes = [shape for line in series for shape in (*_band(line, axes), *_line(line, axes))]
    return _svg(alt, [*axes.draw(x, y), *shapes, *_legend(series)])


def intervals(alt: str, rows: Sequence[tuple[str, Score, str]], x: str) -> str:
    """One row per name, from the top: a score with its interval, on a shared axis. Rows: name, score, style."""
    rows = [row for row in rows if math.isfinite(row[1].value)]
    ends = [end for _, score, _ in rows for end in (score.value, score.low, score.high) if math.isfinite(end)]
    if not ends:
        return ""
    left, right, height = 300, 30, 28
    foot = 10 + height * len(rows)
    ticks, (low, high) = _scale(min(ends), max(ends), 6)

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (_WIDTH - left - right)

    shapes = []
    for tick in ticks:
        at = across(tick)
        shapes.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="6" y2="{foot}"/>')
        shapes.append(f'<text class="mid" x="{at:.1f}" y="{foot + 16}">{plain_number(tick)}</text>')
    for i, (name, score, style) in enumerate(rows):
        y = 10 + height * (i + 0.5)
        strong = " strong" if style == "a" else ""
        shapes.append(f'<text class="end{strong}" x="{left - 12}" y="{y + 4:.1f}">{_short(name, 52)}</text>')
        if math.isfinite(score.low):
            ends_at = f'x1="{across(score.low):.1f}" x2="{across(score.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            shapes.append(f'<line class="{style}" {ends_at}/>')
        shapes.append(_dot(across(score.value), y, style, f"{name}: {score}"))
    shapes.append(f'<text class="mid name" x="{(left + _WIDTH - right) / 2:.0f}" y="{foot + 34}">{escape(x)}</text>')
    return _svg(alt, shapes, _WIDTH, foot + 42)


def reliability(alt: str, before: Sequence[Bin], after: Sequence[Bin]) -> str:
    """Reliability diagram before and after calibration; the diagonal is perfect calibration."""
    axes = _Axes([0.0, 1.0], [0.0, 1.0])
    series = [
        Line(name, [(row.confidence, row.accuracy) for row in bins if row.count], style, dots=True)
        for name, bins, style in (("before", before, "b"), ("after", after, "a"))
        if bins
    ]
    diagonal = Line("calibrated", [(0.0, 0.0), (1.0, 1.0)], "faint")
    shapes = [shape for line in (diagonal, *series) for shape in _line(line, axes)]
    return _svg(alt, [*axes.draw("confidence", "accuracy"), *shapes, *_legend([*series, diagonal])])


def error_bars(alt: str, names: Sequence[str], scores: Sequence[Score], x: str, y: str) -> str:
    """Plot one point with its confidence interval per name."""
    heights = [value for score in scores for value in (score.value, score.low, score.high) if math.isfinite(value)]
    if not heights:
        return ""
    axes = _Axes([-0.5, len(names) - 0.5], heights)
    shapes = axes.draw(x, y, ticks=[(float(i), name) for i, name in enumerate(names)])
    for i, score in enumerate(scores):
        if math.isfinite(score.value):
            across, top, bottom = axes.x(i), axes.y(score.high), axes.y(score.low)
            shapes.append(f'<line class="a" x1="{across:.1f}" x2="{across:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
            shapes.append(_dot(across, axes.y(score.value), "a", f"{names[i]}: {score}"))
    return _svg(alt, shapes)


def confusion_matrix(alt: str, labels: Sequence[str], table: Sequence[Sequence[int]]) -> str:
    """Plot a confusion matrix, each row shaded by its row-normalized counts."""
    cell, left, top = 30, 170, 130
    size = cell * len(labels)
    shapes = []
    for i, (label, row) in enumerate(zip(labels, table, strict=True)):
        middle = cell * i + cell / 2 + 4
        shapes.append(f'<text class="end" x="{left - 6}" y="{top + middle:.0f}">{_short(label)}</text>')
        at = f"{left + middle:.0f} {top - 6}"
        shapes.append(f'<text transform="translate({at}) rotate(-50)">{_short(label)}</text>')
        total = max(1, sum(row))
        for j, count in enumerate(row):
            place = f'x="{left + cell * j}" y="{top + cell * i}" width="{cell}" height="{cell}"'
            what = escape(f"gold {label}, predicted {labels[j]}: {count}")
            hit = "cell" if i == j else "cell wrong"
            shapes.append(
                f'<rect class="{hit}" {place} fill-opacity="{0.6 * count / total:.3f}"><title>{what}</title></rect>'
            )
            if count:
                middle_x, middle_y = left + cell * (j + 0.5), top + cell * (i + 0.5) + 4
                shapes.append(f'<text class="mid small" x="{middle_x:.0f}" y="{middle_y:.0f}">{count}</text>')
    return _svg(alt, shapes, left + size + 60, top + size + 10)


def heat_map(alt: str, labels: Sequence[str], cells: Sequence[tuple[int, int, int]]) -> str:
    """A confusion matrix of many labels: a small square per cell that is not empty, with its numbers on hover.

    Cells are (gold, predicted, count). The script of the page enlarges what is clicked.
    """
    k, size = len(labels), 620.0
    cell = size / k
    totals = [0] * k
    for gold, _, count in cells:
        totals[gold] += count
    shapes = [f'<rect class="frame" x="0" y="0" width="{size:.0f}" height="{size:.0f}"/>']
    for gold, predicted, count in cells:
        share = count / max(1, totals[gold])
        what = escape(f"gold {labels[gold]}, predicted {labels[predicted]}: {count} of {totals[gold]}")
        hit = "heat" if gold == predicted else "heat wrong"
        place = f'x="{predicted * cell:.2f}" y="{gold * cell:.2f}" width="{cell:.2f}" height="{cell:.2f}"'
        shapes.append(
            f'<rect class="{hit}" {place} fill-opacity="{0.15 + 0.85 * share:.2f}"><title>{what}</title></rect>'
        )
    return _svg(alt, shapes, size, size).replace("<svg ", '<svg class="zoom" ', 1)


class _Axes:
    """Linear scales from data to page coordinates, with ticks."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._x_ticks, self._x = _scale(min(xs), max(xs), 8)
        self._y_ticks, self._y = _scale(min(ys), max(ys), 5)

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    def draw(self, x: str, y: str, ticks: Sequence[tuple[float, str]] | None = None) -> list[str]:
        foot = _HEIGHT - _BOTTOM
        shapes = []
        for value in self._y_ticks:
            at = self.y(value)
            shapes.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            shapes.append(f'<text class="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{plain_number(value)}</text>')
        for value, name in ticks if ticks is not None else [(value, plain_number(value)) for value in self._x_ticks]:
            shapes.append(f'<text class="mid" x="{self.x(value):.1f}" y="{foot + 16}">{escape(name)}</text>')
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        shapes.append(f'<text class="mid name" x="{middle:.0f}" y="{_HEIGHT - 8}">{escape(x)}</text>')
        shapes.append(f'<text class="mid name" transform="translate(14 {foot / 2:.0f}) rotate(-90)">{escape(y)}</text>')
        return shapes


def _scale(low: float, high: float, about: int) -> tuple[list[float], tuple[float, float]]:
    """Round tick values that span the data, and the ends of the axis."""
    if high <= low:
        low, high = low - (abs(low) or 1.0) * 0.1, high + (abs(high) or 1.0) * 0.1
    rough = (high - low) / about
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)], (first * step, last * step)


def plain_number(value: float) -> str:
    """A number without an exponent, with six digits.

    >>> plain_number(0.00015), plain_number(1234.5), plain_number(3.0)
    ('0.00015', '1,234.5', '3')
    """
    if not math.isfinite(value) or value == 0 or abs(value) < 1e-12:
        return f"{value:g}"
    digits = max(0, 5 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _line(line: Line, axes: _Axes) -> list[str]:
    at = [(axes.x(x), axes.y(y)) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    shapes = [f'<polyline class="{line.style}" points="{path}"/>']
    if line.dots:
        finite = [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        shapes += [_dot(*place, line.style, f"{x:.6g}: {y:.4f}") for place, (x, y) in zip(at, finite, strict=True)]
    return shapes


def _band(line: Line, axes: _Axes) -> list[str]:
    if not line.band:
        return []
    ends = [(x, low, high) for (x, _), (low, high) in zip(line.points, line.band, strict=True) if math.isfinite(low)]
    outline = [(x, high) for x, _, high in ends] + [(x, low) for x, low, _ in reversed(ends)]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in outline)
    return [f'<polygon class="band {line.style}" points="{path}"/>']


def _dot(x: float, y: float, style: str, what: str) -> str:
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{escape(what)}</title></circle>'


def _legend(series: Sequence[Line]) -> list[str]:
    if len(series) < 2:
        return []
    shapes = []
    for i, line in enumerate(series):
        height = _TOP + 14 + 16 * i
        shapes.append(f'<line class="{line.style}" x1="{_LEFT + 10}" x2="{_LEFT + 34}" y1="{height}" y2="{height}"/>')
        shapes.append(f'<text x="{_LEFT + 40}" y="{height + 4}">{escape(line.name)}</text>')
    return shapes


def _short(label: str, most: int = 24) -> str:
    return escape(label if len(label) <= most else label[: most - 1] + "…")


def _svg(alt: str, shapes: Sequence[str], width: float = _WIDTH, height: float = _HEIGHT) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px"'
    inside = "".join(shapes)
    return f'<svg role="img" aria-label="{escape(alt)}" {size}><title>{escape(alt)}</title>{inside}</svg>'
