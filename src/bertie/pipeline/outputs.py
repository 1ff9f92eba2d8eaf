"""Outputs of a forward pass: one per window, possibly as a pending copy from the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.text.batch import Batch

FloatArray = NDArray[np.float32]
Output = TypeVar("Output")


class PendingCopy(Sequence[FloatArray]):
    """Rows that are being copied from a device to the host; accessing one waits for the copy.

    >>> list(PendingCopy(torch.eye(2), list, 2))
    [array([1., 0.], dtype=float32), array([0., 1.], dtype=float32)]
    """

    def __init__(self, rows: Tensor | FloatArray, split: Callable[[FloatArray], list[FloatArray]], length: int) -> None:
        self._split, self._length = split, length
        self._rows: Tensor | FloatArray = rows
        self._done: torch.cuda.Event | None = None
        self._parts: list[FloatArray] | None = None
        if isinstance(rows, Tensor) and rows.is_cuda:
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(rows.device))  # which need not be that of the current device

    @classmethod
    def per_text(cls, rows: Tensor | FloatArray) -> PendingCopy:
        """(B, n), one row per text."""
        return cls(rows, list, len(rows))

    @classmethod
    def per_token(cls, rows: Tensor, batch: Batch) -> PendingCopy:
        """(T, n), one row per token, split into texts."""
        bounds = list(accumulate(batch.lengths, initial=0))
        return cls(rows, lambda host: [host[start:end] for start, end in pairwise(bounds)], len(batch))

    @property
    def host(self) -> FloatArray:
        """All rows, once the copy is complete."""
        if isinstance(self._rows, Tensor):
            if self._done is not None:
                self._done.synchronize()
            self._rows = self._rows.cpu().numpy()
        return self._rows

    def _split_rows(self) -> list[FloatArray]:
        if self._parts is None:
            self._parts = self._split(self.host)
        return self._parts

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[FloatArray]:
        return iter(self._split_rows())

    def __getitem__(self, index: Any) -> Any:
        return self._split_rows()[index]


class Outputs(Generic[Output]):
    """The outputs of a chunk's windows, collected from its batches."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._batches: list[tuple[Sequence[int], Sequence[Output]]] = []

    def add(self, windows: Sequence[int], outputs: Sequence[Output]) -> None:
        """Add the outputs of one batch; `windows` are the indices of its windows."""
        self._batches.append((windows, outputs))

    def collect(self) -> list[Output]:
        """All outputs in the order of the windows, once they have been copied to the host."""
        if len(self._batches) == 1 and len(self._batches[0][0]) == 1:
            return list(self._batches[0][1])
        by_window = {
            w: output for windows, outputs in self._batches for w, output in zip(windows, outputs, strict=True)
        }
        return [by_window[w] for w in range(self._count)]

    def stack(self) -> FloatArray:
        """(windows, n) all outputs, one row each."""
        if len(self._batches) == 1:
            only = self._batches[0][1]
            if self._count == 1:
                return only.host if isinstance(only, PendingCopy) else cast("FloatArray", only[0])[None]
        rows: FloatArray | None = None
        for windows, outputs in self._batches:
            batch = (
                outputs.host if isinstance(outputs, PendingCopy) else np.stack(cast("list[FloatArray]", list(outputs)))
            )
            if rows is None:
                rows = np.empty((self._count, batch.shape[1]), np.float32)
            rows[windows] = batch
        assert rows is not None
        return rows
