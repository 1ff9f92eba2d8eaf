"""Which tokens of a text are hidden from the model, and what it reads in their place.

A text's tokens are taken in units: single tokens, whole words, or spans of words. The units of a text are put in a
random order on a circle as long as the text, and an arc of it is chosen: `rate` of the circle, from a random point.
A unit that begins within the arc is hidden. So each unit has exactly the chance `rate`, whatever its length, and no
text is further from its share than the units at the arc's two ends. Single tokens are so rounded up or down at
random: of 25 tokens at 15%, three or four are hidden, 3.75 in the mean. Only a text that would have nothing hidden is
an exception, as one of fewer than 1 / rate tokens may be: one unit of it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from bertie.errors import ConfigError, InputError

Unit = Literal["token", "word", "span"]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer]
Floats = NDArray[np.float64]

_DOMAIN = 0x6D61736B  # sets these draws apart from others that are made from the same seed


@dataclass(frozen=True, slots=True)
class Masking:
    """How much is hidden, and how: BERT's policy unless said otherwise.

    >>> ids = np.array([101, 7592, 2088, 2003, 2307, 102])
    >>> special = np.isin(ids, (101, 102))
    >>> masking, rng = Masking(rate=0.5), seeded(0, epoch=3, index=17)
    >>> places = masking.choose(special, ~special, np.array([0, 6]), rng)
    >>> masked, targets = masking.apply(ids, places, rng, vocab=30522, mask_id=103, never=(0, 100, 101, 102, 103))
    >>> len(places), bool((targets == ids[places]).all()), masked[[0, 5]].tolist()
    (2, True, [101, 102])
    """

    rate: float = 0.15  # the share of the tokens that are hidden
    mask: float = 0.8  # of these: the share that is read as the mask token
    random: float = 0.1  # and as any token at all; the rest is read as it is
    unit: Unit = "token"
    span_mean: float = 3.0  # words in a span, in the mean; SpanBERT has 3.8
    span_most: int = 10  # words in a span, at most

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"Masking.rate={self.rate} must be greater than 0 and at most 1")
        for field in ("mask", "random"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"Masking.{field}={getattr(self, field)} must lie between 0 and 1")
        if self.mask + self.random > 1 + 1e-9:
            raise ConfigError(f"Masking.mask={self.mask} and random={self.random} must not exceed 1 together")
        if self.unit not in get_args(Unit):
            raise ConfigError(f"Masking.unit={self.unit!r} must be one of {', '.join(get_args(Unit))}")
        if self.span_most < 1:
            raise ConfigError(f"Masking.span_most={self.span_most} must be at least 1")
        if not 1 <= self.span_mean <= (1 + self.span_most) / 2:
            raise ConfigError(
                f"Masking.span_mean={self.span_mean} must lie between 1 and {(1 + self.span_most) / 2}, the mean of "
                f"lengths up to span_most={self.span_most} where none is likelier than a shorter one"
            )

    @property
    def keep(self) -> float:
        """The share of the hidden tokens that is read as it is: what `mask` and `random` leave."""
        return max(0.0, 1 - self.mask - self.random)

    def choose(self, special: Bools, words: Bools, cu: Ints, rng: np.random.Generator) -> Ints:
        """(M,) the places to hide of a flat run of T tokens, in order; at least one of each text that has any.

        `special` (T,) tokens are never hidden, `words` (T,) says which tokens begin a word, and text b is tokens
        `cu[b]` to `cu[b + 1]`. The draws are made for the run as a whole. To hide the same of a text whatever it is
        packed with, give each text alone, with its own `seeded`.
        """
        if not len(special) == len(words) == cu[-1]:
            raise InputError(f"special has {len(special)} tokens, words {len(words)}, and cu ends at {cu[-1]}")
        at = np.flatnonzero(~special)  # (N,) what may be hidden
        if not len(at):
            return at
        owner = np.searchsorted(cu, at, side="right") - 1  # (N,) the text of each
        starts = self._starts(at, owner, words[at], rng)  # (N,)
        first = np.flatnonzero(starts)  # (U,) each unit's first token
        sizes = np.diff(first, append=len(at))
        text = owner[first]  # (U,) in order, and so it stays when each text's units change places
        order = np.argsort(text + rng.random(len(first)))  # within each text, at random

        lengths = np.bincount(owner, minlength=len(cu) - 1)  # (B,) the circles
        before = np.cumsum(sizes[order]) - sizes[order] - (np.cumsum(lengths) - lengths)[text]  # (U,) in its circle
        point = rng.random(len(lengths)) * lengths
        chosen = np.mod(before - point[text], lengths[text]) < self.rate * lengths[text]  # (U,) in that order
        empty = (np.bincount(text, weights=chosen, minlength=len(lengths)) == 0) & (lengths > 0)
        chosen[np.searchsorted(text, np.flatnonzero(empty))] = True

        hidden = np.empty_like(chosen)
        hidden[order] = chosen
        places: Ints = at[np.repeat(hidden, sizes)]
        return places

    def _starts(self, at: Ints, owner: Ints, words: Bools, rng: np.random.Generator) -> Bools:
        """(N,) which tokens begin a unit. No unit goes on past a special token or into the next text."""
        if self.unit == "token":
            return np.ones(len(at), dtype=bool)
        runs = np.diff(at, prepend=-2) != 1
        runs |= np.diff(owner, prepend=-1) != 0
        words = words | runs
        if self.unit == "word":
            return words
        # Spans are drawn end to end over all words. One that meets the end of a run is cut there, and what is left of
        # it begins the next.
        number = np.cumsum(words) - 1  # (N,) the word of each token
        count = int(number[-1]) + 1
        lengths = 1 + rng.choice(self.span_most, count, p=_span_chances(self.span_mean, self.span_most))
        ends = np.cumsum(lengths)
        begins = np.zeros(count, dtype=bool)
        begins[ends[ends < count]] = True
        starts: Bools = runs | (words & begins[number])
        return starts

    def apply(
        self, ids: Ints, places: Ints, rng: np.random.Generator, vocab: int, mask_id: int, never: Sequence[int]
    ) -> tuple[Ints, Ints]:
        """What the model reads (T,), and the tokens it is to find at `places` (M,).

        Random tokens are drawn from all ids below `vocab` except `never`: the special tokens.
        """
        barred = np.unique(np.asarray(never, dtype=np.int64))
        if not 0 <= mask_id < vocab:
            raise InputError(f"mask_id={mask_id} must lie in the vocabulary of {vocab}")
        if len(barred) and not 0 <= barred[0] <= barred[-1] < vocab:
            raise InputError(f"never={list(never)!r:.80} must lie in the vocabulary of {vocab}")
        if len(barred) == vocab:
            raise InputError(f"never={list(never)!r:.80} leaves none of the vocabulary of {vocab} to draw from")
        targets = ids[places]
        fate = rng.random(len(places))
        drawn = rng.integers(vocab - len(barred), size=len(places))
        # From the number among those allowed to the id: past each barred id, one more.
        drawn += np.searchsorted(barred - np.arange(len(barred)), drawn, side="right")
        masked = ids.copy()
        kept_or_drawn = np.where(fate < self.mask + self.random, drawn, targets)
        masked[places] = np.where(fate < self.mask, mask_id, kept_or_drawn)
        return masked, targets


def seeded(seed: int, epoch: int | None, index: int) -> np.random.Generator:
    """The draws of text, or batch, number `index`: new ones each epoch (dynamic masking).

    Without an epoch they are always the same (static masking): those of epoch 0.

    >>> bool(seeded(7, None, 3).random() == seeded(7, None, 3).random())
    True
    """
    return np.random.default_rng([_DOMAIN, seed, index, epoch or 0])


@lru_cache(maxsize=8)
def _span_chances(mean: float, most: int) -> Floats:
    """(most,) the chance of each length from 1: geometric up to `most`, with this mean."""
    low, high = 0.0, 1.0  # how much less likely each length is than the one before; the mean grows with it
    lengths = np.arange(1, most + 1)
    for _ in range(60):
        ratio = (low + high) / 2
        weights: Floats = np.power(ratio, lengths - 1.0)
        chances: Floats = weights / weights.sum()
        low, high = (ratio, high) if chances @ lengths < mean else (low, ratio)
    return chances
