"""Print a model's scores as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from bertie.data.writers import TableWriter

if TYPE_CHECKING:
    from bertie.evaluation.intervals import Difference, Score
    from bertie.evaluation.report import Comparison, ModelReport


def add_no_baselines(parser: argparse.ArgumentParser) -> None:
    """Add --no-baselines."""
    parser.add_argument(
        "--no-baselines",
        action="store_true",
        help="leave out the cheap baselines (majority class, TF-IDF and frozen embeddings with a linear model, …)",
    )


def report_as_dict(report: ModelReport) -> dict[str, Any]:
    """The scores of a report, for JSON."""
    from bertie.evaluation.model_report import selective_predictions

    values: dict[str, Any] = {
        split: scores_as_dict(evaluation.scores) for split, evaluation in report.evaluations.items()
    }
    if report.leaks is not None:
        check = report.leaks[report.final]
        values["leaks"] = {"rows": len(check.leaks), "scores": scores_as_dict(check.scores_without or {})}
    if report.calibration is not None:
        fitted = report.calibration
        errors = {"before": fitted.before.as_dict(), "after": fitted.after.as_dict()}
        values["calibration"] = {"temperature": fitted.temperature, **errors}
    if (held := selective_predictions(report).get(report.final)) is not None and report.abstention is not None:
        threshold = {"threshold": report.abstention.threshold, "target": report.abstention.target}
        values["abstention"] = {**threshold, "precision": held.precision.as_dict(), "coverage": held.coverage}
    if report.comparison is not None:
        values["baseline"] = comparison_as_dict(report.comparison) | {"mcnemar": report.comparison.mcnemar}
    if (table := report.baselines) is not None:
        values["cheap_baselines"] = {
            result.name: {**result.score.as_dict(), "difference": result.difference.as_dict()}
            for result in table.results
        }
    if report.findings:
        values["findings"] = list(report.findings)
    return values


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """The scores of a baseline, and the differences between the model and it."""
    return {
        "name": comparison.name,
        "scores": scores_as_dict(comparison.scores),
        "difference": scores_as_dict(comparison.differences),
    }


def scores_as_dict(scores: Mapping[str, Score] | Mapping[str, Difference]) -> dict[str, Any]:
    """Scores or differences by metric."""
    return {metric: score.as_dict() for metric, score in scores.items()}


def report_table(report: ModelReport) -> str:
    """The findings of a report, then its scores as a table, and those of the baselines."""
    splits = {split: evaluation.scores for split, evaluation in report.evaluations.items()}
    text = "".join(f"{line}\n" for line in report.findings)
    text += score_table(splits, seeds=report.seeds or [], comparison=report.comparison)
    if report.leaks is not None and (check := report.leaks[report.final]).leaks:
        without = check.scores_without
        main = "" if without is None else f"; without them {report.main} is {without[report.main]}"
        text += f"{len(check.leaks):,} of {check.rows:,} rows of {report.final} are in the training data{main}\n"
    return text + _baseline_text(report)


def _baseline_text(report: ModelReport) -> str:
    """The cheap baselines as a table, and whether the model beats the best."""
    from bertie.evaluation.model_report import beaten_line, p_value

    table = report.baselines
    if table is None:
        return ""
    titles = [f"baselines on {table.split}", table.metric, "95%", "difference (model − baseline)", "p"]
    rows = []
    for result in sorted(table.results, key=lambda result: -result.score.value):
        score, gap = result.score, result.difference
        interval = f"{score.low:.4f}–{score.high:.4f}"
        rows.append(
            [result.name, score.value, interval, f"{gap.value:+.4f} ({gap.low:+.4f}–{gap.high:+.4f})", p_value(gap.p)]
        )
    line = beaten_line(table)
    return TableWriter(titles).text(rows) + (f"{line}\n" if line else "")


def score_table(
    splits: Mapping[str, Mapping[str, Score]],
    *,
    seeds: Any = (),
    comparison: Comparison | None = None,
) -> str:
    """One row per metric: the score of each split, the spread over seeds, and the difference (model minus baseline)."""
    titles = ["metric", *(title for split in splits for title in (split, "95%"))]
    titles += ["seeds: mean ± sd"] if seeds else []
    titles += [comparison.name, "difference", "p"] if comparison is not None else []
    rows = []
    for metric in list(splits.values())[-1]:
        row: list[object] = [metric]
        for scores in splits.values():
            score = scores[metric]
            row += [score.value, f"{score.low:.4f}–{score.high:.4f}"]
        if seeds:
            values = [seed[metric] for seed in seeds]
            row.append(f"{fmean(values):.4f} ± {stdev(values):.4f}")
        if comparison is not None:
            gap = comparison.differences[metric]
            row += [comparison.scores[metric].value, f"{gap.value:+.4f} ({gap.low:+.4f}–{gap.high:+.4f})", gap.p]
        rows.append(row)
    return TableWriter(titles).text(rows)


def short_name(model: str) -> str:
    """A hub id, or the last part of a path."""
    return Path(model).absolute().name if Path(model).is_dir() else model


def print_scores(
    scores: Mapping[str, Score], comparison: Comparison | None, *, as_json: bool, split: str = "test"
) -> None:
    """Print scores, with those of a baseline if there is one."""
    if as_json:
        baseline = {} if comparison is None else {"baseline": comparison_as_dict(comparison)}
        print(json.dumps(scores_as_dict(scores) | baseline))
    else:
        sys.stdout.write(score_table({split: scores}, comparison=comparison))
