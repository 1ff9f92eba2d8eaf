"""Configuration of an encoder and its heads: frozen dataclasses, validated when they are created.

A variant of the transformer is a value of these fields, never a model name: `layer_map=(0,) * 12` shares one block
between twelve layers, `patterns=(Full(), Sliding(64), Sliding(64))` has global attention in every third layer.
"""

from bertie.config.encoder import Convolution, EmbeddingConfig, EncoderConfig
from bertie.config.heads import (
    PAIR_LABELS,
    PROBLEMS,
    Calibration,
    Globals,
    HeadConfig,
    HeadInfo,
    HeadName,
    SpanHeadConfig,
)
from bertie.config.parts import (
    ACTIVATIONS,
    PRECISIONS,
    Activation,
    BlockSparse,
    Bucketed,
    Causal,
    Disentangled,
    Full,
    Learned,
    NormConfig,
    Pattern,
    Position,
    Precision,
    Rotary,
    RotaryKey,
    RotaryScaling,
    Sliding,
    visible_range,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "BlockSparse",
    "Bucketed",
    "Calibration",
    "Causal",
    "Convolution",
    "Disentangled",
    "EmbeddingConfig",
    "EncoderConfig",
    "Full",
    "Globals",
    "HeadConfig",
    "HeadInfo",
    "HeadName",
    "Learned",
    "NormConfig",
    "PAIR_LABELS",
    "PRECISIONS",
    "PROBLEMS",
    "Pattern",
    "Position",
    "Precision",
    "Rotary",
    "RotaryKey",
    "RotaryScaling",
    "Sliding",
    "SpanHeadConfig",
    "visible_range",
]
