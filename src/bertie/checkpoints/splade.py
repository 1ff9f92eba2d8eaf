"""Read and write the settings of SPLADE folders: sparse embeddings from the MLM head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bertie.checkpoints.sentence_transformers import MODULES_FILE, SentenceFolder, SentenceSettings
from bertie.errors import ConfigError

_TYPES = ("MLMTransformer", "SpladePooling")  # the names that every version of the sparse encoder reads


@dataclass(frozen=True)
class Splade:
    """The preprocessing of a SPLADE model, whose embeddings have one weight per vocabulary entry."""

    max_length: int | None = None  # of a text, in tokens, including special tokens
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # name of the prompt that precedes every text
    transformer_path: str = ""  # subfolder of the transformer; "": the folder itself
    _folder: SentenceFolder = field(repr=False, compare=False, kw_only=True)

    @classmethod
    def from_folder(cls, path: str | Path) -> Splade | None:
        """Read a folder; None if it is not a sparse encoder."""
        folder = SentenceFolder.read(Path(path), "SparseEncoder")
        if folder is None:
            return None
        kinds = [entry.kind for entry in folder.entries]
        if kinds != ["Transformer", "SpladePooling"]:
            raise ConfigError(
                f"{MODULES_FILE}: a sparse encoder of {', '.join(kinds)} is not supported; it must be a Transformer "
                "with an MLM head, then SpladePooling"
            )
        keys = folder.keys(folder.entries[1])
        keys.must("pooling_strategy", "max")
        keys.must("activation_function", "relu")
        keys.ignore(
            "embedding_dimension", "word_embedding_dimension", "chunk_size"
        )  # the vocabulary size; a runtime option
        keys.finish()
        settings = folder.settings
        return cls(
            settings.max_seq_length,
            settings.do_lower_case,
            settings.prompts,
            settings.default_prompt_name,
            folder.entries[0].path,
            _folder=folder,
        )

    @classmethod
    def create(cls, max_length: int | None = None) -> Splade:
        """The settings of a new model.

        >>> sorted(Splade.create().files())[:2]
        ['1_SpladePooling/config.json', 'config_sentence_transformers.json']
        """
        settings = SentenceSettings(max_length, similarity_fn_name="dot")
        folder = SentenceFolder.create("SparseEncoder", ["Transformer", "SpladePooling"], settings)
        for entry, name in zip(folder.json[MODULES_FILE], _TYPES, strict=True):
            entry["type"] = f"sentence_transformers.sparse_encoder.models.{name}"
        pooling = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}
        folder.json[folder.entries[1].inside("config.json")] = pooling
        return cls(max_length, _folder=folder)

    def files(self) -> dict[str, bytes]:
        """The files to write, by relative path."""
        return self._folder.files(replace(self._folder.settings, max_seq_length=self.max_length))
