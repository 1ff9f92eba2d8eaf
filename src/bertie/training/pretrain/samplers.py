"""Batch samplers of pretraining: masked-language modelling over a packed corpus, batch-size warmup, mixtures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from bertie.errors import ConfigError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import MaskedLMObjective, ModelObjective, Objective, TrainingExample, TrainingWindow
from bertie.training.pretrain.masking import Masking, masking_rng
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.sampling import BatchSampler, TrainingTask


class MaskedLMSampler:
    """Packed sequences with masked tokens. `static`: the same tokens are masked in every epoch, as
    in BERT.

    `objective` is masked-language modelling, unless another one is passed that reads masked tokens.

    >>> sampler = MaskedLMSampler(PackedCorpus(corpus, 65536, 512, seed=0), tokenizer, steps=10_000)  # doctest: +SKIP
    >>> Trainer(model, sampler, Recipe(lr=5e-4)).run()                                              # doctest: +SKIP
    """

    def __init__(
        self,
        packed: PackedCorpus,
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
            raise InputError("the tokenizer has no mask token, and masked-language modelling needs one")
        self.packed, self.masking, self.static, self.total_steps = packed, masking or Masking(), static, steps
        self._mask_id, self._vocab = tokenizer.mask_id, tokenizer.vocab_size
        self._special_ids = packed.corpus.manifest["tokenizer"]["special"]
        self._task = TrainingTask(heads[0] if heads else "", objective or MaskedLMObjective(), ())
        self.heads, self.single_head = list(heads), not isinstance(objective, ModelObjective)
        self.epoch_starts = [0]
        while self.epoch_starts[-1] < steps:
            epoch = len(self.epoch_starts) - 1
            self.epoch_starts.append(min(steps, self.epoch_starts[-1] + packed.steps(epoch)))

    def epoch_of(self, step: int) -> int:
        """The epoch of a step, from 0."""
        return self.packed.locate(step)[0]

    def epochs_done(self, step: int) -> float:
        """The number of epochs completed after so many steps."""
        return self.packed.epochs_at(step)

    def schedule_position(self, step: int) -> float:
        """All steps have the same size."""
        return step

    def fingerprint(self) -> Any:
        """The corpus, the packing and the masking."""
        packed = self.packed
        masking = [self.masking.rate, self.masking.mask, self.masking.random, self.masking.unit, self.static]
        return [self.total_steps, packed.budget, packed.max_length, packed.seed, packed.corpus.tokens, masking]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read the sequences of a step and mask tokens."""
        ids, cu, special, words = self.packed.batch(step)
        if self.static:
            masked, positions, targets = self._mask_statically(step, ids, cu, special, words)
        else:
            rng = masking_rng(self.packed.seed, epoch=0, index=step)
            positions = self.masking.choose(special, words, cu, rng)
            masked, targets = self._apply(ids, positions, rng)
        extras = {} if self.single_head else {"special": special}
        return self._task, masked_examples(masked, cu, positions, targets, extras)

    def _apply(self, ids: Any, positions: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        return self.masking.apply(
            ids, positions, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._special_ids
        )

    def _mask_statically(self, step: int, ids: Any, cu: Any, special: Any, words: Any) -> tuple[Any, Any, Any]:
        """Mask each sequence with its own seed, whatever it is packed with."""
        masked, positions, targets = ids.copy(), [], []
        for b, (document, start, _) in enumerate(self.packed.step(step)):
            part = slice(int(cu[b]), int(cu[b + 1]))
            rng = masking_rng(self.packed.seed, epoch=None, index=document * 1_000_003 + start)
            chosen = self.masking.choose(special[part], words[part], np.array([0, part.stop - part.start]), rng)
            masked[part], original = self._apply(ids[part], chosen, rng)
            positions.append(chosen + part.start)
            targets.append(original)
        return masked, np.concatenate(positions), np.concatenate(targets)


def masked_examples(
    ids: Any, cu: Any, positions: Any, targets: Any, extras: Mapping[str, Any] | None = None, segments: Any = None
) -> list[TrainingExample]:
    """Split flat sequences into examples: text b is tokens `cu[b]` to `cu[b + 1]` of `ids` and of
    all `extras` (T,).

    `targets` (M,) are the original tokens at the masked `positions` (M,), which are sorted.
    """
    ends = np.searchsorted(positions, cu)
    zeros = np.zeros(int(np.diff(cu).max()), dtype=np.int64)
    ones = np.ones(len(positions), dtype=np.float32)
    examples = []
    for b in range(len(cu) - 1):
        low, high, first, last = int(cu[b]), int(cu[b + 1]), int(ends[b]), int(ends[b + 1])
        window = TrainingWindow(
            ids[low:high],
            zeros[: high - low] if segments is None else segments[low:high],
            values=targets[first:last],
            weights=ones[first:last],
            rows=positions[first:last] - low,
        )
        own = {name: values[low:high] for name, values in extras.items()} if extras else {}
        examples.append(TrainingExample((window,), extras=own))
    return examples


class BatchSizeWarmup:
    """Merges the small steps of a sampler: one per step at first, all `full` of them after a share of all tokens."""

    def __init__(self, sampler: BatchSampler, full: int, share: float) -> None:
        if full < 1 or not 0 < share < 1:
            raise ConfigError(f"full={full} must be at least 1 and share={share} between 0 and 1")
        self.sampler = sampler
        ends = [0]
        while ends[-1] < sampler.total_steps:
            done = min(1.0, ends[-1] / (share * sampler.total_steps))
            ends.append(min(sampler.total_steps, ends[-1] + 1 + int((full - 1) * done)))
        self._ends = ends
        self.total_steps = len(ends) - 1
        self.heads, self.single_head, self.epoch_starts = sampler.heads, sampler.single_head, [0, self.total_steps]

    def epoch_of(self, step: int) -> int:
        """The epoch of its first small step."""
        return self.sampler.epoch_of(self._ends[step])

    def epochs_done(self, step: int) -> float:
        """The number of epochs completed after so many steps."""
        return self.sampler.epochs_done(self._ends[step])

    def schedule_position(self, step: int) -> float:
        """The position by tokens."""
        return self.total_steps * self._ends[step] / self.sampler.total_steps

    def fingerprint(self) -> Any:
        """The sampler's, and the number of merged steps."""
        return [self.sampler.fingerprint(), self.total_steps]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read all small steps of a step."""
        small = [self.sampler.read(number) for number in range(self._ends[step], self._ends[step + 1])]
        return small[0][0], [example for _, examples in small for example in examples]


class MixtureSampler:
    """Several samplers: each step is drawn from one of them, with probabilities given by `shares`."""

    single_head = False

    def __init__(self, samplers: Sequence[BatchSampler], shares: Sequence[float], steps: int, seed: int) -> None:
        if len(samplers) != len(shares) or not samplers or min(shares) <= 0:
            raise ConfigError(f"shares={list(shares)} must be {len(samplers)} numbers above 0, one per sampler")
        self.samplers, self.total_steps, self.shares, self.seed = samplers, steps, list(shares), seed
        probabilities = np.array(shares) / sum(shares)
        self._which = np.random.default_rng([seed, 0x6D6978]).choice(len(samplers), steps, p=probabilities)
        self._own_step = np.empty(steps, np.int64)  # the step number within its sampler
        for number, sampler in enumerate(samplers):
            own = self._which == number
            self._own_step[own] = np.arange(own.sum()) % sampler.total_steps
        self.heads = list(dict.fromkeys(head for sampler in samplers for head in sampler.heads))
        self.epoch_starts = [0, steps]

    def epoch_of(self, step: int) -> int:
        """0: each sampler has its own epochs."""
        return 0

    def epochs_done(self, step: int) -> float:
        """The fraction of the run that is done."""
        return step / self.total_steps

    def schedule_position(self, step: int) -> float:
        """All steps have the same size."""
        return step

    def fingerprint(self) -> Any:
        """All samplers and their shares."""
        return [self.total_steps, self.seed, self.shares, [sampler.fingerprint() for sampler in self.samplers]]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read the next step of one sampler."""
        number = int(self._which[step])
        task, examples = self.samplers[number].read(int(self._own_step[step]))
        return replace(task, sampler=number), examples
