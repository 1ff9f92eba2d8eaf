"""One warning per call about texts that are not in a language of the model, with counts; results are as without it."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from bertie import Classifier, Embedder, Index, Reader, Reranker, Tagger
from bertie.errors import BertieWarning, NonEnglishWarning, UnknownTokenWarning
from bertie.pipeline.language_warnings import LanguageCounter, no_warning, one_warning
from bertie.tasks import MaskedLM, ZeroShot

ENGLISH, CHINESE, RUSSIAN = "The cat sat on the mat.", "今天天气很好，我们去公园散步吧。", "Привет, как дела?"
GERMAN = "Der Zug nach München fährt heute erst eine Stunde später ab."
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


def test_other_languages_in_latin_script_have_a_warning(embedder: Embedder) -> None:
    with pytest.warns(NonEnglishWarning) as caught:
        results = list(embedder.embed_each([ENGLISH, GERMAN, ENGLISH]))
    assert len(caught) == 1
    assert "1 of 3 texts does not seem to be in English, such as 'Der Zug nach" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert [result.tokens_non_english for result in results] == [0, results[1].tokens_total, 0]
    assert "tokens_non_english" in repr(results[1])
    assert "tokens_non_english" not in repr(results[0])


def test_a_few_texts_in_other_languages_have_no_warning(embedder: Embedder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BertieWarning)
        results = list(embedder.embed_each([GERMAN] + [ENGLISH] * 19))
    assert results[0].tokens_non_english > 0


def test_text_with_a_prompt(embedder: Embedder) -> None:
    with pytest.warns(NonEnglishWarning, match=r"^the text does not seem to be in English \('query: Der Zug"):
        embedder.embed(GERMAN, prompt="query: ")


@pytest.mark.parametrize("text", [ENGLISH, "I love it 😀", "α and β are the angles of the two triangles here.", ""])
def test_ordinary_texts_have_no_warning(embedder: Embedder, text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BertieWarning)
        embedder.embed([text])


def test_symbols_alone_have_a_warning(embedder: Embedder) -> None:
    with pytest.warns(UnknownTokenWarning, match=r"^the text consists largely of unknown tokens \('😀 👍'\)"):
        embedder.embed("😀 👍")


@pytest.mark.parametrize(
    ("text", "category", "message"),
    [
        (RUSSIAN, UnknownTokenWarning, "1 of 2 texts consists largely of unknown to"),
        (f"{GERMAN} {GERMAN}", NonEnglishWarning, "1 of 2 texts does not seem to be in English"),
    ],
)
def test_every_task_warns_once(text: str, category: type[BertieWarning], message: str) -> None:
    labels = ["sports", "politics"]
    calls = {
        "classify": lambda: Classifier.load(MODEL).classify([text, ENGLISH]),
        "tag": lambda: Tagger.load(MODEL).tag([text, ENGLISH]),
        "answer": lambda: Reader.load(MODEL).answer([(text, text), ("Who sat?", ENGLISH)]),
        "rerank": lambda: Reranker.load(MODEL).rerank("cat", [text, ENGLISH]),
        "fill": lambda: MaskedLM.load(MODEL).fill([f"{text} [MASK]", "The [MASK] sat."]),
        "zero-shot": lambda: ZeroShot.load(MODEL).classify([text, ENGLISH], labels),
        "zero-shot by entailment": lambda: ZeroShot.load(MODEL).classify([text, ENGLISH], labels, method="entailment"),
        "similarity": lambda: Embedder.load(MODEL).similarity(text, ENGLISH),
    }
    for name, call in calls.items():
        with pytest.warns(category) as caught:
            call()
        assert [str(warning.message)[:43] for warning in caught] == [message], name


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
    counter = LanguageCounter()
    counter.texts = 1
    counter.add(("дом\n" * 100,), 300, 0, 300)
    ((category, message),) = counter.messages()
    assert category is UnknownTokenWarning
    assert len(message) < 300
    assert "\n" not in message
