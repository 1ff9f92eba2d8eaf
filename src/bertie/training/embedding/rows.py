"""Which rows of texts each step compares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bertie.recipe import Recipe
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.sampling import ExampleSampler, TrainingTask

LOOK = 8  # batches ahead are searched for rows that do not clash


class Rows(ExampleSampler):
    """Rows drawn anew each epoch, so that no step takes for wrong what is right.

    Where all texts of a step are compared, another row's passage is a wrong one. So two rows of a step share no text,
    but that both may have the same negative: `texts` are those of each row. A row that clashes waits for the next step;
    some steps are smaller for it. Without `texts` rows are drawn freely.
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
            later: list[int] = []
            right: set[str] = set()  # what belongs together in some row
            wrong: set[str] = set()
            used = 0
            while waiting and (budget is not None or len(group) < size) and len(later) < LOOK * max(size, len(group)):
                i = waiting.popleft()
                tokens = len(self._sample_windows(source.examples[i], epoch, i)) if budget is not None else 0
                if budget is not None and group and used + tokens > budget:
                    waiting.appendleft(i)
                    break
                both, others = self._texts[i][:2], self._texts[i][2:]
                if not right.isdisjoint(both) or not wrong.isdisjoint(both) or not right.isdisjoint(others):
                    later.append(i)
                    continue
                group.append(i)
                right.update(both)
                wrong.update(others)
                used += tokens
            waiting.extendleft(reversed(later))
            yield group

    def _sample_windows(self, item: TrainingExample, epoch: int, index: int) -> TrainingExample:
        """Of each text with very many windows, as many as a step may read, others in each epoch."""
        most, counts = self.recipe.train_windows, item.extras["windows"]
        if max(counts) <= most:
            return item
        pieces: list[TrainingWindow] = []
        start = 0
        for number, count in enumerate(counts.tolist()):
            chosen = item.windows[start : start + count]
            if count > most:
                rng = np.random.default_rng([self.recipe.seed, epoch, index, 1, number])
                chosen = tuple(chosen[i] for i in sorted(rng.choice(count, most, replace=False)))
                whole = sum(piece.share for piece in chosen)
                chosen = tuple(replace(piece, share=piece.share / whole) for piece in chosen)
            pieces += chosen
            start += count
        return replace(item, windows=tuple(pieces), extras={"windows": np.minimum(counts, most)})
