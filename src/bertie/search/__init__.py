"""Hybrid search over documents: chunking, embedding, vector stores, BM25, fusion and reranking."""

from bertie.search.filters import MetadataFilter
from bertie.search.records import Document

__all__ = ["Document", "MetadataFilter"]
