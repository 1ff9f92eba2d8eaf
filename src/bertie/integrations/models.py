"""Helpers of the adapters: load a model, and embed with query and document prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from bertie.tasks.base import Task
from bertie.tasks.embed import Embedder
from bertie.tasks.prompts import DOCUMENT_PROMPTS, QUERY_PROMPTS, find_prompt

T = TypeVar("T", bound=Task[Any, Any, Any])


def load_task(kind: type[T], model: T | str | Path | None, **options: Any) -> T:
    """Load a task from a folder or hub id, by default the built-in model; a task is returned unchanged."""
    return model if isinstance(model, kind) else kind.load(model, **options)  # type: ignore[arg-type]


def embed_query(embedder: Embedder, text: str, prompt: str | None = None) -> list[float]:
    """Embed a query with a prepended `prompt`, by default the checkpoint's query prompt."""
    return embed(embedder, [text], prompt, QUERY_PROMPTS)[0]


def embed_documents(embedder: Embedder, texts: Sequence[str], prompt: str | None = None) -> list[list[float]]:
    """Embed documents with a prepended `prompt`, by default the checkpoint's document prompt."""
    return embed(embedder, texts, prompt, DOCUMENT_PROMPTS)


def embed(embedder: Embedder, texts: Sequence[str], prompt: str | None, names: Sequence[str]) -> list[list[float]]:
    """Embed texts into lists of floats, with `prompt` or else the checkpoint's first prompt among `names`."""
    name = find_prompt(embedder.modules.prompts, names) if prompt is None else None
    rows: list[list[float]] = embedder.embed(list(texts), prompt=prompt, prompt_name=name, progress=False).tolist()
    return rows
