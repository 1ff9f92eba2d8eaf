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

VARIED_LENGTHS = 0.7  # standard deviation of the logarithm of documents' lengths: about a factor of 2


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
        """Fit the temperature at which the probability of an answer is the chance that it matches exactly.

        If some questions have no answer, fit the probability of "no answer" and its threshold, too.
        """
        results = self._always_answered(dev, top_k=N_BEST)
        unanswerable = np.array([not _has_gold(example) for example in dev.examples])
        some = 0 < int(unanswerable.sum()) < len(unanswerable)
        logits, correct = [], []
        for example, result in zip(dev.examples, results, strict=True):
            if not result.has_answer or (some and not _has_gold(example)):
                continue
            others = [] if some else [result.no_answer_logit]
            logits.append([*(span.logit for span in result.answers), *others])
            correct.append(_exact(example, result.best.text))
        temperature = calibration.temperature_of_predictions(logits, correct) if logits else 1.0
        values = Calibration(temperature)
        if some:
            values = replace(values, **self._fit_no_answer(dev, results, unanswerable))
        self.task.checkpoint.set_calibration(str(self.task.head), values)

    def _fit_no_answer(
        self, dev: LabelledDataset, results: Sequence[AnswerResult], unanswerable: NDArray[np.bool_]
    ) -> dict[str, float]:
        """The fields of the calibration for "no answer": Platt scaling, and the threshold with the best F1."""
        margins = [result.no_answer_logit - result.best.logit for result in results]
        lengths = np.log([max(result.tokens_read, 1) for result in results])
        if lengths.std() < VARIED_LENGTHS:  # otherwise the fit would extrapolate
            lengths = np.zeros_like(lengths)
        values = np.stack([margins, lengths], axis=1)
        (scale, length), bias = calibration.platt(values, unanswerable)
        probabilities = 1 / (1 + np.exp(-np.clip(values @ [scale, length] + bias, -500, 500)))
        f1 = [  # a span without words, such as ".", is no right answer to an unanswerable question
            0.0 if none else metrics.answering([example.answers], [result.best.text], resamples=0)["f1"].value
            for example, result, none in zip(dev.examples, results, unanswerable, strict=True)
        ]
        threshold = calibration.no_answer_threshold(probabilities, f1, unanswerable)
        return {
            "no_answer_scale": scale,
            "no_answer_bias": bias,
            "no_answer_length": length,
            "no_answer_threshold": threshold,
        }

    def _always_answered(self, data: LabelledDataset, top_k: int = 1) -> list[AnswerResult]:
        questions = [(example.texts[0], example.texts[1]) for example in data.examples]
        return self.task.answer(questions, top_k=top_k, no_answer_threshold=1.0)

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Answer labelled questions; where some have no answer, the model may say so.

        It does above its threshold for "no answer"; while it has none, if "no answer" has the higher logit.
        """
        results, threshold = self._always_answered(data), self.task.info.calibration.no_answer_threshold
        gold = [example.answers for example in data.examples]
        predicted = [result.best.text for result in results]
        none = np.array([result.no_answer_score for result in results], dtype=np.float32)
        if not all(map(_has_gold, data.examples)):
            for i, result in enumerate(results):
                margin = result.no_answer_logit - result.best.logit
                if margin > 0 if threshold is None else result.no_answer_score > threshold:
                    predicted[i] = ""
        return Predictions("answer", data, gold, predicted, None, None, *token_counts(results), none)

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Exact match and F1 of words, as SQuAD defines them; where some questions have no answer, also SQuAD 2's."""
        scores = metrics.answering(predictions.gold, predictions.predicted, resamples=resamples)
        answerable = sum(map(_has_gold, predictions.data.examples))
        if 0 < answerable < len(predictions.gold):
            assert predictions.no_answer is not None
            arguments = (predictions.gold, predictions.predicted, predictions.no_answer)
            scores |= metrics.answerability(*arguments, resamples=resamples)
        return scores


def _has_gold(example: Example) -> bool:
    return any(map(normalize_answer, example.answers))


def _exact(example: Example, answer: str) -> bool:
    """Whether an answer matches one of the gold answers exactly, as SQuAD compares them."""
    gold = [words for words in map(normalize_answer, example.answers) if words] or [[]]
    return normalize_answer(answer) in gold


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
