"""BM25 against its formula and against bm25s' own way from texts to scores; what is kept of it on the disk."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import BM25Index, refresh_bm25

bm25s = pytest.importorskip("bm25s")
Stemmer = pytest.importorskip("Stemmer")

VOCABULARY = "cats dog running the rivers baked breads of fishing mats sat on a quick 1999 naïve Zürich".split()
TEXTS = [" ".join(random.Random(i).choices(VOCABULARY, k=3 + i % 9)).capitalize() + "." for i in range(200)]
KEYS = [3 * i + 5 for i in range(200)]
QUERY = "The cat and the dogs run to a river, in ZÜRICH"


def index() -> BM25Index:
    return BM25Index.build(zip(KEYS, TEXTS, strict=True), Analyzer())


def test_scores_equal_those_of_bm25s() -> None:
    stemmer = Stemmer.Stemmer("english")
    theirs = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    options = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
    theirs.index(bm25s.tokenize(TEXTS, **options), show_progress=False)
    scores = theirs.get_scores(bm25s.tokenize([QUERY], return_ids=False, **options)[0])
    keys, found = index().search(QUERY, 200)
    assert len(keys) == (scores > 0).sum()
    assert found == pytest.approx([scores[KEYS.index(key)] for key in keys.tolist()], abs=1e-5)
    assert keys.tolist() == [KEYS[row] for row in np.lexsort((KEYS, -scores))[: len(keys)]]


def test_scores_follow_lucenes_formula() -> None:
    words = Analyzer()
    stems = [words.terms(text) for text in TEXTS]
    mean = sum(map(len, stems)) / len(stems)
    expected = {}
    for key, mine in zip(KEYS, stems, strict=True):
        counts = Counter(mine)
        score = 0.0
        for stem in words.terms(QUERY):
            df = sum(stem in one for one in stems)
            idf = math.log(1 + (len(stems) - df + 0.5) / (df + 0.5))
            score += idf * counts[stem] / (counts[stem] + 1.2 * (1 - 0.75 + 0.75 * len(mine) / mean))
        expected[key] = score
    keys, scores = index().search(QUERY, 10)
    assert scores == pytest.approx([expected[key] for key in keys.tolist()], rel=1e-4)
    assert scores[-1] == pytest.approx(sorted(expected.values())[-10], rel=1e-4)


def test_only_allowed_keys_are_returned() -> None:
    allowed = np.array([key for key in KEYS if key % 2])
    keys, scores = index().search(QUERY, 5, allowed)
    every, all_scores = index().search(QUERY, 200)
    rest = [(key, score) for key, score in zip(every.tolist(), all_scores, strict=True) if key % 2]
    assert list(zip(keys.tolist(), scores, strict=True)) == rest[:5]
    assert len(index().search(QUERY, 5, np.array([1]))[0]) == 0


def test_unknown_words_stop_words_and_empty_queries_match_nothing() -> None:
    for query in ("unknown", "the of and", "", "?!"):
        assert len(index().search(query, 5)[0]) == 0
    empty = BM25Index.build([], Analyzer())
    assert len(empty.search("cat", 5)[0]) == 0


def test_languages() -> None:
    assert Analyzer("german").terms("Die Häuser der Stadt") == ["haus", "stadt"]
    assert Analyzer(None).terms("The cats") == ["the", "cats"]
    with pytest.raises(InputError, match="language='klingon'"):
        Analyzer("klingon")


def test_spans_of_terms() -> None:
    text = "Running dogs ran; a dog's run."
    assert [text[a:b] for a, b in Analyzer().spans(text, {"run", "dog"})] == ["Running", "dogs", "dog", "run"]


class Toy:
    """As much of a store as is asked."""

    id = "toy"

    def __init__(self) -> None:
        self.generation, self.read, self.next, self.rows = 1, 0, 1000, list(zip(KEYS, TEXTS, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def matching_keys(self, where: tuple[()]) -> Any:
        return np.array([key for key, _ in self.rows])

    def passage_texts(self, after: int = 0) -> Iterator[tuple[int, str]]:
        for key, text in self.rows:
            if key > after:
                self.read += 1
                yield key, text

    def change(self, add: int, delete: slice) -> None:
        """Add some texts that are there already, in other passages, and delete others."""
        del self.rows[delete]
        self.rows += [(self.next + i, TEXTS[(self.next + i) % 200]) for i in range(add)]
        self.next += add
        self.generation += 1


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_only_new_passages_are_read(tmp_path: Path) -> None:
    store: Any = Toy()
    folder, words = tmp_path / "lexical", Analyzer()
    first = refresh_bm25(store, words, folder, None, progress=True)
    assert refresh_bm25(store, words, folder, first) is first
    again = refresh_bm25(store, words, folder, None)
    assert (store.read, names(folder)) == (200, ["0-602"])
    assert [one.tolist() for one in again[1].search(QUERY, 9)] == [one.tolist() for one in first[1].search(QUERY, 9)]
    store.change(3, slice(1, 2))
    changed = refresh_bm25(store, words, folder, again)
    assert (store.read, names(folder)) == (203, ["0-602", "602-1002"])
    store.change(1, slice(0))
    refresh_bm25(store, words, folder, changed)
    assert (store.read, names(folder)) == (204, ["0-602", "1002-1003", "602-1002"])
    store.change(0, slice(20, 100))  # of the first, too many are dead
    refresh_bm25(store, words, folder, None)
    assert (store.read, names(folder)) == (204 + len(store.rows), ["0-1003"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("full", [32, 1 << 18])
def test_incremental_scores_equal_those_of_a_rebuilt_index(
    full: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertie.search.bm25.SEGMENT_PASSAGES", full)
    store: Any = Toy()
    rng, words, now = random.Random(seed), Analyzer(), None
    for step in range(40):
        at = rng.randrange(len(store.rows))
        store.change(rng.choice([0, 1, 1, 2, 30]), slice(at, at + rng.choice([0, 1, 5, 20])))
        folder = None if seed == 0 else tmp_path / "lexical"
        now = refresh_bm25(store, words, folder, now if folder is None or step % 3 else None)
        keys, scores = now[1].search(QUERY, 500)
        theirs = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
        theirs.index([words.terms(text) for _, text in store.rows], show_progress=False)
        whole = dict(zip([key for key, _ in store.rows], theirs.get_scores(words.terms(QUERY)), strict=True))
        assert set(keys.tolist()) == {key for key, score in whole.items() if score > 0}
        assert scores == pytest.approx([whole[key] for key in keys.tolist()], abs=1e-5)
        assert len(now[1].segments) <= 2 + len(store.rows) // min(full, 32) + math.log2(len(store.rows))
        if folder is not None:
            assert len(names(folder)) == len(now[1].segments)


def test_passages_without_terms(tmp_path: Path) -> None:
    store: Any = Toy()
    store.rows = [(1, "?"), (2, "the")]
    for _ in range(2):
        assert len(refresh_bm25(store, Analyzer(), tmp_path / "lexical", None)[1].search(QUERY, 9)[0]) == 0
    assert store.read == 2


def test_a_concurrent_commit_is_not_cached() -> None:
    store: Any = Toy()
    rows, store.rows = store.rows, store.rows[:100]
    plain = store.passage_texts

    def passage_texts(after: int) -> Iterator[tuple[int, str]]:
        store.generation, store.rows = store.generation + 1, rows
        return plain(after)

    store.passage_texts = passage_texts
    generation, meanwhile = refresh_bm25(store, Analyzer(), None, None)
    assert generation == -1
    store.passage_texts, store.generation = plain, 2
    now = refresh_bm25(store, Analyzer(), None, (generation, meanwhile))
    assert now[0] == 2
    assert [one.tolist() for one in now[1].search(QUERY, 9)] == [one.tolist() for one in index().search(QUERY, 9)]


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_corrupt_segments_are_rebuilt(harm: str, tmp_path: Path) -> None:
    store: Any = Toy()
    folder = tmp_path / "lexical"
    whole = refresh_bm25(store, Analyzer(), folder, None)[1].search(QUERY, 9)
    for file in sorted((folder / "0-602").iterdir()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink()
        if harm != "lose":
            file.write_bytes(data if harm == "flip" else data[:-1])
        before = store.read
        found = refresh_bm25(store, Analyzer(), folder, None)[1].search(QUERY, 9)
        assert store.read == before + 200
        assert [one.tolist() for one in found] == [one.tolist() for one in whole]


def test_read_only_folder(tmp_path: Path) -> None:
    store: Any = Toy()
    (tmp_path / "lexical").write_text("a file")
    assert len(refresh_bm25(store, Analyzer(), tmp_path / "lexical" / "x", None)[1].search(QUERY, 9)[0]) == 9


def test_a_segment_is_saved_although_its_draft_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tempfile.TemporaryDirectory` recurses without end where files cannot be deleted."""
    (index,) = BM25Index.build([(1, "a cat"), (2, "a dog")], Analyzer()).segments

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, refused)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *_: refused())
        with pytest.raises(PermissionError):
            index.save(tmp_path / "lexical" / "0-2", "id")
    index.save(tmp_path / "lexical" / "0-2", "id")
    assert type(index).load(tmp_path / "lexical" / "0-2", "id") is not None
    monkeypatch.undo()
    index.save(tmp_path / "lexical" / "0-2", "id")
    assert os.listdir(tmp_path / "lexical") == ["0-2"]
