"""CUDA-graph replay: a forward pass or a training step is recorded once per batch size and replayed with one launch.

A small batch on a large GPU waits for Python to launch kernels. `ForwardGraphs` records the forward passes of a model
at inference, `GraphRecorder` is what it shares with training (training/step.py). A recorded size is a little larger
than the batches it serves: the rest are empty texts, and texts of leftover tokens whose rows are dropped. Whatever
cannot be recorded runs eagerly, as does everything that needs gradients, and everything on a CPU.

On by default where ops/dispatch.py says so; `bertie.ops.disable("cuda_graphs")` or BERTIE_DISABLE=cuda_graphs turns
it off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from bertie.text.batch import Batch, spare_ends

MIN_LONGEST = 16  # tokens of the longest text; attention has the same work below
MIN_STEP = 64  # tokens by which sizes differ at least
MAX_SEEN = 1024  # sizes remembered
# Times as often must a size occur before it is recorded, if it can be replayed in a larger one: recording takes as long
# as the GPU takes for the spare tokens of some hundred batches, and everybody waits for it.
LATER = 256
# Attention kernels start programs for the longest length of every text, also of the empty ones: for so many tokens
# that takes little time, and beyond for so many times as in the batch's own size.
MIN_GRID, MAX_GRID = 1 << 16, 8
MAX_BROKEN = 3  # captures of a model that could not be ended, after which none is tried any more
WARMUP = 2  # passes before recording: libraries initialize, kernels are compiled

_capture_lock = Lock()  # PyTorch allows one capture at a time in a process, whatever the model or the thread

Run = Callable[[Batch], Tensor]
T = TypeVar("T")


class GraphSize(NamedTuple):
    """The size of batch that a recording has room for."""

    tokens: int
    texts: int
    longest: int


def graph_size(lengths: Sequence[int], max_length: int) -> GraphSize:
    """The recorded size for a batch: few sizes serve all, with at most an eighth of spare tokens, or 63.

    Empty texts cost next to nothing, and a batch that is not replayed takes several times as long to launch.

    >>> graph_size([16] * 64, 512), graph_size([9, 30, 12], 512)
    (GraphSize(tokens=1024, texts=128, longest=16), GraphSize(tokens=64, texts=8, longest=32))
    """
    tokens = sum(lengths)
    longest = min(max_length, max(MIN_LONGEST, _power_of_2(max(lengths))))
    room = round_up(tokens, max(MIN_STEP, _power_of_2(tokens) // 16))
    # One more text than needed: texts of the longest kind can then not fill the room, which is how upper bounds of
    # lengths are told from lengths (ops/triton/disentangled_attention.py).
    texts = len(lengths) + -(-(room - tokens) // longest) + 1
    return GraphSize(room, max(8, _power_of_2(texts)), longest)


def round_up(n: int, step: int) -> int:
    """The smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class GraphRecorder:
    """Records functions as CUDA graphs that share one memory pool, and so must be replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._broken: list[torch.cuda.CUDAGraph] = []

    def record(
        self, run: Callable[[], T], *, warmup: int, error_mode: str = "global"
    ) -> tuple[Callable[[], object], T]:
        """Run `run` a few times, then record it: what replays it, and the outputs that a replay overwrites."""
        if len(self._broken) >= MAX_BROKEN:
            raise RuntimeError(f"{MAX_BROKEN} captures of CUDA graphs could not be ended")
        with torch.cuda.device(self.device):
            self.synchronize()
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(warmup):
                    run()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with self._capture(graph, error_mode):
                outputs = run()
        return graph.replay, outputs

    @contextmanager
    def _capture(self, graph: torch.cuda.CUDAGraph, error_mode: str) -> Iterator[None]:
        """Capture a graph. If that fails, later passes and captures are not affected."""
        current = torch.cuda.current_stream(self.device)
        # `torch.cuda.graph` does not leave its stream when it cannot end the capture: the outer context does.
        with _capture_lock, torch.cuda.stream(current):
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=error_mode):
                    yield
            except BaseException:
                if not _has_ended(graph):
                    # Its pool counts as being recorded for ever, and the allocator keeps a pointer to the graph.
                    self._broken.append(graph)
                    self._pool = torch.cuda.graph_pool_handle()
                raise

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Run after the last replay has finished, on whichever stream, since recordings share their memory."""
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(self._finished)
        try:
            with torch.cuda.device(self.device):
                yield
        finally:  # what was launched before an error uses the memory as well
            self._finished.record(stream)

    def synchronize(self) -> None:
        """Wait for the last replay."""
        self._finished.synchronize()


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether a capture that failed was ended at least."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@dataclass(slots=True)
class _Recording:
    batch: Batch  # read at replay
    replay: Callable[[], object]
    out: Tensor
    used: int = 0  # the number of the latest pass that used it


class ForwardGraphs:
    """Recorded forward passes of a model, for batches of at most `max_tokens` tokens. Threads may share it.

    Recording takes as long as some ten eager passes. So a size is recorded when it occurs for the `record_after`-th
    time, and when there are `max_graphs` recordings, a new one replaces the least recently used only if that has been
    idle for `min_idle` passes. Until then, a batch is replayed in a larger recording, if that has at most the fraction
    `max_spare` of spare tokens: by default it has to be of the batch's own size.
    """

    def __init__(
        self,
        max_tokens: int = 4096,
        max_graphs: int = 64,
        record_after: int = 8,
        min_idle: int = 1000,
        max_spare: float = 0.0,
    ) -> None:
        self.max_tokens, self.max_graphs = max_tokens, max_graphs
        self.record_after, self.min_idle, self.max_spare = record_after, min_idle, max_spare
        self._lock = Lock()
        self._recordings: OrderedDict[tuple[str, GraphSize], _Recording] = OrderedDict()  # latest used last
        self._seen: OrderedDict[tuple[str, GraphSize], int] = OrderedDict()  # how often; below 0: cannot be recorded
        self._recorder: GraphRecorder | None = None
        self._passes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied model records its own.
        return type(self), (self.max_tokens, self.max_graphs, self.record_after, self.min_idle, self.max_spare)

    def __len__(self) -> int:
        return len(self._recordings)

    def clear(self) -> None:
        """Drop all recordings: after weights were moved or replaced. (Weights may change in place.)"""
        with self._lock:
            if self._recorder is not None:
                self._recorder.synchronize()
            self._recordings.clear()
            self._seen.clear()
            self._recorder = None  # the device may be another

    def __call__(self, name: str, run: Run, batch: Batch, *, max_length: int, rows: Literal["token", "text"]) -> Tensor:
        """run(batch), whose rows belong to tokens or texts; `name` tells apart what else the result depends on."""
        if not self._takes(batch, max_length):
            return run(batch)
        key = (name, graph_size(batch.lengths, max_length))
        with self._lock:
            recording = self._get(key, run, batch)
            if recording is not None:
                count = len(batch.ids) if rows == "token" else len(batch)
                return self._replay(recording, batch, count)
        return run(batch)

    def _takes(self, batch: Batch, max_length: int) -> bool:
        return (
            len(batch.ids) <= self.max_tokens
            and batch.ids.is_cuda
            and batch.global_tokens is None
            and batch.key_lengths is None
            and batch.max_len <= max_length
            and sum(batch.lengths) == len(batch.ids)  # else it has spare room already
            and not torch.cuda.is_current_stream_capturing()
        )

    def _replay(self, recording: _Recording, batch: Batch, count: int) -> Tensor:
        if self._recorder is None:
            return _copy_and_replay(recording, batch, count)
        with self._recorder.exclusive():
            return _copy_and_replay(recording, batch, count)

    def _get(self, key: tuple[str, GraphSize], run: Run, batch: Batch) -> _Recording | None:
        """The recording of a size, made when the size has occurred often enough; else a larger one, if there is any."""
        self._passes += 1
        if key in self._recordings:
            return self._use(key)
        larger = self._larger(key[0], batch) if self.max_spare else None
        count = self._seen.get(key, 0)
        if count >= 0:
            self._seen[key] = count + 1
            if len(self._seen) > MAX_SEEN:
                self._seen.popitem(last=False)
            needed = self.record_after * (1 if larger is None else LATER)
            if count + 1 >= needed and self._make_room():
                recording = self._add(key, run, batch)
                if recording is not None:
                    return recording
        # It may just have made room for one that could not be recorded.
        return None if larger is None or larger not in self._recordings else self._use(larger)

    def _use(self, key: tuple[str, GraphSize]) -> _Recording:
        recording = self._recordings[key]
        self._recordings.move_to_end(key)
        recording.used = self._passes
        return recording

    def _larger(self, name: str, batch: Batch) -> tuple[str, GraphSize] | None:
        """The smallest recording that has room for a batch, and not too much of it."""
        tokens, texts, longest = len(batch.ids), len(batch), batch.max_len
        most, grid = tokens * (1 + self.max_spare) + MIN_STEP, max(MIN_GRID, MAX_GRID * texts * longest)
        sizes = [
            size
            for other, size in self._recordings
            if other == name
            and tokens <= size.tokens <= most
            and longest <= size.longest
            and size.texts * size.longest <= grid
            and texts + -(-(size.tokens - tokens) // size.longest) < size.texts
        ]
        return (name, min(sizes)) if sizes else None

    def _add(self, key: tuple[str, GraphSize], run: Run, batch: Batch) -> _Recording | None:
        """Record a size."""
        # Weights are no inference tensors, and neither are the static inputs, which are written to later.
        with torch.inference_mode(False), torch.no_grad():
            static = static_batch(key[1], batch.ids.device)
            try:
                copy_into(batch, static)
                recording = _Recording(static, *self._record(run, static), self._passes)
            except RuntimeError:  # CUDA has no classes of errors; run(batch) will report what is wrong
                self._seen[key] = -1
                return None
        self._recordings[key] = recording
        return recording

    def _make_room(self) -> bool:
        if len(self._recordings) < self.max_graphs:
            return True
        oldest = next(iter(self._recordings))
        if self._passes - self._recordings[oldest].used <= self.min_idle:
            return False
        if self._recorder is not None:
            self._recorder.synchronize()
        del self._recordings[oldest]
        return True

    def _record(self, run: Run, static: Batch) -> tuple[Callable[[], object], Tensor]:
        if self._recorder is None:
            self._recorder = GraphRecorder(static.ids.device)
        # "thread_local": other threads may use the device meanwhile.
        return self._recorder.record(lambda: run(static), warmup=WARMUP, error_mode="thread_local")


def _copy_and_replay(recording: _Recording, batch: Batch, count: int) -> Tensor:
    copy_into(batch, recording.batch)
    recording.replay()
    return recording.out[:count].clone()


def static_batch(size: GraphSize, device: torch.device) -> Batch:
    """A static batch to copy others into. Its lengths on the host are upper bounds; `cu_seqlens` is exact."""
    ids = torch.zeros(size.tokens, dtype=torch.long)
    ends = torch.zeros(size.texts + 1, dtype=torch.int32)
    bounds = (size.longest,) * size.texts
    return Batch(ids, ids.clone(), ids.clone(), ends, bounds).to(device)


def copy_into(batch: Batch, static: Batch) -> None:
    """Copy a batch to the front of a larger one. What follows keeps its valid ids, segments and positions."""
    tokens = len(batch.ids)
    static.ids[:tokens].copy_(batch.ids)
    static.segments[:tokens].copy_(batch.segments)
    static.positions[:tokens].copy_(batch.positions)
    spare = spare_ends(tokens, len(static.ids), len(static) - len(batch), static.max_len)
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths), spare]).astype(np.int32))
    copy_pinned(ends, static.cu_seqlens)


def copy_pinned(source: Tensor, target: Tensor) -> None:
    """Copy from the host without waiting: from pageable memory the host would wait for the device."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)
