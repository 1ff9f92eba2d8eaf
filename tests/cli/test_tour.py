"""The tour: every task, with what was read and how long it took; for people, for files and for scripts."""

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

STOPS = ["fill", "classify", "classify --labels", "tag", "answer", "embed, rerank"]
REAL = Path(bertie.__file__).parent / "models" / hub.DEFAULT


def taken(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["tour", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def answers(found: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The answers of each stop to each of its questions, without scores."""
    return {stop["verb"]: [[text for text, _ in one["answers"]] for one in stop["said"]] for stop in found["stops"]}


def test_for_scripts(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = taken(capsys)
    assert (found["model"], found["max_length"]) == (small, 2048)
    assert found["load_seconds"] > 0
    assert [stop["verb"] for stop in found["stops"]] == STOPS
    for stop in found["stops"]:
        assert stop["tokens_read"] == stop["tokens_total"] > 0
        assert stop["windows"] >= stop["texts"] >= 1
        assert stop["seconds"] > 0
    said = answers(found)
    assert said["classify"] == [[one.label] for one in bertie.Classifier.load().classify(tour.OPINIONS)]
    _, text = tour.book()
    wanted = bertie.Reader.load().answer([(tour.QUESTION, text)])[0]
    stop = found["stops"][STOPS.index("answer")]
    assert said["answer"] == [[wanted.best.text]]
    assert (stop["texts"], stop["windows"]) == (1, wanted.windows)
    assert wanted.windows > 1
    assert wanted.best.text in stop["said"][0]["note"]
    assert stop["said"][0]["note"].strip("… ") in text


@pytest.mark.usefixtures("short")
def test_the_search_is_of_the_nearest(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    stop = taken(capsys)["stops"][-1]
    query, documents, _ = tour.library()
    vectors = bertie.Embedder.load().similarity([query], [text for _, text in documents])[0]
    nearest = sorted(range(len(documents)), key=lambda i: -vectors[i])[: tour.NEAREST]
    scores = bertie.Reranker.load().predict([(query, documents[i][1]) for i in nearest])
    wanted = sorted(zip(scores, nearest, strict=True), key=lambda one: -one[0])[: tour.BEST]
    assert [(text, pytest.approx(score, abs=1e-6)) for text, score in stop["said"][0]["answers"]] == [
        (documents[i][0], score) for score, i in wanted
    ]
    assert stop["texts"] == 1 + len(documents) + tour.NEAREST


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A book of one page, where nothing depends on its length."""
    (tmp_path / "book.txt").write_text("\n\n".join(tour.BOOK.read_text(encoding="utf-8").split("\n\n")[:12]), "utf-8")
    monkeypatch.setattr(tour, "BOOK", tmp_path / "book.txt")


@pytest.mark.usefixtures("short")
def test_for_people(small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["tour"]) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("Bertie ")
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= 70
    for verb in STOPS:
        assert f"\n\n{verb}: " in plain
    for name in ("asked", "answer", "read"):
        assert plain.count(f"\n  {name:<8}") >= len(STOPS)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["tour"]) == 0
    assert "\x1b[1mfill: words for masked places\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["tour"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_in_a_checkout_it_searches_the_readme(small: str) -> None:
    query, documents, source = tour.library()
    assert (query, source) == (tour.OF_README, "sections of the README")
    assert dict(documents).keys() >= {"Bertie", "Train"}
    whole = tour.README.read_text(encoding="utf-8")
    assert sum(len(text) for _, text in documents) == len(whole) - 3 * (len(documents) - 1) - 2


@pytest.mark.usefixtures("short")
def test_from_a_wheel_it_searches_the_book(
    small: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tour, "README", tmp_path / "README.md")
    found = taken(capsys)
    stop = found["stops"][-1]
    paragraphs = tour.book()[1].split("\n\n")
    assert stop["said"][0]["asked"] == tour.OF_BOOK
    assert stop["texts"] == 1 + len(paragraphs) + tour.NEAREST
    assert f"{len(paragraphs)} paragraphs" in stop["about"]


def test_the_book() -> None:
    title, text = tour.book()
    assert "public domain" in title
    assert 3000 < len(text.split()) < 10_000
    assert tour.BOOK.stat().st_size < 60_000
    assert text.index("fifty-five thousand pounds") > 10_000  # beyond what a model of 2,048 tokens reads at once


def test_the_book_is_int8() -> None:
    """What is no Python goes into a wheel only if pyproject.toml says so."""
    project = tomllib.loads((tour.README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["bertie"]
    inside = tour.BOOK.relative_to(Path(bertie.__file__).parent)
    assert any(fnmatch(inside.as_posix(), pattern) for pattern in patterns)


@pytest.mark.usefixtures("short")
def test_a_model_without_inference_leaves_it_out(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {name: info for name, info in HEADS.items() if name != "nli"}
    save_small(tmp_path / "models" / hub.DEFAULT, Path(models["embed"]), heads)
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path / "models")
    assert [stop["verb"] for stop in taken(capsys)["stops"]] == [one for one in STOPS if "--labels" not in one]


def test_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path)
    assert main(["tour"]) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "bertie: the tour is one of the built-in model, and this installation has none\n")


@pytest.mark.skipif(not REAL.is_dir(), reason="the built-in model is not in this tree")
def test_the_real_one(tmp_path: Path) -> None:
    """In a process of its own, from any folder, as a user runs it."""
    environment = os.environ | {"PYTHONPATH": str(REAL.parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", "bertie", "tour", "--json"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    said = answers(found)
    assert said["fill"][0][0] == "capital"
    assert said["classify"] == [["positive"], ["negative"], ["neutral"]]
    names = {name.lower() for name in said["tag"][0]}
    assert {"ada lovelace (per)", "charles babbage (per)", "london (loc)"} <= names
    assert said["answer"][0][0] == "the Reform"
    assert said["embed, rerank"][0][0] == "Train"
    assert all(stop["tokens_read"] == stop["tokens_total"] for stop in found["stops"])
