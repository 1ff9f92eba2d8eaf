"""Configuration of an encoder and its heads: frozen dataclasses, validated when they are created.

A variant of the transformer is a value of these fields, never a model name: `layer_map=(0,) * 12` shares one block
between twelve layers, `patterns=(Full(), Sliding(64), Sliding(64))` has global attention in every third layer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from bertie.errors import ConfigError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "identity")
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh", "identity"]

# int8: linear layers in int8, the rest in fp32, on CPUs. fp8: linear layers in e4m3, the rest in bf16, on GPUs.
Precision = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "int8", "fp8")


def _positive(owner: object, *fields: str) -> None:
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


# --- positions: added to the embeddings, applied to queries and keys, or added to attention scores ---


@dataclass(frozen=True, slots=True)
class Learned:
    """Learned absolute position embeddings, added to the token embeddings."""

    size: int
    # Positions count from `skip_id + 1`, and tokens with this id have none: fairseq's convention, where rows up to the
    # padding id are reserved. None: positions count from 0.
    skip_id: int | None = None

    def __post_init__(self) -> None:
        _positive(self, "size")
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
        _positive(self, "original_length")
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
        _positive(self, "buckets", "max_distance")
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
        _positive(self, "max_distance")
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
        _positive(self, "window")


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
        _positive(self, "block")
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


# --- the encoder ---


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
        _positive(self, "width")


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution over the token embeddings, added to the first block's output."""

    kernel: int
    groups: int
    activation: Activation

    def __post_init__(self) -> None:
        _positive(self, "kernel", "groups")
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
    norm: NormConfig = NormConfig()
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


# --- heads ---

HeadName = Literal["mlm", "rtd", "nsp", "sop", "classify", "tag", "answer", "choice", "pooler", "span"]
# The classes of the heads for pairs of texts that pretraining leaves: next-sentence and sentence-order prediction.
PAIR_LABELS: dict[HeadName, dict[int, str]] = {
    "nsp": {0: "is_next", 1: "not_next"},
    "sop": {0: "in_order", 1: "swapped"},
}
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
Globals = Literal["none", "first", "before_separator", "after_separator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head: pool (or not), transform (or not), project.

    Heads of kind "vocabulary" and "token" have one output row per token, those of kind "text" one per text, those of
    kind "span" one per span of words (`SpanHeadConfig`).
    """

    kind: Literal["vocabulary", "token", "text", "span"]
    outputs: int | None  # None: the transformed hidden state is the output
    # For kind "text": the first token, the mean over tokens, or the mean over the tokens' outputs ("late").
    pooling: Literal["first", "mean", "late"] = "first"
    dense: int | None = None  # width of the transform (dense, activation, norm); None: no transform
    dense_bias: bool = True
    activation: Activation = "identity"
    norm: NormConfig | None = None
    residual: int | None = None  # instead: a feed-forward layer of this width with residual and norm
    output_bias: bool = True
    tied: bool = False  # for kind "vocabulary": the output matrix is the word embedding table
    dropout: float = 0.0  # before the output
    dense_dropout: float = 0.0  # before the transform
    globals: Globals = "none"  # which tokens are global, in models with global tokens
    # Segment ids of texts without any: as given (0), or 1 after the first separator.
    segments: Literal["given", "after_separator"] = "given"
    separator_id: int | None = None
    # The first token's hidden state is added to every token's, and the norm comes before the dense layer.
    add_first: bool = False

    def __post_init__(self) -> None:
        for field in ("outputs", "dense", "residual"):
            if getattr(self, field) is not None:
                _positive(self, field)
        for field in ("dropout", "dense_dropout"):
            if not 0 <= getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)} must lie in [0, 1)")
        if self.norm and not (self.dense or self.residual):
            raise ConfigError("HeadConfig.norm needs dense or residual")
        if self.tied and self.kind != "vocabulary":
            raise ConfigError(f"tied=True is for kind='vocabulary', not {self.kind!r}")
        if self.add_first and (self.kind != "token" or not self.dense or not self.norm):
            raise ConfigError("add_first=True is for kind='token' with dense and norm")
        for field in ("globals", "segments"):
            if getattr(self, field).endswith("separator") and self.separator_id is None:
                raise ConfigError(f"{field}={getattr(self, field)!r} needs separator_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHeadConfig(HeadConfig):
    """A head that scores each span of up to `max_width` words against each label of a prompt (GLiNER).

    >>> SpanHeadConfig(width=512).kind
    'span'
    """

    kind: Literal["vocabulary", "token", "text", "span"] = "span"
    outputs: int | None = None
    width: int  # of words, spans and labels; the encoder's hidden states are projected to it, if theirs differs
    max_width: int = 12  # the most words of a span
    rnn_layers: int = 0  # of a bidirectional LSTM over the words; 0: none

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        _positive(self, "width", "max_width")
        if self.rnn_layers < 0 or (self.rnn_layers and self.width % 2):
            raise ConfigError(
                f"SpanHeadConfig.rnn_layers={self.rnn_layers}, width={self.width}: an LSTM needs an even width"
            )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of a head's scores, fitted on held-out data."""

    temperature: float = 1.0  # logits are divided by it
    threshold: float | None = None  # multi-label: lowest probability of an assigned label; None: 0.5
    abstain_below: float | None = None  # confidence below which the model should abstain
    precision: float | None = None  # target precision of the predictions above it
    # Question answering: the probability of "no answer" is
    # sigmoid(scale * (its logit - best span's) + length * log(tokens read) + bias).
    no_answer_scale: float | None = None
    no_answer_bias: float | None = None
    no_answer_length: float = 0.0
    no_answer_threshold: float | None = None  # the highest such probability of a question that is answered

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature <= 1e6:  # beyond that, logits divided by it overflow or vanish
            raise ConfigError(f"Calibration.temperature={self.temperature} must be a number from 1e-6 to 1e6")
        if (self.no_answer_scale is None) != (self.no_answer_bias is None) or (self.no_answer_scale or 0.0) < 0:
            raise ConfigError(
                f"Calibration.no_answer_scale={self.no_answer_scale} and no_answer_bias={self.no_answer_bias} must be "
                "numbers, the scale of at least 0, or both None"
            )
        if not 0 <= self.no_answer_length <= 1e6:
            raise ConfigError(f"Calibration.no_answer_length={self.no_answer_length} must be a number of at least 0")
        for name in ("threshold", "abstain_below", "precision", "no_answer_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"Calibration.{name}={value} must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """The task of a checkpoint's head.

    >>> HeadInfo("classify", {0: "bad", 1: "good"}, "single_label_classification").calibration.temperature
    1.0
    """

    kind: HeadName
    labels: dict[int, str] = dataclasses.field(default_factory=dict)  # class names; empty for heads without classes
    problem: str | None = None  # for kind "classify": one of PROBLEMS
    calibration: Calibration = Calibration()
    task: str | None = None  # where the kind does not determine it: "rerank", "regress", …

    def __post_init__(self) -> None:
        if self.kind not in get_args(HeadName):
            raise ConfigError(f"HeadInfo.kind={self.kind!r} must be one of {', '.join(get_args(HeadName))}")
        if list(self.labels) != list(range(len(self.labels))):
            raise ConfigError(f"HeadInfo.labels={self.labels!r:.80} must be names for the numbers from 0 up, in order")
        if self.problem is not None and self.problem not in PROBLEMS:
            raise ConfigError(f"HeadInfo.problem={self.problem!r} must be one of {', '.join(PROBLEMS)}, or None")
