from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import bertie
from bertie import Checkpoint, InputError, NotFoundError, TaggingResult, ZeroShotTagger
from bertie.pipeline.inputs import TaskInput
from tests.parity.gliner_reference import FOLDER, LABELS, TEXTS

LONG = " ".join(TEXTS) * 6


@pytest.fixture(scope="module")
def tagger() -> ZeroShotTagger:
    return ZeroShotTagger.load(FOLDER / "lstm")


def test_offsets_and_counts(tagger: ZeroShotTagger) -> None:
    results = tagger.tag(TEXTS, LABELS[0], threshold=0.6)
    assert any(result.spans for result in results)
    for text, result in zip(TEXTS, results, strict=True):
        assert result.tokens_total == result.tokens_read > 0
        assert result.windows == 1
        assert [span.start for span in result.spans] == sorted(span.start for span in result.spans)
        for span in result.spans:
            assert text[span.start : span.end] == span.text == span.text.strip()
            assert span.label in LABELS[0]
            assert 0.6 < span.score <= 1


def test_a_single_text_has_a_single_result(tagger: ZeroShotTagger) -> None:
    result = tagger.tag(TEXTS[0], LABELS[0], threshold=0.6)
    assert isinstance(result, TaggingResult)
    assert result == tagger.tag([TEXTS[0]], LABELS[0], threshold=0.6)[0]


def test_texts_without_words(tagger: ZeroShotTagger) -> None:
    for result in tagger.tag(["", " \n"], LABELS[0], threshold=0.0):
        assert (result.spans, result.tokens_total, result.windows) == ((), 0, 1)
    assert tagger.tag([], LABELS[0]) == []


@pytest.mark.parametrize("name", ["lstm", "plain"])
def test_results_do_not_depend_on_the_batch(name: str) -> None:
    """To the bit: each text by itself, in another order, and among long ones."""
    tagger = ZeroShotTagger.load(FOLDER / name)
    texts = [*TEXTS, LONG, LONG[40:]]
    together = tagger.tag(texts, LABELS[0], threshold=0.3)
    assert [tagger.tag(text, LABELS[0], threshold=0.3) for text in texts] == together
    assert tagger.tag(texts[::-1], LABELS[0], threshold=0.3) == together[::-1]


def test_long_texts_are_read_in_windows(tagger: ZeroShotTagger) -> None:
    result = tagger.tag(LONG, LABELS[0], threshold=0.3)
    assert result.windows > 3
    assert result.tokens_read == result.tokens_total > tagger.checkpoint.max_length
    thirds = {3 * span.start // len(LONG) for span in result.spans}
    assert thirds == {0, 1, 2}
    for first, second in zip(result.spans, result.spans[1:], strict=False):
        assert first.end <= second.start  # flat, across windows too


def test_the_scores_of_a_span_are_those_of_its_window(tagger: ZeroShotTagger) -> None:
    """What a window scores is what its text scores alone: the prompt is repeated, and nothing else is read."""
    options = tagger.options(LABELS[0], threshold=0.0, flat=False, multi_label=True)
    (text,) = tagger.pipeline.read([TaskInput("", (LONG,), options)])
    found = {(s.label, s.start, s.end): s.score for s in tagger.tag(LONG, LABELS[0], threshold=0.0, multi_label=True)
             .spans}  # fmt: skip
    checked = 0
    for window in text.windows:
        inside = window.encoding.offsets[window.encoding.sequence_ids == 0]
        start, end = int(inside[0][0]), int(inside[-1][1])
        alone = tagger.tag(LONG[start:end], LABELS[0], threshold=0.0, flat=False, multi_label=True)
        scores = {(s.label, s.start + start, s.end + start): s.score for s in alone.spans}
        middle = (start + end) // 2
        for key, score in found.items():
            if abs(key[1] - middle) < 10 and key in scores:
                checked += 1
                assert score == pytest.approx(scores[key], abs=1e-6)
    assert checked > 3


def test_overflow(tagger: ZeroShotTagger) -> None:
    cut = ZeroShotTagger.load(FOLDER / "lstm", overflow="truncate").tag(LONG, LABELS[0])
    assert cut.windows == 1
    assert cut.tokens_read < cut.tokens_total
    with pytest.raises(InputError, match="text 0 has"):
        ZeroShotTagger.load(FOLDER / "lstm", overflow="error").tag([LONG], LABELS[0])


def test_nested_spans_and_several_labels(tagger: ZeroShotTagger) -> None:
    flat, nested, several = (
        tagger.tag(TEXTS[1], LABELS[0], threshold=0.5, **options).spans
        for options in ({}, {"flat": False}, {"multi_label": True})
    )
    assert len(nested) > len(flat)
    assert len({(span.start, span.end) for span in several}) < len(several)
    assert len({(span.start, span.end) for span in nested}) == len(nested)


def test_labels_change_scores_but_not_the_reading(tagger: ZeroShotTagger) -> None:
    one, other = (tagger.tag(TEXTS[0], labels, threshold=0.0) for labels in (["person"], ["medicine", "person"]))
    assert one.tokens_total == other.tokens_total
    assert {span.label for span in one.spans} == {"person"}


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ("person", {}, "labels= takes a list of labels"),
        ([], {}, "one or more"),
        (["a", "a"], {}, "distinct"),
        (["a", " "], {}, "non-empty"),
        ([3], {}, "label 0 must be a str"),
        (["a <<ENT>> b"], {}, "must not contain <<ENT>>"),
        (["a"], {"threshold": 1.5}, "threshold=1.5 must be a number from 0 to 1"),
        (["a"], {"threshold": True}, "threshold=True"),
        ([f"label number {i}" for i in range(40)], {}, r"40 labels take \d+ tokens.* at most 96 are allowed"),
    ],
)
def test_wrong_arguments(tagger: ZeroShotTagger, labels: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tagger.tag(TEXTS, labels, **options)  # type: ignore[call-overload]


def test_wrong_texts(tagger: ZeroShotTagger) -> None:
    with pytest.raises(InputError, match="text 1 must be a str"):
        tagger.tag(["a", None], LABELS[0])  # type: ignore[list-item]
    with pytest.raises(InputError, match="text 1: character 2 is the lone surrogate"):
        tagger.tag(["a", "b \ud800"], LABELS[0])


def test_models_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="need a span head, as GLiNER models have"):
        ZeroShotTagger.load("bertie-small")
    with pytest.raises(NotFoundError, match=r"use bertie\.ZeroShotTagger"):
        bertie.Tagger.load(FOLDER / "plain")


def test_literal_markers_in_a_text_are_words(tagger: ZeroShotTagger) -> None:
    """As in the original, whose words never contain brackets: a text cannot add labels to the prompt."""
    result = tagger.tag("a <<ENT>> b <<SEP>> c", ["person"], threshold=0.0, flat=False)
    assert {span.label for span in result.spans} == {"person"}
    assert result.tokens_total > 5


def test_words_without_tokens_are_left_out() -> None:
    """A WordPiece tokenizer removes control characters; the words after them keep their places."""
    tagger = ZeroShotTagger.load(FOLDER / "plain")
    text = "Ada \x00 Lovelace was born"
    plain, odd = (tagger.tag(t, LABELS[0], threshold=0.0) for t in ("Ada Lovelace was born", text))
    assert [span.score for span in plain.spans] == [span.score for span in odd.spans]
    for span in odd.spans:
        assert text[span.start : span.end] == span.text


def test_a_copy_tags_the_same(tagger: ZeroShotTagger) -> None:
    copy = pickle.loads(pickle.dumps(tagger))
    assert copy.tag(TEXTS, LABELS[0], threshold=0.6) == tagger.tag(TEXTS, LABELS[0], threshold=0.6)


def test_int8_weights_are_close() -> None:
    exact, fast = (ZeroShotTagger(Checkpoint.load(FOLDER / "lstm", precision=p)) for p in ("fp32", "int8"))
    options = {"threshold": 0.0, "flat": False, "multi_label": True}
    a, b = (
        {(s.label, s.start, s.end): s.score for s in task.tag(TEXTS[0], LABELS[0], **options).spans}  # type: ignore[call-overload]
        for task in (exact, fast)
    )
    assert np.abs(np.array([a[key] - b[key] for key in a.keys() & b.keys()])).max() < 0.1
