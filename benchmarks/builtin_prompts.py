"""Everyday cloze prompts, and questions without an answer, for `benchmarks.builtin`."""

from __future__ import annotations

import csv
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.builtin_data import rows
from benchmarks.builtin_report import Figure, Figures
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.evaluation.intervals import FloatArray, wilson_interval
from bertie.tasks import MaskedLM, Reader

CLOZE = Path(__file__).with_name("cloze.tsv")  # written before the second edition of bertie-small was trained
TOP = (1, 5)
QUESTIONS = 2000  # with their own paragraph, and again with another


def cloze_prompts() -> list[tuple[str, str, frozenset[str]]]:
    """Category, prompt and accepted answers."""
    with CLOZE.open(encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t")
        return [(row["category"], row["prompt"], frozenset(row["answers"].split(","))) for row in table]


def cloze_ranks(checkpoint: Checkpoint, head: str) -> list[int | None]:
    """The rank of the first accepted answer to each prompt, from 1; None: not in the first five."""
    prompts = cloze_prompts()
    mask = "" if checkpoint.tokenizer is None else str(checkpoint.tokenizer.mask_token)
    texts = [prompt.replace("[MASK]", mask) for _, prompt, _ in prompts]
    results = MaskedLM(checkpoint, head=head).fill(texts, top_k=max(TOP))
    ranks: list[int | None] = []
    for result, (_, _, answers) in zip(results, prompts, strict=True):
        found = [candidate.text.strip().lower() in answers for candidate in result.masks[0].candidates]
        ranks.append(found.index(True) + 1 if any(found) else None)
    return ranks


def cloze_figures(checkpoint: Checkpoint, head: str) -> Figures:
    """How often an accepted answer is first, and among the first five."""
    ranks = cloze_ranks(checkpoint, head)
    figures = {}
    for top in TOP:
        hits = sum(rank is not None and rank <= top for rank in ranks)
        low, high = wilson_interval(hits, len(ranks))
        figures[f"everyday cloze prompts, hit rate in the top {top}"] = Figure(hits / len(ranks), low, high, len(ranks))
    return figures


def mismatched(examples: Sequence[Mapping[str, Any]], same_article: bool) -> list[tuple[str, str]]:
    """Each question with a paragraph that is not its own and does not contain one of its answers."""
    draw = random.Random(0)
    paragraphs: dict[str, list[str]] = {}
    for row in examples:
        paragraphs.setdefault(row.get("title", "") if same_article else "", []).append(row["context"])
    pairs = []
    for row in examples:
        known = [answer["text"].lower() for answer in row["answers"]]
        title = row.get("title", "")
        if same_article:
            others = [text for text in dict.fromkeys(paragraphs[title]) if text != row["context"]]
        else:
            drawn = draw.sample(list(examples), min(20, len(examples)))
            others = [other["context"] for other in drawn if other.get("title", "") != title]
        others = [text for text in others if not any(answer in text.lower() for answer in known)]
        if others:
            pairs.append((row["question"], draw.choice(others)))
    return pairs


def no_answer_figures(reader: Reader | None, data: Path) -> Figures:
    """AUROC of the no-answer score: SQuAD's questions with their own paragraph against another one."""
    if reader is None:
        return {}
    examples = rows(data / "squad_v1" / "dev.jsonl.gz")
    asked = examples if len(examples) <= QUESTIONS else random.Random(0).sample(examples, QUESTIONS)
    answered = _no_answer_scores(reader, [(row["question"], row["context"]) for row in asked])
    figures = {}
    for label, same_article in (("of another article", False), ("of the same article", True)):
        pairs = mismatched(examples, same_article)
        pairs = pairs if len(pairs) <= QUESTIONS else random.Random(0).sample(pairs, QUESTIONS)
        if pairs:
            unanswered = _no_answer_scores(reader, pairs)
            figures[f"QA no answer (paragraph {label}), AUROC"] = _auroc(answered, unanswered)
    return figures


def _no_answer_scores(reader: Reader, pairs: Sequence[tuple[str, str]]) -> FloatArray:
    """The logit of "no answer" above that of the best span, whatever the fitted threshold says."""
    results = reader.answer(pairs, top_k=2)
    best = [max(answer.logit for answer in result.answers if answer.start is not None) for result in results]
    return np.array([result.no_answer_logit for result in results]) - np.array(best)


def _auroc(negative: FloatArray, positive: FloatArray) -> Figure:
    """The probability that a random positive scores above a random negative, with a bootstrap interval."""
    draw, n, m = np.random.default_rng(0), len(negative), len(positive)
    values = [area(negative[draw.integers(n, size=n)], positive[draw.integers(m, size=m)]) for _ in range(500)]
    low, high = np.quantile(values, (0.025, 0.975))
    return Figure(area(negative, positive), float(low), float(high), n + m)


def area(negative: FloatArray, positive: FloatArray) -> float:
    """The area under the ROC curve; ties count half.

    >>> area(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    0.875
    """
    ordered = np.sort(negative)
    below, at_most = np.searchsorted(ordered, positive, "left"), np.searchsorted(ordered, positive, "right")
    return float((below + at_most).mean() / (2 * len(negative)))
