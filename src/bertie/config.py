"""What an encoder and its heads look like: plain frozen facts, checked when they are written down.

A variant of the transformer is a value of these fields, never a name: `layer_map=(0,) * 12` shares one block over
twelve layers, `patterns=(Full(), Sliding(64), Sliding(64))` looks far in every third layer only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from bertie.errors import ConfigError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "identity")
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "identity"]

# int8: linear layers in int8, the rest in fp32 (CPU inference). fp8: linear layers in e4m3, the rest in bf16 (GPU inference).
Precision = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "int8", "fp8")


def _positive(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{type(owner).__name__}.{field}={value!r} must be a whole number of at least 1")


@dataclass(frozen=True, slots=True)
class NormConfig:
    """A normalization over the width: layer norm, or root mean square without a mean."""

    kind: Literal["layer", "rms"] = "layer"
    eps: float = 1e-12
    bias: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise ConfigError(f"NormConfig.eps={self.eps} must lie between 0 and 1")
        if self.kind == "rms" and self.bias:
            raise ConfigError("NormConfig(kind='rms', bias=True): an rms norm has no bias")


# --- positions: each scheme fills some of the hooks embed, rotate, bias (nn/positions.py) ---


@dataclass(frozen=True, slots=True)
class Learned:
    """A learned vector for each absolute position, added to the embedding (hook: embed)."""

    size: int
    # Positions count from `skip_id + 1`, and tokens with this id take no position: fairseq's convention, where the
    # padding id reserved the first rows. None: positions count from 0.
    skip_id: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "size")
        if self.skip_id is not None and not 0 <= self.skip_id < self.size - 1:
            raise ConfigError(f"Learned.skip_id={self.skip_id} leaves no position in a table of {self.size}")

    @property
    def max_length(self) -> int:
        """How many tokens fit."""
        return self.size if self.skip_id is None else self.size - self.skip_id - 1


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotation of queries and keys by position (hook: rotate); one base frequency a layer."""

    bases: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.bases or min(self.bases) <= 1:
            raise ConfigError(f"Rotary.bases={self.bases} must each be greater than 1")


@dataclass(frozen=True, slots=True)
class Bucketed:
    """A learned score for each head and bucket of relative distance, shared by all layers (hook: bias)."""

    buckets: int
    max_distance: int = 128

    def __post_init__(self) -> None:
        _positive(self, "buckets", "max_distance")
        if self.buckets < 4 or self.buckets % 2:
            raise ConfigError(f"Bucketed.buckets={self.buckets} must be even and at least 4")


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Scores of content against relative position and the reverse (hook: bias); the table is shared by all layers."""

    terms: tuple[Literal["c2p", "p2c"], ...]
    max_distance: int
    buckets: int | None = None  # logarithmic buckets; None: one row a distance
    shared: bool = False  # positions pass through the content's own query and key projections
    key_bias: bool = True  # the position's own key projection has a bias
    norm: NormConfig | None = None  # over the table

    def __post_init__(self) -> None:
        _positive(self, "max_distance")
        if not self.terms or not set(self.terms) <= {"c2p", "p2c"} or len(set(self.terms)) < len(self.terms):
            raise ConfigError(f"Disentangled.terms={self.terms} must be c2p, p2c or both")
        if self.buckets is not None and not 1 < self.buckets < self.max_distance * 2:
            raise ConfigError(f"Disentangled.buckets={self.buckets} must lie between 2 and {self.max_distance * 2 - 1}")

    @property
    def span(self) -> int:
        """Rows of the table on each side of distance 0."""
        return self.buckets or self.max_distance


Position = Learned | Rotary | Bucketed | Disentangled


# --- attention patterns: which keys a query sees ---


@dataclass(frozen=True, slots=True)
class Full:
    """Every token sees every token of its text."""


@dataclass(frozen=True, slots=True)
class Sliding:
    """A token sees those at most `window` away on each side, and global tokens where a batch has them."""

    window: int

    def __post_init__(self) -> None:
        _positive(self, "window")


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """A block sees its neighbours and the first and last block, which see all; short texts are seen in full.

    `random` is how many random blocks the original saw in training. Its inference puts the first block in their
    place, so that each key of the first block counts `1 + random` times; Bertie does the same, always.
    """

    block: int
    random: int

    def __post_init__(self) -> None:
        _positive(self, "block")
        if self.random < 0:
            raise ConfigError(f"BlockSparse.random={self.random} must not be negative")

    @property
    def full_below(self) -> int:
        """Texts of up to this many tokens are seen in full."""
        return (5 + 2 * self.random) * self.block


Pattern = Full | Sliding | BlockSparse


# --- the encoder ---


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """What is summed for a token before the first block."""

    width: int
    segments: int = 0  # rows of the segment table; 0: none
    tasks: int = 0  # rows of a task table whose first row is added to every token; 0: none
    scale: float = 1.0  # of the word vectors
    norm: bool = True
    # From the embedding's width to the encoder's, before or after the norm; None: there is no projection.
    project: Literal["before_norm", "after_norm"] | None = None
    project_bias: bool = True

    def __post_init__(self) -> None:
        _positive(self, "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution over neighbouring tokens of the embedding, added to the first block's output."""

    kernel: int
    groups: int
    activation: Activation

    def __post_init__(self) -> None:
        _positive(self, "kernel", "groups")
        if self.kernel % 2 == 0:
            raise ConfigError(f"Convolution.kernel={self.kernel} must be odd, to be centred on a token")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Everything that shapes an encoder. `depth` layers run `blocks` distinct blocks, in the order of `layer_map`."""

    vocab: int
    width: int
    layer_map: tuple[int, ...]
    heads: int
    head_width: int
    kv_heads: int
    ff_width: int
    activation: Activation
    gated: bool = False  # the first half of the up-projection passes the activation and multiplies the second
    qkv_bias: Literal["qkv", "qv", ""] = "qkv"  # which of query, key and value have a bias
    out_bias: bool = True
    ff_bias: bool = True
    norm: NormConfig = NormConfig()
    pre_norm: bool = False  # norms before attention and feed-forward, and a last one; else after each residual sum
    first_norm: bool = True  # with pre_norm: whether the first block's attention has its norm
    embeddings: EmbeddingConfig
    positions: tuple[Position, ...]
    patterns: tuple[Pattern, ...]  # one a layer
    global_tokens: bool = False  # separate projections for global tokens
    conv: Convolution | None = None
    max_length: int  # how many tokens the model was made for
    dropout: float = 0.0
    attention_dropout: float = 0.0
    pad_id: int | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        _positive(self, "vocab", "width", "heads", "head_width", "kv_heads", "ff_width", "max_length")
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
        if self.pad_id is not None and not 0 <= self.pad_id < self.vocab:
            raise ConfigError(f"pad_id={self.pad_id} must lie in the vocabulary of {self.vocab}")
        if self.embeddings.project is None and self.embeddings.width != self.width:
            raise ConfigError(f"embeddings.width={self.embeddings.width} needs a projection to width={self.width}")
        if self.conv and self.width % self.conv.groups:
            raise ConfigError(f"conv.groups={self.conv.groups} must divide width={self.width}")
        for kind in (Learned, Rotary, Bucketed | Disentangled):
            if sum(isinstance(p, kind) for p in self.positions) > 1:
                raise ConfigError(f"positions={self.positions} has two schemes for one hook")
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

    @property
    def depth(self) -> int:
        """How many layers a token passes."""
        return len(self.layer_map)

    @property
    def blocks(self) -> int:
        """How many of them have weights of their own."""
        return max(self.layer_map) + 1


# --- heads ---

HeadName = Literal["mlm", "rtd", "nsp", "sop", "classify", "tag", "answer", "choice", "pooler"]
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
Globals = Literal["none", "first", "before_separator", "after_separator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head: pool (or not), transform (or not), project.

    `kind` says what comes out: "vocabulary" and "token" give a row a token, "text" a row a text.
    """

    kind: Literal["vocabulary", "token", "text"]
    outputs: int | None  # None: the transformed state itself is the output
    # of a text: the first token, the mean over tokens, or the mean over tokens of the outputs ("late")
    pooling: Literal["first", "mean", "late"] = "first"
    dense: int | None = None  # the transform's width: dense, activation, norm; None: no transform
    dense_bias: bool = True
    activation: Activation = "identity"
    norm: NormConfig | None = None
    residual: int | None = None  # instead: a feed-forward of this width with residual and norm
    output_bias: bool = True
    tied: bool = False  # of a vocabulary: the output matrix is that of the word embeddings
    dropout: float = 0.0  # before the output
    dense_dropout: float = 0.0  # before the transform
    globals: Globals = "none"  # which tokens are global, in models that have such tokens
    # of texts that come without any: all 0 as they are given, or 1 past the first separator
    segments: Literal["given", "after_separator"] = "given"
    separator_id: int | None = None

    def __post_init__(self) -> None:
        for field in ("outputs", "dense", "residual"):
            if getattr(self, field) is not None:
                _positive(self, field)
        for field in ("dropout", "dense_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must lie in [0, 1)")
        if self.norm and not (self.dense or self.residual):
            raise ConfigError("HeadConfig.norm comes after dense or residual, and there is neither")
        if self.tied and self.kind != "vocabulary":
            raise ConfigError(f"tied=True is for kind='vocabulary', not {self.kind!r}")
        for field in ("globals", "segments"):
            if getattr(self, field).endswith("separator") and self.separator_id is None:
                raise ConfigError(f"{field}={getattr(self, field)!r} needs separator_id")


@dataclass(frozen=True, slots=True)
class Calibration:
    """How a head's scores are to be read, as found out on data that it was not trained on."""

    temperature: float = 1.0  # logits are divided by it
    threshold: float | None = None  # multi-label: the probability from which a label is given; None: 0.5
    abstain_below: float | None = None  # the confidence under which the model had better not answer
    precision: float | None = None  # that was wanted of the answers above it

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"Calibration.temperature={self.temperature} must be a number greater than 0")
        for name in ("threshold", "abstain_below", "precision"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"Calibration.{name}={value} must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """What a head of a checkpoint is for.

    >>> HeadInfo("classify", {0: "bad", 1: "good"}, "single_label_classification").calibration.temperature
    1.0
    """

    kind: HeadName
    labels: dict[int, str] = dataclasses.field(
        default_factory=dict
    )  # names of the classes; empty where a head has none
    problem: str | None = None  # of kind "classify": what the classes mean, one of PROBLEMS
    calibration: Calibration = Calibration()
    task: str | None = None  # where the kind does not tell: "rerank", "regress", …

    def __post_init__(self) -> None:
        if self.kind not in get_args(HeadName):
            raise ConfigError(f"HeadInfo.kind={self.kind!r} must be one of {', '.join(get_args(HeadName))}")
        if list(self.labels) != list(range(len(self.labels))):
            raise ConfigError(f"HeadInfo.labels={self.labels!r:.80} must be names for the numbers from 0 up, in order")
        if self.problem is not None and self.problem not in PROBLEMS:
            raise ConfigError(f"HeadInfo.problem={self.problem!r} must be one of {', '.join(PROBLEMS)}, or None")
