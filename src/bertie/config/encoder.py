"""The architecture of an encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bertie.config.parts import (
    ACTIVATIONS,
    LAYER_NORM,
    Activation,
    Bucketed,
    Causal,
    Disentangled,
    Learned,
    NormConfig,
    Pattern,
    Position,
    Rotary,
    check_positive_fields,
)
from bertie.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """Token embeddings: the sum of several tables, normalized."""

    width: int
    segments: int = 0  # rows of the segment table; 0: none
    tasks: int = 0  # rows of the task table, whose first row is added to every token; 0: none
    scale: float = 1.0  # factor of the word embeddings
    norm: bool = True
    # Projection from the embedding width to the encoder's, before or after the norm; None: none.
    project: Literal["before_norm", "after_norm"] | None = None
    project_bias: bool = True

    def __post_init__(self) -> None:
        check_positive_fields(self, "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution over the token embeddings, added to the first block's output."""

    kernel: int
    groups: int
    activation: Activation

    def __post_init__(self) -> None:
        check_positive_fields(self, "kernel", "groups")
        if self.kernel % 2 == 0:
            raise ConfigError(f"Convolution.kernel={self.kernel} must be odd")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """The architecture of an encoder. `depth` layers run `blocks` distinct blocks, in the order of `layer_map`."""

    vocab: int
    width: int
    layer_map: tuple[int, ...]
    heads: int
    head_width: int
    kv_heads: int
    ff_width: int
    activation: Activation
    gated: bool = False  # the activated first half of the up-projection multiplies the second (GLU)
    qkv_bias: Literal["qkv", "qv", ""] = "qkv"  # which projections have a bias
    out_bias: bool = True
    ff_bias: bool = True
    norm: NormConfig = LAYER_NORM
    pre_norm: bool = False  # norms before attention and feed-forward, and a final one; else after each residual
    first_norm: bool = True  # with pre_norm: whether the first block's attention has a norm
    output_norms: bool = False  # with pre_norm: norms of what attention and feed-forward add to the residual (Gemma)
    qk_norm: bool = False  # a norm over each head's queries and keys, before rotary embeddings
    attention_scale: float | None = None  # of the scores q·k; None: 1 / sqrt(head_width)
    embeddings: EmbeddingConfig
    positions: tuple[Position, ...]
    patterns: tuple[Pattern, ...]  # one per layer
    global_tokens: bool = False  # separate projections for global tokens
    conv: Convolution | None = None
    max_length: int  # the longest text, in tokens
    dropout: float = 0.0
    attention_dropout: float = 0.0
    pad_id: int | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_positive_fields(self, "vocab", "width", "heads", "head_width", "kv_heads", "ff_width", "max_length")
        if not self.layer_map or sorted(set(self.layer_map)) != list(range(max(self.layer_map) + 1)):
            raise ConfigError(f"layer_map={self.layer_map} must use each block from 0 up, and at least one")
        if len(self.patterns) != self.depth:
            raise ConfigError(f"patterns has {len(self.patterns)} entries for {self.depth} layers")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation!r} must be one of {', '.join(ACTIVATIONS)}")
        for field in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must lie in [0, 1)")
        if self.output_norms and not self.pre_norm:
            raise ConfigError("output_norms=True needs pre_norm=True")
        if self.attention_scale is not None and not self.attention_scale > 0:
            raise ConfigError(f"attention_scale={self.attention_scale} must be greater than 0, or None")
        if self.global_tokens and (self.qk_norm or any(isinstance(p, Causal) for p in self.patterns)):
            raise ConfigError("global_tokens=True cannot be combined with qk_norm or Causal patterns")
        if self.pad_id is not None and not 0 <= self.pad_id < self.vocab:
            raise ConfigError(f"pad_id={self.pad_id} must lie in the vocabulary of {self.vocab}")
        if self.embeddings.project is None and self.embeddings.width != self.width:
            raise ConfigError(f"embeddings.width={self.embeddings.width} needs a projection to width={self.width}")
        if self.conv and self.width % self.conv.groups:
            raise ConfigError(f"conv.groups={self.conv.groups} must divide width={self.width}")
        for kind in (Learned, Rotary, Bucketed | Disentangled):
            if sum(isinstance(p, kind) for p in self.positions) > 1:
                raise ConfigError(f"positions={self.positions} has two schemes of one kind")
        for position in self.positions:
            if isinstance(position, Rotary):
                if len(position.bases) != self.depth:
                    raise ConfigError(f"Rotary.bases has {len(position.bases)} entries for {self.depth} layers")
                if self.head_width % 2:
                    raise ConfigError(f"head_width={self.head_width} must be even for rotary positions")
            if isinstance(position, Learned) and self.max_length > position.max_length:
                raise ConfigError(f"max_length={self.max_length} exceeds the position table's {position.max_length}")
            if isinstance(position, Disentangled) and self.kv_heads != self.heads:
                raise ConfigError(f"kv_heads={self.kv_heads} must equal heads={self.heads} with Disentangled positions")
            if isinstance(position, Disentangled) and (self.qk_norm or self.attention_scale is not None):
                raise ConfigError("Disentangled positions cannot be combined with qk_norm or attention_scale")

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.layer_map)

    @property
    def blocks(self) -> int:
        """The number of blocks with weights of their own."""
        return max(self.layer_map) + 1
