"""RoBERTa and its kin: XLM-R, CamemBERT, CodeBERT, UniXcoder, multilingual E5, BGE-M3's encoder, …"""

from __future__ import annotations

from collections.abc import Mapping

from bertie.config import Embeddings, EncoderConfig, Full, HeadName, Learned
from bertie.families import bert
from bertie.families._tokenizers import RECIPES
from bertie.families.common import (
    USUAL,
    architectures,
    bert_fields,
    classifier_dropout,
    head,
    mlm,
    pooler,
)
from bertie.families.family import Family, HeadTable
from bertie.families.keys import Keys


def read(k: Keys) -> EncoderConfig:
    """BERT's keys; positions count from the padding id + 1, which fairseq reserved."""
    k.encoder_only()
    fields = bert_fields(k)
    depth = k.layers("num_hidden_layers", 12)
    pad_id = k.integer("pad_token_id", 1, least=0)
    positions = Learned(k.tokens("max_position_embeddings", 512), skip_id=pad_id)
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        embeddings=Embeddings(width=fields["width"], segments=k.integer("type_vocab_size", 2)),
        positions=(positions,),
        patterns=(Full(),) * depth,
        reach=positions.reach,
        pad_id=pad_id,
    )


def heads(prefix: str) -> Mapping[HeadName, HeadTable]:
    """RoBERTa's heads: the classifier has a dense layer of its own instead of the pooler."""
    pooled = f"{prefix}pooler.dense"
    return {
        "mlm": mlm(
            dense="lm_head.dense",
            norm="lm_head.layer_norm",
            decoder="lm_head.decoder",
            bias="lm_head.bias",
            activation="gelu",
        ),
        "classify": head(
            "classify",
            "text",
            "labels",
            dense="classifier.dense",
            activation="tanh",
            out="classifier.out_proj",
            dropout=classifier_dropout,
            dense_dropout=classifier_dropout,
        ),
        "tag": head("tag", "token", "labels", out="classifier", dropout=classifier_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs"),
        "choice": head(
            "choice", "text", 1, dense=pooled, activation="tanh", out="classifier", dropout=classifier_dropout
        ),
        "pooler": pooler(pooled),
    }


def family(model_type: str, stem: str) -> Family:
    """One of the three that differ in name and tokenizer only."""
    return Family(
        model_type=model_type,
        architectures=architectures(stem, **USUAL),
        prefix="roberta.",
        read=read,
        weights=bert.weights,
        heads=heads("roberta."),
        companions=("mlm", "pooler"),
        dropped=bert.COUNTERS,
        tokenizer=RECIPES[model_type],
        renamed=bert.OLD_NORMS,
    )


ROBERTA = family("roberta", "Roberta")
XLM_ROBERTA = family("xlm-roberta", "XLMRoberta")
CAMEMBERT = family("camembert", "Camembert")
