"""A config that contradicts itself cannot be written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bertie.config import (
    BlockSparse,
    Bucketed,
    Causal,
    Convolution,
    Disentangled,
    EmbeddingConfig,
    EncoderConfig,
    Full,
    HeadConfig,
    Learned,
    NormConfig,
    Rotary,
    RotaryScaling,
    Sliding,
)
from bertie.errors import ConfigError

GOOD = EncoderConfig(
    vocab=50,
    width=8,
    layer_map=(0, 1),
    heads=2,
    head_width=4,
    kv_heads=2,
    ff_width=16,
    activation="gelu",
    embeddings=EmbeddingConfig(width=8),
    positions=(Learned(32),),
    patterns=(Full(), Full()),
    max_length=32,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab": 0}, "vocab=0"),
        ({"width": -1}, "width=-1"),
        ({"heads": 1.5}, "heads=1.5"),
        ({"layer_map": ()}, "layer_map"),
        ({"layer_map": (0, 2)}, "layer_map"),
        ({"patterns": (Full(),)}, "patterns"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"activation": "maxout"}, "activation='maxout'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1"),
        ({"pad_id": 50}, "pad_id=50"),
        ({"embeddings": EmbeddingConfig(width=4)}, "embeddings.width=4"),
        ({"conv": Convolution(kernel=3, groups=3, activation="tanh")}, "conv.groups=3"),
        ({"positions": (Learned(32), Learned(32))}, "two schemes"),
        ({"positions": (Rotary((10.0,)),)}, "Rotary.bases"),
        ({"positions": (Rotary((10.0, 10.0)),), "head_width": 3}, "head_width=3"),
        ({"max_length": 33}, "max_length=33"),
        ({"positions": (Disentangled(("c2p",), 8),), "kv_heads": 1}, "kv_heads=1"),
        ({"positions": (Disentangled(("c2p",), 8),), "qk_norm": True}, "qk_norm"),
        ({"output_norms": True}, "output_norms"),
        ({"attention_scale": 0.0}, "attention_scale=0.0"),
        ({"global_tokens": True, "patterns": (Causal(), Causal())}, "Causal"),
    ],
)
def test_contradictions_name_the_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace("(", r"\(")):
        replace(GOOD, **change)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: NormConfig(eps=0.0),
        lambda: NormConfig("rms"),
        lambda: NormConfig(unit_offset=True),
        lambda: RotaryScaling(0.0),
        lambda: RotaryScaling(2.0, (4.0, 1.0), 32),
        lambda: Rotary((10.0, 10.0), (RotaryScaling(2.0),)),
        lambda: Causal(-1),
        lambda: Learned(0),
        lambda: Learned(4, skip_id=3),
        lambda: Rotary(()),
        lambda: Rotary((0.5,)),
        lambda: Bucketed(3),
        lambda: Disentangled((), 8),
        lambda: Disentangled(("c2p", "c2p"), 8),
        lambda: Disentangled(("c2p",), 8, buckets=16),
        lambda: Sliding(0),
        lambda: BlockSparse(0, 1),
        lambda: BlockSparse(4, -1),
        lambda: Convolution(kernel=2, groups=1, activation="tanh"),
        lambda: HeadConfig(kind="text", outputs=0),
        lambda: HeadConfig(kind="text", outputs=1, dropout=1.0),
        lambda: HeadConfig(kind="text", outputs=1, tied=True),
        lambda: HeadConfig(kind="token", outputs=2, globals="before_separator"),
    ],
)
def test_parts_are_validated(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()


def test_max_length_of_a_table_that_skips_rows() -> None:
    assert Learned(514, skip_id=1).max_length == 512
    assert Learned(512).max_length == 512


def test_layers_with_the_same_frequencies_share_a_key() -> None:
    scaling = RotaryScaling(4.0)
    rotary = Rotary((10.0, 500.0, 10.0, 10.0), (None, None, scaling, None))
    assert [rotary.key(layer) for layer in range(4)] == [10.0, 500.0, (10.0, scaling), 10.0]
    assert rotary.distinct_keys() == (10.0, 500.0, (10.0, scaling))
