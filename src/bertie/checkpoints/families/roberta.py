"""RoBERTa and models of its architecture: XLM-R, CamemBERT, CodeBERT, UniXcoder, multilingual E5, BGE-M3, …"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.families import bert
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    bert_fields,
    classifier_dropout,
    dense_classifier,
    head,
    mlm,
    pooler,
)
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadName, Learned
from bertie.text.legacy import LegacyTokenizer


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's keys; positions start at pad_id + 1: fairseq reserved the first ones."""
    k.encoder_only()
    fields = bert_fields(k)
    depth = k.layers("num_hidden_layers", 12)
    pad_id = k.integer("pad_token_id", 1, least=0)
    positions = Learned(k.tokens("max_position_embeddings", 512), skip_id=pad_id)
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        embeddings=EmbeddingConfig(width=fields["width"], segments=k.integer("type_vocab_size", 2)),
        positions=(positions,),
        patterns=(Full(),) * depth,
        max_length=positions.max_length,
        pad_id=pad_id,
    )


def heads(prefix: str) -> Mapping[HeadName, HeadTable]:
    """RoBERTa's heads: the classifier has its own dense layer instead of the pooler."""
    pooled = f"{prefix}pooler.dense"
    return {
        "mlm": mlm(
            dense="lm_head.dense",
            norm="lm_head.layer_norm",
            decoder="lm_head.decoder",
            bias="lm_head.bias",
            activation="gelu",
        ),
        "classify": dense_classifier("tanh"),
        "tag": head("tag", "token", "labels", out="classifier", dropout=classifier_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs"),
        "choice": head(
            "choice", "text", 1, dense=pooled, activation="tanh", out="classifier", dropout=classifier_dropout
        ),
        "pooler": pooler(pooled),
    }


# fairseq puts two separators between the texts of a pair, and has no segments.
FAIRSEQ_PAIR = "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0"
TOKENIZER = LegacyTokenizer(
    kind="byte_bpe",
    files=("vocab.json", "merges.txt"),
    cls="<s>",
    sep="</s>",
    unk="<unk>",
    pad="<pad>",
    mask="<mask>",
    bos="<s>",
    eos="</s>",
    mask_lstrip=True,
    pair=FAIRSEQ_PAIR,
    segments=False,
    add_prefix_space=False,
    trim_offsets=True,
)
# fairseq put its own four tokens before SentencePiece's pieces and dropped the first three (<unk>, <s>, </s>).
XLM_TOKENIZER = LegacyTokenizer(
    kind="sentencepiece",
    files=("sentencepiece.bpe.model",),
    cls="<s>",
    sep="</s>",
    unk="<unk>",
    pad="<pad>",
    mask="<mask>",
    bos="<s>",
    eos="</s>",
    mask_lstrip=True,
    pair=FAIRSEQ_PAIR,
    segments=False,
    add_prefix_space=True,
    leading_pieces=(("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)),
    skip_pieces=3,
    trailing_pieces=("<mask>",),
    split_whitespace=True,
)
# fairseq's four tokens precede a model whose <s> and </s> (ids 5 and 6) are still in use.
CAMEMBERT_TOKENIZER = replace(
    XLM_TOKENIZER,
    leading_pieces=(
        ("<s>NOTUSED", 0.0),
        ("<pad>", 0.0),
        ("</s>NOTUSED", 0.0),
        ("<unk>", 0.0),
        ("<unk>NOTUSED", -100.0),
    ),
    skip_pieces=1,
    extra=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
)


def family(model_type: str, stem: str, tokenizer: LegacyTokenizer) -> Family:
    """A family that differs from RoBERTa only in name and tokenizer."""
    return Family(
        model_type=model_type,
        architectures=architectures(stem, **USUAL),
        prefix="roberta.",
        read=read,
        weights=bert.weights,
        heads=heads("roberta."),
        companions=("mlm", "pooler"),
        dropped=bert.INDEX_BUFFERS,
        tokenizer=tokenizer,
        tokenizer_classes=(f"{stem}Tokenizer",),
        renamed=bert.TENSORFLOW_NORMS,
    )


ROBERTA = family("roberta", "Roberta", TOKENIZER)
XLM_ROBERTA = family("xlm-roberta", "XLMRoberta", XLM_TOKENIZER)
CAMEMBERT = family("camembert", "Camembert", CAMEMBERT_TOKENIZER)
