"""Gradients of micro-batches, and the update: eagerly anywhere, or as CUDA graphs where launches would rule.

A small encoder on a large GPU spends its time waiting for Python to launch kernels. `Graphs` records forward, backward
and update once for each size of batch and plays them back. A recorded size is a little larger than what it holds; the
rest is filled with texts of no weight, at most an eighth and mostly less: the one place where training computes
tokens that nobody asked for.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bertie.config import Full, Sliding
from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.batch import spare_ends
from bertie.training.objectives import InBatchObjective, MicroBatch, Objective, Targets
from bertie.training.optimizer import set_lr

SHORT = 128  # tokens; attention's grid is for texts of up to this, or for any


class ObjectiveModule(nn.Module):
    """A model as one module with its objective, for DDP and FSDP: a micro-batch in, its summed loss out."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batch: MicroBatch, head: str, objective: Objective) -> Tensor:
        """-> () the summed loss; of an `InBatchObjective` the embeddings, or the surrogate loss."""
        return objective.forward(self.model, micro_batch, head)


class TrainStep:
    """Gradient accumulation and optimizer updates, run eagerly."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, dtype: torch.dtype, clip: float, world: int = 1
    ) -> None:
        self.module, self.optimizer, self.clip, self.world = module, optimizer, clip, world
        self.device = next(module.parameters()).device
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self._cached: list[tuple[MicroBatch, int, Tensor]] = []  # of this step: micro-batch, seed, embeddings

    def autocast(self) -> Any:
        """The autocast context of the compute dtype."""
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device.type, self.dtype, cache_enabled=False)
        )

    def add(
        self, micro_batch: MicroBatch, head: str, objective: Objective, total: float, seed: int, last: bool
    ) -> Tensor:
        """Add the gradient of a micro-batch; returns its summed loss. `total` is the weight of the whole step."""
        micro_batch = micro_batch.to(self.device)
        if isinstance(objective, InBatchObjective):
            return self._add_in_batch(micro_batch, head, objective, total, seed, last)
        self._seed(seed)
        with self._sync(last), self.autocast():
            loss: Tensor = self.module(micro_batch, head, objective)
            # DDP and FSDP average gradients over processes; the sum is needed.
            self.scaler.scale(loss * (self.world / total)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _seed(self, seed: int) -> None:
        # torch.manual_seed would seed every kind of device, which takes a quarter of a millisecond.
        (torch.cuda.manual_seed if self.device.type == "cuda" else torch.default_generator.manual_seed)(seed)

    def _add_in_batch(
        self, micro_batch: MicroBatch, head: str, objective: InBatchObjective, total: float, seed: int, last: bool
    ) -> Tensor:
        """As `add`, by gradient caching: gradients are added with the last micro-batch of the step."""
        unwrapped: Any = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        model: Model = unwrapped.model
        weights = [weight for weight in model.auxiliary["loss"].parameters() if weight.requires_grad]
        if weights and hasattr(self.module, "set_requires_gradient_sync"):
            raise ConfigError(
                f"strategy='fsdp' cannot train the parameters of {type(objective.loss).__name__}; use 'ddp'"
            )
        self._seed(seed)
        single = last and not self._cached and self.world == 1
        with torch.set_grad_enabled(single), self.autocast():
            embeddings: Tensor = unwrapped(micro_batch, head, objective)
        if single:
            loss = objective.step_loss(model, embeddings, [micro_batch], total)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach() * total
        self._cached.append((micro_batch, seed, embeddings))
        if not last:
            return torch.zeros((), device=self.device)
        cached, self._cached = self._cached, []
        rows = [embedded if part.weight > 0 else embedded[:0] for part, _, embedded in cached]
        leaf = torch.cat(rows).requires_grad_()
        loss = objective.step_loss(model, leaf, [part for part, _, _ in cached], total)
        row_gradient, *weight_gradients = torch.autograd.grad(loss, [leaf, *weights])
        flat = torch.cat([leaf.new_zeros(0), *(gradient.flatten() for gradient in weight_gradients)])
        gradients = torch.split(row_gradient, [len(part) for part in rows])
        for number, ((part, part_seed, embedded), gradient) in enumerate(zip(cached, gradients, strict=True), start=1):
            final = number == len(cached)
            extras = {
                "gradient": gradient if len(gradient) else torch.zeros_like(embedded),
                "auxiliary": flat if final else torch.zeros_like(flat),  # counted once
            }
            self._seed(part_seed)  # the same dropout as in the first pass
            with self._sync(final), self.autocast():
                surrogate: Tensor = self.module(replace(part, extras={**part.extras, **extras}), head, objective)
                self.scaler.scale(surrogate * self.world).backward()  # type: ignore[no-untyped-call]
        return loss.detach() * total

    def _sync(self, last: bool) -> Any:
        """Synchronize gradients over processes once per step, with the last micro-batch."""
        module: Any = self.module
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP
            module.set_requires_gradient_sync(last)
            return nullcontext()
        return module.no_sync() if hasattr(module, "no_sync") and not last else nullcontext()

    def update(self, factor: float) -> None:
        """Clip gradients and step the optimizer, at `factor` times its learning rates; then zero the gradients."""
        set_lr(self.optimizer, factor)
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.zero_grad()

    def _clip(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.clip)

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.optimizer.zero_grad()
        self._cached.clear()

    def reset(self) -> None:
        """The set of trained weights has changed."""


def can_record(model: Model, dtype: torch.dtype) -> bool:
    """Whether the model's forward on this device is the same sequence of kernels for all batches of a size."""
    cfg = model.config
    plain = all(isinstance(p, Full | Sliding) for p in cfg.patterns) and model.encoder.relative is None
    return (
        model.device.type == "cuda"
        and dtype == torch.bfloat16
        and plain
        and not cfg.global_tokens
        and cfg.conv is None
        and cfg.head_width % 8 == 0
        and cfg.head_width <= 256
        and not model.encoder.gradient_checkpointing
    )


class Graphs(TrainStep):
    """Steps played back from CUDA graphs."""

    def __init__(
        self, module: ObjectiveModule, optimizer: torch.optim.Optimizer, *, dtype: torch.dtype, clip: float
    ) -> None:
        super().__init__(module, optimizer, dtype=dtype, clip=clip)
        self.max_length = module.model.config.max_length
        self._recorded: dict[Any, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._update: torch.cuda.CUDAGraph | None = None
        self._updates = 0

    def add(self, mini: MicroBatch, head: str, objective: Objective, total: float, seed: int, last: bool) -> Tensor:
        """As `TrainStep.add`."""
        sizes = _sizes(mini, self.max_length)
        filled = _filled(mini, objective, *sizes)
        recorded = self._recorded.get(sizes)
        if recorded is None:
            # The gradients so far must survive the trial run that recording needs.
            held = [None if p.grad is None else p.grad.clone() for p in self._parameters()]
            recorded = self._recorded[sizes] = _Recorded(self, filled, head, objective)
            for p, grad in zip(self._parameters(), held, strict=True):
                if p.grad is not None:  # else the objective leaves it alone
                    p.grad.zero_() if grad is None else p.grad.copy_(grad)
        torch.cuda.manual_seed(seed)
        return recorded.play(filled, 1 / total)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]

    def update(self, factor: float) -> None:
        """As `TrainStep.update`."""
        set_lr(self.optimizer, factor)
        self._updates += 1
        if self._updates == 1:  # the optimizer makes its state in its first step, which cannot be recorded
            self._step()
            return
        if self._update is None:
            self._update = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._update, pool=self._pool):
                self._step()
        self._update.replay()

    def _step(self) -> None:
        self._clip()
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Set the gradients to zero where they are: the graphs know their places."""
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        if grads:
            torch._foreach_zero_(grads)

    def reset(self) -> None:
        """Record anew."""
        self._recorded.clear()
        self._update, self._updates = None, 0
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.grad = None


class _Recorded:
    """Forward and backward for one size of batch."""

    def __init__(self, stepper: Graphs, mini: MicroBatch, head: str, objective: Objective) -> None:
        self.mini = mini.to(stepper.device)
        self.scale = torch.ones((), device=stepper.device)
        self.graph = torch.cuda.CUDAGraph()

        def run() -> Tensor:
            with stepper.autocast():
                loss: Tensor = stepper.module(self.mini, head, objective)
                (loss * self.scale).backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # libraries set themselves up, and gradients get their places
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, pool=stepper._pool):
            self.loss = run()

    def play(self, mini: MicroBatch, scale: float) -> Tensor:
        """Put a batch of the same size in place, and go."""
        ours, theirs = self.mini, mini
        for name in ("ids", "segments", "positions", "cu_seqlens"):
            _put(getattr(theirs.batch, name), getattr(ours.batch, name))
        for name in ("values", "weights", "owner", "share", "rows"):
            if getattr(ours.targets, name) is not None:
                _put(getattr(theirs.targets, name), getattr(ours.targets, name))
        self.scale.fill_(scale)
        self.graph.replay()
        return self.loss.clone()


def _put(x: Tensor, place: Tensor) -> None:
    """Copy to the device by pinned memory: from other memory the host would wait for the device."""
    place.copy_(x.pin_memory(), non_blocking=True)


def _sizes(mini: MicroBatch, max_length: int) -> tuple[int, int, int, int]:
    """Tokens, texts, tokens of the longest text, and chosen tokens, rounded up so that few sizes serve all batches."""
    batch, rows = mini.batch, mini.targets.rows
    tokens = len(batch.ids)
    longest = SHORT if batch.max_len <= SHORT < max_length else max_length
    room = _up(tokens, min(1024, max(64, 1 << max(0, tokens.bit_length() - 4))))
    texts = len(batch) + -(-(room - tokens) // longest)
    chosen = 0 if rows is None else _up(len(rows), max(64, 1 << max(0, len(rows).bit_length() - 4)))
    return room, _up(texts, max(8, 1 << max(0, texts.bit_length() - 4))), longest, chosen


def _up(n: int, step: int) -> int:
    """The next multiple beyond n."""
    return (n // step + 1) * step


def _filled(mini: MicroBatch, objective: Objective, room: int, texts: int, longest: int, chosen: int) -> MicroBatch:
    """The batch in a larger one: empty texts, then texts of the tokens that are left over, all without weight."""
    batch, targets = mini.batch, mini.targets
    tokens, more = len(batch.ids), texts - len(batch)
    ends = torch.from_numpy(spare_ends(tokens, room, more, longest))
    count = {"token": room, "row": chosen}.get(objective.level, texts)
    rest = count - len(targets.weights)
    values = targets.values
    return MicroBatch(
        replace(
            batch,
            ids=F.pad(batch.ids, (0, room - tokens)),
            segments=F.pad(batch.segments, (0, room - tokens)),
            positions=F.pad(batch.positions, (0, room - tokens)),
            cu_seqlens=torch.cat([batch.cu_seqlens, ends]),
            lengths=(longest,) * texts,
        ),
        Targets(
            F.pad(values, (0, 0) * (values.ndim - 1) + (0, rest)),
            F.pad(targets.weights, (0, rest)),
            torch.cat([targets.owner, torch.arange(len(batch), texts)]),
            F.pad(targets.share, (0, more)),
            None if targets.rows is None else F.pad(targets.rows, (0, rest), value=room - 1),
        ),
        mini.weight,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )


def autocast_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of `mixed_precision`; "auto" is bf16 on GPUs that support it, else fp32."""
    if name == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if dtype != torch.float32 and device.type == "cpu":
        # torch's bf16 kernels crash on some CPUs; fp16 is slow on all.
        raise ConfigError(f"mixed_precision={name!r} is for GPUs; on a CPU use 'fp32' or 'auto'")
    return dtype
