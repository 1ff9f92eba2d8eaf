"""Next-sentence prediction (BERT) and sentence-order prediction (ALBERT), with masked-language modelling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import MicroBatch, ModelObjective, TrainingExample
from bertie.training.pretrain.corpus import Corpus, IntArray
from bertie.training.pretrain.masked_lm import MaskedLMLoss, summed_cross_entropy
from bertie.training.pretrain.masking import Masking, masking_rng
from bertie.training.pretrain.packing import PackingPlan
from bertie.training.pretrain.samplers import masked_examples
from bertie.training.sampling import TrainingTask

Ids = NDArray[np.integer]
Document = Sequence[Ids]  # its sentences

STATIC_COPIES = 10  # BERT's data held ten copies of the corpus, with different pairs and masks
SECTION = 16  # longer documents are split into sections of so many sequences
SPECIAL = 3  # special tokens of a pair


# --- tasks ---


@dataclass(frozen=True, slots=True)
class SentencePair:
    """Two token sequences, without special tokens, and their label."""

    first: Ids
    second: Ids
    label: int


class _PairTask:
    """A binary label per pair, predicted by a text-level head."""

    head: ClassVar[str]

    def loss(self, model: Model, batch: Batch, labels: Tensor, hidden: Tensor | None = None) -> Tensor:
        """() the summed cross-entropy of `labels` (B,). Pass `hidden` (T, D) if the encoder has already run."""
        if hidden is None:
            hidden = model.hidden(batch, self.head)
        logits: Tensor = model.head(self.head)(hidden, batch, model.encoder.embeddings.words.weight)  # (B, 2)
        return summed_cross_entropy(logits.float(), labels)


class NextSentence(_PairTask):
    """BERT's next-sentence prediction: the second text follows the first (0) or is from another
    document (1).

    >>> documents = [[np.array([1, 2]), np.array([3, 4]), np.array([5, 6])], [np.array([7, 8]), np.array([9])]]
    >>> [len(pair.first) + len(pair.second) <= 6 for pair in NextSentence.pairs(documents, 6, np.random.default_rng(0))]
    [True, True, True]
    """

    head = "nsp"

    @staticmethod
    def pairs(documents: Sequence[Document], room: int, rng: np.random.Generator) -> Iterator[SentencePair]:
        """Generate pairs of at most `room` tokens, document by document.

        The first part takes a random number of whole sentences, up to half the room; the second
        fills the rest. Half of the second parts come from a random place in another document, and
        the sentences they replaced are used later. A document's last sentence has no successor, and
        always gets a random second part. Sentences are never truncated; longer ones are split into
        parts of half the room. So no label can be told from a truncated sentence.
        """
        if len(documents) < 2:
            raise InputError(f"documents has {len(documents)}; random second texts need at least 2")
        split = [_split_sentences(document, room, d) for d, document in enumerate(documents)]
        for d, sentences in enumerate(split):
            at = 0
            while at < len(sentences):
                end = at + _fitting(sentences[at : at + room], room)
                most = max(1, min(_fitting(sentences[at:end], room // 2), end - at - 1))
                middle = at + int(rng.integers(1, most + 1))
                first = np.concatenate(sentences[at:middle])
                if middle == end or rng.random() < 0.5:
                    other = split[_other_index(d, len(split), rng)]
                    start = int(rng.integers(len(other)))
                    left = room - len(first)
                    second = other[start : start + _fitting(other[start : start + left], left)]
                    yield SentencePair(first, np.concatenate(second), 1)
                    at = middle
                else:
                    yield SentencePair(first, np.concatenate(sentences[middle:end]), 0)
                    at = end


class SentenceOrder(_PairTask):
    """ALBERT's sentence-order prediction: two consecutive texts are in order (0) or swapped (1).

    >>> pairs = SentenceOrder.pairs([[np.array([1, 2]), np.array([3])]], 6, np.random.default_rng(0))
    >>> [(pair.first.tolist(), pair.second.tolist(), pair.label) for pair in pairs]
    [([1, 2], [3], 0)]
    """

    head = "sop"

    @staticmethod
    def pairs(documents: Sequence[Document], room: int, rng: np.random.Generator) -> Iterator[SentencePair]:
        """Generate pairs of at most `room` tokens, document by document.

        They are split at a random sentence boundary. A single sentence at the end of a document is
        split in its middle; a single token is dropped.
        """
        for d, document in enumerate(documents):
            sentences = _split_sentences(document, room, d)
            at = 0
            while at < len(sentences):
                chunk = sentences[at : at + _fitting(sentences[at : at + room], room)]
                at += len(chunk)
                if len(chunk) == 1:
                    chunk = np.array_split(chunk[0], 2)
                middle = int(rng.integers(1, len(chunk)))
                first, second = np.concatenate(chunk[:middle]), np.concatenate(chunk[middle:])
                if len(second) == 0:
                    continue
                yield SentencePair(second, first, 1) if rng.random() < 0.5 else SentencePair(first, second, 0)


def _split_sentences(document: Document, room: int, number: int) -> list[Ids]:
    """Split sentences that are longer than half the room, so that any two fit."""
    if room < 2:
        raise InputError(f"room={room} must be at least 2 tokens: one for each text of a pair")
    half = room // 2
    parts = [sentence[at : at + half] for sentence in document for at in range(0, len(sentence), half)]
    if not parts:
        raise InputError(f"document {number} has no tokens; remove it")
    return parts


def _fitting(sentences: Sequence[Ids], room: int) -> int:
    """How many of the sentences fit."""
    used = 0
    for count, sentence in enumerate(sentences):
        used += len(sentence)
        if used > room:
            return count
    return len(sentences)


def _other_index(index: int, count: int, rng: np.random.Generator) -> int:
    """Draw an index below `count` other than `index`, uniformly."""
    drawn = int(rng.integers(count - 1))
    return drawn + (drawn >= index)


# --- objective ---


class SentencePairObjective(ModelObjective):
    """Masked-language modelling plus the label of a pair: BERT's with `NextSentence`, ALBERT's with `SentenceOrder`."""

    def __init__(self, task: _PairTask) -> None:
        super().__init__()
        self.masked_lm, self.task = MaskedLMLoss(), task

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        batch, targets, labels = micro_batch.batch, micro_batch.targets, micro_batch.extras["labels"]
        assert targets.rows is not None
        assert isinstance(labels, Tensor)
        hidden = model.hidden(batch)
        masked = self.masked_lm.loss(model, batch, targets.rows, targets.values, hidden)
        return self.mean(masked, "masked") + self.mean(self.task.loss(model, batch, labels, hidden), "texts")

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples and their labels."""
        labels = torch.tensor([int(example.extras["label"]) for example in examples])
        return replace(super().collate(examples), extras={"labels": labels})


# --- sampler ---


class SentencePairSampler:
    """Pairs of texts from the documents of a corpus, with masked tokens. Each line of a document is
    a sentence.

    A step takes documents, or sections of long ones, up to its token budget; its pairs are drawn
    from the seed, the epoch and the step. `static` repeats the pairs and masks of ten epochs, as
    BERT's data did.
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
            raise InputError("pairs with masked tokens need a tokenizer with CLS, SEP and mask tokens")
        if max_length < SPECIAL + 2:
            raise InputError(f"max_length={max_length} must be at least {SPECIAL + 2}: a pair and its special tokens")
        self.corpus, self.total_steps, self.budget, self.max_length, self.seed = corpus, steps, budget, max_length, seed
        self.room, self.masking, self.static = max_length - SPECIAL, masking or Masking(), static
        self._pairs, self._task = pairs, TrainingTask("mlm", SentencePairObjective(pairs), ())
        self._mask_id, self._vocab = tokenizer.mask_id, tokenizer.vocab_size
        self._special_ids = np.array(corpus.manifest["tokenizer"]["special"], np.int64)
        self.heads, self.epoch_starts = ["mlm", pairs.head], [0, steps]
        self._sections = _sections(corpus, SECTION * self.room)  # (sections, 3): document, first token, end
        sizes = (self._sections[:, 2] - self._sections[:, 1]).astype(np.int32)
        if len(sizes) < 2:
            raise InputError(f"{corpus.folder} has a single text; pairs need at least 2")
        self._packing = PackingPlan(np.minimum(sizes, budget), budget, seed)

    def first_epoch(self) -> SentencePairSampler:
        """The sampler with the steps of its first epoch only: each text once."""
        self.total_steps = min(self.total_steps, self._packing.steps(0))
        return self

    def epoch_of(self, step: int) -> int:
        """0: nothing depends on the epoch."""
        return 0

    def epochs_done(self, step: int) -> float:
        """The number of epochs completed after so many steps."""
        return self._packing.epochs_at(step)

    def schedule_position(self, step: int) -> float:
        """All steps have the same size."""
        return step

    def fingerprint(self) -> Any:
        """The corpus, the pairs and the masking."""
        masking = [self.masking.rate, self.masking.mask, self.masking.random, self.masking.unit, self.static]
        tokens, head = self.corpus.tokens, self._pairs.head
        return [self.total_steps, self.budget, self.max_length, self.seed, tokens, head, masking]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Generate the pairs of a step and mask tokens."""
        epoch, _ = self._packing.locate(step)
        if self.static and epoch >= STATIC_COPIES:
            step %= sum(self._packing.steps(e) for e in range(STATIC_COPIES))
            epoch, _ = self._packing.locate(step)
        rng = masking_rng(self.seed, epoch=epoch, index=step)
        chosen = self._packing.items(step)
        if len(chosen) == 1:  # possible at the end of an epoch: random second texts need another
            chosen = np.append(chosen, (chosen + rng.integers(1, len(self._sections))) % len(self._sections))
        documents = [self._sentences(*section) for section in self._sections[chosen].tolist()]
        pairs = list(self._pairs.pairs(documents, self.room, rng))
        ids, cu, special, words, segments = self._concatenate(pairs)
        positions = self.masking.choose(special, words, cu, rng)
        masked, targets = self.masking.apply(
            ids, positions, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._special_ids.tolist()
        )
        examples = masked_examples(masked, cu, positions, targets, segments=segments)
        return self._task, [
            replace(example, extras={"label": np.array(pair.label)})
            for example, pair in zip(examples, pairs, strict=True)
        ]

    def _sentences(self, document: int, first: int, end: int) -> list[Any]:
        """The sentences of a section. Ids carry in their last bit whether a word starts, as pairs rearrange them."""
        lines = self.corpus.lines(document)
        bounds = [first, *lines[(lines > first) & (lines < end)].tolist(), end]
        marked = 2 * self.corpus.document(document).astype(np.int64) + self.corpus.word_starts(document)
        return [marked[start:stop] for start, stop in pairwise(bounds)]

    def _concatenate(self, pairs: Sequence[SentencePair]) -> tuple[Any, Any, Any, Any, Any]:
        """Concatenate pairs: ids, cu, special, words and segments."""
        cls, sep = (np.array([2 * int(x or 0) + 1]) for x in (self.corpus.cls_id, self.corpus.sep_id))
        parts = [part for pair in pairs for part in (cls, pair.first, sep, pair.second, sep)]
        marked = np.concatenate(parts).astype(np.int64)
        ids, words = marked >> 1, (marked & 1).astype(np.bool_)
        first = np.array([len(pair.first) + 2 for pair in pairs])
        second = np.array([len(pair.second) + 1 for pair in pairs])
        cu = np.concatenate([[0], np.cumsum(first + second)]).astype(np.int32)
        segments = np.repeat(np.tile([0, 1], len(pairs)), np.stack([first, second], 1).ravel())
        special = np.isin(ids, self._special_ids)
        return ids, cu, special, words | special, segments


def _sections(corpus: Corpus, most: int) -> IntArray:
    counts = -(-corpus.lengths // most)
    documents = np.repeat(np.arange(len(corpus)), counts)
    first = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return np.stack([documents, first, np.minimum(first + most, corpus.lengths[documents])], 1)
