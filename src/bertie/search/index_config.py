"""The configuration stored with a new index, its model and its chunker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertie._version import __version__
from bertie.errors import InputError
from bertie.search.model_identity import model_fingerprint
from bertie.tasks.prompts import DOCUMENT_PROMPTS, QUERY_PROMPTS, find_prompt

if TYPE_CHECKING:
    from bertie.search.chunking import Chunker
    from bertie.search.vector_block import EmbeddingPrecision
    from bertie.tasks.embed import Embedder

CHUNK_SIZE, CHUNK_OVERLAP = 256, 32  # tokens


def index_config(
    embedder: Embedder,
    *,
    chunk_size: int | None,
    chunk_overlap: int | None,
    embedding_precision: EmbeddingPrecision,
    language: str | None,
    query_prompt: str | None = None,
    passage_prompt: str | None = None,
) -> dict[str, Any]:
    """The configuration of an index for a model's embeddings; see `Index.create` for the defaults."""
    from bertie.checkpoints.hub import absolute_name

    chunk_size = min(CHUNK_SIZE, embedder.checkpoint.max_length) if chunk_size is None else chunk_size
    return {
        "bertie": __version__,
        "model": absolute_name(embedder.checkpoint.source),
        "fingerprint": model_fingerprint(embedder),
        "model_precision": embedder.checkpoint.precision,
        "embedding_precision": embedding_precision,
        "chunk_size": chunk_size,
        "chunk_overlap": min(CHUNK_OVERLAP, chunk_size // 8) if chunk_overlap is None else chunk_overlap,
        "language": language,
        "query_prompt": prompt_before(embedder, query_prompt, QUERY_PROMPTS),
        "passage_prompt": prompt_before(embedder, passage_prompt, DOCUMENT_PROMPTS),
    }


def prompt_before(embedder: Embedder, prompt: str | None, names: Sequence[str]) -> str:
    """Return `prompt`, by default the checkpoint's first prompt with one of these names, or its default prompt."""
    return embedder.prompt_text(prompt, find_prompt(embedder.modules.prompts, names) if prompt is None else None)


def make_chunker(embedder: Embedder, size: int, overlap: int) -> Chunker:
    """The chunker that splits documents for a model."""
    from bertie.search.chunking import Chunker

    return Chunker(embedder.tokenizer, size, overlap)


def load_embedder(model: str | Path | Embedder | None) -> Embedder:
    """Return the embedder of an index, loaded if given by name; by default the built-in model."""
    from bertie.tasks.embed import Embedder

    return model if isinstance(model, Embedder) else Embedder.load(model)


def check_model(embedder: Embedder, dimension: int, config: Mapping[str, Any]) -> None:
    """Reject a model other than that of the index, since their embeddings cannot be compared."""
    if embedder.dimension != dimension or model_fingerprint(embedder) != config["fingerprint"]:
        raise InputError(
            f"the index was built with {config['model']} (dimension {dimension}); "
            f"{embedder.checkpoint.source} (dimension {embedder.dimension}) is another model, or was trained "
            "further since; open the index with the model it was built with, or build another index"
        )
