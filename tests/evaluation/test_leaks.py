from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.evaluation import leaks
from bertie.evaluation.leaks import Leak, _units, _words, find_leaks

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def vocabulary(rng: random.Random, size: int) -> list[str]:
    words: set[str] = set()
    while len(words) < size:
        words.add("".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(1, 4))))
    return sorted(words)


def sentences(rng: random.Random, words: list[str], n: int, least: int = 8, most: int = 25) -> list[str]:
    """Words as frequent as those of a language: the i-th about 1/i as often as the first."""
    weights = [1 / (i + 1) for i in range(len(words))]
    return [" ".join(rng.choices(words, weights, k=rng.randint(least, most))).capitalize() + "." for _ in range(n)]


def edited(rng: random.Random, text: str, times: int, words: list[str]) -> str:
    """So many words replaced, left out, put in or misspelt."""
    result = text.split()
    for _ in range(times):
        i = rng.randrange(len(result))
        kind = rng.choice(("replace", "leave out", "put in", "misspell"))
        if kind == "replace":
            result[i] = rng.choice(words)
        elif kind == "leave out" and len(result) > 1:
            del result[i]
        elif kind == "put in":
            result.insert(i, rng.choice(words))
        else:
            at = rng.randrange(len(result[i]))
            result[i] = result[i][:at] + rng.choice("xqj") + result[i][at + 1 :]
    return " ".join(result)


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_planted_copies_are_found_and_nothing_else(times: int) -> None:
    rng = random.Random(times)
    words = vocabulary(rng, 3000)
    train, clean = sentences(rng, words, 2000), sentences(rng, words, 1000)
    source = rng.sample(range(2000), 200)
    test = [edited(rng, train[i], times, words) for i in source] + clean
    result = {leak.test_index: leak for leak in find_leaks(train, test)}
    hits = [i for i in range(200) if i in result and result[i].train_index == source[i]]
    assert len(hits) >= 195
    assert sum(i >= 200 for i in result) <= 5
    if not times:
        assert {result[i].kind for i in hits} == {"exact"}


def test_long_texts() -> None:
    rng = random.Random(0)
    words = vocabulary(rng, 3000)
    train = sentences(rng, words, 200, least=150, most=300)
    test = [edited(rng, text, 15, words) for text in train[:50]] + sentences(rng, words, 50, least=150, most=300)
    result = find_leaks(train, test)
    assert [(leak.test_index, leak.train_index) for leak in result] == [(i, i) for i in range(50)]
    # Half of it is another text: not a light edit.
    halves = [" ".join(text.split()[: len(text.split()) // 2] + test[-1].split()[:80]) for text in train[:50]]
    assert find_leaks(train, halves) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What a film!", "what a film"),
        ("a  b\tc\nd", "A B C D"),
        ("it 's great , really", "It's great, really!"),
        ("ﬁne café", "FINE CAFÉ"),  # a ligature; composed
        ("Straße", "STRASSE"),
        ("今天天气很好。", "今天 天气 很好"),
        ("हिन्दी में।", "हिन्दी में"),
        ("!!!", "!!!"),
    ],
)
def test_the_same_text(one: str, other: str) -> None:
    assert find_leaks(["something else", one], [other]) == [Leak(0, 1, "exact", 1.0)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("where do I order a card", "where do I order a watch"),  # short: a word may be all that matters
        (":)", ":("),
        ("good", "bad"),
        ("हिन्दी", "हन्द"),  # vowel signs are no punctuation
    ],
)
def test_short_texts_that_differ(one: str, other: str) -> None:
    assert find_leaks([one] * 3 + ["filler"], [other]) == []


def test_pairs_are_near_if_both_texts_are() -> None:
    rng = random.Random(0)
    words = vocabulary(rng, 500)
    firsts, seconds, others = (sentences(rng, words, 100) for _ in range(3))
    train = [f"{a}\n{b}" for a, b in zip(firsts, seconds, strict=True)]
    assert find_leaks(train, [f"{a}\n{b}" for a, b in zip(firsts, others, strict=True)]) == []
    result = find_leaks(train, [f"{a}\n{edited(rng, b, 1, words)}" for a, b in zip(firsts, seconds, strict=True)])
    assert len(result) >= 98


def test_frequent_words_alone_are_no_proof() -> None:
    """Eight words that all training texts have, in an order of their own."""
    rng = random.Random(0)
    pattern = "i would like to know how my".split()
    things = vocabulary(rng, 400)
    train = [" ".join([*pattern, thing, "works"]) for thing in things[:200]]
    assert find_leaks(train, [" ".join([*pattern, thing, "works"]) for thing in things[200:]]) == []
    # Rare words, as many: a copy.
    odd = "zebras quietly juggle crimson anvils beneath forgotten lighthouses daily"
    assert find_leaks([*train, odd], [odd.replace("crimson", "purple")])[0].train_index == 200


def test_the_closest_is_reported_once() -> None:
    text = "zebras quietly juggle crimson anvils beneath forgotten lighthouses daily"
    train = [text.replace("daily", "hourly"), text, text, text.replace("crimson anvils", "green pots")]
    filler = ["one two three four five six seven eight nine"]
    assert find_leaks(train + filler, [text]) == [Leak(0, 1, "exact", 1.0)]
    (leak,) = find_leaks(train + filler, [text.replace("beneath", "above")])
    assert (leak.train_index, leak.kind, leak.similarity) == (1, "near", pytest.approx(8 / 9))


def test_nothing_to_compare() -> None:
    assert find_leaks([], ["a text"]) == []
    assert find_leaks(["a text"], []) == []
    assert find_leaks(["short"], ["one two three four five six seven eight nine"]) == []


def plain(train: list[str], test: list[str]) -> dict[int, float]:
    """The definition, pair by pair: the best similarity of each test text that has a near one."""
    bags = [_units(_words(text)) for text in train]
    kept = {i: bags[i] for i in {"".join(_words(t)): i for i, t in reversed(list(enumerate(train)))}.values()}
    kept = {i: units for i, units in kept.items() if len(units) >= 5}
    times = Counter(unit for units in kept.values() for unit in units)
    words_of = {i: _words(train[i]) for i in kept}
    alone = Counter(word for words in words_of.values() for word in words)
    pairs = Counter(
        (gap, a, b) for words in words_of.values() for gap in (1, 2) for a, b in zip(words, words[gap:], strict=False)
    )
    total = len(kept) + leaks.PRIOR_TEXTS

    def nats_of(row: int, place: int) -> float:
        own, words = times[kept[row][place]], words_of[row]
        best = math.log(total / own)
        for gap in (1, 2):
            if place >= gap:
                before, follows = alone[words[place - gap]] - 1, pairs[gap, words[place - gap], words[place]] - 1
                odds = (before + leaks.BIGRAM_PRIOR) / (follows + leaks.BIGRAM_PRIOR * own / total)
                best = min(best, math.log(odds))
        return best

    result: dict[int, float] = {}
    for i, text in enumerate(test):
        words = _words(text)
        for j, units in kept.items():
            theirs, longer = _words(train[j]), max(len(units), len(words))
            both = set(units) & set(_units(words))
            if longer < 8 or not both:
                continue
            common = subsequence(theirs, words)
            each = [nats_of(j, place) for place, unit in enumerate(units) if unit in both]
            nats = sum(each)
            if nats - max(each) <= leaks.CHANCE_NATS:
                continue
            left_out = longer - common
            if left_out <= max(3, int(0.15 * longer)) and (
                nats * common / len(both) - leaks.EDIT_NATS * left_out > leaks.CHANCE_NATS
            ):
                result[i] = max(result.get(i, 0.0), common / longer)
    return result


def subsequence(a: list[str], b: list[str]) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(before[j + 1], row[j]))
    return row[-1]


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_looking_up_rare_words_misses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    words = vocabulary(rng, rng.choice((30, 60, 400)))
    train = sentences(rng, words, 40, least=4, most=rng.choice((10, 40)))
    test = [edited(rng, rng.choice(train), rng.randint(1, 6), words) for _ in range(15)] + sentences(
        rng, words, 5, least=4
    )
    result = find_leaks(train, test)
    near = {leak.test_index: leak.similarity for leak in result if leak.kind == "near"}
    exact = {leak.test_index for leak in result} - set(near)
    expected = {i: best for i, best in plain(train, test).items() if i not in exact}
    assert {i: near.get(i) for i in expected} == pytest.approx(expected)  # the others contain one another


# --- containment ---


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """Short and long texts, with the word frequencies of a language."""
    rng = random.Random(7)
    words = vocabulary(rng, 4000)
    return sentences(rng, words, 3000, least=6, most=12) + sentences(rng, words, 500, least=20, most=40)


def halves_swapped(text: str) -> str:
    words = text.split()
    return " ".join(words[len(words) // 2 :] + words[: len(words) // 2])


@pytest.mark.parametrize(
    ("edit", "least"),
    [
        (lambda text: f"Please note: {text}", 97),
        (lambda text: f"{text} Thank you very much", 97),
        (lambda text: " ".join(text.split()[: -(-len(text.split()) * 7 // 10)]), 90),  # truncated
        (halves_swapped, 90),
    ],
    ids=["prefix", "suffix", "truncated", "swapped"],
)
@pytest.mark.parametrize("first", [0, 3000], ids=["short", "long"])
def test_copies_in_parts(corpus: list[str], edit: Callable[[str], str], least: int, first: int) -> None:
    chosen = random.Random(1).sample(range(first, len(corpus) if first else 3000), 100)
    result = find_leaks(corpus, [edit(corpus[i]) for i in chosen])
    assert sum(leak.train_index == chosen[leak.test_index] for leak in result) >= least


def test_pairs_with_swapped_sides(corpus: list[str]) -> None:
    train = [f"{a}\n{b}" for a, b in zip(corpus[:1500], corpus[1500:3000], strict=True)]
    result = find_leaks(train, [f"{b}\n{a}" for a, b in zip(corpus[:100], corpus[1500:1600], strict=True)])
    assert [(leak.test_index, leak.train_index) for leak in result] == [(i, i) for i in range(100)]


def test_templates_are_no_copies(corpus: list[str]) -> None:
    rng = random.Random(3)
    nouns = vocabulary(random.Random(9), 2000)
    patterns = (
        "How many {} are there in a {}?",
        "How many {} are there in the {} of {}?",
        "What is the name of the {} in the {}?",
    )
    texts = [rng.choice(patterns).format(*rng.sample(nouns, 3)) for _ in range(1200)]
    assert len(find_leaks(corpus + texts[:600], texts[600:])) <= 6


def test_a_few_frequent_words_inside_a_text_are_no_copy(corpus: list[str]) -> None:
    frequent = [word for word, _ in Counter(word for text in corpus for word in _words(text)).most_common(6)]
    assert find_leaks([*corpus, " ".join(frequent[:3])], [f"zap {' '.join(frequent[:3])} zip zup"]) == []
