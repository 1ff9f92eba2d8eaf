"""Search by words: BM25 over stems, by the package bm25s, kept beside the index under the generation it was made of."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bertie.data.progress import Progress
from bertie.errors import BertieError, InputError, MissingPackageError
from bertie.search.passages import Keys, Store, Vectors
from bertie.search.segments import best, checksums, damaged

# As bm25s finds words by default: of two letters or more.
WORD = re.compile(r"\b\w\w+\b")
K1, B = 1.2, 0.75  # Lucene's


class Words:
    """Texts to stems: words in lower case, without stop words, cut to their stems by Snowball's rules.

    `language` is one that Snowball knows, or None to take words as they are.

    >>> words = Words("english")
    >>> words.stems("The cats were running, and running")
    ['cat', 'were', 'run', 'run']
    >>> words.spans("Cats run.", {"run"})
    [(5, 8)]
    """

    def __init__(self, language: str | None = "english") -> None:
        self.language = language
        self._known: dict[str, str] = {}  # "" of a stop word
        self._stemmer = None
        if language is None:
            return
        stemmer = _package("Stemmer")
        if language not in stemmer.algorithms():
            raise InputError(f"language={language!r} must be one of {', '.join(stemmer.algorithms())}, or None")
        self._stemmer = stemmer.Stemmer(language)
        name = {"english": "EN", "porter": "EN"}.get(language, language.upper())
        self._known = dict.fromkeys(getattr(_package("bm25s.stopwords"), f"STOPWORDS_{name}", ()), "")

    def stem(self, word: str) -> str:
        """Of one word; "" of a stop word."""
        word = word.lower()
        found = self._known.get(word)
        if found is None:
            found = self._known[word] = word if self._stemmer is None else self._stemmer.stemWord(word)
        return found

    def stems(self, text: str) -> list[str]:
        """Of all words, in order, without stop words."""
        return [stem for word in WORD.findall(text) if (stem := self.stem(word))]

    def spans(self, text: str, stems: Collection[str]) -> list[tuple[int, int]]:
        """Where words with one of these stems stand."""
        return [match.span() for match in WORD.finditer(text) if self.stem(match.group()) in stems]


class Lexical:
    """A BM25 index of passages: Lucene's formula.

    >>> index = Lexical.build([(3, "Cats eat fish."), (8, "Bread is baked.")], Words())
    >>> index.nearest("what does a cat eat?", 5)[0].tolist()
    [3]
    """

    def __init__(self, words: Words, keys: Keys, model: Any) -> None:
        self.words, self.keys, self._model = words, keys, model

    @classmethod
    def build(cls, texts: Iterable[tuple[int, str]], words: Words) -> Lexical:
        """From keys, which must grow, and texts."""
        package = _package("bm25s")
        numbers: dict[str, int] = {}
        keys, corpus = array("q"), []
        for key, text in texts:
            keys.append(key)
            # Numbers of four bytes: lists of a million passages would take gigabytes.
            corpus.append(array("i", [numbers.setdefault(stem, len(numbers)) for stem in words.stems(text)]))
        model = None
        if numbers:
            model = package.BM25(method="lucene", k1=K1, b=B)
            model.index(package.tokenization.Tokenized(ids=corpus, vocab=numbers), show_progress=False)
        return cls(words, np.array(keys, np.int64), model)

    def nearest(self, query: str, k: int, allowed: Keys | None = None) -> tuple[Keys, Vectors]:
        """The k passages that fit the query best, best first, and their scores; only those with a word of it."""
        stems = [stem for stem in self.words.stems(query) if self._model is not None and stem in self._model.vocab_dict]
        if not stems:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        scores = self._model.get_scores(stems)
        if allowed is not None:
            scores[~np.isin(self.keys, allowed, assume_unique=True)] = 0
        rows = np.flatnonzero(scores > 0)
        if len(rows) > k:
            least = np.partition(scores[rows], -k)[-k]
            rows = rows[scores[rows] >= least]
        return best(self.keys[rows], scores[rows], k)

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all, in place of what lies beside it."""
        folder.parent.mkdir(exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
        np.save(fresh / "keys.npy", self.keys)
        if self._model is not None:
            self._model.save(fresh, show_progress=False)
        (fresh / "sums.json").write_text(json.dumps(checksums(fresh)))
        for old in folder.parent.iterdir():
            # Another process may be writing its own just now; what a killed one left is a day old some day.
            if not old.name.startswith(".") or time.time() - old.stat().st_mtime > 86400:
                shutil.rmtree(old, ignore_errors=True)
        fresh.rename(folder)

    @classmethod
    def load(cls, folder: Path, words: Words) -> Lexical | None:
        """What was saved; None if it is not there, or not what it was."""
        try:
            if damaged(folder, json.loads((folder / "sums.json").read_text())):
                return None
            model = None
            if (folder / "params.index.json").exists():
                model = _package("bm25s").BM25.load(folder, mmap=True, show_progress=False)
            return cls(words, np.load(folder / "keys.npy"), model)
        except BertieError:
            raise
        except Exception:  # of a file that another process is just removing, or of another version of bm25s
            return None


def current(
    store: Store, words: Words, folder: Path | None, before: tuple[int, Lexical] | None, *, progress: bool = False
) -> tuple[int, Lexical]:
    """The lexical index of what the store holds now, with its generation.

    It is `before` if that is still right, else read from `folder`, else made and put there. What is older is removed.
    """
    generation = store.generation
    if before is not None and before[0] == generation:
        return before
    at = None if folder is None else folder / f"{generation}-{words.language}"
    found = None if at is None else Lexical.load(at, words)
    if found is None:
        found = Lexical.build(_watched(store) if progress else store.texts(), words)
        # A commit that came meanwhile may be in it in part: then it is for this once, and nobody else.
        if store.generation != generation:
            generation = -1
        elif at is not None:
            with suppress(OSError):  # no room, no permission, another was faster: it can be made again at any time
                found.save(at)
    return generation, found


def _watched(store: Store) -> Iterator[tuple[int, str]]:
    total = max(len(store), 1)
    done = 0
    with Progress("words", lambda: done / total) as progress:
        for one in store.texts():
            yield one
            done += 1
            progress.update(1)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingPackageError(
            "search by words needs the packages bm25s and PyStemmer: pip install 'bertie[search]'; or pass mode='dense'"
        ) from None
