"""What is hidden: how much, where, in which units, and what is read in its place."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.errors import ConfigError, InputError
from bertie.training.pretrain.masking import Masking, masking_rng

UNITS = ("token", "word", "span")
VOCAB, MASK = 500, 4
NEVER = (0, 1, 2, 3, 4, 250, 499)


def corpus(tokens: int, seed: int = 0, shortest: int = 60, longest: int = 400) -> tuple[Any, Any, Any, Any]:
    """ids, special, words, cu of random texts: special tokens at both ends and now and then inside."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest, size=2 * tokens // (shortest + longest))
    cu = np.concatenate([[0], np.cumsum(lengths)])
    total = int(cu[-1])
    special = rng.random(total) < 0.005
    special[cu[:-1]] = special[cu[1:] - 1] = True
    words = rng.random(total) < 0.7
    allowed = np.setdiff1d(np.arange(VOCAB), NEVER)
    ids = np.where(special, 2, rng.choice(allowed, total))
    return ids, special, words, cu


def units_of(special: Any, words: Any, cu: Any) -> list[list[int]]:
    """The words, by a plain loop."""
    result: list[list[int]] = []
    for start, end in pairwise(cu):
        new = True
        for at in range(start, end):
            if special[at]:
                new = True
                continue
            if new or words[at]:
                result.append([])
            result[-1].append(at)
            new = False
    return result


@pytest.fixture(scope="module")
def million() -> tuple[Any, Any, Any, Any]:
    made = corpus(1_100_000)
    assert (~made[1]).sum() > 1_000_000
    return made


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_rates_over_a_million_tokens(million: Any, unit: Any, rate: float) -> None:
    ids, special, words, cu = million
    masking, rng = Masking(rate=rate, mask=0.7, random=0.2, unit=unit), masking_rng(11, 0, 5)
    places = masking.choose(special, words, cu, rng)
    assert (np.diff(places) > 0).all()
    assert not special[places].any()

    total = (~special).sum()
    assert abs(len(places) / total - rate) <= 3 * np.sqrt(rate * (1 - rate) / total)
    # By text: independent of each other, and each unbiased, so that the sum is within its own error, too.
    owner = np.searchsorted(cu, np.arange(len(ids)), side="right") - 1
    expected = rate * np.bincount(owner[~special], minlength=len(cu) - 1)
    excess = np.bincount(owner[places], minlength=len(cu) - 1) - expected
    assert abs(excess.sum()) <= 3 * np.sqrt((excess**2).sum())
    assert np.abs(excess).max() < {"token": 1, "word": 30, "span": 100}[unit]

    masked, targets = masking.apply(ids, places, rng, VOCAB, MASK, NEVER)
    assert (targets == ids[places]).all()
    elsewhere = np.ones(len(ids), dtype=bool)
    elsewhere[places] = False
    assert (masked[elsewhere] == ids[elsewhere]).all()
    read = masked[places]
    same = 0.2 / (VOCAB - len(NEVER))  # of the random ones, these are what was there
    shares = {0.7: read == MASK, 0.2 - same: (read != MASK) & (read != targets), 0.1 + same: read == targets}
    for share, result in shares.items():
        assert abs(result.mean() - share) <= 3 * np.sqrt(share * (1 - share) / len(places))
    assert sum(result.sum() for result in shares.values()) == len(places)
    assert masking.keep == pytest.approx(0.1)


@pytest.mark.parametrize("unit", ["word", "span"])
def test_long_words_are_as_likely_as_short_ones(unit: Any) -> None:
    _, special, words, cu = corpus(150_000)
    places = Masking(unit=unit).choose(special, words, cu, masking_rng(3, 0, 0))
    hidden = np.zeros(len(special), dtype=bool)
    hidden[places] = True
    by_length: dict[int, list[bool]] = {}
    for unit_ in units_of(special, words, cu):
        assert hidden[unit_].all() == hidden[unit_].any(), "a word was hidden in part"
        by_length.setdefault(len(unit_), []).append(bool(hidden[unit_[0]]))
    for length in range(1, 6):
        # Words of a span are hidden together: as many independent draws as there are spans.
        count = len(by_length[length]) / (3 if unit == "span" else 1)
        assert abs(np.mean(by_length[length]) - 0.15) <= 3 * np.sqrt(0.15 * 0.85 / count)


def test_random_tokens_are_uniform_and_never_special() -> None:
    ids = np.full(200_000, 7)
    masked, _ = Masking(mask=0.0, random=1.0).apply(ids, np.arange(len(ids)), masking_rng(0, 0, 0), VOCAB, MASK, NEVER)
    counts = np.bincount(masked, minlength=VOCAB)
    assert counts[list(NEVER)].sum() == 0
    others = np.delete(counts, NEVER)
    assert (others > 0).all()
    freedom = len(others) - 1
    chi = ((others - others.mean()) ** 2 / others.mean()).sum()
    assert abs(chi - freedom) <= 3 * np.sqrt(2 * freedom)


def test_spans_are_geometric_and_end_with_the_run() -> None:
    # Long runs and a low rate: hardly any two spans touch, so that the hidden runs are the spans.
    total, mean, most = 1_000_000, 3.8, 10
    special = np.zeros(total, dtype=bool)
    words = np.arange(total) % 2 == 0  # each of two tokens
    places = Masking(rate=0.004, unit="span", span_mean=mean, span_max=most).choose(
        special, words, np.array([0, total]), masking_rng(5, 0, 0)
    )
    assert (places[::2] % 2 == 0).all()
    runs = np.diff(np.flatnonzero(np.diff(places, prepend=-2, append=total + 2) != 1)) / 2  # in words
    runs = runs[runs <= most]
    assert abs(runs.mean() - mean) <= 3 * runs.std() / np.sqrt(len(runs))
    # p = 0.2, cut at 10: SpanBERT's lengths.
    expected = 0.2 * 0.8 ** np.arange(most) / (1 - 0.8**most)
    result = np.bincount(runs.astype(int), minlength=most + 1)[1:] / len(runs)
    assert (np.abs(result - expected) <= 4 * np.sqrt(expected * (1 - expected) / len(runs))).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_batch(data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    total = sum(lengths)
    flags = st.lists(st.booleans(), min_size=total, max_size=total)
    special, words = (np.array(data.draw(flags), dtype=bool) for _ in range(2))
    rate, unit = data.draw(st.sampled_from([0.01, 0.15, 0.5, 1.0])), data.draw(st.sampled_from(UNITS))
    cu = np.concatenate([[0], np.cumsum(lengths)])
    places = Masking(rate=rate, unit=unit).choose(special, words, cu, masking_rng(data.draw(st.integers(0, 99)), 0, 0))
    assert not special[places].any()
    assert places.tolist() == sorted(set(places.tolist()))
    hidden = np.isin(np.arange(total), places)
    for start, end in pairwise(cu):
        maskable, chosen = int((~special[start:end]).sum()), int(hidden[start:end].sum())
        assert (chosen > 0) == (maskable > 0)
        if unit == "token":
            share = rate * maskable
            assert chosen in {max(bool(maskable), int(np.floor(share))), int(np.ceil(share - 1e-9))}
        if rate == 1:
            assert chosen == maskable
    if unit != "token":
        for word in units_of(special, words, cu):
            assert hidden[word].all() == hidden[word].any()


@pytest.mark.parametrize("unit", ["word", "span"])
def test_no_unit_crosses_a_text_or_a_special_token(unit: Any) -> None:
    """Three runs, two of them of one text with a special token between: each may be hidden without its neighbour."""
    special = np.arange(10) == 3
    words = np.zeros(10, dtype=bool)  # whatever could go on, does
    masking = Masking(rate=0.5, unit=unit, span_mean=5.5)
    seen = set()
    for index in range(100):
        places = masking.choose(special, words, np.array([0, 7, 10]), masking_rng(0, 0, index))
        hidden = np.isin(np.arange(10), places)
        for run in (slice(0, 3), slice(4, 7), slice(7, 10)):
            assert hidden[run].all() == hidden[run].any()
        seen.add((bool(hidden[0]), bool(hidden[4]), bool(hidden[7])))
    assert {(True, False, True), (False, True, True)} <= seen  # the second text has one run, always hidden


def test_static_and_dynamic() -> None:
    _, special, words, cu = corpus(2_000)

    def places(epoch: int | None, index: int, seed: int = 1) -> list[int]:
        result: list[int] = Masking().choose(special, words, cu, masking_rng(seed, epoch, index)).tolist()
        return result

    assert places(None, 3) == places(None, 3) == places(0, 3)
    assert places(4, 3) == places(4, 3)
    different = [places(None, 3), places(1, 3), places(2, 3), places(1, 4), places(1, 3, seed=2)]
    assert len({tuple(one) for one in different}) == len(different)


def test_neither_ids_nor_their_type_change() -> None:
    ids = np.arange(5, 25, dtype=np.uint16)
    before = ids.copy()
    masked, targets = Masking(rate=1.0).apply(ids, np.arange(20), masking_rng(0, 0, 0), VOCAB, MASK, NEVER)
    assert (ids == before).all()
    assert masked.dtype == targets.dtype == np.uint16


def test_nothing_to_hide() -> None:
    special = np.ones(4, dtype=bool)
    assert len(Masking().choose(special, special, np.array([0, 4]), masking_rng(0, 0, 0))) == 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rate": 0.0}, "rate=0.0"),
        ({"rate": 1.1}, "rate=1.1"),
        ({"mask": -0.1}, "mask=-0.1"),
        ({"mask": 0.8, "random": 0.3}, "random=0.3"),
        ({"unit": "sentence"}, "unit='sentence'"),
        ({"span_max": 0}, "span_max=0"),
        ({"span_mean": 6.0}, "span_mean=6.0"),
    ],
)
def test_policies_that_cannot_be(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Masking(**wrong)


def test_ids_that_cannot_be() -> None:
    ids, places, rng = np.arange(5), np.array([1]), masking_rng(0, 0, 0)
    for vocab, mask_id, never, named in ((5, 5, (), "mask_id=5"), (5, 4, (5,), "never="), (2, 1, (0, 1), "never=")):
        with pytest.raises(InputError, match=named):
            Masking().apply(ids, places, rng, vocab, mask_id, never)
    with pytest.raises(InputError, match="cu ends at 4"):
        Masking().choose(np.zeros(5, bool), np.ones(5, bool), np.array([0, 4]), rng)


def test_hidden_runs_of_a_plain_example() -> None:
    """One text, one long word: hidden whole or, where others are there, not at all."""
    words = np.array([True, False, False, True, True, True])
    seen = set()
    for index in range(200):
        places = Masking(rate=0.34, unit="word").choose(
            np.zeros(6, dtype=bool), words, np.array([0, 6]), masking_rng(0, 0, index)
        )
        seen.add(tuple(key for key, _ in groupby("A" if at < 3 else str(at) for at in places.tolist())))
    assert ("A",) in seen
    assert all(len(one) >= 1 for one in seen)
    assert {key for one in seen for key in one} == {"A", "3", "4", "5"}
