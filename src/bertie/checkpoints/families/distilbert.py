"""DistilBERT: half of BERT's layers, no segment embeddings, different names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated, linear
from bertie.checkpoints.families.bert import INDEX_BUFFERS, TOKENIZER
from bertie.checkpoints.families.common import USUAL, architectures, bert_embeddings, head, mlm, qkv_sizes
from bertie.checkpoints.families.family import Family
from bertie.config import Activation, EmbeddingConfig, EncoderConfig, Full, Learned, NormConfig
from bertie.errors import ConfigError


def read(k: ConfigKeys) -> EncoderConfig:
    """Read DistilBERT's keys; the epsilon of its norms is fixed."""
    k.encoder_only()
    width, heads = k.integer("dim", 768), k.integer("n_heads", 12)
    if width % heads:
        raise ConfigError(f"config.json: n_heads={heads} must divide dim={width}")
    depth = k.layers("n_layers", 6)
    size = k.tokens("max_position_embeddings", 512)
    # Sinusoidal embeddings are stored like learned ones.
    k.boolean("sinusoidal_pos_embds", False)
    k.must("tie_weights_", True)
    return EncoderConfig(
        vocab=k.integer("vocab_size"),
        width=width,
        layer_map=tuple(range(depth)),
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        ff_width=k.integer("hidden_dim", 3072),
        activation=k.activation("activation", "gelu"),
        norm=NormConfig(eps=1e-12),
        embeddings=EmbeddingConfig(width=width),
        positions=(Learned(size),),
        patterns=(Full(),) * depth,
        max_length=size,
        dropout=k.probability("dropout", 0.1),
        attention_dropout=k.probability("attention_dropout", 0.1),
        pad_id=k.optional_integer("pad_token_id", 0),
        init_std=k.number("initializer_range", 0.02, most=100.0),
    )


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """DistilBERT's tensor names."""
    yield from bert_embeddings(cfg)
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"transformer.layer.{i}"
        names = [f"{theirs}.attention.{part}_lin" for part in "qkv"]
        yield from concatenated(f"{ours}.attention.qkv", names, qkv_sizes(cfg))
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.out_lin")
        yield from linear(f"{ours}.post_attention", f"{theirs}.sa_layer_norm")
        yield from linear(f"{ours}.ff.up", f"{theirs}.ffn.lin1")
        yield from linear(f"{ours}.ff.down", f"{theirs}.ffn.lin2")
        yield from linear(f"{ours}.post_ff", f"{theirs}.output_layer_norm")


def _activation(k: ConfigKeys) -> Activation:
    return k.activation("activation", "gelu")


def _text_dropout(k: ConfigKeys) -> float:
    return k.probability("seq_classif_dropout", 0.2)


FAMILY = Family(
    model_type="distilbert",
    architectures=architectures("DistilBert", **USUAL),
    prefix="distilbert.",
    read=read,
    weights=weights,
    heads={
        "mlm": mlm(dense="vocab_transform", norm="vocab_layer_norm", decoder="vocab_projector", activation=_activation),
        "classify": head(
            "classify",
            "text",
            "labels",
            dense="pre_classifier",
            activation="relu",
            out="classifier",
            dropout=_text_dropout,
        ),
        "tag": head("tag", "token", "labels", out="classifier", dropout=lambda k: k.probability("dropout", 0.1)),
        "answer": head("answer", "token", 2, out="qa_outputs", dropout=lambda k: k.probability("qa_dropout", 0.1)),
        "choice": head(
            "choice", "text", 1, dense="pre_classifier", activation="relu", out="classifier", dropout=_text_dropout
        ),
    },
    companions=("mlm",),
    dropped=INDEX_BUFFERS,
    tokenizer=replace(TOKENIZER, segments=False),
    tokenizer_classes=("DistilBertTokenizer",),
)
