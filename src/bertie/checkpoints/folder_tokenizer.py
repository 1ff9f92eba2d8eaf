"""The tokenizer of a checkpoint's folder."""

from __future__ import annotations

from pathlib import Path

from bertie.checkpoints import storage
from bertie.checkpoints.model_spec import ModelSpec, legacy_tokenizer
from bertie.errors import CheckpointError
from bertie.text.tokenizer import Tokenizer

VOCABULARIES = ("vocab.txt", "vocab.json", "spm.model", "spiece.model", "sentencepiece.bpe.model")


def read_tokenizer(folder: Path, spec: ModelSpec) -> Tokenizer | None:
    """The folder's tokenizer; None if it has no vocabulary, as with some protein and genome encoders."""
    settings = folder / "tokenizer_config.json"
    class_name = storage.read_json(settings).get("tokenizer_class") if storage.is_file(settings) else None
    if not isinstance(class_name, str | None):
        raise CheckpointError(f"tokenizer_config.json: tokenizer_class={class_name!r:.80} must be a name")
    legacy = legacy_tokenizer(spec.family.model_type, class_name)
    if not any(storage.is_file(folder / file) for file in ("tokenizer.json", *VOCABULARIES)):
        return None
    tokenizer = Tokenizer.from_folder(folder, legacy)
    if tokenizer.vocab_size > spec.encoder.vocab:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {spec.encoder.vocab}: they do not "
            "belong together"
        )
    return tokenizer
