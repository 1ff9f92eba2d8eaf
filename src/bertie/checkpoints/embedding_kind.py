"""What kind of embeddings a folder's model was trained for, told by its JSON files alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from bertie.checkpoints.hub import is_built_in, resolve
from bertie.checkpoints.late_interaction import STANFORD
from bertie.checkpoints.sentence_transformers import MODEL_FILE, model_type_of, read_json

EmbeddingKind = Literal["dense", "sparse", "late-interaction"]


def embedding_kind(name: str | Path, revision: str | None = None) -> EmbeddingKind:
    """The kind of embeddings of a model; "dense" for any other encoder.

    >>> embedding_kind("bertie-small")
    'dense'
    """
    if is_built_in(name):
        return "dense"
    folder = resolve(name, revision)
    model_type = model_type_of(read_json(folder, MODEL_FILE) or {})
    if model_type == "SparseEncoder":
        return "sparse"
    stanford = STANFORD in ((read_json(folder, "config.json") or {}).get("architectures") or ())
    return "late-interaction" if stanford or model_type in ("ColBERT", "MultiVectorEncoder") else "dense"
