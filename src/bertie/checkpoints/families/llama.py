"""Llama and the decoders of its layout (Mistral, Qwen2, Qwen3), read as encoders for embeddings.

Pre-norm with RMSNorm, grouped-query attention, SwiGLU and rotary embeddings; causal attention unless `is_causal` is
false. A checkpoint of the class for generation loads without its output layer: Bertie does not generate text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bertie.checkpoints.config_keys import MOST_LAYERS, ConfigKeys
from bertie.checkpoints.convert import TensorRule, concatenated, linear, same
from bertie.checkpoints.families.common import qkv_sizes
from bertie.checkpoints.families.family import Family
from bertie.config import (
    Causal,
    EmbeddingConfig,
    EncoderConfig,
    Full,
    NormConfig,
    Pattern,
    Rotary,
    RotaryScaling,
    Sliding,
)
from bertie.errors import ConfigError

KINDS = ("full_attention", "sliding_attention")
ROPE_TYPES = ("default", "linear", "llama3")  # dynamic, yarn and longrope are not implemented
# The output layer over the vocabulary, and tables of rotary frequencies that old versions of transformers store.
DROPPED = (r"^lm_head\.weight$", r"rotary_emb\.\w*inv_freq$")


def decoder_fields(k: ConfigKeys, activation: str = "hidden_act") -> dict[str, Any]:
    """The fields of `EncoderConfig` that decoders share; `activation` is the key of the activation."""
    k.encoder_only()
    width, depth = k.integer("hidden_size"), k.layers("num_hidden_layers")
    heads = k.integer("num_attention_heads")
    if k.raw.get("head_dim") is None and width % heads:
        raise ConfigError(f"config.json: num_attention_heads={heads} must divide hidden_size={width}")
    kv_heads = k.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"config.json: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}")
    k.boolean("tie_word_embeddings", False)  # of the output layer, which is not loaded
    return {
        "vocab": k.integer("vocab_size"),
        "width": width,
        "layer_map": tuple(range(depth)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_width": k.integer("head_dim", width // heads),
        "ff_width": k.integer("intermediate_size"),
        "activation": k.activation(activation, "silu"),
        "gated": True,
        "ff_bias": False,
        "norm": NormConfig("rms", eps=k.number("rms_norm_eps", 1e-6, least=1e-30, most=0.1), bias=False),
        "pre_norm": True,
        "max_length": k.tokens("max_position_embeddings"),
        "attention_dropout": k.probability("attention_dropout", 0.0),
        "pad_id": k.optional_integer("pad_token_id"),
        "init_std": k.number("initializer_range", 0.02, most=100.0),
    }


def rotary(k: ConfigKeys, depth: int, max_length: int) -> Rotary:
    """The rotary embeddings of a model with the same ones in every layer."""
    old, new = k.mapping("rope_scaling", {}), k.mapping("rope_parameters", {})
    if old and new:
        raise ConfigError("config.json: rope_scaling and rope_parameters are both given; leave one of them out")
    name = "rope_scaling" if old else "rope_parameters"
    base, scaling = rotary_scaling(k, name, old or new, k.base("rope_theta", 10_000.0), max_length)
    return Rotary((base,) * depth, () if scaling is None else (scaling,) * depth)


def rotary_scaling(
    k: ConfigKeys, name: str, raw: Any, default: float, max_length: int
) -> tuple[float, RotaryScaling | None]:
    """Read the object under a key: the base frequency of a rotary embedding, and its scaling or None.

    `default` is the base where the object has none, `max_length` the model's, which llama3 takes for the original.
    """
    if not isinstance(raw, dict) or None in raw.values():
        raise ConfigError(f"{k.file}: {name}={raw!r:.80} is not supported; allowed: an object without nulls")
    part = ConfigKeys(raw, file=f"{k.file}: {name}", common=())
    kind = part.choice("rope_type", ROPE_TYPES, part.choice("type", ROPE_TYPES, "default"))
    part.must("type", kind)  # the old name of rope_type
    part.must("partial_rotary_factor", 1.0, 1)
    base = part.base("rope_theta", default)
    scaling = None
    if kind != "default":
        factor, waves, original = part.number("factor", least=1e-3, most=1e6), None, 1
        if kind == "llama3":
            waves = part.number("low_freq_factor", least=1e-3), part.number("high_freq_factor", least=1e-3)
            original = part.tokens("original_max_position_embeddings", max_length)
        scaling = RotaryScaling(factor, waves, original)
    part.finish()
    return base, scaling


def layer_kinds(k: ConfigKeys, usual: list[str]) -> list[str]:
    """The attention type of each layer: listed, or as in `usual`."""
    kinds = k.array("layer_types", usual)
    if len(kinds) != len(usual) or not all(kind in KINDS for kind in kinds):
        raise ConfigError(
            f"config.json: layer_types={kinds!r:.80} must name {' or '.join(KINDS)} for {len(usual)} layers"
        )
    return kinds


def _pattern(causal: bool, window: int | None) -> Pattern:
    """Attention in a layer; `window` counts as transformers does: with the token itself if causal, else without."""
    if causal:
        return Causal(None if window is None else window - 1)
    return Full() if window is None else Sliding(window)


def _all_full(k: ConfigKeys, depth: int) -> list[int | None]:
    return [None] * depth


def _all_sliding(k: ConfigKeys, depth: int) -> list[int | None]:
    """Mistral: the same window in every layer, or null."""
    return [k.optional_tokens("sliding_window", 4096)] * depth


def _some_sliding(k: ConfigKeys, depth: int) -> list[int | None]:
    """Qwen: windows only with use_sliding_window, then in the layers from max_window_layers on."""
    used = k.boolean("use_sliding_window", False)
    window = k.optional_tokens("sliding_window", 4096)
    first = k.integer("max_window_layers", 28, least=0, most=MOST_LAYERS)
    k.must("use_mrope", False)
    if not used or window is None:
        kinds = layer_kinds(k, ["full_attention"] * depth)
        if "sliding_attention" in kinds:
            raise ConfigError(
                f"config.json: layer_types names sliding_attention, but use_sliding_window={used} and "
                f"sliding_window={window}"
            )
        return [None] * depth
    kinds = layer_kinds(k, ["sliding_attention" if i >= first else "full_attention" for i in range(depth)])
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _reader(
    windows: Callable[[ConfigKeys, int], list[int | None]], *, qkv_bias: bool | None = None, qk_norm: bool = False
) -> Callable[[ConfigKeys], EncoderConfig]:
    """The `read` of a family; `qkv_bias` None: by the key attention_bias, which is then the output's too."""

    def read(k: ConfigKeys) -> EncoderConfig:
        fields = decoder_fields(k)
        depth = len(fields["layer_map"])
        bias = k.boolean("attention_bias", False) if qkv_bias is None else qkv_bias
        causal = k.boolean("is_causal", True)
        return EncoderConfig(
            **fields,
            qkv_bias="qkv" if bias else "",
            out_bias=bias and qkv_bias is None,
            qk_norm=qk_norm,
            embeddings=EmbeddingConfig(width=fields["width"], norm=False),
            positions=(rotary(k, depth, fields["max_length"]),),
            patterns=tuple(_pattern(causal, window) for window in windows(k, depth)),
        )

    return read


def _read_llama(k: ConfigKeys) -> EncoderConfig:
    k.must("pretraining_tp", 1)
    return replace(_reader(_all_full)(k), ff_bias=k.boolean("mlp_bias", False))


def decoder_weights(cfg: EncoderConfig) -> Iterator[TensorRule]:
    """Llama's tensor names."""
    yield same("encoder.embeddings.words.weight", "embed_tokens.weight")
    yield same("encoder.norm.weight", "norm.weight")
    for i in range(cfg.blocks):
        ours, theirs = f"encoder.blocks.{i}", f"layers.{i}"
        yield same(f"{ours}.pre_attention.weight", f"{theirs}.input_layernorm.weight")
        names = [f"{theirs}.self_attn.{part}_proj" for part in "qkv"]
        yield from concatenated(f"{ours}.attention.qkv", names, qkv_sizes(cfg), bias=bool(cfg.qkv_bias))
        if cfg.qk_norm:
            for part in "qk":
                yield same(f"{ours}.attention.{part}_norm.weight", f"{theirs}.self_attn.{part}_norm.weight")
        yield from linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", cfg.out_bias)
        # With norms of the outputs, Gemma's names: there post_attention_layernorm is that of attention's output.
        attention, ff = "post_attention_layernorm", "post_feedforward_layernorm"
        if cfg.output_norms:
            yield same(f"{ours}.attention_output.weight", f"{theirs}.{attention}.weight")
            yield same(f"{ours}.ff_output.weight", f"{theirs}.{ff}.weight")
        before_ff = "pre_feedforward_layernorm" if cfg.output_norms else attention
        yield same(f"{ours}.pre_ff.weight", f"{theirs}.{before_ff}.weight")
        gate = [f"{theirs}.mlp.gate_proj", f"{theirs}.mlp.up_proj"]
        yield from concatenated(f"{ours}.ff.up", gate, (cfg.ff_width, cfg.ff_width), bias=cfg.ff_bias)
        yield from linear(f"{ours}.ff.down", f"{theirs}.mlp.down_proj", cfg.ff_bias)


def _family(
    model_type: str, stem: str, read: Callable[[ConfigKeys], EncoderConfig], defaults: dict[str, Any]
) -> Family:
    return Family(
        model_type=model_type,
        architectures={f"{stem}Model": (), f"{stem}ForCausalLM": ()},
        prefix="model.",
        read=read,
        weights=decoder_weights,
        heads={},
        dropped=DROPPED,
        defaults={"hidden_size": 4096, "num_hidden_layers": 32} | defaults,
        decoder=True,
    )


_QWEN = {"num_key_value_heads": 32, "intermediate_size": 22016, "max_position_embeddings": 32768}
LLAMA = _family("llama", "Llama", _read_llama, {"intermediate_size": 11008, "max_position_embeddings": 2048})
MISTRAL = _family(
    "mistral",
    "Mistral",
    _reader(_all_sliding, qkv_bias=False),
    {"num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131_072},
)
QWEN2 = _family("qwen2", "Qwen2", _reader(_some_sliding, qkv_bias=True), _QWEN)
QWEN3 = _family("qwen3", "Qwen3", _reader(_some_sliding, qk_norm=True), _QWEN | {"head_dim": 128})
