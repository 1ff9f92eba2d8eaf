"""Outlier detection: texts whose embeddings are far from their nearest neighbours.

The score of a text is its mean cosine distance (1 − similarity) to its k nearest neighbours (Ramaswamy et al. 2000).
Its p-value is the share of ordinary texts that are expected to have a score as high:

- with a reference, texts known to be ordinary, the share of those that do, each compared with the rest of them: a
  conformal p-value, which needs no assumption about the scores;
- without one, the tail of a normal distribution fitted to the quartiles of the scores' square roots, which outliers,
  being few, hardly move.

Texts with a p-value of at most the false-alarm rate are outliers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.evaluation.intervals import Score, wilson_interval
from bertie.pipeline.inputs import check_list, check_positive
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.embed import Embedder
from bertie.tasks.neighbours import METHODS, SearchMethod, nearest, unit_rows

NEIGHBOURS, FALSE_ALARMS = 10, 0.01
FEWEST = 20  # minimum number of texts for the quartiles

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class OutlierText:
    """An outlier, and the text that is most similar to it."""

    index: int
    score: float  # mean cosine distance to its nearest neighbours
    p_value: float
    nearest: int  # index of the nearest text, among the reference if there is one
    similarity: float  # cosine similarity with the nearest text
    text: str = ""
    nearest_text: str = ""


@dataclass(frozen=True, slots=True)
class Outliers:
    """The outliers among texts, the most unusual first, and the scores of all texts."""

    texts: tuple[OutlierText, ...]
    scores: FloatArray  # (n,)
    p_values: FloatArray  # (n,)
    nearest: NDArray[np.int64]  # (n,) the index of the most similar text
    similarity: FloatArray  # (n,) with the most similar text
    threshold: float  # the score above which a text is an outlier
    false_alarms: Score  # expected rate of ordinary texts flagged as outliers; with an interval if there is a reference
    share: Score  # of outliers among the texts, false alarms included, with its 95% interval


@explain_arguments
def find_outliers(
    texts: Iterable[str],
    reference: Iterable[str] | None = None,
    *,
    neighbours: int = NEIGHBOURS,
    false_alarms: float = FALSE_ALARMS,
    method: SearchMethod = "auto",
    embedder: Embedder | None = None,
) -> Outliers:
    """Find texts that are unlike the others, or unlike a reference set.

    Args:
        reference: texts known to be ordinary; without it, texts are compared with each other.
        neighbours: the score is the mean distance to this many nearest texts; larger groups are not outliers.
        false_alarms: the expected rate of ordinary texts that are flagged as outliers.
        method: "exact" compares all pairs; "approximate" searches a FAISS index; "auto" is exact for up to
            100,000 texts.
        embedder: by default the built-in model.

    >>> nouns = "password card address name limit phone email bank account plan".split()
    >>> questions = [f"How do I {verb} my {noun}?" for verb in ("reset", "change") for noun in nouns]
    >>> texts = [*questions, "The volcano erupted again at dawn."]
    >>> find_outliers(texts, neighbours=3).texts[0].text
    'The volcano erupted again at dawn.'
    """
    check_options(neighbours, false_alarms, method)
    listed = list(check_list(texts, "find_outliers"))
    known = None if reference is None else list(check_list(reference, "reference="))
    embedder = embedder or Embedder()
    vectors = embedder.embed(listed)
    reference_vectors = None if known is None else embedder.embed(known)
    result = outliers_of(vectors, reference_vectors, neighbours=neighbours, false_alarms=false_alarms, method=method)
    compared = listed if known is None else known
    return with_texts(result, listed.__getitem__, compared.__getitem__)


def with_texts(result: Outliers, text: Callable[[int], str], compared: Callable[[int], str]) -> Outliers:
    """The result with the texts of its outliers, and those that they were compared with, by index."""
    named = [replace(o, text=text(o.index), nearest_text=compared(o.nearest)) for o in result.texts]
    return replace(result, texts=tuple(named))


def check_options(neighbours: int, false_alarms: float, method: str) -> None:
    """Refuse values that are out of range."""
    check_positive(neighbours=neighbours)
    if not 0 < false_alarms < 1:
        raise InputError(f"false_alarms={false_alarms} must be a rate between 0 and 1")
    if method not in METHODS:
        raise InputError(f"method={method!r} must be one of {', '.join(METHODS)}")


def outliers_of(
    vectors: FloatArray,
    reference: FloatArray | None = None,
    *,
    neighbours: int = NEIGHBOURS,
    false_alarms: float = FALSE_ALARMS,
    method: SearchMethod = "auto",
    progress: Progress = lambda rows: None,
) -> Outliers:
    """Like `find_outliers`, for embeddings, which may be memory-mapped; the result has no texts."""
    compared, what = (vectors, "texts") if reference is None else (reference, "reference texts")
    if len(compared) < max(FEWEST, neighbours + 1):
        least = max(FEWEST, neighbours + 1)
        raise InputError(f"neighbours={neighbours} needs at least {least} {what}, but got {len(compared):,}")
    if reference is not None and len(reference) < 1 / false_alarms - 1:
        raise InputError(
            f"the reference has {len(reference):,} texts, too few for false_alarms={false_alarms:g}: pass "
            f"{int(np.ceil(1 / false_alarms - 1)):,} or more, or a higher rate"
        )
    unit = unit_rows(compared)
    own = _scores(unit, None, neighbours, method, progress)
    if reference is None:
        scores, at, similarity = own
        p_values, threshold = _tail(scores, false_alarms)
        rate = Score(false_alarms, float("nan"), float("nan"))
    else:
        scores, at, similarity = _scores(unit, unit_rows(vectors), neighbours, method, progress)
        p_values, threshold = _conformal(scores, own[0], false_alarms)
        rate = Score(false_alarms, *wilson_interval(false_alarms * (len(unit) + 1), len(unit) + 1))
    rows = np.flatnonzero(p_values <= false_alarms)
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    found = tuple(
        OutlierText(i, float(scores[i]), float(p_values[i]), int(at[i]), float(similarity[i])) for i in rows.tolist()
    )
    share = Score(len(rows) / len(scores), *wilson_interval(len(rows), len(scores))) if len(scores) else _NO_SHARE
    return Outliers(found, scores, p_values, at, similarity, threshold, rate, share)


_NO_SHARE = Score(0.0, 0.0, 1.0)


def _scores(
    unit: FloatArray, queries: FloatArray | None, k: int, method: SearchMethod, progress: Progress
) -> tuple[FloatArray, NDArray[np.int64], FloatArray]:
    """(n,) the mean distance to the k nearest rows of `unit`, the nearest one, and the similarity with it."""
    rows = len(unit if queries is None else queries)
    scores, similarity = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    first, start = np.zeros(rows, np.int64), 0
    for others, similarities in nearest(unit, k, method, queries, progress):
        part = slice(start, start + len(others))
        start = part.stop
        present = np.isfinite(similarities)  # an approximate search may find fewer than k
        mean = np.where(present, similarities, 0).sum(1) / np.maximum(present.sum(1), 1)
        scores[part], first[part] = np.maximum(0, 1 - mean), others[:, 0]
        similarity[part] = np.where(present[:, 0], similarities[:, 0], -1)
    return scores, first, similarity


def _tail(scores: FloatArray, false_alarms: float) -> tuple[FloatArray, float]:
    """(n,) p-values by a normal distribution of the scores' square roots, and the threshold of the scores."""
    roots = np.sqrt(scores.astype(np.float64))
    low, middle, high = np.quantile(roots, [0.25, 0.5, 0.75])
    normal = NormalDist(float(middle), max(float(high - low) / 1.3489795, 1e-9))  # the IQR of a standard normal
    p_values = np.fromiter((1 - normal.cdf(root) for root in roots), np.float32, len(roots))
    return p_values, float(normal.inv_cdf(1 - false_alarms) ** 2)


def _conformal(scores: FloatArray, ordinary: FloatArray, false_alarms: float) -> tuple[FloatArray, float]:
    """(n,) the share of ordinary scores, counting the own one, that are as high; and the threshold of the scores."""
    ordered = np.sort(ordinary)
    above = len(ordered) - np.searchsorted(ordered, scores, side="left")
    p_values: FloatArray = ((1 + above) / (len(ordered) + 1)).astype(np.float32)
    allowed = int(np.floor(false_alarms * (len(ordered) + 1))) - 1  # ordinary scores that an outlier's may not exceed
    return p_values, float(ordered[len(ordered) - 1 - allowed])
