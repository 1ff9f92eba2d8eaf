"""Training steps replayed from CUDA graphs, for small encoders that would wait for Python to launch
kernels.

Forward and backward pass are recorded once per size of micro-batch, the optimizer update once. A
recorded size is a little larger than the micro-batches it serves, at most by an eighth and mostly
less; the rest is filled with texts of weight 0. Recording is shared with inference
(ops/cuda_graphs.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.nn.model import Model
from bertie.ops.cuda_graphs import GraphRecorder, copy_pinned
from bertie.ops.dispatch import select
from bertie.ops.site import Site
from bertie.text.batch import spare_ends
from bertie.training.objectives import MicroBatch, Objective, Targets
from bertie.training.optimizer import set_lr
from bertie.training.step import ObjectiveModule, TrainStep

SHORT = 128  # tokens: attention's grid is for texts of at most this many, or for the longest there may be
MAX_GRAPHS = 256


def can_replay(model: Model, dtype: torch.dtype) -> bool:
    """Whether the dispatch table allows CUDA graphs for training the model in this precision on its device."""
    encoder = model.encoder
    checkpointing = encoder.gradient_checkpointing
    site = Site.of(encoder.cfg, model.device, dtype, training=True, autocast=True, checkpointing=checkpointing)
    return select("replay", site)[0].backend == "cuda_graphs"


class GraphedTrainStep(TrainStep):
    """Training steps replayed from CUDA graphs."""

    def __init__(
        self, module: ObjectiveModule, optimizer: torch.optim.Optimizer, *, dtype: torch.dtype, clip: float
    ) -> None:
        super().__init__(module, optimizer, dtype=dtype, clip=clip)
        self.max_length = module.model.config.max_length
        self._recorder = GraphRecorder(self.device)
        self._recordings: OrderedDict[MicroBatchSize, _Recording] = OrderedDict()
        self._replay_update: Callable[[], object] | None = None
        self._updates = 0

    def add(
        self, micro_batch: MicroBatch, head: str, objective: Objective, total: float, seed: int, last: bool
    ) -> Tensor:
        """As `TrainStep.add`."""
        size = micro_batch_size(micro_batch, self.max_length)
        filled = fill(micro_batch, objective, size)
        recording = self._recordings.get(size)
        if recording is None:
            # Warming up adds to the gradients accumulated so far: they are restored.
            gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters()]
            recording = self._recordings[size] = _Recording(self, filled, head, objective)
            if len(self._recordings) > MAX_GRAPHS:
                self._recordings.popitem(last=False)
            for p, gradient in zip(self._parameters(), gradients, strict=True):
                if p.grad is not None:  # else the objective does not use the parameter
                    p.grad.zero_() if gradient is None else p.grad.copy_(gradient)
        self._recordings.move_to_end(size)
        torch.cuda.manual_seed(seed)
        return recording.replay(filled, 1 / total)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]

    def update(self, factor: float) -> None:
        """As `TrainStep.update`."""
        set_lr(self.optimizer, factor)
        self._updates += 1
        if self._updates == 1:  # the optimizer creates its state in the first step, which cannot be recorded
            self._step()
            return
        if self._replay_update is None:
            torch.cuda.synchronize(self.device)
            self._replay_update, _ = self._recorder.record(self._step, warmup=0)
        self._replay_update()

    def _step(self) -> None:
        self._clip()
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set the gradients to zero in place: the graphs contain their addresses."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)

    def reset(self) -> None:
        """Drop the recordings."""
        self._recordings.clear()
        self._replay_update, self._updates = None, 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


class _Recording:
    """Forward and backward pass of one size of micro-batch."""

    def __init__(self, step: GraphedTrainStep, micro_batch: MicroBatch, head: str, objective: Objective) -> None:
        self.micro_batch = micro_batch.to(step.device)
        self.scale = torch.ones((), device=step.device)

        def run() -> Tensor:
            with step.autocast():
                loss: Tensor = step.module(self.micro_batch, head, objective)
                (loss * self.scale).backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        # The warm-up also allocates the gradients.
        self._replay, self.loss = step._recorder.record(run, warmup=1)

    def replay(self, micro_batch: MicroBatch, scale: float) -> Tensor:
        """Copy in a micro-batch of the recorded size, and run; its summed loss."""
        static = self.micro_batch
        for name in ("ids", "segments", "positions", "cu_seqlens"):
            copy_pinned(getattr(micro_batch.batch, name), getattr(static.batch, name))
        for name in ("values", "weights", "owner", "share", "rows"):
            target: Tensor | None = getattr(static.targets, name)
            if target is not None:
                copy_pinned(getattr(micro_batch.targets, name), target)
        self.scale.fill_(scale)
        self._replay()
        return self.loss.clone()


class MicroBatchSize(NamedTuple):
    """The size of micro-batch that a recording has room for."""

    tokens: int
    texts: int
    longest: int
    rows: int  # selected tokens


def micro_batch_size(micro_batch: MicroBatch, max_length: int) -> MicroBatchSize:
    """The recorded size for a micro-batch, rounded up so that few sizes serve all."""
    batch, rows = micro_batch.batch, micro_batch.targets.rows
    tokens = len(batch.ids)
    longest = SHORT if batch.max_len <= SHORT < max_length else max_length
    room = _round_past(tokens, min(1024, max(64, 1 << max(0, tokens.bit_length() - 4))))
    texts = len(batch) + -(-(room - tokens) // longest)
    selected = 0 if rows is None else _round_past(len(rows), max(64, 1 << max(0, len(rows).bit_length() - 4)))
    return MicroBatchSize(room, _round_past(texts, max(8, 1 << max(0, texts.bit_length() - 4))), longest, selected)


def _round_past(n: int, step: int) -> int:
    """The smallest multiple of `step` above n: there is always room to spare, so that lengths stay upper bounds."""
    return (n // step + 1) * step


def fill(micro_batch: MicroBatch, objective: Objective, size: MicroBatchSize) -> MicroBatch:
    """The micro-batch in a larger one: empty texts, then texts of the spare tokens, all of weight 0."""
    batch, targets = micro_batch.batch, micro_batch.targets
    tokens, more = len(batch.ids), size.texts - len(batch)
    ends = torch.from_numpy(spare_ends(tokens, size.tokens, more, size.longest))
    count = {"token": size.tokens, "row": size.rows}.get(objective.level, size.texts)
    rest = count - len(targets.weights)
    values = targets.values

    def pad(x: Tensor) -> Tensor:
        return F.pad(x, (0, size.tokens - tokens))

    return MicroBatch(
        replace(
            batch,
            ids=pad(batch.ids),
            segments=pad(batch.segments),
            positions=pad(batch.positions),
            cu_seqlens=torch.cat([batch.cu_seqlens, ends]),
            lengths=(size.longest,) * size.texts,
        ),
        Targets(
            F.pad(values, (0, 0) * (values.ndim - 1) + (0, rest)),
            F.pad(targets.weights, (0, rest)),
            torch.cat([targets.owner, torch.arange(len(batch), size.texts)]),
            F.pad(targets.share, (0, more)),
            None if targets.rows is None else F.pad(targets.rows, (0, rest), value=size.tokens - 1),
        ),
        micro_batch.weight,
    )
