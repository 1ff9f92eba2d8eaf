"""The reference of the Python API: public names by heading. mkdocstrings renders their docstrings."""

from __future__ import annotations

import bertie

# Headings by the module that a name lives in; the first that fits.
_HEADINGS = (
    ("bertie.tasks.results", "Results"),
    ("bertie.tasks.", "Groups of texts"),
    ("bertie.tasks", "Tasks"),
    ("bertie.search", "Search"),
    ("bertie.client", "Client"),
    ("bertie.training", "Training"),
    ("bertie.recipe", "Training"),
    ("bertie.errors", "Errors"),
    ("bertie", "Models, tokenizers and batches"),
)
_ORDER = ("Tasks", "Results", "Groups of texts", "Search", "Client", "Training", _HEADINGS[-1][1], "Errors")


def sections() -> dict[str, list[str]]:
    """All public names by heading, in the order of the page."""
    found: dict[str, list[str]] = {title: [] for title in _ORDER}
    for name in sorted(bertie.__all__, key=str.lower):
        home = bertie._HOME.get(name, "bertie.errors")
        if not name.startswith("_"):
            found[next(title for prefix, title in _HEADINGS if home.startswith(prefix))].append(name)
    return found


def render() -> str:
    """Markdown with a directive of mkdocstrings per public name."""
    lines = []
    for title, names in sections().items():
        lines += ["", f"## {title}", ""]
        lines += [f"::: bertie.{name}\n" for name in names]
    return "\n".join(lines)
