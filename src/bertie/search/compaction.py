"""Merging segments of a local store, as in a log-structured merge tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bertie.search.records import Keys
from bertie.search.segments import BUILD_ROWS, VectorSegment
from bertie.search.vector_block import VectorBlock

FANOUT = 4  # segments of similar size that are merged; the size ratio between two levels
MAX_DELETED = 0.3  # share of deleted rows above which a segment is rewritten


def choose_segments(
    segments: Mapping[int, VectorSegment], tombstones: Keys, *, full: bool, segment_rows: int
) -> list[int]:
    """Return the segments to merge: several of similar size, or one with many deleted rows."""
    deleted = {number: len(segment.rows_of(tombstones)) for number, segment in segments.items()}
    if full:
        return list(deleted) if len(deleted) > 1 or any(deleted.values()) else []
    levels: dict[int, list[int]] = {}
    for number, segment in segments.items():
        if deleted[number] > MAX_DELETED * len(segment):
            return [number]
        levels.setdefault(int(math.log(max(len(segment) / segment_rows, 1), FANOUT)), []).append(number)
    return next((numbers for _, numbers in sorted(levels.items()) if len(numbers) >= FANOUT), [])


def merge_segments(segments: Sequence[VectorSegment], tombstones: Keys) -> tuple[Keys, Iterator[VectorBlock]]:
    """Return the keys and embeddings of segments in key order, without deleted rows."""
    live = [np.setdiff1d(np.arange(len(segment)), segment.rows_of(tombstones)) for segment in segments]
    keys = np.concatenate([segment.keys[rows] for segment, rows in zip(segments, live, strict=True)])
    origin = np.concatenate([np.full(len(rows), number) for number, rows in enumerate(live)])
    rows, order = np.concatenate(live), np.argsort(keys)
    first = segments[0].block

    def blocks() -> Iterator[VectorBlock]:
        for start in range(0, len(order), BUILD_ROWS):
            chunk = order[start : start + BUILD_ROWS]
            codes = np.empty((len(chunk), first.codes.shape[1]), first.codes.dtype)
            scales = None if first.scales is None else np.empty(len(chunk), np.float32)
            for number in np.unique(origin[chunk]):
                positions = np.flatnonzero(origin[chunk] == number)
                block = segments[number].block[rows[chunk[positions]]]
                codes[positions] = block.codes
                if scales is not None:
                    scales[positions] = block.scales
            yield VectorBlock(codes, scales)

    return keys[order], blocks()
