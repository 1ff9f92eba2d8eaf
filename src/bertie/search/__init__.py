"""Documents in, passages out: chunking, indexes, and search over them."""

from bertie.search.passages import Document, Where

__all__ = ["Document", "Where"]
