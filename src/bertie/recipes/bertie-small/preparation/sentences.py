"""Short texts without labels, for distillation of a teacher's embeddings."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from preparation.files import SEED, Row, read, read_if_any, unseen
from preparation.functions import Function
from preparation.queries import queries
from preparation.text import detokenize, shorten
from preparation.wikipedia import Wikipedia

PARAGRAPHS = 40_000  # of Wikipedia
KEYWORDS = 250_000  # queries of a few words
SNLI_ROWS = 15_000
SOURCES = 9_000  # functions, with their code


def sentences(data: Path, wiki: Wikipedia, functions: Sequence[Function], seen: set[str]) -> list[Row]:
    """Distinct texts of all kinds, shuffled."""
    draw = random.Random(SEED)
    rows = list(unseen(({"text": text.strip()} for text in _texts(data, wiki, functions, draw)), seen, "text"))
    draw.shuffle(rows)
    return rows


def _texts(data: Path, wiki: Wikipedia, functions: Sequence[Function], draw: random.Random) -> Iterator[str]:
    yield from wiki.titles
    yield from wiki.sentences
    chosen = draw.sample(wiki.passages, min(PARAGRAPHS, len(wiki.passages)))
    yield from (shorten(passage.text, draw.choice((60, 120, 200))) for passage in chosen)
    yield from queries(wiki.passages, functions, KEYWORDS, draw)
    yield from (function.summary for function in functions)
    yield from (function.source for function in draw.sample(functions, min(SOURCES, len(functions))))
    pairs = list(read(data / "snli/train_subset.jsonl.gz"))
    for row in draw.sample(pairs, min(SNLI_ROWS, len(pairs))):
        yield from (row["text_a"], row["text_b"])
    for name in ("squad_v1/train", "tydiqa_goldp/train.en"):
        yield from (row["question"] for row in read(data / f"{name}.jsonl.gz"))
    for name in ("banking77/train", "clinc150/train", "go_emotions/train", "scicite/train"):
        yield from (row["text"] for row in read_if_any(data / f"{name}.jsonl.gz"))
    for name in ("wikiann/train.en", "wnut17/train", "ncbi_disease/train"):
        yield from (detokenize(row["tokens"]) for row in read_if_any(data / f"{name}.jsonl.gz"))
    yield from (row["text"] for row in read_if_any(data / "ud_english_ewt/train.jsonl.gz"))
