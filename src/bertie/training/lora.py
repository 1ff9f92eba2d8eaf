"""LoRA: trains a low-rank update of each weight matrix, and merges it at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bertie.errors import ConfigError
from bertie.nn.attention import QKV
from bertie.nn.model import Model


class LowRankUpdate(nn.Module):
    """weight + alpha / rank · B·A. Matrices stacked in one weight have their own A and rows of B."""

    def __init__(
        self, weight: Tensor, parts: tuple[int, ...], rank: int, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.parts, self.scale = list(parts), alpha / rank
        rows, columns = weight.shape
        bound = columns**-0.5
        # Drawn on the CPU, so that every device gets the same numbers.
        a = torch.empty(len(parts), rank, columns).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(a.to(weight))  # (parts, rank, columns)
        self.b = nn.Parameter(weight.new_zeros(rows, rank))  # zero: training starts from the original weights

    def forward(self, weight: Tensor) -> Tensor:
        """(rows, columns) -> (rows, columns)."""
        # In full precision even under autocast: the trained weights are exactly the merged ones.
        with torch.autocast(weight.device.type, enabled=False):
            parts = zip(self.a, torch.split(self.b, self.parts), strict=True)
            return weight + self.scale * torch.cat([b @ a for a, b in parts])


def add(model: Model, rank: int, alpha: float | None = None, seed: int = 0) -> None:
    """Add low-rank factors to every weight matrix of the encoder's blocks, and freeze the encoder's
    own weights.

    Query, key and value are stacked in one weight and have separate factors; the two halves of a
    gated feed-forward layer share theirs. `alpha=None` is 2 · rank. The factors depend on the seed
    alone. `model.state_dict()` holds them besides the original weights, and a model with factors of
    the same rank loads it.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> model = Model(cfg, {"classify": HeadConfig(kind="text", outputs=2)})
    >>> add(model, rank=2)
    >>> sum(p.numel() for p in model.encoder.parameters() if p.requires_grad)
    224
    >>> merge(model)
    >>> is_on(model)
    False
    """
    width = model.config.width
    if not 1 <= rank <= width:
        raise ConfigError(f"lora={rank} must be a rank from 1 to {width}, the model's width")
    if is_on(model):
        raise ConfigError("the model already has LoRA factors; merge them first")
    generator = torch.Generator().manual_seed(seed)
    model.encoder.requires_grad_(False)
    for module in list(model.encoder.blocks.modules()):
        if isinstance(module, nn.Linear | QKV):
            parts = module.sizes if isinstance(module, QKV) else (module.out_features,)
            factors = LowRankUpdate(module.weight, parts, rank, 2.0 * rank if alpha is None else alpha, generator)
            parametrize.register_parametrization(module, "weight", factors)


def merge(model: Model) -> None:
    """Merge the factors into the weights; names, shapes and order of parameters are those before `add`."""
    if not is_on(model):
        return
    for module in _adapted(model):
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
        bias = module.bias
        if bias is not None:  # the weight was registered again, after the bias
            del module.bias
            module.register_parameter("bias", bias)
    model.encoder.requires_grad_(True)


def is_on(model: Model) -> bool:
    """Whether the model has LoRA factors."""
    return bool(_adapted(model))


def is_factor(name: str) -> bool:
    """Whether a parameter, by its name in the model, is a LoRA factor."""
    return ".parametrizations.weight.0." in name


def _adapted(model: Model) -> list[nn.Linear | QKV]:
    return [
        module
        for module in model.encoder.blocks.modules()
        if isinstance(module, nn.Linear | QKV) and parametrize.is_parametrized(module, "weight")
    ]
