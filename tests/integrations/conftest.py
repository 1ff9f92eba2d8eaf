"""The built-in model's tasks, loaded once."""

from __future__ import annotations

import pytest

from bertie import Embedder, Reader, Reranker

CATS = ["Bread is baked from flour.", "Cats eat meat and fish.", "The stock market fell on Friday."]
EMMA = ["Cats eat meat.", "Emma is a novel of 1815. It was written by Jane Austen."]


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder.load()


@pytest.fixture(scope="session")
def reranker() -> Reranker:
    return Reranker.load()


@pytest.fixture(scope="session")
def reader() -> Reader:
    return Reader.load()
