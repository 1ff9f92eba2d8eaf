"""Documents in, passages out: the index that people use, over any store."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack

import numpy as np

from bertie._version import __version__
from bertie.data.progress import Progress
from bertie.errors import BertieError, InputError, MissingPackageError, NotFoundError
from bertie.search.bm25 import Analyzer, BM25Index, refresh_bm25
from bertie.search.document_reader import FileChanges, Paths, ReadOptions
from bertie.search.fusion import check_weights, reciprocal, weighted
from bertie.search.local_store import LocalStore
from bertie.search.records import (
    Document,
    EmbeddedDocument,
    FloatArray,
    Keys,
    MetadataFilter,
    MetadataValue,
    StoredPassage,
    VectorStore,
    parse_filters,
)
from bertie.search.segments import EmbeddingPrecision

if TYPE_CHECKING:
    from bertie.search.chunking import Chunker
    from bertie.tasks.embed import Embedder
    from bertie.tasks.rerank import Reranker

Mode = Literal["hybrid", "dense", "lexical"]
MODES = ("hybrid", "dense", "lexical")
NAME = "bertie"  # of an index in a database, if the place names none
SIZE, OVERLAP = 256, 32  # tokens of a passage, and those it shares with the one before
DEPTH = 100  # passages that each way of searching gives to the next stage
AT_ONCE = 1024  # passages that are committed together, which is what a kill may cost
CHARACTERS = 1 << 20  # of documents that are cut and embedded together

Queries = Sequence[str]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A passage that was found. `score` is that of the last stage, and `scores` are those of each that named it."""

    document: str  # its id
    text: str
    start: int  # in the document
    end: int
    headings: tuple[str, ...]
    score: float
    scores: Mapping[str, float]  # dense: cosine; lexical: BM25; fused: of reciprocal ranks; rerank: the model's
    highlights: tuple[tuple[int, int], ...]  # of words of the query, in `text`
    metadata: Mapping[str, MetadataValue]
    source: str | None  # the file that the document was read from


@dataclass(frozen=True, slots=True)
class SearchResults(Sequence[SearchHit]):
    """What was found for a query, best first, and how many seconds each stage took of it."""

    query: str
    hits: tuple[SearchHit, ...]
    timings: Mapping[str, float]

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, at: Any) -> Any:
        return self.hits[at]


@dataclass(frozen=True, slots=True)
class IndexUpdate:
    """What became of documents: how many of each, and how many passages were embedded."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    deleted: int = 0
    passages: int = 0


class Index:
    """Passages of documents, found by meaning, by words, or by both.

    A place is a folder; or `postgresql://…`, a database with pgvector, in which `#NAME` at the end tells one index from
    another; or `lance://FOLDER`, for more than memory holds.

    >>> index = Index.create("my-index")                                                     # doctest: +SKIP
    >>> index.refresh("docs/")                   # files; again, to take up what has changed # doctest: +SKIP
    IndexUpdate(added=120, changed=0, unchanged=0, deleted=0, passages=913)
    >>> index.add(["A text of its own."])                                                    # doctest: +SKIP
    >>> for hit in index.search("how are texts cut?", k=3, where={"path": "docs/search.md"}):  # doctest: +SKIP
    ...     print(hit.score, hit.document, hit.text[:60])

    What is committed is safe; what is interrupted is missing only its last few thousand passages, and doing the same
    again goes on from there. One process writes at a time, and any number read.
    """

    progress = False  # whether long work shows how far it is

    def __init__(self, store: VectorStore, embedder: Embedder | None = None) -> None:
        self.store, self._embedder = store, embedder
        self._lexical: tuple[int, BM25Index] | None = None
        self._words: Analyzer | None = None
        self._chunker: Chunker | None = None
        self._versions: tuple[int, dict[str, str]] | None = None  # and the generation they are of
        if embedder is not None:
            self._agree(embedder)

    @classmethod
    def create(
        cls,
        place: str | Path,
        model: str | Path | Embedder | None = None,
        *,
        size: int | None = None,
        overlap: int | None = None,
        vectors: EmbeddingPrecision = "fp32",
        language: str | None = "english",
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
    ) -> Self:
        """An empty index for the vectors of a model, the built-in one if none is named.

        Passages have at most `size` tokens and share `overlap` with the one before: 256 and 32, or less if the model
        reads less at once. `vectors` of a folder are "fp32", "int8" (a quarter of the size) or "binary" (bits to find,
        bytes to score). `language` says how words are cut to stems, None leaves them. The prompts are names of the
        checkpoint's; those called query, and passage or document, are taken if there are any.
        """
        embedder = _load(model)
        size = min(SIZE, embedder.checkpoint.max_length) if size is None else size
        overlap = min(OVERLAP, size // 8) if overlap is None else overlap
        known = embedder.modules.prompts
        query_prompt = query_prompt or next((name for name in ("query",) if name in known), None)
        passage_prompt = passage_prompt or next((name for name in ("passage", "document") if name in known), None)
        _cutter(embedder, size, overlap)
        Analyzer(language)
        folder = Path(embedder.checkpoint.source)
        about = {
            "bertie": __version__,
            "model": str(folder.resolve()) if folder.is_dir() else embedder.checkpoint.source,
            "fingerprint": fingerprint(embedder),
            "size": size,
            "overlap": overlap,
            "language": language,
            "query_prompt": query_prompt,
            "passage_prompt": passage_prompt,
        }
        kind, rest = _place(place)
        if kind != "folder" and vectors != "fp32":
            raise InputError(f"vectors={vectors!r} is for an index in a folder; {place} keeps fp32")
        store: VectorStore
        if kind == "postgres":
            from bertie.search.postgres_store import PostgresStore

            url, _, name = rest.partition("#")
            store = PostgresStore.create(url, embedder.dimension, about, name=name or NAME)
        elif kind == "lance":
            from bertie.search.lance_store import LanceStore

            store = LanceStore.create(rest, embedder.dimension, about)
        else:
            store = LocalStore.create(rest, embedder.dimension, about, vectors=vectors)
        return cls(store, embedder)

    @classmethod
    def open(cls, place: str | Path, model: str | Path | Embedder | None = None) -> Self:
        """One that is there. Without a model, the one it was made with is loaded when it is needed; no other fits."""
        kind, rest = _place(place)
        store: VectorStore
        if kind == "postgres":
            from bertie.search.postgres_store import PostgresStore

            url, _, name = rest.partition("#")
            store = PostgresStore.open(url, name=name or NAME)
        elif kind == "lance":
            from bertie.search.lance_store import LanceStore

            store = LanceStore.open(rest)
        else:
            store = LocalStore.open(rest)
        try:
            return cls(store, None if model is None else _load(model))
        except BaseException:
            store.close()
            raise

    @classmethod
    def rebuild(cls, folder: str | Path, model: str | Path | Embedder | None = None) -> int:
        """Make the damaged files of an index anew from its passages, and say how many had to be embedded again."""
        with cls(LocalStore(Path(folder), look=False), None if model is None else _load(model)) as index:
            assert isinstance(index.store, LocalStore)
            return index.store.repair(index.embed)

    def close(self) -> None:
        """Give back what is held."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self.store)

    # --- the model ---

    @property
    def about(self) -> Mapping[str, Any]:
        """What the index was made with."""
        return self.store.about

    @property
    def embedder(self) -> Embedder:
        """The model."""
        if self._embedder is None:
            name = self.about["model"]
            try:
                loaded = _load(name)
            except NotFoundError as error:
                raise NotFoundError(
                    f"the index was made with {name}, which is not there: name the model ({error})"
                ) from None
            self._agree(loaded)
            self._embedder = loaded
        return self._embedder

    @property
    def loaded(self) -> Embedder | None:
        """The model, if one was given or has been needed."""
        return self._embedder

    def _agree(self, embedder: Embedder) -> None:
        """Vectors of two models cannot be compared, even if they are equally long."""
        if embedder.dimension != self.store.dimension or fingerprint(embedder) != self.about["fingerprint"]:
            raise InputError(
                f"the index was made with {self.about['model']}, whose vectors have {self.store.dimension} numbers; "
                f"{embedder.checkpoint.source} ({embedder.dimension} numbers) is another model, or was trained on "
                "since; open the index with the model it was made with, or make another index"
            )

    @property
    def chunker(self) -> Chunker:
        """What cuts documents."""
        if self._chunker is None:
            self._chunker = _cutter(self.embedder, self.about["size"], self.about["overlap"])
        return self._chunker

    @property
    def words(self) -> Analyzer:
        """What finds words."""
        if self._words is None:
            self._words = Analyzer(self.about["language"])
        return self._words

    def embed(self, texts: Sequence[str], prompt: Literal["query", "passage"] = "passage") -> FloatArray:
        """(n, D) vectors of length 1."""
        found = self.embedder.embed(texts, prompt=self.about[f"{prompt}_prompt"])
        unit: FloatArray = found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return unit

    # --- writing ---

    def add(self, documents: Iterable[Document | str]) -> IndexUpdate:
        """Add documents, or texts, which get ids from what they say; those of an id that is there are updated."""
        known = self._known()
        same = 0

        def fresh() -> Iterator[Document]:
            nonlocal same
            seen: set[str] = set()
            for one in documents:
                document = _versioned(one)
                if document.id in seen and not isinstance(one, str):
                    raise InputError(f"the document {document.id!r} is there twice; ids must differ")
                if document.id in seen or known.get(document.id) == document.version:
                    same += 1
                    continue
                seen.add(document.id)
                yield document

        counts = self.put(map(self.entries, group_documents(fresh())), known)
        return replace(counts, unchanged=same)

    def _known(self) -> dict[str, str]:
        """The version of each document. It is read once: to add one by one must not take longer each time."""
        generation = self.store.generation
        if self._versions is None or self._versions[0] != generation:
            self._versions = generation, {id: version for id, _, version in self.store.documents()}
        return self._versions[1]

    def _commit(self, put: Sequence[EmbeddedDocument], delete: Sequence[str] = ()) -> None:
        self.store.commit(put, delete)
        if self._versions is not None:
            before, known = self._versions
            for id in delete:
                known.pop(id, None)
            known |= {entry.document.id: entry.document.version for entry in put}
            self._versions = before + 1, known

    def delete(self, ids: Iterable[str]) -> IndexUpdate:
        """Delete documents; ids that are not there are left alone, and not counted."""
        if isinstance(ids, str):
            raise InputError(f"delete takes a list of ids, not {ids!r:.80}; put a single one into a list")
        asked = set(ids)
        there = [id for id in self._known() if id in asked]
        if there:
            self._commit([], there)
            self.store.optimize()
        return IndexUpdate(deleted=len(there))

    def refresh(self, paths: Paths, **options: Unpack[ReadOptions]) -> IndexUpdate:
        """Make the index what the files below some paths are: only what is new or has changed is embedded.

        Documents of files that are gone are deleted, those from elsewhere are kept. `options` are those of
        `bertie.search.document_reader.documents`.
        """
        changes = FileChanges(paths, self.store.documents(), **options)
        counts = self.put(map(self.entries, group_documents(changes)), gone=lambda: changes.gone)
        return replace(counts, added=changes.added, changed=changes.changed, unchanged=changes.unchanged)

    def put(
        self,
        made: Iterable[Sequence[EmbeddedDocument]],
        known: Collection[str] = (),
        gone: Callable[[], Sequence[str]] = lambda: (),
    ) -> IndexUpdate:
        """Commit what `entries` makes, here or on another machine, and then delete what is `gone`.

        Documents of `known` ids count as changed. If `made` fails, what it gave before is committed all the same.
        """
        added = changed = passages = safe = 0
        waiting: list[EmbeddedDocument] = []
        self._watch()
        with Progress("index", lambda: None) if self.progress else nullcontext() as progress:
            try:
                for entries in made:
                    waiting += entries
                    new = sum(entry.document.id not in known for entry in entries)
                    added, changed = added + new, changed + len(entries) - new
                    count = sum(len(entry.passages) for entry in entries)
                    passages += count
                    if sum(len(entry.passages) for entry in waiting) >= AT_ONCE:
                        self._commit(waiting)
                        safe += len(waiting)
                        waiting = []
                    if progress is not None:
                        progress.update(count)
            except BaseException as error:
                if isinstance(error, BertieError | KeyboardInterrupt):  # those before a bad file are good
                    with suppress(BertieError):  # as of a full disk, most likely the very error
                        self._commit(waiting)
                        safe += len(waiting)
                if safe:
                    error.add_note(f"{safe:,} documents are safe, and will not be embedded again")
                raise
            deleted = list(gone())
            if waiting or deleted:
                self._commit(waiting, deleted)
        if passages or deleted:
            self.store.optimize()
        return IndexUpdate(added, changed, 0, len(deleted), passages)

    def entries(self, documents: Sequence[Document]) -> list[EmbeddedDocument]:
        """Documents with their passages and vectors: what `put` commits."""
        cut = self.chunker.batch(documents)
        rows = self.embed([passage.text for passages in cut for passage in passages])
        entries, at = [], 0
        for document, passages in zip(documents, cut, strict=True):
            entries.append(EmbeddedDocument(document, passages, rows[at : at + len(passages)]))
            at += len(passages)
        return entries

    def _watch(self) -> None:
        if isinstance(self.store, LocalStore):
            self.store.progress = self.progress

    def optimize(self) -> None:
        """Put everything in order for the fastest search: minutes for millions of passages."""
        self._watch()
        self.store.optimize(whole=True)

    # --- searching ---

    def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: Reranker | None = None,
        where: Mapping[str, Any] | Sequence[MetadataFilter] = (),
        depth: int = DEPTH,
        weights: Mapping[str, float] | None = None,
    ) -> SearchResults:
        """The k passages that answer a query best.

        `mode` is by meaning ("dense"), by words ("lexical"), or both, put together by their ranks ("hybrid"). With
        `rerank` a cross-encoder reads the best `depth` of them and has the last word. `where` says which documents
        count, by their metadata: `{"lang": "en", "year >=": 1990, "topic": ["a", "b"]}`.

        `weights`, such as `{"dense": 1, "lexical": 0.3, "rerank": 2}`, add up the scores of the stages, each from 0
        to 1, in place of ranks; the reranker is then one voice among them. `bertie eval --beir --tune` finds them.
        """
        return self.search_each([query], k, mode=mode, rerank=rerank, where=where, depth=depth, weights=weights)[0]

    def search_each(
        self,
        queries: Queries,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: Reranker | None = None,
        where: Mapping[str, Any] | Sequence[MetadataFilter] = (),
        depth: int = DEPTH,
        weights: Mapping[str, float] | None = None,
    ) -> list[SearchResults]:
        """As `search`, of several queries: the same answers, sooner."""
        if isinstance(queries, str):
            raise InputError("search_each takes a list of queries; pass a single one to search")
        if mode not in MODES:
            raise InputError(f"mode={mode!r} must be one of {', '.join(MODES)}")
        for name, value in (("k", k), ("depth", depth)):
            if value < 1:
                raise InputError(f"{name}={value} must be at least 1")
        first = ["dense", "lexical"] if mode == "hybrid" else [mode]
        if weights is not None:
            check_weights(weights, first if rerank is None else [*first, "rerank"])
        if not queries:
            return []
        many, depth = len(queries), max(k, depth)
        needed = depth if rerank is not None or mode == "hybrid" else k
        asked = parse_filters(where)
        clock = _Clock(many)
        stages: dict[str, list[tuple[Keys, FloatArray]]] = {}
        if mode != "lexical":
            vectors = clock("encode", lambda: self.embed(queries, "query"))
            stages["dense"] = clock("dense", lambda: self.store.nearest(vectors, needed, asked))
        if mode != "dense":
            by_words = clock("load", self.load_words)
            allowed = self.store.allowed(asked) if asked else None
            stages["lexical"] = clock("lexical", lambda: [by_words.nearest(one, needed, allowed) for one in queries])
        scores = [
            {name: dict(zip(found[i][0].tolist(), found[i][1].tolist(), strict=True)) for name, found in stages.items()}
            for i in range(many)
        ]
        last: str = mode
        if mode == "hybrid":
            last = "fused"
            with clock.of("fuse"):
                for one in scores:
                    by = {name: one[name] for name in first}
                    if weights is None or rerank is not None:  # what is reranked does not depend on weights
                        one[last] = dict(reciprocal([list(some) for some in by.values()]))
                    else:
                        one[last] = dict(weighted(by, weights))
        order = [list(one[last])[: depth if rerank is not None else k] for one in scores]
        found = clock("fetch", lambda: self._fetch(order))
        # What was deleted since is left out.
        ranked = [[found[key] for key in keys if key in found] for keys in order]
        if rerank is not None:
            last = "rerank"
            with clock.of(last):
                self._rerank(rerank, queries, ranked, scores)
            if weights is not None:
                last = "fused"
                with clock.of("fuse"):
                    for some, one in zip(ranked, scores, strict=True):
                        one[last] = dict(weighted({name: one[name] for name in [*first, "rerank"]}, weights))
                        some.sort(key=lambda hit, one=one: -one["fused"][hit.key])  # type: ignore[misc]
        with clock.of("highlight"):
            hits = [self._hits(query, ranked[i][:k], scores[i], last) for i, query in enumerate(queries)]
        return [SearchResults(query, these, clock.seconds) for query, these in zip(queries, hits, strict=True)]

    @staticmethod
    def _rerank(
        model: Reranker,
        queries: Queries,
        ranked: list[list[StoredPassage]],
        scores: Sequence[dict[str, dict[int, float]]],
    ) -> None:
        """Put what was found into the order that a cross-encoder gives it; equals stay as they were."""
        pairs = [(query, one.passage.text) for query, some in zip(queries, ranked, strict=True) for one in some]
        said = iter(model.predict(pairs).tolist() if pairs else ())
        for some, mine in zip(ranked, scores, strict=True):
            each = mine["rerank"] = {one.key: next(said) for one in some}
            some.sort(key=lambda one, each=each: -each[one.key])  # type: ignore[misc]

    def load_words(self) -> BM25Index:
        """The index of words, made anew if something has changed: what the next search by words would do first."""
        folder = getattr(self.store, "folder", None)  # a server has none, and for it words are kept in memory
        at = None if folder is None else folder / "lexical"
        self._lexical = refresh_bm25(self.store, self.words, at, self._lexical, progress=self.progress)
        return self._lexical[1]

    def _fetch(self, order: Sequence[Sequence[int]]) -> dict[int, StoredPassage]:
        return {found.key: found for found in self.store.fetch(list(dict.fromkeys(chain.from_iterable(order))))}

    def _hits(
        self, query: str, found: Sequence[StoredPassage], scores: Mapping[str, Mapping[int, float]], last: str
    ) -> tuple[SearchHit, ...]:
        try:
            words = self.words
        except MissingPackageError:  # which search by meaning does not need
            words = Analyzer(None)
        stems = set(words.stems(query))
        return tuple(
            SearchHit(
                document=one.passage.document,
                text=one.passage.text,
                start=one.passage.start,
                end=one.passage.end,
                headings=one.passage.headings,
                score=scores[last][one.key],
                scores={name: each[one.key] for name, each in scores.items() if one.key in each},
                highlights=tuple(words.spans(one.passage.text, stems)),
                metadata=one.metadata,
                source=one.source,
            )
            for one in found
        )


class _Clock:
    """How long each stage takes, a query."""

    def __init__(self, queries: int) -> None:
        self.seconds: dict[str, float] = {}
        self._queries = queries

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        with self.of(name):
            return work()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + (time.perf_counter() - start) / self._queries


def fingerprint(embedder: Embedder) -> str:
    """The same for models that give the same vectors: their weights, pooling and tokenizer, however they are stored."""
    total = hashlib.sha256()
    for name, tensor in sorted(embedder.model.encoder.state_dict().items()):
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    modules = embedder.modules
    total.update(embedder.tokenizer.files()["tokenizer.json"])
    for name, data in sorted(modules.files().items()):
        if "/" in name:  # each module's own; those at the top say who wrote them, and when
            total.update(name.encode() + data)
    facts = (modules.lower_case, sorted(modules.prompts.items()), modules.default_prompt)
    total.update(repr((*facts, embedder.dimensions, embedder.overflow, embedder.checkpoint.max_length)).encode())
    return total.hexdigest()[:32]


def _load(model: str | Path | Embedder | None) -> Embedder:
    from bertie.tasks.embed import Embedder

    return model if isinstance(model, Embedder) else Embedder.load(model)


def _cutter(embedder: Embedder, size: int, overlap: int) -> Chunker:
    from bertie.search.chunking import Chunker

    return Chunker(embedder.tokenizer, size, overlap)


def _place(place: str | Path) -> tuple[Literal["folder", "postgres", "lance"], str]:
    text = str(place)
    if text.startswith(("postgresql://", "postgres://")):
        return "postgres", text
    if text.startswith("lance://"):
        return "lance", text.removeprefix("lance://")
    if "://" in text:
        raise InputError(f"{text!r}: an index is a folder, postgresql://… or lance://FOLDER")
    return "folder", text


def _versioned(one: Document | str) -> Document:
    """A document that tells whether it has changed."""
    if isinstance(one, str):
        name = hashlib.sha256(one.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return Document(name, one, version=name)
    if not isinstance(one, Document):
        raise InputError(f"add takes documents or texts, not {type(one).__name__}; files go through refresh")
    if one.version:
        return one
    data = repr((one.text, sorted(one.metadata.items()), one.source)).encode("utf-8", "surrogatepass")
    return replace(one, version=hashlib.sha256(data).hexdigest()[:32])


def group_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Some at a time: enough for batches of like lengths, few enough for memory."""
    some: list[Document] = []
    size = 0
    for document in documents:
        some.append(document)
        size += len(document.text)
        if size >= CHARACTERS or len(some) >= AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some
