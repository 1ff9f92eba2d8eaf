"""Collections that searches are qrels by: documents, queries, and which document answers which query.

A folder of BEIR holds `corpus.jsonl`, `queries.jsonl` and for each split its judgements, `qrels/test.tsv`. Ids may be
called `id` instead of `_id`, a split may have queries of its own (`queries.test.jsonl`), judgements may lie beside the
corpus (`qrels.test.tsv`, or `qrels.tsv` where there is but one split), and every file may be compressed.

What finds documents, each giving a run for `bertie.evaluation.retrieval`:

    dense       by their vectors: every document is compared with every query
    lexical     by their words: BM25
    hybrid      by the places that a document has in several runs
    reranked    by a reranker, which reads the first documents of a run together with the query
    fused       by the scores that a document has in several runs, with weights that `tuned` finds
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
from bertie.data.readers import Row, Table, open_table, text_cell
from bertie.errors import InputError, NotFoundError
from bertie.evaluation.retrieval import Qrels, Run, per_query_metrics

if TYPE_CHECKING:
    from bertie.tasks import Embedder, Reranker

    Vectors = NDArray[np.float32]

DEPTH = 1000  # documents of a query that are kept
RERANKED = 100  # and those that a reranker reads
BLOCK = 256  # documents whose vectors are held at a time
DOCUMENT = ("document", "passage", "corpus")  # names of the prompt for documents, as sentence-transformers looks for it


@dataclass(frozen=True, slots=True)
class Collection:
    """What is searched, for what, and what should be found.

    >>> Collection({"d1": "Cats eat meat."}, {"q1": "What do cats eat?"}, {"q1": {"d1": 1}}).queries["q1"]
    'What do cats eat?'
    """

    corpus: Mapping[str, str]  # of each document, its title and text
    queries: Mapping[str, str]  # those that are qrels
    qrels: Qrels


# --- reading ---


def read(folder: str | Path, split: str = "test") -> Collection:
    """A folder as BEIR ships it. Title and text are joined by a space; queries that are not qrels are left out.

    Two documents of one id are an error where that id is qrels. Elsewhere the later one counts, as for BEIR's own
    reader, with a warning.
    """
    top = Path(folder)
    if not top.is_dir():
        raise NotFoundError(f"there is no folder {folder}")
    told_by, asked_by, held_by = _judgements(top, split), _table(top, _queries(split)), _table(top, ["corpus.jsonl"])
    qrels: dict[str, dict[str, int]] = {}
    rows: dict[str, dict[str, int]] = {"query": {}, "document": {}}  # in which each id is first named, for errors
    for number, query, document, grade in _judged(told_by):
        if qrels.setdefault(query, {}).setdefault(document, grade) != grade:
            raise InputError(
                f"{told_by.name}, row {number}: query {query!r} and document {document!r} had another score before"
            )
        rows["query"].setdefault(query, number)
        rows["document"].setdefault(document, number)
    queries: dict[str, str] = {}
    for name, number, row in _by_id(asked_by):
        if name not in qrels:
            continue
        text = text_cell(asked_by, number, row, "text")
        if name in queries or not text.strip():
            what = "stands in an earlier row, too" if name in queries else "is empty; fill it in, or leave it out"
            raise InputError(f"{asked_by.name}, row {number}: the query {name!r} {what}")
        queries[name] = text
    corpus: dict[str, str] = {}
    for name, number, row in _by_id(held_by):
        if name in corpus:
            said = f"{held_by.name}, row {number}: the id {name!r} stands in an earlier row, too"
            if name in rows["document"]:
                raise InputError(f"{said}, and it is qrels; give each document an id of its own")
            warnings.warn(f"{said}; that document is left out", stacklevel=2)
        corpus[name] = _joined(held_by, number, row)
    for kind, table, there in (("query", asked_by, queries), ("document", held_by, corpus)):
        for name, number in rows[kind].items():
            if name not in there:
                raise InputError(f"{told_by.name}, row {number}: there is no {kind} {name!r} in {table.name}")
    return Collection(corpus, queries, {name: qrels[name] for name in queries})


def _queries(split: str) -> list[str]:
    return [f"queries.{split}.jsonl", "queries.jsonl"]


def _judgements(top: Path, split: str) -> Table:
    undivided = ["qrels.tsv"] if split == "test" else []
    try:
        return _table(top, [f"qrels/{split}.tsv", f"qrels.{split}.tsv", *undivided])
    except NotFoundError as error:
        files = [path.name.removeprefix("qrels.") for path in (*top.glob("qrels/*.tsv*"), *top.glob("qrels.*tsv*"))]
        names = {name.partition(".tsv")[0] if ".tsv" in name else "test" for name in files}
        raise NotFoundError(f"{error}; its splits: {', '.join(sorted(names)) or 'none'}") from None


def _table(top: Path, names: Sequence[str]) -> Table:
    for name in names:
        for ending in ("", *COMPRESSED_SUFFIXES):
            if (path := top / f"{name}{ending}").is_file():
                return open_table(str(path))
    raise NotFoundError(f"{top} has no {' or '.join(names)}, plain or compressed")


def _judged(table: Table) -> Iterator[tuple[int, str, str, int]]:
    """Row, query, document and score, which are the first three columns whatever they are called."""
    if len(table.columns) < 3 or _whole(table.columns[2]) is not None:
        said = " ".join(table.columns)
        raise InputError(f"{table.name} must begin with a line of names: query-id, corpus-id, score; not {said!r:.80}")
    columns = table.columns[:3]
    for number, row in enumerate(table.rows(columns), 1):
        query, document, score = (row[column] for column in columns)
        grade = _whole(score)
        if query is None or document is None or grade is None:
            raise InputError(
                f"{table.name}, row {number} must hold two ids and a whole number, not {list(row.values())}"
            )
        yield number, query, document, grade


def _whole(value: str | None) -> int | None:
    try:
        return int(value or "")
    except ValueError:
        return None


def _by_id(table: Table) -> Iterator[tuple[str, int, Row]]:
    """Id and number of each row."""
    column = next((name for name in ("_id", "id") if name in table.columns), None)
    if column is None:
        raise InputError(f"{table.name} has no column '_id' or 'id', only {', '.join(map(repr, table.columns))}")
    for number, row in enumerate(table.rows([column, "title", "text"]), 1):
        value = row.get(column)
        if not isinstance(value, str | int):
            raise InputError(f"{table.name}, row {number}: {value!r} in column {column!r} is no id")
        yield str(value), number, row


def _joined(table: Table, number: int, row: Row) -> str:
    title = text_cell(table, number, row, "title") if row.get("title") else ""
    return f"{title} {text_cell(table, number, row, 'text')}".strip()


# --- searching ---


def dense(collection: Collection, embedder: Embedder, *, advance: Callable[[int], None] | None = None) -> Run:
    """The best documents of each query by their vectors, compared as the checkpoint says.

    Queries and documents have the prompts of these names, where the checkpoint knows them. However many documents there
    are, only some of their vectors are held. `advance` is told of documents that are done.
    """
    queries = embedder.embed(collection.queries.values(), prompt=_prompt(embedder, ["query"]))
    names, texts, prompt = list(collection.corpus), list(collection.corpus.values()), _prompt(embedder, DOCUMENT)
    best = _Best(len(queries))
    for low in range(0, len(texts), BLOCK):
        block = texts[low : low + BLOCK]
        best.add(embedder.compare(queries, embedder.embed(block, prompt=prompt)))
        if advance is not None:
            advance(len(block))
    return {query: best.of(i, names) for i, query in enumerate(collection.queries)}


def _prompt(embedder: Embedder, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in embedder.modules.prompts), None)


class _Best:
    """The best scores of each query so far, and whose they are."""

    def __init__(self, queries: int) -> None:
        self._scores: Vectors = np.empty((queries, 0), dtype=np.float32)
        self._places: NDArray[np.int64] = np.empty((queries, 0), dtype=np.int64)
        self._seen = 0

    def add(self, scores: Vectors) -> None:
        """(queries, n) of the next n documents."""
        n = scores.shape[1]
        places = np.broadcast_to(np.arange(self._seen, self._seen + n), scores.shape)
        self._seen += n
        self._scores, self._places = np.hstack([self._scores, scores]), np.hstack([self._places, places])
        if self._scores.shape[1] > DEPTH:
            kept = np.argpartition(-self._scores, DEPTH - 1, axis=1)[:, :DEPTH]
            self._scores = np.take_along_axis(self._scores, kept, axis=1)
            self._places = np.take_along_axis(self._places, kept, axis=1)

    def of(self, query: int, names: Sequence[str]) -> dict[str, float]:
        """The documents of a query, best first."""
        scores, places = self._scores[query], self._places[query]
        return {names[places[i]]: float(scores[i]) for i in np.lexsort((places, -scores))}


def lexical(collection: Collection) -> Run:
    """The best documents of each query by BM25, as the index of `bertie.search` finds them.

    What shares no word with a query is not found.
    """
    from bertie.search.analyzer import Analyzer
    from bertie.search.bm25 import BM25Index

    names = list(collection.corpus)
    index = BM25Index.build(enumerate(collection.corpus.values()), Analyzer())
    found = {}
    for query, text in collection.queries.items():
        places, scores = index.search(text, DEPTH)
        found[query] = {names[i]: float(score) for i, score in zip(places, scores, strict=True)}
    return found


def hybrid(*runs: Run) -> Run:
    """Runs as one, by reciprocal ranks: a document is worth the sum of 1 / (60 + its place) over the runs.

    >>> list(hybrid({"q": {"a": 9.0, "b": 8.0, "c": 7.0}}, {"q": {"c": 0.2, "b": 0.1}})["q"])
    ['c', 'b', 'a']
    """
    from bertie.search.fusion import reciprocal_rank_fusion

    queries = dict.fromkeys(query for run in runs for query in run)
    return {query: dict(reciprocal_rank_fusion([_ranked(run.get(query, {})) for run in runs])) for query in queries}


def reranked(
    collection: Collection,
    reranker: Reranker,
    run: Run,
    *,
    depth: int = RERANKED,
    advance: Callable[[int], None] | None = None,
) -> Run:
    """The first `depth` documents of each query in the reranker's order, the others behind them in their own.

    `advance` is told of pairs that are done.
    """
    found = {}
    for query, one in run.items():
        ranked = _ranked(one)
        first = ranked[:depth]
        said = reranker.predict([(collection.queries[query], collection.corpus[document]) for document in first])
        behind = float(min(said, default=0.0)) - 1
        found[query] = dict(zip(first, map(float, said), strict=True))
        found[query] |= {document: behind - i for i, document in enumerate(ranked[depth:])}
        if advance is not None:
            advance(len(first))
    return found


def fused(runs: Mapping[str, Run], weights: Mapping[str, float], *, depth: int = RERANKED) -> Run:
    """Runs as one, by their scores, as `Index.search` with weights does it.

    Of each run the first `depth` documents count, from 0 for the last of them to 1 for the first. Where a run is called
    "rerank", only what it read is left.

    >>> runs = {"dense": {"q": {"a": 0.9, "b": 0.8, "c": 0.1}}, "lexical": {"q": {"b": 7.0, "c": 2.0}}}
    >>> list(fused(runs, {"dense": 1, "lexical": 1})["q"])
    ['b', 'a', 'c']
    """
    from bertie.search.fusion import check_weights, weighted_score_fusion

    check_weights(weights, runs)
    found = {}
    for query in dict.fromkeys(query for run in runs.values() for query in run):
        some = {name: run.get(query, {}) for name, run in runs.items()}
        cut = {name: {document: one[document] for document in _ranked(one)[:depth]} for name, one in some.items()}
        read = cut.get("rerank")
        found[query] = {d: score for d, score in weighted_score_fusion(cut, weights) if read is None or d in read}
    return found


def tuned(qrels: Qrels, runs: Mapping[str, Run]) -> dict[str, float]:
    """The weights with which `fused` has the best nDCG@10, of equals the most even.

    Take other queries for it than those that the search is qrels by.

    >>> good, bad = {"q": {"a": 1.0, "b": 0.0}}, {"q": {"b": 1.0, "a": 0.0}}
    >>> tuned({"q": {"a": 1}}, {"dense": good, "lexical": bad})
    {'dense': 0.6, 'lexical': 0.4}
    """
    weights, _ = max(gains(qrels, runs), key=lambda one: round(one[1], 9))
    return weights


def gains(qrels: Qrels, runs: Mapping[str, Run]) -> Iterator[tuple[dict[str, float], float]]:
    """Weights in tenths that add up to 1, all there are, the most even first; each with the nDCG@10 of `fused`."""
    runs = {name: {query: run.get(query, {}) for query in qrels} for name, run in runs.items()}
    splits = [one for one in product(range(11), repeat=len(runs)) if sum(one) == 10]
    for split in sorted(splits, key=lambda one: sum(part * part for part in one)):
        weights = {name: part / 10 for name, part in zip(runs, split, strict=True)}
        yield weights, float(per_query_metrics(qrels, fused(runs, weights))["ndcg_10"].mean())


def _ranked(one: Mapping[str, float]) -> list[str]:
    return sorted(one, key=lambda document: -one[document])
