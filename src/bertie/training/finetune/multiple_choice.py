"""Training and evaluation of multiple choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bertie.config import Calibration, HeadInfo
from bertie.evaluation import calibration, metrics
from bertie.evaluation.metrics import Score
from bertie.pipeline.inputs import TaskInput
from bertie.tasks.choose import Chooser, Question
from bertie.tasks.results import ChoiceResult
from bertie.text.windows import Window
from bertie.training.finetune.base import Predictions, TaskTraining, pieces, token_counts
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import MultipleChoiceObjective, Objective, TrainingExample, TrainingWindow


class MultipleChoiceTraining(TaskTraining[Chooser]):
    """Multiple choice: one logit per choice, and a softmax over the choices of a context."""

    data_kind = "choose"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """One output."""
        return HeadInfo("choice")

    def objective(self, data: LabelledDataset) -> Objective:
        """Cross-entropy over the choices."""
        return MultipleChoiceObjective(self.recipe.label_smoothing)

    def items(self, data: LabelledDataset) -> Iterator[TrainingExample]:
        """Tokenize each context with each of its choices."""
        inputs = (
            TaskInput(f"{data.name}, row {example.row}", (example.texts[0], choice), None)
            for example in data.examples
            for choice in example.texts[1:]
        )
        texts = self.task.pipeline.read(inputs)
        for example in data.examples:
            choices = [next(texts).windows for _ in example.texts[1:]]
            windows = tuple(piece for choice in choices for piece in pieces(choice))
            yield self._example(example, windows, [len(choice) for choice in choices])

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """An example whose choices have one window each."""
        return self._example(example, tuple(pieces([window])[0] for window in windows), [1] * len(windows))

    def _example(self, example: Example, windows: tuple[TrainingWindow, ...], counts: Sequence[int]) -> TrainingExample:
        choice = np.repeat(np.arange(len(counts)), counts)
        return TrainingExample(windows, np.array(example.target, dtype=np.int64), extras={"choice": choice})

    def _choose(self, data: LabelledDataset) -> list[ChoiceResult]:
        questions: list[Question] = [(example.texts[0], example.texts[1:]) for example in data.examples]
        return list(self.task.choose_each(questions))

    def calibrate(self, dev: LabelledDataset) -> None:
        """Fit the temperature at which the probability of the choice is the chance that it is right."""
        name, fitted = str(self.task.head), self.task.info.calibration.temperature
        results = self._choose(dev)
        # p = softmax(z / temperature), so temperature · log p is z up to a constant, which softmax ignores.
        logits = [list(fitted * np.log(np.clip(result.scores, 1e-30, 1.0))) for result in results]
        ordered = [sorted(row, reverse=True) for row in logits]
        correct = [result.index == example.target for result, example in zip(results, dev.examples, strict=True)]
        temperature = calibration.temperature_of_predictions(ordered, correct)
        self.task.checkpoint.set_calibration(name, replace(Calibration(), temperature=temperature))

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Choose for labelled contexts."""
        results = self._choose(data)
        gold = [int(example.target) for example in data.examples]
        predicted = [result.index for result in results]
        confidence = np.array([result.score for result in results], dtype=np.float32)
        return Predictions("choose", data, gold, predicted, None, confidence, *token_counts(results))

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """The share of contexts whose most probable choice is the right one."""
        return metrics.choices(predictions.gold, predictions.predicted, resamples=resamples)
