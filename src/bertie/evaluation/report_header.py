"""The top of a model report: findings and headline figures."""

from __future__ import annotations

from bertie.evaluation.intervals import RESAMPLES, Score
from bertie.evaluation.model_report import ModelReport, p_value
from bertie.evaluation.pages import Header, Tile
from bertie.evaluation.report_sections import KINDS


def report_header(report: ModelReport) -> Header:
    """Findings, tiles and a sentence on the intervals."""
    lead = (
        f"{KINDS[report.kind].capitalize()} with {report.model}. Brackets and bars are 95% confidence intervals "
        f"(Wilson's for proportions, otherwise from {RESAMPLES} bootstrap resamples of the split). They do not cover "
        "the variance between training runs, or other data."
    )
    if report.dev_source is not None:
        lead += (
            f" Scores on dev are those of models that had not seen the rows: {report.dev_source}. The final model saw "
            "more rows, and is usually a little better."
        )
    tiles = [_score_tile(report), _baseline_tile(report), _rows_tile(report), _time_tile(report)]
    return Header(report.findings, [tile for tile in tiles if tile is not None], lead)


def _score_tile(report: ModelReport) -> Tile:
    score = report.evaluations[report.final].scores[report.main]
    return Tile(f"{report.main} on {report.final}", _short(score), _interval(score))


def _baseline_tile(report: ModelReport) -> Tile | None:
    table = report.baselines
    best = None if table is None else table.best
    if table is None or best is None:
        return None
    gap = best.difference
    tone = "good" if best.beaten else "bad" if gap.value <= 0 else ""
    significant = "significant" if gap.p < 0.05 else "not significant"
    p = p_value(gap.p)
    note = f"{best.name}: {_short(best.score)}; {significant}, p {p if p.startswith('<') else f'= {p}'}"
    return Tile("vs. the best baseline", f"{gap.value:+.3f}".replace("-", "−"), note, tone)


def _rows_tile(report: ModelReport) -> Tile:
    rows = {data.split: data.rows for data in report.data}
    rows |= {split: len(evaluation.gold) for split, evaluation in report.evaluations.items() if split not in rows}
    first, *others = rows.items()
    labels = len(report.evaluations[report.final].labels)
    notes = [f"{count:,} {split}" for split, count in others] + ([f"{labels} labels"] if labels else [])
    return Tile(f"{first[0]} rows", f"{first[1]:,}", ", ".join(notes))


def _time_tile(report: ModelReport) -> Tile | None:
    timings = report.timings or {}
    seconds = timings.get("seconds of training")
    if seconds is None:
        return None
    steps, best = timings.get("steps"), timings.get("best step")
    notes = [f"{steps:,.0f} steps"] if steps is not None else []
    notes += [f"the best at step {best:,.0f}"] if best is not None and best != steps else []
    return Tile("training time", duration(seconds), ", ".join(notes))


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours.

    >>> duration(12.34), duration(95), duration(4000)
    ('12 s', '1 min 35 s', '1 h 7 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {round(whole % 3600 / 60)} min"


def _short(score: Score) -> str:
    return "not defined" if score.value != score.value else f"{score.value:.3f}"


def _interval(score: Score) -> str:
    return "" if score.low != score.low else f"95% interval {score.low:.3f} to {score.high:.3f}"
