"""Named entities: WikiANN and WNUT-17, running text without names, and text labelled by another model."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from preparation.files import SEED, Named, Row, key, read, read_if_any, unseen
from preparation.silver import WORD, NamedEntityModel, silver
from preparation.text import split
from preparation.wikipedia import WikiPassage

WNUT = {"person": "PER", "corporation": "ORG", "group": "ORG", "location": "LOC"}
WNUT_COPIES = 2  # of its rows, which are few and not like Wikipedia's
NAMES_ONLY = 0.6  # fraction of WikiANN's rows that consist of a name only to keep
NEGATIVES = {"ncbi_disease": 3_000, "scicite": 1_500, "ud_english_ewt": 4_000}  # sentences without a name
SILVER, LABELLED = 8_000, 20_000  # sentences to keep, and to label at most
UNLABELLED = 160_000  # sentences of Wikipedia that label.py labels
TITLES = ("Mr", "Mrs", "Ms", "Dr", "Prof", "Sir", "President", "Professor", "Judge", "Captain", "Sen", "Gov", "Gen")
TITLED = 0.2  # fraction of the sentences with a person in which it gets a title


def entities(data: Path, passages: Sequence[WikiPassage], model: NamedEntityModel | None) -> Named:
    """Rows with the entity types PER, ORG and LOC."""
    dev, test = list(_labelled(data, "dev")), list(_labelled(data, "test"))
    draw = random.Random(SEED)
    train = [*_labelled(data, "train"), *_negatives(data, draw)]
    if model is not None:
        train += _silver(data, passages, model, draw)
    held = {key(" ".join(row["tokens"])) for row in dev + test}
    usable = [row for row in unseen(train, held, "tokens") if not _begins_with_mark(row)]
    rows = [row for row in usable if _keep(row, draw)]
    rows += [row for row in rows if row["source"] == "wnut17"] * (WNUT_COPIES - 1)
    yield "ner.train", [with_title(row, draw) if draw.random() < TITLED else row for row in rows]
    yield "names.train", [row for row in usable if row["source"] == "wikiann"]
    yield "ner.dev", dev
    yield "ner.test", test
    sentences = list(unseen(_unlabelled(passages), held, "tokens"))
    yield "ner.unlabelled", random.Random(SEED).sample(sentences, min(UNLABELLED, len(sentences)))


def _labelled(data: Path, split: str) -> Iterator[Row]:
    for row in read(data / f"wikiann/{split}.en.jsonl.gz"):
        yield {"tokens": row["tokens"], "tags": row["tags"], "source": "wikiann"}
    for row in read(data / f"wnut17/{split}.jsonl.gz"):
        yield {"tokens": row["tokens"], "tags": [_wnut(tag) for tag in row["tags"]], "source": "wnut17"}


def _wnut(tag: str) -> str:
    place, _, kind = tag.partition("-")
    return f"{place}-{WNUT[kind]}" if kind in WNUT else "O"


def _begins_with_mark(row: Row) -> bool:
    """Whether a punctuation mark begins a name, as in some rows of WikiANN."""
    marks = [tag for token, tag in zip(row["tokens"], row["tags"], strict=True) if not re.search(r"\w", token)]
    return row["source"] == "wikiann" and any(tag.startswith("B-") for tag in marks)


def _keep(row: Row, draw: random.Random) -> bool:
    """Drop some of the rows of WikiANN that are a name and nothing else."""
    return row["source"] != "wikiann" or "O" in row["tags"] or draw.random() < NAMES_ONLY


def _negatives(data: Path, draw: random.Random) -> Iterator[Row]:
    """Sentences without names: of abstracts and citations without capitals, of a treebank without proper nouns."""
    found: dict[str, list[list[str]]] = {name: [] for name in NEGATIVES}
    for row in read_if_any(data / "ncbi_disease/train.jsonl.gz"):
        others = [word for word, tag in zip(row["tokens"], row["tags"], strict=True) if tag == "O"]
        if not _capitals(others):
            found["ncbi_disease"].append(row["tokens"])
    for row in read_if_any(data / "scicite/train.jsonl.gz"):
        words = WORD.findall(row["text"])
        if not _capitals(words):
            found["scicite"].append(words)
    for row in read_if_any(data / "ud_english_ewt/train.jsonl.gz"):
        if "PROPN" not in row["tags"] and not _capitals(row["tokens"]):
            found["ud_english_ewt"].append(row["tokens"])
    for name, sentences in found.items():
        sentences = [words for words in sentences if 4 <= len(words) <= 60]
        for words in draw.sample(sentences, min(NEGATIVES[name], len(sentences))):
            yield {"tokens": words, "tags": ["O"] * len(words), "source": name}


def _capitals(words: Iterable[str]) -> bool:
    """Whether a word after the first, such as Boston, is capitalized and otherwise in lower case."""
    return any(re.fullmatch(r"[A-Z][a-z]{2,}", word) for word in list(words)[1:])


def _silver(data: Path, passages: Sequence[WikiPassage], model: NamedEntityModel, draw: random.Random) -> list[Row]:
    """Sentences of Wikipedia and of a treebank, labelled by another model."""
    chosen = draw.sample(passages, min(LABELLED, len(passages)))  # more than enough
    sentences = [WORD.findall(sentence) for passage in chosen for sentence in islice(split(passage.text), 2)]
    treebank = read_if_any(data / "ud_english_ewt/train.jsonl.gz")
    sentences += [row["tokens"] for row in treebank if "PROPN" in row["tags"]]
    usable = [words for words in sentences if 6 <= len(words) <= 35]
    usable = sorted(draw.sample(usable, min(LABELLED, len(usable))), key=len)  # of similar length, which is faster
    rows = list(silver(usable, model))
    return [rows[place] for place in sorted(draw.sample(range(len(rows)), min(SILVER, len(rows))))]


def _unlabelled(passages: Sequence[WikiPassage]) -> Iterator[Row]:
    """Sentences that seem to have a name."""
    for passage in passages:
        for sentence in split(passage.text):
            words = WORD.findall(sentence)
            if 5 <= len(words) <= 40 and _capitals(words):
                yield {"tokens": words}


def with_title(row: Row, draw: random.Random) -> Row:
    """The row with a title, which is no part of the name, before a person in running text."""
    tokens, tags = row["tokens"], row["tags"]
    starts = [place for place, tag in enumerate(tags) if tag == "B-PER"]
    if not starts or "O" not in tags or len(tokens) < 5 or tokens[max(starts[0] - 1, 0)].rstrip(".") in TITLES:
        return row
    start = draw.choice(starts)
    end = next((place for place in range(start + 1, len(tags)) if tags[place] != "I-PER"), len(tags))
    name = tokens[start:end][-1:] if draw.random() < 0.6 else tokens[start:end]
    title = draw.choice(TITLES)
    dotted = [title, "."] if draw.random() < 0.8 else [f"{title}."]
    before = dotted if len(title) < 5 and title != "Sir" else [title]
    new = ["B-PER", *["I-PER"] * (len(name) - 1)]
    return row | {
        "tokens": [*tokens[:start], *before, *name, *tokens[end:]],
        "tags": [*tags[:start], *["O"] * len(before), *new, *tags[end:]],
    }
