"""Documents in the order in which they answer a query, by a cross-encoder that reads both together.

A document beyond reach is read in windows with the query in each, and is worth its best window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from bertie.errors import InputError
from bertie.hub import Checkpoint
from bertie.sentence import CrossEncoderConfig
from bertie.tasks.base import Ask, FloatArray, Long, Task, at_least_one, listed, pair, reading
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class Scored:
    """How well a document answers a query."""

    score: float
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document and its score; `index` is its place in the list that was given."""

    index: int
    score: float
    text: str
    tokens_total: int
    tokens_read: int
    windows: int


class Reranker(Task[None, FloatArray, Scored]):
    """Scores documents against a query.

    >>> reranker = Reranker.load("cross-encoder/ms-marco-MiniLM-L6-v2")                                # doctest: +SKIP
    >>> reranker.rerank("What do cats eat?", ["Bread is baked.", "Cats eat meat."])[0].text            # doctest: +SKIP
    'Cats eat meat.'
    """

    head = "classify"

    def __init__(self, checkpoint: Checkpoint, *, long: Long = "window") -> None:
        super().__init__(checkpoint, long=long)
        labels = len(checkpoint.labels)
        if labels != 1:
            raise InputError(f"reranking needs a model with one score; {checkpoint.source} has {labels} labels")
        self.settings = checkpoint.cross_encoder or CrossEncoderConfig.fresh(1)
        self.activation = self.settings.module()

    def rerank(self, query: str, documents: Iterable[str], *, top_k: int | None = None) -> list[Ranked]:
        """The documents, best first; the first `top_k` of them if that is given."""
        at_least_one(top_k=top_k)
        checked_text(query, "the query")
        texts = [checked_text(text, f"document {i}") for i, text in enumerate(listed(documents, "rerank", "documents"))]
        scored = self.run(self._ask(f"document {i}", query, text) for i, text in enumerate(texts))
        ranked = [Ranked(i, text=texts[i], **asdict(one)) for i, one in enumerate(scored)]
        return sorted(ranked, key=lambda one: (-one.score, one.index))[:top_k]

    def score(self, pairs: Iterable[tuple[str, str]]) -> list[float]:
        """The score of each pair of query and document, in order."""
        return [one.score for one in self.score_each(pairs)]

    def score_each(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Scored]:
        """As `score`, one by one, each with how much of its texts was read."""
        named = ((texts, f"pair {i}") for i, texts in enumerate(listed(pairs, "score", "pairs")))
        return self.run(self._ask(name, *pair(texts, name, "a query and a document")) for texts, name in named)

    def _ask(self, name: str, query: str, document: str) -> Ask[None]:
        """A pair as the checkpoint wants it: its prompt goes before the query."""
        settings = self.settings
        query = settings.prompts.get(settings.default_prompt or "", "") + query
        texts = (query, document)
        return Ask(name, tuple(text.lower() for text in texts) if settings.lower_case else texts, None)

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[Ask[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(1,) score of each window."""
        scores: Tensor = self.activation(self.rows(hidden, batch))
        return self.by_text(scores)

    def decode(self, ask: Ask[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Scored:
        """The best window."""
        return Scored(max(float(output[0]) for output in outputs), **reading(found))
