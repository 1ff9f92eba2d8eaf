"""BigBird: BERT with block-sparse attention for long texts, and full attention for short ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, linear
from bertie.checkpoints.families import bert
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    bert_fields,
    classifier_dropout,
    dense_classifier,
    head,
    hidden_act,
    hidden_dropout,
    pooler,
)
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import BlockSparse, EncoderConfig, Full, HeadConfig
from bertie.text.legacy import LegacyTokenizer


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's keys and those of block-sparse attention."""
    cfg = bert.read(k)
    sparse = k.choice("attention_type", ("block_sparse", "original_full"), "block_sparse") == "block_sparse"
    blocks = BlockSparse(k.tokens("block_size", 64), k.tokens("num_random_blocks", 3, least=0))
    scale = cfg.width**0.5 if k.boolean("rescale_embeddings", False) else 1.0
    k.integer("sep_token_id", 66, least=0)
    return replace(
        cfg,
        patterns=((blocks if sparse else Full()),) * cfg.depth,
        qkv_bias="qkv" if k.boolean("use_bias", True) else "",
        embeddings=replace(cfg.embeddings, scale=scale),
    )


def _answer() -> HeadTable:
    """The span head: a feed-forward layer with a residual connection, then the output layer.

    BigBird's tokenizer makes no segment ids; this head alone uses them, for question and document.
    transformers also subtracts a million from the question's logits; here the decoding of spans excludes
    the question.
    """

    def config(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
        return HeadConfig(
            kind="token",
            outputs=2,
            residual=bert_fields(k)["ff_width"],
            activation=hidden_act(k),
            norm=cfg.norm,
            dropout=hidden_dropout(k),
            segments="after_separator",
            separator_id=k.integer("sep_token_id", 66, least=0),
        )

    def weights(_: HeadConfig) -> Iterator[TensorRule]:
        yield from linear("heads.answer.residual.up", "qa_classifier.intermediate.dense")
        yield from linear("heads.answer.residual.down", "qa_classifier.output.dense")
        yield from linear("heads.answer.residual.norm", "qa_classifier.output.LayerNorm")
        yield from linear("heads.answer.out", "qa_classifier.qa_outputs")

    return HeadTable(config, weights)


TOKENIZER = LegacyTokenizer(
    kind="sentencepiece",
    files=("spiece.model",),
    cls="[CLS]",
    sep="[SEP]",
    unk="<unk>",
    pad="<pad>",
    mask="[MASK]",
    bos="<s>",
    eos="</s>",
    mask_lstrip=True,
    segments=False,
    class_keeps_rules=False,  # transformers 5 omits SentencePiece's normalization
    add_prefix_space=True,
    strip="right",
    collapse_spaces="▁",
)

FAMILY = Family(
    model_type="big_bird",
    architectures=architectures("BigBird", ForPreTraining=("mlm", "nsp"), **USUAL),
    prefix="bert.",
    read=read,
    weights=bert.weights,
    heads={
        **bert.heads("bert."),
        "nsp": head("nsp", "text", 2, dense="bert.pooler", activation="tanh", out="cls.seq_relationship"),
        "classify": dense_classifier(hidden_act),
        "answer": _answer(),
        "choice": head(
            "choice",
            "text",
            1,
            dense="bert.pooler",
            activation="tanh",
            out="classifier",
            dropout=classifier_dropout,
        ),
        "pooler": pooler("bert.pooler"),
    },
    companions=("mlm", "nsp", "pooler"),
    dropped=bert.INDEX_BUFFERS,
    tokenizer=TOKENIZER,
    tokenizer_classes=("BigBirdTokenizer",),
    defaults={"hidden_act": "gelu_new", "max_position_embeddings": 4096},
)
