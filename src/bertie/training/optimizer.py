"""Which weights train, how fast, and when: parameter groups, the schedule, freezing and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bertie.config import EncoderConfig
from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.training import lora


def param_groups(model: Model, heads: str | Sequence[str], recipe: Recipe) -> list[dict[str, Any]]:
    """AdamW's groups: what trains from the start or thaws later. Of the heads, only those that are named.

    Each has a `name` and a `scale`: its learning rate where the schedule is at 1. Of `depth` layers the n-th has
    lr · layer_decay^(depth − n), so the topmost has lr; the final norm goes with it. The embeddings and what else comes
    before or beside the layers (tables of relative positions, a convolution) have lr · layer_decay^depth. A block that
    several layers share counts as the topmost of them. Weight decay is for matrices: biases and norms have none.
    """
    depth = model.config.depth
    last_epoch = math.ceil(recipe.epochs) - 1
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in _trained(model, heads, recipe, last_epoch).items():
        if name.startswith("auxiliary."):
            part, scale = "auxiliary", recipe.lr
        elif name.startswith("heads."):
            part, scale = "head", recipe.lr if recipe.head_lr is None else recipe.head_lr
        else:
            layer = _layer(model.config, name)
            scale = recipe.lr * recipe.layer_decay ** (depth - layer)
            part = "encoder" if recipe.layer_decay == 1 else f"layer {layer}" if layer else "embeddings"
        decays = parameter.ndim >= 2
        group = groups.setdefault(
            (part, decays),
            {
                "params": [],
                "name": part if decays else f"{part}, no decay",
                "scale": scale,
                "lr": scale,
                "weight_decay": recipe.weight_decay if decays else 0.0,
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate as a share of its peak, step by step: up in a straight line, then as the recipe says.

    "wsd" (warm-up, stable, decay) stays at the peak, then goes down in a straight line over the last `decay` of steps.

    The rates are those of transformers' schedules without their first step, whose rate is zero.

    >>> schedule = Schedule(Recipe(warmup=0.4), total_steps=5)
    >>> [round(schedule.factor(step), 2) for step in range(5)]
    [0.33, 0.67, 1.0, 0.67, 0.33]
    """

    recipe: Recipe
    total_steps: int

    def __post_init__(self) -> None:
        if self.total_steps < 1:
            raise ConfigError(f"total_steps={self.total_steps} must be at least 1")

    @property
    def warmup_steps(self) -> int:
        """Steps before the peak; there is always a step at the peak."""
        return min(round(self.recipe.warmup * self.total_steps), self.total_steps - 1)

    def factor(self, step: float) -> float:
        """For a step, counted from 0. No step before `total_steps` has zero.

        A plan whose steps grow asks for parts of steps: where it is by its tokens, as if all steps were alike.
        """
        warmup = self.warmup_steps
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (self.total_steps - warmup))
        if self.recipe.schedule == "wsd":
            left = (self.total_steps - step) / max(1.0, self.recipe.decay * self.total_steps)
            return min(1.0, max(0.0, left))
        if self.recipe.schedule == "linear":
            return 1.0 - done
        if self.recipe.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0


def frozen_layers(recipe: Recipe, epoch: float, depth: int) -> int:
    """How many of the lower layers are frozen after `epoch` epochs.

    >>> recipe = Recipe(freeze="encoder", thaw=2)
    >>> [frozen_layers(recipe, epoch, depth=6) for epoch in (0, 0.9, 1, 2.5, 3)]
    [6, 6, 4, 2, 0]
    """
    first = depth if recipe.freeze == "encoder" else recipe.freeze
    if first > depth:
        raise ConfigError(f"freeze={first} must be at most {depth}: the model has no more layers")
    return max(0, first - recipe.thaw * math.floor(epoch))


def apply_freezing(model: Model, heads: str | Sequence[str], recipe: Recipe, epoch: float) -> bool:
    """Let gradients flow to what trains after `epoch` epochs, and to nothing else. True if that changed anything.

    The embeddings are frozen as long as any layer is, the final norm as long as all layers are. With LoRA, its factors
    and the heads train.
    """
    trained = _trained(model, heads, recipe, epoch)
    changed = False
    for name, parameter in model.named_parameters():
        wanted = name in trained
        if parameter.requires_grad != wanted:
            changed = True
            parameter.requires_grad_(wanted)
            parameter.grad = None  # an old one would move a frozen weight
    return changed


def build_optimizer(groups: Sequence[dict[str, Any]], device_type: str, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW over the groups of `param_groups`, fused: on a CPU its step takes a tenth of the time of the plain one.

    On CUDA a captured graph may hold the step: there the rates are tensors, which the graph reads and `set_lr` writes.
    """
    betas = (0.9, recipe.beta2)
    if device_type != "cuda":
        return torch.optim.AdamW(groups, betas=betas, fused=True)
    rates = [torch.tensor(group["lr"], device=group["params"][0].device) for group in groups]
    groups = [group | {"lr": rate} for group, rate in zip(groups, rates, strict=True)]
    return torch.optim.AdamW(groups, betas=betas, fused=True, capturable=True)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Give every group its `scale` times the schedule's factor."""
    for group in optimizer.param_groups:
        rate = group["scale"] * factor
        if isinstance(group["lr"], torch.Tensor):
            # In place, for a captured graph; but a state that was loaded may have brought it to another device.
            group["lr"] = group["lr"].to(group["params"][0].device).fill_(rate)
        else:
            group["lr"] = rate


def _trained(model: Model, heads: str | Sequence[str], recipe: Recipe, epoch: float) -> dict[str, nn.Parameter]:
    """What trains after `epoch` epochs, by name."""
    names = [heads] if isinstance(heads, str) else heads
    for name in names:
        model.head(name)  # refuses one that is not there
    if bool(recipe.lora) != lora.is_on(model):
        has = "no" if recipe.lora else "some"
        raise ConfigError(f"lora={recipe.lora}, but the model has {has} LoRA factors; see lora.add and lora.merge")
    frozen = frozen_layers(recipe, epoch, model.config.depth)

    def wanted(name: str) -> bool:
        if name.startswith("auxiliary."):
            return True
        if name.startswith("heads."):
            return name.split(".")[1] in names
        if recipe.lora:
            return lora.is_factor(name)
        return not frozen or _layer(model.config, name) > frozen

    return {name: parameter for name, parameter in model.named_parameters() if wanted(name)}


def _layer(cfg: EncoderConfig, name: str) -> int:
    """The layer, counted from 1, of a parameter of the encoder by its name in the model; 0: before the first."""
    _, part, number, *_ = name.split(".")
    if part == "blocks":
        return cfg.depth - cfg.layer_map[::-1].index(int(number))
    return cfg.depth if part == "norm" else 0
