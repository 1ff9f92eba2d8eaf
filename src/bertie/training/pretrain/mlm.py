"""Masked language modelling over a packed corpus, as a plan for the loop: what a step reads and what it hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertie.errors import ConfigError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import MaskedLMObjective, ModelObjective, Objective, TrainingExample, TrainingWindow
from bertie.training.pretrain.masking import Masking, seeded
from bertie.training.pretrain.packing import Packed
from bertie.training.sampling import TrainingTask


class MaskedLMSampler:
    """A run of so many steps. `static`: the same tokens of a text are hidden in every epoch, as in BERT.

    `objective` is that of hidden tokens unless another one is given that asks for them.

    >>> plan = MaskedLMSampler(Packed(corpus, 65536, 512, seed=0), tokenizer, steps=10_000)         # doctest: +SKIP
    >>> Trainer(model, plan, Recipe(lr=5e-4)).run()                                             # doctest: +SKIP
    """

    def __init__(
        self,
        packed: Packed,
        tokenizer: Tokenizer,
        steps: int,
        *,
        masking: Masking | None = None,
        static: bool = False,
        objective: Objective | None = None,
        heads: Sequence[str] = ("mlm",),
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps={steps} must be at least 1")
        if tokenizer.mask_id is None:
            raise InputError("the tokenizer has no mask token, and masked language modelling needs one")
        self.packed, self.masking, self.static, self.total_steps = packed, masking or Masking(), static, steps
        self._mask_id, self._vocab = tokenizer.mask_id, tokenizer.vocab_size
        self._never = packed.corpus.about["tokenizer"]["special"]
        self._source = TrainingTask(heads[0] if heads else "", objective or MaskedLMObjective(), ())
        self.heads, self.single_head = list(heads), not isinstance(objective, ModelObjective)
        self.epoch_starts = [0]
        while self.epoch_starts[-1] < steps:
            self.epoch_starts.append(min(steps, self.epoch_starts[-1] + packed.steps(len(self.epoch_starts) - 1)))

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return self.packed.place(step)[0]

    def epochs_done(self, step: int) -> float:
        """How many epochs are done after a number of steps."""
        return self.packed.part(step)

    def schedule_position(self, step: int) -> float:
        """Steps are alike."""
        return step

    def fingerprint(self) -> Any:
        """What is hidden of what."""
        packed = self.packed
        masking = [self.masking.rate, self.masking.mask, self.masking.random, self.masking.unit, self.static]
        return [self.total_steps, packed.budget, packed.max_length, packed.seed, packed.corpus.tokens, masking]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """The pieces of a step, with what is hidden of each."""
        ids, cu, special, words = self.packed.batch(step)
        if self.static:
            masked, places, targets = self._one_by_one(step, ids, cu, special, words)
        else:
            rng = seeded(self.packed.seed, epoch=0, index=step)
            places = self.masking.choose(special, words, cu, rng)
            masked, targets = self._apply(ids, places, rng)
        more = {} if self.single_head else {"special": special}
        return self._source, items_of(masked, cu, places, targets, more)

    def _apply(self, ids: Any, places: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        return self.masking.apply(ids, places, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._never)

    def _one_by_one(self, step: int, ids: Any, cu: Any, special: Any, words: Any) -> tuple[Any, Any, Any]:
        """Each piece by a seed of its own, whatever it is packed with."""
        masked, places, targets = ids.copy(), [], []
        for b, (document, start, _) in enumerate(self.packed.step(step)):
            part = slice(int(cu[b]), int(cu[b + 1]))
            rng = seeded(self.packed.seed, epoch=None, index=document * 1_000_003 + start)
            own = self.masking.choose(special[part], words[part], np.array([0, part.stop - part.start]), rng)
            masked[part], wanted = self._apply(ids[part], own, rng)
            places.append(own + part.start)
            targets.append(wanted)
        return masked, np.concatenate(places), np.concatenate(targets)


def items_of(
    ids: Any, cu: Any, places: Any, targets: Any, more: Mapping[str, Any] | None = None, segments: Any = None
) -> list[TrainingExample]:
    """Pieces of a flat run as items: text b is tokens `cu[b]` to `cu[b + 1]` of `ids` and of each of `more` (T,).

    `targets` (M,) are wanted at `places` (M,), which are in order.
    """
    ends = np.searchsorted(places, cu)
    zeros = np.zeros(int(np.diff(cu).max()), dtype=np.int64)
    ones = np.ones(len(places), dtype=np.float32)
    items = []
    for b in range(len(cu) - 1):
        low, high, first, last = int(cu[b]), int(cu[b + 1]), int(ends[b]), int(ends[b + 1])
        piece = TrainingWindow(
            ids[low:high],
            zeros[: high - low] if segments is None else segments[low:high],
            values=targets[first:last],
            weights=ones[first:last],
            rows=places[first:last] - low,
        )
        own = {name: values[low:high] for name, values in more.items()} if more else {}
        items.append(TrainingExample((piece,), extras=own))
    return items
