"""Report pages in a real browser: tables are sorted and filtered, heat maps enlarged; axe finds no violations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bertie.evaluation.model_report import ModelReport
from bertie.evaluation.pages import Marked, Section, Table, to_html
from bertie.evaluation.report import write_report
from tests.evaluation.model_reports import classified, full

pytest.importorskip("playwright", reason="the page tests need playwright")
from tests.serve.test_page import AXE, CHROMIUM, NO_CHROMIUM

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser: Any, path: Path, **options: Any) -> Any:
    """A page, which fails the test if its script does or if its policy is violated."""
    page = browser.new_page(**options)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text))
    page.goto(path.as_uri())
    return page


def test_sorting_and_filtering(browser: Any, tmp_path: Path) -> None:
    rows = [["b", "2"], ["a", "10"], ["c", "-1.5"], [Marked([("B", 0.5), ("x", 0.0)]), "1,000"]]
    table = Table(["name", "value"], rows, sortable=True, filtered=True)  # type: ignore[arg-type]
    path = tmp_path / "page.html"
    path.write_text(to_html("t", [Section("s", [table])]))
    page = opened(browser, path)

    def names() -> list[str]:
        return list(page.locator("tbody tr:visible td:first-child").all_inner_texts())

    page.get_by_role("button", name="value").click()
    assert names() == ["Bx", "a", "b", "c"]
    assert page.locator("th").nth(1).get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="value").click()
    assert names() == ["c", "b", "a", "Bx"]
    page.get_by_role("button", name="name").click()
    assert names() == ["c", "Bx", "b", "a"]
    page.get_by_role("searchbox").fill("B")
    assert names() == ["Bx", "b"]
    assert page.locator("output").inner_text() == "2 of 4 rows"
    assert page.problems == []


def test_a_heat_map_is_enlarged(browser: Any, tmp_path: Path) -> None:
    report = ModelReport(title="t", kind="classify", model="m", evaluations={"test": classified(n=300, k=40)})
    write_report(tmp_path, report)
    page = opened(browser, tmp_path / "report.html")
    heat = page.locator("svg.zoom")
    whole = heat.get_attribute("viewBox")
    heat.click()
    near = [float(value) for value in heat.get_attribute("viewBox").split()]
    assert near[2] == pytest.approx(float(whole.split()[2]) / 4)
    heat.click()
    assert heat.get_attribute("viewBox") == whole
    assert page.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility(browser: Any, tmp_path: Path, scheme: str) -> None:
    write_report(tmp_path, full())
    page = opened(browser, tmp_path / "report.html", color_scheme=scheme, viewport={"width": 1200, "height": 900})
    page.evaluate(
        "document.querySelectorAll('tbody tr:nth-child(n+4), svg rect').forEach((item) => item.remove())"
    )  # time
    page.evaluate(AXE.read_text("utf-8"))
    results = page.evaluate("axe.run(document)")
    assert [(item["id"], item["nodes"][0]["html"]) for item in results["violations"]] == []
