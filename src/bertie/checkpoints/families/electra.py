"""ELECTRA: BERT with narrower embeddings; a discriminator (replaced-token detection) and a generator (MLM)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, linear
from bertie.checkpoints.families import bert
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    classifier_dropout,
    dense_classifier,
    head,
    hidden_act,
    mlm,
)
from bertie.checkpoints.families.family import Family
from bertie.config import Activation, EncoderConfig


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's keys and the embedding width."""
    cfg = bert.read(k)
    width = k.integer("embedding_size", 128)
    k.must("summary_type", "first")
    k.must("summary_use_proj", True)
    k.ignore("summary_first_dropout", "summary_proj_to_labels")
    if width == cfg.width:
        return cfg
    return replace(cfg, embeddings=replace(cfg.embeddings, width=width, project="after_norm"))


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """BERT's names and the projection."""
    yield from bert.weights(cfg)
    if cfg.embeddings.project:
        yield from linear("encoder.embeddings.project", "embeddings_project")


def _summary(k: ConfigKeys) -> Activation:
    return k.activation("summary_activation", "gelu")


FAMILY = Family(
    model_type="electra",
    architectures=architectures("Electra", ForPreTraining=("rtd",), **USUAL),
    prefix="electra.",
    read=read,
    weights=weights,
    heads={
        "mlm": mlm(
            dense="generator_predictions.dense",
            norm="generator_predictions.LayerNorm",
            decoder="generator_lm_head",
            activation="gelu",
        ),
        "rtd": head(
            "rtd",
            "token",
            1,
            dense="discriminator_predictions.dense",
            activation=hidden_act,
            out="discriminator_predictions.dense_prediction",
        ),
        "classify": dense_classifier("gelu"),
        "tag": head("tag", "token", "labels", out="classifier", dropout=classifier_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs"),
        "choice": head(
            "choice",
            "text",
            1,
            dense="sequence_summary.summary",
            activation=_summary,
            out="classifier",
            dropout=lambda k: k.probability("summary_last_dropout", 0.1),
        ),
    },
    companions=("mlm", "rtd"),
    dropped=bert.INDEX_BUFFERS,
    tokenizer=bert.TOKENIZER,
    tokenizer_classes=("ElectraTokenizer",),
    defaults={"hidden_size": 256, "intermediate_size": 1024},
    renamed=bert.TENSORFLOW_NORMS,
)
