"""Screenshots of the playground, for docs/: python -m tests.serve.shots [FOLDER]."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WIDE, PHONE = {"width": 1120, "height": 800}, {"width": 390, "height": 800}
VIEWS = ("fill", "attention", "tag", "answer", "similarity", "search", "classify")
SHOTS = (*((view, "light", WIDE) for view in VIEWS), ("attention", "dark", WIDE), ("fill", "phone", PHONE))
TIMEOUT = 300_000  # milliseconds


def main(folder: Path) -> None:
    """Take all screenshots."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from bertie.checkpoints import hub
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.search.index import Index
    from bertie.tasks import Embedder
    from tests.serve.test_page import CHROMIUM, Served, expect, wait_until_settled

    expect.set_options(timeout=TIMEOUT)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        with Index.create(Path(made) / "index", Embedder(Checkpoint.load(hub.DEFAULT))) as index:
            index.refresh([ROOT / "README.md"])
        server = Served(Path(made) / "index", max_length=None)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for view, look, size in SHOTS:
            scheme = "dark" if look == "dark" else "light"
            context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
            context.set_default_timeout(TIMEOUT)
            page = context.new_page()
            page.goto(f"{server.url}/#/{view}")
            if view != "search":
                wait_until_settled(page, view)
            use(page, view, look)
            wait_until_settled(page, view)
            path = folder / (f"playground-{view}.png" if look == "light" else f"playground-{view}-{look}.png")
            page.screenshot(path=path, full_page=True)
            context.close()
            # A third of the size, without a visible difference.
            palette = Image.open(path).convert("RGB").quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
            palette.save(path, optimize=True)
        browser.close()
        server.close()


def use(page: Any, view: str, look: str) -> None:
    """Bring a view into the state to show."""
    if view == "answer":
        page.click("#answer-novel")
        page.locator("#answer-map .reads").nth(1).wait_for()
    if view == "search":
        page.fill("#search-query", "How do I train a classifier?")
        page.press("#search-query", "Enter")
    if (view, look) == ("attention", "dark"):
        page.check("input[value=heatmap]")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs")
