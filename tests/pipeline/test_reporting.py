"""Progress bars of single calls."""

from __future__ import annotations

import io
import threading
from contextlib import redirect_stderr

import pytest

from bertie import Embedder
from bertie.data import progress as bars
from bertie.errors import InputError
from bertie.pipeline import pipeline
from bertie.pipeline.reporting import show_progress, without_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setattr(bars, "FIRST", 0.0)
    monkeypatch.setattr(bars, "TERMINAL", 0.0)
    return Terminal()


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder()


TEXTS = ["a cat sat"] * 30


def test_batches_advance_the_bar(embedder: Embedder, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CPU_BATCH_TOKENS", 50)  # ten texts
    with redirect_stderr(terminal):
        embedder.embed(TEXTS)
    text = terminal.getvalue()
    assert "embed" in text
    assert "33%" in text
    assert "67%" in text
    assert "30 texts" in text


def test_progress_is_shown_to_people_only(embedder: Embedder, terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        embedder.embed(TEXTS, progress=False)
        thread = threading.Thread(target=embedder.embed, args=(TEXTS,))  # as in a server
        thread.start()
        thread.join()
        with without_progress():
            embedder.embed(TEXTS)
    assert terminal.getvalue() == ""
    with redirect_stderr(log := io.StringIO()):
        embedder.embed(TEXTS)
        assert log.getvalue() == ""
        embedder.embed(TEXTS, progress=True)
    assert "embed: 30 texts" in log.getvalue()


def test_one_bar_for_nested_calls(embedder: Embedder, terminal: Terminal) -> None:
    with redirect_stderr(terminal), show_progress("all", 90, None):
        embedder.embed(TEXTS)
        embedder.similarity(TEXTS, "a cat")
    assert "all" in terminal.getvalue()
    assert "embed" not in terminal.getvalue()


def test_generators_have_no_total(embedder: Embedder, terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        embedder.embed(text for text in TEXTS)
    assert "30 texts" in terminal.getvalue()
    assert "%" not in terminal.getvalue()


def test_an_error_ends_the_bar(embedder: Embedder, terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        with pytest.raises(InputError, match="must be a str"):
            embedder.embed([*TEXTS, None])  # type: ignore[list-item]
        embedder.embed(TEXTS)
    assert "30 texts" in terminal.getvalue()
