"""Text analysis for lexical search: word segmentation, stop words and stemming."""

from __future__ import annotations

import re
from collections.abc import Collection
from importlib import import_module
from typing import Any

from bertie.errors import InputError, MissingPackageError

WORD = re.compile(r"\b\w\w+\b")  # the default of bm25s: words of at least two characters


class Analyzer:
    """Turns text into terms: lower-cased words without stop words, stemmed by Snowball.

    `language` is the name of a Snowball stemmer, or None to disable stemming and stop words.

    >>> analyzer = Analyzer("english")
    >>> analyzer.terms("The cats were running, and running")
    ['cat', 'were', 'run', 'run']
    >>> analyzer.spans("Cats run.", {"run"})
    [(5, 8)]
    """

    def __init__(self, language: str | None = "english") -> None:
        self.language = language
        self._cache: dict[str, str] = {}  # stop words map to ""
        self._stemmer = None
        if language is None:
            return
        stemmer = _import("Stemmer")
        if language not in stemmer.algorithms():
            raise InputError(f"language={language!r} must be one of {', '.join(stemmer.algorithms())}, or None")
        self._stemmer = stemmer.Stemmer(language)
        name = {"english": "EN", "porter": "EN"}.get(language, language.upper())
        self._cache = dict.fromkeys(getattr(_import("bm25s").stopwords, f"STOPWORDS_{name}", ()), "")

    def term(self, word: str) -> str:
        """Return the term of a word; "" for a stop word."""
        word = word.lower()
        term = self._cache.get(word)
        if term is None:
            term = self._cache[word] = word if self._stemmer is None else self._stemmer.stemWord(word)
        return term

    def terms(self, text: str) -> list[str]:
        """Return the terms of a text in order."""
        return [term for word in WORD.findall(text) if (term := self.term(word))]

    def spans(self, text: str, terms: Collection[str]) -> list[tuple[int, int]]:
        """Return the character spans of the words whose term is in `terms`."""
        return [match.span() for match in WORD.finditer(text) if self.term(match.group()) in terms]


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingPackageError(
            "lexical search needs the packages bm25s and PyStemmer: pip install 'bertie[search]'; or pass mode='dense'"
        ) from None
