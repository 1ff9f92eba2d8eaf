"""Longformer: RoBERTa with sliding-window attention, and separate projections for global tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated
from bertie.checkpoints.families import bert, roberta
from bertie.checkpoints.families.common import USUAL, architectures, dense_classifier, head, hidden_dropout, qkv_sizes
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import EncoderConfig, HeadName, Sliding
from bertie.errors import ConfigError


def read(k: ConfigKeys) -> EncoderConfig:
    """Read RoBERTa's keys and the window sizes, which count both sides."""
    cfg = roberta.read(k)
    if isinstance(k.raw.get("attention_window"), list):
        windows = k.array("attention_window")
    else:
        windows = [k.tokens("attention_window", 512)] * cfg.depth
    if len(windows) != cfg.depth or not all(type(w) is int and w > 0 and w % 2 == 0 for w in windows):
        raise ConfigError(
            f"config.json: attention_window={k.raw.get('attention_window')!r:.80} is not supported; allowed: an even "
            f"whole number, or one for each of the {cfg.depth} layers"
        )
    k.integer("sep_token_id", 2, least=0)
    k.ignore("attention_mode", "attention_dilation", "autoregressive", "ignore_attention_mask")
    return replace(cfg, patterns=tuple(Sliding(w // 2) for w in windows), global_tokens=True)


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """BERT's names and the global projections."""
    yield from bert.weights(cfg)
    for i in range(cfg.blocks):
        names = [f"encoder.layer.{i}.attention.self.{part}_global" for part in ("query", "key", "value")]
        yield from concatenated(f"encoder.blocks.{i}.attention.global_qkv", names, qkv_sizes(cfg))


def heads() -> Mapping[HeadName, HeadTable]:
    """RoBERTa's heads; global tokens are the first one (classification) or the question (question answering)."""
    return {
        **roberta.heads("longformer."),
        "classify": dense_classifier("tanh", hidden_dropout, globals="first"),
        "tag": head("tag", "token", "labels", out="classifier", dropout=hidden_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs", globals="before_separator"),
        "choice": head(
            "choice",
            "text",
            1,
            dense="longformer.pooler.dense",
            activation="tanh",
            out="classifier",
            dropout=hidden_dropout,
            globals="after_separator",
        ),
    }


FAMILY = Family(
    model_type="longformer",
    architectures=architectures("Longformer", **USUAL),
    prefix="longformer.",
    read=read,
    weights=weights,
    heads=heads(),
    companions=("mlm", "pooler"),
    dropped=bert.INDEX_BUFFERS,
    tokenizer=roberta.TOKENIZER,
    tokenizer_classes=("LongformerTokenizer",),
)
