"""On texts that fit: the same answers as transformers' pipelines and sentence-transformers' CrossEncoder."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from bertie import Classifier, MaskedLM, Reranker, Tagger, ZeroShot
from tests.tasks.tiny import LABELS, sentences

KINDS = ("wordpiece", "bpe")
TEXTS = [*sentences(8, seed=7), "Zürich, 3.5 €!", "a", "[unusual]  spaces\tand\nlines"]
Made = Callable[..., Path]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"targets": (60, 90, 120), "top_k": 5}], ids=str)
def test_fill_mask(made: Made, kind: str, masks: int, options: dict[str, Any]) -> None:
    folder = made(kind, "ForMaskedLM", max_length=160)
    ours = MaskedLM.load(folder)
    token = ours.tokenizer.mask_token
    texts = [f"Jane{f' {token} wrote' * masks} {text}" for text in TEXTS]
    targets = [ours.tokenizer.token(i) for i in options["targets"]] if "targets" in options else None
    options = options | ({"targets": targets} if targets else {})
    got = ours.fill(texts, top_k=options.get("top_k", 5), candidates=targets)
    theirs = pipeline("fill-mask", model=str(folder), device="cpu")
    for text, one in zip(texts, got, strict=True):
        want = theirs(text, **options)
        want = [want] if masks == 1 else want
        assert len(one.masks) == masks
        for mask, expected in zip(one.masks, want, strict=True):
            assert text[mask.start : mask.end].strip() == token
            assert [(c.id, c.text) for c in mask.candidates] == [(w["token"], w["token_str"]) for w in expected]
            assert [c.score for c in mask.candidates] == pytest.approx([w["score"] for w in expected], abs=2e-6)
            assert [c.token for c in mask.candidates] == [ours.tokenizer.token(w["token"]) for w in expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        (["bad", "fair", "good"], None),
        (["bad", "fair", "good"], "single_label_classification"),
        (["sad", "angry", "happy"], "multi_label_classification"),
        (["value"], "regression"),
        (["x", "y"], "regression"),
        (["relevant"], None),
    ],
)
@pytest.mark.parametrize("pairs", [False, True])
def test_text_classification(made: Made, kind: str, labels: list[str], problem: str | None, pairs: bool) -> None:
    folder = made(kind, "ForSequenceClassification", max_length=160, labels=labels, problem_type=problem)
    theirs = pipeline("text-classification", model=str(folder), device="cpu")
    items = list(zip(TEXTS, reversed(TEXTS), strict=True)) if pairs else TEXTS
    for item, got in zip(items, Classifier.load(folder).classify(items), strict=True):
        asked = {"text": item[0], "text_pair": item[1]} if pairs else item
        want = theirs(asked, top_k=None)
        assert got.scores == pytest.approx({one["label"]: one["score"] for one in want}, abs=2e-6)
        assert (got.label, got.score) == (want[0]["label"], pytest.approx(want[0]["score"], abs=2e-6))
        assert (got.tokens_read, got.windows) == (got.tokens_total, 1)


def trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Theirs may begin or end with the space that the tokenizer counts to a word."""
    while start < end - 1 and text[start].isspace() and text[start:end].strip():
        start += 1
    while start < end - 1 and text[end - 1].isspace() and text[start:end].strip():
        end -= 1
    return start, end


def tags(folder: Path, strategy: str, texts: list[str], **options: Any) -> tuple[list[Any], list[Any]]:
    """Ours and theirs as (label, start, end, score)."""
    ours = Tagger.load(folder).tag(texts, aggregation_strategy=strategy)  # type: ignore[call-overload]
    theirs = pipeline("token-classification", model=str(folder), device="cpu", aggregation_strategy=strategy)
    got = [[(s.label, s.start, s.end, pytest.approx(s.score, abs=2e-6)) for s in one.spans] for one in ours]
    name = "entity" if strategy == "none" else "entity_group"
    want = [[(e[name], *trim(text, e["start"], e["end"]), e["score"]) for e in theirs(text)] for text in texts]
    for text, one in zip(texts, ours, strict=True):
        assert all(text[s.start : s.end] == s.text for s in one.spans)
    assert sum(map(len, got)) > 5
    return got, want


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("labels", [LABELS, ["O", "NOUN", "VERB", "DET"]], ids=["BIO", "plain"])
def test_token_classification(made: Made, strategy: str, labels: list[str]) -> None:
    got, want = tags(made("wordpiece", "ForTokenClassification", max_length=160, labels=labels), strategy, TEXTS)
    assert got == want


@pytest.mark.parametrize("strategy", ["none", "simple"])
def test_token_classification_of_pieces_in_bpe(made: Made, strategy: str) -> None:
    got, want = tags(made("bpe", "ForTokenClassification", max_length=160, labels=LABELS), strategy, TEXTS)
    assert got == want


@pytest.mark.parametrize("strategy", ["first", "average", "max"])
def test_token_classification_of_words_in_bpe(made: Made, strategy: str) -> None:
    """transformers goes by spaces here and Bertie by the tokenizer's words: the same where no punctuation is."""
    folder = made("bpe", "ForTokenClassification", max_length=160, labels=LABELS)
    plain = ["".join(c for c in text if c.isalpha() or c == " ") for text in TEXTS[:8]]
    got, want = tags(folder, strategy, plain)
    assert got == want
    (one,) = Tagger.load(folder).tag(["the river, London."], aggregation_strategy=strategy, ignore_labels=())  # type: ignore[call-overload]
    ends = {span.end for span in one.spans} | {span.start for span in one.spans}
    assert ends <= {0, 3, 4, 9, 10, 11, 17, 18}, "words end where letters do"


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("names", [["contradiction", "neutral", "entailment"], ["ENTAILMENT", "neutral", "CONTRA"]])
@pytest.mark.parametrize("labels", [["history", "a river", "London"], ["history"]], ids=len)
def test_zero_shot(made: Made, multi_label: bool, names: list[str], labels: list[str]) -> None:
    folder = made("wordpiece", "ForSequenceClassification", max_length=160, labels=names)
    theirs = pipeline("zero-shot-classification", model=str(folder), device="cpu")
    texts, template = TEXTS[:5], "This was {}."
    got = ZeroShot.load(folder).classify(texts, labels, template=template, multi_label=multi_label)
    assert len(got) == len(texts)
    for text, one in zip(texts, got, strict=True):
        want = theirs(text, labels, hypothesis_template=template, multi_label=multi_label)
        assert list(one.scores) == want["labels"]
        assert list(one.scores.values()) == pytest.approx(want["scores"], abs=2e-6)
        assert (one.label, one.score) == next(iter(one.scores.items()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"activation": "Identity"}, {"limit": 12}, {"prompt": "find: "}], ids=str)
def test_cross_encoder(made: Made, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from sentence_transformers import CrossEncoder

    base = made(kind, "ForSequenceClassification", max_length=160, labels=["relevant"])
    settings: dict[str, Any] = {"max_length": options.get("limit")}
    if "activation" in options:
        settings["activation_fn"] = torch.nn.Identity()
    if "prompt" in options:
        settings |= {"prompts": {"query": options["prompt"]}, "default_prompt_name": "query"}
    CrossEncoder(str(base), device="cpu", **settings).save_pretrained(str(tmp_path))
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    ours = Reranker.load(tmp_path, overflow="truncate")
    pairs = list(pairwise(TEXTS))
    assert ours.predict(pairs).tolist() == pytest.approx(theirs.predict(pairs).tolist(), abs=2e-6)
    query, documents = "who wrote the novel", TEXTS[:8]
    want = theirs.rank(query, documents, top_k=5)
    got = ours.rerank(query, documents, top_k=5)
    assert [one.index for one in got] == [one["corpus_id"] for one in want]
    assert [one.score for one in got] == pytest.approx([one["score"] for one in want], abs=2e-6)
    assert all(documents[one.index] == one.text for one in got)
