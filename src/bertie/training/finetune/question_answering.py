"""Training and evaluation of extractive question answering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bertie.config import Calibration, HeadInfo
from bertie.evaluation import calibration, metrics
from bertie.evaluation.metrics import Score
from bertie.evaluation.metrics.answers import normalize_answer
from bertie.tasks.answer import N_BEST, Reader
from bertie.tasks.results import AnswerResult
from bertie.text.windows import Window
from bertie.training.finetune.base import Predictions, TaskTraining, pieces, token_counts
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import AnswerSpanObjective, Objective, TrainingExample


class QuestionAnsweringTraining(TaskTraining[Reader]):
    """Extractive question answering: the start and the end of the answer."""

    data_kind = "answer"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """Two outputs per token: start and end."""
        return HeadInfo("answer")

    def objective(self, data: LabelledDataset) -> Objective:
        """Cross-entropy of the start and of the end."""
        return AnswerSpanObjective()

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """Each window points at the first answer, or at its own first token if it does not hold all of it."""
        weight = np.array(1.0, dtype=np.float32)
        return TrainingExample(
            tuple(
                replace(piece, values=_answer_tokens(window, example), weights=weight)
                for piece, window in zip(pieces(windows), windows, strict=True)
            )
        )

    def calibrate(self, dev: LabelledDataset) -> None:
        """Fit the temperature at which the probability of an answer is the chance that it matches exactly."""
        results = self._answers(dev, top_k=N_BEST)
        logits, correct = [], []
        for example, result in zip(dev.examples, results, strict=True):
            best, *others = [span.logit for span in result.answers]
            none = [] if result.best.start is None else [result.no_answer_logit]
            logits.append([best, *others, *none])
            gold = [words for words in map(normalize_answer, example.answers) if words] or [[]]
            correct.append(normalize_answer(result.best.text) in gold)
        temperature = calibration.temperature_of_predictions(logits, correct)
        self.task.checkpoint.set_calibration(str(self.task.head), Calibration(temperature))

    def _answers(self, data: LabelledDataset, top_k: int = 1) -> list[AnswerResult]:
        unanswerable = any(not example.target for example in data.examples)
        questions = [(example.texts[0], example.texts[1]) for example in data.examples]
        return self.task.answer(questions, top_k=top_k, threshold=0.0 if unanswerable else None)

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Answer labelled questions; where some have no answer, the model may say so."""
        results = self._answers(data)
        gold = [example.answers for example in data.examples]
        predicted = [result.best.text for result in results]
        return Predictions("answer", data, gold, predicted, None, None, *token_counts(results))

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Exact match and F1 of words, as SQuAD defines them."""
        return metrics.answering(predictions.gold, predictions.predicted, resamples=resamples)


def _answer_tokens(window: Window, example: Example) -> NDArray[np.int64]:
    """(2,) the first and the last token of the first answer in a window; (0, 0): it is not in it as a whole."""
    absent = np.zeros(2, dtype=np.int64)
    if not example.target:
        return absent
    start, end = example.target[0]
    encoding = window.encoding
    inside = np.flatnonzero(encoding.sequence_ids == 1)
    offsets = encoding.offsets[inside]
    if not len(inside) or start < offsets[0, 0] or end > offsets[-1, 1]:
        return absent
    tokens = inside[(offsets[:, 0] < end) & (offsets[:, 1] > start)]
    if not len(tokens):
        return absent
    return np.array([tokens[0], tokens[-1]], dtype=np.int64)
