"""The documentation site: complete navigation, links and anchors, code and commands, generated pages and charts.

`make docs` builds the site itself, with warnings as errors; these tests need none of its packages.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_build import charts, cli_reference, http_reference, links, notebooks, python_reference, recipe_reference

import bertie
from tests.docs.pages import ALL, NOTEBOOKS, OWN
from tests.test_docs import check, commands

DOCS = links.DOCS
GENERATORS = {
    "cli": cli_reference.render,
    "http": http_reference.render,
    "recipe": recipe_reference.render,
    **python_reference.generators(),
}


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
    assert "| [`Classifier`][bertie.Classifier] | Classifies texts or pairs of texts. |" in python_reference.overview()
    assert "::: bertie.Classifier\n" in python_reference.page("tasks")
    for module, (_, adapters) in python_reference.ADAPTERS.items():
        source = (links.ROOT / "src" / "bertie" / "integrations" / f"{module}.py").read_text("utf-8")
        defined = set(re.findall(r"^(?:class|def) ([a-zA-Z]\w*)", source, flags=re.MULTILINE))
        public = {name for name in defined if re.match("Bertie|Embedding|make_", name)}
        assert public == set(adapters), f"docs_build.python_reference.ADAPTERS: {module}"


def test_charts_of_recorded_results() -> None:
    text = (DOCS / "benchmarks" / "index.md").read_text("utf-8")
    wanted = len(charts.COMMENT.findall(text))
    drawn = charts.draw_all(text)
    assert wanted >= 8
    assert drawn.count('<div class="chart">') == wanted
    with pytest.raises(ValueError, match="no such table"):
        charts.draw_all("<!-- chart: Serving | nothing | x -->")


def test_chart() -> None:
    (table,) = charts.tables("## A\n\n| | texts/s |\n|---|---|\n| Bertie | 269 (265, 275) |\n| peer | 1,860 |\n")
    chart = charts.draw(table, ["texts/s"])
    assert table.heading == "A"
    bars = re.findall(r'span class="([\w-]+)" style="--share: ([\d.]+)"></span>([\d,]+)', chart)
    assert bars == [("accent", "0.145", "269"), ("other-0", "1.000", "1,860")]


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
