"""A corpus as steps of training: pieces of documents, packed into a budget of tokens without padding.

A document is cut into pieces that fit the model's max_length, with the two special tokens around each. A step takes pieces
in an order drawn from the seed until its budget is spent, and then those further on that still fit (first-fit). Pieces
are never joined: attention, which ends where a piece ends, never crosses a document. Every token is read once an epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bertie.errors import ConfigError, InputError
from bertie.training.pretrain.corpus import Bits, Corpus, Numbers

AHEAD = 8  # budgets of text that are looked through for pieces that fit
PIECES = 1024  # or so many pieces, if those are more
SPECIAL = 2  # tokens around a piece


class Packing:
    """Things of some sizes in steps of a budget, by the step's number: what a step takes follows from the seed alone.

    >>> packing = Packing(np.array([3, 3, 3, 1], np.int32), budget=7, seed=0)
    >>> packing.steps(), sorted(np.concatenate([packing.pieces(0), packing.pieces(1)]).tolist())
    (2, [0, 1, 2, 3])

    After the last step of an epoch comes the first of the next, in another order.
    """

    def __init__(self, sizes: NDArray[np.int32], budget: int, seed: int) -> None:
        self.sizes, self.budget, self.seed = sizes, budget, seed
        self._ends: list[int] = []  # steps up to the end of each epoch that was planned
        self._epoch = -1  # the one whose plan is held
        self._plan: tuple[Numbers, Numbers] = np.zeros(0, np.int64), np.zeros(1, np.int64)

    def steps(self, epoch: int = 0) -> int:
        """How many steps an epoch has. It differs a little from one to the next."""
        self._count_to(epoch)
        return self._ends[epoch] - (self._ends[epoch - 1] if epoch else 0)

    def fill(self, epoch: int = 0) -> float:
        """What is read in an epoch, as a share of its steps' budgets; the last step, which is as it is, left out."""
        order, cuts = self._planned(epoch)
        if len(cuts) < 3:
            return 1.0
        return int(self.sizes[order[: cuts[-2]]].sum()) / (self.budget * (len(cuts) - 2))

    def place(self, n: int) -> tuple[int, int]:
        """The epoch of a step, and its number within it."""
        if n < 0:
            raise InputError(f"step {n} is not there: steps are counted from 0")
        while not self._ends or n >= self._ends[-1]:
            self._count_to(len(self._ends))
        epoch = int(np.searchsorted(self._ends, n, "right"))
        return epoch, n - (self._ends[epoch - 1] if epoch else 0)

    def part(self, n: int) -> float:
        """How many epochs are over after a number of steps."""
        epoch, within = self.place(n)
        return epoch + within / self.steps(epoch)

    def pieces(self, n: int) -> Numbers:
        """What step n takes."""
        epoch, within = self.place(n)
        order, cuts = self._planned(epoch)
        return order[cuts[within] : cuts[within + 1]]

    def _count_to(self, epoch: int) -> None:
        """Know how many steps each epoch up to this one has."""
        while len(self._ends) <= epoch:
            steps = len(self._planned(len(self._ends))[1]) - 1
            self._ends.append(steps + (self._ends[-1] if self._ends else 0))

    def _planned(self, epoch: int) -> tuple[Numbers, Numbers]:
        """An epoch's pieces in order (pieces,), and where each step begins (steps + 1,)."""
        if epoch != self._epoch:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.sizes))
            chosen, cuts = first_fit(self.sizes[order], self.budget)
            self._epoch, self._plan = epoch, (order[chosen], cuts)
        return self._plan


class Packed(Packing):
    """The steps of a run over a corpus, by their number: what a step reads follows from the seed and the number alone.

    >>> packed = Packed(Corpus.open("path/to/corpus"), budget=65536, max_length=512, seed=0)    # doctest: +SKIP
    >>> packed.steps(), packed.fill()                                                      # doctest: +SKIP
    (65, 0.9998)
    >>> ids, cu, special, words = packed.batch(17)                                         # doctest: +SKIP

    """

    def __init__(self, corpus: Corpus, budget: int, max_length: int, seed: int) -> None:
        if max_length <= SPECIAL:
            raise InputError(
                f"max_length={max_length} must be above {SPECIAL}: that many special tokens stand around each piece"
            )
        if budget < max_length:
            raise InputError(
                f"budget={budget} must be at least max_length={max_length}, or no whole piece fits into a step"
            )
        if not corpus.tokens:
            raise InputError(f"{corpus.folder} holds no tokens")
        if corpus.cls_id is None or corpus.sep_id is None:
            raise ConfigError(f"the tokenizer of {corpus.folder} has no token to open or close a text; both are needed")
        self.corpus, self.budget, self.max_length, self.seed = corpus, budget, max_length, seed
        room = max_length - SPECIAL
        counts = -(-corpus.lengths // room)  # pieces of each document; an empty one has none
        self._documents = np.repeat(np.arange(len(corpus)), counts)  # (pieces,)
        first = np.cumsum(counts) - counts
        self._starts = (np.arange(len(self._documents)) - np.repeat(first, counts)) * room
        self._sizes = np.minimum(corpus.lengths[self._documents] - self._starts, room).astype(np.int32)
        super().__init__(self._sizes + SPECIAL, budget, seed)

    def step(self, n: int) -> list[tuple[int, int, int]]:
        """The pieces of a step: document, first token, end."""
        pieces = self.pieces(n)
        documents, starts, sizes = (part[pieces].tolist() for part in (self._documents, self._starts, self._sizes))
        return [(one, start, start + size) for one, start, size in zip(documents, starts, sizes, strict=True)]

    def batch(self, n: int) -> tuple[Numbers, NDArray[np.int32], Bits, Bits]:
        """The tokens of a step, flat: ids (T,), cu (B + 1,), special (T,), words (T,).

        Piece b is tokens `cu[b]` to `cu[b + 1]`. `special` are the tokens around each piece and those that a text
        spells out, unknown ones among them. `words` are the tokens that begin a word; special ones, and the first of a
        piece, always do.
        """
        pieces = self.pieces(n)
        return flat(self.corpus, self._documents[pieces], self._starts[pieces], self._sizes[pieces])


def flat(
    corpus: Corpus, documents: Numbers, starts: Numbers, sizes: NDArray[np.int32]
) -> tuple[Numbers, NDArray[np.int32], Bits, Bits]:
    """Pieces of documents with the special tokens around each, as in `Packed.batch`."""
    assert corpus.cls_id is not None
    assert corpus.sep_id is not None
    lengths = sizes.astype(np.int64)
    cu = np.concatenate([[0], np.cumsum(lengths + SPECIAL)])  # (B + 1,)
    ids, words = np.empty(cu[-1], np.int64), np.ones(cu[-1], np.bool_)
    inner = np.ones(cu[-1], np.bool_)  # neither the first nor the last of a piece
    inner[cu[:-1]] = inner[cu[1:] - 1] = False
    ids[cu[:-1]], ids[cu[1:] - 1] = corpus.cls_id, corpus.sep_id
    ids[inner], words[inner] = corpus.gather(documents, starts, lengths)
    words[cu[:-1] + 1] = True
    special = np.isin(ids, np.array(corpus.about["tokenizer"]["special"], np.int64))
    words |= special
    return ids, cu.astype(np.int32), special, words


def first_fit(sizes: NDArray[np.int32], budget: int) -> tuple[Numbers, Numbers]:
    """Sizes in the order in which steps take them, and where each step begins (steps + 1,).

    A step takes what comes first as long as it fits, then of what comes within `AHEAD` budgets whatever still fits.

    >>> first_fit(np.array([3, 3, 3, 1], np.int32), 7)
    (array([0, 1, 3, 2]), array([0, 3, 4]))
    """
    total = np.cumsum(sizes, dtype=np.int64)
    waiting = np.zeros(0, np.int64)
    read = spent = 0  # pieces that were looked at; tokens that were taken
    taken: list[Numbers] = []
    while len(waiting) or read < len(sizes):
        # In the window: what waits, and more until AHEAD budgets are there.
        until = max(int(np.searchsorted(total, spent + AHEAD * budget)), read + PIECES - len(waiting))
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
    cuts = np.concatenate([[0], np.cumsum([len(one) for one in taken])])
    return np.concatenate([np.zeros(0, np.int64), *taken]), cuts
