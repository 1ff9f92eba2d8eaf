"""ALBERT: groups of layers share their weights, and embeddings are narrower than the encoder."""

from __future__ import annotations

from collections.abc import Iterator

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated, linear
from bertie.checkpoints.families.bert import INDEX_BUFFERS
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    bert_embeddings,
    bert_fields,
    head,
    mlm,
    pooler,
    qkv_sizes,
)
from bertie.checkpoints.families.family import Family
from bertie.config import EmbeddingConfig, EncoderConfig, Full, Learned
from bertie.errors import ConfigError
from bertie.text.legacy import LegacyTokenizer


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's keys and the groups of shared layers."""
    k.encoder_only()
    fields = bert_fields(k)
    depth, groups = k.layers("num_hidden_layers", 12), k.integer("num_hidden_groups", 1)
    k.must("inner_group_num", 1)
    if groups > depth:
        raise ConfigError(f"config.json: num_hidden_groups={groups} must not exceed num_hidden_layers={depth}")
    layer_map = tuple(int(i / (depth / groups)) for i in range(depth))
    size = k.tokens("max_position_embeddings", 512)
    # Keys of the original TensorFlow code that transformers never read.
    k.ignore("net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor", "layers_to_keep")
    return EncoderConfig(
        **fields,
        layer_map=layer_map,
        embeddings=EmbeddingConfig(
            width=k.integer("embedding_size", 128), segments=k.integer("type_vocab_size", 2), project="after_norm"
        ),
        positions=(Learned(size),),
        patterns=(Full(),) * len(layer_map),
        max_length=size,
        pad_id=k.optional_integer("pad_token_id", 0),
    )


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """ALBERT's tensor names."""
    yield from bert_embeddings(cfg)
    yield from linear("encoder.embeddings.project", "encoder.embedding_hidden_mapping_in")
    for i in range(cfg.blocks):
        ours = f"encoder.blocks.{i}"
        theirs = f"encoder.albert_layer_groups.{i}.albert_layers.0"
        names = [f"{theirs}.attention.{part}" for part in ("query", "key", "value")]
        yield from concatenated(f"{ours}.attention.qkv", names, qkv_sizes(cfg))
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.dense")
        yield from linear(f"{ours}.post_attention", f"{theirs}.attention.LayerNorm")
        yield from linear(f"{ours}.ff.up", f"{theirs}.ffn")
        yield from linear(f"{ours}.ff.down", f"{theirs}.ffn_output")
        yield from linear(f"{ours}.post_ff", f"{theirs}.full_layer_layer_norm")


def _dropout(k: ConfigKeys) -> float:
    return k.probability("classifier_dropout_prob", 0.1)


TOKENIZER = LegacyTokenizer(
    kind="sentencepiece",
    files=("spiece.model",),
    cls="[CLS]",
    sep="[SEP]",
    unk="<unk>",
    pad="<pad>",
    mask="[MASK]",
    bos="[CLS]",
    eos="[SEP]",
    mask_lstrip=True,
    class_keeps_rules=False,  # transformers 5 makes no segment ids for it
    lowercase=True,
    strip_accents=True,
    add_prefix_space=True,
    replace_quotes=True,
    split_digit_comma=True,
    split_whitespace=True,
)

FAMILY = Family(
    model_type="albert",
    architectures=architectures("Albert", ForPreTraining=("mlm", "sop"), **USUAL),
    prefix="albert.",
    read=read,
    weights=weights,
    heads={
        "mlm": mlm(
            dense="predictions.dense",
            norm="predictions.LayerNorm",
            decoder="predictions.decoder",
            bias="predictions.bias",
        ),
        "sop": head(
            "sop",
            "text",
            2,
            dense="albert.pooler",
            activation="tanh",
            out="sop_classifier.classifier",
            dropout=_dropout,
        ),
        "classify": head(
            "classify", "text", "labels", dense="albert.pooler", activation="tanh", out="classifier", dropout=_dropout
        ),
        "tag": head("tag", "token", "labels", out="classifier", dropout=_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs"),
        "choice": head(
            "choice", "text", 1, dense="albert.pooler", activation="tanh", out="classifier", dropout=_dropout
        ),
        "pooler": pooler("albert.pooler"),
    },
    companions=("mlm", "sop", "pooler"),
    dropped=INDEX_BUFFERS,
    tokenizer=TOKENIZER,
    tokenizer_classes=("AlbertTokenizer",),
    defaults={
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
)
