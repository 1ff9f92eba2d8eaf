"""Gemma 3's text model, and EmbeddingGemma, which is one with bidirectional attention.

Norms before and after attention and feed-forward, over queries and keys too, all with the factor 1 + weight; GeGLU;
scaled embeddings; sliding windows in most layers, which have rotary embeddings of another base frequency.
"""

from __future__ import annotations

from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.families.family import Family
from bertie.checkpoints.families.llama import (
    DROPPED,
    KINDS,
    decoder_fields,
    decoder_weights,
    layer_kinds,
    rotary_scaling,
)
from bertie.config import Causal, EmbeddingConfig, EncoderConfig, Full, Pattern, Rotary, Sliding
from bertie.errors import ConfigError


def read(k: ConfigKeys) -> EncoderConfig:
    """Read Gemma's keys, with old and new names of the rotary parameters."""
    fields = decoder_fields(k, "hidden_activation")
    fields["norm"] = replace(fields["norm"], unit_offset=True)
    width, depth = fields["width"], len(fields["layer_map"])
    bias = k.boolean("attention_bias", False)
    k.must("attn_logit_softcapping", None)
    k.ignore("final_logit_softcapping")  # of the output layer, which is not loaded
    k.must("is_causal", True)
    kinds = _kinds(k, depth)
    window = k.tokens("sliding_window", 4096, least=2)
    bidirectional = k.boolean("use_bidirectional_attention", False)
    patterns: dict[str, Pattern] = {"full_attention": Causal(), "sliding_attention": Causal(window - 1)}
    if bidirectional:  # the window counts both sides
        patterns = {"full_attention": Full(), "sliding_attention": Sliding(window // 2)}
    return EncoderConfig(
        **fields,
        qkv_bias="qkv" if bias else "",
        out_bias=bias,
        qk_norm=True,
        output_norms=True,
        attention_scale=k.number("query_pre_attn_scalar", 256, least=1.0, most=1e6) ** -0.5,
        embeddings=EmbeddingConfig(width=width, norm=False, scale=width**0.5),
        positions=(_rotary(k, kinds, fields["max_length"]),),
        patterns=tuple(patterns[kind] for kind in kinds),
    )


def _kinds(k: ConfigKeys, depth: int) -> list[str]:
    """The attention type of each layer: listed, or every n-th one full as in the first checkpoints."""
    if k.raw.get("layer_types") is None:
        k.must("_sliding_window_pattern", k.raw.get("sliding_window_pattern", 6))
    k.ignore("_sliding_window_pattern")
    every = k.integer("sliding_window_pattern", 6)
    return layer_kinds(k, ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(depth)])


def _rotary(k: ConfigKeys, kinds: list[str], max_length: int) -> Rotary:
    """Base frequency and scaling by attention type; the old key rope_scaling is that of full attention."""
    new, old = k.mapping("rope_parameters", {}), k.mapping("rope_scaling", {})
    if set(new) - set(KINDS):
        raise ConfigError(f"config.json: rope_parameters={new!r:.80} must hold {' and '.join(KINDS)}")
    if new and old:
        raise ConfigError("config.json: rope_scaling and rope_parameters are both given; leave one of them out")
    bases = (k.base("rope_theta", 1_000_000.0), k.base("rope_local_base_freq", 10_000.0))
    found = {}
    for kind, base in zip(KINDS, bases, strict=True):
        name, raw = ("rope_scaling", old) if old and kind == "full_attention" else ("rope_parameters", new.get(kind))
        found[kind] = rotary_scaling(k, name, {} if raw is None else raw, base, max_length)
    return Rotary(tuple(found[kind][0] for kind in kinds), tuple(found[kind][1] for kind in kinds))


FAMILY = Family(
    model_type="gemma3_text",
    architectures={"Gemma3TextModel": (), "Gemma3ForCausalLM": ()},
    prefix="model.",
    read=read,
    weights=decoder_weights,
    heads={},
    dropped=DROPPED,
    defaults={
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    },
    decoder=True,
)
