"""Old vocabulary files, against transformers' classes and against SentencePiece itself."""

import json
import random
import types
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import transformers
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import AddedToken, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers.convert_slow_tokenizer import DebertaConverter, DebertaV2Converter

from bertie.checkpoints.model_spec import legacy_tokenizer
from bertie.errors import BertieError, CheckpointError, ConfigError
from bertie.text.sentencepiece import read_sentencepiece
from bertie.text.tokenizer import Tokenizer
from tests.text.recipes import RECIPES

CORPUS = [
    "The quick brown fox jumps over the lazy dog in 1999, and again in 2001, they say.",
    "Héllo wörld, ça va? Größe und Straße: naïve café.",
    "Привет мир! Это простой текст, написанный по-русски.",
    "今天天气很好,我们去公园散步。",
    "She sells sea shells (on the sea shore) - the shells she sells are sea shells.",
    "the cat sat on the mat with the other cat and that was that",
] * 4
TEXTS = [
    *CORPUS[:6],
    "",
    " ",
    "  two  spaces\tand\na tab ",
    "full width ＡＢＣ ﬁ Ⅻ",
    "combining e\u0301 \u00a0 nbsp \u200d zwj 👩‍👩‍👧 emoji",
    "control \x00 \x07 \x1f chars",
    "``quoted'' text, 12,5 and 1999, U.S. (x)",
    "[MASK] a [SEP]b <mask> x<s>y </s> <unk> [UNK] <pad>",
    "unseen ظاهرة ไทย",
]
PAIR = ("the cat sat", "on the mat, 1999,")


def ours(folder: Path, key: str) -> Tokenizer:
    return Tokenizer.from_folder(folder, RECIPES[key])


def check(tokenizer: Tokenizer, theirs: transformers.PreTrainedTokenizerBase) -> None:
    """The same ids, offsets and template tokens, for texts and pairs."""
    flags = {"return_offsets_mapping": True, "return_special_tokens_mask": True, "return_token_type_ids": True}
    pairs = [PAIR, ("", "b"), ("a", "")]  # as a batch: transformers takes a lone empty second text for none at all
    for items in (TEXTS, pairs):
        want = theirs(items, **flags)
        for i, (item, got) in enumerate(zip(items, tokenizer.encode_batch(items), strict=True)):
            assert got.ids.tolist() == want["input_ids"][i], item
            assert [tuple(o) for o in got.offsets.tolist()] == [tuple(o) for o in want["offset_mapping"][i]], item
            assert got.special.astype(int).tolist() == want["special_tokens_mask"][i], item
            assert got.segments.tolist() == want["token_type_ids"][i], item


# ── WordPiece ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def wordpiece_folder(folder: Path, specials: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")) -> Path:
    words = sorted({w for line in CORPUS for w in line.split()} | set("abcdefghijklmnopqrstuvwxyzé,.()<>[]/今天中国"))
    tokens = [*specials, *words, *[f"##{w}" for w in "abcdefghijklmnopqrstuvwxyz0123456789"], "hello", "1999"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False, "strip_accents": None},
        {"added_tokens_decoder": {"0": {"content": "[PAD]", "special": True, "normalized": False}}},
    ],
)
def test_wordpiece(tmp_path: Path, options: dict) -> None:
    folder = wordpiece_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    check(ours(folder, "bert"), transformers.BertTokenizer.from_pretrained(folder))


def test_wordpiece_with_windows_line_ends(tmp_path: Path) -> None:
    unix, windows = wordpiece_folder(tmp_path / "a"), tmp_path / "b"
    windows.mkdir()
    (windows / "vocab.txt").write_bytes((unix / "vocab.txt").read_bytes().replace(b"\n", b"\r\n"))
    assert ours(windows, "bert").encode(TEXTS[0]).ids.tolist() == ours(unix, "bert").encode(TEXTS[0]).ids.tolist()


def test_segments_reach_only_models_that_have_them(tmp_path: Path) -> None:
    folder = wordpiece_folder(tmp_path)
    assert ours(folder, "bert").encode(*PAIR).segments.max() == 1
    assert ours(folder, "distilbert").encode(*PAIR).segments.max() == 0
    (folder / "tokenizer_config.json").write_text('{"model_input_names": ["input_ids", "attention_mask"]}')
    assert ours(folder, "bert").encode(*PAIR).segments.max() == 0


def test_wordpiece_with_other_template(tmp_path: Path) -> None:
    folder = wordpiece_folder(tmp_path, ("<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"))
    theirs = transformers.MPNetTokenizer.from_pretrained(folder, additional_special_tokens=["<unk>"])
    check(ours(folder, "mpnet"), theirs)


def test_added_tokens(tmp_path: Path) -> None:
    folder = wordpiece_folder(tmp_path)
    size = len((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    (folder / "added_tokens.json").write_text(json.dumps({"Zürich": size, "<ent>": size + 1}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<ent>"]}))
    tokenizer = ours(folder, "bert")
    assert (tokenizer.id("Zürich"), tokenizer.id("<ent>"), tokenizer.vocab_size) == (size, size + 1, size + 2)
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    for text in ("a <ent> in Zürich zürich", "Zürich<ent>"):
        assert tokenizer.encode(text).ids.tolist() == theirs(text)["input_ids"]
    assert "<ent>" not in tokenizer.decode(tokenizer.encode("a <ent> b").ids)


def test_added_token_with_a_wrong_id(tmp_path: Path) -> None:
    folder = wordpiece_folder(tmp_path)
    (folder / "added_tokens.json").write_text('{"<ent>": 99999}')
    with pytest.raises(CheckpointError, match="should have the id 99999"):
        ours(folder, "bert")


# ── byte-level BPE ────────────────────────────────────────────────────────────────────────────────────────────────────


def bpe_folder(folder: Path, specials: tuple[str, ...]) -> Path:
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=list(specials), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.model.save(str(folder))
    return folder


@pytest.mark.parametrize("prefix", [False, True])
def test_byte_bpe(tmp_path: Path, prefix: bool) -> None:
    folder = bpe_folder(tmp_path, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": prefix, "mask_token": "<mask>"}))
    # transformers 5 forgot that this mask takes the space before it, as transformers 4 and the published files have it.
    mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    check(ours(folder, "roberta"), transformers.RobertaTokenizer.from_pretrained(folder, mask_token=mask))


def test_byte_bpe_with_segments(tmp_path: Path) -> None:
    folder = bpe_folder(tmp_path, ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"))
    tokenizer = ours(folder, "deberta")
    # transformers 5 has two separators between a pair here; its converter, and the paper, have one.
    stand_in = types.SimpleNamespace(
        encoder=json.loads((folder / "vocab.json").read_text()),
        bpe_ranks={
            tuple(line.split(" ")): i
            for i, line in enumerate((folder / "merges.txt").read_text().splitlines())
            if not line.startswith("#version")
        },
        add_prefix_space=False,
        convert_tokens_to_ids=tokenizer.id,
    )
    backend = DebertaConverter(stand_in).converted()
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]", AddedToken("[MASK]", lstrip=True, special=True)])
    check(tokenizer, transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    assert tokenizer.encode(*PAIR).segments.max() == 1


# ── SentencePiece ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory):
    def run(name: str, **options: object) -> bytes:
        prefix = tmp_path_factory.mktemp("spm") / name
        settings: dict = {"vocab_size": 200, "hard_vocab_limit": False, "minloglevel": 2, "character_coverage": 1.0}
        settings |= {"num_threads": 1, "model_type": "unigram"} | options
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS), model_prefix=str(prefix), **settings)
        return Path(f"{prefix}.model").read_bytes()

    return run


BERT_IDS = {
    "pad_id": 0, "unk_id": 1, "bos_id": -1, "eos_id": -1, "unk_piece": "<unk>", "pad_piece": "<pad>",
    "control_symbols": "[CLS],[SEP],[MASK]",
}  # fmt: skip


def spm_ids(raw: bytes, text: str) -> list[int]:
    return sentencepiece.SentencePieceProcessor(model_proto=raw).encode(text)


def test_proto_reader(tmp_path: Path, train) -> None:
    for kind in ("unigram", "bpe"):
        path = tmp_path / "spiece.model"
        path.write_bytes(train(kind, model_type=kind, user_defined_symbols="<x>"))
        want = proto.ModelProto()  # type: ignore[attr-defined]
        want.ParseFromString(path.read_bytes())
        got = read_sentencepiece(path)
        assert got.kind == kind
        assert got.pieces == [(p.piece, p.score, p.type) for p in want.pieces]
        assert got.precompiled_charsmap == want.normalizer_spec.precompiled_charsmap
        assert (got.unk_id, got.byte_fallback, got.add_dummy_prefix, got.remove_extra_whitespaces) == (
            0,
            False,
            True,
            True,
        )


@pytest.mark.parametrize(("key", "name"), [("xlm-roberta", "XLMRobertaTokenizer"), ("camembert", "CamembertTokenizer")])
def test_fairseq_layout(tmp_path: Path, train, key: str, name: str) -> None:
    (tmp_path / "sentencepiece.bpe.model").write_bytes(train("fairseq"))
    mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
    theirs = getattr(transformers, name).from_pretrained(tmp_path, mask_token=mask)
    check(ours(tmp_path, key), theirs)


def plain(text: str) -> bool:
    """A text without literal special tokens, which SentencePiece itself knows nothing about."""
    return not any(mark in text for mark in ("[MASK]", "<unk>"))


def test_rules_of_albert(tmp_path: Path, train) -> None:
    raw = train("albert", **BERT_IDS, user_defined_symbols="(,),-,.", normalization_rule_name="nmt_nfkc_cf")
    (tmp_path / "spiece.model").write_bytes(raw)
    tokenizer = ours(tmp_path, "albert")
    tokens = [tokenizer.token(i) for i in tokenizer.encode("in 1999, we saw 12,5").ids]
    assert not any(len(t) > 1 and t[-1] == "," and t[-2].isdigit() for t in tokens)
    (tmp_path / "tokenizer_config.json").write_text('{"keep_accents": true, "do_lower_case": true}')
    loose = Tokenizer.from_folder(tmp_path, replace(RECIPES["albert"], split_digit_comma=False, replace_quotes=False))
    for text in filter(plain, TEXTS):  # the model's own rules fold case, so the two can be compared
        assert loose.encode(text, special=False).ids.tolist() == spm_ids(raw, text), text


def test_rules_of_deberta(tmp_path: Path, train) -> None:
    raw = train(
        "deberta", pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="[PAD]", bos_piece="[CLS]", eos_piece="[SEP]",
        unk_piece="[UNK]",
    )  # fmt: skip
    (tmp_path / "spm.model").write_bytes(raw)
    tokenizer = ours(tmp_path, "deberta-v2")
    assert tokenizer.mask_id == tokenizer.vocab_size - 1 == len(read_sentencepiece(tmp_path / "spm.model").pieces)
    # transformers 5's class leaves the model's normalization out; its converter keeps it.
    stand_in = types.SimpleNamespace(
        vocab_file=str(tmp_path / "spm.model"),
        do_lower_case=False,
        split_by_punct=False,
        convert_tokens_to_ids=tokenizer.id,
    )
    backend = DebertaV2Converter(stand_in).converted()
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"])
    check(tokenizer, transformers.PreTrainedTokenizerFast(tokenizer_object=backend))
    for text in filter(plain, TEXTS):
        if "\x00" not in text:
            assert tokenizer.encode(text, special=False).ids.tolist() == spm_ids(raw, text), text


def test_rules_of_big_bird(tmp_path: Path, train) -> None:
    raw = train("bird", **BERT_IDS)
    (tmp_path / "spiece.model").write_bytes(raw)
    tokenizer = ours(tmp_path, "big_bird")
    for text in filter(plain, TEXTS):
        # A text of nothing but spaces, and leading ones, keep one visible space: as in transformers' converter.
        if text == text.lstrip() and text and "\x00" not in text:
            assert tokenizer.encode(text, special=False).ids.tolist() == spm_ids(raw, text), text


def test_sentencepiece_bpe(tmp_path: Path, train) -> None:
    raw = train("bpe", model_type="bpe", **BERT_IDS)
    (tmp_path / "spiece.model").write_bytes(raw)
    recipe = replace(RECIPES["albert"], lowercase=False, strip_accents=False, replace_quotes=False)
    tokenizer = Tokenizer.from_folder(tmp_path, recipe)
    for text in filter(plain, TEXTS):
        assert tokenizer.encode(text, special=False).ids.tolist() == spm_ids(raw, text), text


def test_symbol_that_normalization_would_change(tmp_path: Path, train) -> None:
    (tmp_path / "spiece.model").write_bytes(train("symbols", **BERT_IDS, user_defined_symbols="<SYM>"))
    tokenizer = ours(tmp_path, "albert")
    assert tokenizer.id("<SYM>") in tokenizer.encode("a<SYM>b").ids


@pytest.mark.parametrize(
    ("options", "message"),
    [({"byte_fallback": True}, "byte fallback"), ({"model_type": "char"}, "model_type=4")],
)
def test_unsupported_models_are_refused(tmp_path: Path, train, options: dict, message: str) -> None:
    (tmp_path / "spiece.model").write_bytes(train("refused", **BERT_IDS, **options, vocab_size=400))
    with pytest.raises(ConfigError, match=message):
        ours(tmp_path, "albert")


# ── broken and hostile files ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a piece of 2**64 bytes
        b"\xff" * 40,  # a number without an end
        b"\x0a\x0a\x08\xff\xff\xff\xff\xff\xff\xff\xff\x7f",  # a piece whose text is a number: bytes(n) would take it
        b"\x0a\x00" * 3,  # pieces without text
        b"\x0a\x03\x0a\x01\xff",  # not UTF-8
        b"\x0a\x08\x0a\x01a\x15\x00\x00\xc0\x7f",  # a score that is not a number
        b"\x0b\x0b\x0b",  # groups
        b"\x08\x01",  # a number where a piece belongs
    ],
)
def test_hostile_models(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(raw)
    with pytest.raises(CheckpointError):
        ours(tmp_path, "albert")


def broken(raw: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    if seed % 3 == 0:
        return raw[: rng.randrange(len(raw))]
    flipped = bytearray(raw)
    for _ in range(rng.randrange(1, 20)):
        flipped[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(flipped)


def survives(folder: Path, key: str) -> None:
    """A broken folder loads and works, or fails with an error of ours."""
    try:
        tokenizer = ours(folder, key)
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text).ids)
        tokenizer.files()
    except BertieError:
        pass


@pytest.mark.parametrize("file", ["vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.json"])
def test_broken_files(tmp_path: Path, train, file: str) -> None:
    key = {"vocab.txt": "bert", "spiece.model": "albert", "tokenizer.json": "bert"}.get(file, "roberta")
    if key == "roberta":
        bpe_folder(tmp_path, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    elif file == "spiece.model":
        (tmp_path / file).write_bytes(train("broken", **BERT_IDS))
    else:
        wordpiece_folder(tmp_path)
        if file == "tokenizer.json":
            ours(tmp_path, "bert").save(tmp_path)
    raw = (tmp_path / file).read_bytes()
    for seed in range(60):
        (tmp_path / file).write_bytes(broken(raw, seed))
        survives(tmp_path, key)
    for junk in (b"", b"\xff\xfe", b"[]", b"null", b'{"a": []}', b"[" * 100_000, b'{"\\ud800": 1}'):
        (tmp_path / file).write_bytes(junk)
        with pytest.raises(BertieError):
            ours(tmp_path, key)


def test_truncated_merges(tmp_path: Path) -> None:
    bpe_folder(tmp_path, ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    lines = (tmp_path / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "merges.txt").write_text("".join(lines[: len(lines) // 4]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="it is truncated"):
        ours(tmp_path, "roberta")


def test_missing_files(tmp_path: Path) -> None:
    for key, recipe in RECIPES.items():
        with pytest.raises(CheckpointError, match=recipe.files[0].replace(".", r"\.")):
            ours(tmp_path, key)
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json, and Bertie cannot read the vocabulary files"):
        Tokenizer.from_folder(tmp_path)


def test_recipes() -> None:
    assert legacy_tokenizer("bert", "XLMRobertaTokenizer") is RECIPES["xlm-roberta"]
    assert legacy_tokenizer("camembert", "PreTrainedTokenizerFast") is RECIPES["camembert"]
    assert legacy_tokenizer("roberta", "BertweetTokenizer") is None
    assert legacy_tokenizer("modernbert") is None
