"""A small tokenizer and random documents for tests of corpora."""

from __future__ import annotations

import random
from pathlib import Path

import tokenizers

from bertie.text.tokenizer import Tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [a + b for a in "bdgklmnprst" for b in "aeiou"]


def tokenizer_of(words: list[str]) -> Tokenizer:
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens([word for word in SPECIALS if word in vocab])
    return Tokenizer(backend)


def sentence(draw: random.Random, words: int) -> str:
    return " ".join("".join(draw.choices(PIECES, k=draw.randint(1, 4))) for _ in range(words)) + "."


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents of a title and some paragraphs."""
    draw = random.Random(seed)
    return [
        "\n".join([f"Ba {i}", *(sentence(draw, draw.randint(1, 30)) for _ in range(draw.randint(1, 6)))])
        for i in range(count)
    ]


def write_text(path: Path, documents: list[str]) -> str:
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return str(path)


def files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}
