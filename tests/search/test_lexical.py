"""BM25 against its formula and against bm25s' own way from texts to scores; what is kept of it on the disk."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.search.lexical import Lexical, Words, current

bm25s = pytest.importorskip("bm25s")
Stemmer = pytest.importorskip("Stemmer")

VOCABULARY = "cats dog running the rivers baked breads of fishing mats sat on a quick 1999 naïve Zürich".split()
TEXTS = [" ".join(random.Random(i).choices(VOCABULARY, k=3 + i % 9)).capitalize() + "." for i in range(200)]
KEYS = [3 * i + 5 for i in range(200)]
QUERY = "The cat and the dogs run to a river, in ZÜRICH"


def index() -> Lexical:
    return Lexical.build(zip(KEYS, TEXTS, strict=True), Words())


def test_scores_are_those_of_bm25s_from_texts() -> None:
    stemmer = Stemmer.Stemmer("english")
    theirs = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    options = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
    theirs.index(bm25s.tokenize(TEXTS, **options), show_progress=False)
    scores = theirs.get_scores(bm25s.tokenize([QUERY], return_ids=False, **options)[0])
    keys, found = index().nearest(QUERY, 200)
    assert len(keys) == (scores > 0).sum()
    assert found == pytest.approx([scores[KEYS.index(key)] for key in keys.tolist()], abs=1e-5)
    assert keys.tolist() == [KEYS[row] for row in np.lexsort((KEYS, -scores))[: len(keys)]]


def test_scores_are_those_of_the_formula() -> None:
    words = Words()
    stems = [words.stems(text) for text in TEXTS]
    mean = sum(map(len, stems)) / len(stems)
    expected = {}
    for key, mine in zip(KEYS, stems, strict=True):
        counts = Counter(mine)
        score = 0.0
        for stem in words.stems(QUERY):
            df = sum(stem in one for one in stems)
            idf = math.log(1 + (len(stems) - df + 0.5) / (df + 0.5))
            score += idf * counts[stem] / (counts[stem] + 1.2 * (1 - 0.75 + 0.75 * len(mine) / mean))
        expected[key] = score
    keys, scores = index().nearest(QUERY, 10)
    assert scores == pytest.approx([expected[key] for key in keys.tolist()], rel=1e-4)
    assert scores[-1] == pytest.approx(sorted(expected.values())[-10], rel=1e-4)


def test_only_what_is_allowed_is_found() -> None:
    allowed = np.array([key for key in KEYS if key % 2])
    keys, scores = index().nearest(QUERY, 5, allowed)
    every, all_scores = index().nearest(QUERY, 200)
    rest = [(key, score) for key, score in zip(every.tolist(), all_scores, strict=True) if key % 2]
    assert list(zip(keys.tolist(), scores, strict=True)) == rest[:5]
    assert len(index().nearest(QUERY, 5, np.array([1]))[0]) == 0


def test_nothing_is_found_of_unknown_words_stop_words_and_nothing() -> None:
    for query in ("unknown", "the of and", "", "?!"):
        assert len(index().nearest(query, 5)[0]) == 0
    empty = Lexical.build([], Words())
    assert len(empty.nearest("cat", 5)[0]) == 0


def test_other_languages_and_none() -> None:
    assert Words("german").stems("Die Häuser der Stadt") == ["haus", "stadt"]
    assert Words(None).stems("The cats") == ["the", "cats"]
    with pytest.raises(InputError, match="language='klingon'"):
        Words("klingon")


def test_spans_are_of_words_with_the_stems() -> None:
    text = "Running dogs ran; a dog's run."
    assert [text[a:b] for a, b in Words().spans(text, {"run", "dog"})] == ["Running", "dogs", "dog", "run"]


class Toy:
    """As much of a store as is asked."""

    def __init__(self) -> None:
        self.generation, self.read, self.rows = 1, 0, list(zip(KEYS, TEXTS, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self) -> Iterator[tuple[int, str]]:
        self.read += 1
        yield from self.rows


def test_it_is_kept_until_something_changes(tmp_path: Path) -> None:
    store: Any = Toy()
    folder, words = tmp_path / "lexical", Words()
    first = current(store, words, folder, None, progress=True)
    assert current(store, words, folder, first) is first
    again = current(store, words, folder, None)
    assert (store.read, [one.name for one in folder.iterdir()]) == (1, ["1-english"])
    assert again[1].nearest(QUERY, 9)[0].tolist() == first[1].nearest(QUERY, 9)[0].tolist()
    assert again[1].nearest(QUERY, 9)[1].tolist() == first[1].nearest(QUERY, 9)[1].tolist()
    store.generation, store.rows = 2, [(1000, "A cat.")]
    changed = current(store, words, folder, again)
    assert changed[1].nearest(QUERY, 9)[0].tolist() == [1000]
    assert [one.name for one in folder.iterdir()] == ["2-english"]


@pytest.mark.parametrize("harm", ["flip", "cut", "lose"])
def test_what_is_damaged_is_made_again(harm: str, tmp_path: Path) -> None:
    store: Any = Toy()
    folder = tmp_path / "lexical"
    whole = current(store, Words(), folder, None)[1].nearest(QUERY, 9)
    for file in sorted((folder / "1-english").iterdir()):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.unlink()
        if harm != "lose":
            file.write_bytes(data if harm == "flip" else data[:-1])
        before = store.read
        found = current(store, Words(), folder, None)[1].nearest(QUERY, 9)
        assert store.read == before + 1
        assert [one.tolist() for one in found] == [one.tolist() for one in whole]


def test_a_folder_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    store: Any = Toy()
    (tmp_path / "lexical").write_text("a file")
    assert len(current(store, Words(), tmp_path / "lexical" / "x", None)[1].nearest(QUERY, 9)[0]) == 9
