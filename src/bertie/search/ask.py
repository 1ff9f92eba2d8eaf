"""Answer questions from an index: retrieve passages, rerank them, and read the best ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertie.errors import InputError
from bertie.pipeline.language_warnings import no_warning
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.search.searcher import SearchHit, SearchResults
from bertie.tasks.display import Displayed

if TYPE_CHECKING:
    from bertie.search.index import Index
    from bertie.tasks.answer import Reader

DEFAULT_PASSAGES = 5  # passages read per question


@dataclass(frozen=True, slots=True, repr=False)
class FoundAnswer(Displayed):
    """An answer and its location: characters `start` to `end` of a document."""

    text: str
    score: float  # its probability among the best spans and "no answer"
    document: str  # document id
    start: int
    end: int
    source: str | None  # path of the file that the document was read from
    passage: SearchHit  # the passage that contains the answer


@dataclass(frozen=True, slots=True, repr=False)
class AskResult(Displayed):
    """The answers to a question, best first; empty if the probability of "no answer" exceeds the threshold."""

    question: str
    answers: tuple[FoundAnswer, ...]
    no_answer_score: float  # the probability of "no answer"
    passages: tuple[SearchHit, ...]  # the passages read, best first
    timings: Mapping[str, float]  # seconds per stage
    tokens_total: int  # in the passages
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0

    @property
    def has_answer(self) -> bool:
        """Whether any answer was found."""
        return bool(self.answers)

    @property
    def best(self) -> FoundAnswer | None:
        """The best answer; None if there is none."""
        return self.answers[0] if self.answers else None


def default_reader(index: Index) -> Reader:
    """Return the question answering head of the index's model, or that of the built-in model if it has none."""
    from bertie.tasks.answer import Reader

    checkpoint = index.embedder.checkpoint
    has_head = any(info.kind == Reader.kind for info in checkpoint.heads.values())
    return Reader(checkpoint) if has_head else Reader.load()


def read_passages(
    results: SearchResults, reader: Reader, *, top_k: int = 1, no_answer_threshold: float | None = None
) -> AskResult:
    """Answer a query from its retrieved passages."""
    if top_k < 1:
        raise InputError(f"top_k={top_k} must be at least 1")
    hits = results.hits
    if not hits:  # nothing to read
        return AskResult(results.query, (), 1.0, (), results.timings, 0, 0, 0)
    begin = time.perf_counter()
    # Neighbouring passages overlap, so the same span may be found twice.
    options: dict[str, Any] = {"top_k": 2 * top_k if top_k > 1 else 1, "no_answer_threshold": no_answer_threshold}
    with no_warning():  # unknown tokens were reported when the passages were indexed
        result = reader.answer(results.query, [hit.text for hit in hits], progress=False, **options)
    answers: dict[tuple[str, int, int], FoundAnswer] = {}
    for span in result.answers if result.has_answer else ():
        assert span.document is not None
        assert span.start is not None
        assert span.end is not None
        hit = hits[span.document]
        start, end = hit.start + span.start, hit.start + span.end
        answer = FoundAnswer(span.text, span.score, hit.document, start, end, hit.source, hit)
        answers.setdefault((hit.document, start, end), answer)
    timings = {**results.timings, "read": time.perf_counter() - begin}
    counts = {name: getattr(result, name) for name in READ_COUNTS}
    return AskResult(results.query, tuple(answers.values())[:top_k], result.no_answer_score, hits, timings, **counts)
