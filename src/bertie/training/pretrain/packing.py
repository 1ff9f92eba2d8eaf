"""Pack pieces of documents into training steps of a token budget, without padding.

A document is split into pieces that fit the model's max_length, with two special tokens around each. A step takes
pieces in a seeded random order until its budget is used up, then later ones that still fit (first-fit). Pieces are
not concatenated into one sequence: attention never crosses a piece, so never a document. Every token is read once
per epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertie.errors import ConfigError, InputError
from bertie.training.pretrain.corpus import BoolArray, Corpus, IntArray

LOOKAHEAD = 8  # budgets of text to search for pieces that fit
MIN_WINDOW = 1024  # pieces to search at least
BLOCK = 32  # items of a group that stay together
SPECIAL_TOKENS = 2  # special tokens around a piece


class PackingPlan:
    """Assign items of given sizes to steps of a budget, deterministically by seed and step number.

    >>> packing = PackingPlan(np.array([3, 3, 3, 1], np.int32), budget=7, seed=0)
    >>> packing.steps(), sorted(np.concatenate([packing.items(0), packing.items(1)]).tolist())
    (2, [0, 1, 2, 3])

    The steps of an epoch are followed by those of the next, in another order. With `groups`, (items,) the group of
    each item, items are drawn in blocks of one group, so that a step has several items of each of its groups.
    """

    def __init__(self, sizes: NDArray[np.int32], budget: int, seed: int, groups: IntArray | None = None) -> None:
        self.sizes, self.budget, self.seed, self.groups = sizes, budget, seed, groups
        self._ends: list[int] = []  # cumulative steps at the end of each planned epoch
        self._epoch = -1  # of the cached plan
        self._plan: tuple[IntArray, IntArray] = np.zeros(0, np.int64), np.zeros(1, np.int64)

    def steps(self, epoch: int = 0) -> int:
        """Number of steps of an epoch. It varies slightly between epochs."""
        self._count_to(epoch)
        return self._ends[epoch] - (self._ends[epoch - 1] if epoch else 0)

    def utilization(self, epoch: int = 0) -> float:
        """Fraction of the token budget that an epoch's steps use, without the last, incomplete step."""
        order, cuts = self._planned(epoch)
        if len(cuts) < 3:
            return 1.0
        return int(self.sizes[order[: cuts[-2]]].sum()) / (self.budget * (len(cuts) - 2))

    def locate(self, n: int) -> tuple[int, int]:
        """The epoch of a step, and its index within the epoch."""
        if n < 0:
            raise InputError(f"step {n} does not exist: steps are counted from 0")
        while not self._ends or n >= self._ends[-1]:
            self._count_to(len(self._ends))
        epoch = int(np.searchsorted(self._ends, n, "right"))
        return epoch, n - (self._ends[epoch - 1] if epoch else 0)

    def epochs_at(self, n: int) -> float:
        """Epochs completed after n steps, as a fraction."""
        epoch, within = self.locate(n)
        return epoch + within / self.steps(epoch)

    def items(self, n: int) -> IntArray:
        """(items,) the items of step n."""
        epoch, within = self.locate(n)
        order, cuts = self._planned(epoch)
        return order[cuts[within] : cuts[within + 1]]

    def _count_to(self, epoch: int) -> None:
        """Count the steps of each epoch up to this one."""
        while len(self._ends) <= epoch:
            steps = len(self._planned(len(self._ends))[1]) - 1
            self._ends.append(steps + (self._ends[-1] if self._ends else 0))

    def _planned(self, epoch: int) -> tuple[IntArray, IntArray]:
        """The items of an epoch in order (items,), and the boundaries of its steps (steps + 1,)."""
        if epoch != self._epoch:
            order = self._order(epoch)
            chosen, cuts = first_fit(self.sizes[order], self.budget)
            self._epoch, self._plan = epoch, (order[chosen], cuts)
        return self._plan

    def _order(self, epoch: int) -> IntArray:
        """(items,) the random order of an epoch."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.sizes))
        if self.groups is None:
            return order
        order = order[np.argsort(self.groups[order], kind="stable")]
        own = self.groups[order]
        within = np.arange(len(own)) - np.searchsorted(own, own)
        block = np.cumsum(within % BLOCK == 0) - 1
        return order[np.argsort(rng.permutation(len(own))[block], kind="stable")]


class PackedCorpus(PackingPlan):
    """The batches of a run over a corpus, deterministic by seed and step number.

    >>> packed = PackedCorpus(Corpus.open("path/to/corpus"), budget=65536, max_length=512, seed=0)    # doctest: +SKIP
    >>> packed.steps(), packed.utilization()                                                      # doctest: +SKIP
    (65, 0.9998)
    >>> ids, cu, special, words = packed.batch(17)                                         # doctest: +SKIP

    """

    def __init__(self, corpus: Corpus, budget: int, max_length: int, seed: int) -> None:
        if max_length <= SPECIAL_TOKENS:
            raise InputError(
                f"max_length={max_length} must be above {SPECIAL_TOKENS}, the special tokens around each piece"
            )
        if budget < max_length:
            raise InputError(
                f"budget={budget} must be at least max_length={max_length}, so that a whole piece fits into a step"
            )
        if not corpus.tokens:
            raise InputError(f"{corpus.folder} holds no tokens")
        if corpus.cls_id is None or corpus.sep_id is None:
            raise ConfigError(f"the tokenizer of {corpus.folder} has no [CLS] or [SEP] token; both are needed")
        self.corpus, self.budget, self.max_length, self.seed = corpus, budget, max_length, seed
        room = max_length - SPECIAL_TOKENS
        counts = -(-corpus.lengths // room)  # pieces per document; 0 for an empty one
        self._documents = np.repeat(np.arange(len(corpus)), counts)  # (pieces,)
        first = np.cumsum(counts) - counts
        self._starts = (np.arange(len(self._documents)) - np.repeat(first, counts)) * room
        self._sizes = np.minimum(corpus.lengths[self._documents] - self._starts, room).astype(np.int32)
        super().__init__(self._sizes + SPECIAL_TOKENS, budget, seed)

    def step(self, n: int) -> list[tuple[int, int, int]]:
        """(document, start, end) of each piece of a step, in tokens."""
        pieces = self.items(n)
        documents, starts, sizes = (part[pieces].tolist() for part in (self._documents, self._starts, self._sizes))
        return [(document, start, start + size) for document, start, size in zip(documents, starts, sizes, strict=True)]

    def batch(self, n: int) -> tuple[IntArray, NDArray[np.int32], BoolArray, BoolArray]:
        """The flat batch of a step: ids (T,), cu (B + 1,), special (T,), words (T,).

        Piece b is tokens `cu[b]` to `cu[b + 1]`. `special` marks the special tokens around each piece and those in
        the text itself, unknown tokens included. `words` marks tokens that begin a word; special tokens, and the
        first of a piece, always do.
        """
        pieces = self.items(n)
        return flatten_pieces(self.corpus, self._documents[pieces], self._starts[pieces], self._sizes[pieces])


def flatten_pieces(
    corpus: Corpus, documents: IntArray, starts: IntArray, sizes: NDArray[np.int32]
) -> tuple[IntArray, NDArray[np.int32], BoolArray, BoolArray]:
    """Build a flat batch of pieces with their special tokens, as in `PackedCorpus.batch`."""
    assert corpus.cls_id is not None
    assert corpus.sep_id is not None
    lengths = sizes.astype(np.int64)
    cu = np.concatenate([[0], np.cumsum(lengths + SPECIAL_TOKENS)])  # (B + 1,)
    ids, words = np.empty(cu[-1], np.int64), np.ones(cu[-1], np.bool_)
    inner = np.ones(cu[-1], np.bool_)  # all but the first and last token of a piece
    inner[cu[:-1]] = inner[cu[1:] - 1] = False
    ids[cu[:-1]], ids[cu[1:] - 1] = corpus.cls_id, corpus.sep_id
    ids[inner], words[inner] = corpus.gather(documents, starts, lengths)
    words[cu[:-1] + 1] = True
    special = np.isin(ids, np.array(corpus.manifest["tokenizer"]["special"], np.int64))
    words |= special
    return ids, cu.astype(np.int32), special, words


def first_fit(sizes: NDArray[np.int32], budget: int) -> tuple[IntArray, IntArray]:
    """First-fit packing: item indices in packed order, and the boundaries of steps (steps + 1,).

    A step takes items in order as long as they fit, then any that still fits of those within `LOOKAHEAD` budgets.

    >>> first_fit(np.array([3, 3, 3, 1], np.int32), 7)
    (array([0, 1, 3, 2]), array([0, 3, 4]))
    """
    total = np.cumsum(sizes, dtype=np.int64)
    waiting = np.zeros(0, np.int64)
    read = spent = 0  # items seen; tokens packed
    taken: list[IntArray] = []
    while len(waiting) or read < len(sizes):
        # The window: deferred items, and new ones until LOOKAHEAD budgets are filled.
        until = max(int(np.searchsorted(total, spent + LOOKAHEAD * budget)), read + MIN_WINDOW - len(waiting))
        window = np.concatenate([waiting, np.arange(read, min(until, len(sizes)))])
        read = max(read, min(until, len(sizes)))
        own = sizes[window]
        used = np.cumsum(own, dtype=np.int64)
        count = int(np.searchsorted(used, budget, "right"))
        gap = budget - int(used[count - 1])
        chosen = np.zeros(len(window), np.bool_)
        chosen[:count] = True
        at = count
        fits = np.flatnonzero(own[at:] <= gap) + at
        while len(fits):
            at = int(fits[0])
            chosen[at] = True
            gap -= int(own[at])
            fits = fits[1:][own[fits[1:]] <= gap]
        taken.append(window[chosen])
        waiting = window[~chosen]
        spent += budget - gap
    cuts = np.concatenate([[0], np.cumsum([len(step) for step in taken])])
    return np.concatenate([np.zeros(0, np.int64), *taken]), cuts
