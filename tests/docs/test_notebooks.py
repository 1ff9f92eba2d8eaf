"""The tutorials: executed after their last change, and executable, in a reduced form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs_build import links, notebooks

import bertie
from tests.docs.pages import NOTEBOOKS
from tests.test_readme import has_built_in


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: Path(page).stem)
def test_notebooks_are_executed(page: str) -> None:
    """The stored outputs are those of the code, which `make tutorials` wrote."""
    notebook = notebooks.read(links.ROOT / page)
    assert (links.ROOT / page).stat().st_size < 200_000
    assert notebook["metadata"]["bertie"]["executed"] == notebooks.source_hash(notebook), (
        f"{page} was edited: execute it with `make tutorials NOTEBOOK={page}`"
    )
    assert notebook["metadata"]["bertie"]["seconds"] <= 240  # of CPU time: two minutes on two cores
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or cell["execution_count"]
    assert notebook["nbformat"] == 4


@has_built_in
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: Path(page).stem)
def test_notebooks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a reduced form: less data and fewer steps, where a cell has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(bertie.__file__).parents[1]}")
    notebooks.execute(notebooks.read(links.ROOT / page), smoke=True)


def test_execution_of_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def cell(code: str, **metadata: str) -> dict[str, Any]:
        return {"cell_type": "code", "source": code, "metadata": metadata, "outputs": [], "execution_count": None}

    title = {"cell_type": "markdown", "source": ["# T\n", "text"], "metadata": {}}
    cells = [title, cell("n = 5", smoke="n = 1"), cell("print('a\\rb')\nn"), cell("!echo $((40 + 2))")]
    notebook: dict[str, Any] = {"cells": cells, "metadata": {}}
    before = notebooks.source_hash(notebook)
    notebooks.execute(notebook)
    assert cells[2]["outputs"][0]["text"] == ["b\n"]
    assert cells[2]["outputs"][1]["data"]["text/plain"] == ["5"]
    assert "```sh\necho $((40 + 2))\n```\n\n```{.text .output}\n42\n```" in notebooks.render(notebook, "t.ipynb")
    assert notebooks.source_hash(notebook) == before
    notebooks.execute(notebook, smoke=True)
    assert cells[2]["outputs"][1]["data"]["text/plain"] == ["1"]
    for wrong in ("!exit 3", "raise ValueError", "1 +"):
        with pytest.raises((notebooks.CellError, SyntaxError)):
            notebooks.execute({"cells": [cell(wrong)], "metadata": {}})
