"""Parts of an encoder: norms, positions and attention patterns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bertie.errors import ConfigError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "identity")
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "identity"]

# int8: linear layers in int8, the rest in fp32, on CPUs. fp8: linear layers in e4m3, the rest in bf16, on GPUs.
Precision = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "int8", "fp8")


def check_positive_fields(owner: object, *fields: str) -> None:
    """Refuse fields of a config that are not whole numbers of at least 1."""
    for field in fields:
        value = getattr(owner, field)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{type(owner).__name__}.{field}={value!r} must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class NormConfig:
    """LayerNorm or RMSNorm."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-12
    bias: bool = True
    unit_offset: bool = False  # of RMSNorm: the factor is 1 + weight (Gemma)

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ConfigError(f"NormConfig.eps={self.eps} must lie between 0 and 1")
        if self.kind == "rms" and self.bias:
            raise ConfigError("NormConfig(kind='rms', bias=True): RMSNorm has no bias")
        if self.kind != "rms" and self.unit_offset:
            raise ConfigError("NormConfig.unit_offset=True is for kind='rms'")


LAYER_NORM = NormConfig()


# --- positions: added to the embeddings, applied to queries and keys, or added to attention scores ---


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned absolute position embeddings, added to the token embeddings."""

    size: int
    # Positions count from `skip_id + 1`, and tokens with this id have none: fairseq's convention, where rows up to the
    # padding id are reserved. None: positions count from 0.
    skip_id: int | None = None

    def __post_init__(self) -> None:
        check_positive_fields(self, "size")
        if self.skip_id is not None and not 0 <= self.skip_id < self.size - 1:
            raise ConfigError(f"Learned.skip_id={self.skip_id} leaves no position in a table of {self.size}")

    @property
    def max_length(self) -> int:
        """The longest text, in tokens."""
        return self.size if self.skip_id is None else self.size - self.skip_id - 1


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Rotary frequencies of a model that was extended to longer texts: divided by `factor`.

    Llama 3.1 divides low frequencies only: those with fewer than `low` waves in `original_length` tokens, where
    `waves` is (low, high). Those with more than `high` are kept, and between the two there is a smooth transition.
    """

    factor: float
    waves: tuple[float, float] | None = None  # None: all frequencies are divided (linear scaling)
    original_length: int = 1

    def __post_init__(self) -> None:
        check_positive_fields(self, "original_length")
        if not self.factor > 0 or (self.waves is not None and not 0 < self.waves[0] < self.waves[1]):
            raise ConfigError(f"{self} must have a factor above 0, and rising waves above 0")


RotaryKey = float | tuple[float, RotaryScaling]


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embeddings, applied to queries and keys; one base frequency, and one scaling or None, per layer."""

    bases: tuple[float, ...]
    scalings: tuple[RotaryScaling | None, ...] = ()  # empty: none in any layer

    def __post_init__(self) -> None:
        if not self.bases or min(self.bases) <= 1:
            raise ConfigError(f"Rotary.bases={self.bases} must each be greater than 1")
        if self.scalings and len(self.scalings) != len(self.bases):
            raise ConfigError(f"Rotary.scalings has {len(self.scalings)} entries for {len(self.bases)} bases")

    def key(self, layer: int) -> RotaryKey:
        """What determines a layer's frequencies: layers with the same key share their tables."""
        scaling = self.scalings[layer] if self.scalings else None
        return self.bases[layer] if scaling is None else (self.bases[layer], scaling)

    def distinct_keys(self) -> tuple[RotaryKey, ...]:
        """The distinct keys of all layers, in order."""
        return tuple(dict.fromkeys(self.key(layer) for layer in range(len(self.bases))))


@dataclass(frozen=True, slots=True)
class Bucketed:
    """A learned bias per head and bucket of relative distance (T5), shared by all layers."""

    buckets: int
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_positive_fields(self, "buckets", "max_distance")
        if self.buckets < 4 or self.buckets % 2:
            raise ConfigError(f"Bucketed.buckets={self.buckets} must be even and at least 4")


@dataclass(frozen=True, slots=True)
class Disentangled:
    """DeBERTa's disentangled attention: content-to-position and position-to-content; all layers share the table."""

    terms: tuple[Literal["c2p", "p2c"], ...]
    max_distance: int
    buckets: int | None = None  # logarithmic buckets; None: one row per distance
    shared: bool = False  # positions use the content's query and key projections
    key_bias: bool = True  # whether the position's key projection has a bias
    norm: NormConfig | None = None  # of the table

    def __post_init__(self) -> None:
        check_positive_fields(self, "max_distance")
        if not self.terms or not set(self.terms) <= {"c2p", "p2c"} or len(set(self.terms)) < len(self.terms):
            raise ConfigError(f"Disentangled.terms={self.terms} must be c2p, p2c or both")
        if self.buckets is not None and not 1 < self.buckets < self.max_distance * 2:
            raise ConfigError(f"Disentangled.buckets={self.buckets} must lie between 2 and {self.max_distance * 2 - 1}")

    @property
    def span(self) -> int:
        """Rows of the table on either side of distance 0."""
        return self.buckets or self.max_distance


Position = Learned | Rotary | Bucketed | Disentangled


# --- attention patterns: which keys a query attends to ---


@dataclass(frozen=True, slots=True)
class Full:
    """Every token attends to every token of its text."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """A token attends to those at most `window` tokens away on either side, and to global tokens."""

    window: int

    def __post_init__(self) -> None:
        check_positive_fields(self, "window")


@dataclass(frozen=True, slots=True)
class Causal:
    """A token attends to itself and to those before it: all of them, or those at most `window` tokens away."""

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (not isinstance(self.window, int) or self.window < 0):
            raise ConfigError(f"Causal.window={self.window!r} must be a whole number of at least 0, or None")


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """BigBird: a block attends to its neighbours and to the first and last block, which attend to all.

    `random` is the number of random blocks in the original's training. Its inference replaces them by the first block,
    so that each key of the first block counts `1 + random` times; Bertie always does the same. Short texts have
    full attention.
    """

    block: int
    random: int

    def __post_init__(self) -> None:
        check_positive_fields(self, "block")
        if self.random < 0:
            raise ConfigError(f"BlockSparse.random={self.random} must not be negative")

    @property
    def full_below(self) -> int:
        """Texts of up to this many tokens have full attention."""
        return (5 + 2 * self.random) * self.block


Pattern = Full | Sliding | Causal | BlockSparse


def visible_range(pattern: Pattern) -> tuple[int, int]:
    """How many tokens before and after itself a token attends to; −1: all of them. Not for `BlockSparse`.

    >>> visible_range(Sliding(64)), visible_range(Causal())
    ((64, 64), (-1, 0))
    """
    if isinstance(pattern, Causal):
        return -1 if pattern.window is None else pattern.window, 0
    return (pattern.window, pattern.window) if isinstance(pattern, Sliding) else (-1, -1)
