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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from torch import nn

from bertie.checkpoints.config_keys import ConfigKeys
from bertie.checkpoints.sentence_transformers import (
    ACTIVATION_PATHS,
    MODULES_FILE,
    TEXT_FILES,
    Json,
    ModuleEntry,
    SentenceFolder,
    SentenceSettings,
    tokenizer_limit,
)
from bertie.errors import ConfigError
from bertie.nn.sentence_layers import ACTIVATIONS

MARK, OLD_MARK = "sentence_transformers", "sbert_ce_default_activation_function"


@dataclass(frozen=True)
class CrossEncoderConfig:
    """What a cross-encoder's scores go through, and how its pairs are to be prepared.

    >>> CrossEncoderConfig.create(num_labels=1).activation
    'Sigmoid'
    """

    # ConfigKeys of config.json that are read here; a family's table need not know them.
    CONFIG_KEYS: ClassVar[tuple[str, ...]] = (MARK, OLD_MARK)

    activation: str  # a name in bertie.checkpoints.sentence_transformers.ACTIVATIONS
    num_labels: int
    max_length: int | None = None  # tokens a pair may have, special tokens included
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name, among the prompts, of the one that goes before every pair
    transformer_path: str = ""  # the transformer's folder inside the model's, "" when they are the same
    # What was read: the files beside the transformer, and the keys of config.json.
    _folder: SentenceFolder = field(repr=False, compare=False, kw_only=True)
    _marks: Json = field(repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        self._folder.merged(self._settings())  # refuses what no file may say
        if self.num_labels < 1:
            raise ConfigError(f"num_labels={self.num_labels} must be at least 1")

    @classmethod
    def from_folder(cls, path: str | Path, config: Json) -> CrossEncoderConfig | None:
        """Read a folder's marks; None for one that is not marked as a cross-encoder. `config` is its config.json."""
        root = Path(path)
        marks = {key: config[key] for key in cls.CONFIG_KEYS if key in config}
        folder = SentenceFolder.read(root, "CrossEncoder")
        if folder is None:
            # modules.json without the newest mark is a model of sentence vectors
            if (root / MODULES_FILE).is_file() or all(mark is None for mark in marks.values()):
                return None
            transformer = ModuleEntry("Transformer", "")
            settings = SentenceSettings(max_seq_length=tokenizer_limit(root, transformer))
            folder = SentenceFolder("CrossEncoder", [transformer], {}, TEXT_FILES[0], settings)
        if len(folder.entries) > 1:
            raise ConfigError(
                f"{MODULES_FILE}: a cross-encoder of {', '.join(entry.kind for entry in folder.entries)} is not "
                "supported; it must be a Transformer alone, with a head for sequence classification"
            )
        labels = len(ConfigKeys(config).labels())
        marked = _marked(config)
        dotted = folder.settings.activation_fn or marked
        activation = ACTIVATION_PATHS[dotted] if dotted else _default_activation(labels)
        settings = replace(folder.settings, activation_fn=f"torch.nn.{activation}")
        return cls._of(labels, activation, replace(folder, settings=settings), marks)

    @classmethod
    def create(
        cls,
        num_labels: int,
        activation: str | None = None,
        max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
    ) -> CrossEncoderConfig:
        """A new one. Without an activation it is the sigmoid for one label and none for several."""
        activation = activation or _default_activation(num_labels)
        dotted = f"torch.nn.{activation}"
        settings = SentenceSettings(max_length, False, dict(prompts or {}), default_prompt, activation_fn=dotted)
        folder = SentenceFolder.create("CrossEncoder", ["Transformer"], settings)
        # The mark is for versions 4.0 to 5.3, which do not read the files.
        return cls._of(num_labels, activation, folder, {MARK: {"activation_fn": dotted}})

    @classmethod
    def _of(cls, num_labels: int, activation: str, folder: SentenceFolder, marks: Json) -> CrossEncoderConfig:
        return cls(
            activation=activation,
            num_labels=num_labels,
            max_length=folder.settings.max_seq_length,
            lower_case=folder.settings.do_lower_case,
            prompts=folder.settings.prompts,
            default_prompt=folder.settings.default_prompt_name,
            transformer_path=folder.entries[0].path,
            _folder=folder,
            _marks=marks,
        )

    def module(self) -> nn.Module:
        """The activation, to be called on (B, num_labels) logits."""
        return ACTIVATIONS[self.activation]()

    def files(self) -> dict[str, bytes]:
        """What to write beside the transformer, by relative path; `config_entries` goes with them.

        A folder from before 5.4 has no such files, and gets none unless a change needs them.
        """
        now, folder = self._settings(), self._folder
        if not folder.json:
            if replace(now, activation_fn=folder.settings.activation_fn) == folder.settings:
                return {}
            folder = SentenceFolder.create("CrossEncoder", ["Transformer"], now)
        return folder.files(now)

    def config_entries(self) -> Json:
        """What belongs into config.json: whatever was there, kept true."""
        entries = dict(self._marks)
        dotted = f"torch.nn.{self.activation}"
        if dotted != self._folder.settings.activation_fn:
            if OLD_MARK in entries:
                entries[OLD_MARK] = dotted
            if MARK in entries:
                entries[MARK] = {**(entries[MARK] or {}), "activation_fn": dotted}
        return entries

    def _settings(self) -> SentenceSettings:
        dotted = f"torch.nn.{self.activation}"
        return SentenceSettings(
            self.max_length, self.lower_case, dict(self.prompts), self.default_prompt, activation_fn=dotted
        )


def _marked(config: Json) -> str | None:
    """The activation that config.json names."""
    keys = ConfigKeys(config, common=())
    keys.must(OLD_MARK, *ACTIVATION_PATHS)
    mark = ConfigKeys(keys.mapping(MARK, {}), ("version",), file=f"config.json: {MARK}", common=())
    mark.must("activation_fn", *ACTIVATION_PATHS)
    mark.finish()
    return mark.raw.get("activation_fn") or config.get(OLD_MARK)


def _default_activation(num_labels: int) -> str:
    return "Sigmoid" if num_labels == 1 else "Identity"
