"""Candidates of any number of tokens for a mask, ranked by their pseudo-log-likelihood.

A candidate replaces the mask in the text, and its tokens t1 … tk are predicted from left to right: each from
the text and the candidate's tokens before it, while itself and the candidate's tokens after it are masked. The score is
the sum of their log-probabilities,

    log p(t1 | k masks) + log p(t2 | t1, k − 1 masks) + … + log p(tk | t1 … tk−1, one mask),

which is PLL-word-l2r of Kauf and Ivanova (2023, "A better way to do masked language model scoring") with the whole
candidate as one word. Masking only one token at a time, as Salazar et al. (2020) do for whole texts, would overrate
words of several tokens, whose other tokens give them away. The score of a single-token candidate is its
log-probability, and the probabilities of all candidates of k tokens sum to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bertie.errors import InputError
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput
from bertie.text.encoding import Encodings, IntArray
from bertie.text.windows import Window

MASKED_COPIES = 1 << 18  # tokens of masked copies per batch
# Read inputs as windows; and the log-probability (N,) of `targets` (N,) at `positions` (N,) of N masked windows.
Read = Callable[[Sequence[TaskInput[None]]], list[WindowedText[None]]]
Score = Callable[[Encodings, IntArray, IntArray], Sequence[float]]


class PlacedCandidate(NamedTuple):
    """The tokens of a candidate in the text."""

    ids: IntArray  # (k,)
    window: Window  # that holds all of them
    positions: IntArray  # (k,) of the tokens in the window


def place(text: str, start: int, end: int, candidates: Sequence[str], name: str, read: Read) -> list[PlacedCandidate]:
    """Replace the mask, `text[start:end]`, by each candidate, and find its tokens."""
    inputs = [TaskInput(name, (text[:start] + candidate + text[end:],), None) for candidate in candidates]
    return [
        _find(variant, start, start + len(candidate), candidate)
        for candidate, variant in zip(candidates, read(inputs), strict=True)
    ]


def _find(variant: WindowedText[None], start: int, end: int, candidate: str) -> PlacedCandidate:
    whole = variant.encoding
    offsets = whole.offsets
    inside = (offsets[:, 1] > start) & (offsets[:, 0] < end) & (offsets[:, 1] > offsets[:, 0])
    tokens = np.flatnonzero(inside & (whole.sequence_ids == 0))
    if not len(tokens):
        raise InputError(f"candidate {candidate!r} has no tokens")
    holding = [window for window in variant.windows if np.isin(tokens, window.indices).all()]
    if not holding:
        raise InputError(f"candidate {candidate!r:.80} has {len(tokens)} tokens, more than the maximum length allows")
    middle = tokens[len(tokens) // 2]
    window = next((w for w in holding if w.owned[np.searchsorted(w.indices, middle)]), holding[0])
    return PlacedCandidate(whole.ids[tokens], window, np.searchsorted(window.indices, tokens))


def log_likelihoods(placed: Sequence[PlacedCandidate], mask_id: int, score: Score) -> list[float]:
    """The pseudo-log-likelihood of each candidate."""
    sums = np.zeros(len(placed))
    for owners, copies, positions, targets in _copies(placed, mask_id):
        np.add.at(sums, owners, np.asarray(score(copies, positions, targets), dtype=np.float64))
    return [float(value) for value in sums]


def _copies(
    placed: Sequence[PlacedCandidate], mask_id: int
) -> Iterator[tuple[list[int], Encodings, IntArray, IntArray]]:
    """Masked copies of the windows, by batches: the candidate of each, the copies, the positions and the targets."""
    rows: list[tuple[int, IntArray, IntArray, int, int]] = []
    size = 0
    for owner, (ids, window, positions) in enumerate(placed):
        for i, position in enumerate(positions.tolist()):
            copy = window.encoding.ids.copy()
            copy[positions[i:]] = mask_id
            rows.append((owner, copy, window.encoding.segments, position, int(ids[i])))
            size += len(copy)
            if size >= MASKED_COPIES:
                yield _batch(rows)
                rows, size = [], 0
    if rows:
        yield _batch(rows)


def _batch(
    rows: Sequence[tuple[int, IntArray, IntArray, int, int]],
) -> tuple[list[int], Encodings, IntArray, IntArray]:
    owners, ids, segments, positions, targets = zip(*rows, strict=True)
    lengths = np.array([len(row) for row in ids], np.int64)
    copies = Encodings(np.concatenate(ids), np.concatenate(segments), lengths)
    return list(owners), copies, np.array(positions, np.int64), np.array(targets, np.int64)
