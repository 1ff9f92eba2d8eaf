"""Hard-negative mining: passages similar to a query that do not answer it.

The nearest passages of a corpus are the hardest negatives, but some are unlabelled positives. These
false negatives are filtered by the model's own score: a passage nearly as similar as the labelled
positive is more likely right than wrong (positive-aware mining, as in NV-Retriever).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertie.errors import ConfigError, InputError
from bertie.pipeline.inputs import check_list

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder
    from bertie.tasks.rerank import Reranker

FloatMatrix = NDArray[np.float32]

CORPUS_BLOCK = 8192  # passages whose embeddings and scores are in memory at once
QUERY_BLOCK = 1024  # queries scored at once


@dataclass(frozen=True, slots=True)
class MiningResult:
    """Rows of a query, a positive and hard negatives: training data for `Embedder.fit`.

    `filtered` counts passages left out as likely false negatives; `incomplete` lists the queries with too few
    negatives, which get no row.
    """

    rows: list[tuple[str, ...]]
    filtered: int
    incomplete: list[str]
    scores: FloatMatrix = field(repr=False)  # (rows, 1 + negatives) similarity of each passage to the query

    def table(self) -> dict[str, list[Any]]:
        """The columns `query`, `positive` and `negatives` of a data file."""
        return {
            "query": [row[0] for row in self.rows],
            "positive": [row[1] for row in self.rows],
            "negatives": [list(row[2:]) for row in self.rows],
        }


def mine(
    embedder: Embedder,
    queries: Sequence[str],
    positives: Sequence[str | Sequence[str]],
    corpus: Sequence[str],
    *,
    negatives: int = 4,
    skip: int = 0,
    depth: int = 100,
    margin: float = 0.0,
    max_ratio: float = 0.95,
) -> MiningResult:
    """Mine hard negatives for each query and positive from a corpus.

    Of the `depth` nearest passages these are left out: the `skip` nearest; known positives, compared by text;
    passages more similar than the positive's score minus `margin`, or than `max_ratio` times it; and
    duplicates. The nearest `negatives` of the rest are taken. A query with fewer gets no row.

    `positives` has one text per query, or several, each of which makes a row. Memory does not grow with the
    corpus: only one block of passage embeddings, and the best passages of each query, are held.

    >>> mined = mine(embedder, queries, answers, passages, negatives=4)      # doctest: +SKIP
    >>> Embedder("path/to/any/encoder").fit(mined.rows)                      # doctest: +SKIP
    """
    settings = _Settings(negatives, skip, depth, margin, max_ratio)
    positives_of = _check_data(queries, positives, corpus)
    unique_queries = list(dict.fromkeys(queries))
    known: dict[str, set[str]] = {query: {query} for query in unique_queries}  # a query does not answer itself
    for query, texts in zip(queries, positives_of, strict=True):
        known[query].update(texts)
    query_vectors = embedder.embed(unique_queries, prompt_name=_prompt(embedder, "query"))
    scores, indices = nearest_passages(embedder, query_vectors, corpus, depth)
    answers = list(dict.fromkeys(text for texts in positives_of for text in texts))
    answer_vectors = embedder.embed(answers, prompt_name=_prompt(embedder, "passage", "document"))
    query_index = {text: i for i, text in enumerate(unique_queries)}
    answer_index = {text: i for i, text in enumerate(answers)}
    rows: list[tuple[str, ...]] = []
    row_scores: list[list[float]] = []
    filtered, incomplete = 0, []
    for query, texts in zip(queries, positives_of, strict=True):
        i = query_index[query]
        candidates = [(corpus[n], s) for s, n in zip(scores[i].tolist(), indices[i].tolist(), strict=True)][skip:]
        for text in texts:
            a = answer_index[text]
            score = float(embedder.compare(query_vectors[i : i + 1], answer_vectors[a : a + 1])[0, 0])
            chosen, dropped = _choose(candidates, known[query], score, settings)
            filtered += dropped
            if len(chosen) < negatives:
                incomplete.append(query)
                continue
            rows.append((query, text, *chosen))
            row_scores.append([score, *chosen.values()])
    table = np.array(row_scores, dtype=np.float32).reshape(len(rows), negatives + 1)
    return MiningResult(rows, filtered, incomplete, table)


@dataclass(frozen=True, slots=True)
class _Settings:
    """Validated settings of `mine`."""

    negatives: int
    skip: int
    depth: int
    margin: float
    max_ratio: float

    def __post_init__(self) -> None:
        if self.negatives < 1 or self.skip < 0 or self.depth < self.skip + self.negatives:
            raise ConfigError(
                f"negatives={self.negatives}, skip={self.skip}, depth={self.depth}: negatives must be at least 1, "
                "skip at least 0, and depth at least skip + negatives"
            )
        if not 0 < self.max_ratio <= 1:
            raise ConfigError(f"max_ratio={self.max_ratio} must be above 0 and at most 1")


def _choose(
    candidates: Sequence[tuple[str, float]], known: set[str], positive: float, settings: _Settings
) -> tuple[dict[str, float], int]:
    """The negatives among a query's nearest passages with their scores, and the number of likely false negatives."""
    # For negative scores, such as negated distances, max_ratio times the score would be above the score.
    highest = min(positive - settings.margin, positive - (1 - settings.max_ratio) * abs(positive))
    chosen: dict[str, float] = {}
    filtered = 0
    for passage, score in candidates:
        if passage in known or passage in chosen:
            continue
        if score > highest:
            filtered += 1
            continue
        chosen[passage] = score
        if len(chosen) == settings.negatives:
            break
    return chosen, filtered


def _check_data(
    queries: Sequence[str], positives: Sequence[str | Sequence[str]], corpus: Sequence[str]
) -> list[list[str]]:
    """The positives of each query, as lists."""
    check_list(queries, "mine", "queries"), check_list(corpus, "mine", "passages")
    if len(queries) != len(positives):
        raise InputError(f"there are {len(queries):,} queries and {len(positives):,} positives; give one per query")
    if not queries or not len(corpus):
        raise InputError("there are no queries, or the corpus is empty")
    return [[texts] if isinstance(texts, str) else list(texts) for texts in positives]


def _prompt(embedder: Embedder, *names: str) -> str | None:
    """The name of the first of these prompts that the model has."""
    return next((name for name in names if name in embedder.modules.prompts), None)


def nearest_passages(
    embedder: Embedder, queries: FloatMatrix, corpus: Sequence[str], depth: int
) -> tuple[FloatMatrix, NDArray[np.int64]]:
    """(n, depth) scores and corpus indices of each query's nearest passages in descending order, by exact search.

    The corpus is embedded in blocks, and only the best passages are kept.
    """
    depth = min(depth, len(corpus))
    scores = np.full((len(queries), depth), -np.inf, dtype=np.float32)
    indices = np.zeros((len(queries), depth), dtype=np.int64)
    prompt = _prompt(embedder, "passage", "document")
    for start in range(0, len(corpus), CORPUS_BLOCK):
        passages = embedder.embed(corpus[start : start + CORPUS_BLOCK], prompt_name=prompt)
        for first in range(0, len(queries), QUERY_BLOCK):
            rows = slice(first, first + QUERY_BLOCK)
            block = embedder.compare(queries[rows], passages)  # (QUERY_BLOCK, CORPUS_BLOCK)
            merged = np.concatenate([scores[rows], block], axis=1)
            block_indices = np.broadcast_to(start + np.arange(len(passages)), block.shape)
            merged_indices = np.concatenate([indices[rows], block_indices], axis=1)
            best = np.argpartition(-merged, depth - 1, axis=1)[:, :depth]
            scores[rows] = np.take_along_axis(merged, best, axis=1)
            indices[rows] = np.take_along_axis(merged_indices, best, axis=1)
    order = np.lexsort((indices, -scores), axis=1)  # ties by index
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(indices, order, axis=1)


def triplets(
    anchors: Sequence[str],
    others: Sequence[str],
    labels: Sequence[str],
    *,
    positive: str = "entailment",
    negative: str = "contradiction",
) -> list[tuple[str, str, str]]:
    """Build (anchor, positive, negative) rows from labelled pairs, such as NLI.

    Each pair with the label `positive` is joined with a pair with the label `negative` and the same anchor;
    pairs without a match are left out. Several negatives of an anchor are used in turn.

    >>> triplets(["a dog"] * 3, ["an animal", "a cat", "a puppy"], ["entailment", "contradiction", "neutral"])
    [('a dog', 'an animal', 'a cat')]
    """
    negatives: dict[str, list[str]] = {}
    for anchor, other, label in zip(anchors, others, labels, strict=True):
        if label == negative:
            negatives.setdefault(anchor, []).append(other)
    used: Counter[str] = Counter()
    rows = []
    for anchor, other, label in zip(anchors, others, labels, strict=True):
        if label == positive and anchor in negatives:
            rows.append((anchor, other, negatives[anchor][used[anchor] % len(negatives[anchor])]))
            used[anchor] += 1
    return rows


def score_with_teacher(reranker: Reranker, rows: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    """Score each row's passages with a cross-encoder: training data to distil it into an `Embedder`.

    A row is a query and its passages, equally many in each row, such as `MiningResult.rows`. The scores are
    logits, without a sigmoid: a ranking loss must distinguish 0.999 from 0.9999.

    >>> data = score_with_teacher(reranker, mined.rows)                     # doctest: +SKIP
    >>> Embedder("path/to/any/encoder", loss="margin-mse").fit(data)        # doctest: +SKIP
    """
    from bertie.tasks.rerank import Reranker

    checkpoint = reranker.checkpoint
    raw = Reranker(
        replace(checkpoint, cross_encoder=replace(reranker.settings, activation="Identity"), heads=checkpoint.heads),
        overflow=reranker.overflow,
        head=reranker.head,
    )
    scores = iter(raw.predict([(row[0], passage) for row in rows for passage in row[1:]]).tolist())
    return {
        "query": [row[0] for row in rows],
        "passages": [list(row[1:]) for row in rows],
        "scores": [[next(scores) for _ in row[1:]] for row in rows],
    }
