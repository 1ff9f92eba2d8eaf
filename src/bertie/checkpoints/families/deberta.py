"""DeBERTa (v1): disentangled attention; query, key and value in one interleaved tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, TiedTensor, linear, same
from bertie.checkpoints.families.bert import INDEX_BUFFERS
from bertie.checkpoints.families.common import (
    USUAL,
    architectures,
    bert_blocks,
    bert_embeddings,
    bert_fields,
    head,
    hidden_act,
    hidden_dropout,
    mlm,
)
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import Disentangled, EmbeddingConfig, EncoderConfig, Full, HeadConfig, HeadName, Learned, Position
from bertie.errors import ConfigError
from bertie.text.legacy import LegacyTokenizer

Terms = tuple[Literal["c2p", "p2c"], ...]


def read_any(k: ConfigKeys, relative: Callable[[Terms, int], Disentangled]) -> EncoderConfig:
    """Read the keys of all DeBERTa versions; `relative` builds the position scheme from terms and maximum distance."""
    k.encoder_only()
    fields = bert_fields(k, eps=1e-7)
    depth, size = k.layers("num_hidden_layers", 12), k.tokens("max_position_embeddings", 512)
    width = k.integer("embedding_size", fields["width"])
    k.must("attention_head_size", fields["head_width"])
    k.must("pooler_hidden_size", fields["width"])
    k.ignore("padding_idx")
    positions: list[Position] = [Learned(size)] if k.boolean("position_biased_input", True) else []
    terms = _terms(k)
    max_distance = k.tokens("max_relative_positions", -1, least=-1)
    if k.boolean("relative_attention", False) != bool(terms):
        raise ConfigError(
            f"config.json: pos_att_type={k.raw.get('pos_att_type')!r} contradicts relative_attention="
            f"{k.raw.get('relative_attention', False)}; allowed: both or none"
        )
    if terms:
        positions.append(relative(terms, max_distance if max_distance > 0 else size))
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        embeddings=EmbeddingConfig(
            width=width,
            segments=k.integer("type_vocab_size", 0, least=0),
            project="before_norm" if width != fields["width"] else None,
            project_bias=False,
        ),
        positions=tuple(positions),
        patterns=(Full(),) * depth,
        max_length=size,
        pad_id=k.optional_integer("pad_token_id", 0),
    )


def _terms(k: ConfigKeys) -> Terms:
    """Parse "c2p|p2c" or a list. Duplicates are refused: transformers scales scores by the number of entries."""
    raw = k.raw.get("pos_att_type")
    k.used.add("pos_att_type")
    named = [] if raw is None else [t.strip() for t in raw.lower().split("|")] if isinstance(raw, str) else raw
    terms = named if isinstance(named, list) else [None]
    known: list[Literal["c2p", "p2c"]] = [term for term in ("c2p", "p2c") if term in terms]
    if len(known) != len(terms):
        raise ConfigError(f"config.json: pos_att_type={raw!r:.80} is not supported; allowed: c2p, p2c, c2p|p2c, null")
    return tuple(known)


def embeddings(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """BERT's names, the projection and the relative position embeddings."""
    yield from bert_embeddings(cfg)
    if cfg.embeddings.project:
        yield same("encoder.embeddings.project.weight", "embeddings.embed_proj.weight")
    for position in cfg.positions:
        if isinstance(position, Disentangled):
            yield same("encoder.relative.rows.weight", "encoder.rel_embeddings.weight")
            if position.norm:
                yield from linear("encoder.relative.norm", "encoder.LayerNorm")


def heads() -> Mapping[HeadName, HeadTable]:
    """The heads of all DeBERTa versions."""

    def text_head(name: HeadName, outputs: int | Literal["labels"]) -> HeadTable:
        return head(
            name,
            "text",
            outputs,
            dense="pooler.dense",
            activation=lambda k: k.activation("pooler_hidden_act", "gelu"),
            out="classifier",
            dropout=lambda k: k.probability("cls_dropout", hidden_dropout(k)),
            dense_dropout=lambda k: k.probability("pooler_dropout", 0.0),
        )

    return {
        "mlm": mlm(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.LayerNorm",
            decoder="cls.predictions.decoder",
            bias="cls.predictions.bias",
        ),
        "classify": text_head("classify", "labels"),
        "tag": head("tag", "token", "labels", out="classifier", dropout=hidden_dropout),
        "answer": head("answer", "token", 2, out="qa_outputs"),
        "choice": text_head("choice", 1),
    }


def _new_mlm() -> HeadTable:
    """The head as Microsoft published it: always tied to the word embeddings."""
    usual = mlm(dense="", norm="", decoder="")

    def config(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
        if cfg.embeddings.width != cfg.width:
            raise ConfigError(
                f"config.json: embedding_size={cfg.embeddings.width} must equal hidden_size={cfg.width} for the head "
                "lm_predictions, which is tied to the word embeddings"
            )
        return replace(usual.config(k, cfg), tied=True, dense=cfg.width)

    def weights(_: HeadConfig) -> Iterator[TensorRule | TiedTensor]:
        yield from linear("heads.mlm.dense", "lm_predictions.lm_head.dense")
        yield from linear("heads.mlm.norm", "lm_predictions.lm_head.LayerNorm")
        yield same("heads.mlm.bias", "lm_predictions.lm_head.bias")
        yield TiedTensor("encoder.embeddings.words.weight", "lm_predictions.lm_head.weight")  # some versions save it

    return HeadTable(config, weights, config_entries={"legacy": False})


def discriminator() -> HeadTable:
    """The head of v3's discriminator (replaced-token detection), as Microsoft published it."""

    def config(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
        return HeadConfig(
            kind="token", outputs=1, dense=cfg.width, activation=hidden_act(k), norm=cfg.norm, add_first=True
        )

    def weights(_: HeadConfig) -> Iterator[TensorRule]:
        yield from linear("heads.rtd.norm", "mask_predictions.LayerNorm")
        yield from linear("heads.rtd.dense", "mask_predictions.dense")
        yield from linear("heads.rtd.out", "mask_predictions.classifier")

    return HeadTable(config, weights)


ALTERNATIVES: Mapping[HeadName, HeadTable] = {"mlm": _new_mlm()}
# mask_predictions: the discriminator of v3's pretraining, beside another head. Position embeddings are stored even if
# the config does not use them.
DROPPED = (*INDEX_BUFFERS, r"^mask_predictions\.", r"^(deberta\.)?embeddings\.position_embeddings\.weight$")


def read(k: ConfigKeys) -> EncoderConfig:
    """Read the keys of v1."""
    k.must("talking_head", False)
    k.boolean("legacy", True)
    cfg = read_any(k, lambda terms, max_distance: Disentangled(terms, max_distance, key_bias=False))
    return replace(cfg, qkv_bias="qv")


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """The tensor names of v1."""
    yield from embeddings(cfg)
    yield from bert_blocks(cfg, qkv=())
    inner = cfg.heads * cfg.head_width
    terms = {t for p in cfg.positions if isinstance(p, Disentangled) for t in p.terms}
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}.attention", f"encoder.layer.{i}.attention.self"
        yield TensorRule(f"{ours}.qkv.weight", (f"{theirs}.in_proj.weight",), interleaved_heads=cfg.heads)
        yield TensorRule(f"{ours}.qkv.bias", (f"{theirs}.q_bias", f"{theirs}.v_bias"), (inner, inner))
        if "c2p" in terms:
            yield from linear(f"{ours}.position_key", f"{theirs}.pos_proj", bias=False)
        if "p2c" in terms:
            yield from linear(f"{ours}.position_query", f"{theirs}.pos_q_proj")


# GPT-2's vocabulary with BERT's special tokens.
TOKENIZER = LegacyTokenizer(
    kind="byte_bpe",
    files=("vocab.json", "merges.txt"),
    cls="[CLS]",
    sep="[SEP]",
    unk="[UNK]",
    pad="[PAD]",
    mask="[MASK]",
    bos="[CLS]",
    eos="[SEP]",
    mask_lstrip=True,
    class_keeps_rules=False,  # transformers 5 puts two separators between the texts of a pair, and makes no segment ids
    add_prefix_space=False,
)

FAMILY = Family(
    model_type="deberta",
    architectures=architectures("Deberta", **USUAL),
    prefix="deberta.",
    read=read,
    weights=weights,
    heads=heads(),
    alternatives=ALTERNATIVES,
    companions=("mlm",),
    dropped=DROPPED,
    tokenizer=TOKENIZER,
    tokenizer_classes=("DebertaTokenizer",),
)
