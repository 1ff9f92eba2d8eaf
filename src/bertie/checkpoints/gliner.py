"""Read and write the folders of GLiNER models: an encoder and a head that scores spans against labels of a prompt.

Instead of config.json they have gliner_config.json, with the encoder's config inside it; older folders name the encoder
instead, which is then looked up like any model. Supported is the uni-encoder with span mode markerV0. What the package
`gliner` calls bi-encoders, token-level models, label decoders, relation extraction, layer fusion and other span modes
is refused by the name of its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from bertie.checkpoints import storage
from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.convert import Shape, TensorRule, TensorSource, WeightMap, linear, same
from bertie.checkpoints.folder_tokenizer import folder_tokenizer
from bertie.checkpoints.hub import resolve
from bertie.checkpoints.model_spec import ModelSpec
from bertie.config import SpanHeadConfig
from bertie.errors import CheckpointError, ConfigError
from bertie.text.tokenizer import Tokenizer

FILE = "gliner_config.json"
HEAD = "span"  # the name of the head
_ENCODER = "token_rep_layer.bert_layer.model."  # prefix of the encoder's tensors
_HEAD_TENSORS = ("token_rep_layer.projection.", "rnn.", "span_rep_layer.", "prompt_rep_layer.")
_UNUSED_TOKEN = "[FLERT]"  # the package adds it before the two that it uses
# Keys that change no number of a forward pass: training, provenance, and options of parts that are refused if used.
_IGNORED = (
    "name fine_tune num_post_fusion_layers max_neg_type_ratio max_len token_loss_coef span_loss_coef neg_spans_ratio "
    "transformers_version _attn_implementation blank_entity_prob decoder_loss_coef full_decoder_context dtype "
    "torch_dtype num_steps train_batch_size eval_every warmup_ratio scheduler_type loss_alpha loss_gamma "
    "loss_prob_margin loss_reduction label_smoothing negatives masking lr_encoder lr_others weight_decay_encoder "
    "weight_decay_other max_grad_norm optimizer_type root_dir train_data val_data_dir prev_path save_total_limit "
    "size_sup shuffle_types random_drop freeze_token_rep log_dir data_name eval_batch_size num_train_rand_neg "
    "architectures _name_or_path"
).split()
_DEFAULTS: dict[str, Any] = {
    "name": "bertie",
    "model_name": "encoder",  # the package reads the encoder's config below instead
    "fine_tune": True,
    "subtoken_pooling": "first",
    "span_mode": "markerV0",
    "post_fusion_schema": "",
    "fuse_layers": False,
    "words_splitter_type": "whitespace",
    "max_len": 384,
    "max_neg_type_ratio": 1,
    "model_type": "gliner",
}


@dataclass(frozen=True, slots=True)
class GlinerConfig:
    """What gliner_config.json says beside the encoder's config."""

    head: SpanHeadConfig
    ent_token: str = "<<ENT>>"  # prepended to each label of a prompt
    sep_token: str = "<<SEP>>"  # ends the prompt
    embed_ent_token: bool = True  # a label is represented by its marker; else by its first token
    max_types: int = 25  # labels of a prompt in training, at most
    raw: Mapping[str, Any] = field(default_factory=dict)  # other keys, as they were read

    def to_json(self, encoder: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
        """gliner_config.json, with the encoder's config."""
        return {
            **_DEFAULTS,
            **self.raw,
            "hidden_size": self.head.width,
            "max_width": self.head.max_width,
            "num_rnn_layers": self.head.rnn_layers,
            "dropout": self.head.dropout,
            "ent_token": self.ent_token,
            "sep_token": self.sep_token,
            "embed_ent_token": self.embed_ent_token,
            "max_types": self.max_types,
            "class_token_index": -1 if tokenizer is None else tokenizer.id(self.ent_token),
            "vocab_size": encoder["vocab_size"],
            "encoder_config": dict(encoder),
        }

    def add_head(self, spec: ModelSpec) -> ModelSpec:
        """The spec of an encoder with the span head."""
        rules = [*spec.weight_map.rules, *_head_rules(self.head, spec.encoder.width)]
        heads = {**spec.heads, "span": self.head}
        return replace(spec, heads=heads, weight_map=WeightMap(rules, spec.weight_map.rename))


@dataclass(frozen=True, slots=True)
class GlinerFolder:
    """A folder with gliner_config.json."""

    config: GlinerConfig
    encoder: dict[str, Any]  # the encoder's config
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> GlinerFolder | None:
        """Read a folder's settings and tokenizer; None if it is not one of these."""
        if not storage.is_file(folder / FILE):
            return None
        raw = storage.read_json(folder / FILE)
        keys = ConfigKeys(raw, _IGNORED, file=FILE, common=())
        _refuse_other_models(keys)
        config = _read_config(keys, raw)
        name = keys.text("model_name", "")
        inner = keys.mapping("encoder_config", {})
        index = keys.integer("class_token_index", -1, least=-1)
        vocab = keys.integer("vocab_size", -1, least=-1)
        keys.finish()
        base: Path | None = None
        if not inner:
            base = _base_model(name, "encoder_config is missing")
            inner = storage.read_json(base / "config.json")
            inner = inner if vocab < 0 else inner | {"vocab_size": vocab}
        tokenizer = folder_tokenizer(folder, inner.get("model_type"))
        if tokenizer is None:
            base = base or _base_model(name, "the folder has no tokenizer")
            tokenizer = folder_tokenizer(base, inner.get("model_type"))
        if tokenizer is None:
            raise CheckpointError(f"{folder.name} has no tokenizer, and neither has {name}")
        if index < 0 or vocab < 0:  # as the package does when it loads the folder
            tokenizer = tokenizer.with_special_tokens([_UNUSED_TOKEN, config.ent_token, config.sep_token])
            inner = inner | {"vocab_size": tokenizer.vocab_size}
        _check_markers(tokenizer, config, index)
        return cls(config, dict(inner), tokenizer)


def _read_config(keys: ConfigKeys, raw: Mapping[str, Any]) -> GlinerConfig:
    has_rnn = keys.boolean("has_rnn", True)  # of older folders
    head = SpanHeadConfig(
        width=keys.integer("hidden_size", 512, most=2**16),
        max_width=keys.integer("max_width", 12, most=2**10),
        rnn_layers=keys.integer("num_rnn_layers", int(has_rnn), least=0, most=64),
        dropout=keys.probability("dropout", 0.4),
    )
    return GlinerConfig(
        head,
        keys.text("ent_token", "<<ENT>>"),
        keys.text("sep_token", "<<SEP>>"),
        keys.boolean("embed_ent_token", True),
        keys.integer("max_types", 25),
        {key: value for key, value in raw.items() if key not in ("encoder_config", "has_rnn")},
    )


def _refuse_other_models(keys: ConfigKeys) -> None:
    """Raise an error that names the key of what is not supported."""
    keys.must("model_type", "gliner", "gliner_uni_encoder_span", None)
    for key in ("labels_encoder", "labels_encoder_config", "labels_decoder", "labels_decoder_config", "decoder_mode"):
        keys.must(key, None)  # bi-encoders, and models that generate labels
    keys.must("relations_layer", None)
    keys.must("span_mode", "markerV0")
    keys.must("subtoken_pooling", "first")
    keys.must("words_splitter_type", "whitespace")
    keys.must("fuse_layers", False)
    keys.must("post_fusion_schema", "", None)
    keys.must("span_encoder_config", None)
    keys.must("represent_spans", False)
    keys.must("precomputed_prompts_mode", None, False)
    keys.must("id_to_classes", None)


def _base_model(name: str, reason: str) -> Path:
    if not name:
        raise ConfigError(f"{FILE}: model_name={name!r} must name the encoder: {reason}")
    return resolve(name)


def _check_markers(tokenizer: Tokenizer, config: GlinerConfig, index: int) -> None:
    for key in ("ent_token", "sep_token"):
        token = getattr(config, key)
        ids = tokenizer.encode_words([[token]])[0][0]
        if len(ids) != 1 or tokenizer.id(token) != ids[0]:
            raise CheckpointError(f"{FILE}: {key}={token!r} must be a token of the tokenizer's own")
    if index >= 0 and tokenizer.id(config.ent_token) != index:
        raise CheckpointError(
            f"{FILE}: class_token_index={index} must be the id of {config.ent_token!r}, which is "
            f"{tokenizer.id(config.ent_token)}"
        )


# --- tensors ---


def _head_rules(cfg: SpanHeadConfig, width: int) -> Iterator[TensorRule]:
    """Which tensor of the head is which."""
    if cfg.width != width:
        yield from linear(f"heads.{HEAD}.project_hidden", "token_rep_layer.projection")
    for layer in range(cfg.rnn_layers):
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            for suffix in ("", "_reverse"):
                name = f"{part}_l{layer}{suffix}"
                yield same(f"heads.{HEAD}.rnn.{name}", f"rnn.lstm.{name}")
    parts = {
        "start": "span_rep_layer.span_rep_layer.project_start",
        "end": "span_rep_layer.span_rep_layer.project_end",
        "span": "span_rep_layer.span_rep_layer.out_project",
        "label": "prompt_rep_layer",
    }
    for ours, theirs in parts.items():
        yield from linear(f"heads.{HEAD}.{ours}_up", f"{theirs}.0")
        yield from linear(f"heads.{HEAD}.{ours}_down", f"{theirs}.3")


class EncoderNames:
    """The weights of a folder, with the encoder's tensors under the names that they have in a folder of its own."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._names = {name.removeprefix(_ENCODER): name for name in source.shapes()}

    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor."""
        shapes = self._source.shapes()
        return {ours: shapes[theirs] for ours, theirs in self._names.items()}

    def get(self, name: str) -> Tensor:
        """Read one tensor."""
        return self._source.get(self._names[name])


def folder_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names that they have in a GLiNER folder: the inverse of `EncoderNames`."""
    return {name if name.startswith(_HEAD_TENSORS) else _ENCODER + name: x for name, x in tensors.items()}
