"""Questions about paragraphs, with and without an answer in them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from preparation.files import SEED, Named, Row, key, read
from preparation.text import Pool

LONG_QUESTIONS, LONG_CHARACTERS = 6_000, (2_000, 7_500)  # questions with several paragraphs; length of these
SAME_ARTICLE, RETRIEVED, RANDOM = 14_000, 14_000, 8_000  # questions without an answer, by where the paragraph is from
LONG_RANDOM = 2_000  # questions with several paragraphs of another article
NO_ANSWER_DEV = 3_000


def answers(data: Path) -> Named:
    """SQuAD 1.1 and the English part of TyDi QA; some of SQuAD again, with longer contexts; and without an answer.

    Rows are ordered by paragraph, which compresses well.
    """
    squad, tydi, dev = question_sets(data)
    counts = (SAME_ARTICLE, RETRIEVED, RANDOM)
    unanswerable = [*without_answer(squad, counts), *without_answer(tydi, (0, len(tydi) // 4, len(tydi) // 8))]
    long = list(with_long_contexts(squad, LONG_QUESTIONS))
    unanswerable += exchanged(long, LONG_RANDOM)
    yield "qa.train", _by_paragraph([*squad, *tydi, *long, *unanswerable])
    yield "qa.dev", dev
    share = NO_ANSWER_DEV // 3
    mismatched = list(without_answer(dev, (share, share, share)))
    pairs = {row["id"].rpartition("-")[0] for row in mismatched}
    yield "qa.noanswer.dev", [*(row for row in dev if row["id"] in pairs), *mismatched]


def _by_paragraph(rows: list[Row]) -> list[Row]:
    """Rows in the order in which their contexts, or the first 100 characters of several paragraphs, first occur."""
    places: dict[str, int] = {}
    for row in rows:
        places.setdefault(row["context"][:100], len(places))
    return sorted(rows, key=lambda row: places[row["context"][:100]])


def question_sets(data: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """SQuAD train, TyDi QA and SQuAD dev, whose paragraphs are left out of the first two."""
    dev = list(_questions(data / "squad_v1/dev.jsonl.gz"))
    contexts = {key(row["context"]) for row in dev}
    squad, tydi = (
        [row for row in _questions(data / file) if key(row["context"]) not in contexts]
        for file in ("squad_v1/train.jsonl.gz", "tydiqa_goldp/train.en.jsonl.gz")
    )
    return squad, [row | {"id": f"tydi-{row['id']}"} for row in tydi], dev


def _questions(file: Path) -> Iterator[Row]:
    for row in read(file):
        for answer in row["answers"]:
            start, text = answer["answer_start"], answer["text"]
            if row["context"][start : start + len(text)] != text:
                raise SystemExit(f"{file}: the answer to {row['question']!r} is not at its answer_start")
        yield {name: row[name] for name in ("id", "title", "context", "question", "answers")}


def without_answer(rows: list[Row], counts: tuple[int, int, int]) -> Iterator[Row]:
    """Questions with a paragraph that does not have the answer.

    `counts` are the numbers of paragraphs of the same article, found by BM25 in any article, and random ones.
    """
    draw = random.Random(SEED)
    paragraphs = articles(rows)
    everything = [context for contexts in paragraphs.values() for context in contexts]
    pool = Pool(everything)
    sources = [source for source, count in zip(("same", "found", "random"), counts, strict=True) for _ in range(count)]
    draw.shuffle(sources)
    for row, source in zip(sample_questions(rows, len(sources), draw), sources, strict=False):
        if source == "same":
            candidates = draw.sample(paragraphs[row["title"]], min(8, len(paragraphs[row["title"]])))
        elif source == "found":
            candidates = pool.candidates(row["question"], row["context"], 5)
        else:
            candidates = draw.sample(everything, min(4, len(everything)))
        wrong = [passage for passage in candidates if passage != row["context"] and not has_answer(passage, row)]
        if wrong:
            yield row | {"id": f"{row['id']}-{source}", "context": wrong[0], "answers": []}


def exchanged(rows: list[Row], count: int) -> Iterator[Row]:
    """Questions with the context of another row, of another article."""
    draw = random.Random(SEED)
    contexts = draw.sample(rows, len(rows))
    for row, other in list(zip(rows, contexts, strict=True))[:count]:
        if row["title"] != other["title"] and not has_answer(other["context"], row):
            yield row | {"id": f"{row['id']}-random", "context": other["context"], "answers": []}


def has_answer(passage: str, row: Row) -> bool:
    """Whether a passage contains an answer of the row, and may therefore be relevant."""
    text = passage.casefold()
    return any(answer["text"].casefold() in text for answer in row["answers"])


def with_long_contexts(rows: list[Row], count: int) -> Iterator[Row]:
    """Questions with several consecutive paragraphs of their article, up to a number of characters."""
    draw = random.Random(SEED)
    by_article = articles(rows)
    for row in sample_questions(rows, count, draw):
        paragraphs, right = by_article[row["title"]], by_article[row["title"]].index(row["context"])
        first, last, room = right, right, draw.randint(*LONG_CHARACTERS) - len(row["context"])
        while room > 0 and (first > 0 or last < len(paragraphs) - 1):
            if last == len(paragraphs) - 1 or (first > 0 and draw.random() < 0.5):
                first -= 1
                room -= len(paragraphs[first])
            else:
                last += 1
                room -= len(paragraphs[last])
        before = "".join(f"{paragraph}\n\n" for paragraph in paragraphs[first:right])
        context = before + "\n\n".join(paragraphs[right : last + 1])
        moved = [answer | {"answer_start": answer["answer_start"] + len(before)} for answer in row["answers"]]
        yield row | {"id": f"{row['id']}-long", "context": context, "answers": moved}


def articles(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The distinct paragraphs of each article."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["title"], []).append(row["context"])
    return {title: list(dict.fromkeys(contexts)) for title, contexts in found.items()}


def sample_questions(rows: Iterable[Row], count: int, draw: random.Random) -> list[Row]:
    """A sample of rows with distinct questions; of duplicates the last counts."""
    by_question = {key(row["question"]): row for row in rows}
    return draw.sample(list(by_question.values()), min(count, len(by_question)))


def negatives(row: Row, pools: Iterable[tuple[Sequence[str], int]], draw: random.Random) -> list[str]:
    """Sample negatives from each pool, without passages that contain the answer."""
    found: list[str] = []
    for pool, count in pools:
        candidates = dict.fromkeys(draw.sample(pool, min(len(pool), 4 * count)))
        usable = [passage for passage in candidates if passage not in found and not has_answer(passage, row)]
        found += usable[:count]
    return found
