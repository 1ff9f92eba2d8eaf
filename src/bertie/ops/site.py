"""Where and how a model runs: what the predicates of the dispatch table read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from bertie.config import Activation, Bucketed, Disentangled, EncoderConfig, Full, Pattern, Rotary

FULL = Full()


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how a model runs: everything that a row's predicate may depend on."""

    device: torch.device
    dtype: torch.dtype  # of matrix multiplications: autocast's where it is on, else the weights'
    training: bool = False  # gradients are needed
    autocast: bool = False
    weights: frozenset[torch.dtype] = frozenset()  # dtypes of all parameters
    width: int = 0
    norm: Literal["layer", "rms"] = "layer"
    activation: Activation = "gelu"
    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    patterns: tuple[Pattern, ...] = (FULL,)
    relative: Literal["", "bucketed", "disentangled"] = ""
    rotary: bool = False
    global_tokens: bool = False
    convolution: bool = False
    checkpointing: bool = False  # gradient checkpointing

    @classmethod
    def of(cls, cfg: EncoderConfig, device: torch.device, dtype: torch.dtype, **more: Any) -> Site:
        """The facts of an encoder's config."""
        kinds = {Bucketed: "bucketed", Disentangled: "disentangled"}
        relative: Any = next((name for p in cfg.positions for kind, name in kinds.items() if isinstance(p, kind)), "")
        return cls(
            device,
            dtype,
            width=cfg.width,
            norm=cfg.norm.kind,
            activation=cfg.activation,
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_width=cfg.head_width,
            patterns=tuple(dict.fromkeys(cfg.patterns)),
            relative=relative,
            rotary=any(isinstance(p, Rotary) for p in cfg.positions),
            global_tokens=cfg.global_tokens,
            convolution=cfg.conv is not None,
            **more,
        )
