"""One process or many: who this one is, and how a model is spread over them.

Started by `torchrun`, each process takes its share of every step's items. "ddp" keeps a whole model in each and adds up
gradients; "fsdp" keeps a part of every block in each, for models that one device cannot train.
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
SECONDS_TO_LET_GO = 0.1


@dataclass(frozen=True, slots=True)
class World:
    """All processes of a run, and this one's place among them."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls, device: torch.device) -> World:
        """As `torchrun` says, joined; alone without it."""
        if not dist.is_available() or (not dist.is_initialized() and os.environ.get("WORLD_SIZE", "1") == "1"):
            return cls()
        if device.type == "cuda":  # whatever the processes send each other goes by way of this one
            torch.cuda.set_device(local_device(device))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            atexit.register(_end)
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def same(self, value: T) -> T:
        """What the first process has, in all of them."""
        held = [value]
        if self.size > 1:
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


def _end() -> None:
    """Leave the group while Python still runs: its threads let go of results, for which they need the interpreter, and
    one that is then too late for it has the whole process aborted."""
    time.sleep(SECONDS_TO_LET_GO)
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process, where each has one."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return device


def distribute(
    module: nn.Module, blocks: nn.ModuleList, strategy: Strategy, world: World, device: torch.device, *, unused: bool
) -> nn.Module:
    """The module over all processes; `unused`: a step may leave some of its weights out. "fsdp" changes it in place."""
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
def gather(sharded: nn.Module, whole: nn.Module) -> None:
    """Copy the weights of a sharded module into a whole one of the same shape: every process must ask."""
    from torch.distributed.tensor import DTensor

    parts = sharded.state_dict()
    for name, tensor in whole.state_dict().items():
        part = parts[name]
        tensor.copy_(part.full_tensor() if isinstance(part, DTensor) else part)


def whole_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of a sharded module's optimizer, whole, in the first process: every process must ask."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_optimizer_state_dict(module, optimizer, options=options)


def set_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give a sharded module's optimizer its state back; every process has it whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    set_optimizer_state_dict(module, optimizer, dict(state), options=StateDictOptions(full_state_dict=True))
