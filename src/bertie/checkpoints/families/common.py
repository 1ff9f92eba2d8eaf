"""Shared by families: the tensor names that BERT introduced, and common heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorAlias, TensorRule, TiedTensor, concatenated, linear, same
from bertie.checkpoints.families.family import HeadTable
from bertie.config import Activation, EncoderConfig, Globals, HeadConfig, HeadName, Learned, NormConfig
from bertie.errors import ConfigError


def architectures(stem: str, **heads: tuple[HeadName, ...]) -> dict[str, tuple[HeadName, ...]]:
    """Class names of a family: `architectures("Bert", ForMaskedLM=("mlm",))` also has `BertModel`."""
    return {f"{stem}Model": (), **{f"{stem}{suffix}": names for suffix, names in heads.items()}}


USUAL: dict[str, tuple[HeadName, ...]] = {
    "ForMaskedLM": ("mlm",),
    "ForSequenceClassification": ("classify",),
    "ForTokenClassification": ("tag",),
    "ForQuestionAnswering": ("answer",),
    "ForMultipleChoice": ("choice",),
}


def qkv_sizes(cfg: EncoderConfig) -> tuple[int, int, int]:
    """Output sizes of the query, key and value projections."""
    return cfg.heads * cfg.head_width, cfg.kv_heads * cfg.head_width, cfg.kv_heads * cfg.head_width


def bert_embeddings(cfg: EncoderConfig, words: str = "embeddings.word_embeddings") -> Iterator[TensorRule]:
    """Embeddings under BERT's names."""
    yield same("encoder.embeddings.words.weight", f"{words}.weight")
    if any(isinstance(p, Learned) for p in cfg.positions):
        yield same("encoder.embeddings.positions.weight", "embeddings.position_embeddings.weight")
    if cfg.embeddings.segments:
        yield same("encoder.embeddings.segments.weight", "embeddings.token_type_embeddings.weight")
    if cfg.embeddings.norm:
        yield from linear("encoder.embeddings.norm", "embeddings.LayerNorm")


def bert_blocks(cfg: EncoderConfig, qkv: tuple[str, ...] = ("query", "key", "value")) -> Iterator[TensorRule]:
    """Blocks under BERT's names; `qkv=()` for families with another layout of query, key and value."""
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"encoder.layer.{i}"
        if qkv:
            names = [f"{theirs}.attention.self.{part}" for part in qkv]
            yield from concatenated(f"{ours}.attention.qkv", names, qkv_sizes(cfg), bias=bool(cfg.qkv_bias))
        yield from linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from linear(f"{ours}.post_attention", f"{theirs}.attention.output.LayerNorm")
        yield from linear(f"{ours}.ff.up", f"{theirs}.intermediate.dense")
        yield from linear(f"{ours}.ff.down", f"{theirs}.output.dense")
        yield from linear(f"{ours}.post_ff", f"{theirs}.output.LayerNorm")


def width_and_heads(k: ConfigKeys, width: int) -> dict[str, Any]:
    """heads, kv_heads and head_width; heads must divide the width."""
    heads = k.integer("num_attention_heads")
    if width % heads:
        raise ConfigError(f"config.json: num_attention_heads={heads} must divide hidden_size={width}")
    return {"heads": heads, "kv_heads": heads, "head_width": width // heads}


def bert_fields(k: ConfigKeys, eps: float = 1e-12) -> dict[str, Any]:
    """The fields of `EncoderConfig` that BERT's config keys determine, for post-norm encoders without gating."""
    width = k.integer("hidden_size", 768)
    return {
        "vocab": k.integer("vocab_size"),
        "width": width,
        **width_and_heads(k, width),
        "ff_width": k.integer("intermediate_size", 3072),
        "activation": k.activation("hidden_act", "gelu"),
        "norm": NormConfig(eps=k.number("layer_norm_eps", eps, least=1e-30, most=0.1)),
        "dropout": k.probability("hidden_dropout_prob", 0.1),
        "attention_dropout": k.probability("attention_probs_dropout_prob", 0.1),
        "init_std": k.number("initializer_range", 0.02, most=100.0),
    }


def classifier_dropout(k: ConfigKeys) -> float:
    """The dropout of the head; by default that of the encoder."""
    hidden = k.probability("hidden_dropout_prob", 0.1)
    return k.probability("classifier_dropout", hidden)


def hidden_dropout(k: ConfigKeys) -> float:
    """The encoder's dropout."""
    return k.probability("hidden_dropout_prob", 0.1)


def no_dropout(k: ConfigKeys) -> float:
    """No dropout."""
    return 0.0


def _resolve(value: Activation | Callable[[ConfigKeys], Activation], k: ConfigKeys) -> Activation:
    return value(k) if callable(value) else value


def hidden_act(k: ConfigKeys) -> Activation:
    """The encoder's activation."""
    return k.activation("hidden_act", "gelu")


def head(
    name: HeadName,
    kind: Literal["token", "text"],
    outputs: int | Literal["labels"] | None,
    *,
    out: str | None = None,
    dense: str | None = None,
    activation: Activation | Callable[[ConfigKeys], Activation] = "identity",
    dropout: Callable[[ConfigKeys], float] = no_dropout,
    dense_dropout: Callable[[ConfigKeys], float] = no_dropout,
    globals: Globals = "none",
) -> HeadTable:
    """A linear head, optionally after a dense layer with an activation."""

    def config(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
        return HeadConfig(
            kind=kind,
            outputs=len(k.labels()) if outputs == "labels" else outputs,
            dense=cfg.width if dense else None,
            activation=_resolve(activation, k),
            dropout=dropout(k),
            dense_dropout=dense_dropout(k),
            globals=globals,
            separator_id=k.integer("sep_token_id", 2, least=0) if globals.endswith("separator") else None,
        )

    def weights(_: HeadConfig) -> Iterator[TensorRule]:
        if dense:
            yield from linear(f"heads.{name}.dense", dense)
        if out:
            yield from linear(f"heads.{name}.out", out)

    return HeadTable(config, weights)


def dense_classifier(
    activation: Activation | Callable[[ConfigKeys], Activation],
    dropout: Callable[[ConfigKeys], float] = classifier_dropout,
    globals: Globals = "none",
) -> HeadTable:
    """A classifier over the first token with its own dense layer, as in RoBERTa."""
    return head(
        "classify",
        "text",
        "labels",
        dense="classifier.dense",
        activation=activation,
        out="classifier.out_proj",
        dropout=dropout,
        dense_dropout=dropout,
        globals=globals,
    )


def mlm_weights(decoder: str, bias: str | None = None) -> Callable[[HeadConfig], Iterator[TensorRule | TiedTensor]]:
    """The output layer over the vocabulary, tied to the word embeddings or not."""

    def weights(cfg: HeadConfig) -> Iterator[TensorRule | TiedTensor]:
        own = f"{decoder}.bias"
        if cfg.tied:
            yield TiedTensor("encoder.embeddings.words.weight", f"{decoder}.weight")
            if cfg.output_bias:
                yield same("heads.mlm.bias", bias or own, *([TensorAlias(own)] if bias else []))
        else:
            yield same("heads.mlm.out.weight", f"{decoder}.weight")
            if cfg.output_bias:
                # If untied, transformers adds the decoder's bias; the other one is stored but unused.
                yield same("heads.mlm.out.bias", own, *([TensorAlias(bias, dead=True)] if bias else []))

    return weights


def mlm(
    *,
    dense: str,
    norm: str,
    decoder: str,
    bias: str | None = None,
    activation: Activation | Callable[[ConfigKeys], Activation] = hidden_act,
) -> HeadTable:
    """Masked-language modelling: dense layer to the embedding width, activation, norm, output over the vocabulary."""
    output = mlm_weights(decoder, bias)

    def config(k: ConfigKeys, cfg: EncoderConfig) -> HeadConfig:
        return HeadConfig(
            kind="vocabulary",
            outputs=cfg.vocab,
            dense=cfg.embeddings.width,
            activation=_resolve(activation, k),
            norm=cfg.norm,
            tied=k.boolean("tie_word_embeddings", True),
        )

    def weights(cfg: HeadConfig) -> Iterator[TensorRule | TiedTensor]:
        yield from linear("heads.mlm.dense", dense)
        yield from linear("heads.mlm.norm", norm)
        yield from output(cfg)

    return HeadTable(config, weights)


def pooler(name: str) -> HeadTable:
    """The first token through a dense layer and tanh: `pooler_output` of the bare encoder."""
    return head("pooler", "text", None, dense=name, activation="tanh")
