"""Documents in, passages out: chunking, indexes, and search over them."""

from bertie.search.records import Document, MetadataFilter

__all__ = ["Document", "MetadataFilter"]
