"""Parse responses into the results of the local task objects."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertie.pipeline.read_counts import READ_COUNTS

if TYPE_CHECKING:
    from bertie.search.ask import AskResult
    from bertie.search.index import SearchHit, SearchResults
    from bertie.tasks.results import (
        AnswerResult,
        AttributionResult,
        ClassificationResult,
        EmbeddingResult,
        FillMaskResult,
        RankedDocument,
        TaggingResult,
        TokenPredictionResult,
        ZeroShotResult,
    )

Vectors = NDArray[np.float32]


def _parse_vector(item: Any) -> Vectors:
    """Decode base64, which takes a third of the bytes of numbers in JSON."""
    return np.frombuffer(base64.b64decode(item["embedding"]), dtype="<f4").astype(np.float32, copy=False)


def read_counts(item: Any) -> dict[str, int]:
    """How much of a text was read."""
    return {name: item[name] for name in READ_COUNTS}


def parse_vectors(response: Any) -> list[Vectors]:
    """Parse the response of `embed`."""
    return [_parse_vector(item) for item in response["data"]]


def parse_embeddings(response: Any) -> list[EmbeddingResult]:
    """Parse the response of `embed_each`."""
    from bertie.tasks.results import EmbeddingResult

    return [EmbeddingResult(_parse_vector(item), **read_counts(item)) for item in response["data"]]


def parse_classifications(response: Any) -> list[ClassificationResult]:
    """Parse the response of `classify`."""
    from bertie.tasks.results import ClassificationResult

    return [ClassificationResult(**item) for item in response["results"]]


def parse_zero_shot(response: Any) -> list[ZeroShotResult]:
    """Parse the response of `zero_shot`."""
    from bertie.tasks.results import ZeroShotResult

    return [
        ZeroShotResult(item["label"], item["score"], item["scores"], **read_counts(item))
        for item in response["results"]
    ]


def parse_tags(response: Any) -> list[TaggingResult]:
    """Parse the response of `tag`."""
    from bertie.tasks.results import TaggedSpan, TaggingResult

    return [
        TaggingResult(tuple(TaggedSpan(**span) for span in item["spans"]), **read_counts(item))
        for item in response["results"]
    ]


def parse_answers(response: Any) -> list[AnswerResult]:
    """Parse the response of `answer`."""
    from bertie.tasks.results import AnswerResult, AnswerSpan

    return [
        AnswerResult(
            tuple(AnswerSpan(**answer) for answer in item["answers"]),
            item["no_answer_score"],
            item["no_answer_logit"],
            **read_counts(item),
        )
        for item in response["results"]
    ]


def parse_masks(response: Any) -> list[FillMaskResult]:
    """Parse the response of `fill`."""
    from bertie.tasks.results import FillMaskResult, MaskPrediction, TokenCandidate

    return [
        FillMaskResult(
            tuple(
                MaskPrediction(
                    mask["start"], mask["end"], tuple(TokenCandidate(**candidate) for candidate in mask["candidates"])
                )
                for mask in item["masks"]
            ),
            **read_counts(item),
        )
        for item in response["results"]
    ]


def parse_scores(response: Any) -> list[tuple[float, dict[str, int]]]:
    """Parse the response of `rerank`: scores in the order of the documents."""
    items = sorted(response["results"], key=lambda item: item["index"])
    return [(item["relevance_score"], read_counts(item)) for item in items]


def rank_documents(
    scores: Iterable[tuple[float, dict[str, int]]], texts: Sequence[str], top_k: int | None
) -> list[RankedDocument]:
    """Sort documents by their scores, best first."""
    from bertie.tasks.results import RankedDocument

    documents = [RankedDocument(i, score, texts[i], **counts) for i, (score, counts) in enumerate(scores)]
    return sorted(documents, key=lambda document: (-document.score, document.index))[:top_k]


def parse_attribution(response: Any) -> list[AttributionResult]:
    """Parse the response of `attribute`, the result of one text."""
    from bertie.tasks.results import AttributedPiece, AttributionResult

    pieces = tuple(AttributedPiece(**piece) for piece in response["pieces"])
    return [AttributionResult(response["label"], response["score"], pieces, **read_counts(response))]


def parse_token_predictions(response: Any) -> list[TokenPredictionResult]:
    """Parse the response of `predict_tokens`, the result of one text."""
    from bertie.tasks.results import TokenCandidate, TokenPrediction, TokenPredictionResult

    tokens = tuple(
        TokenPrediction(**token | {"candidates": tuple(TokenCandidate(**item) for item in token["candidates"])})
        for token in response["tokens"]
    )
    return [TokenPredictionResult(tokens, response["log_likelihood"], **read_counts(response))]


def parse_asked(response: Any) -> list[AskResult]:
    """Parse the response of `ask`."""
    from bertie.search.ask import AskResult, FoundAnswer

    results = []
    for item in response["results"]:
        hits = [_parse_hit(answer["passage"]) for answer in item["answers"]]
        answers = tuple(
            FoundAnswer(**answer | {"passage": hit, "source": None})
            for answer, hit in zip(item["answers"], hits, strict=True)
        )
        passages = tuple({(hit.document, hit.start, hit.end): hit for hit in hits}.values())
        counts = read_counts(item)
        results.append(
            AskResult(item["question"], answers, item["no_answer_score"], passages, item["timings"], **counts)
        )
    return results


def parse_search(response: Any) -> list[SearchResults]:
    """Parse the response of `search`."""
    from bertie.search.index import SearchResults

    return [
        SearchResults(item["query"], tuple(_parse_hit(hit) for hit in item["hits"]), item["timings"])
        for item in response["results"]
    ]


def _parse_hit(hit: Any) -> SearchHit:
    from bertie.search.index import SearchHit

    fields = {
        "headings": tuple(hit["headings"]),
        "highlights": tuple((start, end) for start, end in hit["highlights"]),
        "source": None,  # the server does not disclose paths
    }
    return SearchHit(**hit | fields)


def parse_similarity(response: Any, rows: int | None, single: tuple[bool, bool] = (False, False)) -> Any:
    """Parse the response of `similarity`: (N + M, N + M) -> (N, M) for N rows, or the whole matrix.

    `single`: whether the rows and the columns are a single text each, which has no axis.
    """
    matrix = np.array(response["similarity"], dtype=np.float32)
    if rows is None:
        return matrix
    found = np.ascontiguousarray(matrix[:rows, rows:])
    if all(single):
        return float(found[0, 0])
    return found[0] if single[0] else found[:, 0] if single[1] else found
