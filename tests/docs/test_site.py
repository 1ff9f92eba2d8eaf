"""The documentation site: complete navigation, links and anchors, code and commands, generated pages and charts.

`make docs` builds the site itself, with warnings as errors; these tests need none of its packages.
"""

from __future__ import annotations

import ast
import doctest
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_build import charts, cli_reference, http_reference, links, notebooks, python_reference, recipe_reference

import bertie
from bertie.cli import main
from tests.docs import local_models
from tests.test_docs import PAGES, check, commands
from tests.test_readme import assert_alike, has_built_in, run
from tests.test_readme import commands as commands_with_output

DOCS = links.DOCS
ALL = sorted(path.relative_to(links.ROOT).as_posix() for path in DOCS.rglob("*.md"))
NOTEBOOKS = sorted(path.relative_to(links.ROOT).as_posix() for path in DOCS.rglob("*.ipynb"))
OWN = [page for page in ALL if links.ROOT / page not in PAGES]  # the others are tested by tests/test_docs.py
GENERATORS = {
    "cli": cli_reference.render,
    "http": http_reference.render,
    "python": python_reference.render,
    "recipe": recipe_reference.render,
}
BLOCK = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```python\n(.*?)```", re.DOTALL)


def configuration() -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load((links.ROOT / "mkdocs.yml").read_text("utf-8"))
    return settings


def entries(nav: Any) -> Iterator[str]:
    """The files in the navigation."""
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from entries(item)


def markdown(page: str) -> str:
    """A page with what is generated into it."""
    if page.endswith(".ipynb"):
        return notebooks.render(notebooks.read(links.ROOT / page), Path(page).name)
    text = (links.ROOT / page).read_text("utf-8")
    for name, render in GENERATORS.items():
        if f"<!-- generated: {name} -->" in text:
            text += render()
    return text


def test_every_page_is_in_the_navigation() -> None:
    listed = list(entries(configuration()["nav"]))
    assert len(listed) == len(set(listed)), "a page is listed twice"
    pages = {page.removeprefix("docs/") for page in [*ALL, *NOTEBOOKS]} | set(links.OUTSIDE.values())
    missing = sorted(pages - set(listed))
    assert not missing, f"add to `nav` in mkdocs.yml, one line each: {missing}"
    assert not set(listed) - pages, "mkdocs.yml lists pages that do not exist"


@pytest.mark.parametrize("page", [*ALL, *NOTEBOOKS, *links.OUTSIDE], ids=lambda page: page.removeprefix("docs/"))
def test_links_and_anchors(page: str) -> None:
    text = markdown(page)
    for target in links.links(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = links.repository_path(page, path) if path else page
        assert (links.ROOT / file).exists(), f"{page}: {target} does not exist"
        if anchor:
            assert anchor in links.anchors(markdown(file)), f"{page}: {file} has no heading for #{anchor}"


def test_wrong_links_are_found() -> None:
    text = "# A `b`\n\n[x](../no.md#y)\n\n```\n[no](link)\n```\n"
    assert links.links(text) == ["../no.md#y"]
    assert links.anchors(text) == {"a-b"}
    assert links.translate("[a](../CHANGELOG.md) [b](tutorials/x.ipynb#c)", "docs/y.md") == (
        "[a](changelog.md) [b](tutorials/x.md#c)"
    )


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.removeprefix("docs/"))
def test_commands_parse(page: str) -> None:
    for words in commands((links.ROOT / page).read_text("utf-8")):
        check(words)


# --- code ---


def blocks(text: str) -> list[str]:
    """The blocks of Python whose packages are installed, and that need nothing from those that are left out."""
    found: list[str] = []
    absent: set[str] = set()
    for package, code in BLOCK.findall(text):
        tree = ast.parse(code)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        imports = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imports |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported = {name.split(".")[0] for name in imports} | ({package} if package else set())
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        if any(find_spec(name) is None for name in imported) or used & absent - made:
            absent |= made
        else:
            found.append(code)
            absent -= made
    return found


def test_blocks_of_absent_packages_are_left_out() -> None:
    text = "```python\nimport nothing_like_it\na = 1\n```\n```python\nb = a\n```\n```python\nc = 2\n```\n"
    assert blocks(text) == ["c = 2\n"]
    assert blocks(f"<!-- needs: nothing_like_it -->\n{text}") == ["c = 2\n"]


def without_logs(block: str) -> str:
    """Trainers of transformers print their logs: only what follows `train()` counts."""
    before, train, after = block.partition("trainer.train()\n")
    if not train:
        return block
    call = "\nwith __import__('contextlib').redirect_stdout(None):\n    trainer.train()\n"
    return before + call + after


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins for the hub ids of the pages."""
    folder = tmp_path_factory.mktemp("models")
    local_models.write(folder)
    return folder


def with_code() -> list[str]:
    return [page for page in OWN if "```python\n" in (links.ROOT / page).read_text("utf-8")]


@has_built_in
@pytest.mark.parametrize("page", with_code(), ids=lambda page: page.removeprefix("docs/"))
def test_python(
    page: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in models.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    text = (links.ROOT / page).read_text("utf-8")
    if "http://127.0.0.1:8080" in "".join(code for _, code in BLOCK.findall(text)):
        text = text.replace("http://127.0.0.1:8080", request.getfixturevalue("address"))
    code_blocks = blocks(text)
    assert code_blocks
    scope: dict[str, object] = {}
    for block in code_blocks:
        run(without_logs(block), scope, capsys)


@has_built_in
def test_commands_print_what_pages_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tested = 0
    for page in OWN:
        for argv, wanted in commands_with_output((links.ROOT / page).read_text("utf-8")):
            assert main(argv) == 0
            assert_alike(capsys.readouterr().out.splitlines(), wanted)
            tested += 1
    assert tested >= 7


# --- generated parts ---


def test_every_verb_has_a_guide() -> None:
    text = (DOCS / "how-to" / "index.md").read_text("utf-8")
    missing = [name for name in cli_reference.verb_names() if f"| `bertie {name}` | [" not in text]
    assert not missing, f"add a row to docs/how-to/index.md for: {missing}"


def test_reference_pages() -> None:
    text = cli_reference.render()
    assert all(f"### bertie {name}\n" in text for name in cli_reference.verb_names())
    assert "| `-k`, `--top-k` `N` | candidates per mask (default: 5) |" in text
    assert "### POST /classify\n" in http_reference.render()
    assert "| `warmup` | float | `0.1` | fraction of all steps |" in recipe_reference.render()
    names = [name for section in python_reference.sections().values() for name in section]
    assert sorted(names) == sorted(name for name in bertie.__all__ if not name.startswith("_"))


def test_charts_of_recorded_results() -> None:
    text = (DOCS / "benchmarks" / "index.md").read_text("utf-8")
    wanted = len(charts.COMMENT.findall(text))
    drawn = charts.draw_all(text)
    assert wanted >= 8
    assert drawn.count("<svg") == wanted
    with pytest.raises(ValueError, match="no such table"):
        charts.draw_all("<!-- chart: Serving | nothing | x -->")


def test_chart() -> None:
    (table,) = charts.tables("## A\n\n| | texts/s |\n|---|---|\n| Bertie | 269 (265, 275) |\n| peer | 1,860 |\n")
    svg = charts.draw(table, ["texts/s"])
    assert table.heading == "A"
    assert re.findall(r'rect class="([\w-]+)".*?width="(\d+)"', svg) == [("accent", "52"), ("other-0", "360")]


def test_examples_of_the_generators() -> None:
    for module in (charts, links):
        results = doctest.testmod(module)
        assert results.attempted
        assert not results.failed


def test_the_site_loads_nothing_from_elsewhere() -> None:
    settings = configuration()
    assert settings["theme"]["font"] is False
    assert "offline" in settings["plugins"]
    for page in ALL:
        text = (links.ROOT / page).read_text("utf-8")
        assert not re.search(r"```mermaid|<script|!\[[^\]]*\]\(https?:|<img[^>]+https?:", text), page


# --- tutorials ---


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: Path(page).stem)
def test_notebooks_are_executed(page: str) -> None:
    """The stored outputs are those of the code, which `make tutorials` wrote."""
    notebook = notebooks.read(links.ROOT / page)
    assert os.path.getsize(links.ROOT / page) < 200_000
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
