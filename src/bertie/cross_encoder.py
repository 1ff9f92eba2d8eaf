"""How a folder says that it holds a cross-encoder, and what its scores go through: read and written.

sentence-transformers has marked them in three ways:

    up to 3.x     config.json: "sbert_ce_default_activation_function"
    4.0 to 5.3    config.json: "sentence_transformers": {"activation_fn": …, "version": …}
    since 5.4     modules.json with a Transformer alone, sentence_bert_config.json, and
                  config_sentence_transformers.json: "model_type": "CrossEncoder", "activation_fn", "prompts", …

Later marks go before earlier ones, as they do there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from bertie.errors import CheckpointError, ConfigError
from bertie.sentence import (
    ACTIVATIONS,
    MODEL_FILE,
    MODULES_FILE,
    SCORE_TEXT_RULES,
    TEXT_FILES,
    Entry,
    Json,
    Rules,
    TextSettings,
    activation_name,
    activation_path,
    dump,
    parse_entries,
    parse_object,
    patch,
    read_bytes,
    read_prompts,
    read_text_settings,
    take,
    tokenizer_limit,
)

# Keys of config.json that are read here; a family's table need not know them.
CONFIG_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")

MODEL_RULES = Rules(
    taken=frozenset({"activation_fn", "prompts", "default_prompt_name"}),
    required={"model_type": ("CrossEncoder",)},
    # keep_in_fp32_modules lists layers to leave out of autocast; we run heads in the precision of the model.
    ignored=frozenset({"__version__", "requirements", "keep_in_fp32_modules"}),
)
MARK_RULES = Rules(taken=frozenset({"activation_fn"}), ignored=frozenset({"version"}))


@dataclass(frozen=True)
class CrossEncoderConfig:
    """What a cross-encoder's scores go through, and how its pairs are to be prepared.

    >>> CrossEncoderConfig.fresh(num_labels=1).activation
    'Sigmoid'
    """

    CONFIG_KEYS: ClassVar[tuple[str, ...]] = CONFIG_KEYS

    activation: str  # a name in bertie.sentence.ACTIVATIONS
    num_labels: int
    max_length: int | None = None  # tokens a pair may have, special tokens included
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name, among the prompts, of the one that goes before every pair
    transformer_path: str = ""  # the transformer's folder inside the model's, "" when they are the same
    # What was read: the files, the keys of config.json and the fields as they were.
    _files: Mapping[str, bytes] = field(default_factory=dict, repr=False, compare=False)
    _marks: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _read: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation!r} must be one of {', '.join(ACTIVATIONS)}")
        if self.num_labels < 1:
            raise ConfigError(f"num_labels={self.num_labels} must be at least 1")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length} must be None or at least 1")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ConfigError(f"default_prompt={self.default_prompt!r} must be None or one of {list(self.prompts)}")
        if not self._read:
            object.__setattr__(self, "_read", self._settings())

    @classmethod
    def from_folder(cls, path: str | Path, config: Json) -> CrossEncoderConfig | None:
        """Read a folder's marks; None for one that is not marked as a cross-encoder. `config` is its config.json."""
        root = Path(path)
        raw = read_bytes(root / MODULES_FILE, MODULES_FILE)
        files: dict[str, bytes] = {}
        model: Json = {}
        transformer = Entry("Transformer", "")
        text = TextSettings(None, False)
        if raw is not None:
            raw_model = read_bytes(root / MODEL_FILE, MODEL_FILE)
            model = {} if raw_model is None else parse_object(raw_model, MODEL_FILE)
            if raw_model is None or model.get("model_type") != "CrossEncoder":
                return None  # modules.json without this mark is a model of sentence vectors
            files = {MODULES_FILE: raw, MODEL_FILE: raw_model}
            MODEL_RULES.check(model, MODEL_FILE)
            transformer, *rest = parse_entries(raw, root)
            if rest:
                raise CheckpointError(
                    f"{MODULES_FILE}: a cross-encoder of {', '.join(one.kind for one in (transformer, *rest))} is not "
                    "supported; it must be a Transformer alone, with a head for sequence classification"
                )
            text = read_text_settings(root, transformer, SCORE_TEXT_RULES, files)
        elif any(config.get(key) is not None for key in CONFIG_KEYS):
            text = TextSettings(tokenizer_limit(root, transformer), False)
        else:
            return None
        prompts, default_prompt = read_prompts(model, MODEL_FILE)
        labels = _num_labels(config)
        return cls(
            activation=_activation(model, config) or _default_activation(labels),
            num_labels=labels,
            max_length=text.max_seq_length,
            lower_case=text.lower_case,
            prompts=prompts,
            default_prompt=default_prompt,
            transformer_path=transformer.path,
            _files=files,
            _marks={key: config[key] for key in CONFIG_KEYS if key in config},
        )

    @classmethod
    def fresh(
        cls,
        num_labels: int,
        activation: str | None = None,
        max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
    ) -> CrossEncoderConfig:
        """A new one. Without an activation it is the sigmoid for one label and none for several."""
        activation = activation or _default_activation(num_labels)
        files = {
            MODULES_FILE: dump(
                [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
            ),
            MODEL_FILE: dump(
                {
                    "model_type": "CrossEncoder",
                    "activation_fn": activation_path(activation),
                    "prompts": dict(prompts or {}),
                    "default_prompt_name": default_prompt,
                }
            ),
            TEXT_FILES[0]: dump(
                {
                    "transformer_task": "sequence-classification",
                    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                    "module_output_name": "scores",
                    "max_seq_length": max_length,
                }
            ),
        }
        return cls(
            activation=activation,
            num_labels=num_labels,
            max_length=max_length,
            prompts=dict(prompts or {}),
            default_prompt=default_prompt,
            _files=files,
            # For versions 4.0 to 5.3, which do not read the files above.
            _marks={"sentence_transformers": {"activation_fn": activation_path(activation)}},
        )

    def module(self) -> nn.Module:
        """The activation, to be called on (B, num_labels) logits."""
        return ACTIVATIONS[self.activation]()

    def files(self) -> dict[str, bytes]:
        """What to write beside the transformer, by relative path.

        What was read comes back byte for byte unless `dataclasses.replace` changed a field. A folder from before 5.4
        has no such files, and gets none unless a change needs them. `config_entries` goes with them.
        """
        files = dict(self._files)
        changes = self._changes()
        if not files and set(changes) - {"activation_fn"}:
            files = dict(self.fresh(self.num_labels, self.activation)._files)
            changes = self._settings()
        if not files:
            return {}
        text_keys = ("max_seq_length", "do_lower_case")
        text_files = [Entry("Transformer", self.transformer_path).inside(name) for name in TEXT_FILES]
        text_file = next((file for file in reversed(text_files) if file in files), text_files[0])
        patch(files, text_file, {key: value for key, value in changes.items() if key in text_keys})
        patch(files, MODEL_FILE, {key: value for key, value in changes.items() if key not in text_keys})
        return files

    def config_entries(self) -> Json:
        """What belongs into config.json."""
        entries = dict(self._marks)
        if "activation_fn" in self._changes():
            path = activation_path(self.activation)
            # Whatever is there stays true; a folder that had nothing there keeps it so if it has the newer files.
            if "sbert_ce_default_activation_function" in entries:
                entries["sbert_ce_default_activation_function"] = path
            if "sentence_transformers" in entries:
                entries["sentence_transformers"] = {**entries["sentence_transformers"], "activation_fn": path}
        return entries

    def _settings(self) -> Json:
        """The fields under their names in the files."""
        return {
            "max_seq_length": self.max_length,
            "do_lower_case": self.lower_case,
            "activation_fn": activation_path(self.activation),
            "prompts": dict(self.prompts),
            "default_prompt_name": self.default_prompt,
        }

    def _changes(self) -> Json:
        return {key: value for key, value in self._settings().items() if value != self._read[key]}


def _activation(model: Json, config: Json) -> str | None:
    file = "config.json"
    mark = take(config, file, "sentence_transformers", (dict, type(None))) or {}
    MARK_RULES.check(mark, f"{file}: sentence_transformers")
    old = "sbert_ce_default_activation_function"
    for where, key, dotted in (
        (MODEL_FILE, "activation_fn", model.get("activation_fn")),
        (file, "sentence_transformers.activation_fn", mark.get("activation_fn")),
        (file, old, config.get(old)),
    ):
        if dotted is not None:
            return activation_name(dotted, where, key)
    return None


def _default_activation(num_labels: int) -> str:
    return "Sigmoid" if num_labels == 1 else "Identity"


def _num_labels(config: Json) -> int:
    """The number of labels by transformers' rule: as many as are named, else 2."""
    file = "config.json"
    names = take(config, file, "id2label", (dict, type(None)))
    count = take(config, file, "num_labels", (int, type(None)))
    if names is not None and count is not None and len(names) != count:
        raise CheckpointError(f"{file}: num_labels={count} must be {len(names)}, as many as id2label names")
    labels = len(names) if names is not None else 2 if count is None else int(count)
    if labels < 1:
        raise CheckpointError(f"{file}: num_labels={labels} must be at least 1")
    return labels
