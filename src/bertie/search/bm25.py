"""Search by words: BM25 over stems.

What is kept is how often each stem is in each passage, in parts that never change: passages get numbers that grow, so
that what is new makes a part of its own. How rare a stem is and how long passages are on average is counted when it is
asked, over what all parts have and is still there: the scores are those of an index made anew (the package bm25s works
out scores when it indexes, and would have to be given all texts again after each change).

    lexical/0-262144/    the passages with numbers above 0 and up to 262144
    lexical/262144-262150/
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.data.progress import Progress
from bertie.errors import InputError, MissingPackageError
from bertie.search.records import FloatArray, Keys, VectorStore
from bertie.search.segments import best, checksums, damaged

# As bm25s finds words by default: of two letters or more.
WORD = re.compile(r"\b\w\w+\b")
K1, B = 1.2, 0.75  # Lucene's
FULL = 1 << 18  # passages of a part
DEAD = 0.3  # of a part, at which it is made anew


class Analyzer:
    """Texts to stems: words in lower case, without stop words, cut to their stems by Snowball's rules.

    `language` is one that Snowball knows, or None to take words as they are.

    >>> words = Analyzer("english")
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
        self._known = dict.fromkeys(getattr(_package("bm25s").stopwords, f"STOPWORDS_{name}", ()), "")

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


class _Part:
    """Some passages: a row each, in the order of keys."""

    def __init__(self, numbers: dict[str, int], arrays: Mapping[str, NDArray[Any]]) -> None:
        self.numbers, self.arrays = numbers, arrays
        self.keys, self.lengths = arrays["keys"], arrays["lengths"]  # (n,) how many stems there are

    @classmethod
    def build(cls, texts: Iterable[tuple[int, str]], words: Analyzer) -> _Part:
        numbers = _Numbers(words)
        keys, ends, found = array("q"), array("q"), array("i")
        for key, text in texts:
            found.extend(map(numbers.__getitem__, WORD.findall(text)))
            keys.append(key)
            ends.append(len(found))
        n, stems = len(keys), np.asarray(found)
        rows = np.repeat(np.arange(n), np.diff(ends, prepend=0))
        rows, stems = rows[stems >= 0], stems[stems >= 0]
        pairs, counts = np.unique(stems * np.int64(n) + rows, return_counts=True)  # by stems, and by rows within
        arrays = {
            "keys": np.array(keys, np.int64),
            "lengths": np.bincount(rows, minlength=n).astype(np.float32),
            "starts": np.searchsorted(pairs, np.arange(len(numbers.stems) + 1) * n),
            "rows": (pairs % max(n, 1)).astype(np.int32),
            "counts": counts.astype(np.float32),
        }
        return cls(numbers.stems, arrays)

    def find(self, stem: str, alive: NDArray[np.bool_] | None) -> tuple[NDArray[np.int32], FloatArray]:
        """The rows that have it, and how often."""
        number = self.numbers.get(stem)
        start, end = (0, 0) if number is None else self.arrays["starts"][number : number + 2]
        rows, counts = self.arrays["rows"][start:end], self.arrays["counts"][start:end]
        return (rows, counts) if alive is None else (rows[alive[rows]], counts[alive[rows]])

    def save(self, folder: Path) -> None:
        """Write it, whole or not at all."""
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".", ignore_cleanup_errors=True) as place:
            fresh = Path(place, folder.name)
            fresh.mkdir()
            for name, values in self.arrays.items():
                np.save(fresh / name, values)
            (fresh / "stems.txt").write_text("\n".join(self.numbers), encoding="utf-8")
            (fresh / "sums.json").write_text(json.dumps(checksums(fresh)))
            fresh.rename(folder)

    @classmethod
    def load(cls, folder: Path) -> _Part | None:
        """What was saved; None if it is not what it was."""
        try:
            if damaged(folder, json.loads((folder / "sums.json").read_text())):
                return None
            stems = (folder / "stems.txt").read_text(encoding="utf-8").split()
            mode: Any = "r" if stems else None  # what is empty cannot be mapped
            arrays = {file.stem: np.load(file, mmap_mode=mode) for file in folder.glob("*.npy")}
            return cls({stem: number for number, stem in enumerate(stems)}, arrays)
        except (OSError, ValueError, KeyError):  # of a file that another process is just removing
            return None


class _Numbers(dict[str, int]):
    """The number of each word's stem, as words come; -1 of a stop word."""

    def __init__(self, words: Analyzer) -> None:
        self.words, self.stems = words, dict[str, int]()

    def __missing__(self, word: str) -> int:
        stem = self.words.stem(word)
        self[word] = number = self.stems.setdefault(stem, len(self.stems)) if stem else -1
        return number


class BM25Index:
    """A BM25 index of passages, by Lucene's formula. Of what parts have, only the keys that are `alive` count.

    >>> index = BM25Index.build([(3, "Cats eat fish."), (8, "Bread is baked.")], Analyzer())
    >>> index.nearest("what does a cat eat?", 5)[0].tolist()
    [3]
    """

    def __init__(self, words: Analyzer, parts: Sequence[_Part], alive: Keys | None = None) -> None:
        self.words, self.parts = words, parts
        masks = [None if alive is None else np.isin(part.keys, alive, assume_unique=True) for part in parts]
        self._alive = [None if mask is None or mask.all() else mask for mask in masks]
        self._passages, total = 0, 0.0
        for part, mask in zip(parts, self._alive, strict=True):
            lengths = part.lengths if mask is None else part.lengths[mask]
            self._passages, total = self._passages + len(lengths), total + float(lengths.sum(dtype=np.float64))
        mean = max(total / max(self._passages, 1), 1e-9)
        # (n,) of each part: what a stem's count is divided by, beside itself
        self._norms = [(K1 * (1 - B + B * part.lengths / mean)).astype(np.float32) for part in parts]

    @classmethod
    def build(cls, texts: Iterable[tuple[int, str]], words: Analyzer) -> BM25Index:
        """From keys, which must grow, and texts."""
        return cls(words, list(_parts(texts, words)))

    def nearest(self, query: str, k: int, allowed: Keys | None = None) -> tuple[Keys, FloatArray]:
        """The k passages that fit the query best, best first, and their scores; only those with a word of it."""
        scores = [np.zeros(len(part.keys), np.float32) for part in self.parts]
        for stem, times in Counter(self.words.stems(query)).items():
            having = [part.find(stem, alive) for part, alive in zip(self.parts, self._alive, strict=True)]
            many = sum(len(rows) for rows, _ in having)
            weight = np.float32(times * math.log(1 + (self._passages - many + 0.5) / (many + 0.5)))
            for mine, (rows, counts), norms in zip(scores, having, self._norms, strict=True):
                mine[rows] += weight * counts / (counts + norms[rows])
        keys, found = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
        for part, mine in zip(self.parts, scores, strict=True):
            if allowed is not None:
                mine[~np.isin(part.keys, allowed, assume_unique=True)] = 0
            keys.append(part.keys[mine > 0])
            found.append(mine[mine > 0])
        every, values = np.concatenate(keys), np.concatenate(found)
        if len(every) > k:
            near = values >= np.partition(values, -k)[-k]
            every, values = every[near], values[near]
        return best(every, values, k)


def _parts(texts: Iterable[tuple[int, str]], words: Analyzer) -> Iterator[_Part]:
    rest = iter(texts)
    while len((part := _Part.build(islice(rest, FULL), words)).keys):
        yield part


def refresh_bm25(
    store: VectorStore,
    words: Analyzer,
    folder: Path | None,
    before: tuple[int, BM25Index] | None,
    *,
    progress: bool = False,
) -> tuple[int, BM25Index]:
    """The lexical index of what the store holds now, with its generation.

    It is `before` if that is still right. Else its parts, or those in `folder`, are kept, and what is new is added.
    """
    generation = store.generation
    if before is not None and before[0] == generation:
        return before
    alive = store.allowed(())
    known = before[1].parts if before is not None else _saved(folder) if folder is not None else ()
    parts = _worth_keeping(known, alive)
    after = _last(parts)
    texts = store.texts(after)
    for part in _parts(_watched(texts, int((alive > after).sum())) if progress else texts, words):
        if folder is not None:
            with suppress(OSError):  # no room, no permission, another was faster: it can be made again at any time
                part.save(folder / f"{_last(parts)}-{_last([part])}")
        parts.append(part)
    if folder is not None:
        with suppress(OSError):
            _tidy(folder, parts)
    # A commit that came meanwhile may be in it in part: then it is for this once.
    return generation if store.generation == generation else -1, BM25Index(words, parts, alive)


def _last(parts: Sequence[_Part]) -> int:
    """The last key."""
    return int(parts[-1].keys[-1]) if parts else 0


def _worth_keeping(parts: Sequence[_Part], alive: Keys) -> list[_Part]:
    """The first ones, up to one with many dead, or one that is better made anew with what comes after it.

    A part is kept while there is less behind it than in it: so there are few, and each passage is read a few times.
    """
    kept: list[_Part] = []
    for part in parts:
        dead = len(part.keys) - int(np.isin(part.keys, alive, assume_unique=True).sum())
        behind = len(alive) - int(np.searchsorted(alive, part.keys[-1], side="right"))
        if dead > DEAD * len(part.keys) or len(part.keys) <= min(behind, FULL - 1):
            break
        kept.append(part)
    return kept


def _saved(folder: Path) -> list[_Part]:
    """The parts on the disk, as far as each begins where the one before it ends."""
    parts: list[_Part] = []
    places = {tuple(map(int, one.name.split("-"))): one for one in folder.glob("[0-9]*-[0-9]*")}
    for (after, _), at in sorted(places.items(), key=lambda one: (one[0][0], -one[0][1])):  # of two, the larger
        if after == _last(parts):
            if part := _Part.load(at):
                parts.append(part)
            else:
                shutil.rmtree(at, ignore_errors=True)
    return parts


def _tidy(folder: Path, parts: Sequence[_Part]) -> None:
    """Remove what is of no more use."""
    names = {f"{after}-{last}" for after, last in pairwise([0, *(_last([part]) for part in parts)])}
    for old in folder.iterdir() if folder.is_dir() else ():
        # Another process may be writing its own just now; what a killed one left is a day old some day.
        if old.name not in names and (old.name[0] != "." or time.time() - old.stat().st_mtime > 86400):
            shutil.rmtree(old, ignore_errors=True)


def _watched(texts: Iterable[tuple[int, str]], total: int) -> Iterator[tuple[int, str]]:
    done = 0
    with Progress("words", lambda: done / max(total, 1)) as progress:
        for one in texts:
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
