"""DeBERTa v2 and v3, mDeBERTa: log-bucketed relative positions, shared projections; a convolution in v2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import TensorRule, linear
from bertie.checkpoints.families import deberta
from bertie.checkpoints.families.common import USUAL, architectures, bert_blocks
from bertie.checkpoints.families.family import Family
from bertie.config import Convolution, Disentangled, EncoderConfig, NormConfig
from bertie.text.legacy import LegacyTokenizer


def read(k: ConfigKeys) -> EncoderConfig:
    """Read the keys of v1 and those added in v2."""
    buckets = k.tokens("position_buckets", -1, least=-1)
    normed = k.choice("norm_rel_ebd", ("none", "layer_norm"), "none") == "layer_norm"
    shared = k.boolean("share_att_key", False)
    eps = k.number("layer_norm_eps", 1e-7, least=1e-30, most=0.1)
    k.boolean("legacy", True)

    def relative(terms: deberta.Terms, max_distance: int) -> Disentangled:
        return Disentangled(
            terms,
            max_distance,
            buckets=buckets if buckets > 0 else None,
            shared=shared,
            norm=NormConfig(eps=eps) if normed else None,
        )

    cfg = deberta.read_any(k, relative)
    kernel = k.integer("conv_kernel_size", 0, least=0)
    conv = Convolution(
        kernel=max(kernel, 1), groups=k.integer("conv_groups", 1), activation=k.activation("conv_act", "tanh")
    )
    return replace(cfg, conv=conv if kernel else None)


def weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """The tensor names of v2."""
    yield from deberta.embeddings(cfg)
    yield from bert_blocks(cfg, qkv=("query_proj", "key_proj", "value_proj"))
    own = {t for p in cfg.positions if isinstance(p, Disentangled) and not p.shared for t in p.terms}
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}.attention", f"encoder.layer.{i}.attention.self"
        if "c2p" in own:
            yield from linear(f"{ours}.position_key", f"{theirs}.pos_key_proj")
        if "p2c" in own:
            yield from linear(f"{ours}.position_query", f"{theirs}.pos_query_proj")
    if cfg.conv:
        yield from linear("encoder.conv", "encoder.conv.conv")
        yield from linear("encoder.conv.norm", "encoder.conv.LayerNorm")


TOKENIZER = LegacyTokenizer(
    kind="sentencepiece",
    files=("spm.model",),
    cls="[CLS]",
    sep="[SEP]",
    unk="[UNK]",
    pad="[PAD]",
    mask="[MASK]",
    bos="[CLS]",
    eos="[SEP]",
    appended=("[MASK]",),  # not in the SentencePiece model: its id follows the last piece
    class_keeps_rules=False,  # transformers 5 omits SentencePiece's normalization
    lowercase=False,
    add_prefix_space=True,
    strip="both",
    collapse_spaces=" ",
    # The published tokenizer.json has no byte fallback, and all fine-tuned models were trained with its ids.
    ignore_byte_fallback=True,
)

FAMILY = Family(
    model_type="deberta-v2",
    architectures=architectures("DebertaV2", **USUAL),
    prefix="deberta.",
    read=read,
    weights=weights,
    heads={**deberta.heads(), "rtd": deberta.discriminator()},
    alternatives=deberta.ALTERNATIVES,
    companions=("mlm", "rtd"),
    dropped=deberta.DROPPED,
    tokenizer=TOKENIZER,
    tokenizer_classes=("DebertaV2Tokenizer",),
    defaults={"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 24},
)
