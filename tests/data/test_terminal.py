"""Colours: on terminals only, and as NO_COLOR, FORCE_COLOR and the configuration say."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from bertie.data import terminal
from bertie.data.terminal import has_color, set_color_mode, style


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    yield
    set_color_mode("auto")


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_color(Terminal())
    assert not has_color(io.StringIO())
    assert not has_color(None)
    assert style("x", "bold", "red", file=Terminal()) == "\x1b[1;31mx\x1b[0m"
    assert style("", "bold", file=Terminal()) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert not has_color(Terminal())


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert has_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_color(Terminal())
    monkeypatch.setenv("NO_COLOR", "")  # empty is not set
    assert has_color(Terminal())


def test_the_configuration_decides_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    set_color_mode("always")
    assert has_color(io.StringIO())
    set_color_mode("never")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not has_color(Terminal())


def test_a_notebook_is_interactive() -> None:
    notebook = type("OutStream", (io.StringIO,), {"__module__": "ipykernel.iostream"})()
    assert terminal.is_interactive(notebook)
    assert not terminal.is_interactive(io.StringIO())
