"""Screenshots of every view of the playground, for docs/: python -m tests.serve.shots [FOLDER] [--compare NAME=MODEL].

They show the built-in model; with `--compare`, one more shows it side by side with another one (a folder or hub id).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
WIDE, PHONE = {"width": 1120, "height": 800}, {"width": 390, "height": 800}
TIMEOUT = 300_000  # milliseconds
MAX_BYTES = 150_000
VIEWS = ("fill", "tokens", "attention", "tag", "answer", "classify", "similarity", "map", "rerank", "search")


class Shot(NamedTuple):
    """A view in one look, and what to do before it is taken."""

    name: str
    fragment: str
    look: str = "light"
    size: dict[str, int] = WIDE
    act: Callable[[Any], None] | None = None


def example(name: str) -> Callable[[Any], None]:
    """Select an example of the view."""
    return lambda page: page.locator("section:not([hidden]) .examples button", has_text=name).click()


def lasso(page: Any) -> None:
    """Draw a line around the left third of the map."""
    box = page.locator(".plot").bounding_box()
    corners = [(0.02, 0.02), (0.45, 0.02), (0.45, 0.98), (0.02, 0.98)]
    points = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in corners]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=5)
    page.mouse.up()


SHOTS = (
    Shot("fill", "fill"),
    Shot("tokens", "tokens"),
    Shot("attention", "attention"),
    Shot("attention-dark", "attention?display=heatmap", "dark"),
    Shot("tag", "tag"),
    Shot("answer", "answer", act=example("Three chapters of a novel")),
    Shot("classify", "classify"),
    Shot("similarity", "similarity"),
    Shot("map", "map"),
    Shot("map-dark", "map", "dark", act=lasso),
    Shot("rerank", "rerank"),
    Shot("search", "search?query=How+do+I+train+a+classifier%3F"),
    Shot("fill-phone", "fill", size=PHONE),
    Shot("map-phone", "map", size=PHONE),
    Shot("docs", "/docs"),
)


def main() -> None:
    """Take all screenshots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--compare", help="another model as NAME=FOLDER, for a screenshot side by side")
    parser.add_argument("--only", help="the name of one screenshot")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from bertie.checkpoints import hub
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.search.index import Index
    from bertie.tasks import Embedder
    from tests.serve.test_page import CHROMIUM, Served, expect

    expect.set_options(timeout=TIMEOUT)
    shots = [*SHOTS]
    if args.compare:
        shots.append(Shot("compare", f"similarity?compare={args.compare.partition('=')[0]}"))
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        with Index.create(Path(made) / "docs", Embedder(Checkpoint.load(hub.DEFAULT))) as index:
            index.refresh([ROOT / "docs" / "python.md", ROOT / "docs" / "train.md"])
        server = Served(Path(made) / "docs", max_length=None)
        both = Served(max_length=None, models=[hub.DEFAULT, args.compare]) if args.compare else None
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for shot in shots:
            if args.only in (None, shot.name):
                served = both if shot.name == "compare" and both is not None else server
                take(browser, served.url, shot, args.folder / f"playground-{shot.name}.png")
        browser.close()
        server.close()


def take(browser: Any, url: str, shot: Shot, path: Path) -> None:
    """Take one screenshot."""
    from PIL import Image

    from tests.serve.test_page import wait_until_settled

    scheme = "dark" if shot.look == "dark" else "light"
    context = browser.new_context(viewport=shot.size, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(TIMEOUT)
    page = context.new_page()
    page.on("console", lambda message: print(shot.name, message.text))
    page.on("pageerror", lambda error: print(shot.name, error))
    view = shot.fragment.partition("?")[0]
    page.goto(f"{url}{shot.fragment}" if shot.fragment.startswith("/") else f"{url}/#/{shot.fragment}")
    if not shot.fragment.startswith("/"):
        wait_until_settled(page, view)
        if shot.act is not None:
            shot.act(page)
            page.wait_for_timeout(200)
            wait_until_settled(page, view)
        if view in ("attention", "classify"):  # details come after the answer
            page.locator(f"#view-{view} .attribution:not(.stale) .attributed").wait_for()
    page.wait_for_timeout(300)
    if shot.fragment.startswith("/"):
        page.screenshot(path=path)
    else:  # without the request below
        end = page.locator("#request").bounding_box()["y"] + page.evaluate("scrollY")
        page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": shot.size["width"], "height": end})
    context.close()
    image = Image.open(path).convert("RGB")
    for colours in (256, 128, 64):  # a third of the size, without a visible difference
        image.quantize(colours, Image.Quantize.MAXCOVERAGE, kmeans=3).save(path, optimize=True)
        if path.stat().st_size < MAX_BYTES:
            break


if __name__ == "__main__":
    main()
