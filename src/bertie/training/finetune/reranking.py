"""Training and evaluation of reranking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.config import HeadInfo
from bertie.evaluation import metrics
from bertie.evaluation.metrics import Score
from bertie.tasks.rerank import Reranker
from bertie.text.windows import Window
from bertie.training.finetune.base import Predictions, TaskTraining, pieces, token_counts
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import Objective, RelevanceObjective, TrainingExample


class RerankingTraining(TaskTraining[Reranker]):
    """Reranking: the relevance of a passage to a query."""

    data_kind = "rerank"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """One output."""
        return HeadInfo("classify", {0: "LABEL_0"}, task="rerank")

    def prepare(self, checkpoint: Checkpoint, data: LabelledDataset) -> Checkpoint:
        """A cross-encoder with one output, which keeps the settings of the checkpoint if it was one."""
        settings = checkpoint.cross_encoder
        prepared = super().prepare(checkpoint, data)
        prepared.cross_encoder = settings or CrossEncoderConfig.create(1)
        return prepared

    def objective(self, data: LabelledDataset) -> Objective:
        """Binary cross-entropy of the best window."""
        relevant = sum(float(example.target) for example in data.examples)
        balanced = self.recipe.class_weights == "balanced"
        self._positive_weight = (len(data.examples) - relevant) / relevant if balanced and relevant else 1.0
        return RelevanceObjective()

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """The label belongs to the whole passage."""
        weight = 1.0 + (self._positive_weight - 1.0) * float(example.target)
        return TrainingExample(pieces(windows), np.array(example.target, dtype=np.float32), weight)

    def texts(self, example: Example) -> tuple[str, ...]:
        """The pair with the checkpoint's prompt."""
        return self.task.prepare_pair("", example.texts[0], example.texts[1]).texts

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Score labelled pairs."""
        results = list(self.task.predict_each([(example.texts[0], example.texts[1]) for example in data.examples]))
        gold = [float(example.target) for example in data.examples]
        predicted = [result.score for result in results]
        return Predictions("rerank", data, gold, predicted, None, None, *token_counts(results))

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Ranking metrics, averaged over queries."""
        queries = [example.texts[0] for example in predictions.data.examples]
        return metrics.ranking(
            queries, np.array(predictions.gold), np.array(predictions.predicted), resamples=resamples
        )
