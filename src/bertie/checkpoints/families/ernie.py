"""ERNIE: BERT with task embeddings, of which the first is added to every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, same
from bertie.checkpoints.families import bert
from bertie.checkpoints.families.common import USUAL, architectures
from bertie.checkpoints.families.family import Family
from bertie.config import EncoderConfig


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's keys and those of the task embeddings."""
    cfg = bert.read(k)
    tasks = k.integer("task_type_vocab_size", 3)
    if not k.boolean("use_task_id", False):
        return cfg
    return replace(cfg, embeddings=replace(cfg.embeddings, tasks=tasks))


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """BERT's names and the task embeddings."""
    yield from bert.weights(cfg)
    if cfg.embeddings.tasks:
        yield same("encoder.embeddings.tasks.weight", "embeddings.task_type_embeddings.weight")


FAMILY = Family(
    model_type="ernie",
    architectures=architectures("Ernie", ForPreTraining=("mlm", "nsp"), ForNextSentencePrediction=("nsp",), **USUAL),
    prefix="ernie.",
    read=read,
    weights=weights,
    heads=bert.heads("ernie."),
    companions=("mlm", "nsp", "pooler"),
    dropped=bert.INDEX_BUFFERS,
    tokenizer=bert.TOKENIZER,
    renamed=bert.TENSORFLOW_NORMS,
)
