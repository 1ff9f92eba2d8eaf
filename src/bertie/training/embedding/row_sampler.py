"""Sample rows of texts so that in-batch negatives are true negatives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bertie.recipe import Recipe
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.sampling import ExampleSampler, TrainingTask

LOOKAHEAD = 8  # batches to search for rows without conflicts


class RowSampler(ExampleSampler):
    """Shuffled rows without false in-batch negatives.

    With in-batch negatives, another row's positive is a negative. So two rows of a step share no text,
    except that both may have the same negative; `texts` are those of each row. A conflicting row is deferred
    to the next step, so that some steps are smaller. Without `texts` rows are sampled freely.
    """

    single_head = False

    def __init__(self, source: TrainingTask, recipe: Recipe, texts: Sequence[Sequence[str]] | None = None) -> None:
        self._texts = texts
        super().__init__([source], recipe)
        self.heads = [source.head] if source.head else []

    def _steps_in_epoch(self, epoch: int) -> int:
        return len(self._epoch_batches(epoch))

    def _split_into_batches(self, source: TrainingTask, epoch: int, rng: np.random.Generator) -> Iterator[list[int]]:
        if self._texts is None:
            yield from super()._split_into_batches(source, epoch, rng)
            return
        waiting = deque(rng.permutation(len(source.examples)).tolist())
        budget, size = self.recipe.batch_tokens, self.recipe.batch_size
        while waiting:
            group: list[int] = []
            deferred: list[int] = []
            positives: set[str] = set()  # anchors and positives of the step
            negatives: set[str] = set()
            used = 0
            while (
                waiting
                and (budget is not None or len(group) < size)
                and len(deferred) < LOOKAHEAD * max(size, len(group))
            ):
                i = waiting.popleft()
                tokens = len(self._sample_windows(source.examples[i], epoch, i)) if budget is not None else 0
                if budget is not None and group and used + tokens > budget:
                    waiting.appendleft(i)
                    break
                pair, hard = self._texts[i][:2], self._texts[i][2:]
                conflict = not positives.isdisjoint(pair) or not negatives.isdisjoint(pair)
                if conflict or not positives.isdisjoint(hard):
                    deferred.append(i)
                    continue
                group.append(i)
                positives.update(pair)
                negatives.update(hard)
                used += tokens
            waiting.extendleft(reversed(deferred))
            yield group

    def _sample_windows(self, item: TrainingExample, epoch: int, index: int) -> TrainingExample:
        """Limit each long text to `train_windows` windows, drawn anew each epoch."""
        most, counts = self.recipe.train_windows, item.extras["windows"]
        if max(counts) <= most:
            return item
        windows: list[TrainingWindow] = []
        start = 0
        for number, count in enumerate(counts.tolist()):
            chosen = item.windows[start : start + count]
            if count > most:
                rng = np.random.default_rng([self.recipe.seed, epoch, index, 1, number])
                chosen = tuple(chosen[i] for i in sorted(rng.choice(count, most, replace=False)))
                total = sum(window.share for window in chosen)
                chosen = tuple(replace(window, share=window.share / total) for window in chosen)
            windows += chosen
            start += count
        return replace(item, windows=tuple(windows), extras={"windows": np.minimum(counts, most)})
