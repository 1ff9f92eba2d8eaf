"""BERT and models of its architecture: mBERT, BioBERT, ClinicalBERT, MiniLM, E5, BGE, GTE, …"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    bert_blocks,
    bert_embeddings,
    bert_fields,
    classifier_dropout,
    head,
    mlm,
    pooler,
)
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadName, Learned
from bertie.text.legacy import LegacyTokenizer


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's config keys."""
    k.encoder_only()
    # Keys of TinyBERT and models derived from it; emb_size may be wrong there.
    k.ignore("cell", "emb_size", "pre_trained", "structure", "training")
    fields = bert_fields(k)
    depth = k.layers("num_hidden_layers", 12)
    size = k.tokens("max_position_embeddings", 512)
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        embeddings=EmbeddingConfig(width=fields["width"], segments=k.integer("type_vocab_size", 2)),
        positions=(Learned(size),),
        patterns=(Full(),) * depth,
        max_length=size,
        pad_id=k.optional_integer("pad_token_id", 0),
    )


def _read(k: ConfigKeys) -> EncoderConfig:
    """As `read`. MuRIL has embedding_size, which must equal hidden_size."""
    cfg = read(k)
    k.must("embedding_size", cfg.width)
    return cfg


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """BERT's tensor names."""
    yield from bert_embeddings(cfg)
    yield from bert_blocks(cfg)


def heads(prefix: str) -> Mapping[HeadName, HeadTable]:
    """BERT's heads: those over texts use the pooler."""
    pooled = f"{prefix}pooler.dense"
    return {
        "mlm": mlm(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.LayerNorm",
            decoder="cls.predictions.decoder",
            bias="cls.predictions.bias",
        ),
        "nsp": head("nsp", "text", 2, dense=pooled, activation="tanh", out="cls.seq_relationship"),
        "classify": head(
            "classify", "text", "labels", dense=pooled, activation="tanh", out="classifier", dropout=classifier_dropout
        ),
        "tag": head("tag", "token", "labels", out="classifier", dropout=classifier_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs"),
        "choice": head(
            "choice", "text", 1, dense=pooled, activation="tanh", out="classifier", dropout=classifier_dropout
        ),
        "pooler": pooler(pooled),
    }


# Early checkpoints have TensorFlow's names for the weight and bias of LayerNorm.
TENSORFLOW_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Buffers 0, 1, 2, … that older versions of transformers saved.
INDEX_BUFFERS = (r"^(\w+\.)?embeddings\.(position_ids|token_type_ids)$",)

TOKENIZER = LegacyTokenizer(
    kind="wordpiece",
    files=("vocab.txt",),
    cls="[CLS]",
    sep="[SEP]",
    unk="[UNK]",
    pad="[PAD]",
    mask="[MASK]",
    lowercase=True,
)

FAMILY = Family(
    model_type="bert",
    architectures=architectures("Bert", ForPreTraining=("mlm", "nsp"), ForNextSentencePrediction=("nsp",), **USUAL),
    prefix="bert.",
    read=_read,
    weights=weights,
    heads=heads("bert."),
    companions=("mlm", "nsp", "pooler"),
    dropped=INDEX_BUFFERS,
    tokenizer=TOKENIZER,
    tokenizer_classes=("BertTokenizer",),
    renamed=TENSORFLOW_NORMS,
)
