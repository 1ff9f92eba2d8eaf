"""Retrieval datasets in BEIR's format, and runs over them for `bertie.evaluation.retrieval`.

A BEIR folder holds `corpus.jsonl`, `queries.jsonl` and the relevance judgments of each split, such as
`qrels/test.tsv`. Ids may be called `id` instead of `_id`, a split may have its own queries
(`queries.test.jsonl`), judgments may be next to the corpus (`qrels.test.tsv`, or `qrels.tsv` if there is
only one split), and every file may be compressed.

    dense_run               exact search by embeddings
    bm25_run                BM25
    fuse_by_rank            reciprocal rank fusion
    rerank_run              rerank the top documents of a run with a cross-encoder
    fuse_by_score           fuse runs by normalized score, with weights from `tune_weights`
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bertie.data.compression import COMPRESSED_SUFFIXES
from bertie.data.readers import InputTable, Row, open_table, text_cell
from bertie.errors import InputError, NotFoundError
from bertie.evaluation.retrieval import Qrels, Run, per_query_metrics
from bertie.tasks.prompts import DOCUMENT_PROMPTS, QUERY_PROMPTS, find_prompt

if TYPE_CHECKING:
    from bertie.tasks import Embedder, LateInteraction, Reranker

    Vectors = NDArray[np.float32]

DEPTH = 1000  # documents kept per query
RERANK_DEPTH = 100  # documents reranked per query
BLOCK = 256  # documents embedded per call


@dataclass(frozen=True, slots=True)
class RetrievalDataset:
    """A corpus, queries, and relevance judgments.

    >>> RetrievalDataset({"d1": "Cats eat meat."}, {"q1": "What do cats eat?"}, {"q1": {"d1": 1}}).queries["q1"]
    'What do cats eat?'
    """

    corpus: Mapping[str, str]  # document id -> title and text
    queries: Mapping[str, str]  # query id -> text, of the judged queries
    qrels: Qrels


# --- reading ---


def read_beir(folder: str | Path, split: str = "test") -> RetrievalDataset:
    """Read a BEIR folder. Title and text are joined by a space; queries without judgments are dropped.

    A duplicate document id is an error if it has judgments. Otherwise a warning is issued and the later
    document is used, as in BEIR's own reader.
    """
    path = Path(folder)
    if not path.is_dir():
        raise NotFoundError(f"there is no folder {folder}")
    judgments = _open_qrels(path, split)
    query_table = _open_first(path, [f"queries.{split}.jsonl", "queries.jsonl"])
    corpus_table = _open_first(path, ["corpus.jsonl"])
    qrels: dict[str, dict[str, int]] = {}
    first_row: dict[str, dict[str, int]] = {"query": {}, "document": {}}  # of each id in the qrels, for errors
    for number, query, document, grade in _read_qrels(judgments):
        if qrels.setdefault(query, {}).setdefault(document, grade) != grade:
            raise InputError(
                f"{judgments.name}, row {number}: conflicting scores for query {query!r} and document {document!r}"
            )
        first_row["query"].setdefault(query, number)
        first_row["document"].setdefault(document, number)
    queries = _read_queries(query_table, qrels)
    corpus = _read_corpus(corpus_table, first_row["document"])
    for kind, table, known in (("query", query_table, queries), ("document", corpus_table, corpus)):
        for name, number in first_row[kind].items():
            if name not in known:
                raise InputError(f"{judgments.name}, row {number}: there is no {kind} {name!r} in {table.name}")
    return RetrievalDataset(corpus, queries, {name: qrels[name] for name in queries})


def _read_queries(table: InputTable, qrels: Qrels) -> dict[str, str]:
    queries: dict[str, str] = {}
    for name, number, row in _rows_by_id(table):
        if name not in qrels:
            continue
        text = text_cell(table, number, row, "text")
        if name in queries or not text.strip():
            problem = "is a duplicate" if name in queries else "is empty; fill it in or remove it"
            raise InputError(f"{table.name}, row {number}: the query {name!r} {problem}")
        queries[name] = text
    return queries


def _read_corpus(table: InputTable, judged: Mapping[str, int]) -> dict[str, str]:
    corpus: dict[str, str] = {}
    for name, number, row in _rows_by_id(table):
        if name in corpus:
            message = f"{table.name}, row {number}: duplicate id {name!r}"
            if name in judged:
                raise InputError(f"{message}, which has relevance judgments; give each document its own id")
            warnings.warn(f"{message}; the earlier document is dropped", stacklevel=3)
        corpus[name] = _title_and_text(table, number, row)
    return corpus


def _open_qrels(folder: Path, split: str) -> InputTable:
    undivided = ["qrels.tsv"] if split == "test" else []
    try:
        return _open_first(folder, [f"qrels/{split}.tsv", f"qrels.{split}.tsv", *undivided])
    except NotFoundError as error:
        paths = (*folder.glob("qrels/*.tsv*"), *folder.glob("qrels.*tsv*"))
        files = [path.name.removeprefix("qrels.") for path in paths]
        names = {name.partition(".tsv")[0] if ".tsv" in name else "test" for name in files}
        raise NotFoundError(f"{error}; its splits: {', '.join(sorted(names)) or 'none'}") from None


def _open_first(folder: Path, names: Sequence[str]) -> InputTable:
    for name in names:
        for ending in ("", *COMPRESSED_SUFFIXES):
            if (path := folder / f"{name}{ending}").is_file():
                return open_table(str(path))
    raise NotFoundError(f"{folder} has no {' or '.join(names)}, plain or compressed")


def _read_qrels(table: InputTable) -> Iterator[tuple[int, str, str, int]]:
    """Yield row number, query, document and grade: the first three columns, whatever their names."""
    if len(table.columns) < 3 or _parse_int(table.columns[2]) is not None:
        header = " ".join(table.columns)
        raise InputError(f"{table.name} must begin with a header: query-id, corpus-id, score; not {header!r:.80}")
    columns = table.columns[:3]
    for number, row in enumerate(table.rows(columns), 1):
        query, document, score = (row[column] for column in columns)
        grade = _parse_int(score)
        if query is None or document is None or grade is None:
            raise InputError(f"{table.name}, row {number} must hold two ids and an integer, not {list(row.values())}")
        yield number, query, document, grade


def _parse_int(value: str | None) -> int | None:
    try:
        return int(value or "")
    except ValueError:
        return None


def _rows_by_id(table: InputTable) -> Iterator[tuple[str, int, Row]]:
    """Yield id, row number and row."""
    column = next((name for name in ("_id", "id") if name in table.columns), None)
    if column is None:
        raise InputError(f"{table.name} has no column '_id' or 'id', only {', '.join(map(repr, table.columns))}")
    for number, row in enumerate(table.rows([column, "title", "text"]), 1):
        value = row.get(column)
        if not isinstance(value, str | int):
            raise InputError(f"{table.name}, row {number}: {value!r} in column {column!r} is not an id")
        yield str(value), number, row


def _title_and_text(table: InputTable, number: int, row: Row) -> str:
    title = text_cell(table, number, row, "title") if row.get("title") else ""
    return f"{title} {text_cell(table, number, row, 'text')}".strip()


# --- runs ---


def dense_run(dataset: RetrievalDataset, embedder: Embedder, *, advance: Callable[[int], None] | None = None) -> Run:
    """Retrieve by embeddings: exact search with the checkpoint's similarity function and prompts.

    The embeddings of the corpus are not kept in memory. After each block, `advance` is called with the number of
    documents in it.
    """
    prompts = embedder.modules.prompts
    queries = embedder.embed(dataset.queries.values(), prompt_name=find_prompt(prompts, QUERY_PROMPTS))
    names, texts = list(dataset.corpus), list(dataset.corpus.values())
    prompt = find_prompt(prompts, DOCUMENT_PROMPTS)
    best = _TopDocuments(len(queries))
    for start in range(0, len(texts), BLOCK):
        block = texts[start : start + BLOCK]
        best.add(embedder.compare(queries, embedder.embed(block, prompt_name=prompt)))
        if advance is not None:
            advance(len(block))
    return {query: best.ranking(i, names) for i, query in enumerate(dataset.queries)}


class _TopDocuments:
    """The `DEPTH` best documents of each query so far."""

    def __init__(self, queries: int) -> None:
        self._scores: Vectors = np.empty((queries, 0), dtype=np.float32)
        self._indices: NDArray[np.int64] = np.empty((queries, 0), dtype=np.int64)
        self._seen = 0

    def add(self, scores: Vectors) -> None:
        """Add the (queries, n) scores of the next n documents."""
        n = scores.shape[1]
        indices = np.broadcast_to(np.arange(self._seen, self._seen + n), scores.shape)
        self._seen += n
        self._scores, self._indices = np.hstack([self._scores, scores]), np.hstack([self._indices, indices])
        if self._scores.shape[1] > DEPTH:
            top = np.argpartition(-self._scores, DEPTH - 1, axis=1)[:, :DEPTH]
            self._scores = np.take_along_axis(self._scores, top, axis=1)
            self._indices = np.take_along_axis(self._indices, top, axis=1)

    def ranking(self, query: int, names: Sequence[str]) -> dict[str, float]:
        """Return the documents of a query and their scores, in descending order of score."""
        scores, indices = self._scores[query], self._indices[query]
        return {names[indices[i]]: float(scores[i]) for i in np.lexsort((indices, -scores))}


def bm25_run(dataset: RetrievalDataset) -> Run:
    """Retrieve by BM25, as `bertie.Index` does. Documents that share no term with a query are not retrieved."""
    from bertie.search.analyzer import Analyzer
    from bertie.search.bm25 import BM25Index

    names = list(dataset.corpus)
    index = BM25Index.build(enumerate(dataset.corpus.values()), Analyzer())
    run = {}
    for query, text in dataset.queries.items():
        indices, scores = index.search(text, DEPTH)
        run[query] = {names[i]: float(score) for i, score in zip(indices, scores, strict=True)}
    return run


def fuse_by_rank(*runs: Run) -> Run:
    """Reciprocal rank fusion: a document's score is the sum of 1 / (60 + rank) over the runs.

    >>> list(fuse_by_rank({"q": {"a": 9.0, "b": 8.0, "c": 7.0}}, {"q": {"c": 0.2, "b": 0.1}})["q"])
    ['c', 'b', 'a']
    """
    from bertie.search.fusion import reciprocal_rank_fusion

    queries = dict.fromkeys(query for run in runs for query in run)
    return {query: dict(reciprocal_rank_fusion([_rank(run.get(query, {})) for run in runs])) for query in queries}


def rerank_run(
    dataset: RetrievalDataset,
    reranker: Reranker | LateInteraction,
    run: Run,
    *,
    depth: int = RERANK_DEPTH,
    advance: Callable[[int], None] | None = None,
) -> Run:
    """Rerank the top `depth` documents of each query; the others follow in their original order.

    After each query, `advance` is called with the number of documents reranked.
    """
    reranked = {}
    for query, document_scores in run.items():
        ranking = _rank(document_scores)
        top = ranking[:depth]
        scores = reranker.predict([(dataset.queries[query], dataset.corpus[document]) for document in top])
        below = float(min(scores, default=0.0)) - 1
        reranked[query] = dict(zip(top, map(float, scores), strict=True))
        reranked[query] |= {document: below - i for i, document in enumerate(ranking[depth:])}
        if advance is not None:
            advance(len(top))
    return reranked


def fuse_by_score(runs: Mapping[str, Run], weights: Mapping[str, float], *, depth: int = RERANK_DEPTH) -> Run:
    """Fuse runs by the weighted sum of their normalized scores, as `Index.search` with weights does.

    Only the top `depth` documents of each run are used, with scores min-max normalized to [0, 1]. If there is a run
    named "rerank", only the documents it scored are kept.

    >>> runs = {"dense": {"q": {"a": 0.9, "b": 0.8, "c": 0.1}}, "lexical": {"q": {"b": 7.0, "c": 2.0}}}
    >>> list(fuse_by_score(runs, {"dense": 1, "lexical": 1})["q"])
    ['b', 'a', 'c']
    """
    from bertie.search.fusion import check_weights, weighted_score_fusion

    check_weights(weights, runs)
    fused = {}
    for query in dict.fromkeys(query for run in runs.values() for query in run):
        top = {}
        for name, run in runs.items():
            scores = run.get(query, {})
            top[name] = {document: scores[document] for document in _rank(scores)[:depth]}
        reranked = top.get("rerank")
        pairs = weighted_score_fusion(top, weights)
        fused[query] = {document: score for document, score in pairs if reranked is None or document in reranked}
    return fused


def interpolate_run(first: Run, reranked: Run, weight: float, *, depth: int = RERANK_DEPTH) -> Run:
    """Interpolate the scores of a run's top `depth` documents with the reranker's, as `Index.search` does.

    The others follow in their original order.
    """
    from bertie.search.fusion import interpolate

    combined = {}
    for query, scores in first.items():
        ranking = _rank(scores)
        top = {document: reranked[query][document] for document in ranking[:depth]}
        combined[query] = dict(interpolate(scores, top, weight))
        combined[query] |= {document: -1.0 - i for i, document in enumerate(ranking[depth:])}
    return combined


def tune_weights(qrels: Qrels, runs: Mapping[str, Run]) -> dict[str, float]:
    """Find the weights of `fuse_by_score` with the best nDCG@10; ties go to the most even weights.

    Tune on queries that are not used for evaluation.

    >>> good, bad = {"q": {"a": 1.0, "b": 0.0}}, {"q": {"b": 1.0, "a": 0.0}}
    >>> tune_weights({"q": {"a": 1}}, {"dense": good, "lexical": bad})
    {'dense': 0.6, 'lexical': 0.4}
    """
    weights, _ = max(grid_search(qrels, runs), key=lambda result: round(result[1], 9))
    return weights


def grid_search(qrels: Qrels, runs: Mapping[str, Run]) -> Iterator[tuple[dict[str, float], float]]:
    """Yield all weights that sum to 1, in steps of 0.1, with their nDCG@10; the most even weights come first."""
    runs = {name: {query: run.get(query, {}) for query in qrels} for name, run in runs.items()}
    grid = [tenths for tenths in product(range(11), repeat=len(runs)) if sum(tenths) == 10]
    for tenths in sorted(grid, key=lambda tenths: sum(part * part for part in tenths)):
        weights = {name: part / 10 for name, part in zip(runs, tenths, strict=True)}
        yield weights, float(per_query_metrics(qrels, fuse_by_score(runs, weights))["ndcg_10"].mean())


def _rank(scores: Mapping[str, float]) -> list[str]:
    return sorted(scores, key=lambda document: -scores[document])
