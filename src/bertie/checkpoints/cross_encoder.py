"""Read and write the cross-encoder settings of a folder: activation function, maximum length, prompts.

sentence-transformers has stored them in three formats:

    up to 3.x     config.json: "sbert_ce_default_activation_function"
    4.0 to 5.3    config.json: "sentence_transformers": {"activation_fn": …, "version": …}
    since 5.4     modules.json with a Transformer alone, sentence_bert_config.json, and
                  config_sentence_transformers.json: "model_type": "CrossEncoder", "activation_fn", "prompts", …

Newer formats take precedence over older ones, as in sentence-transformers.
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

ENTRY, OLD_ENTRY = "sentence_transformers", "sbert_ce_default_activation_function"


@dataclass(frozen=True)
class CrossEncoderConfig:
    """The activation function of a cross-encoder's scores, and the preprocessing of its pairs.

    >>> CrossEncoderConfig.create(num_labels=1).activation
    'Sigmoid'
    """

    # Keys of config.json that are read here, and not by the family's table.
    CONFIG_KEYS: ClassVar[tuple[str, ...]] = (ENTRY, OLD_ENTRY)

    activation: str  # a name in bertie.checkpoints.sentence_transformers.ACTIVATIONS
    num_labels: int
    max_length: int | None = None  # of a pair, in tokens, including special tokens
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # name of the prompt that precedes every pair
    transformer_path: str = ""  # subfolder of the transformer; "": the folder itself
    # The original files, and the entries of config.json.
    _folder: SentenceFolder = field(repr=False, compare=False, kw_only=True)
    _entries: Json = field(repr=False, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        self._folder.merged(self._settings())  # raises for invalid settings
        if self.num_labels < 1:
            raise ConfigError(f"num_labels={self.num_labels} must be at least 1")

    @classmethod
    def from_folder(cls, path: str | Path, config: Json) -> CrossEncoderConfig | None:
        """Read a folder with this config.json; None if it is not a cross-encoder."""
        root = Path(path)
        entries = {key: config[key] for key in cls.CONFIG_KEYS if key in config}
        folder = SentenceFolder.read(root, "CrossEncoder")
        if folder is None:
            # modules.json of another model type is a sentence embedding model
            if (root / MODULES_FILE).is_file() or all(entry is None for entry in entries.values()):
                return None
            transformer = ModuleEntry("Transformer", "")
            settings = SentenceSettings(max_seq_length=tokenizer_limit(root, transformer))
            folder = SentenceFolder("CrossEncoder", [transformer], {}, TEXT_FILES[0], settings)
        if len(folder.entries) > 1:
            raise ConfigError(
                f"{MODULES_FILE}: a cross-encoder of {', '.join(entry.kind for entry in folder.entries)} is not "
                "supported; it must be a single Transformer with a sequence classification head"
            )
        labels = len(ConfigKeys(config).labels())
        dotted = folder.settings.activation_fn or _configured_activation(config)
        activation = ACTIVATION_PATHS[dotted] if dotted else _default_activation(labels)
        settings = replace(folder.settings, activation_fn=f"torch.nn.{activation}")
        return cls._of(labels, activation, replace(folder, settings=settings), entries)

    @classmethod
    def create(
        cls,
        num_labels: int,
        activation: str | None = None,
        max_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
    ) -> CrossEncoderConfig:
        """Create the settings. The default activation is the sigmoid for one label, the identity for several."""
        activation = activation or _default_activation(num_labels)
        dotted = f"torch.nn.{activation}"
        settings = SentenceSettings(max_length, False, dict(prompts or {}), default_prompt, activation_fn=dotted)
        folder = SentenceFolder.create("CrossEncoder", ["Transformer"], settings)
        # The entry of config.json is for versions 4.0 to 5.3, which do not read the files.
        return cls._of(num_labels, activation, folder, {ENTRY: {"activation_fn": dotted}})

    @classmethod
    def _of(cls, num_labels: int, activation: str, folder: SentenceFolder, entries: Json) -> CrossEncoderConfig:
        return cls(
            activation=activation,
            num_labels=num_labels,
            max_length=folder.settings.max_seq_length,
            lower_case=folder.settings.do_lower_case,
            prompts=folder.settings.prompts,
            default_prompt=folder.settings.default_prompt_name,
            transformer_path=folder.entries[0].path,
            _folder=folder,
            _entries=entries,
        )

    def module(self) -> nn.Module:
        """The activation function of (B, num_labels) logits."""
        return ACTIVATIONS[self.activation]()

    def files(self) -> dict[str, bytes]:
        """The files to write next to the transformer, by relative path, together with `config_entries`.

        A folder of a version before 5.4 has none of these files, and gets them only if a change needs them.
        """
        now, folder = self._settings(), self._folder
        if not folder.json:
            if replace(now, activation_fn=folder.settings.activation_fn) == folder.settings:
                return {}
            folder = SentenceFolder.create("CrossEncoder", ["Transformer"], now)
        return folder.files(now)

    def config_entries(self) -> Json:
        """The entries of config.json: the original ones, with the current activation."""
        entries = dict(self._entries)
        dotted = f"torch.nn.{self.activation}"
        if dotted != self._folder.settings.activation_fn:
            if OLD_ENTRY in entries:
                entries[OLD_ENTRY] = dotted
            if ENTRY in entries:
                entries[ENTRY] = {**(entries[ENTRY] or {}), "activation_fn": dotted}
        return entries

    def _settings(self) -> SentenceSettings:
        dotted = f"torch.nn.{self.activation}"
        return SentenceSettings(
            self.max_length, self.lower_case, dict(self.prompts), self.default_prompt, activation_fn=dotted
        )


def _configured_activation(config: Json) -> str | None:
    """The activation function in config.json."""
    keys = ConfigKeys(config, common=())
    keys.must(OLD_ENTRY, *ACTIVATION_PATHS)
    entry = ConfigKeys(keys.mapping(ENTRY, {}), ("version",), file=f"config.json: {ENTRY}", common=())
    entry.must("activation_fn", *ACTIVATION_PATHS)
    entry.finish()
    return entry.raw.get("activation_fn") or config.get(OLD_ENTRY)


def _default_activation(num_labels: int) -> str:
    return "Sigmoid" if num_labels == 1 else "Identity"
