"""Gradients of micro-batches and optimizer updates, run eagerly; graphed_step.py replays them from CUDA graphs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.ops.torch import bf16_linear
from bertie.training.cpu_adamw import CpuAdamW, use_sparse_gradients
from bertie.training.objectives import InBatchObjective, MicroBatch, Objective
from bertie.training.optimizer import set_lr


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
        self.bf16_linear = False  # see `uses_bf16_linear`
        self.device = next(module.parameters()).device
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        if world == 1 and isinstance(module, ObjectiveModule):
            use_sparse_gradients(module.model.encoder.embeddings.words, optimizer)
        self._cached: list[tuple[MicroBatch, int, Tensor]] = []  # of this step: micro-batch, seed, embeddings

    def autocast(self) -> Any:
        """The context of the compute dtype: autocast, or on a CPU linear layers in bf16."""
        if self.bf16_linear:
            return bf16_linear.Bf16Linear()
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
        if self.clip and isinstance(self.optimizer, CpuAdamW):
            self.optimizer.clip(self.clip)
        elif self.clip:
            torch.nn.utils.clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.clip)

    def zero_grad(self) -> None:
        """Discard the gradients."""
        self.optimizer.zero_grad()
        self._cached.clear()

    def reset(self) -> None:
        """Called when the set of trained weights has changed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the machine is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )


def autocast_dtype(name: str, device: torch.device) -> torch.dtype:
    """The autocast dtype of `mixed_precision`; "auto" is bf16 on GPUs that support it, else fp32.

    On a CPU there is no autocast: bf16 is that of `uses_bf16_linear`.
    """
    if name == "auto":
        half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if half else torch.float32
    if device.type == "cpu" and (name == "fp16" or (name == "bf16" and not bf16_linear.is_supported())):
        # Without bf16 instructions bf16 is slow, as fp16 is on all CPUs.
        needs = " and for CPUs with AVX512_BF16" if name == "bf16" else ""
        raise ConfigError(f"mixed_precision={name!r} is for GPUs{needs}; on this CPU use 'fp32' or 'auto'")
    if device.type == "cpu":
        return torch.float32
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def uses_bf16_linear(name: str, device: torch.device) -> bool:
    """Whether `mixed_precision` means linear layers in bf16, and everything else in fp32: bf16 on a CPU."""
    return name == "bf16" and device.type == "cpu"
