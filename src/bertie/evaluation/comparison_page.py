"""One page of several runs: scores with intervals, differences with significance, curves, and settings that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from bertie.evaluation import plots
from bertie.evaluation.model_report import SIGNIFICANT, p_value
from bertie.evaluation.pages import Block, Header, Plot, Section, Table, Tile, to_html
from bertie.evaluation.report_header import duration
from bertie.evaluation.report_sections import KINDS, downsample
from bertie.evaluation.run_comparison import ComparedRun, RunComparison, RunDifference

_MAX_POINTS = 200


def comparison_page(comparison: RunComparison) -> str:
    """Render the page."""
    sections = [
        _scores(comparison),
        _differences(comparison),
        _baselines(comparison),
        _findings(comparison),
        _curves(comparison),
        _settings(comparison),
    ]
    title = f"Comparison of {len(comparison.runs)} runs"
    return to_html(title, [section for section in sections if section is not None], _header(comparison))


def _header(comparison: RunComparison) -> Header:
    best, second = comparison.runs[0], comparison.runs[1]
    score = best.scores[comparison.metric]
    notices = []
    if not comparison.same_rows:
        notices.append(
            "The runs were not all tested on the same rows: only the differences on shared rows, below, compare them."
        )
    tiles = [
        Tile(f"best {comparison.metric}", f"{score.value:.3f}", f"{best.name}, {score.low:.3f} to {score.high:.3f}")
    ]
    gap = _between(comparison, best, second)
    if gap is not None and gap.difference is not None:
        certain = "significant" if gap.difference.p < SIGNIFICANT else "not significant"
        tone = "good" if gap.difference.p < SIGNIFICANT else ""
        note = f"{second.name}; {certain}, p {p_value(gap.difference.p)}"
        tiles.append(Tile("ahead of the next", f"{gap.difference.value:+.3f}", note, tone))
    rows = sorted({len(run.rows) for run in comparison.runs if run.rows})
    if rows:
        tiles.append(Tile(f"{best.split} rows", " / ".join(f"{count:,}" for count in rows)))
    lead = f"{KINDS[comparison.kind].capitalize()}. Brackets and bars are 95% confidence intervals."
    return Header(notices, tiles, lead)


def _between(comparison: RunComparison, first: ComparedRun, second: ComparedRun) -> RunDifference | None:
    return next((d for d in comparison.differences if (d.first, d.second) == (first.name, second.name)), None)


def _scores(comparison: RunComparison) -> Section:
    alt = f"{comparison.metric} of each run, with 95% intervals"
    svg = plots.intervals(
        alt, [(run.name, run.scores[comparison.metric], "a") for run in comparison.runs], comparison.metric
    )
    names = list(dict.fromkeys(name for run in comparison.runs for name in run.scores))
    names.sort(key=lambda name: name != comparison.metric)
    table = [
        [run.name, run.split, *(str(run.scores[name]) if name in run.scores else "–" for name in names), *_facts(run)]
        for run in comparison.runs
    ]
    head = ["run", "split", *names, "training rows", "time"]
    return Section("Scores", [Plot(svg, alt), Table(head, table, sortable=True)])


def _facts(run: ComparedRun) -> list[str]:
    rows = next((data["rows"] for data in run.report.get("data", []) if data["split"] == "train"), None)
    seconds = run.report.get("timings", {}).get("seconds of training")
    return ["–" if rows is None else f"{rows:,}", "–" if seconds is None else duration(seconds)]


def _differences(comparison: RunComparison) -> Section:
    rows = []
    for pair in comparison.differences:
        gap = pair.difference
        values = ["–", "–"] if gap is None else [str(gap), p_value(gap.p)]
        verdict = "no shared rows" if gap is None else "significant" if gap.p < SIGNIFICANT else "may be chance"
        rows.append([pair.first, pair.second, f"{pair.rows:,}", *values, verdict])
    test = "McNemar's exact test" if comparison.kind == "classify" else "paired bootstrap"
    text = f"On the rows that both runs predicted. p: {test}, corrected for {len(rows)} comparisons (Holm)."
    head = ["run", "other run", "rows", f"{comparison.metric}: difference (run − other)", "p", ""]
    return Section("Differences", [text if len(rows) > 1 else text.split(", corrected")[0] + ".", Table(head, rows)])


def _baselines(comparison: RunComparison) -> Section | None:
    rows = []
    for run in comparison.runs:
        for result in run.report.get("baselines", {}).get("results", []):
            score, gap = result["score"], result["difference"]
            if score["value"] is not None and gap["value"] is not None:
                rows.append(
                    [run.name, result["name"], f"{score['value']:.4f}", f"{gap['value']:+.4f}", p_value(gap["p"])]
                )
    if not rows:
        return None
    return Section(
        "Baselines",
        [Table(["run", "baseline", comparison.metric, "difference (run − baseline)", "p"], rows, sortable=True)],
    )


def _findings(comparison: RunComparison) -> Section | None:
    rows = [[run.name, line] for run in comparison.runs for line in run.report.get("findings", [])]
    return Section("Findings", [Table(["run", "finding"], rows)]) if rows else None


def _curves(comparison: RunComparison) -> Section | None:
    blocks: list[Block] = []
    losses = {run.name: [(row["step"], row["loss"]) for row in run.report.get("curve", [])] for run in comparison.runs}
    if svg := _lines("Training loss by step", losses, "loss", from_zero=True):
        blocks.append(Plot(svg, "Training loss by step"))
    metric = comparison.metric
    dev = {
        run.name: [(row["step"], row["value"]) for row in run.report.get("dev", []) if row["metric"] == metric]
        for run in comparison.runs
    }
    if svg := _lines(f"Dev {metric} by step", dev, metric, from_zero=False):
        blocks.append(Plot(svg, f"Dev {metric} by step; the axis does not begin at 0"))
    return Section("Training", blocks) if blocks else None


def _lines(alt: str, curves: Mapping[str, Sequence[tuple[float, Any]]], y: str, *, from_zero: bool) -> str:
    lines = []
    for (name, rows), style in zip(curves.items(), cycle(plots.STYLES), strict=False):
        points = [(float(step), float(value)) for step, value in rows if value is not None]
        if len(points) > 1:
            lines.append(plots.Line(name, downsample(points, _MAX_POINTS), style, dots=not from_zero))
    return plots.lines(alt, lines, "step", y, from_zero=from_zero)


def _settings(comparison: RunComparison) -> Section:
    settings = [_settings_of(run) for run in comparison.runs]
    names = dict.fromkeys(name for values in settings for name in values)
    rows = []
    for name in names:
        cells = [_cell(values.get(name)) for values in settings]
        if len(set(cells)) > 1:
            rows.append([name, *cells])
    head = ["setting", *(run.name for run in comparison.runs)]
    return Section("Settings that differ", [Table(head, rows) if rows else "None: the runs have the same settings."])


def _settings_of(run: ComparedRun) -> dict[str, Any]:
    report = run.report
    files = {f"{data['split']} files": ", ".join(data["files"]) for data in report.get("data", [])}
    rows = {f"{data['split']} rows": data["rows"] for data in report.get("data", [])}
    return {"model": report.get("model"), **report.get("recipe", {}), **files, **rows, **report.get("versions", {})}


def _cell(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return plots.plain_number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)
