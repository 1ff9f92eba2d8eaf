"""Packing of pieces into steps without padding."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertie.errors import ConfigError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.corpus import Corpus, CorpusSettings, build_corpus
from bertie.training.pretrain.packing import SPECIAL_TOKENS, PackedCorpus, first_fit
from tests.training.pretrain.corpus_texts import PIECES, tokenizer_of, write_text


def corpus_of(lengths: list[int], tokenizer: Tokenizer, folder: Path, shard_tokens: int = 100) -> Corpus:
    """Documents of these lengths in tokens, no two alike."""
    draw = random.Random(0)
    documents = []
    for length in lengths:
        words, left = [], length
        while left:
            pieces = min(left, draw.randint(1, 3))
            words.append("".join(draw.choices(PIECES, k=pieces)))
            left -= pieces
        documents.append(" ".join(words))
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)
    build_corpus(
        [str(folder / "a.jsonl")], tokenizer, folder / "out", CorpusSettings(dedup="none", shard_tokens=shard_tokens)
    )
    return Corpus.open(folder / "out", tokenizer)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=25),
    max_length=st.integers(3, 30),
    more=st.integers(0, 60),
    seed=st.integers(0, 1 << 40),
)
def test_every_token_once(
    tokenizer: Tokenizer,
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    max_length: int,
    more: int,
    seed: int,
) -> None:
    of = corpus_of(lengths, tokenizer, tmp_path_factory.mktemp("packed"))
    assert of.lengths.tolist() == lengths
    packed = PackedCorpus(of, max_length + more, max_length, seed)
    end = 0
    for epoch in range(2):
        begin, end = end, end + packed.steps(epoch)
        seen = [np.zeros(length, np.int64) for length in lengths]
        for n in range(begin, end):
            assert packed.locate(n) == (epoch, n - begin)
            pieces = packed.step(n)
            assert pieces
            assert sum(b - a + SPECIAL_TOKENS for _, a, b in pieces) <= packed.budget
            for document, a, b in pieces:
                assert 0 < b - a <= max_length - SPECIAL_TOKENS
                seen[document][a:b] += 1
            check_batch(packed, n)
        assert all((one == 1).all() for one in seen)
    # Any step, asked for first, is the same.
    n = seed % end
    assert PackedCorpus(of, max_length + more, max_length, seed).step(n) == packed.step(n)


def check_batch(packed: PackedCorpus, n: int) -> None:
    """Against one piece after the other."""
    of = packed.corpus
    ids, words = [], []
    lengths = []
    for document, a, b in packed.step(n):
        ids += [of.cls_id, *of.document(document)[a:b].tolist(), of.sep_id]
        starts = of.word_starts(document)[a:b].tolist()
        words += [True, True, *starts[1:], True]
        lengths.append(b - a + SPECIAL_TOKENS)
    flat, cu, special, begin = packed.batch(n)
    assert flat.tolist() == ids
    assert [b - a for a, b in pairwise(cu.tolist())] == lengths
    assert special.tolist() == [one in (of.cls_id, of.sep_id) for one in ids]
    assert begin.tolist() == words


def test_documents_without_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """They are there, that a resumed build may count them, and are never read; a shard may have no other."""
    source = write_text(tmp_path / "a.txt", ["ba", "\ufffd", "da ga", "\ufffd", "\ufffd"])
    made = build_corpus([source], tokenizer, tmp_path / "out", CorpusSettings(shard_tokens=1, dedup="none"))
    assert [shard["tokens"] for shard in made["shards"]] == [1, 2, 0]
    of = Corpus.open(tmp_path / "out")
    assert [len(of.document(i)) for i in range(5)] == [len(of.word_starts(i)) for i in range(5)] == [1, 0, 2, 0, 0]
    assert of.lines(4).tolist() == []
    packed = PackedCorpus(of, 5, 5, 0)
    assert sorted(packed.step(0) + packed.step(1)) == [(0, 0, 1), (2, 0, 2)]
    check_batch(packed, 0)
    build_corpus([write_text(tmp_path / "b.txt", ["\ufffd"])], tokenizer, tmp_path / "none")
    with pytest.raises(InputError, match="holds no tokens"):
        PackedCorpus(Corpus.open(tmp_path / "none"), 5, 5, 0)


def test_spelled_special_tokens_are_special(tokenizer: Tokenizer, tmp_path: Path) -> None:
    build_corpus([write_text(tmp_path / "a.txt", ["ba [SEP] zzz bada"])], tokenizer, tmp_path / "out")
    ids, cu, special, words = PackedCorpus(Corpus.open(tmp_path / "out"), 20, 20, 0).batch(0)
    assert [tokenizer.token(one) for one in ids] == "[CLS] ba [SEP] [UNK] ba ##da [SEP]".split()
    assert special.tolist() == [True, False, True, True, False, False, True]
    assert words.tolist() == [True, True, True, True, True, False, True]
    assert cu.tolist() == [0, 7]


@pytest.mark.parametrize(("budget", "max_length"), [(4096, 128), (4096, 512), (2048, 1024)])
def test_steps_are_full(budget: int, max_length: int) -> None:
    """Documents as long as those of an encyclopedia, and short ones, cut to the max_length."""
    rng = np.random.default_rng(0)
    whole = np.concatenate([rng.lognormal(7, 1, 400), rng.lognormal(4, 1, 400)]).astype(np.int64) + 1
    room = max_length - SPECIAL_TOKENS
    sizes = [size for n in whole.tolist() for size in [room] * (n // room) + [n % room] if size]
    pieces = rng.permutation(np.array(sizes, np.int32)) + SPECIAL_TOKENS
    order, cuts = first_fit(pieces, budget)
    assert sorted(order.tolist()) == list(range(len(pieces)))
    steps = np.add.reduceat(pieces[order], cuts[:-1])
    assert steps.max() <= budget
    assert steps[:-1].mean() > 0.99 * budget


@given(st.lists(st.integers(3, 40), min_size=1, max_size=60), st.integers(40, 90))
def test_first_fit(sizes: list[int], budget: int) -> None:
    """As the textbook has it: each goes to the first bin that has room."""
    bins: list[list[int]] = []
    for i, size in enumerate(sizes):
        for one in bins:
            if sum(sizes[j] for j in one) + size <= budget:
                one.append(i)
                break
        else:
            bins.append([i])
    order, cuts = first_fit(np.array(sizes, np.int32), budget)
    assert [order[a:b].tolist() for a, b in pairwise(cuts.tolist())] == bins


def test_seeds_and_epochs_give_other_orders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    of = corpus_of([9] * 60, tokenizer, tmp_path, shard_tokens=1 << 20)
    one, other = (PackedCorpus(of, 44, 11, seed) for seed in (1, 2))
    assert one.steps() == 15
    assert one.utilization() == 1.0
    orders = [[packed.step(n) for n in range(a, a + 15)] for packed in (one, other) for a in (0, 15)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert orders[0] == [PackedCorpus(of, 44, 11, 1).step(n) for n in range(15)]


def test_wrong_packing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    of = corpus_of([5], tokenizer, tmp_path)
    with pytest.raises(InputError, match="max_length=2"):
        PackedCorpus(of, 10, 2, 0)
    with pytest.raises(InputError, match="budget=10"):
        PackedCorpus(of, 10, 11, 0)
    with pytest.raises(InputError, match="step -1"):
        PackedCorpus(of, 11, 11, 0).step(-1)
    bare = tokenizer_of(["[UNK]", "ba"])
    build_corpus([write_text(tmp_path / "b.txt", ["ba"])], bare, tmp_path / "bare")
    with pytest.raises(ConfigError, match="no \[CLS\] or \[SEP\] token"):
        PackedCorpus(Corpus.open(tmp_path / "bare"), 10, 10, 0)
