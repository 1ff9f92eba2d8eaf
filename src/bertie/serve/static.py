"""The files of the playground, and the example text of `bertie tour`, which it shares."""

from __future__ import annotations

from pathlib import Path

from bertie.recipes import FOLDER

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("app", "attention", "dom", "server", "tasks")
# By the last part of their URL: the path and the content type.
STATIC_FILES = {
    "index.html": (PAGE / "index.html", "text/html; charset=utf-8"),
    **{f"{name}.js": (PAGE / f"{name}.js", "text/javascript; charset=utf-8") for name in SCRIPTS},
    "style.css": (PAGE / "style.css", "text/css; charset=utf-8"),
    "novel.txt": (FOLDER / "examples" / "book.txt", "text/plain; charset=utf-8"),
}
