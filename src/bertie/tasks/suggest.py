"""Active learning: suggest the texts whose labels would help a classifier or a tagger most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertie.arguments import explain_arguments
from bertie.config import HeadInfo
from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.tasks.base import Task
from bertie.tasks.classify import Classifier
from bertie.tasks.embed import Embedder
from bertie.tasks.results import ClassificationResult, TaggingResult
from bertie.tasks.selection import choose
from bertie.tasks.tag import Tagger
from bertie.tasks.zero_shot import entailment_label

AnyTask = Task[Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A text to label. `score` is the model's uncertainty, from 0 to 1; without a model, the share of similar texts."""

    index: int  # of the text in the input
    text: str
    score: float
    reason: str


class Candidate(NamedTuple):
    """A text that may be suggested."""

    text: str
    vector: FloatArray
    uncertainty: float | None  # None: no model predicts labels
    reason: str


@explain_arguments
def suggest(
    texts: Iterable[str],
    k: int = 20,
    *,
    model: AnyTask | str | Path | None = None,
    head: str | None = None,
    labelled: Iterable[str] = (),
    seed: int = 0,
) -> list[Suggestion]:
    """Suggest k texts to label, the most useful first.

    `model` is a trained `Classifier` or `Tagger`, or its folder: it suggests texts that it is uncertain about and
    that differ from each other. With an embedder, or without a model, they are typical of many texts. `labelled` are
    texts that have labels already; neither they nor texts like them are suggested.

    >>> texts = ["A good film.", "A great film.", "Stocks fell.", "Shares fell sharply.", "It rained all day."]
    >>> [suggestion.text in texts for suggestion in suggest(texts, 2)]
    [True, True]
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InputError(f"k={k!r} must be a whole number of at least 1")
    texts = list(check_list(texts, "suggest"))
    known = list(check_list(labelled, "labelled="))
    task = model if isinstance(model, Task) else predictor_of(Embedder.load(model), head)
    candidates = list(score_texts(task, texts))
    vectors = [candidate.vector for candidate in score_texts(embedder_of(task), known)]
    return select(candidates, k, labelled=list(zip(known, vectors, strict=True)), seed=seed)


def predictor_of(embedder: Embedder, head: str | None = None) -> Classifier | Tagger | Embedder:
    """The classifier or tagger of the named head or the only one, on the same checkpoint; otherwise the embedder."""
    checkpoint = embedder.checkpoint
    options: dict[str, Any] = {"overflow": embedder.overflow, "deterministic": embedder.deterministic}
    heads = [name for name, info in checkpoint.heads.items() if info.kind == "tag" or _is_classifier(info)]
    if head is not None:
        checkpoint.model.head(head)  # raises if there is none of that name
        if head not in heads:
            raise InputError(
                f"head={head!r} must be for classification or tagging: {', '.join(heads) or 'there is none'}"
            )
    elif len(heads) != 1:
        return embedder
    name = head or heads[0]
    return (Tagger if checkpoint.heads[name].kind == "tag" else Classifier)(checkpoint, head=name, **options)


def _is_classifier(info: HeadInfo) -> bool:
    """Whether a head classifies single texts."""
    return Classifier._fits(info) and info.problem != "regression" and entailment_label(info) is None


def embedder_of(task: AnyTask) -> Embedder:
    """The task's model as an embedder."""
    if isinstance(task, Embedder):
        return task
    return Embedder(task.checkpoint, overflow=task.overflow, deterministic=task.deterministic)


def score_texts(task: AnyTask, texts: Iterable[str]) -> Iterator[Candidate]:
    """Embed texts, and measure the model's uncertainty about each."""
    if not isinstance(task, Classifier | Tagger | Embedder) or (
        isinstance(task, Classifier) and task.problem == "regression"
    ):
        raise InputError(f"model={type(task).__name__}: texts are suggested for a Classifier, a Tagger or an Embedder")
    first, second, third = tee(texts, 3)
    vectors = (result.vector for result in embedder_of(task).embed_each(first))
    if isinstance(task, Embedder):
        for text, vector in zip(second, vectors, strict=True):
            yield Candidate(text, vector, None, "")
        return
    if isinstance(task, Tagger):
        results: Iterator[Any] = map(
            _tag_uncertainty, task.tag_each(second, aggregation_strategy="none", ignore_labels=())
        )
    else:
        single = task.problem == "single_label_classification"
        results = (_label_uncertainty(result, single=single) for result in task.classify_each(second))
    for text, vector, (uncertainty, reason) in zip(third, vectors, results, strict=True):
        yield Candidate(text, vector, uncertainty, reason)


def _label_uncertainty(result: ClassificationResult, *, single: bool) -> tuple[float, str]:
    """1 minus the margin between the two most probable labels; of a multi-label model, of its closest decision."""
    if single:
        (first, p), (second, q) = sorted(result.scores.items(), key=lambda item: -item[1])[:2]
        return 1 - (p - q), f"{first} {p:.2f} or {second} {q:.2f}"
    label, p = min(result.scores.items(), key=lambda item: abs(item[1] - 0.5))
    return 1 - abs(2 * p - 1), f"{label} {p:.2f}"


def _tag_uncertainty(result: TaggingResult) -> tuple[float, str]:
    """1 minus the geometric mean of the tokens' probabilities, as Shen et al. (2018) rank sentences."""
    if not result.spans:
        return 0.0, "no words"
    worst = min(result.spans, key=lambda span: span.score)
    mean = float(np.mean(np.log([max(span.score, 1e-9) for span in result.spans])))
    return 1 - float(np.exp(mean)), f"{worst.text!r} {worst.label} {worst.score:.2f}"


def select(
    candidates: Sequence[Candidate], k: int, *, labelled: Sequence[tuple[str, FloatArray]] = (), seed: int = 0
) -> list[Suggestion]:
    """Choose among scored texts; of equal ones only the first, and none that is empty or labelled already."""
    seen = {" ".join(text.split()).casefold() for text, _ in labelled} | {""}
    places = []
    for i, candidate in enumerate(candidates):
        if (key := " ".join(candidate.text.split()).casefold()) not in seen:
            seen.add(key)
            places.append(i)
    if not places:
        return []
    unsure = [candidates[i].uncertainty for i in places]
    uncertainty = None if unsure[0] is None else np.array(unsure, dtype=np.float64)
    choices = choose(
        np.stack([candidates[i].vector for i in places]).astype(np.float64),
        k,
        uncertainty=uncertainty,
        labelled=np.stack([vector for _, vector in labelled]).astype(np.float64) if labelled else None,
        seed=seed,
    )
    suggestions = []
    for choice in choices:
        index = places[choice.row]
        candidate = candidates[index]
        like = "alone" if choice.size == 1 else f"1 of {choice.size:,} similar texts"
        score = choice.size / len(places) if candidate.uncertainty is None else candidate.uncertainty
        reason = f"{candidate.reason}; {like}" if candidate.reason else like
        suggestions.append(Suggestion(index, candidate.text, float(score), reason))
    return suggestions
