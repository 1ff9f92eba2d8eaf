"""Plans for the loop beyond one corpus and one objective: pairs of texts, growing batches, several plans in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from bertie.errors import ConfigError, InputError
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import TrainingExample
from bertie.training.pretrain.corpus import Corpus, Numbers
from bertie.training.pretrain.masking import Masking, seeded
from bertie.training.pretrain.mlm import items_of
from bertie.training.pretrain.packing import Packing
from bertie.training.pretrain.pretraining_objectives import MaskedPairs, NextSentence, Pair, SentenceOrder
from bertie.training.sampling import BatchSampler, TrainingTask

DUPLICATES = 10  # BERT's data was made ten times over, with other pairs and other tokens hidden, then read as it was
SECTION = 16  # rooms of a pair: longer documents are taken in parts
SPECIAL = 3  # tokens around a pair


class SentencePairSampler:
    """Pairs of texts from the documents of a corpus, with hidden tokens. Lines stand for sentences.

    A step takes documents, or sections of long ones, until their tokens are its budget; what pairs are made of them is
    drawn from the seed, the epoch and the step. `static` draws ten times in all, and goes round: as BERT's data was.
    """

    single_head = False

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        steps: int,
        *,
        pairs: NextSentence | SentenceOrder,
        budget: int,
        max_length: int,
        seed: int,
        masking: Masking | None = None,
        static: bool = False,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps={steps} must be at least 1")
        if tokenizer.mask_id is None or corpus.cls_id is None or corpus.sep_id is None:
            raise InputError("pairs with hidden tokens need a tokenizer with tokens for opening, closing and masking")
        if max_length < SPECIAL + 2:
            raise InputError(f"max_length={max_length} must be at least {SPECIAL + 2}: a pair and its special tokens")
        self.corpus, self.total_steps, self.budget, self.max_length, self.seed = corpus, steps, budget, max_length, seed
        self.room, self.masking, self.static = max_length - SPECIAL, masking or Masking(), static
        self._pairs, self._source = pairs, TrainingTask("mlm", MaskedPairs(pairs), ())
        self._mask_id, self._vocab = tokenizer.mask_id, tokenizer.vocab_size
        self._special = np.array(corpus.about["tokenizer"]["special"], np.int64)
        self.heads, self.epoch_starts = ["mlm", pairs.head], [0, steps]
        self._sections = _sections(corpus, SECTION * self.room)  # (sections, 3): document, first token, end
        sizes = (self._sections[:, 2] - self._sections[:, 1]).astype(np.int32)
        if len(sizes) < 2:
            raise InputError(f"{corpus.folder} has a single text; pairs need at least 2, one to be elsewhere")
        self._packing = Packing(np.minimum(sizes, budget), budget, seed)

    def epoch_of(self, step: int) -> int:
        """Nothing depends on it."""
        return 0

    def epochs_done(self, step: int) -> float:
        """How many epochs are done after a number of steps."""
        return self._packing.part(step)

    def schedule_position(self, step: int) -> float:
        """Steps are alike."""
        return step

    def fingerprint(self) -> Any:
        """What is made of what."""
        masking = [self.masking.rate, self.masking.mask, self.masking.random, self.masking.unit, self.static]
        return [
            self.total_steps,
            self.budget,
            self.max_length,
            self.seed,
            self.corpus.tokens,
            self._pairs.head,
            masking,
        ]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """The pairs of a step, with what is hidden of each."""
        epoch, _ = self._packing.place(step)
        if self.static and epoch >= DUPLICATES:
            step %= sum(self._packing.steps(e) for e in range(DUPLICATES))
            epoch, _ = self._packing.place(step)
        rng = seeded(self.seed, epoch=epoch, index=step)
        chosen = self._packing.pieces(step)
        if len(chosen) == 1:  # as may be at the end of an epoch: elsewhere needs another
            chosen = np.append(chosen, (chosen + rng.integers(1, len(self._sections))) % len(self._sections))
        documents, starts = [], []
        for document, first, end in self._sections[chosen].tolist():
            lines = self.corpus.lines(document)
            cuts = [first, *lines[(lines > first) & (lines < end)].tolist(), end]
            ids, words = self.corpus.document(document), self.corpus.word_starts(document)
            documents.append([ids[a:b] for a, b in pairwise(cuts)])
            starts.append([words[a:b] for a, b in pairwise(cuts)])
        made = list(self._pairs.pairs(_marked(documents, starts), self.room, rng))
        ids, cu, special, words, segments = self._laid(made)
        places = self.masking.choose(special, words, cu, rng)
        masked, targets = self.masking.apply(
            ids, places, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._special.tolist()
        )
        items = items_of(masked, cu, places, targets, segments=segments)
        labelled = [
            TrainingExample(item.windows, extras={"label": np.array(pair.label)})
            for item, pair in zip(items, made, strict=True)
        ]
        return self._source, labelled

    def _laid(self, pairs: Sequence[Pair]) -> tuple[Any, Any, Any, Any, Any]:
        """Pairs end to end: ids, cu, special, words and segments."""
        cls, sep = (np.array([2 * int(x or 0) + 1]) for x in (self.corpus.cls_id, self.corpus.sep_id))
        parts = [part for pair in pairs for part in (cls, pair.first, sep, pair.second, sep)]
        both = np.concatenate(parts).astype(np.int64)
        ids, words = both >> 1, (both & 1).astype(np.bool_)
        first = np.array([len(pair.first) + 2 for pair in pairs])
        second = np.array([len(pair.second) + 1 for pair in pairs])
        cu = np.concatenate([[0], np.cumsum(first + second)]).astype(np.int32)
        segments = np.repeat(np.tile([0, 1], len(pairs)), np.stack([first, second], 1).ravel())
        special = np.isin(ids, self._special)
        return ids, cu, special, words | special, segments


def _marked(documents: list[list[Any]], starts: list[list[Any]]) -> list[list[Any]]:
    """Ids that carry where words begin in their last bit, as they are cut and moved about before they are laid out."""
    return [
        [2 * ids.astype(np.int64) + words for ids, words in zip(document, marks, strict=True)]
        for document, marks in zip(documents, starts, strict=True)
    ]


def _sections(corpus: Corpus, most: int) -> Numbers:
    counts = -(-corpus.lengths // most)
    documents = np.repeat(np.arange(len(corpus)), counts)
    first = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return np.stack([documents, first, np.minimum(first + most, corpus.lengths[documents])], 1)


class BatchSizeWarmup:
    """A plan of small steps, of which a step takes one at first, and all `full` of them after a share of all tokens."""

    def __init__(self, plan: BatchSampler, full: int, share: float) -> None:
        if full < 1 or not 0 < share < 1:
            raise ConfigError(f"full={full} must be at least 1 and share={share} between 0 and 1")
        self.plan = plan
        ends = [0]
        while ends[-1] < plan.total_steps:
            done = min(1.0, ends[-1] / (share * plan.total_steps))
            ends.append(min(plan.total_steps, ends[-1] + 1 + int((full - 1) * done)))
        self._ends = ends
        self.total_steps = len(ends) - 1
        self.heads, self.single_head, self.epoch_starts = plan.heads, plan.single_head, [0, self.total_steps]

    def epoch_of(self, step: int) -> int:
        """That of the first of its small steps."""
        return self.plan.epoch_of(self._ends[step])

    def epochs_done(self, step: int) -> float:
        """How many epochs are done after a number of steps."""
        return self.plan.epochs_done(self._ends[step])

    def schedule_position(self, step: int) -> float:
        """Where the run is, by its tokens."""
        return self.total_steps * self._ends[step] / self.plan.total_steps

    def fingerprint(self) -> Any:
        """As the plan's, with how many steps they make."""
        return [self.plan.fingerprint(), self.total_steps]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """All small steps of a step."""
        read = [self.plan.read(small) for small in range(self._ends[step], self._ends[step + 1])]
        return read[0][0], [item for _, items in read for item in items]


class MixtureSampler:
    """Several plans, a step of one after a step of another, by their shares; none is read past its end."""

    single_head = False

    def __init__(self, plans: Sequence[BatchSampler], shares: Sequence[float], steps: int, seed: int) -> None:
        if len(plans) != len(shares) or not plans or min(shares) <= 0:
            raise ConfigError(f"shares={list(shares)} must be {len(plans)} numbers above 0, one a plan")
        self.plans, self.total_steps, self.shares, self.seed = plans, steps, list(shares), seed
        chances = np.array(shares) / sum(shares)
        self._which = np.random.default_rng([seed, 0x6D6978]).choice(len(plans), steps, p=chances)
        self._own = np.empty(steps, np.int64)  # the step's number among those of its plan
        for number, plan in enumerate(plans):
            own = self._which == number
            self._own[own] = np.arange(own.sum()) % plan.total_steps
        self.heads = list(dict.fromkeys(head for plan in plans for head in plan.heads))
        self.epoch_starts = [0, steps]

    def epoch_of(self, step: int) -> int:
        """Plans have epochs of their own."""
        return 0

    def epochs_done(self, step: int) -> float:
        """The share of the run that is done."""
        return step / self.total_steps

    def schedule_position(self, step: int) -> float:
        """Steps are alike."""
        return step

    def fingerprint(self) -> Any:
        """All plans, and their shares."""
        return [self.total_steps, self.seed, self.shares, [plan.fingerprint() for plan in self.plans]]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """The next step of one of the plans."""
        number = int(self._which[step])
        source, items = self.plans[number].read(int(self._own[step]))
        return replace(source, sampler=number), items
