"""The plot of a learning curve."""

from __future__ import annotations

import math

from bertie.evaluation.learning_curves import LearningCurve
from bertie.evaluation.plots import Line, _Axes, _dot, _legend, _line, _svg


def plot_learning_curve(curve: LearningCurve) -> str:
    """Plot the measured scores with their intervals, and the band of what is expected, over a logarithmic axis."""
    scores = [*(point.score for point in curve.points), *(point.score for point in curve.band)]
    heights = [value for score in scores for value in (score.value, score.low, score.high) if math.isfinite(value)]
    if not heights:
        return ""
    sizes = [*(point.rows for point in curve.points), *(point.rows for point in curve.band)]
    axes = _Axes([math.log2(min(sizes)), math.log2(max(sizes))], heights)
    most = curve.points[-1].rows
    labelled = [*(point.rows for point in curve.points), *(times * most for times in (2, 4) if curve.band)]
    shapes = axes.draw("training rows", curve.metric, ticks=[(math.log2(rows), f"{rows:,}") for rows in labelled])
    upper = [(axes.x(math.log2(point.rows)), axes.y(point.score.high)) for point in curve.band]
    lower = [(axes.x(math.log2(point.rows)), axes.y(point.score.low)) for point in reversed(curve.band)]
    if curve.band:
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *lower))
        shapes.append(f'<polygon class="band b" points="{outline}"/>')
    expected = Line("expected", [(math.log2(point.rows), point.score.value) for point in curve.band], "b")
    measured = Line("measured", [(math.log2(point.rows), point.score.value) for point in curve.points], "a")
    shapes += [shape for line in (expected, measured) if line.points for shape in _line(line, axes)]
    for point in curve.points:
        across, top, bottom = (
            axes.x(math.log2(point.rows)),
            *(axes.y(end) for end in (point.score.high, point.score.low)),
        )
        shapes.append(f'<line class="a" x1="{across:.1f}" x2="{across:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>')
        shapes.append(_dot(across, axes.y(point.score.value), "a", f"{point.rows:,} rows: {point.score}"))
    return _svg(f"{curve.metric} by training rows", [*shapes, *_legend([measured, expected] if curve.band else [])])
