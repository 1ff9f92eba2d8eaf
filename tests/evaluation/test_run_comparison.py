"""Several runs on one page, from their folders alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertie.cli import main
from bertie.errors import InputError, NotFoundError
from bertie.evaluation import metrics
from bertie.evaluation.comparison_page import comparison_page
from bertie.evaluation.model_report import Evaluation, ModelReport
from bertie.evaluation.prediction_files import NAME, read_predictions
from bertie.evaluation.report import write_report
from bertie.evaluation.run_comparison import compare_runs
from tests.evaluation.model_reports import EVIL, full, of_kind
from tests.evaluation.test_report import Page

GOLD = [("a", "b", EVIL)[i % 3] for i in range(90)]
LABELS = ["a", "b", EVIL]


def report(right: int, texts: list[str] | None = None, gold: list[str] = GOLD) -> ModelReport:
    """A model that is right on the first rows."""
    wrong = {"a": "b", "b": EVIL, EVIL: "a"}
    predicted = [label if i < right else wrong[label] for i, label in enumerate(gold)]
    table = np.eye(3)[[LABELS.index(label) for label in predicted]]
    test = Evaluation(
        scores=metrics.classification(gold, table, LABELS, resamples=50),
        gold=gold,
        predicted=predicted,
        labels=LABELS,
        texts=texts or [f"text {i}" for i in range(len(gold))],
    )
    recipe = {"lr": right / 1000, "epochs": 3, "schedule": EVIL}
    curve = [{"step": i, "loss": right / i} for i in range(1, 30)]
    return replace(full(), evaluations={"test": test}, recipe=recipe, curve=curve, leaks=None, label_issues=None)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for name, right in (("bad", 40), ("good", 80), ("middle", 78)):
        write_report(tmp_path / name, report(right))
    return [tmp_path / name for name in ("bad", "good", "middle")]


def test_differences(folders: list[Path]) -> None:
    """The best run first; p-values are McNemar's, corrected for three comparisons."""
    comparison = compare_runs(folders, resamples=50)
    assert [run.name for run in comparison.runs] == ["good", "middle", "bad"]
    assert comparison.same_rows
    gaps = {(pair.first, pair.second): pair for pair in comparison.differences}
    assert {pair.rows for pair in gaps.values()} == {90}
    near, far = gaps["good", "middle"].difference, gaps["good", "bad"].difference
    assert near is not None
    assert far is not None
    assert near.value == pytest.approx(2 / 90)
    assert far.value == pytest.approx(40 / 90)
    assert near.p == pytest.approx(0.5)  # two rows: the exact test's 0.5, the last of Holm's steps
    assert far.p == pytest.approx(3 * 2 * 0.5**40)


def test_rows_are_matched_by_their_text(tmp_path: Path, folders: list[Path]) -> None:
    order = list(range(89, -1, -1))
    other = report(50)
    test = other.evaluations["test"]
    assert test.texts is not None
    shuffled = replace(
        test, gold=[test.gold[i] for i in order], predicted=[test.predicted[i] for i in order],
        texts=[test.texts[i] for i in order], probabilities=None,
    )  # fmt: skip
    write_report(tmp_path / "shuffled", replace(other, evaluations={"test": shuffled}))
    comparison = compare_runs([folders[1], tmp_path / "shuffled"], resamples=20)
    assert comparison.same_rows
    (pair,) = comparison.differences
    assert pair.difference is not None
    assert (pair.rows, pair.difference.value) == (90, pytest.approx(30 / 90))


def test_other_rows(tmp_path: Path, folders: list[Path]) -> None:
    write_report(tmp_path / "other", report(50, [f"other {i}" for i in range(90)]))
    comparison = compare_runs([folders[1], tmp_path / "other"])
    assert not comparison.same_rows
    assert comparison.differences[0].difference is None
    assert "not all tested on the same rows" in comparison_page(comparison)


def test_the_page(folders: list[Path]) -> None:
    html = comparison_page(compare_runs(folders, resamples=20))
    page = Page(html)
    headings = [page.words[i] for i, word in enumerate(page.words) if word in ("Scores", "Differences", "Training")]
    assert headings[:2] == ["Scores", "Differences"]
    settings = html[html.index("<h2>Settings that differ") :]
    assert "0.08" in settings
    assert "epochs" not in settings
    assert html.count("<script") == 1


@pytest.mark.parametrize("kind", ["multi_label", "regress", "tag", "answer", "rerank"])
def test_every_kind(kind: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        made = of_kind(kind)
        test = replace(made.evaluations["test"], texts=[f"query {i // 3}\n{i}" for i in range(6)])
        write_report(tmp_path / name, replace(made, evaluations={"test": test}))
    comparison = compare_runs([tmp_path / "a", tmp_path / "b"], resamples=20)
    (pair,) = comparison.differences
    assert pair.difference is not None
    assert (pair.rows, pair.difference.value) == (6, 0)
    comparison_page(comparison)


def test_predictions_hold_no_texts(folders: list[Path]) -> None:
    rows = read_predictions(folders[0] / NAME)["test"]
    assert [row.gold for row in rows] == GOLD
    assert "text 1" not in (folders[0] / NAME).read_text()


def test_what_cannot_be_compared(tmp_path: Path, folders: list[Path]) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere has no report.json; bertie train and bertie eval"):
        compare_runs([folders[0], tmp_path / "nowhere"])
    write_report(tmp_path / "tags", of_kind("tag"))
    with pytest.raises(InputError, match=r"different tasks \(classify, tag\)"):
        compare_runs([folders[0], tmp_path / "tags"])
    with pytest.raises(InputError, match="the same folder is given twice"):
        compare_runs([folders[0], folders[0]])
    (tmp_path / "tags" / "report.json").write_text("{}")
    with pytest.raises(InputError, match=r"report.json is not a report of bertie train"):
        compare_runs([folders[0], tmp_path / "tags"])


def test_the_command(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    argv = ["compare", *map(str, folders), "--resamples", "20"]
    assert main([*argv, "-o", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "good", "middle", "bad"]
    assert "Comparison of 3 runs" in page.read_text()
    assert main([*argv, "-o", str(page)]) == 1
    assert "page.html exists; pass --overwrite" in capsys.readouterr().err
    assert main([*argv, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output["runs"]) == ["good", "middle", "bad"]
    assert len(output["differences"]) == 3
