"""Sample the labels of training prompts: those of the text and some negatives, drawn anew each epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bertie.recipe import Recipe
from bertie.text.encoding import IntArray
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.sampling import ExampleSampler, TrainingTask
from bertie.training.span_objective import LABELS


class LabelTokens:
    """The tokens that prompts are made of."""

    def __init__(self, labels: Sequence[IntArray], end: IntArray, marker: int, template: tuple[IntArray, IntArray]):
        """`labels`: of each label, with its marker; `end` ends a prompt; `marker`: index of a label's own token."""
        self.labels, self.end, self.marker, self.template = labels, end, marker, template

    def prompt(self, chosen: Sequence[int]) -> tuple[IntArray, IntArray]:
        """All tokens before the text, and the index of the one that stands for each label."""
        before = self.template[0]
        parts = [self.labels[label] for label in chosen]
        starts = len(before) + np.cumsum([0, *(len(part) for part in parts[:-1])])
        return np.concatenate([before, *parts, self.end]), starts + self.marker


class PromptSampler(ExampleSampler):
    """Puts a prompt before each window of an example. The windows hold the text's tokens alone.

    A prompt has the labels of the text, a random number of others, and at most `most`, in random order: the model must
    not expect that a label of the prompt occurs, nor rely on their order.
    """

    single_head = False  # a recorded step would need the same number of spans and labels

    def __init__(self, tasks: Sequence[TrainingTask], recipe: Recipe, tokens: LabelTokens, most: int) -> None:
        self.tokens, self.most = tokens, most
        super().__init__(tasks, recipe)

    def _sample_windows(self, example: TrainingExample, epoch: int, index: int) -> TrainingExample:
        example = super()._sample_windows(example, epoch, index)
        rng = np.random.default_rng([self.recipe.seed, epoch, index, 2])
        chosen = self._choose(example, rng)
        prompt, labels = self.tokens.prompt(chosen)
        column = np.full(len(self.tokens.labels), -1, np.int64)
        column[chosen] = np.arange(len(chosen))
        windows = tuple(self._with_prompt(window, prompt, column) for window in example.windows)
        return replace(example, windows=windows, extras={**example.extras, LABELS: labels})

    def _choose(self, example: TrainingExample, rng: np.random.Generator) -> list[int]:
        """Labels of the example, then others; shuffled."""
        values = [w.values.astype(np.int64)[:, 2] for w in example.windows if w.values is not None]
        own = rng.permutation(np.unique(np.concatenate(values)))[: self.most]
        others = rng.permutation(np.setdiff1d(np.arange(len(self.tokens.labels)), own))
        least = 0 if len(own) else 1
        count = int(rng.integers(least, max(least, min(len(others), self.most - len(own))) + 1))
        chosen: list[int] = rng.permutation(np.concatenate([own, others[:count]])).tolist()
        return chosen

    def _with_prompt(self, window: TrainingWindow, prompt: IntArray, column: IntArray) -> TrainingWindow:
        assert window.values is not None
        assert window.rows is not None
        values = window.values.astype(np.int64)
        values = np.concatenate([values[:, :2], column[values[:, 2:]]], axis=1)
        ids = np.concatenate([prompt, window.ids, self.tokens.template[1]])
        rows = window.rows.astype(np.int64) + len(prompt)
        return replace(window, ids=ids, segments=np.zeros_like(ids), values=values[values[:, 2] >= 0], rows=rows)
