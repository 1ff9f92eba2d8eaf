from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

from bertie.errors import InputError
from bertie.evaluation import plots
from bertie.evaluation.intervals import Score
from bertie.evaluation.model_report import confusion, confusion_cells
from bertie.evaluation.pages import Header, Section, Table, Tile, escape_markdown, to_html, to_markdown
from bertie.evaluation.report import DataFile, Evaluation, ModelReport, write_report
from tests.evaluation.model_reports import EVIL, bare, classified, full, of_kind

VOID = {"meta", "wbr", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close in order, and keeps what is in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("report") / "new"
    written = write_report(folder, full())
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["predictions.jsonl", "report.html", "report.json", "report.md"]
    return {path.name: path.read_text(encoding="utf-8") for path in written if path.suffix != ".jsonl"}


def test_the_page_is_whole_and_needs_nothing(files: dict[str, str]) -> None:
    page = Page(files["report.html"])
    names = [tag for tag, _ in page.tags]
    assert not set(names) & {"iframe", "img", "link", "object", "foreignobject"}
    for _, attributes in page.tags:
        assert not {"src", "xlink:href", "action", "onload", "onclick"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    # The only script is the one that the policy names by its hash.
    assert names.count("script") == 1
    (script,) = re.findall(r"<script>(.*?)</script>", files["report.html"], re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    targets = {attributes.get("id") for _, attributes in page.tags}
    links = [str(attributes["href"])[1:] for tag, attributes in page.tags if tag == "a"]
    assert len(links) == len(SECTIONS)
    assert set(links) <= targets
    assert "url(" not in files["report.html"]
    assert "@import" not in files["report.html"]
    assert "prefers-color-scheme: dark" in files["report.html"]
    # The texts that tried to be markup are there, as texts.
    assert any("<script>alert('x')</script>" in words for words in page.words)


def test_plots_are_drawn_and_described(files: dict[str, str]) -> None:
    drawings = re.findall(r"<svg.*?</svg>", files["report.html"], re.S)
    titles = []
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.get("role") == "img"
        title = tree.find("title")
        assert title is not None
        assert title.text == tree.get("aria-label")
        titles.append(title.text)
        for shape in tree.iter():
            for name in ("x", "y", "x1", "y1", "cx", "cy"):
                if shape.get(name) is not None:
                    assert -1 <= float(shape.get(name) or 0) <= 1000
    assert titles == [
        "accuracy of this model and of the baselines on test, with 95% intervals",
        "Confusion matrix on test: rows are gold labels, columns predicted labels",
        "accuracy by text length on test",
        "Training loss by step",
        "Dev accuracy by step",
        "Reliability diagram on test, before and after temperature scaling",
    ]


SECTIONS = [
    *("Baselines", "Scores", "Seeds", "Comparison with TF-IDF &lt;i&gt;", "Errors on test", "Confusion on test"),
    *("By label on test", "By length on test", "Training", "Calibration", "Abstention threshold", "Leaks"),
    *("Label issues of test", "Token coverage", "Data", "Recipe", "Time", "Versions"),
]


def test_markdown_has_every_section_and_sound_tables(files: dict[str, str]) -> None:
    text = files["report.md"]
    assert "for review: the model itself may be wrong." in text
    assert re.findall(r"^## (.*)$", text, re.M) == SECTIONS
    assert "<script" not in text
    assert "<svg" not in text
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1
    assert "| accuracy | 0.8500 ± 0.0707 | 0.8000 | 0.9000 | 2 |" in text
    assert "| test | 120 | 1 | 1 | 1.67% |" in text
    assert "| test | 120 | 10.00% | 900 | 1,000 |" in text


def test_folders_are_not_told(files: dict[str, str]) -> None:
    for text in files.values():
        assert "secret" not in text
        assert "train.csv" in text
        assert "more.csv" in text
        assert "C:" not in text


def test_json_goes_round_without_nan(files: dict[str, str]) -> None:
    def refuse(name: str) -> float:
        raise AssertionError(name)

    output = json.loads(files["report.json"], parse_constant=refuse)
    assert json.loads(json.dumps(output)) == output
    study = full()
    test = output["evaluations"]["test"]
    assert test["scores"]["accuracy"] == study.evaluations["test"].scores["accuracy"].as_dict()
    assert test["leaks"]["scores_without"]["accuracy"] == {"value": 0.5, "low": 0.4, "high": None}
    assert test["leaks"]["leaks"][0] == {"test_index": 3, "train_index": 7, "kind": "near", "similarity": 0.9}
    assert (output["main"], output["final"], output["kind"]) == ("accuracy", "test", "classify")
    assert output["recipe"]["patience"] is None
    assert len(output["curve"]) == 700
    assert sum(one["count"] for one in test["lengths"]) == 120
    assert 0 < test["abstention"]["coverage"] <= 1
    empty = [one for one in output["calibration"]["bins_before"] if not one["count"]]
    assert empty
    assert all(one["accuracy"] is None for one in empty)


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    markdown, html, data, _ = (path.read_text(encoding="utf-8") for path in write_report(tmp_path, bare()))
    assert re.findall(r"^## (.*)$", markdown, re.M) == ["Scores", "Confusion on test", "By label on test"]
    Page(html)
    output = json.loads(data)
    assert set(output) == {"title", "kind", "model", "data", "main", "final", "evaluations"}
    assert "None" not in markdown + html


@pytest.mark.parametrize("kind", ["multi_label", "regress", "tag", "answer", "rerank"])
def test_every_kind(kind: str, tmp_path: Path) -> None:
    markdown, html, data, _ = (path.read_text(encoding="utf-8") for path in write_report(tmp_path, of_kind(kind)))
    Page(html)
    output = json.loads(data)["evaluations"]["test"]
    assert ("By length on test" in markdown) == (kind != "rerank")
    assert ("By label on test" in markdown) == (kind in ("multi_label", "tag"))
    if kind == "tag":
        assert [one["label"] for one in output["labels"]] == ["X", "Y"]
    if kind == "multi_label":
        assert [one["support"] for one in output["labels"]] == [3, 3, 0]


def test_a_report_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(tmp_path, bare())
    before = (tmp_path / "report.md").read_bytes()

    def full_disk(handle: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report(tmp_path, replace(bare(), title="Another"))
    assert (tmp_path / "report.md").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 4


def test_confusion_is_scikit_learns() -> None:
    one = classified(k=5)
    result = confusion(one)
    expected = confusion_matrix(one.gold, one.predicted, labels=one.labels)
    assert result.table == expected.tolist()
    np.fill_diagonal(expected, 0)
    assert result.pairs[0][2] == expected.max()
    assert sum(count for *_, count in result.pairs) <= expected.sum()


def test_many_labels_are_gathered() -> None:
    one = classified(n=800, k=30)
    result = confusion(one)
    assert len(result.labels) == 21
    assert result.labels[-1] == "10 others"
    assert np.sum(result.table) == 800
    expected = confusion_matrix(one.gold, one.predicted, labels=one.labels)
    errors = expected.sum(axis=0) + expected.sum(axis=1) - 2 * np.diag(expected)
    kept = [one.labels.index(label) for label in result.labels[:-1]]
    left = [i for i in range(30) if i not in kept]
    assert errors[kept].min() >= errors[left].max()
    assert [row[i] for i, row in enumerate(result.table[:-1])] == np.diag(expected)[kept].tolist()


def test_markdown_that_means_nothing() -> None:
    output = to_markdown(EVIL, [Section("s", [EVIL, Table(["a|b"], [["c\nd|"]])])])
    assert "| a\\|b |\n| --- |\n| c d\\| |" in output
    assert "\x00" not in output
    assert escape_markdown("*a* <b>") == r"\*a\* &lt;b&gt;"
    assert to_html(EVIL, [Section(EVIL, [EVIL])], Header([EVIL], [Tile(EVIL, EVIL, EVIL)], EVIL)).count("<script") == 1


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.91, 0.93), (5.0, 5.0), (0.0, 0.0), (-3.0, 1e6), (1e-9, 2e-9)])
def test_axes_hold_their_values(low: float, high: float) -> None:
    drawn = ElementTree.fromstring(plots.lines("x", [plots.Line("y", [(0.0, low), (1.0, high)])], "x", "y"))
    (line,) = drawn.iter("polyline")
    for place in (line.get("points") or "").split():
        x, y = map(float, place.split(","))
        assert 62 <= x <= 626
        assert 14 <= y <= 256


def test_plots_of_what_is_not_defined() -> None:
    nan = float("nan")
    assert plots.lines("x", [plots.Line("y", [(0.0, nan)])], "x", "y") == ""
    assert plots.error_bars("x", ["a"], [Score(nan, nan, nan)], "x", "y") == ""
    assert "<circle" in plots.error_bars("x", ["a", "b"], [Score(nan, nan, nan), Score(1.0, 0.5, 1.5)], "x", "y")


def test_refusals() -> None:
    with pytest.raises(InputError, match="predicted has 1 entries; gold has 2"):
        Evaluation(scores={}, gold=["a", "b"], predicted=["a"])
    with pytest.raises(InputError, match="kind='guess' must be one of"):
        replace(bare(), kind="guess")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least one split"):
        replace(bare(), evaluations={})
    with pytest.raises(InputError, match=r"name \['dev'\]; the splits are \['test'\]"):
        replace(bare(), label_issues={"dev": []})
    assert DataFile(split="x", files=["a/b.csv"], rows=1).files == ("b.csv",)
    assert isinstance(bare(), ModelReport)


def test_the_first_lines(files: dict[str, str]) -> None:
    """What must be known first comes first, then the headline figures."""
    lines = files["report.md"].split("\n\n")
    assert lines[1].startswith("> **Training did not beat")
    tiles = lines[3].splitlines()
    accuracy = full().evaluations["test"].scores["accuracy"]
    assert tiles == [
        f"- accuracy on test: **{accuracy.value:.3f}** (95% interval {accuracy.low:.3f} to {accuracy.high:.3f})",
        "- vs. the best baseline: **+0.500** (majority class: 0.400; significant, p &lt; 0.001)",
        "- train rows: **900** (120 test, 120 dev, 3 labels)",
        "- training time: **12 s** (700 steps, the best at step 600)",
    ]
    assert files["report.html"].index('class="notice"') < files["report.html"].index('class="tiles"')


def test_settings_at_their_defaults_are_folded(files: dict[str, str]) -> None:
    folded = files["report.html"].split("<summary>1 settings at their defaults</summary>")
    assert len(folded) == 2
    recipe, rest = folded[0][folded[0].rindex("<h2>Recipe") :], folded[1][: folded[1].index("</details>")]
    assert "0.00003" in recipe
    assert "patience" not in recipe
    assert "patience" in rest


def test_a_chart_needs_two_points(tmp_path: Path) -> None:
    report = replace(full(), curve=[{"step": 10, "loss": 0.5}], dev=full().dev[:1])  # type: ignore[index]
    markdown, html, *_ = (path.read_text(encoding="utf-8") for path in write_report(tmp_path, report))
    assert "Training loss at step 10: 0.5000." in markdown
    assert "Dev accuracy after step 300: 0.8000." in markdown
    assert "Training loss by step" not in html


def test_words_that_decided_are_marked(files: dict[str, str]) -> None:
    html = files["report.html"]
    assert '<mark class="against" style="--w:0.50" title="-0.50">word</mark> other' in html
    assert html.count('<mark class="for"') == html.count('<mark class="against"') > 0


def test_many_labels_have_a_heat_map(tmp_path: Path) -> None:
    """A cell for each pair of labels that occurs, whatever the number of labels."""
    evaluation = classified(n=800, k=60)
    report = ModelReport(title="t", kind="classify", model="m", evaluations={"test": evaluation})
    html = next(path for path in write_report(tmp_path, report) if path.suffix == ".html").read_text("utf-8")
    (drawing,) = re.findall(r'<svg class="zoom".*?</svg>', html, re.S)
    cells = [shape for shape in ElementTree.fromstring(drawing).iter("rect") if "heat" in str(shape.get("class"))]
    pairs = set(zip(evaluation.gold, evaluation.predicted, strict=True))
    assert len(cells) == len(pairs)
    labels, counts = confusion_cells(evaluation)
    assert sorted(labels) == sorted(evaluation.labels)
    assert sum(count for *_, count in counts) == 800
    expected = confusion_matrix(evaluation.gold, evaluation.predicted, labels=labels)
    assert all(expected[gold, predicted] == count for gold, predicted, count in counts)
