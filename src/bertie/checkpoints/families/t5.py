"""The encoder of T5 (sentence-t5, GTR): pre-norm with RMSNorm, a learned bias by relative distance, no score scaling.

The decoder of a complete T5 is not loaded: Bertie does not generate text.
"""

from __future__ import annotations

from collections.abc import Iterator

from bertie.checkpoints.config_keys import ACTIVATIONS, ConfigKeys
from bertie.checkpoints.convert import TensorAlias, TensorRule, concatenated, same
from bertie.checkpoints.families.common import qkv_sizes
from bertie.checkpoints.families.family import Family
from bertie.config import Bucketed, EmbeddingConfig, EncoderConfig, Full, NormConfig
from bertie.errors import ConfigError


def read(k: ConfigKeys) -> EncoderConfig:
    """Read T5's keys. The encoder has no maximum length of its own; it was trained on texts of n_positions tokens."""
    width, depth, heads = k.integer("d_model", 512), k.layers("num_layers", 6), k.integer("num_heads", 8)
    k.must("is_decoder", False)
    k.must("add_cross_attention", False)
    k.must("pruned_heads", {})
    k.ignore("is_encoder_decoder")  # whether there is a decoder too, which is not loaded
    k.ignore("num_decoder_layers", "tie_word_embeddings", "scale_decoder_outputs", "classifier_dropout", "pad_token_id")
    gated, activation = _feed_forward(k)
    dropout = k.probability("dropout_rate", 0.1)
    return EncoderConfig(
        vocab=k.integer("vocab_size"),
        width=width,
        layer_map=tuple(range(depth)),
        heads=heads,
        kv_heads=heads,
        head_width=k.integer("d_kv", 64),
        ff_width=k.integer("d_ff", 2048),
        activation=ACTIVATIONS[activation],
        gated=gated,
        qkv_bias="",
        out_bias=False,
        ff_bias=False,
        norm=NormConfig("rms", eps=k.number("layer_norm_epsilon", 1e-6, least=1e-30, most=0.1), bias=False),
        pre_norm=True,
        attention_scale=1.0,
        embeddings=EmbeddingConfig(width=width, norm=False),
        positions=(
            Bucketed(k.integer("relative_attention_num_buckets", 32), k.tokens("relative_attention_max_distance", 128)),
        ),
        patterns=(Full(),) * depth,
        max_length=k.tokens("n_positions", 512),
        dropout=dropout,
        attention_dropout=dropout,
        init_std=0.02 * k.number("initializer_factor", 1.0, most=100.0),
    )


def _feed_forward(k: ConfigKeys) -> tuple[bool, str]:
    """Whether the feed-forward layer is gated, and its activation: "relu", "gated-gelu", "gated-silu"."""
    value = k.text("feed_forward_proj", "relu")
    gated, activation = value.startswith("gated-"), value.removeprefix("gated-")
    if activation not in ACTIVATIONS:
        allowed = ", ".join(ACTIVATIONS)
        raise ConfigError(f"config.json: feed_forward_proj={value!r:.80} must be one of {allowed}, or gated- and one")
    # T5 1.1 means the approximation by tanh.
    activation = "gelu_new" if value == "gated-gelu" else activation
    k.must("dense_act_fn", activation)
    k.must("is_gated_act", gated)
    return gated, activation


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """T5's tensor names; the bias by distance lies in the first layer."""
    yield same("encoder.embeddings.words.weight", "shared.weight", TensorAlias("encoder.embed_tokens.weight"))
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield same("encoder.relative.rows.weight", bias)
    yield same("encoder.norm.weight", "encoder.final_layer_norm.weight")
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"encoder.block.{i}.layer"
        yield same(f"{ours}.pre_attention.weight", f"{theirs}.0.layer_norm.weight")
        names = [f"{theirs}.0.SelfAttention.{part}" for part in "qkv"]
        yield from concatenated(f"{ours}.attention.qkv", names, qkv_sizes(cfg), bias=False)
        yield same(f"{ours}.attention.out.weight", f"{theirs}.0.SelfAttention.o.weight")
        yield same(f"{ours}.pre_ff.weight", f"{theirs}.1.layer_norm.weight")
        up = [f"{theirs}.1.DenseReluDense.wi_{part}" for part in (0, 1)]
        if cfg.gated:
            yield from concatenated(f"{ours}.ff.up", up, (cfg.ff_width, cfg.ff_width), bias=False)
        else:
            yield same(f"{ours}.ff.up.weight", f"{theirs}.1.DenseReluDense.wi.weight")
        yield same(f"{ours}.ff.down.weight", f"{theirs}.1.DenseReluDense.wo.weight")


FAMILY = Family(
    model_type="t5",
    architectures={"T5EncoderModel": (), "T5Model": (), "T5ForConditionalGeneration": ()},
    prefix="",
    read=read,
    weights=weights,
    heads={},
    dropped=(r"^decoder\.", r"^lm_head\.weight$"),
    decoder=True,
)
