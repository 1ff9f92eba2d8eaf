from __future__ import annotations

import re
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from bertie.errors import InputError
from bertie.search.chunking import Chunker
from bertie.search.records import Document, Passage
from bertie.text.tokenizer import Tokenizer
from tests.tasks.tiny import document, sentences, tokenizer

KINDS = ("wordpiece", "bpe")
MINE = {kind: Tokenizer(tokenizers.Tokenizer.from_str(tokenizer(kind)._tokenizer.to_str())) for kind in KINDS}


def words() -> Tokenizer:
    """Each run of letters and each mark is a token, and there are no special ones."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend)


def cut(text: str, size: int = 20, overlap: int = 0) -> list[Passage]:
    return Chunker(words(), size, overlap).split(Document("d", text))


def texts(text: str, size: int = 20, overlap: int = 0) -> list[str]:
    return [one.text for one in cut(text, size, overlap)]


prose = st.builds(document, st.integers(0, 12), st.integers(0, 1000))
markdown = (
    "# Emma|## London|### The river ###|Berlin\n===|History\r\n-----\r|```|~~~python|x = 1  # set it|- one|- two\n  b"
)
odd = "|| a | b |||---|---||1. three|> quoted||\f|\r|   |#|###  |[SEP] [CLS]|Dr. A. Li went.|日本語の文章です。次の文。"
long = ["ภาษาไทยไม่มีช่องว่าง" * 4, "e\u0301" * 30, "a" * 150, "." * 40, "👩\u200d🚀" * 9, "| a | b |", "|---|---|"]
lines = st.sampled_from([*markdown.split("|"), *odd.split("|"), *long])
mixed = st.lists(st.one_of(prose, lines, lines, st.text(max_size=40)), max_size=14).map("\n".join)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.lists(mixed, min_size=1, max_size=3), st.integers(12, 60), st.floats(0, 1))
def test_passages(kind: str, several: list[str], size: int, share: float) -> None:
    chunker = Chunker(MINE[kind], size, int(share * (size - 2) // 2))
    documents = [Document(f"d{i}", text) for i, text in enumerate(several)]
    found = chunker.split_batch(documents)
    assert found == [chunker.split(one) for one in documents]
    for one, passages in zip(documents, found, strict=True):
        covered = bytearray(len(one.text))
        for passage in passages:
            assert passage.document == one.id
            assert passage.text == one.text[passage.start : passage.end] == passage.text.strip() != ""
            assert len(MINE[kind].encode(passage.text)) <= size
            covered[passage.start : passage.end] = b"\1" * len(passage.text)
        assert all(c.isspace() or there for c, there in zip(one.text, covered, strict=True))
        for a, b in pairwise(passages):
            assert a.start < b.start
            assert a.end < b.end


@pytest.mark.parametrize("kind", KINDS)
def test_passages_are_whole_sentences(kind: str) -> None:
    text = " ".join(sentences(200, 3))
    for size, overlap in ((60, 0), (80, 20)):
        passages = Chunker(MINE[kind], size, overlap).split(Document("d", text))
        assert len(passages) > 20
        for a, b in pairwise(passages):
            assert re.search(r"[.!?]$", a.text), "the sentences are all short enough"
            assert not text[b.start - 1].strip(), "no word is cut"
            shared = text[b.start : a.end]
            assert len(MINE[kind].encode(shared, special=False)) <= 1.25 * overlap, "part of a sentence is estimated"
        assert sum(a.end > b.start for a, b in pairwise(passages)) >= (len(passages) // 2 if overlap else 0)
        filled = [len(MINE[kind].encode(one.text)) for one in passages]
        assert sum(filled) >= 0.7 * size * len(filled)


def test_overlap() -> None:
    text = "One two three four. Five six seven. Eight nine ten. Alpha beta gamma delta."
    assert texts(text, 14, 4) == [
        "One two three four. Five six seven. Eight nine ten.",
        "Eight nine ten. Alpha beta gamma delta.",
    ]
    assert texts("A b c d e f g h i j k. Then l m n o p q.", 14, 4) == [
        "A b c d e f g h i j k.",
        "j k. Then l m n o p q.",
    ]


def test_headings() -> None:
    text = (
        "Before.\n\n# A\n\none two three four five.\n\n## B ##\n\nsix seven eight nine ten.\n\n# C\n\n## D\n\neleven."
    )
    assert [(one.text.split("\n")[0], one.headings) for one in cut(text, 20)] == [
        ("Before.", ("A",)),  # two words are not enough for a passage: A is joined
        ("## B ##", ("A", "B")),
        ("# C", ("C",)),  # it holds D and its heading above
    ]
    assert [one.headings for one in cut(text, 12)] == [("A",), ("A", "B"), ("C",)]


def test_headings_of_a_short_text() -> None:
    """A text of one passage keeps its headings, also below front matter; of several sections, the first one's."""
    assert [one.headings for one in cut("# A\n\none two.", 60)] == [("A",)]
    assert [one.headings for one in cut("---\ntags: x\n---\n\n# A\n\none two.", 60)] == [("A",)]
    assert [one.headings for one in cut("one.\n\n# A\n\ntwo.\n\n## B\n\nthree.", 60)] == [("A",)]
    assert [one.headings for one in cut("## A\n\none.\n\n## B\n\ntwo.", 60)] == [("A",)]
    assert [one.headings for one in cut("one two.", 60)] == [()]


def test_nested_headings() -> None:
    text = "".join(
        f"{'#' * level} {name}\n\none two three four five six.\n\n" for level, name in ((1, "A"), (3, "B"), (2, "C"))
    )
    assert [one.headings for one in cut(text, 12)] == [("A",), ("A", "B"), ("A", "C")]


def test_no_overlap_across_headings() -> None:
    body = "One two three. Four five six. Seven eight nine."
    first, second = cut(f"# A\n\n{body}\n\n# B\n\n{body}", 20, 8)
    assert first.end < second.start
    assert second.text.startswith("# B")


def test_headings_stay_with_their_section() -> None:
    text = "# A\n\n" + "one two three four five six. " * 2 + "\n\n# B\n\none two three four five six seven eight nine."
    for size in range(16, 24):
        assert not [one for one in texts(text, size) if one.endswith("# B")]


def test_underlined_headings() -> None:
    body = "one two three four five six."
    text = f"Title\n=====\n\n{body}\n\nPart\n----\n\n{body}\n\nDetail\n~~~~~~\n\n{body}"
    assert [one.headings for one in cut(text, 12)] == [("Title",), ("Title", "Part"), ("Title", "Part", "Detail")]
    text = text.replace("\n", "\r\n")
    assert [one.headings for one in cut(text, 12)] == [("Title",), ("Title", "Part"), ("Title", "Part", "Detail")]
    assert [one.headings for one in cut("one two\nthree four\n-----\n\nfive\n", 12)] == [()], "more than one line"


def test_code_blocks() -> None:
    code = "```python\n# set it\nx = 1\n\n# and again\ny = 2\n```"  # 15 tokens
    before = "One two three four five six. Seven eight nine ten eleven twelve."
    found = cut(f"# A\n\n{before}\n\n{code}\n\nBehind it.", 18, 6)
    assert [one.text for one in found] == [f"# A\n\n{before}", f"{code}\n\nBehind it."], (
        "nothing shared, or it would not fit"
    )
    assert {one.headings for one in found} == {("A",)}
    long = "```\n" + "\n".join(f"x{i} = {i}" for i in range(40)) + "\n```"
    assert all(one.startswith(("```", "x")) for one in texts(long, 24)), "it does not fit, and is cut at lines"


def test_unclosed_fence() -> None:
    assert cut("```\n\none two three four five six seven.\n\n# A\n\none two.", 12)[-1].headings == ("A",)
    assert cut("a\n\n``` inline ```\n\n# A\n\n```\n", 12)[-1].headings == ("A",)


def test_tables() -> None:
    table = "| a | b |\n|---|---|\n| c | d |"
    found = texts(f"One two three four five. Six seven eight nine.\n\n{table}\n\nOne two three.", 24)
    assert any(table in one for one in found)


def test_abbreviations() -> None:
    text = "She met Dr. Weiss and J. Li there. They spoke of rivers, e.g. the Rhine and the Elbe."
    assert texts(text, 20)[0] == "She met Dr. Weiss and J. Li there."
    assert texts("第一句话。第二句话很长很长。第三句。", 9, 0) == ["第一句话。第二句话很长很长。第三句。"]


def test_long_words() -> None:
    text = " ".join(["river"] * 30 + ["a" * 60] + ["river"] * 30)
    for one in Chunker(MINE["bpe"], 80, 0).split(Document("d", text)):
        assert set(one.text.split()) <= {"river", "a" * 60}
    cuts = Chunker(MINE["bpe"], 20, 0).split(Document("d", "e\u0301" * 100))
    assert len(cuts) > 1
    assert all(one.text[0] == "e" for one in cuts), "no accent without its letter"


def test_overfull_passages_are_split() -> None:
    backend = tokenizers.Tokenizer.from_str(words()._backend.to_str())
    backend.normalizer = normalizers.Replace(tokenizers.Regex(r"\. B"), ". x x x x x x x x B")
    strange = Tokenizer(backend)
    text = "One two three. Between four and five. Six seven. Before eight."
    found = Chunker(strange, 16, 0).split(Document("d", text))
    assert len(Chunker(words(), 16, 0).split(Document("d", text))) == 1
    assert len(found) > 1
    assert all(len(strange.encode(one.text)) <= 16 for one in found)
    assert "".join("".join(one.text.split()) for one in found) == "".join(text.split())


HARD = {
    "a word": "a" * 50_000,
    "dots": "." * 50_000,
    "newlines": "\n" * 50_000 + "a",
    "spaces": "a" + " " * 50_000 + "b",
    "fences": "```a\n" * 10_000,
    "hashes": "# \n" * 15_000,
    "headings": "# a\n" * 10_000,
    "rows": "|\n" * 15_000,
    "accents": "\u0301" * 30_000,
    "closers": '.")' * 15_000,
    "underlines": "a\n---\n\n" * 8_000,
    "lines": "one two\n" * 8_000,
}


@pytest.mark.parametrize("name", HARD)
def test_work_is_linear_in_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = 0
    encode_batch = Tokenizer.encode_batch

    def counting(self: Tokenizer, items: list[str], special: bool = True) -> object:
        nonlocal encoded
        encoded += sum(map(len, items))
        return encode_batch(self, items, special)

    monkeypatch.setattr(Tokenizer, "encode_batch", counting)
    text = HARD[name]
    found = cut(text, 64, 16)
    assert encoded <= 4 * len(text)
    assert max(len(one.text) for one in found) <= 16 * 64 + 50_000 * (name == "spaces")


def test_blank_and_invalid_text() -> None:
    assert texts("") == texts(" \n\t\f ") == []
    assert texts("  one  ") == ["one"]
    with pytest.raises(InputError, match=r"the document 'd': character 4 is the lone surrogate U\+D800"):
        cut("one \ud800")
    with pytest.raises(InputError, match="chunk_size=9 must be at least 10: 2 special tokens and 8 others"):
        Chunker(MINE["bpe"], 9)
    with pytest.raises(InputError, match="chunk_overlap=10 must be from 0 to 9, half of chunk_size=20"):
        Chunker(MINE["bpe"], 20, 10)
