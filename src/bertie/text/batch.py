"""From encodings to one flat run of tokens: `Batch`, and the packing of texts into token budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.text.tokenizer import Encoding


@dataclass(frozen=True, slots=True)
class Batch:
    """Several texts as one flat run of T tokens. There is no attention mask, because there is no padding.

    >>> batch = Batch.from_ids([[101, 7592, 102], [101, 102]])
    >>> batch.ids.tolist(), batch.cu_seqlens.tolist(), batch.max_len
    ([101, 7592, 102, 101, 102], [0, 3, 5], 3)
    """

    ids: Tensor  # (T,) int64
    segments: Tensor  # (T,) int64
    positions: Tensor  # (T,) int64, counted from 0 in each text
    cu_seqlens: Tensor  # (B + 1,) int32: text b is tokens cu_seqlens[b] to cu_seqlens[b + 1]
    lengths: tuple[int, ...]  # the same on the host, so that no kernel has to ask the device
    # (T,) bool: tokens that see, and are seen by, the whole text in models with global tokens; None elsewhere.
    global_tokens: Tensor | None = None

    @property
    def max_len(self) -> int:
        """The longest text, in tokens."""
        return max(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def from_encodings(cls, encodings: Sequence[Encoding]) -> Batch:
        """Lay encodings end to end."""
        return cls._flat([e.ids for e in encodings], [e.segments for e in encodings])

    @classmethod
    def from_ids(cls, ids: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None) -> Batch:
        """Lay token ids end to end; all segments are 0 unless given."""
        if segments is None:
            segments = [[0] * len(one) for one in ids]
        return cls._flat(
            [np.asarray(one, dtype=np.int64) for one in ids], [np.asarray(one, dtype=np.int64) for one in segments]
        )

    @classmethod
    def _flat(cls, ids: Sequence[np.ndarray], segments: Sequence[np.ndarray]) -> Batch:
        if not ids:
            raise InputError("an empty batch: give at least one text")
        lengths = tuple(len(one) for one in ids)
        for b, (one, segment) in enumerate(zip(ids, segments, strict=True)):
            if one.ndim != 1 or len(one) == 0:
                raise InputError(f"text {b} of the batch has no tokens (shape {one.shape}); each needs at least one")
            if len(segment) != len(one):
                raise InputError(f"text {b} of the batch has {len(one)} ids but {len(segment)} segments")
        return cls(
            ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            segments=torch.from_numpy(np.concatenate(segments).astype(np.int64)),
            positions=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
            cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
            lengths=lengths,
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return replace(
            self,
            ids=self.ids.to(device),
            segments=self.segments.to(device),
            positions=self.positions.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            global_tokens=None if self.global_tokens is None else self.global_tokens.to(device),
        )

    def with_globals(self, global_tokens: Tensor | None) -> Batch:
        """The same batch with other global tokens."""
        return replace(self, global_tokens=global_tokens)

    def text_of_token(self) -> Tensor:
        """(T,) the number of the text that each token belongs to."""
        lengths = self.cu_seqlens.diff().long()
        return torch.repeat_interleave(
            torch.arange(len(self), device=lengths.device), lengths, output_size=len(self.ids)
        )


def pack(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Group texts of like length into batches of at most `budget` tokens, longest first.

    A text longer than the budget is a batch of its own. Indices let the caller restore the order.

    >>> list(pack([3, 9, 2, 4], budget=8))
    [[1], [3, 0], [2]]
    """
    if budget < 1:
        raise InputError(f"budget={budget} must be at least 1 token")
    group: list[int] = []
    used = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if group and used + lengths[index] > budget:
            yield group
            group, used = [], 0
        group.append(index)
        used += lengths[index]
    if group:
        yield group
