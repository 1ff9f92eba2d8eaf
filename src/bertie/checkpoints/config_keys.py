"""Strict reading of config.json and similar files: every key is used, required to have a value, or ignored by name."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from bertie.config import Activation
from bertie.errors import ConfigError

# ConfigKeys that any checkpoint may carry and that change no number an encoder computes.
IGNORED = frozenset(
    # provenance and runtime options
    "_name_or_path name_or_path transformers_version tokenizer_class finetuning_task task_specific_params torch_dtype "
    "dtype use_bfloat16 torchscript return_dict output_attentions output_hidden_states output_past use_cache "
    "gradient_checkpointing chunk_size_feed_forward tf_legacy_loss _commit_hash _attn_implementation "
    "_attn_implementation_autoset onnx_export attn_implementation keys_to_ignore_at_inference "
    # generation options, which used to share this file
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id "
    "forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens prefix decoder_start_token_id cross_attention_hidden_size tie_encoder_decoder "
    # ids that are read from the tokenizer's files
    "bos_token_id eos_token_id cls_token_id mask_token_id directionality "
    # a pooler that Google's multilingual and Chinese checkpoints describe, but that was never implemented
    "pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type "
    # metadata of deepset's FARM and of transformers.js exports
    "language name transformers.js_config".split()
)

# Names of activations that are identical to ours in fp32.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "linear": "identity",
}

# Keys for which null means the default. Elsewhere null is an error: the original would fail on it or give it a meaning
# of its own (no activation, no positions), and a default in its place would be silently wrong.
NULLABLE = frozenset(
    "id2label label2id num_labels _num_labels classifier_dropout cls_dropout sep_token_id head_dim "
    "num_key_value_heads layer_types rope_parameters rope_scaling pos_att_type "
    "sentence_transformers sbert_ce_default_activation_function".split()
)
MOST_LABELS = 2**20
MOST_BASE = 1e12  # of rotary embeddings; the largest known is ten million
MOST_TOKENS = 2**24  # of a sequence, a window or a position table
MOST_LAYERS = 1024  # the deepest known encoder has 48; a corrupt number must not be built

_NONE = object()


class ConfigKeys:
    """The keys of a config file; `finish` raises an error for those that were not used.

    `file` is its name in messages; `common` are keys that may always be present.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        ignore: Iterable[str] = (),
        *,
        file: str = "config.json",
        common: Collection[str] = IGNORED,
    ) -> None:
        self.raw = raw
        self.file = file
        self.strict = bool(common)
        self.used: set[str] = {"model_type", "architectures"} if common else set()
        self.ignored: set[str] = set()
        self.ignore(*common, *ignore)

    def ignore(self, *names: str) -> None:
        """Mark keys that do not affect the output."""
        self.used.update(names)
        self.ignored.update(name for name in names if name in self.raw)

    def finish(self) -> None:
        """Raise an error for unused keys."""
        unused = sorted(set(self.raw) - self.used)
        if unused:
            shown = ", ".join(f"{name}={self.raw[name]!r}"[:80] for name in unused)
            message = f"{self.file}: unknown key{'s' if len(unused) > 1 else ''} {shown}"
            if self.file == "config.json":  # the only file that `ignore` applies to
                message += f". If it does not change what the model computes, pass ignore={unused}"
            raise ConfigError(message)

    def _absent(self, name: str, default: Any) -> bool:
        """Whether a key is missing, or null where that means the same: in config.json only for the keys in NULLABLE."""
        value = self.raw.get(name, _NONE)
        null_ok = not self.strict or default is None or name in NULLABLE
        return value is _NONE or (value is None and null_ok and default is not _NONE)

    def _take(self, name: str, default: Any) -> Any:
        self.used.add(name)
        self.ignored.discard(name)
        if self._absent(name, default):
            if default is _NONE:
                raise ConfigError(f"{self.file}: {name} is missing")
            return default
        return self.raw[name]

    def _refuse(self, name: str, value: Any, allowed: str) -> ConfigError:
        return ConfigError(f"{self.file}: {name}={value!r:.80} is not supported; allowed: {allowed}")

    def integer(self, name: str, default: Any = _NONE, least: int = 1, most: int = 2**31 - 1) -> int:
        """A whole number from `least` to `most`."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._refuse(name, value, f"a whole number from {least} to {most}")
        return value

    def optional_integer(
        self, name: str, default: int | None = None, least: int = 0, most: int = 2**31 - 1
    ) -> int | None:
        """A whole number, or null."""
        if self.raw.get(name, default) is None:
            self.used.add(name)
            return None
        return self.integer(name, default, least, most)

    def layers(self, name: str, default: Any = _NONE) -> int:
        """A number of layers."""
        return self.integer(name, default, most=MOST_LAYERS)

    def tokens(self, name: str, default: Any = _NONE, least: int = 1) -> int:
        """A number of tokens."""
        return self.integer(name, default, least, MOST_TOKENS)

    def optional_tokens(self, name: str, default: int | None = None) -> int | None:
        """A number of tokens, or null."""
        return self.optional_integer(name, default, 1, MOST_TOKENS)

    def number(self, name: str, default: Any = _NONE, least: float = 0.0, most: float = math.inf) -> float:
        """A number between `least` and `most`."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self._refuse(name, value, f"a number from {least:g} to {most:g}")
        if value > sys.float_info.max:  # an integer may overflow a float
            raise self._refuse(name, value, "a finite number")
        return float(value)

    def base(self, name: str, default: Any = _NONE) -> float:
        """A base frequency of rotary embeddings."""
        return self.number(name, default, 2.0, MOST_BASE)

    def probability(self, name: str, default: Any = _NONE) -> float:
        """A dropout probability: at least 0 and below 1."""
        value = self.number(name, default, 0.0, 1.0)
        if value == 1:
            raise self._refuse(name, value, "a number of at least 0 and below 1")
        return value

    def boolean(self, name: str, default: Any = _NONE) -> bool:
        """True or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._refuse(name, value, "true, false")
        return value

    def text(self, name: str, default: Any = _NONE) -> str:
        """A string."""
        value = self._take(name, default)
        if not isinstance(value, str):
            raise self._refuse(name, value, "a string")
        return value

    def choice(self, name: str, allowed: Iterable[str], default: Any = _NONE) -> str:
        """One of several strings."""
        value = self._take(name, default)
        allowed = tuple(allowed)
        if not isinstance(value, str) or value not in allowed:
            raise self._refuse(name, value, ", ".join(allowed))
        return value

    def activation(self, name: str, default: Any = _NONE) -> Activation:
        """The name of an activation."""
        return ACTIVATIONS[self.choice(name, ACTIVATIONS, default)]

    def must(self, name: str, *allowed: Any) -> None:
        """Require the key to be missing or equal to one of these values."""
        self.used.add(name)
        if self._absent(name, allowed[0] if allowed else None):
            return
        value = self.raw[name]
        # 1 == True in Python, but not in JSON.
        if not any(value == option and type(value) is type(option) for option in allowed):
            raise self._refuse(name, value, ", ".join(map(repr, allowed)) or "null")

    def mapping(self, name: str, default: Any = _NONE) -> dict[str, Any]:
        """An object."""
        value = self._take(name, default)
        if not isinstance(value, dict):
            raise self._refuse(name, value, "an object")
        return value

    def array(self, name: str, default: Any = _NONE) -> list[Any]:
        """A list."""
        value = self._take(name, default)
        if not isinstance(value, list):
            raise self._refuse(name, value, "a list")
        return value

    def encoder_only(self, *positions: str) -> None:
        """Reject checkpoints that are not plain encoders.

        `positions` are further values of position_embedding_type that the family allows.
        """
        for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention"):
            self.must(name, False)
        self.must("pruned_heads", {})
        self.ignore("sep_token_id")  # families that need it read it after this
        self.must("position_embedding_type", "absolute", *positions)
        if "auto_map" in self.raw and "auto_map" not in self.used:
            raise ConfigError(
                "config.json: auto_map refers to custom code, and code from a checkpoint is never run. "
                "If the model is a standard one of its model_type, pass ignore=['auto_map']"
            )

    def labels(self) -> dict[int, str]:
        """The label names by class index; two default ones if the file has none."""
        raw = self._take("id2label", None)
        count = self.optional_integer("num_labels", least=1, most=MOST_LABELS)
        if not isinstance(self._take("label2id", {}), dict):
            raise self._refuse("label2id", self.raw["label2id"], "an object")
        if raw is not None:
            if not isinstance(raw, dict) or not all(isinstance(label, str) for label in raw.values()):
                raise self._refuse("id2label", raw, "an object of names by number")
            if sorted(raw) != sorted(str(i) for i in range(len(raw))) or not raw:
                raise self._refuse("id2label", raw, "an object that maps the class indices from 0 up to names")
            if count is not None and count != len(raw):
                raise ConfigError(f"config.json: num_labels={count} contradicts the {len(raw)} names of id2label")
        names = raw or {str(i): f"LABEL_{i}" for i in range(count or 2)}
        self.must("_num_labels", len(names), None)
        return {i: names[str(i)] for i in range(len(names))}

    def rotary_base(self, name: str, raw: Any, default: float) -> float:
        """The base frequency of a plain rotary embedding; scaled variants are refused."""
        if not isinstance(raw, dict) or None in raw.values():
            raise self._refuse(name, raw, "an object without nulls")
        part = ConfigKeys(raw, file=f"{self.file}: {name}", common=())
        part.must("rope_type", "default")
        part.must("type", "default")
        part.must("partial_rotary_factor", 1.0, 1)
        base = part.base("rope_theta", default)
        part.finish()
        return base
