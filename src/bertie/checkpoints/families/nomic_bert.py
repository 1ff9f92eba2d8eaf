"""Nomic BERT: post-norm, SwiGLU, rotary embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated, linear, same
from bertie.checkpoints.families import bert
from bertie.checkpoints.families.common import architectures, bert_fields, mlm
from bertie.checkpoints.families.family import Family, HeadTable
from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadName, Rotary

# The published configs have the key names of GPT-2.
GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    # n_positions is the limit of the code, this the length that it was trained on.
    "max_trained_positions": "max_position_embeddings",
    "attn_pdrop": "attention_probs_dropout_prob",
    "resid_pdrop": "hidden_dropout_prob",
}


def _rename_gpt2_keys(k: ConfigKeys) -> None:
    """Rename the published keys, and require the published code's options to have the supported values."""
    renamed = {GPT2_KEYS[key]: value for key, value in k.raw.items() if key in GPT2_KEYS}
    k.raw = {key: value for key, value in k.raw.items() if key not in GPT2_KEYS} | renamed
    k.must("activation_function", "swiglu")
    k.must("rotary_emb_fraction", 1.0, 1)
    k.must("scale_attn_weights", True)
    for name in (
        *"prenorm parallel_block parallel_block_tied_norm qkv_proj_bias mlp_fc1_bias mlp_fc2_bias".split(),
        *"use_rms_norm rotary_emb_interleaved causal scale_attn_by_inverse_layer_idx".split(),
    ):
        k.must(name, False)
    for name in ("rotary_emb_scale_base", "rotary_scaling_factor"):
        k.must(name)
    k.probability("embd_pdrop", 0.0)
    # Runtime options. auto_map: transformers has adopted that code.
    k.ignore(
        *(
            "auto_map n_positions dense_seq_output fused_bias_fc fused_dropout_add_ln use_flash_attn use_xentropy"
        ).split(),
        *("pad_vocab_size_multiple reorder_and_upcast_attn summary_activation summary_first_dropout").split(),
        *("summary_proj_to_labels summary_type summary_use_proj").split(),
    )


def read(k: ConfigKeys) -> EncoderConfig:
    """Read BERT's keys and the rotary parameters."""
    if "n_embd" in k.raw:
        _rename_gpt2_keys(k)
    k.encoder_only()
    fields = bert_fields(k)
    depth = k.layers("num_hidden_layers", 12)
    fields["head_width"] = k.integer("head_dim", fields["head_width"])
    base = k.rotary_base("rope_parameters", k.mapping("rope_parameters", {}), k.base("rope_theta", 1000.0))
    return EncoderConfig(
        **fields,
        layer_map=tuple(range(depth)),
        gated=True,
        qkv_bias="",
        out_bias=False,
        ff_bias=False,
        embeddings=EmbeddingConfig(width=fields["width"], segments=k.integer("type_vocab_size", 2)),
        positions=(Rotary((base,) * depth),),
        patterns=(Full(),) * depth,
        max_length=k.tokens("max_position_embeddings", 2048),
        pad_id=k.optional_integer("pad_token_id", 0),
    )


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """Nomic BERT's tensor names in the files; transformers renames them when loading."""
    yield same("encoder.embeddings.words.weight", "embeddings.word_embeddings.weight")
    yield same("encoder.embeddings.segments.weight", "embeddings.token_type_embeddings.weight")
    yield from linear("encoder.embeddings.norm", "emb_ln")
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"encoder.layers.{i}"
        yield from linear(f"{ours}.attention.qkv", f"{theirs}.attn.Wqkv", bias=False)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attn.out_proj", bias=False)
        yield from linear(f"{ours}.post_attention", f"{theirs}.norm1")
        # The activation is applied to the second of the two.
        gate = [f"{theirs}.mlp.fc12", f"{theirs}.mlp.fc11"]
        yield from concatenated(f"{ours}.ff.up", gate, (cfg.ff_width, cfg.ff_width), bias=False)
        yield from linear(f"{ours}.ff.down", f"{theirs}.mlp.fc2", bias=False)
        yield from linear(f"{ours}.post_ff", f"{theirs}.norm2")


_BERT = bert.heads("nomic_bert.")
HEADS: Mapping[HeadName, HeadTable] = {
    "mlm": mlm(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.layer_norm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions.bias",
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
    dropped=(r"rotary_emb\.\w*inv_freq$", *bert.INDEX_BUFFERS),
    tokenizer=bert.TOKENIZER,
    defaults={"hidden_act": "silu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
)
