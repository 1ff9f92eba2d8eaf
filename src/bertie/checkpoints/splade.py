"""How a folder says that it holds a SPLADE model, whose head for masked words gives sparse vectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bertie.checkpoints.sentence_transformers import MODULES_FILE, SentenceFolder
from bertie.errors import ConfigError


@dataclass(frozen=True)
class Splade:
    """That a text's vector has the weight of each word of the vocabulary, and how texts are to be prepared."""

    max_length: int | None = None  # tokens a text may have, special tokens included
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name, among the prompts, of the one that goes before every text
    transformer_path: str = ""  # the transformer's folder inside the model's, "" when they are the same
    _folder: SentenceFolder = field(repr=False, compare=False, kw_only=True)

    @classmethod
    def from_folder(cls, path: str | Path) -> Splade | None:
        """Read a folder's files; None for one that does not hold such a model."""
        folder = SentenceFolder.read(Path(path), "SparseEncoder")
        if folder is None:
            return None
        kinds = [entry.kind for entry in folder.entries]
        if kinds != ["Transformer", "SpladePooling"]:
            raise ConfigError(
                f"{MODULES_FILE}: a sparse encoder of {', '.join(kinds)} is not supported; it must be a Transformer "
                "with a head for masked words, then SpladePooling"
            )
        keys = folder.keys(folder.entries[1])
        keys.must("pooling_strategy", "max")
        keys.must("activation_function", "relu")
        keys.ignore("embedding_dimension", "word_embedding_dimension", "chunk_size")  # the vocabulary's; how it is run
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

    def files(self) -> dict[str, bytes]:
        """What to write, by relative path."""
        return self._folder.files(replace(self._folder.settings, max_seq_length=self.max_length))
