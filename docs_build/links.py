"""Links of the repository's Markdown files, translated for the site.

Pages link to files as they lie in the repository, so that the links work there too. On the site, some files outside
docs/ are pages, notebooks are pages, and any other file of the repository is a download.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Files outside docs/ that are pages of the site, and their place there.
OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing/guide.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "contributing/security-policy.md",
    "benchmarks/RESULTS.md": "benchmarks/results.md",
    "src/bertie/recipes/bertie-small/README.md": "bertie-small-training.md",
}
DOWNLOADS = "files"  # the folder of the site with other files of the repository
_LINK = re.compile(r"(?<!`)(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^()\s]+)(\))")
_FENCE = re.compile(r"^\s*(```|~~~)")
_INLINE_CODE = re.compile(r"(`+)(?:(?!\1).)+\1")


def prose_lines(text: str) -> Iterator[tuple[bool, str]]:
    """The lines of a page, and whether each is prose: not within a fenced block, and not indented as code."""
    inside = False
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line) is not None
        yield not inside and not fence and not line.startswith("    "), line
        inside ^= fence


def links(text: str) -> list[str]:
    """The targets of a page's links and images.

    >>> links("[a](x.md#b) and ![c](d.svg), but not `[e](f)`.")
    ['x.md#b', 'd.svg']
    """
    found: list[str] = []
    for prose, line in prose_lines(text):
        if prose:
            found += [match[1] for match in _LINK.findall(_INLINE_CODE.sub("", line))]
    return found


def is_outside(target: str) -> bool:
    """Whether a link leads to another site, or to a place in its own page."""
    return re.match(r"[a-z]+:|#", target) is not None


def repository_path(page: str, target: str) -> str:
    """The path in the repository of the file that a link leads to.

    >>> repository_path("docs/tutorials/a.ipynb", "../train.md")
    'docs/train.md'
    """
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site_path(path: str) -> str:
    """The path in the site's sources of a file of the repository.

    >>> [site_path(path) for path in ("docs/a.md", "docs/tutorials/b.ipynb", "CHANGELOG.md", "deploy/grafana.json")]
    ['a.md', 'tutorials/b.md', 'changelog.md', 'files/deploy/grafana.json']
    """
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"{DOWNLOADS}/{path}"


def translate(text: str, page: str, note: Callable[[str], None] = lambda path: None) -> str:
    """Translate all links of a page of the repository for the site; `note` is told the file of each.

    >>> translate("[log](../CHANGELOG.md#a)", "docs/explanation/windows.md".replace("explanation/", ""))
    '[log](changelog.md#a)'
    """
    here = posixpath.dirname(site_path(page))

    def replace(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if is_outside(target):
            return match[0]
        path, mark, anchor = target.partition("#")
        file = repository_path(page, path)
        if (ROOT / file).is_dir():
            return before.removesuffix("](")[1:]  # a folder has no page: its name only
        note(file)
        return f"{before}{posixpath.relpath(site_path(file), here or '.')}{mark}{anchor}{after}"

    return "".join(_LINK.sub(replace, line) if prose else line for prose, line in prose_lines(text))


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it.

    >>> slug("Flags & `--json`: what, where?")
    'flags----json-what-where'
    """
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """The anchors of a page: of its headings, and those written as HTML."""
    found: set[str] = set()
    for prose, line in prose_lines(text):
        if prose and (match := re.match(r"#{1,6}\s+(.*?)(?:\s+\{#([\w-]+)\})?\s*$", line)):
            anchor = match[2] or slug(match[1])
            number = 0
            while (name := f"{anchor}_{number}" if number else anchor) in found:
                number += 1
            found.add(name)
        found.update(re.findall(r'<[^>]+\bid="([^"]+)"', line) if prose else ())
    return found
