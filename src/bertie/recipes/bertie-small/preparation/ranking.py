"""Queries with relevant and irrelevant passages: candidates as a first stage of search finds them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from preparation.files import SEED, Named, Row, key
from preparation.functions import Function
from preparation.queries import function_query, plain_title, section_query, title_query
from preparation.questions import articles, has_answer, negatives, question_sets, sample_questions
from preparation.text import KeywordQueries, Pool, shorten, split
from preparation.wikipedia import WikiPassage

PARAGRAPHS, DEV_QUESTIONS = 3_000, 1_500  # of SQuAD, searched; and questions of its dev split
SQUAD_QUESTIONS, SENTENCE_QUESTIONS = 9_000, 5_000  # about these paragraphs, with paragraphs and with sentences
TYDI_SENTENCES = 1_500  # questions of TyDi QA with sentences
PASSAGES, FUNCTIONS = 3_500, 4_000  # of Wikipedia and of packages, with queries
FOUND, OTHERS = 3, 1  # negatives found by BM25, and random ones
BELOW = 0.9  # fraction of the relevant passage's BM25 score above which a passage may be relevant too
BARE = 0.5  # fraction of questions without a question mark, as users type them
WORDS = 120  # of a passage of Wikipedia


class Pair(NamedTuple):
    """A query and the passage that it asks for."""

    query: str
    passage: str
    wrong: Callable[[str], bool]  # whether another passage is surely irrelevant


def ranking(data: Path, passages: Sequence[WikiPassage], functions: Sequence[Function], seen: set[str]) -> Named:
    """Questions, titles, keywords and docstrings; one relevant passage and several irrelevant ones for each.

    Rows are ordered by passage, sentences after their paragraph, which compresses well.
    """
    draw = random.Random(SEED)
    squad, tydi, dev = question_sets(data)
    contexts = list(dict.fromkeys(row["context"] for row in squad))
    chosen = set(draw.sample(contexts, min(PARAGRAPHS, len(contexts))))
    some = [row for row in squad if row["context"] in chosen]
    rows = [
        *ranked(questions(some, SQUAD_QUESTIONS, draw), [*contexts_of(some), *contexts_of(tydi)], draw),
        *ranked(questions(tydi, len(tydi), draw), [*contexts_of(some), *contexts_of(tydi)], draw),
        *sentence_pairs(some, SENTENCE_QUESTIONS, seen),
        *sentence_pairs(tydi, TYDI_SENTENCES, seen, same=0),
        *_ranked_passages(passages, draw),
        *_ranked_functions(functions, draw),
    ]
    places: dict[str, int] = {}
    for place, row in enumerate(rows):
        for text in (row["passage"], *split(row["passage"])):
            places.setdefault(text, place)
    yield "rerank.train", sorted(rows, key=lambda row: places[row["passage"]])
    yield "rerank.dev", list(ranked(questions(dev, DEV_QUESTIONS, draw), contexts_of(dev), draw))


def contexts_of(rows: Iterable[Row]) -> list[str]:
    """The distinct paragraphs of questions."""
    return list(dict.fromkeys(row["context"] for row in rows))


def ranked(pairs: Iterable[Pair], passages: Iterable[str], draw: random.Random, below: float = 1.0) -> Iterator[Row]:
    """Queries with their own passage, those that BM25 finds besides it, and random ones."""
    pool = Pool(passages)
    for pair in pairs:
        found = [text for text in pool.candidates(pair.query, pair.passage, 3 * FOUND, below) if pair.wrong(text)]
        others = [text for text in draw.sample(pool.passages, min(8, len(pool.passages))) if pair.wrong(text)]
        usable = [text for text in others if text != pair.passage and text not in found[:FOUND]]
        yield {"query": pair.query, "passage": pair.passage, "label": 1}
        for passage in [*found[:FOUND], *usable[:OTHERS]]:
            yield {"query": pair.query, "passage": passage, "label": 0}


def questions(rows: list[Row], count: int, draw: random.Random) -> Iterator[Pair]:
    """Questions with the paragraph of their answer; others that contain the answer may be relevant."""
    for row in sample_questions(rows, count, draw):
        query = row["question"].rstrip("? ") if draw.random() < BARE / 2 else row["question"]
        yield Pair(query, row["context"], lambda passage, row=row: not has_answer(passage, row))


def _ranked_passages(passages: Sequence[WikiPassage], draw: random.Random) -> Iterator[Row]:
    """Titles and sections with paragraphs of the article, and keywords with the paragraph they are from."""
    chosen = draw.sample(passages, min(PASSAGES, len(passages)))
    texts = {passage: shorten(passage.text, WORDS) for passage in chosen}
    titles = {text: passage.title for passage, text in texts.items()}
    keywords = KeywordQueries(texts.values(), draw)
    pairs = []
    for passage, text in texts.items():
        own = plain_title(passage.title).casefold()

        def wrong(other: str, own: str = own, title: str = passage.title) -> bool:
            return titles[other] != title and own not in other.casefold()

        queries = (_about(passage, draw), keywords.of(text))
        pairs += [Pair(query, text, wrong) for query in queries if query]
    return ranked(pairs, texts.values(), draw, BELOW)


def _about(passage: WikiPassage, draw: random.Random) -> str:
    if passage.first:
        return plain_title(passage.title) if draw.random() < 0.3 else title_query(passage, draw)
    return section_query(passage, draw)


def _ranked_functions(functions: Sequence[Function], draw: random.Random) -> Iterator[Row]:
    """Queries with functions; those of the same name may be relevant too."""
    chosen = draw.sample(functions, min(FUNCTIONS, len(functions)))
    names = {function.source: function.name.strip("_") for function in chosen}
    pairs = [
        Pair(
            function_query(function, draw),
            function.source,
            lambda other, name=names[function.source]: names[other] != name,
        )
        for function in chosen
    ]
    return ranked(pairs, names, draw, BELOW)


def sentence_pairs(
    rows: list[Row], count: int, seen: set[str], beside: int = 3, same: int = 1, other: int = 1
) -> Iterator[Row]:
    """Questions with the sentence of the answer, and negatives next to it, from its article and from any.

    Evaluation texts are excluded, and so are sentences of under 4 or over 80 words.
    """
    draw = random.Random(SEED)
    by_article = articles(rows)
    parts = {
        context: [text for text in split(context) if 4 <= len(text.split()) <= 80 and key(text) not in seen]
        for contexts in by_article.values()
        for context in contexts
    }
    of_article = {title: [text for context in texts for text in parts[context]] for title, texts in by_article.items()}
    everything = [text for sentences in of_article.values() for text in sentences]
    for row in sample_questions(rows, count, draw):
        right = _sentence_at(row["context"], row["answers"][0]["answer_start"])
        if right not in parts[row["context"]]:
            continue
        query = row["question"].rstrip("? ") if draw.random() < BARE else row["question"]
        yield {"query": query, "passage": right, "label": 1}
        pools = ((parts[row["context"]], beside), (of_article[row["title"]], same), (everything, other))
        yield from ({"query": query, "passage": passage, "label": 0} for passage in negatives(row, pools, draw))


def _sentence_at(text: str, place: int) -> str:
    """The sentence that contains a character position."""
    start = 0
    for sentence in split(text):
        start = text.index(sentence, start) + len(sentence)
        if place < start:
            return sentence
    return ""
