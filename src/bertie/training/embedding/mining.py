"""Hard negatives: passages that look right for a query and are not, for training to tell apart.

The nearest passages of a corpus are the hardest, and some of them are right although nobody said so. Those are left out
by what the model itself says: a passage nearly as near as the known one is more likely right than wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bertie.errors import ConfigError, InputError
from bertie.tasks.base import listed

if TYPE_CHECKING:
    from bertie.tasks.embed import Embedder
    from bertie.tasks.rerank import Reranker

Vectors = NDArray[np.float32]

AT_ONCE = 8192  # passages: their vectors and scores are held at a time, beside the best so far
QUERIES = 1024  # whose scores are computed at a time


@dataclass(frozen=True, slots=True)
class Mined:
    """Rows of a query, a passage that answers it, and negatives: what `Embedder.fit` takes.

    `kept_out` counts what was near enough and left out as likely right; `short` are queries with too few negatives.
    """

    rows: list[tuple[str, ...]]
    kept_out: int
    short: list[str]
    scores: NDArray[np.float32] = field(repr=False)  # (rows, 1 + negatives) of each row's passages

    def table(self) -> dict[str, list[Any]]:
        """The columns `query`, `positive` and `negatives`, as files hold them."""
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
    ceiling: float = 0.95,
) -> Mined:
    """Find negatives for each query and positive among the passages of a corpus.

    Of the `depth` nearest passages, the `skip` nearest are passed by, and so are: those that are known to be right, by
    their text; those nearer than the known one less `margin`, or than `ceiling` times it; and texts that came before.
    Of the others the nearest `negatives` are taken. A query that has fewer gets no row.

    `positives` has a text for each query, or several, each of which makes a row. However large the corpus is, only the
    vectors of some thousand passages are held at a time, and the best of each query.

    >>> mined = mine(embedder, queries, answers, passages, negatives=4)      # doctest: +SKIP
    >>> Embedder("path/to/any/encoder").fit(mined.rows)                      # doctest: +SKIP
    """
    right = _checked(queries, positives, corpus, negatives, skip, depth, ceiling)
    asked = list(dict.fromkeys(queries))
    known: dict[str, set[str]] = {query: {query} for query in asked}  # a query is no answer to itself
    for query, texts in zip(queries, right, strict=True):
        known[query].update(texts)
    vectors = embedder.embed(asked, prompt=_prompt(embedder, "query"))
    scores, places = nearest(embedder, vectors, corpus, depth)
    answers = list(dict.fromkeys(text for texts in right for text in texts))
    own = embedder.embed(answers, prompt=_prompt(embedder, "passage", "document"))
    at = {text: i for i, text in enumerate(asked)}
    place = {text: i for i, text in enumerate(answers)}
    rows: list[tuple[str, ...]] = []
    found: list[list[float]] = []
    kept_out, short = 0, []
    for query, texts in zip(queries, right, strict=True):
        number = at[query]
        near = list(zip(scores[number].tolist(), places[number].tolist(), strict=True))[skip:]
        for text in texts:
            score = float(embedder.compare(vectors[number : number + 1], own[place[text] : place[text] + 1])[0, 0])
            # Of a score below 0, as distances are, a share would be above it.
            highest = min(score - margin, score - (1 - ceiling) * abs(score))
            taken: dict[str, float] = {}
            for value, which in near:
                passage = corpus[which]
                if passage in known[query] or passage in taken:
                    continue
                if value > highest:
                    kept_out += 1
                    continue
                taken[passage] = value
                if len(taken) == negatives:
                    break
            if len(taken) < negatives:
                short.append(query)
                continue
            rows.append((query, text, *taken))
            found.append([score, *taken.values()])
    return Mined(rows, kept_out, short, np.array(found, dtype=np.float32).reshape(len(rows), negatives + 1))


def _checked(
    queries: Sequence[str],
    positives: Sequence[str | Sequence[str]],
    corpus: Sequence[str],
    negatives: int,
    skip: int,
    depth: int,
    ceiling: float,
) -> list[list[str]]:
    """The positives of each query, as lists."""
    listed(queries, "mine", "queries"), listed(corpus, "mine", "passages")
    if len(queries) != len(positives):
        raise InputError(
            f"there are {len(queries):,} queries and {len(positives):,} positives; each query needs its own"
        )
    if not queries or not len(corpus):
        raise InputError("there are no queries, or there is no corpus to search")
    if negatives < 1 or skip < 0 or depth < skip + negatives:
        raise ConfigError(
            f"negatives={negatives}, skip={skip}, depth={depth}: at least 1 negative is wanted, and the depth must "
            "reach beyond those that are passed by and those that are wanted"
        )
    if not 0 < ceiling <= 1:
        raise ConfigError(f"ceiling={ceiling} must be above 0 and at most 1: a share of the positive's score")
    return [[one] if isinstance(one, str) else list(one) for one in positives]


def _prompt(embedder: Embedder, *names: str) -> str | None:
    """The first of these prompts that the model has."""
    return next((name for name in names if name in embedder.modules.prompts), None)


def nearest(
    embedder: Embedder, queries: Vectors, corpus: Sequence[str], depth: int
) -> tuple[Vectors, NDArray[np.int64]]:
    """(n, depth) the scores and places of the nearest passages of each query, the nearest first: all are compared.

    The corpus is embedded some thousand passages at a time, and only the best are kept.
    """
    depth = min(depth, len(corpus))
    scores = np.full((len(queries), depth), -np.inf, dtype=np.float32)
    places = np.zeros((len(queries), depth), dtype=np.int64)
    prompt = _prompt(embedder, "passage", "document")
    for start in range(0, len(corpus), AT_ONCE):
        block = embedder.embed(corpus[start : start + AT_ONCE], prompt=prompt)
        for first in range(0, len(queries), QUERIES):
            some = slice(first, first + QUERIES)
            table = embedder.compare(queries[some], block)  # (QUERIES, AT_ONCE)
            both = np.concatenate([scores[some], table], axis=1)
            which = np.argpartition(-both, depth - 1, axis=1)[:, :depth]
            where = np.concatenate([places[some], np.broadcast_to(start + np.arange(len(block)), table.shape)], axis=1)
            scores[some] = np.take_along_axis(both, which, axis=1)
            places[some] = np.take_along_axis(where, which, axis=1)
    order = np.lexsort((places, -scores), axis=1)  # the first of equals first
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)


def triplets(
    anchors: Sequence[str],
    others: Sequence[str],
    labels: Sequence[str],
    *,
    together: str = "entailment",
    apart: str = "contradiction",
) -> list[tuple[str, str, str]]:
    """Rows of a text, one that belongs to it and one that does not, from pairs with classes.

    Each pair of the class `together` is joined with a pair of the class `apart` that has the same first text; those
    that have none are left out. Pairs of `apart` are taken in turn where there are several.

    >>> triplets(["a dog"] * 3, ["an animal", "a cat", "a puppy"], ["entailment", "contradiction", "neutral"])
    [('a dog', 'an animal', 'a cat')]
    """
    wrong: dict[str, list[str]] = {}
    for anchor, other, label in zip(anchors, others, labels, strict=True):
        if label == apart:
            wrong.setdefault(anchor, []).append(other)
    used: Counter[str] = Counter()
    rows = []
    for anchor, other, label in zip(anchors, others, labels, strict=True):
        if label == together and anchor in wrong:
            rows.append((anchor, other, wrong[anchor][used[anchor] % len(wrong[anchor])]))
            used[anchor] += 1
    return rows


def distilled(reranker: Reranker, rows: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    """What a cross-encoder says of each row's passages: data for an `Embedder` that shall learn from it.

    A row is a query and its passages, as many in each: those of `Mined.rows`, for example. The scores are logits,
    before any sigmoid, since a loss over the order of passages must tell 0.999 from 0.9999.

    >>> Embedder("path/to/any/encoder", loss="margin-mse").fit(distilled(reranker, mined.rows))   # doctest: +SKIP
    """
    from bertie.tasks.rerank import Reranker

    checkpoint = reranker.checkpoint
    bare = Reranker(
        replace(checkpoint, cross_encoder=replace(reranker.settings, activation="Identity"), heads=checkpoint.heads),
        overflow=reranker.overflow,
        head=reranker.head,
    )
    scores = iter(bare.predict([(row[0], passage) for row in rows for passage in row[1:]]).tolist())
    return {
        "query": [row[0] for row in rows],
        "passages": [list(row[1:]) for row in rows],
        "scores": [[next(scores) for _ in row[1:]] for row in rows],
    }
