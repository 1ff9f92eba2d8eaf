"""Plans beyond one corpus: pairs of texts, batches that grow, several plans in turn; and how their steps add up."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.errors import ConfigError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.corpus import Corpus
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.sentence_pairs import (
    SECTION,
    STATIC_COPIES,
    NextSentence,
    SentenceOrder,
)
from tests.training.pretrain.corpus_texts import SPECIALS, tokenizer_of
from tests.training.pretrain.numbered_corpus import (
    MASK,
    MAX_LENGTH,
    build_numbered_corpus,
    default_documents,
    halves,
    numbered,
    numbered_tokenizer,
    pair_steps,
    same_items,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return numbered_tokenizer()


@pytest.fixture(scope="module")
def documents() -> list[list[list[int]]]:
    return default_documents()


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, documents: Any, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_numbered_corpus(tmp_path_factory.mktemp("corpus"), tokenizer, documents)


# --- pairs ---


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_labels_tell_where_the_second_text_is_from(
    corpus: Corpus, tokenizer: Tokenizer, documents: Any, kind: Any
) -> None:
    plan = pair_steps(corpus, tokenizer, kind)
    owner = {word: d for d, lines in enumerate(documents) for line in lines for word in line}
    for step in range(plan.total_steps):
        source, items = plan.read(step)
        assert source.head == "mlm"
        for item in items:
            assert len(item) <= MAX_LENGTH
            first, second = halves(item)
            for half in (first, second):
                assert len(half)
                assert (np.diff(half) == 1).all()  # in one piece
            label = int(item.extras["label"])
            if kind is SentenceOrder:
                one, other = (first, second) if label == 0 else (second, first)
                assert one[-1] + 1 == other[0]
                assert owner[one[0]] == owner[other[0]]
            elif label == 0:
                assert first[-1] + 1 == second[0]
                assert owner[first[0]] == owner[second[0]]
            else:
                assert first[-1] + 1 != second[0] or owner[first[0]] != owner[second[0]]


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_labels_are_balanced(corpus: Corpus, tokenizer: Tokenizer, documents: Any, kind: Any) -> None:
    plan = pair_steps(corpus, tokenizer, kind, steps=200)
    section = SECTION * (MAX_LENGTH - 3)
    last = {lines[-1][-1] for lines in documents} | {documents[-1][0][0] + section * k - 1 for k in (1, 2)}
    labels = []
    for step in range(plan.total_steps):
        for item in plan.read(step)[1]:
            first, _ = halves(item)
            if kind is SentenceOrder or first[-1] not in last:  # nothing follows those
                labels.append(int(item.extras["label"]))
    assert len(labels) > 2000
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / np.sqrt(len(labels))


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_an_epoch_reads_all_of_every_document(corpus: Corpus, tokenizer: Tokenizer, documents: Any, kind: Any) -> None:
    """Long ones as well, which are taken in sections."""
    plan = pair_steps(corpus, tokenizer, kind)
    seen: Counter[int] = Counter()
    step = 0
    while plan.epochs_done(step) < 1:
        for item in plan.read(step)[1]:
            first, second = halves(item)
            own = [first, second] if kind is SentenceOrder or not int(item.extras["label"]) else [first]
            seen.update(int(x) for half in own for x in half)
        step += 1
    every = [word for lines in documents for line in lines for word in line]
    missed = [word for word in every if seen[word] == 0]
    # Of sentence order, single tokens at the end of a document are left out.
    assert len(missed) <= (len(documents) + 2 if kind is SentenceOrder else 0)
    assert plan.epochs_done(step) == 1.0
    extra = sum(seen.values()) - len(every) + len(missed)
    assert extra <= SECTION * MAX_LENGTH  # at most the text that a lonely one is paired with


def test_pairs_are_masked(corpus: Corpus, tokenizer: Tokenizer) -> None:
    plan = pair_steps(corpus, tokenizer, masking=Masking(rate=0.2, mask=0.5, random=0.25), steps=100)
    tokens = hidden = as_mask = kept = 0
    for step in range(plan.total_steps):
        for item in plan.read(step)[1]:
            piece = item.windows[0]
            assert piece.rows is not None
            assert piece.values is not None
            assert not np.isin(piece.values, range(5)).any()  # no special token is hidden
            read = np.array(piece.ids)[piece.rows]
            tokens += len(piece) - 3
            hidden += len(piece.rows)
            as_mask += int((read == MASK).sum())
            kept += int((read == piece.values).sum())
    assert hidden / tokens == pytest.approx(0.2, abs=0.01)
    assert as_mask / hidden == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(hidden))
    assert kept / hidden == pytest.approx(0.25, abs=4 * 0.5 / np.sqrt(hidden))


@pytest.mark.parametrize("static", [True, False])
def test_pairs_repeat_after_ten_epochs_and_only_then(tokenizer: Tokenizer, tmp_path: Path, static: bool) -> None:
    corpus = build_numbered_corpus(tmp_path, tokenizer, numbered([30, 40, 55, 60, 25, 90]))
    plan = pair_steps(corpus, tokenizer, static=static, steps=1000, budget=100)
    ends = [0]
    for epoch in range(2 * STATIC_COPIES + 1):
        ends.append(next(step for step in range(ends[-1], 10**4) if plan.epochs_done(step) >= epoch + 1))
    cycle = ends[STATIC_COPIES]
    first = [plan.read(step)[1] for step in range(cycle)]
    assert all(same_items(first[step], plan.read(step)[1]) for step in range(0, cycle, 7))  # asked twice
    again = [same_items(first[step], plan.read(step + cycle)[1]) for step in range(cycle)]
    assert all(again) if static else not any(again)
    for one, other in pairwise(ends[:STATIC_COPIES]):
        assert not any(same_items(first[one], items) for items in first[other : other + 3])
    assert len({str([item.windows[0].ids.tolist() for item in items]) for items in first}) == cycle


def test_a_step_with_a_single_text_gets_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """As at the end of an epoch: what comes from elsewhere needs an elsewhere."""
    corpus = build_numbered_corpus(tmp_path, tokenizer, numbered([30, 30, 30]))
    plan = pair_steps(corpus, tokenizer, budget=64, steps=40)
    assert min(len(plan._packing.items(step)) for step in range(40)) == 1
    for step in range(40):
        assert len(plan.read(step)[1])


def test_invalid_pair_samplers_are_refused(corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^steps=0 must be at least 1$"):
        pair_steps(corpus, tokenizer, steps=0)
    with pytest.raises(InputError, match=r"^max_length=4 must be at least 5: a pair and its special tokens$"):
        pair_steps(corpus, tokenizer, max_length=4)
    assert pair_steps(corpus, tokenizer, max_length=5).read(0)[1]
    bare = tokenizer_of([*[word for word in SPECIALS if word != "[MASK]"], "w1"])
    with pytest.raises(InputError, match="need a tokenizer with CLS, SEP and mask tokens"):
        pair_steps(corpus, bare)
    with pytest.raises(InputError, match="has a single text; pairs need at least 2"):
        pair_steps(build_numbered_corpus(tmp_path, tokenizer, numbered([30])), tokenizer)


# --- generating pairs ---


def numbered_documents(count: int, seed: int = 0, longest: int = 14) -> list[list[Any]]:
    """Each token is its document's number in thousands and its place there."""
    rng = np.random.default_rng(seed)
    made = []
    for d in range(count):
        ends = np.cumsum(rng.integers(1, longest, size=rng.integers(1, 30)))
        made.append(np.split(1000 * d + np.arange(ends[-1]), ends[:-1]))
    return made


def follows(first: Any, second: Any) -> bool:
    return bool(second[0] == first[-1] + 1)


def whole(part: Any) -> bool:
    return bool((np.diff(part) == 1).all())


def test_next_sentence_pairs() -> None:
    docs = numbered_documents(200)
    borders = {int(s[0]) for doc in docs for s in doc} | {int(doc[-1][-1]) + 1 for doc in docs}
    pairs = list(NextSentence.pairs(docs, 40, np.random.default_rng(1)))
    for pair in pairs:
        assert len(pair.first) + len(pair.second) <= 40
        assert whole(pair.first)
        assert whole(pair.second)
        assert follows(pair.first, pair.second) == (pair.label == 0)
        assert (pair.first[0] // 1000 == pair.second[0] // 1000) == (pair.label == 0)
        # No sentence is cut, on either side and for either label: a cut would tell them apart.
        for part in (pair.first, pair.second):
            assert int(part[0]) in borders
            assert int(part[-1]) + 1 in borders

    # Every token is read: first, or second in its place.
    read = np.concatenate([np.concatenate([p.first, *([p.second] if p.label == 0 else [])]) for p in pairs])
    assert np.array_equal(read, np.concatenate([s for doc in docs for s in doc]))

    ends = {int(doc[-1][-1]) for doc in docs}
    assert all(pair.label == 1 for pair in pairs if int(pair.first[-1]) in ends)
    free = [pair.label for pair in pairs if int(pair.first[-1]) not in ends]
    assert len(free) > 500
    assert abs(np.mean(free) - 0.5) <= 3 * np.sqrt(0.25 / len(free))


def test_sentence_order_pairs() -> None:
    docs = numbered_documents(300, seed=2)
    pairs = list(SentenceOrder.pairs(docs, 40, np.random.default_rng(1)))
    for pair in pairs:
        assert len(pair.first) + len(pair.second) <= 40
        assert follows(pair.first, pair.second) == (pair.label == 0)
        assert follows(pair.second, pair.first) == (pair.label == 1)
    labels = np.array([pair.label for pair in pairs])
    assert abs(labels.mean() - 0.5) <= 3 * np.sqrt(0.25 / len(labels))
    # Which of the two is longer must not tell the label.
    longer = np.array([len(pair.first) - len(pair.second) for pair in pairs])
    assert abs(np.corrcoef(labels, longer)[0, 1]) <= 3 / np.sqrt(len(labels))
    # All is read, except single tokens that are left alone.
    read = sum(len(pair.first) + len(pair.second) for pair in pairs)
    total = sum(len(s) for doc in docs for s in doc)
    assert total - len(docs) < read <= total


@pytest.mark.parametrize("kind", [NextSentence, SentenceOrder])
def test_long_sentences_and_the_smallest_room(kind: Any) -> None:
    docs = [[np.arange(25)], [1000 + np.arange(7)]]
    for room in (2, 3, 9):
        pairs = list(kind.pairs(docs, room, np.random.default_rng(0)))
        assert all(
            len(pair.first) and len(pair.second) and len(pair.first) + len(pair.second) <= room for pair in pairs
        )
        seen = {int(x) for pair in pairs for x in (*pair.first, *pair.second)}
        assert len(seen) >= 30


def test_the_same_seed_makes_the_same_pairs() -> None:
    docs = numbered_documents(10)
    for kind in (NextSentence, SentenceOrder):
        one, two, other = (
            [(*p.first.tolist(), -1, *p.second.tolist()) for p in kind.pairs(docs, 30, np.random.default_rng(seed))]
            for seed in (1, 1, 2)
        )
        assert one == two != other


def test_documents_without_pairs_are_refused() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="at least 2"):
        list(NextSentence.pairs(numbered_documents(1), 20, rng))
    with pytest.raises(InputError, match="document 1 has no tokens"):
        list(SentenceOrder.pairs([[np.arange(3)], []], 20, rng))
    with pytest.raises(InputError, match="room=1"):
        list(SentenceOrder.pairs(numbered_documents(2), 1, rng))
