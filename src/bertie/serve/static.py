"""The files of the playground, and the example text of `bertie tour`, which it shares."""

from __future__ import annotations

from pathlib import Path

from bertie.recipes import FOLDER

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
# By the last part of their URL: the path and the content type.
STATIC_FILES = {
    **{
        path.name: (path, f"{TYPES[path.suffix]}; charset=utf-8")
        for path in sorted(PAGE.iterdir())
        if path.suffix in TYPES
    },
    "novel.txt": (FOLDER / "examples" / "book.txt", "text/plain; charset=utf-8"),
}
