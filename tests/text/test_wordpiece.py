"""The compiled WordPiece against the library `tokenizers`: the same ids for every text."""

import ctypes
import pickle
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from bertie.compiled import library_path
from bertie.errors import InputError
from bertie.switches import disable
from bertie.text import wordpiece as fast
from bertie.text.tokenizer import Tokenizer
from tests.text.test_legacy import TEXTS

needs_library = pytest.mark.skipif(fast.library() is None, reason="the library was not built")
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = """
the cat sat on mat quick brown fox jump dog hello world un able ##able ##s ##ing ##ed ##er ##un a b c x q1 The
Cat THE ##X ##Able I US A [ ] . , ! ? ' - _ # ## ##- ( ) $ % 1999 19 ##99 ##9 ##0 ##1 ##2 café ##é 今 ##a ##b
##c ##d ##e ##o ##t ##\x01 \x01 x\x7fy abcdefghijklmnopqrstuvwxyz ##bcdefghijklmnopqrstuvwxyz
""".split()
VOCAB = {word: i for i, word in enumerate(dict.fromkeys([*SPECIALS, *WORDS]))}
ASCII = "".join(map(chr, range(128)))
README = Path(__file__).parents[2] / "README.md"


def backend(
    vocab: dict[str, int] | None = None,
    added: Iterable[AddedToken] = (),
    normalizer: normalizers.Normalizer | None = None,
    **options: object,
) -> RustTokenizer:
    vocab = VOCAB if vocab is None else vocab
    rust = RustTokenizer(models.WordPiece(vocab, **{"unk_token": "[UNK]", "max_input_chars_per_word": 100} | options))
    rust.normalizer = normalizer or normalizers.BertNormalizer()
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    rust.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS if token in vocab])
    rust.add_tokens(list(added))
    return rust


def bert(lowercase: bool = True, clean_text: bool = True, strip_accents: bool | None = None) -> normalizers.Normalizer:
    return normalizers.BertNormalizer(clean_text, True, strip_accents, lowercase)


ADDED = [
    AddedToken("qux", normalized=True),
    AddedToken("New York", normalized=True, single_word=True),
    AddedToken("<E>", normalized=False, lstrip=True, rstrip=True),
    AddedToken("Zürich", normalized=True),
]
KINDS = {
    "uncased": lambda: backend(),
    "cased": lambda: backend(normalizer=bert(lowercase=False)),
    "as it is": lambda: backend(normalizer=bert(lowercase=False, clean_text=False)),
    "lower, not cleaned": lambda: backend(normalizer=bert(clean_text=False, strip_accents=False)),
    "with added tokens": lambda: backend(added=ADDED),
    "cased, with added tokens": lambda: backend(added=ADDED, normalizer=bert(lowercase=False)),
    "no prefix": lambda: backend(continuing_subword_prefix=""),
    "other prefix": lambda: backend(continuing_subword_prefix="un"),
    "short words": lambda: backend(max_input_chars_per_word=4),
    "no template": lambda: without_template(),
    "few pieces": lambda: backend({"[UNK]": 0, "[CLS]": 2, "[SEP]": 3, "a": 7, "##": 9, "": 11}),
}


def without_template() -> RustTokenizer:
    rust = backend()
    rust.post_processor = None
    return rust


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(KINDS[request.param]())


def check(tokenizer: Tokenizer, texts: list[str], least: float = 0.5) -> None:
    """Equal to the library; at least the share `least` of the ASCII texts took the compiled path."""
    raw = tokenizer._backend.encode_batch(texts)
    got = tokenizer.encode_flat(texts)
    ends = np.cumsum(got.lengths)
    for text, one, end in zip(texts, raw, ends.tolist(), strict=True):
        assert got.ids[end - len(one) : end].tolist() == one.ids, repr(text)
    assert got.lengths.tolist() == [len(one) for one in raw]
    assert got.segments.tolist() == [0] * len(got.ids)
    assert [a.dtype for a in (got.ids, got.segments, got.lengths)] == [np.int64] * 3
    if fast.library() is not None:
        assert tokenizer._compiled is not None
        ascii_texts = [text for text in texts if text.isascii()]
        assert (tokenizer._compiled.encode(ascii_texts)[1] >= 0).sum() >= least * len(ascii_texts)


def test_pairs(tokenizer: Tokenizer) -> None:
    """Pairs, mixed with single texts, in any order: as the library encodes them."""
    draw = random.Random(1)
    texts = ["the cat", "", "un able", "hello, world!", "zzz [MASK] b", "今 cat", "a\x00b", "the quick brown fox " * 9]
    items = [(a, b) for a in texts for b in texts] + texts
    draw.shuffle(items)
    raw = tokenizer._backend.encode_batch(items)
    got = tokenizer.encode_flat(items)
    assert got.lengths.tolist() == [len(encoding) for encoding in raw]
    assert got.ids.tolist() == [i for encoding in raw for i in encoding.ids]
    assert got.segments.tolist() == [i for encoding in raw for i in encoding.type_ids]
    assert got.special_counts.tolist() == [sum(encoding.special_tokens_mask) for encoding in raw]
    for lazy, encoding in zip(got, raw, strict=True):
        assert lazy.offsets.tolist() == [list(pair) for pair in encoding.offsets]
        assert lazy.sequence_ids.tolist() == [-1 if s is None else s for s in encoding.sequence_ids]
    if fast.library() is not None and tokenizer._backend.post_processor is not None:
        assert tokenizer._compiled is not None
        assert tokenizer._compiled.pair_template is not None
        assert tokenizer._compiled.encode_pairs([("the cat", "a"), ("the [SEP]", "b")])[1].tolist() == [True, False]


def test_every_character(tokenizer: Tokenizer) -> None:
    around = [f"{a}%s{b}" for a in ("", "the", "a ", "[", "\x01") for b in ("", "cat", " b", "]", "\x7f", ". s")]
    check(tokenizer, [one % c for one in around for c in ASCII if c != "%"])
    check(tokenizer, [f"a{c}{d}b" for c in ASCII for d in ASCII])


def test_long_words(tokenizer: Tokenizer) -> None:
    texts = [f"x {letter * n} y" for n in (1, 3, 4, 5, 25, 26, 27, 99, 100, 101, 102, 5000) for letter in "abz.9\x00"]
    texts += ["a\x00" * n for n in (99, 100, 101)] + ["abcdefghijklmnopqrstuvwxyz" * n for n in range(1, 6)]
    check(tokenizer, texts)


def test_random_texts(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    parts = [
        *(word.removeprefix("##") for word in WORDS),
        *ASCII,
        *" \t\n\r" * 8,
        *".,'[]#-" * 3,
        "zzz",
        "qu",
        "qux",
        "york",
    ]
    parts = [part for part in parts if part.isascii()]
    texts = ["".join(draw.choices(parts, k=draw.randrange(30))) for _ in range(3000)]
    texts += ["".join(draw.choices(ASCII, k=draw.randrange(200))) for _ in range(1000)]
    texts += ["".join(draw.choices("ab \x00\x7f\x1f\x0b\x0c\x1c[]", k=draw.randrange(40))) for _ in range(1000)]
    check(tokenizer, texts)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(max_codepoint=300)) | st.text(st.characters(max_codepoint=127))))
def test_any_texts(texts: list[str]) -> None:
    for kind in ("uncased", "cased, with added tokens"):
        check(Tokenizer(KINDS[kind]()), texts, least=0)


def test_sentences(tokenizer: Tokenizer) -> None:
    check(
        tokenizer, [*TEXTS, *README.read_text(encoding="utf-8").splitlines(), *Path(__file__).read_text().splitlines()]
    )


def test_spelled_out_tokens_and_mixed_batches(tokenizer: Tokenizer) -> None:
    texts = [
        *("[MASK]", "[mask]", "a [MASK] b", "[SEP] x", "x[SEP]", "the[CLS]cat", "[MA", "[MASK", "[[MASK]]", "[ MASK ]"),
        *("[MA\x00SK]", "\x00[PAD]", "[UN\x7fK", "qux", "QuX", "q\x01ux", "quxqux", "aqux", "qu", "q", "qu\x0bx"),
        *("New York", "new york", "new\tyork", "NewYork", "new\n\nyork", "anew york", "new yorks", "New", "new yor"),
        *("  <E>  a", "<e>", "<E", "< E >", "Zurich", "zürich", "Zürich", "Z u rich", "ZURICH", "zuric", "Zu\x00rich"),
    ]
    check(tokenizer, texts, least=0.2)
    mixed = [text for pair in zip(texts, ["今天", "the cat", "", "café"] * len(texts), strict=False) for text in pair]
    check(tokenizer, mixed, least=0.2)
    for some in ([], [""], ["今"], ["", "今", ""], ["今", "the cat"], ["the cat"], ["", "\x00", " "], ["[MASK]"]):
        check(tokenizer, some, least=0)


def test_many_added_tokens() -> None:
    """Tokens that begin like others; and so many that the library does it all."""
    some = ["ab", "abc", "abcd", "xyz", "xya", *(f"[unused{i}]" for i in range(300))]
    texts = ["ab", "a b", "xy", "xyz", "xyab", "[unused", "[unused7", "[unused7]", "[unused299]", "the cat", "cab"]
    check(Tokenizer(backend(added=[AddedToken(one) for one in some])), texts, least=0.2)
    assert fast.find(backend(added=[AddedToken(f"word{i:08}") for i in range(2000)])) is None


def test_pieces_beyond_ascii_are_not_needed() -> None:
    """Pieces that are not ASCII cannot be found in a text that is."""
    vocab = VOCAB | {f"word{i}é": 1000 + i for i in range(100)} | {f"##{chr(0x4E00 + i)}": 2000 + i for i in range(100)}
    check(Tokenizer(backend(vocab)), ["word1", "word", "the cat", "今天 word3é"])


@needs_library
def test_supported_tokenizers() -> None:
    def with_(**parts: object) -> RustTokenizer:
        rust = backend()
        for name, part in parts.items():
            setattr(rust, name, part)
        return rust

    sequence = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits()])
    template = [("[CLS]", 2), ("[SEP]", 3)]
    no = {
        "BPE": RustTokenizer(models.BPE({"a": 0}, [], unk_token="a")),
        "no normalizer": with_(normalizer=None),
        "other normalizer": with_(normalizer=normalizers.Lowercase()),
        "several normalizers": with_(normalizer=normalizers.Sequence([bert(), normalizers.Replace("a", "b")])),
        "custom": with_(pre_tokenizer=pre_tokenizers.PreTokenizer.custom(SimpleNamespace())),
        "no words": with_(pre_tokenizer=None),
        "other words": with_(pre_tokenizer=pre_tokenizers.Whitespace()),
        "words and more": with_(pre_tokenizer=sequence),
        "a split": with_(pre_tokenizer=pre_tokenizers.Split(Regex(" "), "removed")),
        "the text twice": with_(post_processor=processors.TemplateProcessing("[CLS] $A $A", None, template)),
        "no text": with_(post_processor=processors.TemplateProcessing("[CLS]", None, template)),
        "segment 1": with_(post_processor=processors.TemplateProcessing("[CLS] $A:1 [SEP]", None, template)),
        "segment 1 at the end": with_(post_processor=processors.TemplateProcessing("$A [SEP]:1", None, template)),
        "other template": with_(post_processor=processors.ByteLevel()),
        "no unknown token": backend({word: i for word, i in VOCAB.items() if word != "[UNK]"}),
        "two pieces, one id": backend(VOCAB | {"again": 7}),
        "a prefix not in ASCII": backend(continuing_subword_prefix="é"),
        "an added token of nothing": backend(added=[AddedToken("\x00")]),
        "cut": backend(),
        "padded": backend(),
        "literal special tokens": with_(encode_special_tokens=True),
    }
    no["cut"].enable_truncation(8)
    no["padded"].enable_padding()
    assert {name: fast.find(one) is None for name, one in no.items()} == dict.fromkeys(no, True)
    yes = [
        with_(post_processor=processors.TemplateProcessing("[CLS] $A [SEP] [SEP]", "$A $B:1", template)),
        with_(post_processor=processors.TemplateProcessing("$A", None, [])),
        with_(post_processor=processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))),
    ]
    for one in yes:
        check(Tokenizer(one), ["the cat", "", "hello, 今"])
    assert yes[0].encode("the cat").ids == Tokenizer(yes[0]).encode_flat(["the cat"]).ids.tolist()


@pytest.mark.parametrize("template", ["[CLS] $A:1 [SEP]:1", "[CLS] $A [SEP]:2", "[CLS] $A [SEP]"])
def test_segments(template: str) -> None:
    """Those of a template are kept, and not asked for where they are all 0."""
    one = backend()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    one.post_processor = processors.TemplateProcessing(template, pair, [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = Tokenizer(one)
    texts = ["the cat", "", "今", "[MASK]"]
    expected = [i for raw in one.encode_batch(texts) for i in raw.type_ids]
    assert tokenizer.encode_flat(texts).segments.tolist() == expected
    assert [i for e in tokenizer.encode_batch(texts) for i in e.segments] == expected
    assert tokenizer.encode("a", "b").segments.tolist() == [0, 0, 0, 1, 1]
    mixed = tokenizer.encode_batch(["a", ("a", "b")])
    assert mixed[0].segments.tolist() == one.encode("a").type_ids
    assert mixed[1].segments.tolist() == [0, 0, 0, 1, 1]


def test_errors_name_the_text() -> None:
    tokenizer = Tokenizer(backend())
    with pytest.raises(InputError, match="item 3: character 1 is the lone surrogate"):
        tokenizer.encode_flat(["a", "今", "b", "x\ud800"])
    with pytest.raises(InputError, match="item 1 must be a str, not int"):
        tokenizer.encode_flat(["a", 5, "b"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="item 1 must be a str, not bytes"):
        tokenizer.encode_flat(["a", b"b"])  # type: ignore[list-item]


def test_without_the_library(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = tokenizer.encode_flat(TEXTS)
    monkeypatch.setattr(fast, "library", lambda: None)
    other = Tokenizer(RustTokenizer.from_str(tokenizer._backend.to_str()))
    without = other.encode_flat(TEXTS)
    assert other._compiled is None
    assert with_it.ids.tolist() == without.ids.tolist()
    assert with_it.lengths.tolist() == without.lengths.tolist()


def test_missing_or_outdated_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "__file__", str(tmp_path / "fast.py"))
    assert fast.library.__wrapped__() is None
    library_path(fast.__file__, "_wordpiece").touch()
    assert fast.library.__wrapped__() is None  # not a library
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(bertie_wordpiece_0=None))
    assert fast.library.__wrapped__() is None


def test_copies(tokenizer: Tokenizer) -> None:
    check(tokenizer, TEXTS, least=0)
    for one in (deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert (one._compiled is None) == (tokenizer._compiled is None)
        check(one, TEXTS, least=0)


def test_threads(tokenizer: Tokenizer) -> None:
    texts = [f"the cat {i} sat, un{'able' * (i % 7)}" for i in range(500)]
    expected = tokenizer.encode_flat(texts)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(tokenizer.encode_flat, [texts] * 20):
            assert (got.ids == expected.ids).all()


@needs_library
def test_invalid_arguments_of_the_c_interface() -> None:
    """Ends that lie, and too little room, are refused; bytes that are not ASCII are not for it."""
    quick, lib = Tokenizer(backend())._compiled, fast.library()
    assert quick is not None
    assert lib is not None

    def run(raw: bytes, ends: list[int], room: int) -> tuple[int, list[int]]:
        ids, lengths, at = np.zeros(100, np.int64), np.zeros(len(ends), np.int64), np.array(ends, np.int64)
        arrays = (at.ctypes.data, len(ends), ids.ctypes.data, room, lengths.ctypes.data)
        return lib.bertie_wordpiece_encode(quick._handle, raw, len(raw), *arrays), lengths.tolist()

    assert run(b"a catb", [1, 5, 6], 12) == (9, [3, 3, 3])
    assert run(b"a b", [3], 7) == (4, [4])
    assert run(b"a b", [3], 4)[0] == -1
    assert run(b"a b", [4], 7)[0] == -1
    assert run(b"a b", [-1], 7)[0] == -1
    assert run(b"a b", [2, 1], 9)[0] == -1
    assert run("é a".encode(), [2, 4], 9) == (3, [-1, 3])


def test_it_can_be_disabled() -> None:
    """With the same ids from the `tokenizers` library."""
    tokenizer = Tokenizer(backend())
    fast_ids = tokenizer.encode_flat(["the cat sat"]).ids
    with disable("native.wordpiece"):
        assert tokenizer._compiled is None
        assert not tokenizer.is_compiled(["the cat sat"])
        assert tokenizer.encode_flat(["the cat sat"]).ids.tolist() == fast_ids.tolist()
    assert (tokenizer._compiled is None) == (fast.library() is None)
