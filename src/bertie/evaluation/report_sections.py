"""The sections of a model report: paragraphs, tables and plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bertie.evaluation import plots
from bertie.evaluation.errors import error_table
from bertie.evaluation.intervals import RESAMPLES, Score
from bertie.evaluation.model_report import (
    Confusion,
    ModelReport,
    SelectivePrediction,
    confusion,
    confusion_cells,
    label_slices,
    length_slices,
    p_value,
    selective_predictions,
)
from bertie.evaluation.pages import Block, Folded, ForHtml, ForMarkdown, Plot, Section, Table
from bertie.evaluation.slices import LabelSlice, LengthSlice

KINDS = {
    "classify": "classification",
    "multi_label": "multi-label classification",
    "regress": "regression",
    "tag": "token classification",
    "answer": "question answering",
    "rerank": "reranking",
    "choose": "multiple choice",
    "similarity": "semantic similarity",
    "retrieval": "retrieval",
}
_MAX_EXAMPLES = 20  # rows of a table of examples
_MAX_POINTS = 300  # of a curve
MOST_IN_GRID = 20  # labels of a confusion matrix with numbers; a heat map has no limit


class DerivedTables:
    """Tables that the report files share, computed once."""

    def __init__(self, report: ModelReport) -> None:
        self.labels: dict[str, list[LabelSlice]] = {}
        self.lengths: dict[str, list[LengthSlice]] = {}
        self.confusion: dict[str, Confusion] = {}
        for split, evaluation in report.evaluations.items():
            self.labels[split] = label_slices(report.kind, evaluation)
            self.lengths[split] = length_slices(report.kind, evaluation, report.main)
            if report.kind == "classify":
                self.confusion[split] = confusion(evaluation)
        self.selective: dict[str, SelectivePrediction] = selective_predictions(report)


def report_sections(report: ModelReport, derived: DerivedTables) -> list[Section]:
    """All sections of a report that have something to say."""
    sections = [
        _baselines(report),
        _scores(report),
        _seeds(report),
        _comparison(report),
        _errors(report),
        _confusion(report, derived.confusion.get(report.final)),
        _labels(report.final, derived.labels[report.final]),
        _lengths(report.final, derived.lengths[report.final], report.main),
        _curves(report),
        _calibration(report),
        _abstention(report, derived),
        _leaks(report),
        *(_label_issues(report, split) for split in report.label_issues or {}),
        _token_coverage(report),
        _data(report),
        _recipe(report),
        _settings("Time", report.timings),
        _settings("Versions", report.versions),
    ]
    return [section for section in sections if section is not None]


def _scores(report: ModelReport) -> Section:
    splits = list(report.evaluations)
    names = list(dict.fromkeys(name for evaluation in report.evaluations.values() for name in evaluation.scores))
    rows = [[name, *(_score(report.evaluations[split].scores.get(name)) for split in splits)] for name in names]
    return Section("Scores", [Table(["metric", *splits], rows)])


def _seeds(report: ModelReport) -> Section | None:
    if not report.seeds:
        return None
    names = list(dict.fromkeys(name for seed in report.seeds for name in seed))
    rows = []
    for name in names:
        values = [seed[name] for seed in report.seeds if name in seed]
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        rows.append(
            [name, f"{fmean(values):.4f}{spread}", f"{min(values):.4f}", f"{max(values):.4f}", str(len(values))]
        )
    text = "Mean ± standard deviation over training runs with different seeds."
    return Section("Seeds", [text, Table(["metric", "mean ± sd", "lowest", "highest", "seeds"], rows)])


def _comparison(report: ModelReport) -> Section | None:
    other = report.comparison
    if other is None:
        return None
    own = report.evaluations[other.split].scores if other.split in report.evaluations else {}
    rows = [
        [name, _score(own.get(name)), _score(other.scores.get(name)), str(gap), f"{gap.p:.4f}"]
        for name, gap in other.differences.items()
    ]
    text = (
        f"Paired bootstrap on the same rows of {other.split}: the difference is more certain than the two separate "
        f"intervals suggest. With {RESAMPLES} resamples p is never below {2 / (RESAMPLES + 1):.3f}."
    )
    blocks: list[Block] = [text, Table(["metric", "this model", other.name, "difference", "p"], rows)]
    if other.mcnemar is not None:
        blocks.append(f"McNemar's exact test of equal accuracy: p = {other.mcnemar:.4g}.")
    return Section(f"Comparison with {other.name}", blocks)


def _baselines(report: ModelReport) -> Section | None:
    table = report.baselines
    if table is None or not table.results:
        return None
    results = sorted(table.results, key=lambda result: -_finite(result.score.value))
    rows = [["this model", str(table.model), "", ""]]
    rows += [[r.name, str(r.score), str(r.difference), p_value(r.difference.p)] for r in results]
    alt = f"{table.metric} of this model and of the baselines on {table.split}, with 95% intervals"
    plot = plots.intervals(
        alt, [("this model", table.model, "a"), *((r.name, r.score, "b") for r in results)], table.metric
    )
    tested = f"{table.rows:,}" if table.rows == table.rows_total else f"{table.rows:,} of {table.rows_total:,}"
    text = f"Cheap baselines on the same rows of {table.split} as the model ({tested}). "
    if table.training_rows < table.training_rows_total:
        text += f"Trained on {table.training_rows:,} of {table.training_rows_total:,} rows. "
    if table.encoder is not None and any("frozen" in r.name for r in results):
        text += f"Frozen embeddings are those of {table.encoder}. "
    text += "p: " + ("McNemar's exact test." if report.kind == "classify" else "paired bootstrap.")
    return Section(
        "Baselines", [text, Plot(plot, alt), Table(["", table.metric, "difference (model − baseline)", "p"], rows)]
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _errors(report: ModelReport) -> Section | None:
    evaluation = report.evaluations[report.final]
    table, count = error_table(report.kind, evaluation, report.attributions)
    if table is None:
        return None
    first = "largest" if report.kind in ("regress", "tag", "answer") else "most confident"
    text = f"{count:,} of {len(evaluation.gold):,} rows are wrong"
    text += f"; the {len(table.rows):,} {first} of them:" if len(table.rows) < count else f", the {first} first:"
    blocks: list[Block] = [text]
    if report.attributions:
        blocks.append(
            "The words that decided, by leave-one-out attribution: without a word in orange the probability of the "
            "predicted label falls, without one in blue it rises."
        )
    shown = replace(table, rows=table.rows[:_MAX_EXAMPLES], sortable=False, filtered=False)
    return Section(f"Errors on {report.final}", [*blocks, ForHtml(table), ForMarkdown(shown)])


def _leaks(report: ModelReport) -> Section | None:
    if report.leaks is None:
        return None
    blocks: list[Block] = []
    rows, changes = [], []
    for split, check in report.leaks.items():
        exact = sum(leak.kind == "exact" for leak in check.leaks)
        fraction = len(check.leaks) / check.rows if check.rows else 0.0
        rows.append([split, f"{check.rows:,}", f"{exact:,}", f"{len(check.leaks) - exact:,}", f"{fraction:.2%}"])
        for name, score in (check.scores_without or {}).items():
            changes.append([split, name, _score(report.evaluations[split].scores.get(name)), _score(score)])
    blocks.append(
        Table(
            ["split", "rows", "exact duplicates", "near-duplicates", "fraction"],
            rows,
            "Rows whose text also occurs in the training data",
        )
    )
    if changes:
        blocks.append(Table(["split", "metric", "all rows", "without leaks"], changes, "Scores without these rows"))
    for split, check in report.leaks.items():
        shown = sorted(zip(check.leaks, check.texts, strict=False), key=lambda pair: pair[0].similarity)[:_MAX_EXAMPLES]
        if shown:
            rows = [
                [
                    str(leak.test_index + 1),
                    str(leak.train_index + 1),
                    f"{leak.similarity:.2f}",
                    _excerpt(test),
                    _excerpt(train),
                ]
                for leak, (test, train) in shown
            ]
            head = [f"{split} row", "training row", "similarity", "text", "training text"]
            blocks.append(Table(head, rows, "Examples, least similar first; rows are counted from 1"))
    return Section("Leaks", blocks)


def _curves(report: ModelReport) -> Section | None:
    blocks: list[Block] = []
    points = [(float(row["step"]), float(row["loss"])) for row in report.curve or () if "loss" in row]
    alt = "Training loss by step"
    line = plots.Line("loss", downsample(points, _MAX_POINTS))
    if svg := plots.lines(alt, [line], "step", "loss", from_zero=True):
        rows = [[f"{x:,.0f}", f"{y:.4f}"] for x, y in downsample(points, _MAX_EXAMPLES)]
        blocks.append(Plot(svg, alt))
        blocks.append(Table(["step", "loss"], rows, "Training loss, averaged over neighbouring steps", for_plot=True))
    elif points:
        blocks.append(f"Training loss at step {points[-1][0]:,.0f}: {points[-1][1]:.4f}.")
    series: dict[str, list[tuple[float, float]]] = {}
    for row in report.dev or ():
        series.setdefault(str(row["metric"]), []).append((float(row["step"]), float(row["value"])))
    for name, values in series.items():
        alt = f"Dev {name} by step"
        if svg := plots.lines(alt, [plots.Line(name, values, dots=True)], "step", name):
            rows = [[f"{x:,.0f}", f"{y:.4f}"] for x, y in values]
            blocks += [
                Plot(svg, f"{alt}; the axis does not begin at 0"),
                Table(["step", name], rows, alt, for_plot=True),
            ]
        else:
            blocks.append(f"Dev {name} after step {values[-1][0]:,.0f}: {values[-1][1]:.4f}.")
    return Section("Training", blocks) if blocks else None


def downsample(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Average neighbouring points until at most `most` are left."""
    if len(points) <= most:
        return list(points)
    return [tuple(np.mean(part, axis=0).tolist()) for part in np.array_split(np.array(points), most)]


def _confusion(report: ModelReport, matrix: Confusion | None) -> Section | None:
    if matrix is None:
        return None
    split, evaluation = report.final, report.evaluations[report.final]
    alt = f"Confusion matrix on {split}: rows are gold labels, columns predicted labels"
    rows = [[gold, predicted, f"{count:,}"] for gold, predicted, count in matrix.pairs]
    pairs: list[Block] = []
    if rows:
        pairs.append(Table(["gold", "predicted", "count"], rows, "The most frequent errors", sortable=True))
    grid = Plot(plots.confusion_matrix(alt, matrix.labels, matrix.table), alt)
    if len(evaluation.labels) <= MOST_IN_GRID:
        blocks: list[Block] = [grid]
        if len(matrix.labels) <= 10:
            cells = [[label, *map(str, row)] for label, row in zip(matrix.labels, matrix.table, strict=True)]
            blocks.append(Table(["gold / predicted", *matrix.labels], cells, alt, for_plot=True))
        return Section(f"Confusion on {split}", [*blocks, *pairs])
    labels, counts = confusion_cells(evaluation)
    caption = (
        f"All {len(labels)} labels, with those that are confused side by side: rows are gold, columns predicted. "
        "Hover over a cell for its labels; click to enlarge."
    )
    folded = Folded(f"The {MOST_IN_GRID} most confused labels in numbers", [grid])
    heat = Plot(plots.heat_map(f"Confusion heat map of {len(labels)} labels on {split}", labels, counts), caption)
    return Section(f"Confusion on {split}", [*pairs, heat, folded])


def _labels(split: str, slices: Sequence[LabelSlice]) -> Section | None:
    if not slices:
        return None
    cells = [
        [s.label, f"{s.support:,}", f"{s.predicted:,}", str(s.precision), str(s.recall), str(s.f1)] for s in slices
    ]
    head = ["label", "support", "predicted", "precision", "recall", "f1"]
    table = Table(head, cells, sortable=True, filtered=len(cells) > _MAX_EXAMPLES)
    if len(cells) <= _MAX_EXAMPLES:
        return Section(f"By label on {split}", [table])
    worst = sorted(slices, key=lambda row: _finite(row.f1.value))[:_MAX_EXAMPLES]
    alt = f"The {len(worst)} labels with the lowest F1 on {split}"
    plot = plots.intervals(alt, [(row.label, row.f1, "b") for row in worst], "f1")
    return Section(f"By label on {split}", [Plot(plot, alt), Folded(f"All {len(cells)} labels", [table])])


def _lengths(split: str, slices: Sequence[LengthSlice], metric: str) -> Section | None:
    if not slices:
        return None
    names = [f"{s.low}" if s.low == s.high else f"{s.low}–{s.high}" for s in slices]
    alt = f"{metric} by text length on {split}"
    cells = [[name, f"{s.count:,}", str(s.score)] for name, s in zip(names, slices, strict=True)]
    table = Table(["tokens", "texts", metric], cells)
    if len(slices) < 2:
        return Section(f"By length on {split}", [table])
    plot = plots.error_bars(alt, names, [s.score for s in slices], "tokens", metric)
    return Section(f"By length on {split}", [Plot(plot, alt), table])


def _calibration(report: ModelReport) -> Section | None:
    fit = report.calibration
    if fit is None:
        return None
    text = f"Temperature {fit.temperature:.3f}, fitted on {fit.fitted_on}; measured on {fit.measured_on}."
    if fit.threshold is not None:
        text += f" Labels with a probability of at least {fit.threshold:.2f} are predicted."
    rows = [["before", str(fit.before)], ["after", str(fit.after)]]
    blocks: list[Block] = [text, Table(["", "expected calibration error"], rows)]
    if fit.bins_before or fit.bins_after:
        alt = f"Reliability diagram on {fit.measured_on}, before and after temperature scaling"
        blocks.append(Plot(plots.reliability(alt, fit.bins_before, fit.bins_after), alt))
        cells = [
            [name, f"{b.low:.2f}–{b.high:.2f}", f"{b.count:,}", f"{b.confidence:.3f}", f"{b.accuracy:.3f}"]
            for name, bins in (("before", fit.bins_before), ("after", fit.bins_after))
            for b in bins
            if b.count
        ]
        head = ["", "confidence", "predictions", "mean confidence", "accuracy"]
        blocks.append(Table(head, cells, alt, for_plot=True))
    return Section("Calibration", blocks)


def _abstention(report: ModelReport, derived: DerivedTables) -> Section | None:
    fit = report.abstention
    if fit is None:
        return None
    text = (
        f"Predictions with confidence of at least {fit.threshold:.4f} have a precision of {fit.precision} on the data "
        f"the threshold was fitted on (target {fit.target:.2%}), and cover {fit.coverage:.1%} of texts."
    )
    rows = [[split, str(result.precision), f"{result.coverage:.1%}"] for split, result in derived.selective.items()]
    table = [Table(["split", "precision", "coverage"], rows)] if rows else []
    return Section("Abstention threshold", [text, *table])


def _label_issues(report: ModelReport, split: str) -> Section | None:
    issues, evaluation = (report.label_issues or {})[split], report.evaluations[split]
    if not issues:
        return None
    text = (
        f"{len(issues)} gold labels of {split} that are most likely wrong (confident learning), for review: "
        "the model itself may be wrong. None was changed."
    )
    labels, texts = evaluation.labels, evaluation.texts
    rows = [
        [
            str(issue.index + 1),
            labels[issue.given],
            f"{labels[issue.likely]} ({issue.likely_probability:.2f})",
            _excerpt(texts[issue.index]) if texts is not None else "",
        ]
        for issue in issues[:_MAX_EXAMPLES]
    ]
    return Section(f"Label issues of {split}", [text, Table(["row", "gold", "suggested", "text"], rows)])


def _token_coverage(report: ModelReport) -> Section | None:
    if not report.token_coverage:
        return None
    rows = [
        [
            split,
            f"{coverage.texts:,}",
            f"{coverage.several / coverage.texts:.2%}" if coverage.texts else "–",
            f"{coverage.tokens_read:,}",
            f"{coverage.tokens_total:,}",
        ]
        for split, coverage in report.token_coverage.items()
    ]
    head = ["split", "texts", "in several windows", "tokens read", "tokens in total"]
    return Section("Token coverage", [Table(head, rows)])


def _data(report: ModelReport) -> Section | None:
    if not report.data:
        return None
    rows = [[data.split, ", ".join(data.files), f"{data.rows:,}"] for data in report.data]
    blocks: list[Block] = [Table(["split", "files", "rows"], rows)]
    labelled = [data for data in report.data if data.labels]
    if labelled:
        names = list(dict.fromkeys(name for data in labelled for name in data.labels or {}))
        cells = [[name, *(f"{(data.labels or {}).get(name, 0):,}" for data in labelled)] for name in names]
        counts = Table(["label", *(data.split for data in labelled)], cells, "Label counts", sortable=True)
        many = len(names) > _MAX_EXAMPLES
        blocks.append(Folded(f"Rows of each of {len(names)} labels", [counts]) if many else counts)
    return Section("Data", blocks)


def _recipe(report: ModelReport) -> Section | None:
    if not report.recipe:
        return None
    rows = {name: [name, _value(value)] for name, value in report.recipe.items()}
    chosen = [row for name, row in rows.items() if name not in report.default_settings]
    default = [row for name, row in rows.items() if name in report.default_settings]
    blocks: list[Block] = [Table(["setting", "value"], chosen)] if chosen else ["All settings have their defaults."]
    if default:
        blocks.append(Folded(f"{len(default)} settings at their defaults", [Table(["setting", "value"], default)]))
    return Section("Recipe", blocks)


def _settings(title: str, values: Mapping[str, Any] | None) -> Section | None:
    if not values:
        return None
    return Section(title, [Table(["name", "value"], [[name, _value(value)] for name, value in values.items()])])


def _value(value: Any) -> str:
    if isinstance(value, float):
        return plots.plain_number(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _score(score: Score | None) -> str:
    return "–" if score is None else str(score)


def _excerpt(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
