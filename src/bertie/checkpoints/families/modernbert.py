"""ModernBERT: pre-norm, GeGLU, rotary embeddings; full attention in every third layer, else sliding windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, TiedTensor, linear, same
from bertie.checkpoints.families.common import USUAL, architectures, mlm_weights, width_and_heads
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, HeadName, NormConfig, Rotary, Sliding
from bertie.errors import ConfigError

KINDS = ("full_attention", "sliding_attention")


def _layer_kinds(k: ConfigKeys, depth: int) -> list[str]:
    """The attention type of each layer: listed, or every n-th one full as in the first checkpoints."""
    every = k.integer("global_attn_every_n_layers", 3)
    usual = ["sliding_attention" if i % every else "full_attention" for i in range(depth)]
    kinds = k.array("layer_types", usual)
    if len(kinds) != depth or not all(kind in KINDS for kind in kinds):
        raise ConfigError(f"config.json: layer_types={kinds!r:.80} must name {' or '.join(KINDS)} for {depth} layers")
    return kinds


def read(k: ConfigKeys) -> EncoderConfig:
    """Read ModernBERT's keys, with old and new names of the rotary parameters."""
    k.encoder_only("sans_pos")
    width, depth = k.integer("hidden_size", 768), k.layers("num_hidden_layers", 22)
    kinds = _layer_kinds(k, depth)
    rope = k.mapping("rope_parameters", {})
    if set(rope) - set(KINDS):
        raise ConfigError(f"config.json: rope_parameters={rope!r:.80} must hold {' and '.join(KINDS)}")
    thetas = (k.base("global_rope_theta", 160_000.0), k.base("local_rope_theta", 10_000.0))
    base = {
        kind: k.rotary_base("rope_parameters", {} if rope.get(kind) is None else rope[kind], theta)
        for kind, theta in zip(KINDS, thetas, strict=True)
    }
    window = k.tokens("local_attention", 128, least=2)
    if window % 2:
        raise ConfigError(f"config.json: local_attention={window} must be even: it counts both sides")
    attention_bias = k.boolean("attention_bias", False)
    pad_id = k.optional_integer("pad_token_id", 50283)
    dropout = k.probability("mlp_dropout", 0.0)
    k.probability("embedding_dropout", 0.0)
    k.must("causal_mask", False)  # of Ettin, whose decoders have the same model_type
    k.must("is_causal", False)
    k.must("rope_scaling", None)
    k.integer("sep_token_id", 50282, least=0)
    k.ignore(
        *("initializer_cutoff_factor deterministic_flash_attn sparse_prediction sparse_pred_ignore_index").split(),
        *("reference_compile repad_logits_with_grad compile_model").split(),
        # The first checkpoints repeat norm_eps under BERT's name, which is never read.
        "layer_norm_eps",
    )
    return EncoderConfig(
        vocab=k.integer("vocab_size"),
        width=width,
        **width_and_heads(k, width),
        layer_map=tuple(range(depth)),
        ff_width=k.integer("intermediate_size", 1152),
        activation=k.activation("hidden_activation", "gelu"),
        gated=True,
        qkv_bias="qkv" if attention_bias else "",
        out_bias=attention_bias,
        ff_bias=k.boolean("mlp_bias", False),
        norm=_norm(k),
        pre_norm=True,
        first_norm=False,
        embeddings=EmbeddingConfig(width=width),
        positions=(Rotary(tuple(base[kind] for kind in kinds)),),
        patterns=tuple(Full() if kind == "full_attention" else Sliding(window // 2) for kind in kinds),
        max_length=k.tokens("max_position_embeddings", 8192),
        dropout=dropout,
        attention_dropout=k.probability("attention_dropout", 0.0),
        pad_id=pad_id,
        init_std=k.number("initializer_range", 0.02, most=100.0),
    )


def _norm(k: ConfigKeys) -> NormConfig:
    return NormConfig(eps=k.number("norm_eps", 1e-5, least=1e-30, most=0.1), bias=k.boolean("norm_bias", False))


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """ModernBERT's tensor names; query, key and value are one tensor there too, and so are gate and up projection."""
    bias = cfg.norm.bias
    yield same("encoder.embeddings.words.weight", "embeddings.tok_embeddings.weight")
    yield from linear("encoder.embeddings.norm", "embeddings.norm", bias)
    yield from linear("encoder.norm", "final_norm", bias)
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"layers.{i}"
        if i:
            yield from linear(f"{ours}.pre_attention", f"{theirs}.attn_norm", bias)
        yield from linear(f"{ours}.attention.qkv", f"{theirs}.attn.Wqkv", bool(cfg.qkv_bias))
        yield from linear(f"{ours}.attention.out", f"{theirs}.attn.Wo", cfg.out_bias)
        yield from linear(f"{ours}.pre_ff", f"{theirs}.mlp_norm", bias)
        yield from linear(f"{ours}.ff.up", f"{theirs}.mlp.Wi", cfg.ff_bias)
        yield from linear(f"{ours}.ff.down", f"{theirs}.mlp.Wo", cfg.ff_bias)


def _head(
    name: HeadName, kind: Literal["vocabulary", "token", "text"], outputs: Callable[[ConfigKeys, EncoderConfig], int]
) -> HeadTable:
    """A head; all start with the same dense layer, activation and norm."""
    decoder = mlm_weights("decoder")

    def config(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
        vocabulary = kind == "vocabulary"
        return HeadConfig(
            kind=kind,
            outputs=outputs(k, cfg),
            pooling="mean" if k.choice("classifier_pooling", ("cls", "mean"), "cls") == "mean" else "first",
            dense=cfg.width,
            dense_bias=k.boolean("classifier_bias", False),
            activation=k.activation("classifier_activation", "gelu"),
            norm=cfg.norm,
            output_bias=k.boolean("decoder_bias", True) if vocabulary else True,
            tied=k.boolean("tie_word_embeddings", True) and vocabulary,
            dropout=0.0 if vocabulary else k.probability("classifier_dropout", 0.0),
        )

    def weights(cfg: HeadConfig) -> Iterator[TensorRule | TiedTensor]:
        yield from linear(f"heads.{name}.dense", "head.dense", cfg.dense_bias)
        yield from linear(f"heads.{name}.norm", "head.norm", cfg.norm is not None and cfg.norm.bias)
        if kind == "vocabulary":
            yield from decoder(cfg)
        else:
            yield from linear(f"heads.{name}.out", "classifier")

    return HeadTable(config, weights)


HEADS: Mapping[HeadName, HeadTable] = {
    "mlm": _head("mlm", "vocabulary", lambda k, cfg: cfg.vocab),
    "classify": _head("classify", "text", lambda k, cfg: len(k.labels())),
    "tag": _head("tag", "token", lambda k, cfg: len(k.labels())),
    "answer": _head("answer", "token", lambda k, cfg: 2),
    "choice": _head("choice", "text", lambda k, cfg: 1),
}

FAMILY = Family(
    model_type="modernbert",
    architectures=architectures("ModernBert", **USUAL),
    prefix="model.",
    read=read,
    weights=weights,
    heads=HEADS,
    companions=("mlm",),
    dropped=(r"rotary_emb\.\w*inv_freq$",),
)
