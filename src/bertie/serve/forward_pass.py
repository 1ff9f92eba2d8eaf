"""Forward passes over windows of several jobs: which windows share one, its launch, and its outputs.

On a GPU a launched pass runs asynchronously. Whatever would wait for the device, such as the check for non-finite
values, is done when its outputs are collected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.nn.model import Model
from bertie.pipeline.outputs import PendingCopy
from bertie.serve.batch_budget import is_out_of_memory
from bertie.serve.lanes import JobSlice, QueuedJob
from bertie.serve.tickets import current_ticket
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings

Answer = tuple[QueuedJob, int, Any]  # a job, the index of one of its windows, and the window's output


@dataclass(slots=True, eq=False)
class QueuedWindow:
    """One window of a job."""

    job: QueuedJob
    index: int
    start: int  # of its tokens
    length: int

    @property
    def parameters(self) -> Any:
        """What the task needs for this window besides its hidden states."""
        return None if self.job.parameters is None else self.job.parameters[self.index]


@dataclass(slots=True)
class ForwardPass:
    """A pass that has been launched. `outputs` are those of each group of windows of the same task."""

    windows: list[QueuedWindow]
    batch: Batch
    hidden: Tensor  # (T, D)
    total: PendingCopy  # (1,) the sum of all hidden states
    outputs: list[tuple[list[QueuedWindow], Sequence[Any]]] = field(default_factory=list)
    failed: list[QueuedWindow] = field(default_factory=list)  # windows whose outputs could not be computed,
    error: Exception | None = None  # and why

    @torch.inference_mode()
    def non_finite(self) -> list[int]:
        """The windows whose hidden states are not all finite; waits for the device."""
        if np.isfinite(self.total.host).all():  # if the sum is finite, all are: one kernel instead of six
            return []
        finite = self.hidden.isfinite()
        return sorted(set(self.batch.text_of_token()[~finite.all(-1)].tolist()))

    def answers(self) -> list[Answer]:
        """The outputs of all windows; waits for the device."""
        return [
            (window.job, window.index, output)
            for windows, outputs in self.outputs
            for window, output in zip(windows, outputs, strict=True)
        ]


@dataclass(slots=True)
class RunningBatch:
    """A batch that has been launched."""

    slices: list[JobSlice]
    long: bool
    start: float = field(default_factory=time.perf_counter)
    passes: list[ForwardPass] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)  # of passes that were retried
    launched: torch.cuda.Event | None = None  # after the last kernel; None: on a CPU it is done

    @property
    def cost(self) -> int:
        """Of its windows, in tokens."""
        return sum(sum(part.job.costs[part.first : part.last]) for part in self.slices)

    @property
    def is_done(self) -> bool:
        """Whether collecting the outputs waits for nothing."""
        try:
            return self.launched is None or bool(self.launched.query())  # type: ignore[no-untyped-call]
        except RuntimeError:  # of a kernel; collecting the outputs reports it
            return True


@torch.inference_mode()
def launch(model: Model, windows: list[QueuedWindow]) -> ForwardPass:
    """Run windows that can share a forward pass. An error of a task's outputs is noted, that of the encoder raised."""
    batch = _make_batch(windows).to(model.device)
    hidden = model.hidden(batch, _pass_head(windows[0].job.task))  # (T, D)
    running = ForwardPass(windows, batch, hidden, PendingCopy.per_text(hidden.sum(dtype=torch.float32)[None]))
    bounds, first = [], 0
    for _, group in groupby(windows, key=lambda window: id(window.job.task)):
        bounds.append((first, first + len(own := list(group)), own))
        first += len(own)
    ends = list(accumulate(batch.lengths, initial=0)) if len(bounds) > 1 else [0, len(batch.ids)]
    for first, last, own in bounds:
        tokens = slice(ends[first], ends[last]) if len(bounds) > 1 else slice(None)
        try:
            running.outputs.append((own, _head_outputs(model, own, batch.slice(first, last), hidden[tokens])))
        except Exception as caught:
            running.failed, running.error = running.failed + own, drop_traceback(caught)
    return running


def shared_passes(slices: Sequence[JobSlice]) -> Iterator[list[QueuedWindow]]:
    """Windows grouped by forward pass. Within one, a task's windows are adjacent, sorted by length."""
    windows: list[tuple[tuple[str, int, int], QueuedWindow]] = []
    heads: dict[int, str] = {}  # by task
    for part in slices:
        job = part.job
        key = id(job.task)
        if key not in heads:
            heads[key] = _pass_head(job.task) or ""
        head, lengths = heads[key], job.lengths
        starts = [0] if len(lengths) == 1 else job.windows.starts.tolist()
        for index in range(part.first, part.last):
            window = QueuedWindow(job, index, starts[index], lengths[index])
            # The CPU attention kernel is faster with texts of equal length next to each other.
            windows.append(((head, key, window.length), window))
    windows.sort(key=lambda pair: pair[0])
    for _, group in groupby(windows, key=lambda pair: pair[0][0]):
        yield [window for _, window in group]


def drop_traceback(error: Exception) -> Exception:
    """Remove the traceback of an out-of-memory error: it keeps alive the tensors that there was no memory for."""
    return error.with_traceback(None) if is_out_of_memory(error) else error


def is_lost(device: torch.device, error: BaseException) -> bool:
    """Whether this process cannot use a device any more: after some errors of kernels, every call of CUDA fails."""
    if device.type == "cuda" and isinstance(error, RuntimeError) and not is_out_of_memory(error):
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
    return False


def _pass_head(task: Any) -> str | None:
    """The name of a head that needs a forward pass of its own; None: it can share one."""
    if task.head is None:
        return None
    head = task.model.head(task.head).cfg
    own = head.segments != "given" or (task.model.config.global_tokens and head.globals != "none")
    return task.head if own else None


def _make_batch(windows: Sequence[QueuedWindow]) -> Batch:
    ids, segments = [], []
    for window in windows:
        all_tokens, tokens = window.job.windows, slice(window.start, window.start + window.length)
        ids.append(all_tokens.ids[tokens])
        segments.append(all_tokens.segments[tokens])
    lengths = np.array([window.length for window in windows])
    # As int64, which the model takes; a front end sends smaller numbers.
    flat = np.concatenate(ids, dtype=np.int64), np.concatenate(segments, dtype=np.int64)
    return Batch.select(Encodings(*flat, lengths))


def _head_outputs(model: Model, windows: Sequence[QueuedWindow], batch: Batch, hidden: Tensor) -> Sequence[Any]:
    """The outputs of one task's windows."""
    used = None
    if any(window.job.parameters is not None for window in windows):
        parameters = [window.parameters for window in windows]
        used = None if all(value is None for value in parameters) else parameters
    # Outputs of a single request may be cancelled while they are computed.
    first = windows[0].job
    single = all(window.job.ticket is first.ticket for window in windows)
    reset = current_ticket.set(first.ticket if single else None)
    try:
        outputs: Sequence[Any] = first.task.outputs(model, hidden, batch, used)
    finally:
        current_ticket.reset(reset)
    return outputs
