"""Heads, their labels and their calibration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from bertie.config.parts import (
    Activation,
    NormConfig,
    check_positive_fields,
)
from bertie.errors import ConfigError

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
                check_positive_fields(self, field)
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
        check_positive_fields(self, "width", "max_width")
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
