"""Training tokenizers: options, reproducibility, saving and extending."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertie.data import draft_folder
from bertie.errors import BertieError, ConfigError, ExistsError, InputError
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
from tests.text.training_texts import ALL, STRANGE, corpus

TRAIN_AGAIN = """
import hashlib, sys
from bertie.text.tokenizer_training import train
from tests.text.training_texts import ALL, corpus
texts = corpus()
for kind in ALL:
    print(hashlib.sha256(train(texts, kind, 400).files()["tokenizer.json"]).hexdigest())
"""


def test_reproducible_across_processes_and_orders() -> None:
    texts = corpus()
    random.Random(1).shuffle(texts)
    hashes = [hashlib.sha256(train(texts, kind, 400).files()["tokenizer.json"]).hexdigest() for kind in ALL]
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run(
        [sys.executable, "-c", TRAIN_AGAIN], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == hashes


TEXTS = ["", "The cation, «Xé» 中文 1999.", "two  spaces\tand a [MASK] here", "<mask> ab <s>", "ﬁ½ \u200b😀", "x" * 120]


@pytest.mark.parametrize("style", ["brackets", "angles"])
@pytest.mark.parametrize("kind", ALL)
def test_saved_folder_equals_transformers(kind: Kind, style: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = train(corpus(), kind, 400, style=style, special_tokens=["[SPEAKER]"], max_length=77)
    save(tokenizer, tmp_path / "out")
    ours, theirs = Tokenizer.from_folder(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (ours.vocab_size, len(theirs), tokenizer.vocab_size) == (400, 400, 400)
    assert (ours.model_max_length, theirs.model_max_length) == (77, 77)
    items: list[Any] = [*corpus(5, 20), *TEXTS, *[(a, b) for a in TEXTS for b in TEXTS[1:]], "a [SPEAKER] b"]
    for item in items:
        first, second = item if isinstance(item, tuple) else (item, None)
        their = theirs(first, second)
        for encoding in (tokenizer.encode(first, second), ours.encode(first, second)):
            assert encoding.ids.tolist() == their["input_ids"]
            if "token_type_ids" in their:
                assert encoding.segments.tolist() == their["token_type_ids"]
            else:
                assert not encoding.segments.any()
    for role in ("cls", "sep", "pad", "mask", "unk"):
        assert getattr(ours, f"{role}_id") == getattr(theirs, f"{role}_token_id")
    names = BRACKETS if style == "brackets" else ANGLES
    assert [ours.token(i) for i in range(6)] == [*names.values(), "[SPEAKER]"]
    assert set(theirs.all_special_tokens) == {*names.values(), "[SPEAKER]"}


def test_templates() -> None:
    def tokens(**options: Any) -> list[str]:
        tokenizer = train(["ab cd"] * 3, "bpe", 300, **options)
        return [tokenizer.token(i) for i in tokenizer.encode("ab", "cd").ids]

    assert tokens() == ["[CLS]", "ab", "[SEP]", "cd", "[SEP]"]
    assert tokens(style="angles") == ["<s>", "ab", "</s>", "</s>", "cd", "</s>"]
    pair = train(["ab cd"] * 3, vocab_size=20).encode("ab", "cd")
    assert pair.segments.tolist() == [0, 0, 0, 1, 1]


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from(STRANGE) | st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bpe_is_lossless(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text, special=False).ids, skip_special=False) == unicodedata.normalize("NFC", text)


BYTES = train(corpus(texts=20), "bpe", 300)


@pytest.mark.parametrize("kind", ALL)
def test_texts_that_spell_special_tokens(kind: Kind) -> None:
    tokenizer = train(["a[CLS]b [MASK][MASK] <tag>", *corpus(texts=50)] * 9, kind, 330, special_tokens=["<tag>"])
    assert tokenizer.vocab_size == 330
    assert [tokenizer.id(text) for text in [*BRACKETS.values(), "<tag>"]] == list(range(6))
    assert tokenizer.encode("[MASK]<tag>", special=False).ids.tolist()[-2:] == [4, 5]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_mask_includes_the_space_before_it(kind: Kind) -> None:
    tokenizer = train(["the cat sat"] * 3, kind, 270 if kind == "bpe" else 16)
    ids = tokenizer.encode("the [MASK] sat", special=False).ids.tolist()
    at = ids.index(tokenizer.mask_id)
    assert tokenizer.decode(ids[:at]) == "the"
    assert tokenizer.decode(ids[at + 1 :]).strip() == "sat"


def test_case() -> None:
    for kind in ALL:
        upper = [train(["THE Cat", "the cat"] * 3, kind, 290, lowercase=case) for case in (None, False, True)]
        same = [one.encode("The CAT").ids.tolist() == one.encode("the cat").ids.tolist() for one in upper]
        assert same == [kind == "wordpiece", False, True]


@pytest.mark.parametrize("kind", ALL)
def test_rare_tokens_are_not_learned(kind: Kind) -> None:
    tokenizer = train(["common common common rare q"], kind, 290, min_frequency=3)
    tokens = {tokenizer.token(i) for i in range(tokenizer.vocab_size)}
    assert any("common" in token for token in tokens)
    assert not any("rar" in token for token in tokens)
    if kind != "bpe":
        assert "q" not in tokens
        assert tokenizer.unk_id in tokenizer.encode("q").ids
    small = train(["aaa bb c"] * 3, kind, 290, limit_alphabet=2)
    assert kind == "bpe" or small.unk_id in small.encode("c").ids


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train(corpus(), **options)
    assert message in str(caught.value)


@pytest.mark.parametrize("texts", [[], [""], [" \n", "\t"]])
def test_no_words_to_train_on(texts: list[str]) -> None:
    for kind in ALL:
        with pytest.raises(InputError, match="no words"):
            train(texts, kind)


def test_texts_must_be_texts() -> None:
    with pytest.raises(InputError, match="text 2 must be a str"):
        train(["a", 3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="text 1: character 1 is the lone surrogate"):
        train(["a\ud800"])


def test_saving_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, other = train(["ab ab"], vocab_size=20), train(["cd cd"], vocab_size=20)
    save(tokenizer, tmp_path / "a" / "out")
    files = {file.name: file.read_bytes() for file in (tmp_path / "a" / "out").iterdir()}
    assert sorted(files) == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    with pytest.raises(ExistsError, match="already exists"):
        save(other, tmp_path / "a" / "out")
    rename, calls = os.rename, []

    def fails(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no room")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    monkeypatch.setattr(draft_folder, "_exchange", lambda *folders: False)  # a system that cannot
    with pytest.raises(OSError, match="no room"):
        save(other, tmp_path / "a" / "out", overwrite=True)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in (tmp_path / "a" / "out").iterdir()} == files
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["out"]
    save(other, tmp_path / "a" / "out", overwrite=True)
    assert Tokenizer.from_folder(tmp_path / "a" / "out").id("cd") is not None
    (tmp_path / "a" / "out" / "model.safetensors").touch()
    with pytest.raises(ExistsError, match=r"files that do not belong to a tokenizer \(model.safetensors\)"):
        check_free(tmp_path / "a" / "out", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ExistsError, match="is a file"):
        check_free(tmp_path / "file", overwrite=True)


def test_extend(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    old = train(corpus(), vocab_size=200, special_tokens=["[X]"])
    save(old, tmp_path / "old")
    texts = ["myocardial infarction of the heart"] * 9 + ["a stenosis, Ω"] * 6 + ["seldom"] * 2
    new = extend(tmp_path / "old", texts, 4)
    counts = count_words(texts, pre_tokenizing_backend("wordpiece", True))
    pieces = {word: old.encode(word, special=False).ids.tolist() for word in counts}
    gains = {word: n * max(len(pieces[word]) - 1, pieces[word] == [old.unk_id]) for word, n in counts.items() if n >= 5}
    expected = sorted((word for word in gains if gains[word]), key=lambda word: (-gains[word], word))[:4]
    assert [new.token(i) for i in range(old.vocab_size, new.vocab_size)] == expected
    assert [new.token(i) for i in range(old.vocab_size)] == [old.token(i) for i in range(old.vocab_size)]
    for text in corpus(3, 20):
        assert new.encode(text).ids.tolist() == old.encode(text).ids.tolist()
    save(new, tmp_path / "new")
    again, theirs = Tokenizer.from_folder(tmp_path / "new"), AutoTokenizer.from_pretrained(tmp_path / "new")
    for text in texts:
        assert again.encode(text).ids.tolist() == new.encode(text).ids.tolist() == theirs(text)["input_ids"]
    assert new.encode("myocardial", special=False).ids.tolist() == [new.id("myocardial")]
    assert new.model_max_length == old.model_max_length


def test_extend_by_fewer_words_than_allowed(tmp_path: Path) -> None:
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
