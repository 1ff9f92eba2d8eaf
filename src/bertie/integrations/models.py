"""What the adapters share: loading a model, and the prompts of queries and documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from bertie.tasks.base import Task
from bertie.tasks.embed import Embedder
from bertie.tasks.prompts import DOCUMENT_PROMPTS, QUERY_PROMPTS, find_prompt

T = TypeVar("T", bound=Task[Any, Any, Any])


def load_task(kind: type[T], model: T | str | Path | None, **options: Any) -> T:
    """The task itself, or the one of a folder or hub id, by default of the built-in model."""
    return model if isinstance(model, kind) else kind.load(model, **options)  # type: ignore[arg-type]


def embed_query(embedder: Embedder, text: str, prompt: str | None = None) -> list[float]:
    """Embed a query with `prompt` before it, by default the checkpoint's prompt for queries."""
    return embed(embedder, [text], prompt, QUERY_PROMPTS)[0]


def embed_documents(embedder: Embedder, texts: Sequence[str], prompt: str | None = None) -> list[list[float]]:
    """Embed documents with `prompt` before each, by default the checkpoint's prompt for documents."""
    return embed(embedder, texts, prompt, DOCUMENT_PROMPTS)


def embed(embedder: Embedder, texts: Sequence[str], prompt: str | None, names: Sequence[str]) -> list[list[float]]:
    """Embed texts into lists of floats, with a prompt, or the first of the checkpoint's with one of these names."""
    name = find_prompt(embedder.modules.prompts, names) if prompt is None else None
    rows: list[list[float]] = embedder.embed(list(texts), prompt=prompt, prompt_name=name, progress=False).tolist()
    return rows
