"""EuroBERT: a bidirectional Llama: pre-norm with RMSNorm, grouped-query attention, SwiGLU, rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated, linear, same
from bertie.checkpoints.families.common import architectures, head, mlm_weights, qkv_sizes, width_and_heads
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, NormConfig, Rotary
from bertie.errors import ConfigError


def read(k: ConfigKeys) -> EncoderConfig:
    """Read EuroBERT's keys, with old and new names of the rotary parameters."""
    k.encoder_only()
    width, depth = k.integer("hidden_size", 768), k.layers("num_hidden_layers", 12)
    fields = width_and_heads(k, width)
    heads = fields["heads"]
    fields["head_width"] = k.integer("head_dim", fields["head_width"])
    fields["kv_heads"] = k.integer("num_key_value_heads", heads)
    if heads % fields["kv_heads"]:
        raise ConfigError(
            f"config.json: num_key_value_heads={fields['kv_heads']} must divide num_attention_heads={heads}"
        )
    k.must("pretraining_tp", 1)
    # Keys of the published checkpoints; the special tokens are also in the tokenizer's files.
    k.must("hidden_dropout", 0.0, 0)
    k.ignore("bos_token", "eos_token", "pad_token", "mask_token")
    # Early versions of transformers write null.
    k.must("rope_scaling", None)
    base = k.rotary_base("rope_parameters", k.mapping("rope_parameters", {}), k.base("rope_theta", 10_000.0))
    attention_bias = k.boolean("attention_bias", False)
    return EncoderConfig(
        vocab=k.integer("vocab_size"),
        width=width,
        **fields,
        layer_map=tuple(range(depth)),
        ff_width=k.integer("intermediate_size", 3072),
        activation=k.activation("hidden_act", "silu"),
        gated=True,
        qkv_bias="qkv" if attention_bias else "",
        out_bias=attention_bias,
        ff_bias=k.boolean("mlp_bias", False),
        norm=NormConfig("rms", eps=k.number("rms_norm_eps", 1e-5, least=1e-30, most=0.1), bias=False),
        pre_norm=True,
        embeddings=EmbeddingConfig(width=width, norm=False),
        positions=(Rotary((base,) * depth),),
        patterns=(Full(),) * depth,
        max_length=k.tokens("max_position_embeddings", 8192),
        attention_dropout=k.probability("attention_dropout", 0.0),
        pad_id=k.optional_integer("pad_token_id", 128001),
        init_std=k.number("initializer_range", 0.02, most=100.0),
    )


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """EuroBERT's tensor names."""
    yield same("encoder.embeddings.words.weight", "embed_tokens.weight")
    yield same("encoder.norm.weight", "norm.weight")
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"layers.{i}"
        yield same(f"{ours}.pre_attention.weight", f"{theirs}.input_layernorm.weight")
        names = [f"{theirs}.self_attn.{part}_proj" for part in "qkv"]
        yield from concatenated(f"{ours}.attention.qkv", names, qkv_sizes(cfg), bias=bool(cfg.qkv_bias))
        yield from linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", cfg.out_bias)
        yield same(f"{ours}.pre_ff.weight", f"{theirs}.post_attention_layernorm.weight")
        gate = [f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"]
        yield from concatenated(f"{ours}.ff.up", gate, (cfg.ff_width, cfg.ff_width), bias=cfg.ff_bias)
        yield from linear(f"{ours}.ff.down", f"{theirs}.mlp.down_proj", cfg.ff_bias)


def _mlm(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
    """Only the output layer over the vocabulary."""
    return HeadConfig(
        kind="vocabulary", outputs=cfg.vocab, output_bias=cfg.ff_bias, tied=k.boolean("tie_word_embeddings", False)
    )


def _classify(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
    pooling = k.choice("classifier_pooling", ("bos", "mean", "late"), "late")
    k.must("clf_pooling", pooling)  # the name in the published checkpoints, which transformers does not read
    return HeadConfig(
        kind="text",
        outputs=len(k.labels()),
        pooling="first" if pooling == "bos" else "mean" if pooling == "mean" else "late",
        dense=cfg.width,
        activation="gelu",
    )


def _classify_weights(_: HeadConfig) -> Iterator[TensorRule]:
    yield from linear("heads.classify.dense", "dense")
    yield from linear("heads.classify.out", "classifier")


FAMILY = Family(
    model_type="eurobert",
    architectures=architectures(
        "EuroBert",
        ForMaskedLM=("mlm",),
        ForSequenceClassification=("classify",),
        ForTokenClassification=("tag",),
    ),
    prefix="model.",
    read=read,
    weights=weights,
    heads={
        "mlm": HeadTable(_mlm, mlm_weights("lm_head")),
        "classify": HeadTable(_classify, _classify_weights),
        "tag": head("tag", "token", "labels", out="classifier"),
    },
    companions=("mlm",),
    dropped=(r"rotary_emb\.\w*inv_freq$",),
)
