"""Documents in the order in which they answer a query, by a cross-encoder that reads both together.

A document beyond max_length is read in windows with the query in each, and is worth its best window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.config import HeadInfo
from bertie.tasks.base import FloatArray, TaskInput, at_least_one, listed, pair, reading
from bertie.tasks.learn import Learner, Predictions, counted, pieces
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text
from bertie.text.windows import Window

if TYPE_CHECKING:
    from bertie.evaluation.scores import Score
    from bertie.training.finetune.data import Example, Labelled
    from bertie.training.objectives import Objective, TrainingExample


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


class Reranker(Learner[None, FloatArray, Scored]):
    """Scores documents against a query.

    >>> reranker = Reranker.load("cross-encoder/ms-marco-MiniLM-L6-v2")                                # doctest: +SKIP
    >>> reranker.rerank("What do cats eat?", ["Bread is baked.", "Cats eat meat."])[0].text            # doctest: +SKIP
    'Cats eat meat.'

    Or trains one, on pairs of query and passage, 1 where the passage answers and 0 where it does not:

    >>> reranker = Reranker("path/to/any/encoder").fit(pairs, labels)                                  # doctest: +SKIP
    """

    kind = "classify"
    needs = "a head with one score"
    data_kind = "rerank"

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and len(info.labels) == 1 and info.task in (None, "rerank")

    @property
    def settings(self) -> CrossEncoderConfig:
        """What the checkpoint says of its scores and of how pairs are prepared."""
        return self.checkpoint.cross_encoder or CrossEncoderConfig.fresh(1)

    def rerank(self, query: str, documents: Iterable[str], *, top_k: int | None = None) -> list[Ranked]:
        """The documents, best first; the first `top_k` of them if that is given."""
        at_least_one(top_k=top_k)
        checked_text(query, "the query")
        texts = [checked_text(text, f"document {i}") for i, text in enumerate(listed(documents, "rerank", "documents"))]
        scored = self.run(self._ask(f"document {i}", query, text) for i, text in enumerate(texts))
        ranked = [Ranked(i, text=texts[i], **asdict(one)) for i, one in enumerate(scored)]
        return sorted(ranked, key=lambda one: (-one.score, one.index))[:top_k]

    def predict(self, X: Iterable[tuple[str, str]]) -> NDArray[np.float32]:
        """(n,) the score of each pair of query and document."""
        return np.array([one.score for one in self.predict_each(X)], dtype=np.float32)

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[Scored]:
        """As `predict`, one by one, each with how much of its texts was read."""
        named = ((texts, f"pair {i}") for i, texts in enumerate(listed(X, "predict", "pairs")))
        return self.run(self._ask(name, *pair(texts, name, "a query and a document")) for texts, name in named)

    def _ask(self, name: str, query: str, document: str) -> TaskInput[None]:
        """A pair as the checkpoint wants it: its prompt goes before the query."""
        settings = self.settings
        query = settings.prompts.get(settings.default_prompt or "", "") + query
        texts = (query, document)
        return TaskInput(name, tuple(text.lower() for text in texts) if settings.lower_case else texts, None)

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[None]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(1,) score of each window."""
        scores: Tensor = self.settings.module()(self.rows(hidden, batch))
        return self.by_text(scores)

    def decode(self, ask: TaskInput[None], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Scored:
        """The best window."""
        return Scored(max(float(output[0]) for output in outputs), **reading(found))

    # --- training ---

    def head_for(self, data: Labelled) -> HeadInfo:
        """One output."""
        return HeadInfo("classify", {0: "LABEL_0"}, task="rerank")

    def _headed(self, checkpoint: Checkpoint, info: HeadInfo) -> Checkpoint:
        settings = checkpoint.cross_encoder
        made = super()._headed(checkpoint, info)
        made.cross_encoder = settings or CrossEncoderConfig.fresh(1)
        return made

    def objective(self, data: Labelled) -> Objective:
        """Cross-entropy of being relevant, of the best window."""
        from bertie.training.objectives import RelevanceObjective

        right = sum(float(example.target) for example in data.examples)
        balanced = self.recipe.class_weights == "balanced"
        self._weight = (len(data.examples) - right) / right if balanced and right else 1.0
        return RelevanceObjective()

    def item(self, example: Example, found: Sequence[Window]) -> TrainingExample:
        """The label is that of the whole passage."""
        from bertie.training.objectives import TrainingExample

        weight = 1.0 + (self._weight - 1.0) * float(example.target)
        return TrainingExample(pieces(found), np.array(example.target, dtype=np.float32), weight)

    def _texts(self, example: Example) -> tuple[str, ...]:
        return self._ask("", example.texts[0], example.texts[1]).texts

    def predict_labelled(self, data: Labelled) -> Predictions:
        """Predict labelled data."""
        found = list(self.predict_each([(example.texts[0], example.texts[1]) for example in data.examples]))
        gold = [float(example.target) for example in data.examples]
        return Predictions("rerank", data, gold, [one.score for one in found], None, None, *counted(found))

    def scores(self, predictions: Predictions, draws: int = 1000) -> dict[str, Score]:
        """How high relevant passages are ranked, over queries."""
        from bertie.evaluation import scores

        queries = [example.texts[0] for example in predictions.data.examples]
        return scores.ranking(queries, np.array(predictions.gold), np.array(predictions.predicted), draws=draws)
