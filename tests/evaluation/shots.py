"""Screenshots of reports, for docs/images: python -m tests.evaluation.shots GOOD NO-GAIN TOO-EARLY TICKETS.

The arguments are folders of `bertie train`: of a good run, of one that beats no baseline, of one that ended early, and
of the run on tickets.csv in docs/get-started/index.md. `-` leaves out its pictures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1120


def main(good: Path, no_gain: Path, too_early: Path, tickets: Path) -> None:
    """Take all screenshots."""
    from playwright.sync_api import sync_playwright

    from bertie.evaluation.comparison_page import comparison_page
    from bertie.evaluation.run_comparison import compare_runs
    from tests.serve.test_page import CHROMIUM

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        comparison = Path(folder) / "comparison.html"
        if Path("-") not in (good, too_early):
            comparison.write_text(comparison_page(compare_runs([good, too_early])))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for name, page, scheme, height, section in (
            ("good", good / "report.html", "light", 980, ""),
            ("good-dark", good / "report.html", "dark", 980, ""),
            ("no-gain", no_gain / "report.html", "light", 980, ""),
            ("too-early", too_early / "report.html", "light", 980, ""),
            ("training", too_early / "report.html", "light", 820, "Training"),
            ("errors-dark", no_gain / "report.html", "dark", 900, "Errors on test"),
            ("confusion", no_gain / "report.html", "light", 1400, "Confusion on test"),
            ("compare", comparison, "light", 1150, ""),
            ("tickets", tickets / "report.html", "light", 980, ""),
        ):
            if not page.exists():
                continue
            context = browser.new_context(viewport={"width": WIDTH, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
            shoot(context.new_page(), page, section, IMAGES / f"report-{name}.png")
            context.close()
        browser.close()


def shoot(tab: Any, page: Path, section: str, path: Path) -> None:
    """One screenshot, from a section on."""
    from PIL import Image

    tab.goto(page.absolute().as_uri())
    if section:
        tab.add_style_tag(content="html { scroll-behavior: auto !important; }")
        tab.locator("nav a", has_text=section).click()
        tab.wait_for_timeout(200)
    tab.screenshot(path=path)
    # A third of the size, without a visible difference.
    palette = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    palette.save(path, optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
