"""AdamW: parameter groups, layer-wise learning rates, and freezing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bertie.config import EncoderConfig
from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.training import lora
from bertie.training.cpu_adamw import CpuAdamW, is_supported


def param_groups(model: Model, heads: str | Sequence[str], recipe: Recipe) -> list[dict[str, Any]]:
    """AdamW's parameter groups: all weights that are trained now or after unfreezing, with the
    named heads only.

    Each group has a `name` and a `scale`: its peak learning rate. Layer n of `depth` has lr ·
    layer_decay^(depth − n), so the top layer has lr, and so has the final norm. Embeddings and
    other weights outside the layers (tables of relative positions, a convolution) have lr ·
    layer_decay^depth. A block shared by several layers counts as the topmost of them. Weight decay
    applies to matrices; biases and norms have none.
    """
    depth = model.config.depth
    recipe = recipe.resolve()
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


def frozen_layers(recipe: Recipe, epoch: float, depth: int) -> int:
    """The number of lower layers that are frozen after `epoch` epochs.

    >>> recipe = Recipe(freeze="encoder", unfreeze=2)
    >>> [frozen_layers(recipe, epoch, depth=6) for epoch in (0, 0.9, 1, 2.5, 3)]
    [6, 6, 4, 2, 0]
    """
    first = depth if recipe.freeze == "encoder" else recipe.freeze
    if first > depth:
        raise ConfigError(f"freeze={first} must be at most {depth}: the model has no more layers")
    return max(0, first - recipe.unfreeze * math.floor(epoch))


def apply_freezing(model: Model, heads: str | Sequence[str], recipe: Recipe, epoch: float) -> bool:
    """Set `requires_grad` of all parameters for this epoch; returns whether that changed any.

    The embeddings are frozen while any layer is, the final norm while all layers are. What is frozen runs without
    dropout. With LoRA its factors and the heads train.
    """
    trained = _trained(model, heads, recipe, epoch)
    changed = False
    for name, parameter in model.named_parameters():
        trains = name in trained
        if parameter.requires_grad != trains:
            changed = True
            parameter.requires_grad_(trains)
            parameter.grad = None  # a stale gradient would move a frozen weight
    model.encoder.freeze(0 if recipe.lora else frozen_layers(recipe, epoch, model.config.depth))
    return changed


def build_optimizer(groups: Sequence[dict[str, Any]], device_type: str, recipe: Recipe) -> torch.optim.AdamW:
    """Build a fused AdamW: on a CPU the compiled one where it was built, else PyTorch's.

    On CUDA a captured graph may hold the step: its learning rates are tensors, which the graph
    reads and `set_lr` writes.
    """
    betas = (0.9, recipe.beta2)
    if is_supported([parameter for group in groups for parameter in group["params"]]):
        return CpuAdamW(groups, betas)
    if device_type != "cuda":
        return torch.optim.AdamW(groups, betas=betas, fused=True)
    rates = [torch.tensor(group["lr"], device=group["params"][0].device) for group in groups]
    groups = [group | {"lr": rate} for group, rate in zip(groups, rates, strict=True)]
    return torch.optim.AdamW(groups, betas=betas, fused=True, capturable=True)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to its `scale` times the schedule's factor."""
    for group in optimizer.param_groups:
        rate = group["scale"] * factor
        if isinstance(group["lr"], torch.Tensor):
            # In place, for a captured graph; a loaded state may have moved it to another device.
            group["lr"] = group["lr"].to(group["params"][0].device).fill_(rate)
        else:
            group["lr"] = rate


def _trained(model: Model, heads: str | Sequence[str], recipe: Recipe, epoch: float) -> dict[str, nn.Parameter]:
    """The parameters that train after `epoch` epochs, by name."""
    names = [heads] if isinstance(heads, str) else heads
    for name in names:
        model.head(name)  # raises if it is missing
    if bool(recipe.lora) != lora.is_on(model):
        has = "no" if recipe.lora else "some"
        raise ConfigError(f"lora={recipe.lora}, but the model has {has} LoRA factors; see lora.add and lora.merge")
    frozen = frozen_layers(recipe, epoch, model.config.depth)

    def trains(name: str) -> bool:
        if name.startswith("auxiliary."):
            return True
        if name.startswith("heads."):
            return name.split(".")[1] in names
        if recipe.lora:
            return lora.is_factor(name)
        return not frozen or _layer(model.config, name) > frozen

    return {name: parameter for name, parameter in model.named_parameters() if trains(name)}


def _layer(cfg: EncoderConfig, name: str) -> int:
    """The layer of an encoder parameter, from 1; 0: outside the layers."""
    _, part, number, *_ = name.split(".")
    if part == "blocks":
        return cfg.depth - cfg.layer_map[::-1].index(int(number))
    return cfg.depth if part == "norm" else 0
