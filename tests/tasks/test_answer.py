"""The reader against a plain search: every start with every end, in nested loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Reader
from bertie.config import Calibration
from bertie.errors import InputError
from bertie.text.windows import windows
from tests.tasks.tiny import document, tokenizer

KINDS = ("wordpiece", "bpe")
Made = Callable[..., Path]


def search(folder: Path, kind: str, question: str, text: str, max_answer_length: int = 30) -> tuple[list[Any], float]:
    """All spans with their scores, best first, and the score of no answer, by transformers' model."""
    import transformers

    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
    theirs = tokenizer(kind)([question], [text], return_offsets_mapping=True)
    # The cut into windows is tested elsewhere; what the model makes of each is asked for here.
    reader = Reader.load(folder)
    whole = reader.tokenizer.encode(question, text)
    assert theirs["input_ids"][0] == whole.ids.tolist()
    best: dict[tuple[int, int], float] = {}
    none = float("inf")
    for window in windows(whole, (question, text), reader.checkpoint.max_length):
        e = window.encoding
        with torch.no_grad():
            extra = {"token_type_ids": torch.tensor([e.segments.tolist()])} if kind == "wordpiece" else {}
            out = model(input_ids=torch.tensor([e.ids.tolist()]), **extra)
        start, end = out.start_logits[0].tolist(), out.end_logits[0].tolist()
        none = min(none, start[0] + end[0])
        for first in range(len(e)):
            for last in range(first, len(e)):
                if last - first < max_answer_length and e.sequence_ids[first] == e.sequence_ids[last] == 1:
                    place = (int(e.offsets[first][0]), int(e.offsets[last][1]))
                    if text[slice(*place)].strip():
                        best[place] = max(start[first] + end[last], best.get(place, -1e9))
    return sorted(best.items(), key=lambda one: -one[1]), none


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 20], ids=["fits", "long"])
@pytest.mark.parametrize("max_answer_length", [4, 30])
def test_best_spans_over_all_windows(made: Made, kind: str, count: int, max_answer_length: int) -> None:
    folder = made(kind, "ForQuestionAnswering", max_length=80)
    question, text = "who wrote the letter", document(count, seed=3).strip()
    want, none = search(folder, kind, question, text, max_answer_length)
    (got,) = Reader.load(folder).answer([(question, text)], top_k=20, max_answer_length=max_answer_length)
    assert (got.windows > 1) == (count > 2)
    assert got.tokens_read == got.tokens_total
    assert [(a.start, a.end) for a in got.answers] == [place for place, _ in want[:20]]
    assert [a.logit for a in got.answers] == pytest.approx([score for _, score in want[:20]], abs=1e-4)
    assert got.no_answer_logit == pytest.approx(none, abs=1e-4)
    assert all(a.text == text[a.start : a.end] and a.document == 0 for a in got.answers)


@pytest.mark.parametrize("kind", KINDS)
def test_several_documents(made: Made, kind: str) -> None:
    folder = made(kind, "ForQuestionAnswering", max_length=80)
    question, texts = "where is the river", [document(n, seed=n).strip() for n in (9, 1, 3)]
    found = [search(folder, kind, question, text) for text in texts]
    want = sorted(((score, d, place) for d, (spans, _) in enumerate(found) for place, score in spans), reverse=True)
    (got, again) = Reader.load(folder).answer([(question, texts), (question, texts[1])], top_k=9)
    assert [(a.document, (a.start, a.end)) for a in got.answers] == [(d, place) for _, d, place in want[:9]]
    assert got.no_answer_logit == pytest.approx(min(none for _, none in found), abs=1e-4)
    assert [(a.start, a.end) for a in again.answers] == [place for place, _ in found[1][0][:9]]


def test_no_answer(made: Made) -> None:
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering", max_length=80))
    asked = [("who", document(2))]
    (plain,) = reader.answer(asked, top_k=2)
    assert plain.has_answer
    (kept,) = reader.answer(asked, top_k=2, no_answer_threshold=plain.no_answer_score)
    assert kept == plain
    (refused,) = reader.answer(asked, top_k=2, no_answer_threshold=plain.no_answer_score * 0.99)
    assert not refused.has_answer
    assert (refused.best.text, refused.best.start, refused.best.score) == ("", None, plain.no_answer_score)
    assert refused.best.logit == plain.no_answer_logit
    assert refused.answers[1] == plain.best
    for threshold in (float("nan"), 1.5, -0.1):
        with pytest.raises(InputError, match=f"no_answer_threshold={threshold} must be a probability"):
            reader.answer(asked, no_answer_threshold=threshold)
    (empty,) = reader.answer([("who", "")])
    assert (empty.best.text, empty.best.start, empty.best.document) == ("", None, None)


def test_the_fitted_threshold_is_the_default(made: Made, tmp_path: Path) -> None:
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering", max_length=80))
    asked = ("who", [document(4), document(20, seed=1)])
    plain = reader.answer(*asked, top_k=20)
    calibration = Calibration(
        2.0, no_answer_scale=0.5, no_answer_bias=1.0, no_answer_length=0.3, no_answer_threshold=0.0
    )
    reader.checkpoint.set_calibration("answer", calibration)
    reader.save(tmp_path / "saved")
    result = Reader.load(tmp_path / "saved").answer(*asked, top_k=21)
    p = 1 / (1 + np.exp(-0.5 * (plain.no_answer_logit - plain.best.logit) - 0.3 * np.log(plain.tokens_read) - 1.0))
    assert not result.has_answer
    assert result.best.score == result.no_answer_score == pytest.approx(p)
    assert sum(span.score for span in result.answers) == pytest.approx(1.0)
    logits = np.array([span.logit for span in result.answers[1:]]) / 2.0
    spans = np.exp(logits - logits.max())
    assert [span.score for span in result.answers[1:]] == pytest.approx((1 - p) * spans / spans.sum())
    assert reader.answer(*asked, no_answer_threshold=1.0).has_answer


def test_scores_are_probabilities_at_the_temperature_of_the_head(made: Made) -> None:
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering", max_length=80))
    question, texts = "who", [document(4), document(20, seed=1)]
    for temperature in (1.0, 2.5):
        reader.checkpoint.set_calibration("answer", Calibration(temperature))
        result = reader.answer(question, texts, top_k=20)
        logits = np.array([result.no_answer_logit, *(span.logit for span in result.answers)]) / temperature
        want = np.exp(logits) / np.exp(logits).sum()
        got = [result.no_answer_score, *(span.score for span in result.answers)]
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert sum(got) == pytest.approx(1)
        first = reader.answer(question, texts)  # as probable, however many are asked for
        assert first.best == result.best
        assert reader.answer(question, texts, top_k=50).answers[:20] == result.answers
        assert reader.answer(question, "").best.score == 1
