"""The Tokenizer: what it is fed, what it gives, what it saves."""

import json
import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as RustTokenizer

from bertie.errors import CheckpointError, ConfigError, InputError
from bertie.text.encoding import Encoding
from bertie.text.tokenizer import MANY_IDS, Tokenizer
from bertie.text.windows import take, truncate
from tests.text.recipes import RECIPES
from tests.text.test_legacy import BERT_IDS, PAIR, TEXTS, bpe_folder, train, wordpiece_folder  # noqa: F401


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return wordpiece_folder(tmp_path / "model")


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, RECIPES["bert"])


def test_encoding(tokenizer: Tokenizer) -> None:
    text = "Héllo 今天, the cat"
    e = tokenizer.encode(text)
    assert [a.dtype for a in (e.ids, e.segments, e.offsets, e.word_ids, e.sequence_ids)] == [np.int64] * 5
    assert e.special.dtype == np.bool_
    assert (len(e), e.offsets.shape) == (len(e.ids), (len(e.ids), 2))
    assert [text[a:b] for a, b in e.offsets] == ["", "Héllo", "今", "天", ",", "the", "cat", ""]
    assert e.word_ids.tolist() == [-1, 0, 1, 2, 3, 4, 5, -1]
    assert e.special.tolist() == [True, *[False] * 6, True]
    with pytest.raises(AttributeError):
        e.ids = e.ids


def test_pairs(tokenizer: Tokenizer) -> None:
    e = tokenizer.encode("the cat", "on mat")
    assert e.segments.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert e.sequence_ids.tolist() == [-1, 0, 0, -1, 1, 1, -1]
    assert e.offsets[e.sequence_ids == 1].max() == len("on mat")
    bare = tokenizer.encode("the cat", "on mat", special=False)
    assert not bare.special.any()
    assert bare.ids.tolist() == e.ids[~e.special].tolist()
    assert tokenizer.encode("a", "").ids.tolist() != tokenizer.encode("a").ids.tolist()


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_flat(tmp_path: Path, name: str) -> None:
    """Ids equal those of single texts, also for literal special tokens; the number of special tokens."""
    make = wordpiece_folder if name == "bert" else bpe_folder
    specials = {"bert": "[PAD] [UNK] [CLS] [SEP] [MASK]", "roberta": "<s> <pad> </s> <unk> <mask>"}[name]
    tokenizer = Tokenizer.from_folder(make(tmp_path, tuple(specials.split())), RECIPES[name])
    texts = [*TEXTS, "", "a [MASK] [SEP] b", "<mask> </s> x"]
    flat, expected = tokenizer.encode_flat(texts), tokenizer.encode_batch(texts)
    assert flat.lengths.tolist() == [len(one) for one in expected]
    assert flat.ids.tolist() == [i for one in expected for i in one.ids]
    assert flat.segments.tolist() == [i for one in expected for i in one.segments]
    assert {int(one.special.sum()) for one in expected} == {tokenizer.special_count}
    masks = [one._raw.special_tokens_mask for one in expected]  # type: ignore[attr-defined]
    assert [one.special.tolist() for one in flat] == [one.special.tolist() for one in expected] == masks
    for one in [*expected, tokenizer.encode("a b", "[SEP] c"), tokenizer.encode("a b", special=False)]:
        assert one.text_tokens == take(one, np.arange(len(one))).text_tokens == (one.sequence_ids >= 0).sum()
    assert len(tokenizer.encode_flat([]).ids) == 0
    with pytest.raises(InputError, match="item 1: character 0 is the lone surrogate"):
        tokenizer.encode_flat(["a", "\ud800"])


def test_truncating_a_long_text_does_not_encode_it_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of megabytes of text take seconds and gigabytes, and a truncated text needs none."""
    text = "the cat on the mat " * 500
    (encoding,) = tokenizer.encode_flat([text])
    monkeypatch.setattr(tokenizer, "_backend", None)
    (window,) = truncate(encoding, (text,), 8)
    assert (len(window), window.tokens_read) == (8, 6)


def test_many_ids_are_decoded_like_few(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat on the mat , hello").ids.tolist() * 300
    assert len(ids) > MANY_IDS
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_literal_special_tokens_are_tokens_but_not_the_templates(tokenizer: Tokenizer) -> None:
    e = tokenizer.encode("a [MASK] b")
    assert e.ids.tolist()[2] == tokenizer.mask_id
    assert not e.special[2]


def test_a_batch_equals_single_texts(tokenizer: Tokenizer) -> None:
    items: list[str | tuple[str, str]] = [*TEXTS, PAIR]
    for item, e in zip(items, tokenizer.encode_batch(items), strict=True):
        one = tokenizer.encode(*((item,) if isinstance(item, str) else item))
        assert all(np.array_equal(getattr(e, f), getattr(one, f)) for f in Encoding.__dataclass_fields__)
    assert tokenizer.encode_batch([]) == []


def test_fields_equal_the_tokenizers_library(tokenizer: Tokenizer) -> None:
    items: list[str | tuple[str, str]] = [*TEXTS, PAIR, "", ("", "")]
    raw = RustTokenizer.from_str(tokenizer.files()["tokenizer.json"].decode()).encode_batch(items)
    for e, one, item in zip(tokenizer.encode_batch(items), raw, items, strict=True):
        nowhere = [None if s else 0 for s in one.special_tokens_mask]
        expected = {
            "ids": one.ids,
            "segments": one.type_ids,
            "offsets": [list(pair) for pair in one.offsets],
            "word_ids": [-1 if w is None else w for w in one.word_ids],
            "special": [bool(s) for s in one.special_tokens_mask],
            "sequence_ids": [
                -1 if s is None else s for s in (one.sequence_ids if isinstance(item, tuple) else nowhere)
            ],
        }
        kept = deepcopy(pickle.loads(pickle.dumps(e)))
        whole = take(e, np.arange(len(e)))
        for name, values in expected.items():
            for encoding in (e, kept, whole, replace(e)):
                assert getattr(encoding, name).tolist() == values, name
        assert e.offsets is e.offsets
        with pytest.raises(AttributeError, match="no 'tokens'"):
            e.tokens  # type: ignore[attr-defined]  # noqa: B018


def test_encodings_of_a_batch_share_no_token(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode_batch(["the cat", "the cat"])
    first.ids[:] = 0
    first.segments[:] = 7
    assert second.ids.tolist() == tokenizer.encode("the cat").ids.tolist()
    assert not second.segments.any()


@pytest.mark.parametrize("bad", [None, 5, b"bytes", ["a"], ("a", "b", "c"), ("a", None), np.str_])
def test_not_a_text(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(InputError, match="item 1"):
        tokenizer.encode_batch(["fine", bad])  # type: ignore[list-item]


def test_lone_surrogates(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"character 3 is the lone surrogate U\+D83D.*replace"):
        tokenizer.encode("abc\ud83d")
    with pytest.raises(InputError, match="item 0, second text: character 0"):
        tokenizer.encode("fine", "\udc80")
    with pytest.raises(InputError, match="list of texts"):
        tokenizer.encode_batch("a text")


def test_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat sat").ids
    assert tokenizer.decode(ids) == "the cat sat"
    assert tokenizer.decode(ids, skip_special=False) == "[CLS] the cat sat [SEP]"
    assert tokenizer.decode([]) == ""
    for bad in ([-1], [1 << 40], [0.5], [[1]]):
        with pytest.raises(InputError):
            tokenizer.decode(bad)  # type: ignore[arg-type]


def test_properties(tokenizer: Tokenizer) -> None:
    ids = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert ids == (0, 1, 2, 3, 4)
    assert (tokenizer.mask_token, tokenizer.token(4), tokenizer.id("[MASK]")) == ("[MASK]", "[MASK]", 4)
    assert tokenizer.id("no such token") is None
    with pytest.raises(InputError, match="not in the vocabulary"):
        tokenizer.token(10**6)


@pytest.mark.parametrize(("value", "length"), [("512", 512), ("1e30", None), ("null", None), (str(10**30), None)])
def test_max_length(folder: Path, value: str, length: int | None) -> None:
    (folder / "tokenizer_config.json").write_text(f'{{"model_max_length": {value}}}')
    assert Tokenizer.from_folder(folder, RECIPES["bert"]).model_max_length == length


@pytest.mark.parametrize(
    "config",
    [
        '{"model_max_length": "long"}',
        '{"model_max_length": NaN}',
        '{"do_lower_case": "yes"}',
        '{"model_input_names": 5}',
        '{"added_tokens_decoder": []}',
        '{"added_tokens_decoder": {"x": "y"}}',
        '{"added_tokens_decoder": {"1": 5}}',
        '{"additional_special_tokens": 5}',
        '{"mask_token": {"content": 5}}',
        '{"mask_token": {"content": "\\ud800"}}',
        '{"mask_token": {"content": "x", "lstrip": "y"}}',
        "[]",
        "{",
    ],
)
def test_broken_config(folder: Path, config: str) -> None:
    (folder / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(folder, RECIPES["bert"])


def test_stored_padding_and_truncation_are_disabled(folder: Path, tokenizer: Tokenizer) -> None:
    backend = RustTokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8, pad_id=0, pad_token="[PAD]")
    backend.save(str(folder / "tokenizer.json"))
    loaded = Tokenizer.from_folder(folder)
    assert loaded.encode(TEXTS[0]).ids.tolist() == tokenizer.encode(TEXTS[0]).ids.tolist()
    assert len(loaded.encode("the")) == 3
    assert loaded.pad_id == 0


def test_contradicting_files(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(folder)
    for key in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        (folder / "tokenizer_config.json").write_text(json.dumps({key: False}))
        with pytest.raises(ConfigError, match=f"{key}=False.*{key}=True"):
            Tokenizer.from_folder(folder, RECIPES["bert"])
        (folder / "tokenizer_config.json").write_text(
            json.dumps({key: False, "tokenizer_class": "PreTrainedTokenizerFast"})
        )
        Tokenizer.from_folder(folder, RECIPES["bert"])  # this class reads no such option


def test_template_with_an_unknown_id(folder: Path, tokenizer: Tokenizer) -> None:
    raw = json.loads(tokenizer.files()["tokenizer.json"])
    raw["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [10**6]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="id=1000000"):
        Tokenizer.from_folder(folder)


def test_tokenizer_that_fails_on_a_sound_text() -> None:
    backend = RustTokenizer(models.WordPiece({"a": 0}, unk_token="[UNK]"))  # has no [UNK] to fall back on
    with pytest.raises(CheckpointError, match="broken"):
        Tokenizer(backend).encode("b")


def test_tokens_that_only_the_config_declares(folder: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<ent>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").unlink()
    loaded = Tokenizer.from_folder(folder, RECIPES["bert"])
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.encode("a <ent> b").ids.tolist() == theirs("a <ent> b")["input_ids"]
    assert loaded.id("<ent>") == tokenizer.vocab_size


# ── saving ──


def same_in_transformers(saved: Path, loaded: Tokenizer, model_type: str) -> None:
    (saved / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    again = Tokenizer.from_folder(saved, RECIPES[model_type])
    for items in (TEXTS, [PAIR]):
        want = theirs(items)
        for i, (a, b) in enumerate(zip(loaded.encode_batch(items), again.encode_batch(items), strict=True)):
            assert a.ids.tolist() == b.ids.tolist() == want["input_ids"][i], items[i]
            assert a.segments.tolist() == b.segments.tolist()
            if "token_type_ids" in want:
                assert a.segments.tolist() == want["token_type_ids"][i]
            else:
                assert not a.segments.any()
    assert (again.mask_id, again.cls_id, again.unk_id) == (loaded.mask_id, loaded.cls_id, loaded.unk_id)
    assert theirs.mask_token_id == loaded.mask_id


@pytest.mark.parametrize("config", [None, {}, {"do_lower_case": False}, {"strip_accents": False}])
def test_saved_wordpiece(folder: Path, tmp_path: Path, config: dict | None) -> None:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.from_folder(folder, RECIPES["bert"])
    loaded.save(tmp_path / "saved")
    if config is not None:  # kept, byte for byte
        assert (tmp_path / "saved/tokenizer_config.json").read_text() == json.dumps(config)
    same_in_transformers(tmp_path / "saved", loaded, "bert")


def test_saved_without_a_case_option(folder: Path, tmp_path: Path) -> None:
    """transformers lower-cases by default: the saved folder must have the option."""
    backend = RustTokenizer.from_str(Tokenizer.from_folder(folder, RECIPES["bert"]).files()["tokenizer.json"].decode())
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    loaded = Tokenizer.from_folder(folder, RECIPES["bert"])
    loaded.save(tmp_path / "saved")
    same_in_transformers(tmp_path / "saved", loaded, "bert")


@pytest.mark.parametrize("key", ["roberta", "deberta"])
def test_saved_byte_bpe(tmp_path: Path, key: str) -> None:
    recipe = RECIPES[key]
    bpe_folder(tmp_path, (recipe.cls, recipe.sep, recipe.unk, recipe.pad or "", recipe.mask or ""))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    loaded = Tokenizer.from_folder(tmp_path, recipe)
    loaded.save(tmp_path / "saved")
    same_in_transformers(tmp_path / "saved", loaded, key)


@pytest.mark.parametrize("key", ["xlm-roberta", "camembert", "albert", "big_bird", "deberta-v2"])
def test_saved_sentencepiece(tmp_path: Path, train, key: str) -> None:  # noqa: F811
    recipe = RECIPES[key]
    options = {} if recipe.leading_pieces else BERT_IDS | {"unk_piece": recipe.unk, "pad_piece": recipe.pad}
    if recipe.appended:
        options |= {"control_symbols": "[CLS],[SEP]"}
    (tmp_path / recipe.files[0]).write_bytes(train(key, **options))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    loaded = Tokenizer.from_folder(tmp_path, recipe)
    loaded.save(tmp_path / "saved")
    same_in_transformers(tmp_path / "saved", loaded, key)


def test_flags_survive(folder: Path, tmp_path: Path) -> None:
    mask = {"content": "[MASK]", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"mask_token": mask}))
    loaded = Tokenizer.from_folder(folder, RECIPES["bert"])
    assert loaded.encode("a [MASK]").offsets[2].tolist() == [1, 8]
    loaded.save(tmp_path / "saved")
    token = RustTokenizer.from_file(str(tmp_path / "saved/tokenizer.json")).get_added_tokens_decoder()[4]
    assert token == AddedToken("[MASK]", lstrip=True, normalized=False, special=True)
    assert token.lstrip


def test_pickle(tokenizer: Tokenizer) -> None:
    """Data workers and servers send tokenizers to other processes."""
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(TEXTS[0]).ids.tolist() == tokenizer.encode(TEXTS[0]).ids.tolist()
