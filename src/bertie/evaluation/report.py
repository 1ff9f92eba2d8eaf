"""The report of a study: `report.md` with tables, `report.html` with plots, `report.json` for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from bertie.evaluation import plots
from bertie.evaluation.intervals import DRAWS, Difference, Score, number
from bertie.evaluation.pages import Plot, Section, Table, clean, to_html, to_markdown
from bertie.evaluation.slices import LabelSlice, LengthSlice
from bertie.evaluation.study import (
    Calibrated,
    Comparison,
    Confusion,
    DataFile,
    Evaluation,
    Held,
    LeakCheck,
    Reading,
    Study,
    abstentions,
    confusion,
    label_slices,
    length_slices,
)

__all__ = ["Calibrated", "Comparison", "DataFile", "Evaluation", "LeakCheck", "Reading", "Study", "write"]

KINDS = {
    "classify": "classification",
    "multi": "classification with any number of labels",
    "regress": "regression",
    "tag": "tagging",
    "answer": "question answering",
    "rerank": "ranking",
    "alike": "similarity",
    "find": "retrieval",
}
_MOST = 20  # rows of a table of examples
_POINTS = 300  # of a curve


def write(folder: str | Path, study: Study) -> list[Path]:
    """Write `report.md`, `report.html` and `report.json` into a folder; each appears whole or not at all."""
    found = _Found(study)
    sections = _sections(study, found)
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": to_markdown(study.title, sections),
        "report.html": to_html(study.title, sections),
        "report.json": json.dumps(_as_json(study, found), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
    }
    return [_written(where / name, clean(text)) for name, text in texts.items()]


def _written(path: Path, text: str) -> Path:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


class _Found:
    """What is computed of a study once, for all three files."""

    def __init__(self, study: Study) -> None:
        each = study.evaluations.items()
        single = study.kind == "classify"
        self.labels: dict[str, list[LabelSlice]] = {split: label_slices(study.kind, one) for split, one in each}
        self.lengths: dict[str, list[LengthSlice]] = {
            split: length_slices(study.kind, one, study.main) for split, one in each
        }
        self.confusion: dict[str, Confusion] = {split: confusion(one) for split, one in each} if single else {}
        self.held: dict[str, Held] = abstentions(study)


# --- what the report says ---


def _sections(study: Study, found: _Found) -> list[Section]:
    sections = [
        _summary(study),
        _scores(study),
        _seeds(study),
        _comparison(study),
        _leaks(study),
        _curves(study),
        _confusion(study.final, found.confusion.get(study.final)),
        _labels(study.final, found.labels[study.final]),
        _lengths(study.final, found.lengths[study.final], study.main),
        _calibration(study),
        _abstention(study, found),
        *(_suspects(study, split) for split in study.suspects or {}),
        _reading(study),
        _data(study),
        _pairs("Recipe", study.recipe),
        _pairs("Time", study.timings),
        _pairs("Versions", study.versions),
    ]
    return [section for section in sections if section is not None]


def _summary(study: Study) -> Section:
    one = study.evaluations[study.final]
    said = (
        f"{KINDS[study.kind].capitalize()} with {study.model}. On {study.final} ({len(one.gold):,} rows) its "
        f"{study.main} is {one.scores[study.main]}."
    )
    meant = (
        f"Numbers in brackets are 95% intervals: what the score would be on other samples of the same size, by {DRAWS} "
        "draws from the split. They do not cover another run of the training or other data."
    )
    return Section("Summary", [said, meant])


def _scores(study: Study) -> Section:
    splits = list(study.evaluations)
    names = list(dict.fromkeys(name for one in study.evaluations.values() for name in one.scores))
    rows = [[name, *(_score(study.evaluations[split].scores.get(name)) for split in splits)] for name in names]
    return Section("Scores", [Table(["metric", *splits], rows)])


def _seeds(study: Study) -> Section | None:
    if not study.seeds:
        return None
    names = list(dict.fromkeys(name for seed in study.seeds for name in seed))
    rows = []
    for name in names:
        values = [seed[name] for seed in study.seeds if name in seed]
        spread = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
        rows.append(
            [name, f"{fmean(values):.4f}{spread}", f"{min(values):.4f}", f"{max(values):.4f}", str(len(values))]
        )
    said = "The whole training, repeated: mean ± standard deviation over seeds."
    return Section("Seeds", [said, Table(["metric", "mean ± sd", "lowest", "highest", "seeds"], rows)])


def _comparison(study: Study) -> Section | None:
    one = study.comparison
    if one is None:
        return None
    own = study.evaluations[one.split].scores if one.split in study.evaluations else {}
    rows = [
        [name, _score(own.get(name)), _score(one.scores.get(name)), str(gap), f"{gap.p:.4f}"]
        for name, gap in one.differences.items()
    ]
    said = (
        f"Both on the same rows of {one.split}, so the difference is surer than the two intervals let one think. With "
        f"{DRAWS} draws p is never below {2 / (DRAWS + 1):.3f}."
    )
    blocks: list[str | Table | Plot] = [said, Table(["metric", "this model", one.name, "difference", "p"], rows)]
    if one.mcnemar is not None:
        blocks.append(f"McNemar's exact test that both are right equally often: p = {one.mcnemar:.4g}.")
    return Section(f"Against {one.name}", blocks)


def _leaks(study: Study) -> Section | None:
    if study.leaks is None:
        return None
    blocks: list[str | Table | Plot] = []
    rows, changes = [], []
    for split, check in study.leaks.items():
        exact = sum(leak.kind == "exact" for leak in check.found)
        share = len(check.found) / check.rows if check.rows else 0.0
        rows.append([split, f"{check.rows:,}", f"{exact:,}", f"{len(check.found) - exact:,}", f"{share:.2%}"])
        for name, score in (check.without or {}).items():
            changes.append([split, name, _score(study.evaluations[split].scores.get(name)), _score(score)])
    blocks.append(
        Table(
            ["split", "rows", "the same text", "lightly edited", "share"],
            rows,
            "Rows whose text is in the training data as well",
        )
    )
    if changes:
        blocks.append(Table(["split", "metric", "all rows", "without them"], changes, "Scores without these rows"))
    for split, check in study.leaks.items():
        shown = sorted(zip(check.found, check.texts, strict=False), key=lambda pair: pair[0].similarity)[:_MOST]
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
            head = [f"{split} row", "training row", "similarity", "its text", "the training text"]
            blocks.append(Table(head, rows, "Examples, least similar first; rows are counted from 1"))
    return Section("Leaks", blocks)


def _curves(study: Study) -> Section | None:
    blocks: list[str | Table | Plot] = []
    if study.curve:
        points = [(float(row["step"]), float(row["loss"])) for row in study.curve if "loss" in row]
        alt = "Training loss by step"
        blocks.append(Plot(plots.lines(alt, [plots.Line("loss", _thinned(points, _POINTS))], "step", "loss"), alt))
        rows = [[f"{x:,.0f}", f"{y:.4f}"] for x, y in _thinned(points, _MOST)]
        blocks.append(Table(["step", "loss"], rows, "Training loss, averaged over stretches of steps", for_plot=True))
    if study.dev:
        series: dict[str, list[tuple[float, float]]] = {}
        for row in study.dev:
            series.setdefault(str(row["metric"]), []).append((float(row["step"]), float(row["value"])))
        for name, values in series.items():
            alt = f"Dev {name} by step"
            blocks.append(Plot(plots.lines(alt, [plots.Line(name, values, dots=True)], "step", name), alt))
            rows = [[f"{x:,.0f}", f"{y:.4f}"] for x, y in values]
            blocks.append(Table(["step", name], rows, alt, for_plot=True))
    return Section("Training", blocks) if blocks else None


def _thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Means of neighbours, so that at most so many points are left."""
    if len(points) <= most:
        return list(points)
    return [tuple(np.mean(part, axis=0).tolist()) for part in np.array_split(np.array(points), most)]


def _confusion(split: str, one: Confusion | None) -> Section | None:
    if one is None:
        return None
    alt = f"Confusion matrix on {split}: gold labels are rows, predicted ones columns"
    rows = [[gold, said, f"{count:,}"] for gold, said, count in one.pairs]
    blocks: list[str | Table | Plot] = [Plot(plots.matrix(alt, one.labels, one.table), alt)]
    if len(one.labels) <= 10:
        cells = [[label, *map(str, row)] for label, row in zip(one.labels, one.table, strict=True)]
        blocks.append(Table(["gold / predicted", *one.labels], cells, alt, for_plot=True))
    if rows:
        blocks.append(Table(["gold", "predicted", "times"], rows, "The most frequent errors"))
    return Section(f"Confusion on {split}", blocks)


def _labels(split: str, rows: Sequence[LabelSlice]) -> Section | None:
    if not rows:
        return None
    cells = [
        [one.label, f"{one.support:,}", f"{one.predicted:,}", str(one.precision), str(one.recall), str(one.f1)]
        for one in rows
    ]
    head = ["label", "occurs", "predicted", "precision", "recall", "f1"]
    return Section(f"By label on {split}", [Table(head, cells)])


def _lengths(split: str, rows: Sequence[LengthSlice], metric: str) -> Section | None:
    if not rows:
        return None
    names = [f"{one.low}" if one.low == one.high else f"{one.low}–{one.high}" for one in rows]
    alt = f"{metric} by the length of texts on {split}"
    cells = [[name, f"{one.count:,}", str(one.score)] for name, one in zip(names, rows, strict=True)]
    plot = plots.whiskers(alt, names, [one.score for one in rows], "tokens", metric)
    return Section(f"By length on {split}", [Plot(plot, alt), Table(["tokens", "texts", metric], cells)])


def _calibration(study: Study) -> Section | None:
    one = study.calibration
    if one is None:
        return None
    said = f"A temperature of {one.temperature:.3f} was fitted on {one.fitted_on}; measured on {one.measured_on}."
    if one.threshold is not None:
        said += f" A label is given from a probability of {one.threshold:.2f} on."
    rows = [["before", str(one.before)], ["after", str(one.after)]]
    blocks: list[str | Table | Plot] = [said, Table(["", "expected calibration error"], rows)]
    if one.bins_before or one.bins_after:
        alt = f"Accuracy against confidence on {one.measured_on}, before and after the temperature"
        blocks.append(Plot(plots.reliability(alt, one.bins_before, one.bins_after), alt))
        cells = [
            [name, f"{b.low:.2f}–{b.high:.2f}", f"{b.count:,}", f"{b.confidence:.3f}", f"{b.accuracy:.3f}"]
            for name, bins in (("before", one.bins_before), ("after", one.bins_after))
            for b in bins
            if b.count
        ]
        blocks.append(Table(["", "confidence", "answers", "mean confidence", "accuracy"], cells, alt, for_plot=True))
    return Section("Calibration", blocks)


def _abstention(study: Study, found: _Found) -> Section | None:
    one = study.abstention
    if one is None:
        return None
    said = (
        f"Answers of a confidence of at least {one.threshold:.4f} were right in {one.precision} of all cases where the "
        f"threshold was fitted, which is for {one.coverage:.1%} of texts; {one.wanted:.2%} was wanted."
    )
    rows = [[split, str(held.precision), f"{held.coverage:.1%}"] for split, held in found.held.items()]
    table = [Table(["split", "precision of these answers", "share of texts"], rows)] if rows else []
    return Section("When it had better not answer", [said, *table])


def _suspects(study: Study, split: str) -> Section | None:
    listed, one = (study.suspects or {})[split], study.evaluations[split]
    if not listed:
        return None
    said = (
        f"{len(listed)} gold labels of {split} that the model doubts most, for a person to look at: it may be the "
        "model that errs. None was changed."
    )
    rows = [
        [
            str(s.index + 1),
            one.labels[s.given],
            f"{one.labels[s.likely]} ({s.likely_probability:.2f})",
            _excerpt(one.texts[s.index]) if one.texts is not None else "",
        ]
        for s in listed[:_MOST]
    ]
    return Section(f"Doubtful labels of {split}", [said, Table(["row", "gold", "the model says", "text"], rows)])


def _reading(study: Study) -> Section | None:
    if not study.reading:
        return None
    rows = [
        [
            split,
            f"{one.texts:,}",
            f"{one.several / one.texts:.2%}" if one.texts else "–",
            f"{one.tokens_read:,}",
            f"{one.tokens_total:,}",
        ]
        for split, one in study.reading.items()
    ]
    head = ["split", "texts", "in several windows", "tokens read", "tokens in all"]
    return Section("How much was read", [Table(head, rows)])


def _data(study: Study) -> Section | None:
    if not study.data:
        return None
    rows = [[one.split, ", ".join(one.files), f"{one.rows:,}"] for one in study.data]
    blocks: list[str | Table | Plot] = [Table(["split", "files", "rows"], rows)]
    counted = [one for one in study.data if one.labels]
    if counted:
        names = list(dict.fromkeys(name for one in counted for name in one.labels or {}))
        cells = [[name, *(f"{(one.labels or {}).get(name, 0):,}" for one in counted)] for name in names]
        blocks.append(Table(["label", *(one.split for one in counted)], cells, "How often each label occurs"))
    return Section("Data", blocks)


def _pairs(title: str, values: Mapping[str, Any] | None) -> Section | None:
    if not values:
        return None
    return Section(title, [Table(["name", "value"], [[name, _value(value)] for name, value in values.items()])])


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _score(score: Score | None) -> str:
    return "–" if score is None else str(score)


def _excerpt(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


# --- for programs ---


def _as_json(study: Study, found: _Found) -> dict[str, Any]:
    facts = {
        name: getattr(study, name)
        for name in (
            *("title", "kind", "model", "base", "language", "data", "recipe", "curve", "dev", "seeds"),
            *("calibration", "abstention", "comparison", "reading", "timings", "versions"),
        )
    }
    splits = {
        split: {
            "rows": len(one.gold),
            "scores": one.scores,
            "labels": found.labels[split],
            "lengths": found.lengths[split],
            "confusion": found.confusion.get(split),
            "abstention": found.held.get(split),
            "leaks": (study.leaks or {}).get(split),
            "suspects": (study.suspects or {}).get(split),
        }
        for split, one in study.evaluations.items()
    }
    said = {**_there(facts), "main": study.main, "final": study.final}
    return dict(_jsonable({**said, "evaluations": {split: _there(one) for split, one in splits.items()}}))


def _there(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _jsonable(value: Any) -> Any:
    """As JSON has it: no NaN, no infinity, no numpy."""
    if isinstance(value, Score | Difference):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return _jsonable(_there({name: getattr(value, name) for name in value.__dataclass_fields__}))
    if isinstance(value, Mapping):
        return {str(name): _jsonable(one) for name, one in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _jsonable(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_jsonable(one) for one in value]
    if isinstance(value, float):
        return number(value)
    return value if value is None or isinstance(value, str | int) else str(value)
