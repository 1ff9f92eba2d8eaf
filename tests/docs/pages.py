"""The pages of the documentation, by their paths in the repository."""

from __future__ import annotations

from docs_build.links import DOCS, ROOT

from tests.test_docs import PAGES

ALL = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))
NOTEBOOKS = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.ipynb"))
OWN = [page for page in ALL if ROOT / page not in PAGES]  # the others are tested by tests/test_docs.py
