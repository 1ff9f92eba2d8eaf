"""What a server says, as the results of the local objects."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bertie.search.index import SearchResults
    from bertie.tasks.answer import Answers
    from bertie.tasks.classify import Classification, ZeroShotClassification
    from bertie.tasks.embed import Embedding
    from bertie.tasks.fill_mask import Filled
    from bertie.tasks.rerank import Ranked
    from bertie.tasks.tag import Tagged

Vectors = NDArray[np.float32]


def vector(item: Any) -> Vectors:
    """Of base64, which is a third of the length of numbers in JSON."""
    return np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4").astype(np.float32, copy=False)


def reading(item: Any) -> dict[str, int]:
    """How much of a text was read."""
    return {name: item[name] for name in ("tokens_total", "tokens_read", "windows")}


def vectors(reply: Any) -> list[Vectors]:
    """Of `embed`."""
    return [vector(item) for item in reply["data"]]


def embeddings(reply: Any) -> list[Embedding]:
    """Of `embed_each`."""
    from bertie.tasks.embed import Embedding

    return [Embedding(vector(item), **reading(item)) for item in reply["data"]]


def classifications(reply: Any) -> list[Classification]:
    """Of `classify`."""
    from bertie.tasks.classify import Classification

    return [Classification(**item) for item in reply["results"]]


def zero_shot(reply: Any) -> list[ZeroShotClassification]:
    """Of `zero_shot`."""
    from bertie.tasks.classify import ZeroShotClassification

    return [
        ZeroShotClassification(item["label"], item["score"], item["scores"], **reading(item))
        for item in reply["results"]
    ]


def tagged(reply: Any) -> list[Tagged]:
    """Of `tag`."""
    from bertie.tasks.tag import Span, Tagged

    return [Tagged(tuple(Span(**span) for span in item["spans"]), **reading(item)) for item in reply["results"]]


def answers(reply: Any) -> list[Answers]:
    """Of `answer`."""
    from bertie.tasks.answer import Answer, Answers

    return [
        Answers(tuple(Answer(**one) for one in item["answers"]), item["no_answer"], **reading(item))
        for item in reply["results"]
    ]


def filled(reply: Any) -> list[Filled]:
    """Of `fill`."""
    from bertie.tasks.fill_mask import Candidate, Filled, Mask

    return [
        Filled(
            tuple(
                Mask(mask["start"], mask["end"], tuple(Candidate(**one) for one in mask["candidates"]))
                for mask in item["masks"]
            ),
            **reading(item),
        )
        for item in reply["results"]
    ]


def scored(reply: Any) -> list[tuple[float, dict[str, int]]]:
    """Of `rerank`: scores in the order in which the documents were sent."""
    return [(one["relevance_score"], reading(one)) for one in sorted(reply["results"], key=lambda one: one["index"])]


def ranked(scored: Iterable[tuple[float, dict[str, int]]], texts: Sequence[str], top_k: int | None) -> list[Ranked]:
    """Of `rerank`: what is scored, best first."""
    from bertie.tasks.rerank import Ranked

    found = [Ranked(i, score, texts[i], **reading) for i, (score, reading) in enumerate(scored)]
    return sorted(found, key=lambda one: (-one.score, one.index))[:top_k]


def results(reply: Any) -> list[SearchResults]:
    """Of `search`."""
    from bertie.search.index import SearchHit, SearchResults

    return [
        SearchResults(
            one["query"],
            tuple(
                SearchHit(
                    **hit
                    | {
                        "headings": tuple(hit["headings"]),
                        "highlights": tuple((start, end) for start, end in hit["highlights"]),
                        "source": None,  # a server names no files
                    }
                )
                for hit in one["hits"]
            ),
            one["timings"],
        )
        for one in reply["results"]
    ]


def block(reply: Any, rows: int | None) -> Vectors:
    """Of `similarity`: (N + M, N + M) -> (N, M), of N rows; or all of it."""
    whole = np.array(reply["similarity"], dtype=np.float32)
    return whole if rows is None else np.ascontiguousarray(whole[:rows, rows:])
