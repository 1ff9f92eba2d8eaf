from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.builtin_prompts import area, cloze_figures, cloze_prompts, cloze_ranks, mismatched, no_answer_figures
from sklearn.metrics import roc_auc_score

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.tasks import Reader
from tests.tasks import tiny


def test_there_are_two_hundred_different_prompts_with_one_mask_and_lower_case_answers() -> None:
    prompts = cloze_prompts()
    assert len({prompt for _, prompt, _ in prompts}) == len(prompts) == 200
    assert all(prompt.count("[MASK]") == 1 for _, prompt, _ in prompts)
    assert all(answer == answer.strip().lower() and answer for _, _, answers in prompts for answer in answers)
    assert {"The capital of France is [MASK].", "The [MASK] sat on the mat."} <= {prompt for _, prompt, _ in prompts}


def test_a_prompt_is_a_hit_if_an_accepted_answer_is_among_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.load(tiny.save(tmp_path, "wordpiece", "ForMaskedLM"))
    assert checkpoint.tokenizer is not None
    prompts = [("none", "the [MASK] is", frozenset({"not a word"})), ("all", "the [MASK] is", frozenset())]
    vocabulary = frozenset(token.removeprefix("##") for token in checkpoint.tokenizer.vocabulary.values())
    prompts[1] = ("all", "the [MASK] is", vocabulary)
    monkeypatch.setattr("benchmarks.builtin_prompts.cloze_prompts", lambda: prompts)
    assert cloze_ranks(checkpoint, "mlm")[0] is None
    assert cloze_ranks(checkpoint, "mlm")[1] is not None
    assert cloze_figures(checkpoint, "mlm")["everyday cloze prompts, hit rate in the top 5"].value == 0.5


def test_a_mismatched_paragraph_has_no_answer() -> None:
    rows = [
        {"title": f"t{i // 3}", "question": f"q{i}", "context": f"context {i}", "answers": [{"text": f"{i}"}]}
        for i in range(9)
    ]
    rows[1]["answers"] = [{"text": "context"}]  # it is in every paragraph
    for same_article in (True, False):
        pairs = mismatched(rows, same_article)
        assert [question for question, _ in pairs] == [f"q{i}" for i in range(9) if i != 1]
        for question, context in pairs:
            own, other = int(question[1:]), int(context.split()[1])
            assert own != other
            assert (own // 3 == other // 3) == same_article


def test_the_area_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    negative, positive = rng.integers(0, 9, 50).astype(float), rng.integers(2, 12, 70).astype(float)
    truth = np.repeat([0, 1], [50, 70])
    assert area(negative, positive) == pytest.approx(roc_auc_score(truth, np.concatenate([negative, positive])))


def test_no_answer_is_measured_with_other_paragraphs(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(tiny.save(tmp_path / "model", "wordpiece", ""))
    checkpoint.add_head("qa", HeadInfo("answer"))
    texts = tiny.sentences(24)
    rows = [
        {"title": f"t{i % 2}", "question": texts[i], "context": texts[i + 12], "answers": [{"text": "no such words"}]}
        for i in range(12)
    ]
    file = tmp_path / "squad_v1" / "dev.jsonl.gz"
    file.parent.mkdir()
    file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    figures = no_answer_figures(Reader(checkpoint, head="qa"), tmp_path)
    assert set(figures) == {f"QA no answer (paragraph of {which} article), AUROC" for which in ("another", "the same")}
    assert all(0 <= (figure.low or 0) <= figure.value <= (figure.high or 0) <= 1 for figure in figures.values())
    assert no_answer_figures(None, tmp_path) == {}
