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
from bertie.training.embedding.objective import EmbeddingObjective
from bertie.training.objectives import HeadObjective, MaskedLMObjective, MicroBatch, ModelObjective, Objective, Targets
from bertie.training.optimizer import set_lr

SHORT = 128  # tokens; attention's grid is for texts of up to this, or for any


class Loss(nn.Module):
    """A model with an objective behind a head: a micro-batch in, its summed loss out.

    Objectives over vectors need those of other micro-batches as well: of these a micro-batch's vectors come out, or,
    once their gradients are known, what has these gradients.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, mini: MicroBatch, head: str, objective: Objective) -> Tensor:
        """-> ()."""
        if isinstance(objective, ModelObjective):
            return objective.of(self.model, mini) * float(mini.weight > 0)
        if isinstance(objective, EmbeddingObjective):
            return (objective.surrogate if "gradient" in mini.extras else objective.rows)(self.model, mini, head)
        assert isinstance(objective, HeadObjective)
        hidden = self.model.hidden(mini.batch, head)
        if mini.targets.rows is not None:
            hidden = hidden[mini.targets.rows]
        words = self.model.encoder.embeddings.words.weight
        if isinstance(objective, MaskedLMObjective):  # whose outputs would be large
            return self.model.head(head).fused_linear_cross_entropy(
                hidden, words, mini.targets.values, mini.targets.weights
            )
        outputs = self.model.head(head)(hidden, mini.batch, words)
        with torch.autocast(mini.batch.ids.device.type, enabled=False):
            return objective.loss(outputs.float(), mini.batch, mini.targets)


class Stepper:
    """Eager steps."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, *, dtype: torch.dtype, clip: float, world: int = 1
    ) -> None:
        self.module, self.optimizer, self.clip, self.world = module, optimizer, clip, world
        self.device = next(module.parameters()).device
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self._held: list[tuple[MicroBatch, int, Tensor]] = []  # of a step: micro-batches, their seeds, their vectors

    def autocast(self) -> Any:
        """Half precision where it is asked for."""
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device.type, self.dtype, cache_enabled=False)
        )

    def add(self, mini: MicroBatch, head: str, objective: Objective, total: float, seed: int, last: bool) -> Tensor:
        """Add a micro-batch's gradient; its summed loss. `total` is the weight of the whole step."""
        mini = mini.to(self.device)
        if isinstance(objective, EmbeddingObjective):
            return self._compared(mini, head, objective, total, seed, last)
        self._seed(seed)
        with self._synced(last), self.autocast():
            loss: Tensor = self.module(mini, head, objective)
            # Gradients are averaged over processes; here they are to be summed.
            self.scaler.scale(loss * (self.world / total)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _seed(self, seed: int) -> None:
        # Not torch.manual_seed: it seeds every kind of device there might be, at a quarter of a millisecond.
        (torch.cuda.manual_seed if self.device.type == "cuda" else torch.default_generator.manual_seed)(seed)

    def _compared(
        self, mini: MicroBatch, head: str, objective: EmbeddingObjective, total: float, seed: int, last: bool
    ) -> Tensor:
        """As `add`, of what is compared with all of its step: nothing is added before the last micro-batch is there."""
        bare: Any = self.module.module if isinstance(self.module, DistributedDataParallel) else self.module
        model: Model = bare.model
        weights = [one for one in model.auxiliary["loss"].parameters() if one.requires_grad]
        if weights and hasattr(self.module, "set_requires_gradient_sync"):
            raise ConfigError(f"strategy='fsdp' cannot train what {type(objective.loss).__name__} needs; use 'ddp'")
        self._seed(seed)
        alone = last and not self._held and self.world == 1
        with torch.set_grad_enabled(alone), self.autocast():
            found: Tensor = bare(mini, head, objective)
        if alone:
            loss = objective.over(model, found, [mini], total)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            return loss.detach() * total
        self._held.append((mini, seed, found))
        if not last:
            return torch.zeros((), device=self.device)
        held, self._held = self._held, []
        own = [rows if mini.weight > 0 else rows[:0] for mini, _, rows in held]
        leaf = torch.cat(own).requires_grad_()
        loss = objective.over(model, leaf, [mini for mini, _, _ in held], total)
        by_row, *by_weight = torch.autograd.grad(loss, [leaf, *weights])
        flat = torch.cat([leaf.new_zeros(0), *(one.flatten() for one in by_weight)])
        parts = torch.split(by_row, [len(rows) for rows in own])
        for number, ((part, again, rows), gradient) in enumerate(zip(held, parts, strict=True), start=1):
            once = flat if number == len(held) else torch.zeros_like(flat)
            given = gradient if len(gradient) else torch.zeros_like(rows)
            self._seed(again)  # for the same dropout
            with self._synced(number == len(held)), self.autocast():
                same: Tensor = self.module(
                    replace(part, extras={**part.extras, "gradient": given, "auxiliary": once}), head, objective
                )
                self.scaler.scale(same * self.world).backward()  # type: ignore[no-untyped-call]
        return loss.detach() * total

    def _synced(self, last: bool) -> Any:
        """Processes add up their gradients once a step, with the last micro-batch."""
        module: Any = self.module
        if hasattr(module, "set_requires_gradient_sync"):  # FSDP
            module.set_requires_gradient_sync(last)
            return nullcontext()
        return module.no_sync() if hasattr(module, "no_sync") and not last else nullcontext()

    def update(self, factor: float) -> None:
        """One step of the optimizer at this share of its learning rates; gradients begin anew."""
        set_lr(self.optimizer, factor)
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.forget()

    def _clip(self) -> None:
        if self.clip:
            torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.clip)

    def forget(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()
        self._held.clear()

    def reset(self) -> None:
        """Which weights are trained has changed."""


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


class Graphs(Stepper):
    """Steps played back from CUDA graphs."""

    def __init__(self, module: Loss, optimizer: torch.optim.Optimizer, *, dtype: torch.dtype, clip: float) -> None:
        super().__init__(module, optimizer, dtype=dtype, clip=clip)
        self.max_length = module.model.config.max_length
        self._recorded: dict[Any, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._update: torch.cuda.CUDAGraph | None = None
        self._updates = 0

    def add(self, mini: MicroBatch, head: str, objective: Objective, total: float, seed: int, last: bool) -> Tensor:
        """As `Stepper.add`."""
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
        """As `Stepper.update`."""
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
        self.forget()

    def forget(self) -> None:
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


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device, or the machine, has no more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )
