"""A corpus of numbered words, and pairs of texts from it: what tests of sentence pairs and objectives share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import TrainingExample
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.sentence_pairs import NextSentence, SentencePairSampler
from tests.training.pretrain.corpus_texts import SPECIALS, tokenizer_of

MAX_LENGTH = 32
WORDS = 4000
CLS, SEP, MASK = 2, 3, 4


def numbered_tokenizer() -> Tokenizer:
    """One token per word of the corpus: its number tells its position."""
    return tokenizer_of([*SPECIALS, *(f"w{i}" for i in range(WORDS))])


def default_documents() -> list[list[list[int]]]:
    draw = random.Random(1)
    return numbered([draw.randint(8, 70) for _ in range(70)] + [900])  # the last is longer than a section


def build_numbered_corpus(folder: Path, tokenizer: Tokenizer, documents: Sequence[Sequence[Sequence[int]]]) -> Corpus:
    text = "\n\n".join("\n".join(" ".join(f"w{i}" for i in line) for line in document) for document in documents)
    (folder / "in.txt").write_text(text + "\n")
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "out")
    return Corpus.open(folder / "out", tokenizer)


def numbered(sizes: Sequence[int], seed: int = 0) -> list[list[list[int]]]:
    """Documents of the given numbers of tokens, in lines. All tokens differ and are numbered consecutively."""
    draw, at, documents = random.Random(seed), 0, []
    for size in sizes:
        lines, end = [], at + size
        while at < end:
            step = min(draw.randint(1, 9), end - at)
            lines.append(list(range(at, at + step)))
            at += step
        documents.append(lines)
    return documents


def pair_steps(corpus: Corpus, tokenizer: Tokenizer, kind: Any = NextSentence, **options: Any) -> SentencePairSampler:
    return SentencePairSampler(
        corpus,
        tokenizer,
        **({"steps": 50, "pairs": kind(), "budget": 400, "max_length": MAX_LENGTH, "seed": 3} | options),
    )


def ids_of(item: TrainingExample) -> Any:
    """The token ids before masking."""
    piece = item.windows[0]
    ids = np.array(piece.ids)
    assert piece.rows is not None
    ids[piece.rows] = piece.values
    return ids


def halves(item: TrainingExample) -> tuple[Any, Any]:
    """The two texts of a pair, as token numbers; checks the special tokens and segment ids around them."""
    ids, segments = ids_of(item), item.windows[0].segments
    first = int(np.flatnonzero(ids == SEP)[0])
    assert ids[0] == CLS
    assert ids[-1] == SEP
    assert (ids == SEP).sum() == 2
    assert segments.tolist() == [0] * (first + 1) + [1] * (len(ids) - first - 1)
    return ids[1:first] - 5, ids[first + 1 : -1] - 5


def same_items(a: Sequence[TrainingExample], b: Sequence[TrainingExample]) -> bool:
    def as_lists(items: Sequence[TrainingExample]) -> Any:
        return [
            (p.ids.tolist(), p.segments.tolist(), np.array(p.rows).tolist(), np.array(p.values).tolist())
            for item in items
            for p in item.windows
        ] + [[(name, value.tolist()) for name, value in item.extras.items()] for item in items]

    return bool(as_lists(a) == as_lists(b))
