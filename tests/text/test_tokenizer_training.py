"""Learning vocabularies: against the library's trainers where they are sure, and against plain loops where not."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from bertie.errors import BertieError, ConfigError, ExistsError, InputError
from bertie.text import unigram_training, word_counts
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_training import (
    ANGLES,
    BRACKETS,
    Kind,
    check_free,
    extend,
    pre_tokenizing_backend,
    save,
    train,
)
from bertie.text.word_counts import count_words

ALL = get_args(Kind)
STRANGE = " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u3000\u200babAB.,'#é́̈中ﬁ½1²¨"


def corpus(seed: int = 0, texts: int = 200) -> list[str]:
    """Words of a few stems and endings, some of them more frequent, with names, numbers and signs."""
    rng = random.Random(seed)
    stems = ["".join(rng.choices("abcdefghilmnoprstu", k=rng.randint(2, 5))) for _ in range(60)]
    ends = ["", "", "s", "ed", "ing", "er", "ation"]

    def word() -> str:
        one = stems[min(int(rng.expovariate(0.08)), 59)] + rng.choice(ends)
        return rng.choice([one] * 8 + [one.capitalize(), f"{one},", f"{rng.randint(1, 2030)}", f"«{one}é»", "中文"])

    return [" ".join(word() for _ in range(rng.randint(3, 20))) + "." for _ in range(texts)]


# ── words ──


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("lowercase", [False, True])
def test_words_are_those_of_whole_texts(kind: Kind, lowercase: bool) -> None:
    backend = pre_tokenizing_backend(kind, lowercase)

    @settings(max_examples=150, deadline=None)
    @given(st.lists(st.text(st.sampled_from(STRANGE) | st.characters(exclude_categories=["Cs"]), max_size=20)))
    def check(texts: list[str]) -> None:
        texts = [*(f"{text}x" for text in texts), "x"]  # spaces behind the last word are none of it
        wanted: Counter[str] = Counter()
        for text in texts:
            wanted.update(
                word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))
            )
        assert count_words(texts, backend) == wanted

    check()


def test_words_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = pre_tokenizing_backend("bpe", False)
    whole = count_words(corpus(), backend)
    monkeypatch.setattr(word_counts, "_MAX_PIECES", 10)
    assert count_words(corpus(), backend) == whole


# ── merges ──


@pytest.mark.parametrize("min_frequency", [1, 2, 7])
def test_bpe_is_the_librarys(min_frequency: int) -> None:
    texts = [*corpus(), "aaaa aaaaa aaa banana bananana"]
    backend = pre_tokenizing_backend("bpe", False)
    special = list(BRACKETS.values())
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=letters,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    theirs = json.loads(backend.to_str())["model"]
    ours = json.loads(train(texts, "bpe", 500, min_frequency=min_frequency).files()["tokenizer.json"])["model"]
    assert ours["merges"] == theirs["merges"]
    assert ours["vocab"] == theirs["vocab"]


def test_wordpiece_by_a_plain_loop() -> None:
    texts, size = corpus(texts=60), 230
    backend = pre_tokenizing_backend("wordpiece", True)
    counts = count_words(texts, backend)
    letters = sorted({c for word in counts for c in word if sum(w.count(c) * n for w, n in counts.items()) >= 2})
    counts = {word: n for word, n in counts.items() if set(word) <= set(letters)}
    inside = sorted({f"##{c}" for word in counts for c in word[1:]})
    tokens = [*BRACKETS.values(), *letters, *inside]
    words = {word: [word[0], *(f"##{c}" for c in word[1:])] for word in counts}
    while len(tokens) < size:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, pieces in words.items():
            for pair in pairwise(pieces):
                pairs[pair] += counts[word]
        left, right = min(pairs, key=lambda pair: (-pairs[pair], tokens.index(pair[0]), tokens.index(pair[1])))
        new = left + right[2:]
        if new not in tokens:
            tokens.append(new)
        for pieces in words.values():
            i = 0
            while i < len(pieces) - 1:
                if (pieces[i], pieces[i + 1]) == (left, right):
                    pieces[i : i + 2] = [new]
                i += 1
    found = train(texts, vocab_size=size)
    assert [found.token(i) for i in range(found.vocab_size)] == tokens


def test_wordpiece_is_nearly_the_librarys() -> None:
    texts = corpus()
    backend = pre_tokenizing_backend("wordpiece", True)
    backend.model = models.WordPiece(unk_token="[UNK]")
    special = list(BRACKETS.values())
    trainer = trainers.WordPieceTrainer(vocab_size=400, min_frequency=2, special_tokens=special, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    ours = train(texts, vocab_size=400)
    both = backend.get_vocab().keys() & {ours.token(i) for i in range(400)}
    assert len(both) >= 380  # its ties are broken by chance


# ── Unigram ──


def spellings(text: str, ids: dict[str, int]) -> list[list[int]]:
    if not text:
        return [[]]
    return [
        [ids[text[:n]], *rest] for n in range(1, len(text) + 1) if text[:n] in ids for rest in spellings(text[n:], ids)
    ]


def test_expectations_by_all_spellings() -> None:
    rng = np.random.default_rng(0)
    ids = {piece: i for i, piece in enumerate(["a", "b", "c", "ab", "ba", "aba", "bc", "abc", "cab", "zz"])}
    chances = rng.random(len(ids))
    strings, counts = ["abcab", "a", "bababa", "ccc", "abc"], np.array([3.0, 1.0, 2.0, 5.0, 0.5])

    def check(
        keep: Any, ids: dict[str, int], chances: Any, forth: Any, back: Any, others: Any, names: list[str]
    ) -> None:
        wanted = np.zeros(len(ids))
        for string, count in zip(strings, counts, strict=True):
            ways = spellings(string, ids)
            weights = np.array([math.prod(chances[way]) for way in ways])
            for way, weight in zip(ways, weights / weights.sum(), strict=True):
                for piece in way:
                    wanted[piece] += count * weight
        np.testing.assert_allclose(unigram_training._expected_counts(forth, back, counts, chances), wanted, rtol=1e-12)
        best = others.reduce_paths(np.log(chances), np.maximum, np.add, 0.0, -np.inf)[others.last]
        for name, value in zip(names, best, strict=True):
            ways = [way for way in spellings(name, ids) if len(way) > 1]
            assert value == pytest.approx(max((sum(np.log(chances[way])) for way in ways), default=-np.inf))

    forth = unigram_training._Lattice.build(strings, ids)
    back, others = forth.reverse(), unigram_training._Lattice.build(list(ids), ids, whole=False)
    check(None, ids, chances, forth, back, others, list(ids))
    keep = np.array([name not in ("ba", "abc") for name in ids])
    fewer = [name for name, kept in zip(ids, keep, strict=True) if kept]
    some = (forth.select(keep), back.select(keep), others.select(keep, strings=keep))
    check(keep, {name: i for i, name in enumerate(fewer)}, chances[keep], *some, fewer)


def test_digamma() -> None:
    assert unigram_training._digamma(np.array([0.5, 1.0, 100.0])) == pytest.approx(
        [-np.euler_gamma - 2 * math.log(2), -np.euler_gamma, sum(1 / n for n in range(1, 100)) - np.euler_gamma]
    )


def test_unigram_is_as_good_as_the_librarys() -> None:
    texts = [re.sub(r"[^\w\s]|\d", "", text) for text in corpus(texts=300)]  # letters only: ours never mix with others
    backend = pre_tokenizing_backend("unigram", False)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=list(BRACKETS.values()), unk_token="[UNK]", show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    theirs = sum(len(one) for one in backend.encode_batch(texts))
    ours = train(texts, "unigram", 300)
    assert ours.vocab_size == 300
    assert sum(len(one) for one in ours.encode_batch(texts, special=False)) < 1.03 * theirs


def test_unigram_pieces_do_not_mix_sorts() -> None:
    texts = ["end. end, don't 2nd (end) e\u0323\u0323nd 12:30 ..."] * 5
    made = train(texts, "unigram", 100)
    pieces = [made.token(i).removeprefix("▁") for i in range(5, made.vocab_size)]
    assert {"end", "don", "12", "..."} <= set(pieces)
    assert all(re.fullmatch(r"[a-z\u0323ẹ]*|[0-9]*|[^a-z0-9]*", piece) for piece in pieces)
    assert made.unk_id not in made.encode(texts[0]).ids


def test_unigram_of_long_words_and_rare_letters() -> None:
    found = train(["a" * 5000, "zyx" * 40, "ab" * 30, "▁", "\0\0 \0"] * 2, "unigram", 40)
    assert found.unk_id not in found.encode("a" * 5000 + " zyx ab", special=False).ids


# ── the same again ──

AGAIN = """
import hashlib, sys
from bertie.text.tokenizer_training import train
from tests.text.test_tokenizer_training import ALL, corpus
texts = corpus()
for kind in ALL:
    print(hashlib.sha256(train(texts, kind, 400).files()["tokenizer.json"]).hexdigest())
"""


def test_the_same_in_every_process_and_order() -> None:
    texts = corpus()
    random.Random(1).shuffle(texts)
    found = [hashlib.sha256(train(texts, kind, 400).files()["tokenizer.json"]).hexdigest() for kind in ALL]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", AGAIN], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == found


# ── the folder ──

TEXTS = ["", "The cation, «Xé» 中文 1999.", "two  spaces\tand a [MASK] here", "<mask> ab <s>", "ﬁ½ \u200b😀", "x" * 120]


@pytest.mark.parametrize("style", ["brackets", "angles"])
@pytest.mark.parametrize("kind", ALL)
def test_folder_reads_the_same_elsewhere(kind: Kind, style: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    made = train(corpus(), kind, 400, style=style, special_tokens=["[SPEAKER]"], max_length=77)
    save(made, tmp_path / "out")
    ours, theirs = Tokenizer.from_folder(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (ours.vocab_size, len(theirs), made.vocab_size) == (400, 400, 400)
    assert (ours.model_max_length, theirs.model_max_length) == (77, 77)
    items: list[Any] = [*corpus(5, 20), *TEXTS, *[(a, b) for a in TEXTS for b in TEXTS[1:]], "a [SPEAKER] b"]
    for item in items:
        one, two = item if isinstance(item, tuple) else (item, None)
        their = theirs(one, two)
        for mine in (made.encode(one, two), ours.encode(one, two)):
            assert mine.ids.tolist() == their["input_ids"]
            if "token_type_ids" in their:
                assert mine.segments.tolist() == their["token_type_ids"]
            else:
                assert not mine.segments.any()
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_token_id")
    names = BRACKETS if style == "brackets" else ANGLES
    assert [ours.token(i) for i in range(6)] == [*names.values(), "[SPEAKER]"]
    assert set(theirs.all_special_tokens) == {*names.values(), "[SPEAKER]"}


def test_templates() -> None:
    def tokens(**options: Any) -> list[str]:
        made = train(["ab cd"] * 3, "bpe", 300, **options)
        return [made.token(i) for i in made.encode("ab", "cd").ids]

    assert tokens() == ["[CLS]", "ab", "[SEP]", "cd", "[SEP]"]
    assert tokens(style="angles") == ["<s>", "ab", "</s>", "</s>", "cd", "</s>"]
    pair = train(["ab cd"] * 3, vocab_size=20).encode("ab", "cd")
    assert pair.segments.tolist() == [0, 0, 0, 1, 1]


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from(STRANGE) | st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bpe_loses_nothing(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text, special=False).ids, skip_special=False) == unicodedata.normalize("NFC", text)


BYTES = train(corpus(texts=20), "bpe", 300)


@pytest.mark.parametrize("kind", ALL)
def test_texts_that_spell_special_tokens(kind: Kind) -> None:
    made = train(["a[CLS]b [MASK][MASK] <tag>", *corpus(texts=50)] * 9, kind, 330, special_tokens=["<tag>"])
    assert made.vocab_size == 330
    assert [made.id(text) for text in [*BRACKETS.values(), "<tag>"]] == list(range(6))
    assert made.encode("[MASK]<tag>", special=False).ids.tolist()[-2:] == [4, 5]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_mask_takes_the_space_before_it(kind: Kind) -> None:
    made = train(["the cat sat"] * 3, kind, 270 if kind == "bpe" else 16)
    ids = made.encode("the [MASK] sat", special=False).ids.tolist()
    at = ids.index(made.mask_id)
    assert made.decode(ids[:at]) == "the"
    assert made.decode(ids[at + 1 :]).strip() == "sat"


def test_case() -> None:
    for kind in ALL:
        upper = [train(["THE Cat", "the cat"] * 3, kind, 290, lowercase=case) for case in (None, False, True)]
        same = [one.encode("The CAT").ids.tolist() == one.encode("the cat").ids.tolist() for one in upper]
        assert same == [kind == "wordpiece", False, True]


@pytest.mark.parametrize("kind", ALL)
def test_rare_things_are_left_out(kind: Kind) -> None:
    made = train(["common common common rare q"], kind, 290, min_frequency=3)
    tokens = {made.token(i) for i in range(made.vocab_size)}
    assert any("common" in token for token in tokens)
    assert not any("rar" in token for token in tokens)
    if kind != "bpe":
        assert "q" not in tokens
        assert made.unk_id in made.encode("q").ids
    small = train(["aaa bb c"] * 3, kind, 290, limit_alphabet=2)
    assert kind == "bpe" or small.unk_id in small.encode("c").ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "word"}, "kind='word' must be one of wordpiece, bpe, unigram"),
        ({"style": "t5"}, "style='t5'"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"min_frequency": 0}, "min_frequency=0"),
        ({"limit_alphabet": 0}, "limit_alphabet=0"),
        ({"special_tokens": ["[CLS]"]}, "special_tokens="),
        ({"special_tokens": ["a", "a"]}, "special_tokens="),
        ({"special_tokens": [""]}, "special_tokens="),
        ({"special_tokens": ["word"]}, "special_tokens=['word'] must not be plain words"),
        ({"vocab_size": 10}, "room for 10 tokens, but there are"),
        ({"kind": "bpe", "vocab_size": 100}, "room for 100 tokens, but there are 261"),
        ({"kind": "unigram", "vocab_size": 10}, "room for 5 tokens, but there are"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(corpus(), **options)
    assert said in str(caught.value)


@pytest.mark.parametrize("texts", [[], [""], [" \n", "\t"]])
def test_nothing_to_learn_from(texts: list[str]) -> None:
    for kind in ALL:
        with pytest.raises(InputError, match="no words"):
            train(texts, kind)


def test_texts_must_be_texts() -> None:
    with pytest.raises(InputError, match="text 2 must be a str"):
        train(["a", 3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="text 1: character 1 is the lone surrogate"):
        train(["a\ud800"])


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = train(["ab ab"], vocab_size=20), train(["cd cd"], vocab_size=20)
    save(made, tmp_path / "a" / "out")
    files = {file.name: file.read_bytes() for file in (tmp_path / "a" / "out").iterdir()}
    assert sorted(files) == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    with pytest.raises(ExistsError, match="exists already"):
        save(other, tmp_path / "a" / "out")
    rename, calls = os.rename, []

    def fails(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no room")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match="no room"):
        save(other, tmp_path / "a" / "out", overwrite=True)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in (tmp_path / "a" / "out").iterdir()} == files
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["out"]
    save(other, tmp_path / "a" / "out", overwrite=True)
    assert Tokenizer.from_folder(tmp_path / "a" / "out").id("cd") is not None
    (tmp_path / "a" / "out" / "model.safetensors").touch()
    with pytest.raises(ExistsError, match=r"other files than a tokenizer's \(model.safetensors\)"):
        check_free(tmp_path / "a" / "out", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ExistsError, match="is a file"):
        check_free(tmp_path / "file", overwrite=True)


# ── extending ──


def test_extend(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    old = train(corpus(), vocab_size=200, special_tokens=["[X]"])
    save(old, tmp_path / "old")
    texts = ["myocardial infarction of the heart"] * 9 + ["a stenosis, Ω"] * 6 + ["seldom"] * 2
    new = extend(tmp_path / "old", texts, 4)
    counts = count_words(texts, pre_tokenizing_backend("wordpiece", True))
    pieces = {word: old.encode(word, special=False).ids.tolist() for word in counts}
    gains = {word: n * max(len(pieces[word]) - 1, pieces[word] == [old.unk_id]) for word, n in counts.items() if n >= 5}
    wanted = sorted((word for word in gains if gains[word]), key=lambda word: (-gains[word], word))[:4]
    assert [new.token(i) for i in range(old.vocab_size, new.vocab_size)] == wanted
    assert [new.token(i) for i in range(old.vocab_size)] == [old.token(i) for i in range(old.vocab_size)]
    for text in corpus(3, 20):
        assert new.encode(text).ids.tolist() == old.encode(text).ids.tolist()
    save(new, tmp_path / "new")
    again, theirs = Tokenizer.from_folder(tmp_path / "new"), AutoTokenizer.from_pretrained(tmp_path / "new")
    for text in texts:
        assert again.encode(text).ids.tolist() == new.encode(text).ids.tolist() == theirs(text)["input_ids"]
    assert new.encode("myocardial", special=False).ids.tolist() == [new.id("myocardial")]
    assert new.model_max_length == old.model_max_length


def test_extend_all_there_is(tmp_path: Path) -> None:
    save(train(["ab cd"] * 3, vocab_size=30), tmp_path / "old")
    assert extend(tmp_path / "old", ["abcd ef ab"], 10, min_frequency=1).vocab_size == 13 + 2


def test_extend_refuses(tmp_path: Path) -> None:
    save(BYTES, tmp_path / "old")
    with pytest.raises(ConfigError, match="holds a BPE vocabulary"):
        extend(tmp_path / "old", ["a"])
    with pytest.raises(ConfigError, match="new_tokens=0"):
        extend(tmp_path / "old", ["a"], 0)
    with pytest.raises(BertieError):
        extend(tmp_path / "nowhere", ["a"])
