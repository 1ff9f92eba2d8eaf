"""One warning per call about texts that a vocabulary does not cover, with counts; results are as without it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from bertie import Classifier, Embedder, Index, Reader, Reranker, Tagger
from bertie.errors import UnknownTokenWarning
from bertie.pipeline.unknown_tokens import UnknownTokenCounter, no_warning, one_warning
from bertie.tasks import MaskedLM, ZeroShot

ENGLISH, CHINESE, RUSSIAN = "The cat sat on the mat.", "今天天气很好，我们去公园散步吧。", "Привет, как дела?"
MODEL = "bertie-small"


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return Embedder.load(MODEL)


def test_the_warning_has_counts_and_an_example_and_points_at_the_caller(embedder: Embedder) -> None:
    with pytest.warns(UnknownTokenWarning) as caught:
        vectors = embedder.embed([ENGLISH, CHINESE, ENGLISH, RUSSIAN])
    assert len(caught) == 1
    assert "2 of 4 texts consist largely of unknown tokens, such as '今天天气很好" in str(caught[0].message)
    assert caught[0].filename == __file__
    with no_warning():
        np.testing.assert_array_equal(vectors[1], embedder.embed(CHINESE))


def test_counts_are_in_results(embedder: Embedder) -> None:
    with no_warning():
        english, chinese = embedder.embed_each([ENGLISH, CHINESE])
    assert (english.tokens_unknown, english.tokens_total) == (0, 7)
    assert (chinese.tokens_unknown, chinese.tokens_total) == (14, 16)
    assert "tokens_unknown=14" in repr(chinese)
    assert "tokens_unknown" not in repr(english)


def test_long_texts_are_counted_as_a_whole(embedder: Embedder) -> None:
    with no_warning():
        (long,) = embedder.embed_each([f"{ENGLISH} {CHINESE} " * 200])
    assert long.windows > 1
    assert long.tokens_unknown == 14 * 200


@pytest.mark.parametrize("text", [ENGLISH, "I love it 😀", "α and β are the angles of the two triangles here.", ""])
def test_ordinary_texts_have_no_warning(embedder: Embedder, text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownTokenWarning)
        embedder.embed([text])


def test_symbols_alone_have_a_warning(embedder: Embedder) -> None:
    with pytest.warns(UnknownTokenWarning, match=r"^the text consists largely of unknown tokens \('😀 👍'\)"):
        embedder.embed("😀 👍")


def test_every_task_warns_once() -> None:
    calls = {
        "classify": lambda: Classifier.load(MODEL).classify([RUSSIAN, ENGLISH]),
        "tag": lambda: Tagger.load(MODEL).tag([RUSSIAN, ENGLISH]),
        "answer": lambda: Reader.load(MODEL).answer([(RUSSIAN, RUSSIAN), ("Who sat?", ENGLISH)]),
        "rerank": lambda: Reranker.load(MODEL).rerank("cat", [RUSSIAN, ENGLISH]),
        "fill": lambda: MaskedLM.load(MODEL).fill([f"{RUSSIAN} [MASK]", "The [MASK] sat."]),
        "zero-shot": lambda: ZeroShot.load(MODEL).classify([RUSSIAN, ENGLISH], ["sports", "politics"]),
        "zero-shot by embedding": lambda: ZeroShot.load(MODEL).classify(
            [RUSSIAN, ENGLISH], ["sports", "politics"], method="embedding"
        ),
        "similarity": lambda: Embedder.load(MODEL).similarity(RUSSIAN, ENGLISH),
    }
    for name, call in calls.items():
        with pytest.warns(UnknownTokenWarning) as caught:
            call()
        assert [str(warning.message)[:43] for warning in caught] == ["1 of 2 texts consists largely of unknown to"], (
            name
        )


def test_index_and_search_warn_once(embedder: Embedder, tmp_path: Path) -> None:
    index = Index.create(tmp_path / "index", embedder)
    with pytest.warns(UnknownTokenWarning, match="^1 of 2 texts") as caught:
        index.add([ENGLISH, CHINESE])
    assert len(caught) == 1
    with pytest.warns(UnknownTokenWarning, match="^the text consists") as caught:
        index.search(CHINESE, rerank=Reranker.load(MODEL))
    assert len(caught) == 1


def test_training_warns_before_its_end(embedder: Embedder) -> None:
    classifier = Classifier(MODEL, method="frozen", epochs=1)
    texts, labels = [RUSSIAN, CHINESE, ENGLISH, "A dog."] * 4, ["a", "a", "b", "b"] * 4
    with pytest.warns(UnknownTokenWarning) as caught:
        classifier.fit(texts, labels, progress=False)
    assert sum(warning.category is UnknownTokenWarning for warning in caught) == 1


def test_calls_in_one_context_have_one_warning(embedder: Embedder) -> None:
    @one_warning()
    def call() -> None:
        embedder.embed([ENGLISH, RUSSIAN])
        embedder.embed([CHINESE])

    with pytest.warns(UnknownTokenWarning, match="^2 of 3 texts") as caught:
        call()
    assert len(caught) == 1


def test_long_examples_are_shortened() -> None:
    counter = UnknownTokenCounter()
    counter.texts = 1
    counter.add(("дом\n" * 100,), 300, 300)
    assert len(counter.message()) < 300
    assert "\n" not in counter.message()
