"""MPNet: RoBERTa's positions and T5's relative position bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated, linear, same
from bertie.checkpoints.families import bert, roberta
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    bert_embeddings,
    bert_fields,
    dense_classifier,
    head,
    hidden_dropout,
    pooler,
    qkv_sizes,
)
from bertie.checkpoints.families.family import Family
from bertie.config import Bucketed, EmbeddingConfig, EncoderConfig, Full, Learned


def read(k: ConfigKeys) -> EncoderConfig:
    """Read RoBERTa's keys, without segments."""
    k.encoder_only()
    fields = bert_fields(k)
    depth = k.layers("num_hidden_layers", 12)
    # transformers hard-codes the padding id 1, whatever the config says.
    positions = Learned(k.tokens("max_position_embeddings", 512), skip_id=1)
    k.must("pad_token_id", 1)
    # The number of buckets is hard-coded too.
    k.must("relative_attention_num_buckets", 32)
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        embeddings=EmbeddingConfig(width=fields["width"]),
        positions=(positions, Bucketed(32)),
        patterns=(Full(),) * depth,
        max_length=positions.max_length,
        pad_id=1,
    )


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """MPNet's tensor names."""
    yield from bert_embeddings(cfg)
    yield same("encoder.relative.rows.weight", "encoder.relative_attention_bias.weight")
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"encoder.layer.{i}"
        yield from concatenated(
            f"{ours}.attention.qkv", [f"{theirs}.attention.attn.{part}" for part in "qkv"], qkv_sizes(cfg)
        )
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.attn.o")
        yield from linear(f"{ours}.post_attention", f"{theirs}.attention.LayerNorm")
        yield from linear(f"{ours}.ff.up", f"{theirs}.intermediate.dense")
        yield from linear(f"{ours}.ff.down", f"{theirs}.output.dense")
        yield from linear(f"{ours}.post_ff", f"{theirs}.output.LayerNorm")


TOKENIZER = replace(
    bert.TOKENIZER,
    cls="<s>",
    sep="</s>",
    pad="<pad>",
    mask="<mask>",
    bos="<s>",
    eos="</s>",
    extra=("<unk>",),  # of fairseq: in the vocabulary and in the published tokenizer.json, next to [UNK]
    mask_lstrip=True,
    pair=roberta.FAIRSEQ_PAIR,
    segments=False,
    trim_offsets=True,
)

FAMILY = Family(
    model_type="mpnet",
    architectures=architectures("MPNet", **USUAL),
    prefix="mpnet.",
    read=read,
    weights=weights,
    heads={
        **roberta.heads("mpnet."),
        "classify": dense_classifier("tanh", hidden_dropout),
        "tag": head("tag", "token", "labels", out="classifier", dropout=hidden_dropout),
        "choice": head(
            "choice",
            "text",
            1,
            dense="mpnet.pooler.dense",
            activation="tanh",
            out="classifier",
            dropout=hidden_dropout,
        ),
        "pooler": pooler("mpnet.pooler.dense"),
    },
    companions=("mlm", "pooler"),
    dropped=bert.INDEX_BUFFERS,
    tokenizer=TOKENIZER,
    tokenizer_classes=("MPNetTokenizer",),
)
