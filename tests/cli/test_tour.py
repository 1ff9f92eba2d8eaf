"""`bertie tour`: the output of every task, as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

import bertie
from bertie.checkpoints import hub
from bertie.cli import main, tour
from tests.cli.conftest import HEADS, save_small

VERBS = ["fill", "classify", "classify --labels", "tag", "answer", "embed, rerank"]
ROOT = Path(__file__).parents[2]
REAL = Path(bertie.__file__).parent / "models" / hub.DEFAULT


def run_tour(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["tour", "--json"]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


def predictions(output: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The predictions of each step for each of its inputs, without scores."""
    return {
        step["verb"]: [[text for text, _ in example["predictions"]] for example in step["examples"]]
        for step in output["steps"]
    }


def test_json(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = run_tour(capsys)
    assert (output["model"], output["max_length"]) == (small, 2048)
    assert output["load_seconds"] > 0
    assert [step["verb"] for step in output["steps"]] == VERBS
    for step in output["steps"]:
        assert step["tokens_read"] == step["tokens_total"] > 0
        assert step["windows"] >= step["texts"] >= 1
        assert step["seconds"] > 0
    predicted = predictions(output)
    assert predicted["classify"] == [[result.label] for result in bertie.Classifier.load().classify(tour.REVIEWS)]
    _, text = tour.book()
    wanted = bertie.Reader.load().answer([(tour.QUESTION, text)])[0]
    step = output["steps"][VERBS.index("answer")]
    assert predicted["answer"] == [[wanted.best.text]]
    assert (step["texts"], step["windows"]) == (1, wanted.windows)
    assert wanted.windows > 1
    assert wanted.best.text in step["examples"][0]["context"]
    assert step["examples"][0]["context"].strip("… ") in text


@pytest.mark.usefixtures("short")
def test_search_reranks_the_nearest(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = run_tour(capsys)["steps"][-1]
    documents = tour.passages()
    vectors = bertie.Embedder.load().similarity([tour.QUERY], [text for _, text in documents])[0]
    nearest = sorted(range(len(documents)), key=lambda i: -vectors[i])[: tour.RETRIEVED]
    scores = bertie.Reranker.load().predict([(tour.QUERY, documents[i][1]) for i in nearest])
    wanted = sorted(zip(scores, nearest, strict=True), key=lambda pair: -pair[0])[: tour.SHOWN]
    assert [(text, pytest.approx(score, abs=1e-6)) for text, score in step["examples"][0]["predictions"]] == [
        (documents[i][0], score) for score, i in wanted
    ]
    assert step["examples"][0]["input"] == tour.QUERY
    assert step["texts"] == 1 + len(documents) + tour.RETRIEVED
    assert f"{len(documents)} paragraphs" in step["title"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A book of one page, for tests that do not depend on its length."""
    (tmp_path / "book.txt").write_text("\n\n".join(tour.BOOK.read_text(encoding="utf-8").split("\n\n")[:12]), "utf-8")
    monkeypatch.setattr(tour, "BOOK", tmp_path / "book.txt")


@pytest.mark.usefixtures("short")
def test_text(small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["tour"]) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("Bertie ")
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 70
    for verb in VERBS:
        assert f"\n\n{verb}: " in plain
    for name in ("input", "output", "read"):
        assert plain.count(f"\n  {name:<8}") >= len(VERBS)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["tour"]) == 0
    assert "\x1b[1mfill: fill-mask\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["tour"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_the_book() -> None:
    title, text = tour.book()
    assert "public domain" in title
    assert 3000 < len(text.split()) < 10_000
    assert tour.BOOK.stat().st_size < 60_000
    assert text.index("fifty-five thousand pounds") > 10_000  # beyond a maximum length of 2,048 tokens


def test_the_book_is_packaged() -> None:
    """Files other than Python go into a wheel only if pyproject.toml lists them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["bertie"]
    inside = tour.BOOK.relative_to(Path(bertie.__file__).parent)
    assert any(fnmatch(inside.as_posix(), pattern) for pattern in patterns)


@pytest.mark.usefixtures("short")
def test_no_zero_shot_without_an_nli_head(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {name: info for name, info in HEADS.items() if name != "nli"}
    save_small(tmp_path / "models" / hub.DEFAULT, Path(models["embed"]), heads)
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path / "models")
    assert [step["verb"] for step in run_tour(capsys)["steps"]] == [verb for verb in VERBS if "--labels" not in verb]


def test_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path)
    assert main(["tour"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "bertie: the tour needs the built-in model, which this installation does not have\n")


@pytest.mark.skipif(not REAL.is_dir(), reason="the built-in model is not in this tree")
def test_built_in_model(tmp_path: Path) -> None:
    """In a subprocess, from any folder, as a user runs it."""
    environment = os.environ | {"PYTHONPATH": str(REAL.parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "bertie", "tour", "--json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    output = json.loads(done.stdout)
    predicted = predictions(output)
    assert predicted["fill"][0][0] == "capital"
    assert predicted["classify"] == [["positive"], ["negative"], ["neutral"]]
    names = {name.lower() for name in predicted["tag"][0]}
    assert {"ada lovelace (per)", "charles babbage (per)", "london (loc)"} <= names
    assert predicted["answer"][0][0] == "the Reform"
    best = sorted(text[:30] for text in predicted["embed, rerank"][0][:2])  # their scores are nearly equal
    assert best == ["A memorandum of the wager was ", "“A true Englishman doesn’t jok"]
    assert all(step["tokens_read"] == step["tokens_total"] for step in output["steps"])
