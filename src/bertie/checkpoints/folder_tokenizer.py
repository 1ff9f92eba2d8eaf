"""The tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertie.checkpoints import storage
from bertie.checkpoints.model_spec import FAMILIES, legacy_tokenizer
from bertie.errors import CheckpointError
from bertie.text.tokenizer import Tokenizer

VOCABULARIES = ("vocab.txt", "vocab.json", "spm.model", "spiece.model", "sentencepiece.bpe.model")


def folder_tokenizer(folder: Path, model_type: Any) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no vocabulary, as with some protein and genome encoders."""
    settings = folder / "tokenizer_config.json"
    class_name = storage.read_json(settings).get("tokenizer_class") if storage.is_file(settings) else None
    if not isinstance(class_name, str | None):
        raise CheckpointError(f"tokenizer_config.json: tokenizer_class={class_name!r:.80} must be a name")
    legacy = legacy_tokenizer(model_type, class_name) if model_type in FAMILIES else None
    if not any(storage.is_file(folder / file) for file in ("tokenizer.json", *VOCABULARIES)):
        return None
    return Tokenizer.from_folder(folder, legacy)


def check_vocabulary(tokenizer: Tokenizer | None, vocab: int) -> Tokenizer | None:
    """The tokenizer itself; one with more tokens than the model has embeddings is refused."""
    if tokenizer is not None and tokenizer.vocab_size > vocab:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {vocab}: they do not belong together"
        )
    return tokenizer
