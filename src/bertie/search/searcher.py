"""The stages of a search: dense, lexical and sparse retrieval, fusion, reranking and highlighting."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from bertie.errors import InputError, MissingPackageError
from bertie.pipeline.inputs import check_positive
from bertie.pipeline.language_warnings import no_warning
from bertie.search.analyzer import Analyzer
from bertie.search.filters import MetadataFilter
from bertie.search.fusion import (
    RERANK_WEIGHT,
    check_weights,
    interpolate,
    reciprocal_rank_fusion,
    weighted_score_fusion,
)
from bertie.search.passage_embeddings import score_tokens, search_sparse
from bertie.search.records import FloatArray, Keys, MetadataValue, StoredPassage
from bertie.tasks.display import Displayed, html_rows, shorten

if TYPE_CHECKING:
    from bertie.search.index import Index
    from bertie.tasks.late_interaction import LateInteraction
    from bertie.tasks.rerank import Reranker

    AnyReranker = Reranker | LateInteraction

SearchMode = Literal["hybrid", "dense", "lexical", "sparse"]
MODES: tuple[SearchMode, ...] = ("hybrid", "dense", "lexical", "sparse")
RETRY_SECONDS = 10.0  # a search is repeated while another process replaces what it retrieved, but not for longer
HTML_CHARACTERS = 300  # of a passage, in a notebook
DEFAULT_DEPTH = 100  # passages that each retriever hands to fusion and reranking

Scores = dict[str, dict[int, float]]  # of one query: stage -> passage key -> score, best first


@dataclass(frozen=True, slots=True, repr=False)
class SearchHit(Displayed):
    """A retrieved passage: `score` of the last stage, and `scores` of all stages."""

    document: str  # document id
    text: str
    start: int  # character offsets in the document
    end: int
    headings: tuple[str, ...]
    score: float
    # dense: cosine similarity; lexical: BM25; sparse: dot product; fused: fusion of these; rerank: the reranker;
    # combined: interpolation of the reranker's score with the retrieval score
    scores: Mapping[str, float]
    highlights: tuple[tuple[int, int], ...]  # spans of query terms in `text`
    metadata: Mapping[str, MetadataValue]
    source: str | None  # path of the file that the document was read from


@dataclass(frozen=True, slots=True, repr=False)
class SearchResults(Sequence[SearchHit]):
    """The hits of a query, best first, and the seconds that each stage took per query."""

    query: str
    hits: tuple[SearchHit, ...]
    timings: Mapping[str, float]

    def __len__(self) -> int:
        return len(self.hits)

    def __getitem__(self, at: Any) -> Any:
        return self.hits[at]

    def __repr__(self) -> str:
        lines = [f"  {shorten(hit.score)} {hit.document}: {shorten(hit.text)}" for hit in self.hits]
        return "\n".join([f"SearchResults({shorten(self.query)}, {len(self)} hits)", *lines])

    def _repr_html_(self) -> str:
        rows = [
            (number, shorten(hit.score), hit.document, hit.text[:HTML_CHARACTERS], shorten(dict(hit.metadata)))
            for number, hit in enumerate(self.hits, 1)
        ]
        return html_rows(rows, ("", "score", "document", "text", "metadata"), self.query)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searcher:
    """A configured search. `run` passes queries through its stages."""

    k: int
    mode: SearchMode
    reranker: AnyReranker | None
    rerank_weight: float | None = None
    where: Sequence[MetadataFilter]
    depth: int
    weights: Mapping[str, float] | None
    prompt: str | None = None  # prepended to each query before embedding; None: the index's query prompt
    has_sparse: bool = False  # whether the index has sparse embeddings

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode={self.mode!r} must be one of {', '.join(MODES)}")
        if self.mode == "sparse" and not self.has_sparse:
            raise InputError(
                "mode='sparse' needs an index with sparse embeddings: create it with Index.create(…, sparse=MODEL) or "
                "bertie index --sparse MODEL"
            )
        check_positive(k=self.k, depth=self.depth)
        if self.weights is not None:
            check_weights(self.weights, self._weighted_stages)
        if self.rerank_weight is not None:
            if not 0 <= self.rerank_weight <= 1:
                raise InputError(f"rerank_weight={self.rerank_weight} must be a number from 0 to 1")
            if self.weights is not None:
                raise InputError("weights already include the reranker's; leave out rerank_weight")

    @property
    def _retrievers(self) -> list[str]:
        sparse = ["sparse"] if self.has_sparse else []
        return ["dense", "lexical", *sparse] if self.mode == "hybrid" else [self.mode]

    @property
    def _weighted_stages(self) -> list[str]:
        return self._retrievers if self.reranker is None else [*self._retrievers, "rerank"]

    def run(self, index: Index, queries: Sequence[str]) -> list[SearchResults]:
        """Search an index for a batch of queries."""
        timer = _StageTimer(len(queries))
        last: str = "fused" if self.mode == "hybrid" else self.mode
        limit = self.k if self.reranker is None else max(self.k, self.depth)
        embeddings = None
        if "dense" in self._retrievers:
            with timer("encode"):
                prompt = index.config["query_prompt"] if self.prompt is None else self.prompt
                embeddings = index.embed(queries, prompt)
        deadline, scores = time.monotonic() + RETRY_SECONDS, None
        while True:
            scores = self._retrieve(index, queries, embeddings, timer, save=scores is None)
            order = [list(by_stage[last])[:limit] for by_stage in scores]
            with timer("fetch"):
                keys = list(dict.fromkeys(chain.from_iterable(order)))
                passages = {passage.key: passage for passage in index.store.fetch(keys)}
            # if some are missing, they were deleted or replaced since retrieval
            if len(passages) == len(keys) or time.monotonic() > deadline:
                break
        ranked = [[passages[key] for key in ranking if key in passages] for ranking in order]
        if self.reranker is not None:
            first, last = last, "rerank"
            with timer("rerank"), no_warning():  # unknown tokens of queries are reported when they are embedded
                _rerank(index, self.reranker, queries, ranked, scores)
            if self.weights is not None:
                last = "fused"
                with timer("fuse"):
                    self._fuse_reranked(ranked, scores)
            elif (weight := rerank_weight(self.reranker, self.rerank_weight)) < 1:
                last = "combined"
                _combine(ranked, scores, first, weight)
        with timer("highlight"):
            hits = [
                _make_hits(index, query, ranking[: self.k], by_stage, last)
                for query, ranking, by_stage in zip(queries, ranked, scores, strict=True)
            ]
        return [
            SearchResults(query, query_hits, timer.seconds) for query, query_hits in zip(queries, hits, strict=True)
        ]

    def _retrieve(
        self, index: Index, queries: Sequence[str], embeddings: FloatArray | None, timer: _StageTimer, *, save: bool
    ) -> list[Scores]:
        """Run the retrievers and their fusion, and return the scores of each query by stage.

        `save`: whether to write an updated BM25 index to disk, during which another process may go on replacing
        passages.
        """
        single_stage = self.reranker is None and self.mode != "hybrid"
        count = self.k if single_stage else max(self.k, self.depth)
        retrieved: dict[str, list[tuple[Keys, FloatArray]]] = {}
        if embeddings is not None:
            with timer("dense"):
                retrieved["dense"] = index.store.search(embeddings, count, self.where)
        allowed = index.store.matching_keys(self.where) if self.where and self.mode != "dense" else None
        if "lexical" in self._retrievers:
            with timer("load"):
                bm25 = index.load_lexical(save=save)
            with timer("lexical"):
                retrieved["lexical"] = [bm25.search(query, count, allowed) for query in queries]
        if "sparse" in self._retrievers:
            with timer("load"):
                embeddings_of_terms = index.load_sparse()
            with timer("encode"), no_warning():
                terms = index.embed_sparse(queries)
            with timer("sparse"):
                retrieved["sparse"] = [search_sparse(embeddings_of_terms, query, count, allowed) for query in terms]
        scores = [{stage: _by_key(*results[i]) for stage, results in retrieved.items()} for i in range(len(queries))]
        if self.mode == "hybrid":
            with timer("fuse"):
                for by_stage in scores:
                    by_stage["fused"] = self._fuse(by_stage)
        return scores

    def _fuse(self, scores: Scores) -> dict[int, float]:
        """Fuse the retrievers; the candidates of reranking do not depend on the weights."""
        by_retriever = {name: scores[name] for name in self._retrievers}
        if self.weights is None or self.reranker is not None:
            return dict(reciprocal_rank_fusion([list(ranking) for ranking in by_retriever.values()]))
        return dict(weighted_score_fusion(by_retriever, self.weights))

    def _fuse_reranked(self, ranked: list[list[StoredPassage]], scores: list[Scores]) -> None:
        assert self.weights is not None
        for passages, by_stage in zip(ranked, scores, strict=True):
            stages = {name: by_stage[name] for name in self._weighted_stages}
            fused = by_stage["fused"] = dict(weighted_score_fusion(stages, self.weights))
            passages.sort(key=lambda passage, fused=fused: -fused[passage.key])  # type: ignore[misc]


def _by_key(keys: Keys, scores: FloatArray) -> dict[int, float]:
    return dict(zip(keys.tolist(), scores.tolist(), strict=True))


def _rerank(
    index: Index,
    reranker: AnyReranker,
    queries: Sequence[str],
    ranked: list[list[StoredPassage]],
    scores: list[Scores],
) -> None:
    """Sort passages by the scores of a reranker; the sort is stable."""
    from bertie.tasks.late_interaction import LateInteraction

    if isinstance(reranker, LateInteraction) and index.stores_tokens_of(reranker):
        stored_tokens = index.load_token_embeddings()
        embedded = reranker.embed_queries(queries, progress=False)
        keys = [[stored.key for stored in ranking] for ranking in ranked]
        found = [score_tokens(stored_tokens, *pair) for pair in zip(embedded, keys, strict=True)]
        predictions: Iterator[float] = chain.from_iterable(found)
    else:
        rankings = zip(queries, ranked, strict=True)
        pairs = [(query, stored.passage.text) for query, ranking in rankings for stored in ranking]
        predictions = iter(reranker.predict(pairs, progress=False).tolist() if pairs else ())
    for ranking, by_stage in zip(ranked, scores, strict=True):
        reranked = by_stage["rerank"] = {stored.key: next(predictions) for stored in ranking}
        ranking.sort(key=lambda stored, reranked=reranked: -reranked[stored.key])  # type: ignore[misc]


def rerank_weight(reranker: AnyReranker, weight: float | None = None) -> float:
    """Return `weight`, by default 1 for a separate model, and less for one of several heads of a model."""
    if weight is not None:
        return weight
    return RERANK_WEIGHT if len(reranker.checkpoint.heads) > 1 else 1.0


def _combine(ranked: list[list[StoredPassage]], scores: list[Scores], first: str, weight: float) -> None:
    """Sort passages by the interpolation of the reranker's scores with those of the stage before it."""
    for passages, by_stage in zip(ranked, scores, strict=True):
        combined = by_stage["combined"] = dict(interpolate(by_stage[first], by_stage["rerank"], weight))
        passages.sort(key=lambda passage, combined=combined: -combined[passage.key])  # type: ignore[misc]


def _make_hits(
    index: Index, query: str, passages: Sequence[StoredPassage], scores: Scores, last: str
) -> tuple[SearchHit, ...]:
    try:
        analyzer = index.analyzer
    except MissingPackageError:  # dense search does not need the stemmer
        analyzer = Analyzer(None)
    terms = set(analyzer.terms(query))
    return tuple(
        SearchHit(
            document=stored.passage.document,
            text=stored.passage.text,
            start=stored.passage.start,
            end=stored.passage.end,
            headings=stored.passage.headings,
            score=scores[last][stored.key],
            scores={stage: ranking[stored.key] for stage, ranking in scores.items() if stored.key in ranking},
            highlights=tuple(analyzer.spans(stored.passage.text, terms)),
            metadata=stored.metadata,
            source=stored.source,
        )
        for stored in passages
    )


class _StageTimer:
    """Measures the seconds per query of each stage."""

    def __init__(self, queries: int) -> None:
        self.seconds: dict[str, float] = {}
        self._queries = queries

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + (time.perf_counter() - start) / self._queries
