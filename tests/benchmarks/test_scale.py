"""The tables and code blocks of docs/scale.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import scale as tables
from tests import test_docs
from tests.cluster.conftest import without_ray  # noqa: F401
from tests.test_readme import blocks, has_built_in, run

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"


def test_the_tables_are_computed() -> None:
    page = PAGE.read_text("utf-8")
    assert page == tables.fill_tables(page), "python -m benchmarks.scale --write docs/scale.md"
    assert page != tables.fill_tables(page, 10**6)
    assert tables.duration(tables.BILLION / 4286 / 3600) == "64.8 h"
    for one in tables.RATES:
        assert f"{one.rate:,}" in (ROOT / one.file).read_text("utf-8")


def test_the_commands_can_be() -> None:
    found = test_docs.commands(PAGE.read_text("utf-8"))
    assert found
    for words in found:
        test_docs.check(words)


@has_built_in
@pytest.mark.usefixtures("without_ray")
def test_the_python_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks(PAGE.read_text("utf-8")):
        run(block, scope, capsys)
