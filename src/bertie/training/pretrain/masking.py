"""Masking for masked-language modelling: which tokens are predicted, and what the model reads instead.

Masking units are single tokens, whole words, or spans of words. Systematic sampling: the units of a text
are placed in random order on a circle as long as the text, and an arc of `rate` of the circle is chosen
at a random offset. A unit that begins within the arc is masked. So each unit is masked with probability
exactly `rate`, whatever its length, and the number of masked tokens of a text differs from its
expectation by at most the units at the arc's two ends. Of 25 tokens at 15%, three or four are masked,
3.75 on average. The exception is a text that would have nothing masked, as may happen below 1 / rate
tokens: one of its units is masked.
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

_DOMAIN = 0x6D61736B  # separates this random stream from others with the same seed


@dataclass(frozen=True, slots=True)
class Masking:
    """A masking policy; the defaults are BERT's 80/10/10.

    >>> ids = np.array([101, 7592, 2088, 2003, 2307, 102])
    >>> special = np.isin(ids, (101, 102))
    >>> masking, rng = Masking(rate=0.5), masking_rng(0, epoch=3, index=17)
    >>> positions = masking.choose(special, ~special, np.array([0, 6]), rng)
    >>> masked, targets = masking.apply(ids, positions, rng, vocab=30522, mask_id=103, never=(0, 100, 101, 102, 103))
    >>> len(positions), bool((targets == ids[positions]).all()), masked[[0, 5]].tolist()
    (2, True, [101, 102])
    """

    rate: float = 0.15  # fraction of tokens to predict
    mask: float = 0.8  # fraction of these replaced by the mask token
    random: float = 0.1  # fraction replaced by a random token; the rest is kept
    unit: Unit = "token"
    span_mean: float = 3.0  # mean words per span; SpanBERT has 3.8
    span_max: int = 10  # maximum words per span

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"Masking.rate={self.rate} must be greater than 0 and at most 1")
        for field in ("mask", "random"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"Masking.{field}={getattr(self, field)} must be between 0 and 1")
        if self.mask + self.random > 1 + 1e-9:
            raise ConfigError(f"Masking.mask={self.mask} and random={self.random} must not exceed 1 together")
        if self.unit not in get_args(Unit):
            raise ConfigError(f"Masking.unit={self.unit!r} must be one of {', '.join(get_args(Unit))}")
        if self.span_max < 1:
            raise ConfigError(f"Masking.span_max={self.span_max} must be at least 1")
        if not 1 <= self.span_mean <= (1 + self.span_max) / 2:
            raise ConfigError(
                f"Masking.span_mean={self.span_mean} must be between 1 and {(1 + self.span_max) / 2}, the mean of "
                f"lengths up to span_max={self.span_max} where none is likelier than a shorter one"
            )

    @property
    def keep(self) -> float:
        """Fraction of the masked tokens that is left unchanged."""
        return max(0.0, 1 - self.mask - self.random)

    def choose(self, special: Bools, words: Bools, cu: Ints, rng: np.random.Generator) -> Ints:
        """(M,) sorted positions to mask in a flat batch of T tokens; at least one per text that has maskable tokens.

        `special` (T,) tokens are never masked, `words` (T,) marks tokens that begin a word, and text b is tokens
        `cu[b]` to `cu[b + 1]`. Random numbers are drawn for the batch as a whole. For masks that do not depend on
        the batch, pass each text alone, with its own `masking_rng`.
        """
        if not len(special) == len(words) == cu[-1]:
            raise InputError(f"special has {len(special)} tokens, words {len(words)}, and cu ends at {cu[-1]}")
        at = np.flatnonzero(~special)  # (N,) maskable tokens
        if not len(at):
            return at
        owner = np.searchsorted(cu, at, side="right") - 1  # (N,) the text of each
        starts = self._starts(at, owner, words[at], rng)  # (N,)
        first = np.flatnonzero(starts)  # (U,) each unit's first token
        sizes = np.diff(first, append=len(at))
        text = owner[first]  # (U,) sorted, also after shuffling units within texts
        order = np.argsort(text + rng.random(len(first)))  # a random order within each text

        lengths = np.bincount(owner, minlength=len(cu) - 1)  # (B,) circumferences
        before = (
            np.cumsum(sizes[order]) - sizes[order] - (np.cumsum(lengths) - lengths)[text]
        )  # (U,) position on its circle
        point = rng.random(len(lengths)) * lengths
        chosen = np.mod(before - point[text], lengths[text]) < self.rate * lengths[text]  # (U,) in that order
        empty = (np.bincount(text, weights=chosen, minlength=len(lengths)) == 0) & (lengths > 0)
        chosen[np.searchsorted(text, np.flatnonzero(empty))] = True

        masked = np.empty_like(chosen)
        masked[order] = chosen
        positions: Ints = at[np.repeat(masked, sizes)]
        return positions

    def _starts(self, at: Ints, owner: Ints, words: Bools, rng: np.random.Generator) -> Bools:
        """(N,) whether each token begins a unit. No unit extends past a special token or into the next text."""
        if self.unit == "token":
            return np.ones(len(at), dtype=bool)
        runs = np.diff(at, prepend=-2) != 1
        runs |= np.diff(owner, prepend=-1) != 0
        words = words | runs
        if self.unit == "word":
            return words
        # Spans are laid end to end over all words. A span that crosses the end of a run is split there.
        number = np.cumsum(words) - 1  # (N,) the word of each token
        count = int(number[-1]) + 1
        lengths = 1 + rng.choice(self.span_max, count, p=_span_probabilities(self.span_mean, self.span_max))
        ends = np.cumsum(lengths)
        begins = np.zeros(count, dtype=bool)
        begins[ends[ends < count]] = True
        starts: Bools = runs | (words & begins[number])
        return starts

    def apply(
        self, ids: Ints, positions: Ints, rng: np.random.Generator, vocab: int, mask_id: int, never: Sequence[int]
    ) -> tuple[Ints, Ints]:
        """Return the masked ids (T,) and the targets at `positions` (M,).

        Random tokens are drawn from all ids below `vocab` except `never`, the special tokens.
        """
        excluded = np.unique(np.asarray(never, dtype=np.int64))
        if not 0 <= mask_id < vocab:
            raise InputError(f"mask_id={mask_id} must be in the vocabulary of {vocab}")
        if len(excluded) and not 0 <= excluded[0] <= excluded[-1] < vocab:
            raise InputError(f"never={list(never)!r:.80} must be in the vocabulary of {vocab}")
        if len(excluded) == vocab:
            raise InputError(f"never={list(never)!r:.80} leaves none of the vocabulary of {vocab} to draw from")
        targets = ids[positions]
        fate = rng.random(len(positions))
        drawn = rng.integers(vocab - len(excluded), size=len(positions))
        # From the rank among allowed ids to the id: shift past each excluded id.
        drawn += np.searchsorted(excluded - np.arange(len(excluded)), drawn, side="right")
        masked = ids.copy()
        kept_or_random = np.where(fate < self.mask + self.random, drawn, targets)
        masked[positions] = np.where(fate < self.mask, mask_id, kept_or_random)
        return masked, targets


def masking_rng(seed: int, epoch: int | None, index: int) -> np.random.Generator:
    """Random generator of text or batch `index`: a new stream in each epoch (dynamic masking).

    Without an epoch it is always the same (static masking): that of epoch 0.

    >>> bool(masking_rng(7, None, 3).random() == masking_rng(7, None, 3).random())
    True
    """
    return np.random.default_rng([_DOMAIN, seed, index, epoch or 0])


@lru_cache(maxsize=8)
def _span_probabilities(mean: float, most: int) -> Floats:
    """(most,) probabilities of the lengths 1 to `most`: a truncated geometric distribution with this mean."""
    low, high = 0.0, 1.0  # bisect the ratio of consecutive probabilities; the mean grows with it
    lengths = np.arange(1, most + 1)
    for _ in range(60):
        ratio = (low + high) / 2
        weights: Floats = np.power(ratio, lengths - 1.0)
        probabilities: Floats = weights / weights.sum()
        low, high = (ratio, high) if probabilities @ lengths < mean else (low, ratio)
    return probabilities
