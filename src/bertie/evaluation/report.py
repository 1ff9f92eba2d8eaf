"""Write a model report: `report.md` with tables, `report.html` with plots, `report.json` for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertie.data.atomic import atomic_write
from bertie.evaluation import prediction_files
from bertie.evaluation.intervals import Difference, Score, finite_or_none
from bertie.evaluation.model_report import (
    CalibrationReport,
    Comparison,
    DataFile,
    Evaluation,
    LeakCheck,
    ModelReport,
    TokenCoverage,
)
from bertie.evaluation.pages import clean, to_html, to_markdown
from bertie.evaluation.report_header import report_header
from bertie.evaluation.report_sections import DerivedTables, report_sections

__all__ = [
    "CalibrationReport",
    "Comparison",
    "DataFile",
    "Evaluation",
    "LeakCheck",
    "TokenCoverage",
    "ModelReport",
    "write_report",
]


def write_report(folder: str | Path, report: ModelReport) -> list[Path]:
    """Write `report.md`, `report.html`, `report.json` and `predictions.jsonl` into a folder, each atomically."""
    derived = DerivedTables(report)
    sections, header = report_sections(report, derived), report_header(report)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.md": to_markdown(report.title, sections, header),
        "report.html": to_html(report.title, sections, header),
        "report.json": json.dumps(_as_json(report, derived), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        prediction_files.NAME: prediction_files.to_lines(report.evaluations),
    }
    for name, text in texts.items():
        atomic_write(path / name, clean(text).encode("utf-8"))
    return [path / name for name in texts]


def _as_json(report: ModelReport, derived: DerivedTables) -> dict[str, Any]:
    facts = {
        name: getattr(report, name)
        for name in (
            *("title", "kind", "model", "base", "language", "data", "recipe", "curve", "dev", "dev_source", "seeds"),
            *(
                "calibration",
                "abstention",
                "comparison",
                "baselines",
                "token_coverage",
                "timings",
                "versions",
            ),
        )
    }
    if report.findings:
        facts["findings"] = report.findings
    splits = {
        split: {
            "rows": len(evaluation.gold),
            "scores": evaluation.scores,
            "labels": derived.labels[split],
            "lengths": derived.lengths[split],
            "confusion": derived.confusion.get(split),
            "abstention": derived.selective.get(split),
            "leaks": (report.leaks or {}).get(split),
            "label_issues": (report.label_issues or {}).get(split),
        }
        for split, evaluation in report.evaluations.items()
    }
    evaluations = {split: _without_none(fields) for split, fields in splits.items()}
    return dict(
        _jsonable({**_without_none(facts), "main": report.main, "final": report.final, "evaluations": evaluations})
    )


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _jsonable(value: Any) -> Any:
    """Convert to JSON types: no NaN, no infinity, no numpy."""
    if isinstance(value, Score | Difference):
        return value.as_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return _jsonable(_without_none({name: getattr(value, name) for name in value.__dataclass_fields__}))
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _jsonable(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return finite_or_none(value)
    return value if value is None or isinstance(value, str | int) else str(value)
