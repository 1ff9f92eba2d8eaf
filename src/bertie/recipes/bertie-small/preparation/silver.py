"""Sentences whose names are labelled by another model, where it is sure and agrees with the capital letters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from preparation.files import Row

LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC", "B-MISC", "I-MISC")  # CoNLL's
SURE = 0.75  # probability that every word's label must have
WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
LOWER = set("of the and de la van von der du for in on al bin y e & - ' . ,".split())  # inside a name
TITLES = set(
    "mr mrs ms dr prof professor sir lord lady president king queen prince princess pope saint senator governor "
    "captain general colonel major judge justice minister chancellor emperor duke count bishop cardinal".split()
)
CAPITALS = TITLES | set(
    "january february march april may june july august september october november december monday tuesday wednesday "
    "thursday friday saturday sunday i".split()
)


class NamedEntityModel:
    """A token classifier in ONNX with CoNLL's labels: model.onnx and tokenizer.json in a folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_padding()
        self.session = import_module("onnxruntime").InferenceSession(str(folder / "model.onnx"))

    def label(self, sentences: Iterable[list[str]]) -> Iterator[tuple[list[str], list[str], list[float]]]:
        """The words of each sentence, their labels and the probabilities of these."""
        remaining = iter(sentences)
        while batch := list(islice(remaining, 64)):
            encodings = self.tokenizer.encode_batch(batch, is_pretokenized=True)
            inputs: dict[str, Any] = {
                "input_ids": np.array([one.ids for one in encodings]),
                "attention_mask": np.array([one.attention_mask for one in encodings]),
                "token_type_ids": np.array([one.type_ids for one in encodings]),
            }
            (logits,) = self.session.run(None, inputs)
            odds = np.exp(logits - logits.max(-1, keepdims=True))
            odds /= odds.sum(-1, keepdims=True)
            for words, encoding, row in zip(batch, encodings, odds, strict=True):
                first = {
                    word: place for place, word in reversed(list(enumerate(encoding.word_ids))) if word is not None
                }
                if len(first) == len(words):
                    places = [first[word] for word in range(len(words))]
                    yield words, [LABELS[k] for k in row[places].argmax(-1)], row[places].max(-1).tolist()


def silver(sentences: Iterable[list[str]], model: NamedEntityModel) -> Iterator[Row]:
    """Sentences with tags, as rows."""
    for words, labels, odds in model.label(sentences):
        tags = correct(words, labels)
        if min(odds) >= SURE and plausible(words, labels, tags):
            yield {"tokens": words, "tags": tags, "source": "silver"}


def correct(words: list[str], labels: list[str]) -> list[str]:
    """Tags from labels: without miscellaneous names, titles before a name, and punctuation at the ends of one.

    >>> correct("Dr . Smith met Bob .".split(), "B-PER I-PER I-PER O B-PER I-PER".split())
    ['O', 'O', 'B-PER', 'O', 'B-PER', 'O']
    """
    kinds = [label[2:] if label[2:] in ("PER", "ORG", "LOC") else "" for label in labels]
    begins = [
        label.startswith("B-") or kinds[place - 1 : place] != [kinds[place]] for place, label in enumerate(labels)
    ]
    tags, inside = [], False
    for place, (word, kind) in enumerate(zip(words, kinds, strict=True)):
        inside = inside and not begins[place]
        mark = not re.search(r"\w", word)
        last = place + 1 == len(words) or begins[place + 1] or not kinds[place + 1]
        title = kind == "PER" and word.lower().rstrip(".") in TITLES
        if not kind or (not inside and (mark or title)) or (mark and last):
            tags.append("O")
            if kind and place + 1 < len(words) and kinds[place + 1] == kind and not inside:
                begins[place + 1] = True
            continue
        tags.append(f"{'I' if inside else 'B'}-{kind}")
        inside = True
    return joined(words, tags)


def joined(words: list[str], tags: list[str]) -> list[str]:
    """Tags in which neighbouring names of a type are one, also with an initial and its full stop between them.

    >>> joined("A . J . Doe".split(), ["B-PER", "O", "B-PER", "O", "B-PER"])
    ['B-PER', 'I-PER', 'I-PER', 'I-PER', 'I-PER']
    """
    tags = list(tags)
    for place in range(1, len(tags)):
        if tags[place].startswith("B-"):
            kind, before = tags[place][2:], tags[place - 1]
            initial = kind == "PER" and place > 1 and re.fullmatch("[A-Z]", words[place - 2])
            if before[2:] == kind:
                tags[place] = f"I-{kind}"
            elif initial and words[place - 1] == "." and tags[place - 2][2:] == kind:
                tags[place - 1] = tags[place] = f"I-{kind}"
    return tags


def plausible(words: list[str], labels: list[str], tags: list[str]) -> bool:
    """Whether names, and nothing else but the first word, begin with a capital letter."""
    for place, (word, label, tag) in enumerate(zip(words, labels, tags, strict=True)):
        capital = word[0].isupper()
        if tag != "O" and not capital and word.lower() not in LOWER:
            return False
        if (
            tag == "O"
            and capital
            and place
            and label == "O"
            and word.lower() not in CAPITALS
            and words[place - 1] not in '."“'
        ):
            return False
    return any(tag != "O" for tag in tags)
