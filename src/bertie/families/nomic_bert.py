"""Nomic BERT: post-norm with gates and rotary positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bertie.config import Embeddings, EncoderConfig, Full, HeadName, Rotary
from bertie.families import bert
from bertie.families._tokenizers import RECIPES
from bertie.families.common import architectures, bert_embeddings, bert_fields, mlm, qkv_sizes
from bertie.families.convert import Rule, linear, stacked
from bertie.families.family import Family, HeadTable
from bertie.families.keys import Keys


def read(k: Keys) -> EncoderConfig:
    """BERT's keys and rotary's."""
    k.encoder_only()
    fields = bert_fields(k)
    depth = k.integer("num_hidden_layers", 12)
    fields["head_width"] = k.integer("head_dim", fields["head_width"])
    fields["activation"] = k.activation("hidden_act", "silu")
    fields["dropout"] = k.share("hidden_dropout_prob", 0.0)
    fields["attention_dropout"] = k.share("attention_probs_dropout_prob", 0.0)
    base = k.rotary_base("rope_parameters", k.mapping("rope_parameters", {}), 1000.0)
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        gated=True,
        qkv_bias="",
        out_bias=False,
        ff_bias=False,
        embeddings=Embeddings(width=fields["width"], segments=k.integer("type_vocab_size", 2)),
        positions=(Rotary((base,) * depth),),
        patterns=(Full(),) * depth,
        reach=k.integer("max_position_embeddings", 2048),
        pad_id=k.optional_integer("pad_token_id", 0),
    )


def weights(cfg: EncoderConfig) -> Iterator[Rule]:
    """Nomic's tensor names."""
    yield from bert_embeddings(cfg)
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"layers.{i}"
        names = [f"{theirs}.self_attn.{part}_proj" for part in "qkv"]
        yield from stacked(f"{ours}.attention.qkv", names, qkv_sizes(cfg), bias=False)
        yield from linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", bias=False)
        yield from linear(f"{ours}.post_attention", f"{theirs}.post_attention_layernorm")
        gate = [f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"]
        yield from stacked(f"{ours}.ff.up", gate, (cfg.ff_width, cfg.ff_width), bias=False)
        yield from linear(f"{ours}.ff.down", f"{theirs}.mlp.down_proj", bias=False)
        yield from linear(f"{ours}.post_ff", f"{theirs}.post_mlp_layernorm")


_BERT = bert.heads("nomic_bert.")
HEADS: Mapping[HeadName, HeadTable] = {
    "mlm": mlm(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.layer_norm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
        activation=lambda k: k.activation("hidden_act", "silu"),
    ),
    "classify": _BERT["classify"],
    "tag": _BERT["tag"],
    "pooler": _BERT["pooler"],
}

FAMILY = Family(
    model_type="nomic_bert",
    architectures=architectures(
        "NomicBert",
        ForMaskedLM=("mlm",),
        ForSequenceClassification=("classify",),
        ForTokenClassification=("tag",),
    ),
    prefix="nomic_bert.",
    read=read,
    weights=weights,
    heads=HEADS,
    companions=("mlm", "pooler"),
    dropped=(r"rotary_emb\.\w*inv_freq$", *bert.COUNTERS),
    tokenizer=RECIPES["nomic_bert"],
)
