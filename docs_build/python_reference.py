"""The reference of the Python API: an overview, and pages of public names. mkdocstrings renders their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import get_overloads

import bertie

# Pages by the module that a name lives in; the first that fits.
_PAGES = (
    ("bertie.tasks.results", "results"),
    ("bertie.tasks.elmo", "tasks"),
    ("bertie.tasks.", "groups"),
    ("bertie.tasks", "tasks"),
    ("bertie.search", "search"),
    ("bertie.client", "search"),
    ("bertie.training", "training"),
    ("bertie.recipe", "training"),
    ("bertie.errors", "errors"),
    ("bertie", "models"),
)
TITLES = {
    "tasks": "Tasks",
    "results": "Results",
    "groups": "Groups of texts",
    "search": "Search and client",
    "training": "Training",
    "models": "Models, tokenizers, export",
    "errors": "Errors",
}
# The names that most readers look for; the others follow in alphabetical order.
_FIRST = ("load", "Embedder", "Classifier", "Regressor", "ZeroShot", "Tagger", "Reader", "Reranker", "MaskedLM")
# Adapters are no names of `bertie`, and importing them needs their frameworks.
ADAPTERS = {
    "sklearn": ("scikit-learn", ["EmbeddingTransformer"]),
    "langchain": ("LangChain", ["BertieEmbeddings", "BertieReranker", "BertieReader"]),
    "llama_index": ("LlamaIndex", ["BertieEmbedding", "BertieRerank", "BertieSynthesizer"]),
    "haystack": (
        "Haystack",
        ["BertieTextEmbedder", "BertieDocumentEmbedder", "BertieRanker", "BertieExtractiveReader"],
    ),
    "spacy": ("spaCy", ["make_ner", "make_classify", "make_embed"]),
}


def sections() -> dict[str, list[str]]:
    """All public names by page, in the order of the pages."""
    names: dict[str, list[str]] = {page: [] for page in TITLES}
    for name in sorted(bertie.__all__, key=_rank):
        home = bertie._HOME.get(name, "bertie.errors")
        if not name.startswith("_"):
            names[next(page for prefix, page in _PAGES if home.startswith(prefix))].append(name)
    return names


def _rank(name: str) -> tuple[int, str]:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), name.lower()


def overview() -> str:
    """Markdown with a table per page: each public name, and the first sentence of its docstring."""
    lines = []
    for page, names in sections().items():
        lines += ["", f"## {TITLES[page]}", "", "| | |", "|---|---|"]
        lines += [f"| [`{name}`][bertie.{name}] | {_summary(name)} |" for name in names]
    lines += ["", "## Adapters", "", "| | |", "|---|---|"]
    for module, (title, names) in ADAPTERS.items():
        links = ", ".join(f"[`{name}`][bertie.integrations.{module}.{name}]" for name in names)
        lines += [f"| {title} | {links} |"]
    return "\n".join(lines)


def _summary(name: str) -> str:
    paragraph = (inspect.getdoc(getattr(bertie, name)) or "").partition("\n\n")[0]
    return paragraph.replace("\n", " ").replace("|", "\\|")


def page(name: str) -> str:
    """Markdown of a page, with a directive of mkdocstrings per public name."""
    return "\n".join(_directive(member) for member in sections()[name])


def _directive(name: str) -> str:
    """A function with many overloads, such as `load`, is shown with the signature of its implementation only."""
    function = inspect.unwrap(getattr(bertie, name))
    many = inspect.isfunction(function) and len(get_overloads(function)) > 3
    return f"::: bertie.{name}\n" + ("    options: {show_overloads: false}\n" if many else "")


def adapters() -> str:
    """Markdown of the page of adapters."""
    lines = []
    for module, (title, names) in ADAPTERS.items():
        lines += ["", f"## {title}", ""]
        lines += [f"::: bertie.integrations.{module}.{name}\n    options: {{heading_level: 3}}\n" for name in names]
    return "\n".join(lines)


def generators() -> dict[str, Callable[[], str]]:
    """What fills each page, by the name in its comment."""
    pages: dict[str, Callable[[], str]] = {f"python_{name}": lambda name=name: page(name) for name in TITLES}
    return {"python": overview, "python_adapters": adapters, **pages}
