"""Distributed training with `torchrun`: process groups, DDP and FSDP.

Each process trains its shard of every step's examples. "ddp" keeps a full model in each process and
sums gradients; "fsdp" shards weights and optimizer state, for models that do not fit on one device.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Strategy = Literal["ddp", "fsdp"]

T = TypeVar("T")
SHUTDOWN_SECONDS = 0.1


def is_main_process() -> bool:
    """Whether this is rank 0 of the processes that `torchrun` started; needs no process group."""
    return os.environ.get("RANK", "0") == "0"


@dataclass(frozen=True, slots=True)
class World:
    """The process group of a run: this process's rank and the number of processes."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls, device: torch.device) -> World:
        """Join the process group that `torchrun` started, if any."""
        if not dist.is_available() or (not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1"):
            return cls()
        if device.type == "cuda":  # collectives use the current device
            torch.cuda.set_device(local_device(device))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(_shut_down)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def broadcast(self, value: T) -> T:
        """Return the main process's value in all processes."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()


def _shut_down() -> None:
    """Destroy the process group before the interpreter shuts down: its threads need the
    interpreter to release their results, and would otherwise abort the process."""
    time.sleep(SHUTDOWN_SECONDS)
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process, if `torchrun` started several."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def distribute(
    module: nn.Module, blocks: nn.ModuleList, strategy: Strategy, world: World, device: torch.device, *, unused: bool
) -> nn.Module:
    """Wrap a module for distributed training. `unused`: a step may leave parameters without gradients.

    "fsdp" shards the module in place.
    """
    if world.size == 1:
        return module
    if strategy == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, find_unused_parameters=unused)
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block)
    fully_shard(module)
    return module


@torch.no_grad()
def gather_weights(sharded: nn.Module, full: nn.Module) -> None:
    """Copy the weights of a sharded module into a full one. Collective: every process must call it."""
    from torch.distributed.tensor import DTensor

    shards = sharded.state_dict()
    for name, tensor in full.state_dict().items():
        shard = shards[name]
        tensor.copy_(shard.full_tensor() if isinstance(shard, DTensor) else shard)


def full_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gather the optimizer state of a sharded module in the main process. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def load_optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a full optimizer state, passed by every process, into a sharded module's optimizer."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    set_optimizer_state_dict(module, optimizer, dict(state), options=StateDictOptions(full_state_dict=True))
