"""Samples of the pretraining text: titles, sentences, and passages with their title, section and topic."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from bertie.training.pretrain.cleaning import title_key
from bertie.training.pretrain.corpus.documents import Documents, list_sources, read_titles
from preparation.files import SEED
from preparation.text import Sample, split
from preparation.topics import SCIENCES, find_topic

EXCLUDE = Path(__file__).parents[1] / "exclude.tsv"  # articles of WikiText-103's held-out splits, and similar ones
EVERY = 5  # every fifth document trains the tokenizer
SENTENCES, SCIENCE_SENTENCES, PASSAGES = 40_000, 30_000, 60_000
USED = 0.3  # fraction of the paragraphs from which these are drawn: splitting all of them takes minutes
BROKEN = re.compile(r"formula_|[<>{}|]|#if|\(\s*[,;)]|\s[,;](?=\s)|http|&\w+;")  # leftovers of markup and of templates


class WikiPassage(NamedTuple):
    """A paragraph of 30 to 200 words."""

    title: str
    section: str  # "" in the lead
    text: str
    topic: str  # "" if unknown
    first: bool  # the first paragraph of its article


class Wikipedia(NamedTuple):
    """Samples of the text."""

    titles: list[str]
    sentences: list[str]
    passages: list[WikiPassage]


def sample_wikipedia(text: Sequence[str]) -> Wikipedia:
    """Titles, sentences of 8 to 60 words, of which a part is about sciences, and passages."""
    draw = random.Random(SEED)
    titles: list[str] = []
    sentences, science = Sample[str](SENTENCES, draw), Sample[str](SCIENCE_SENTENCES, draw)
    passages, firsts = Sample[WikiPassage](PASSAGES, draw), Sample[WikiPassage](PASSAGES // 4, draw)
    for document in included_documents(text):
        title, *lines = document.split("\n")
        if len(title.split()) > 12 or not re.search("[a-z]", title):
            continue
        titles.append(title)
        topic, section, first = find_topic(next((line for line in lines if len(line) > 200), "")), "", True
        for line in lines:
            if len(line) < 80 and re.fullmatch(r"[A-Z0-9][^.!?]*\.", line):
                section = line[:-1] if len(line.split()) <= 5 else ""
            elif (first or draw.random() < USED) and not BROKEN.search(line):
                if 30 <= len(line.split()) <= 200:
                    (firsts if first else passages).take(WikiPassage(title, section, line, topic, first))
                    first = False
                for sentence in split(line):
                    if 8 <= len(sentence.split()) <= 60 and sentence[-1] in ".!?\"'”’":
                        (science if topic in SCIENCES else sentences).take(sentence)
    return Wikipedia(titles, [*sentences.kept, *science.kept], [*firsts.kept, *passages.kept])


def included_documents(text: Sequence[str]) -> Iterator[str]:
    """The documents that are not listed in `EXCLUDE`."""
    left_out = {title_key(title) for title in read_titles(str(EXCLUDE))}
    return (
        document
        for _, document in Documents(list_sources(text))
        if title_key(document.partition("\n")[0]) not in left_out
    )


def sample_documents(text: Sequence[str]) -> Iterator[str]:
    """Every fifth document of each file, to train the tokenizer."""
    return (document for file in list_sources(text) for document in islice(included_documents([file]), 0, None, EVERY))
