"""Short, complete sentences about everyday things, for masked-language modelling."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from preparation.dictionary import dictionary
from preparation.files import SEED, Row, read, read_if_any, unseen
from preparation.text import split
from preparation.wikipedia import Wikipedia

WORDS = range(4, 31)
ENDINGS = (".", "!", "?")


def everyday(data: Path, wiki: Wikipedia, seen: set[str], wordnet: Path | None = None) -> list[Row]:
    """Distinct sentences of 4 to 30 words with a final punctuation mark, shuffled."""
    texts = (text.strip() for text in _texts(data, wiki, wordnet))
    sentences = ({"text": text} for text in texts if len(text.split()) in WORDS and text.endswith(ENDINGS))
    rows = list(unseen(sentences, seen, "text"))
    random.Random(SEED).shuffle(rows)
    return rows


def _texts(data: Path, wiki: Wikipedia, wordnet: Path | None) -> Iterator[str]:
    for passage in wiki.passages:
        if passage.first:  # what the article is about: "Paris is the capital of France."
            yield from islice(split(passage.text), 2)
    for row in read(data / "snli/train_subset.jsonl.gz"):
        yield from (row["text_a"], row["text_b"])
    for name in ("clinc150/train", "go_emotions/train", "ud_english_ewt/train"):
        yield from (row["text"] for row in read_if_any(data / f"{name}.jsonl.gz"))
    if wordnet is not None:
        yield from dictionary(wordnet)
