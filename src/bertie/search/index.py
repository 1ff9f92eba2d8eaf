"""The index: documents in, ranked passages out, over any vector store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import numpy as np

from bertie.arguments import explain_arguments
from bertie.errors import BertieError, InputError, NotFoundError
from bertie.pipeline.language_warnings import one_warning
from bertie.pipeline.reporting import show_progress
from bertie.search.analyzer import Analyzer
from bertie.search.ask import DEFAULT_PASSAGES, AskResult, default_reader, read_passages
from bertie.search.document_input import DocumentColumns, count_documents, group_documents, read_input
from bertie.search.document_reader import Paths, ReadOptions
from bertie.search.file_changes import FileChanges
from bertie.search.filters import MetadataFilter, parse_filters
from bertie.search.index_config import check_model, index_config, load_embedder, make_chunker
from bertie.search.local_catalog import restore_checksums
from bertie.search.local_store import LocalStore
from bertie.search.locations import create_store, open_store
from bertie.search.model_identity import model_fingerprint
from bertie.search.passage_indexes import PassageIndexes, derived_config
from bertie.search.records import Document, EmbeddedDocument, FloatArray, IndexUpdate
from bertie.search.searcher import DEFAULT_DEPTH, Searcher, SearchHit, SearchMode, SearchResults
from bertie.search.vector_block import EmbeddingPrecision
from bertie.search.vector_store import VectorStore
from bertie.tasks.display import html_table, shorten

if TYPE_CHECKING:
    from bertie.search.chunking import Chunker
    from bertie.search.searcher import AnyReranker
    from bertie.tasks.answer import Reader
    from bertie.tasks.embed import Embedder
    from bertie.tasks.late_interaction import LateInteraction
    from bertie.tasks.sparse import SparseEmbedder

__all__ = ["Index", "IndexUpdate", "SearchHit", "SearchResults", "model_fingerprint"]

COMMIT_PASSAGES = 1024  # passages per commit, at least


class Index(PassageIndexes):
    """A searchable index of the passages of documents: dense, lexical (BM25), sparse (SPLADE) or hybrid.

    Its location is a folder; or `postgresql://…`, a database with pgvector, where `#NAME` at the
    end selects one of several indexes; or `lance://FOLDER`, for more passages than fit into memory.

    >>> index = Index.create("my-index")                                                     # doctest: +SKIP
    >>> index.refresh("docs/")                   # files; call it again after changes        # doctest: +SKIP
    IndexUpdate(added=120, changed=0, unchanged=0, deleted=0, passages=913)
    >>> index.add(["A text that is not in a file."])                                         # doctest: +SKIP
    >>> for hit in index.search("how is text split?", k=3, where={"path": "docs/search.md"}):  # doctest: +SKIP
    ...     print(hit.score, hit.document, hit.text[:60])

    Commits are durable: an interrupted run loses at most its last few thousand passages, and
    running it again resumes from there. One process can write at a time, any number can read.
    """

    progress: bool | None = None  # whether to show progress bars; None: on a terminal or in a notebook

    def __init__(self, store: VectorStore, embedder: Embedder | None = None) -> None:
        if isinstance(store, str | Path):
            raise InputError(f"use Index.open({str(store)!r}), or Index.create for a new index")
        super().__init__()
        self.store, self._embedder = store, embedder
        self._chunker: Chunker | None = None
        self._versions: tuple[int, dict[str, str]] | None = None  # generation, and versions of documents by id
        if embedder is not None:
            check_model(embedder, self.store.dimension, self.config)

    @classmethod
    @explain_arguments
    def create(
        cls,
        location: str | Path,
        model: str | Path | Embedder | None = None,
        *,
        chunk_size: int | None = None,
        chunk_overlap: int | None = None,
        embedding_precision: EmbeddingPrecision = "fp32",
        language: str | None = "english",
        sparse: str | Path | SparseEmbedder | None = None,
        late_interaction: str | Path | LateInteraction | None = None,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
    ) -> Self:
        """Create an empty index for the embeddings of a model, by default the built-in one.

        Passages have at most `chunk_size` tokens and overlap by `chunk_overlap`: 256 and 32, or
        less if the model's maximum length is smaller. `embedding_precision` of an index in a
        folder is "fp32", "int8" (a quarter of the size) or "binary" (bits for retrieval, int8 for
        scoring); the index can be searched with the model in any precision. `language` selects the
        stemmer and the stop words of lexical search, None disables both. `query_prompt` and
        `passage_prompt`, such as "query: " and "passage: ", are prepended to queries and passages
        before embedding; by default they are the checkpoint's prompts "query", and "passage" or
        "document", if it has them. An index in a folder can also store sparse embeddings (`sparse`,
        a SPLADE model) and token embeddings for reranking (`late_interaction`, a ColBERT model).
        """
        embedder = load_embedder(model)
        config = index_config(
            embedder,
            chunk_size=chunk_size,
            chunk_overlap=chunk_overlap,
            embedding_precision=embedding_precision,
            language=language,
            query_prompt=query_prompt,
            passage_prompt=passage_prompt,
        )
        derived, sparse_embedder, late = derived_config(location, sparse, late_interaction)
        make_chunker(embedder, config["chunk_size"], config["chunk_overlap"])
        Analyzer(language)
        index = cls(create_store(location, embedder.dimension, config | derived), embedder)
        index._sparse, index._late = sparse_embedder, late
        return index

    @classmethod
    def open(cls, location: str | Path, model: str | Path | Embedder | None = None, *, verify: bool = False) -> Self:
        """Open an index.

        `model` is its model, in any precision; by default it is loaded from its recorded location when first used.
        `verify`: whether to call `verify()` first.
        """
        store = open_store(location)
        try:
            if verify:
                cls(store).verify()
            return cls(store, None if model is None else load_embedder(model))
        except BaseException:
            store.close()
            raise

    @classmethod
    def rebuild(cls, folder: str | Path, model: str | Path | Embedder | None = None) -> int:
        """Rebuild corrupt files from the passages; return the number of passages embedded again."""
        restore_checksums(Path(folder))
        store = LocalStore(Path(folder), check_segments=False)
        with cls(store, None if model is None else load_embedder(model)) as index:
            return store.repair(index.embed)

    def close(self) -> None:
        """Release connections and files."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.store)

    def _facts(self) -> dict[str, object]:
        names = ("model", "chunk_size", "embedding_precision", "language")
        place = str(getattr(self.store, "folder", type(self.store).__name__))
        return {"location": place, "passages": len(self), **{name: self.config.get(name) for name in names}}

    def __repr__(self) -> str:
        return f"Index({', '.join(f'{name}={shorten(value)}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html_table("Index", self._facts())

    def verify(self) -> None:
        """Read everything, and raise an error that names what is corrupt."""
        self.store.verify()
        self._verify_derived()

    # --- the model ---

    @property
    def embedder(self) -> Embedder:
        """The model, loaded when first used."""
        if self._embedder is None:
            name = self.config["model"]
            try:
                embedder = load_embedder(name)
            except NotFoundError as error:
                raise NotFoundError(
                    f"the model of the index, {name}, was not found: pass its current location ({error})"
                ) from None
            check_model(embedder, self.store.dimension, self.config)
            self._embedder = embedder
        return self._embedder

    @property
    def loaded_embedder(self) -> Embedder | None:
        """The model, if it was passed or has been used."""
        return self._embedder

    @property
    def chunker(self) -> Chunker:
        """The chunker that splits documents."""
        if self._chunker is None:
            self._chunker = make_chunker(self.embedder, self.config["chunk_size"], self.config["chunk_overlap"])
        return self._chunker

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> FloatArray:
        """Return unit-length embeddings of texts, (n, D); `prompt` defaults to the index's passage prompt."""
        prompt = self.config["passage_prompt"] if prompt is None else prompt
        embeddings = self.embedder.embed(texts, prompt=prompt, progress=False)
        unit: FloatArray = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
        return unit

    # --- writing ---

    @explain_arguments
    @one_warning()
    def add(
        self,
        documents: Any,
        *,
        text: str = "text",
        id: str | None = None,
        metadata: Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> IndexUpdate:
        """Add documents, or update those with the same id.

        `documents`: a text, a `Document`, a dict, or a list or generator of these; or a table: a pandas or polars
        DataFrame, a pyarrow table, a Dataset, or a dict of columns. `text`, `id` and `metadata` select columns or keys.
        By default ids are read from "id" or "_id"; without such a column, they are hashes of the content. All other
        columns with scalar values become metadata, unless `metadata` is given. For files, use `refresh`.

        `progress`: whether to show a progress bar; defaults to the attribute `progress`.

        >>> index.add([{"id": "a", "text": "The Rhine is long.", "year": 1999}])                 # doctest: +SKIP
        IndexUpdate(added=1, changed=0, unchanged=0, deleted=0, passages=1)
        """
        known = self._known_versions()
        total, read, unchanged = count_documents(documents), 0, 0
        source = read_input(documents, DocumentColumns(text, id, metadata))

        def new_documents() -> Iterator[Document]:
            nonlocal read, unchanged
            seen: set[str] = set()
            for document, has_id in source:
                read += 1
                if document.id in seen and has_id:
                    raise InputError(f"duplicate document id {document.id!r}; ids must be unique")
                if document.id in seen or known.get(document.id) == document.version:
                    unchanged += 1
                    continue
                seen.add(document.id)
                yield document

        with self.progress_bar(progress, lambda: read / total if total else None):
            update = self.write(map(self.embed_documents, group_documents(new_documents())), known)
        return replace(update, unchanged=unchanged)

    def progress_bar(
        self, progress: bool | None = None, fraction: Callable[[], float | None] | None = None
    ) -> AbstractContextManager[None]:
        """Return a progress bar for `write`; `progress` defaults to the attribute of that name."""
        shown = self.progress if progress is None else progress
        return show_progress("index", None, shown, "passages", fraction=fraction)

    def _known_versions(self) -> dict[str, str]:
        """Return document versions by id, cached so that adding one by one stays linear."""
        generation = self.store.generation
        if self._versions is None or self._versions[0] != generation:
            self._versions = generation, {id: version for id, _, version in self.store.documents()}
        return self._versions[1]

    def _commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        self.store.commit(put, delete)
        if self._versions is not None:
            generation, versions = self._versions
            for id in delete:
                versions.pop(id, None)
            versions |= {embedded.document.id: embedded.document.version for embedded in put}
            self._versions = generation + 1, versions

    def delete(self, ids: Iterable[str]) -> IndexUpdate:
        """Delete documents; unknown ids are ignored."""
        if isinstance(ids, str):
            raise InputError(f"delete takes a list of ids, not the text {ids!r:.80}")
        requested = set(ids)
        existing = [id for id in self._known_versions() if id in requested]
        if existing:
            self._commit([], existing)
            self.store.optimize()
        return IndexUpdate(deleted=len(existing))

    @one_warning()
    def refresh(self, paths: Paths, **options: Unpack[ReadOptions]) -> IndexUpdate:
        """Synchronize the index with files: embed new and modified documents, delete missing ones.

        Documents from outside `paths` are kept. `options`: see `bertie.search.document_reader.read_documents`.
        """
        changes = FileChanges(paths, self.store.documents(), **options)
        with self.progress_bar():
            update = self.write(map(self.embed_documents, group_documents(changes)), deleted=lambda: changes.deleted)
        return replace(update, added=changes.added, changed=changes.changed, unchanged=changes.unchanged)

    def write(
        self,
        batches: Iterable[Sequence[EmbeddedDocument]],
        known: Collection[str] = (),
        deleted: Callable[[], Sequence[str]] = lambda: (),
    ) -> IndexUpdate:
        """Commit batches of `embed_documents`, computed anywhere, and then delete documents.

        Documents with `known` ids count as changed. If `batches` raises, all complete batches are still committed.
        """
        added = changed = passages = safe = 0
        pending: list[EmbeddedDocument] = []
        self._propagate_progress()
        try:
            for batch in batches:
                pending += batch
                new = sum(embedded.document.id not in known for embedded in batch)
                added, changed = added + new, changed + len(batch) - new
                passages += sum(len(embedded.passages) for embedded in batch)
                if sum(len(embedded.passages) for embedded in pending) >= COMMIT_PASSAGES:
                    self._commit(pending)
                    safe += len(pending)
                    pending = []
        except BaseException as error:
            if isinstance(error, BertieError | KeyboardInterrupt):  # documents before a bad file are good
                with suppress(BertieError):  # such as a full disk, most likely the original error
                    self._commit(pending)
                    safe += len(pending)
            if safe:
                error.add_note(f"{safe:,} documents are committed, and will not be embedded again")
            raise
        ids = list(deleted())
        if pending or ids:
            self._commit(pending, ids)
        if passages or ids:
            self.store.optimize()
        return IndexUpdate(added, changed, 0, len(ids), passages)

    def embed_documents(self, documents: Sequence[Document]) -> list[EmbeddedDocument]:
        """Split documents into passages and embed them; the result is a batch for `write`."""
        split = self.chunker.split_batch(documents)
        embeddings = self.embed([passage.text for passages in split for passage in passages])
        embedded, start = [], 0
        for document, passages in zip(documents, split, strict=True):
            embedded.append(EmbeddedDocument(document, passages, embeddings[start : start + len(passages)]))
            start += len(passages)
        return embedded

    def _propagate_progress(self) -> None:
        if isinstance(self.store, LocalStore):
            self.store.progress = bool(self.progress)

    def optimize(self) -> None:
        """Compact the index for the fastest search; takes minutes for millions of passages."""
        self._propagate_progress()
        self.store.optimize(full=True)

    # --- searching ---

    @explain_arguments
    def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: SearchMode = "hybrid",
        rerank: AnyReranker | None = None,
        where: Mapping[str, Any] | Sequence[MetadataFilter] = (),
        rerank_weight: float | None = None,
        depth: int = DEFAULT_DEPTH,
        weights: Mapping[str, float] | None = None,
        prompt: str | None = None,
    ) -> SearchResults:
        """Return the k best passages for a query.

        `mode` is "dense" (embeddings), "lexical" (BM25), "sparse" (SPLADE, if the index has such a model), or "hybrid"
        (all that the index has, combined by reciprocal rank fusion). `rerank`, a cross-encoder or a late-interaction
        model, reranks the best `depth` passages. `rerank_weight` defaults to 1 for a separate model and to 0.2 for one
        of several heads of a model. Below 1, the final score is an interpolation: `rerank_weight` times the reranker's
        score plus `1 - rerank_weight` times the retrieval score, both min-max normalized. `where` filters documents by
        metadata: `{"lang": "en", "year >=": 1990, "topic": ["a", "b"]}`.

        `weights`, such as `{"dense": 1, "lexical": 0.3, "rerank": 2}`, replaces rank fusion with a weighted sum of
        min-max normalized scores, which includes the reranker's. `bertie eval --beir --tune` finds good weights.
        `prompt` is prepended to the query before embedding; it defaults to the index's query prompt.
        """
        if not isinstance(query, str):
            advice = "; use search_batch for several queries" if isinstance(query, Iterable) else ""
            raise InputError(f"search takes a query, a str, not {type(query).__name__}{advice}")
        options: dict[str, Any] = {"rerank": rerank, "rerank_weight": rerank_weight, "where": where, "depth": depth}
        return self.search_batch([query], k, mode=mode, weights=weights, prompt=prompt, **options)[0]

    @explain_arguments
    def search_batch(
        self,
        queries: Sequence[str],
        k: int = 10,
        *,
        mode: SearchMode = "hybrid",
        rerank: AnyReranker | None = None,
        where: Mapping[str, Any] | Sequence[MetadataFilter] = (),
        rerank_weight: float | None = None,
        depth: int = DEFAULT_DEPTH,
        weights: Mapping[str, float] | None = None,
        prompt: str | None = None,
    ) -> list[SearchResults]:
        """Search for several queries in one batch: the same results as `search`, but faster."""
        if isinstance(queries, str):
            raise InputError("search_batch takes a list of queries; pass a single one to search")
        filters = parse_filters(where)
        stages: dict[str, Any] = {"reranker": rerank, "rerank_weight": rerank_weight, "weights": weights}
        options: dict[str, Any] = {"depth": depth, "prompt": prompt, "has_sparse": self.has_sparse}
        searcher = Searcher(k=k, mode=mode, where=filters, **options, **stages)
        return searcher.run(self, queries) if queries else []

    @explain_arguments
    def ask(
        self,
        question: str,
        k: int = DEFAULT_PASSAGES,
        *,
        reader: Reader | None = None,
        top_k: int = 1,
        no_answer_threshold: float | None = None,
        rerank: AnyReranker | None = None,
        mode: SearchMode = "hybrid",
        where: Mapping[str, Any] | Sequence[MetadataFilter] = (),
    ) -> AskResult:
        """Answer a question from the k best passages, with the location of each answer.

        `reader` defaults to the question answering head of the index's model, or to the built-in model if it has none.
        Up to `top_k` answers are returned; none if the probability of "no answer" exceeds `no_answer_threshold`, which
        defaults to the reader's. `rerank`, `mode` and `where`: see `search`.

        >>> index.ask("Who wrote Emma?").best                                                    # doctest: +SKIP
        FoundAnswer(text='Jane Austen', score=0.98, document='novels.md', start=24, end=35, …)
        """
        results = self.search(question, k, mode=mode, rerank=rerank, where=where)
        reader = default_reader(self) if reader is None else reader
        return read_passages(results, reader, top_k=top_k, no_answer_threshold=no_answer_threshold)
