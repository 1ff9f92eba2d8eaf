from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.errors import InputError
from bertie.text.encoding import Encoding
from bertie.text.tokenizer import Tokenizer
from bertie.text.windows import (
    LINE,
    PARAGRAPH,
    SENTENCE,
    WORD,
    Window,
    boundary_strengths,
    sentence_windows,
    truncate,
    windows,
    word_starts,
)
from tests.tasks.tiny import document, tokenizer

KINDS = ("wordpiece", "bpe")
MINE = {kind: Tokenizer(tokenizers.Tokenizer.from_str(tokenizer(kind)._tokenizer.to_str())) for kind in KINDS}

text = st.builds(document, st.integers(0, 12), st.integers(0, 1000))
texts = st.one_of(st.tuples(text), st.tuples(text, text), st.tuples(text, st.just("a river")), st.tuples(st.text()))


def encode(kind: str, several: tuple[str, ...]) -> Encoding:
    return MINE[kind].encode(*several)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), texts, st.integers(8, 60))
def test_windows(kind: str, several: tuple[str, ...], max_length: int) -> None:
    whole = encode(kind, several)
    parts = windows(whole, several, max_length)
    if len(whole) <= max_length:
        (one,) = parts
        assert one.indices.tolist() == list(range(len(whole)))
        assert one.owned.all()
        return
    times = np.zeros(len(whole), dtype=int)
    for window in parts:
        times[window.indices[window.owned]] += 1
        assert len(window) <= max_length
        assert (np.diff(window.indices) > 0).all()
        assert window.encoding.ids.tolist() == whole.ids[window.indices].tolist()
        # [CLS] a [SEP] b [SEP]: the special tokens are all there, and the stretches lie between the same ones as ever.
        kept = window.encoding.sequence_ids
        assert kept[kept < 0].size == (whole.sequence_ids < 0).sum()
        assert collapsed(kept) == collapsed(whole.sequence_ids)
        for source in range(len(several)):
            stretch = window.indices[kept == source]
            assert (np.diff(stretch) == 1).all()
            assert stretch.size or source not in whole.sequence_ids
    assert (times == 1).all(), "each token is answered for by exactly one window"
    assert sum(window.tokens_read for window in parts) == (whole.sequence_ids >= 0).sum()
    assert sum(window.weight for window in parts) == pytest.approx((whole.sequence_ids >= 0).sum())
    for source in range(len(several)):
        check_stretches(whole, source, parts)


def collapsed(sources: np.ndarray) -> list[int]:
    return [int(s) for i, s in enumerate(sources) if s < 0 or i == 0 or sources[i - 1] != s]


def check_stretches(whole: Encoding, source: int, parts: list[Window]) -> None:
    """Neighbours overlap, and a token belongs to the stretch where it has most context on both sides."""
    part = np.flatnonzero(whole.sequence_ids == source)
    if not part.size:
        return
    spans = sorted(
        {(int(p[0]), int(p[-1]) + 1) for w in parts if (p := w.indices[w.encoding.sequence_ids == source]).size}
    )
    assert (spans[0][0], spans[-1][1]) == (part[0], part[-1] + 1)
    for (low, high), (next_low, next_high) in pairwise(spans):
        assert low < next_low < high <= next_high, "onward, and with something in common"
    owner = {}
    for window in parts:
        stretch = window.indices[window.encoding.sequence_ids == source]
        for place in window.indices[window.owned & (window.encoding.sequence_ids == source)]:
            owner[int(place)] = (int(stretch[0]), int(stretch[-1]) + 1)
    for place in part.tolist():
        contexts = {}
        for low, high in spans:
            if low <= place < high:
                before = place - low if low > part[0] else len(whole)
                after = high - 1 - place if high <= part[-1] else len(whole)
                contexts[low, high] = min(before, after)
        assert contexts[owner[place]] == max(contexts.values())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(texts, st.integers(8, 60))
def test_truncation_equals_transformers(kind: str, several: tuple[str, ...], max_length: int) -> None:
    whole = encode(kind, several)
    (window,) = truncate(whole, several, max_length)
    lists = [[one] for one in several]  # an empty second text by itself would be taken for none
    (want,) = tokenizer(kind)(*lists, truncation=True, max_length=max_length)["input_ids"]
    assert window.encoding.ids.tolist() == want
    assert window.tokens_read == len(want) - (whole.sequence_ids < 0).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_fits(kind: str) -> None:
    one, two = document(5), document(6)
    for several, least in (((one,), 4), ((one, two), 7 + (kind == "bpe"))):
        whole = encode(kind, several)
        assert windows(whole, several, least)
        with pytest.raises(InputError, match=f"a max_length of {least - 1} tokens leaves"):
            windows(whole, several, least - 1)
        for max_length in (0, 1, 2):
            with pytest.raises(InputError, match=f"a max_length of {max_length} tokens leaves 0 for the text"):
                truncate(whole, several, max_length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_length", [100, 160])
def test_windows_begin_at_sentences_or_words(kind: str, max_length: int) -> None:
    """Nearly all cuts fall between sentences where sentences are short, and between words where there are none."""
    for content, strength in ((document(120), SENTENCE), (" ".join(document(120).replace(".", "").split()), WORD)):
        content = content.replace("!", "").replace("?", "") if strength == WORD else content
        whole = encode(kind, (content,))
        places = np.flatnonzero(whole.sequence_ids == 0)
        cuts = boundary_strengths(whole, places, content)
        ends = [int(w.indices[-2]) for w in windows(whole, (content,), max_length)][
            :-1
        ]  # tokens, counted from 1 after CLS
        assert np.mean([cuts[end] >= strength for end in ends]) > (0.75 if strength == SENTENCE else 0.99)


@pytest.mark.parametrize("kind", KINDS)
def test_boundary_strengths(kind: str) -> None:
    content = "Emma wrote. (Never!) She had 3.5 letters\nin London\n\nand Berlin. \n 北京。河"
    whole = encode(kind, (content,))
    places = np.flatnonzero(whole.sequence_ids == 0)
    got: dict[int, int] = {}
    for start, strength in zip(
        whole.offsets[places, 0].tolist(), boundary_strengths(whole, places, content), strict=True
    ):
        got.setdefault(start, int(strength))  # a space may be a token of its own, with nothing in it
    at = content.index
    assert [got[at(word)] for word in ("wrote", "(", "She", "letters", "in London", "and", "北")] == [
        *(WORD, SENTENCE, SENTENCE, WORD, LINE, PARAGRAPH, SENTENCE)
    ]
    assert got[at("5 letters")] == WORD, "a point inside a number ends no sentence"
    assert got.get(at("河"), SENTENCE) == SENTENCE


def test_words_of_a_tokenizer_that_splits_at_spaces() -> None:
    pieces = ["▁", "▁London", ".", "▁don", "'", "t", "▁北", "京", "と", "で", "\u0301", "ภ", "ษ", "า", "ิ", "Paris"]
    vocabulary = [("<unk>", 0.0), *[(piece, -1.0) for piece in pieces], *[(c, -9.0) for c in "LondparisP"]]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    assert json.loads(backend.pre_tokenizer.__getstate__())["type"] == "Metaspace"
    content = "London. don't 北京とで\u0301 ภษิ Paris."
    whole = Tokenizer(backend).encode(content)
    places = np.arange(len(whole))
    starts = np.flatnonzero(word_starts(whole, places, content))
    ends = [*(starts[1:] - 1), len(whole) - 1]
    words = [content[whole.offsets[a][0] : whole.offsets[b][1]].strip() for a, b in zip(starts, ends, strict=True)]
    assert words == ["London", ".", "don", "'", "t", "北", "京", "と", "で\u0301", "ภ", "ษิ", "Paris", "."]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), texts, st.integers(8, 60))
def test_sentence_windows(kind: str, several: tuple[str, ...], max_length: int) -> None:
    whole = encode(kind, several)
    parts = sentence_windows(whole, several, max_length)
    if len(several) > 1:
        assert len(parts) == len(windows(whole, several, max_length))
        return
    times = np.zeros(len(whole), dtype=int)
    for window in parts:
        times[window.indices[window.owned]] += 1
        assert len(window) <= max(max_length, (whole.sequence_ids < 0).sum())
    assert (times == 1).all()
    text = several[0]
    inside = np.flatnonzero(whole.sequence_ids == 0)
    strengths = boundary_strengths(whole, inside, text)
    firsts = {int(window.indices[window.encoding.sequence_ids == 0][0]) for window in parts if len(inside)}
    assert {int(inside[t]) for t in np.flatnonzero(strengths >= SENTENCE)} <= firsts
