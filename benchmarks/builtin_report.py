"""Tables, paired comparisons and bar charts of `benchmarks.builtin`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from benchmarks.builtin_data import sentence_pairs
from bertie.evaluation import metrics, retrieval
from bertie.evaluation.intervals import Difference, FloatArray, Score

PARTS = ("size", "fill-mask", "similarity", "search", "heads", "long texts", "speed")
BM25 = "BM25"


@dataclass
class Figure:
    """A value with its interval and sample size; `units` are per-unit values for paired comparisons."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    units: list[float] | None = None

    @classmethod
    def of(cls, score: Score, n: int, units: FloatArray | None = None) -> Figure:
        return cls(
            score.value, score.low, score.high, n, None if units is None else [round(float(x), 8) for x in units]
        )

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.value:,.6g}" if self.value < 1e6 else f"{self.value:,.0f}"
        digits = 4 if self.value < 10 else 1 if self.value < 1000 else 0
        return f"{self.value:,.{digits}f} [{self.low:,.{digits}f}, {self.high:,.{digits}f}]"


Figures = dict[str, Figure]


@dataclass
class Column:
    """The figures of one model, by part and row."""

    name: str
    parts: dict[str, Figures]


def mean(figures: Sequence[Figure]) -> Figure:
    """The mean of figures over independent samples. Its interval combines theirs by the method of variance estimates
    recovery (MOVER; Zou and Donner, 2008).
    """
    value = statistics.fmean(figure.value for figure in figures)
    below, above = (
        math.sqrt(sum((getattr(figure, end) - figure.value) ** 2 for figure in figures)) / len(figures)
        for end in ("low", "high")
    )
    return Figure(value, value - below, value + above, sum(figure.n or 0 for figure in figures))


def compare_models(columns: Sequence[Column], data: Path) -> list[tuple[str, str, str, Difference]]:
    """Paired comparisons (row, model, other, difference) of each model with those after it and with BM25."""
    gold = {label: [row["score"] for row in pairs] for label, pairs in sentence_pairs(data)} if len(columns) > 1 else {}
    gaps = []
    for i, column in enumerate(columns):
        for other in columns[i + 1 :]:
            for label, ours in column.parts.get("similarity", {}).items():
                theirs = other.parts.get("similarity", {}).get(label)
                if theirs is not None and ours.units and theirs.units:
                    gap = metrics.paired("regress", (gold[label], ours.units), (gold[label], theirs.units))["spearman"]
                    gaps.append((label, column.name, other.name, gap))
            for label, ours in column.parts.get("search", {}).items():
                theirs = other.parts.get("search", {}).get(
                    label.partition(", first")[0] if other.name == BM25 else label
                )
                if theirs is not None and ours.units and theirs.units:
                    gap = retrieval.paired_mean_differences({"": np.array(ours.units)}, {"": np.array(theirs.units)})[
                        ""
                    ]
                    gaps.append((label, column.name, other.name, gap))
    return gaps


def table(columns: Sequence[Column]) -> str:
    """Markdown table with one row per figure and one column per model."""
    lines = [f"| | {' | '.join(column.name for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for part in PARTS:
        labels = dict.fromkeys(label for column in columns for label in column.parts.get(part, {}))
        for label in labels:
            cells = (str(column.parts.get(part, {}).get(label, "–")) for column in columns)
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(gaps: Sequence[tuple[str, str, str, Difference]]) -> str:
    """Markdown table with one row per comparison."""
    lines = ["| | model | against | difference | p |", "|---|---|---|---|---|"]
    lines += [f"| {label} | {model} | {other} | {gap} | {gap.p:.3f} |" for label, model, other, gap in gaps]
    return "\n".join(lines)


_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.end{text-anchor:end}.small{font-size:11px}line{stroke:#222}"
    ".grid{stroke:#ddd}.a{fill:#2a6fbb}.b{fill:#e08a3c}.c{fill:#8a8f98}.d{fill:#57a773}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#ddd}.grid{stroke:#444}}"
)


def bars(title: str, columns: Sequence[Column], part: str, labels: Sequence[str]) -> str:
    """SVG bar chart with one group per row, one bar per model, and its interval as a line."""
    thick, gap, wide, top = 16, 14, 460, 54
    left = max(290, *(8 + 7 * len(label) for label in labels))
    shown = []  # (column, figure) of each row
    for label in labels:
        cells = [column.parts[part].get(label) for column in columns]
        shown.append([(c, figure) for c, figure in enumerate(cells) if figure is not None])
    most = max(figure.high or figure.value for group in shown for _, figure in group)
    most = most if most > 0 else 1.0  # all figures may be 0
    unit = 10.0 ** math.floor(math.log10(most / 5))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times * 5 >= most)
    end = math.ceil(most / step) * step
    foot = top + sum(len(group) * thick + gap for group in shown)
    shapes = [f'<text x="{left}" y="18">{escape(title)}</text>']
    for i in range(round(end / step) + 1):
        x = left + wide * i * step / end
        shapes.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{foot}"/>')
        shapes.append(f'<text class="small" x="{x:.1f}" y="{foot + 14}" text-anchor="middle">{i * step:.6g}</text>')
    for c, column in enumerate(columns):
        x = left + c * wide / len(columns)
        shapes.append(f'<rect class="{"abcd"[c % 4]}" x="{x:.0f}" y="28" width="11" height="11"/>')
        shapes.append(f'<text class="small" x="{x + 16:.0f}" y="38">{escape(column.name)}</text>')
    y = float(top)
    for label, group in zip(labels, shown, strict=True):
        shapes.append(
            f'<text class="end" x="{left - 8}" y="{y + len(group) * thick / 2 + 4:.1f}">{escape(label)}</text>'
        )
        for c, figure in group:
            long, middle = wide * figure.value / end, y + (thick - 2) / 2
            what = escape(f"{columns[c].name}, {label}: {figure}")
            place = f'x="{left}" y="{y:.1f}" width="{max(0.0, long):.1f}" height="{thick - 2}"'
            shapes.append(f'<rect class="{"abcd"[c % 4]}" {place}><title>{what}</title></rect>')
            low, high = (
                left + wide * (figure.value if bound is None else bound) / end for bound in (figure.low, figure.high)
            )
            shapes.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
            text = f"{figure.value:.3f}" if abs(figure.value) < 10 else f"{figure.value:,.0f}"
            shapes.append(f'<text class="small" x="{high + 5:.1f}" y="{middle + 4:.1f}">{text}</text>')
            y += thick
        y += gap
    size = f'viewBox="0 0 {left + wide + 60} {foot + 22:.0f}" width="{left + wide + 60}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size}>'
    return f"{head}<title>{escape(title)}</title><style>{_STYLE}</style>{''.join(shapes)}</svg>\n"


def plots(columns: Sequence[Column]) -> dict[str, str]:
    """Bar charts of the figures with intervals, as SVG by file name."""
    charts = {}
    for name, part, title, unit in (
        ("similarity", "similarity", "Semantic textual similarity: Spearman correlation", ""),
        ("search", "search", "Dense retrieval: nDCG@10", "nDCG@10"),
        ("heads", "heads", "Task heads, as shipped", ""),
        ("speed", "speed", "Embeddings per second on the CPU", "per second"),
    ):
        labels = dict.fromkeys(label for column in columns for label in column.parts.get(part, {}) if unit in label)
        if labels:
            present = [column for column in columns if labels.keys() & column.parts.get(part, {}).keys()]
            charts[f"builtin-{name}.svg"] = bars(title, present, part, list(labels))
    return charts
