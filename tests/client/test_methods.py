"""The methods of both clients on a real server return what the local task objects return."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.client import AsyncClient, Client
from bertie.errors import InputError, NotFoundError
from bertie.search.index import Index
from bertie.serve.registry import Registry
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot
from tests.checkpoints.tiny_sentence import WORDS
from tests.serve.conftest import Running, Start

_draw = random.Random(5)


def words(count: int) -> str:
    return " ".join(_draw.choices(WORDS[5:], k=count))


LONG = [words(150), words(60)]  # the models have a max_length of 40
TEXTS = [*(words(_draw.randint(1, 12)) for _ in range(90)), "", "Zürich 東京 🚀", *LONG]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest, server: Running) -> Callable[..., Any]:
    """Call a method of either client, on one of the served models."""

    def sync(model: str | None, method: str, *args: Any, url: str = server.url, **options: Any) -> Any:
        with Client(url, model=model) as client:
            return getattr(client, method)(*args, **options)

    def asynchronous(model: str | None, method: str, *args: Any, url: str = server.url, **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient(url, model=model) as client:
                return await getattr(client, method)(*args, **options)

        return asyncio.run(main())

    return sync if request.param == "sync" else asynchronous


def same(found: Any, expected: Any) -> None:
    """Equal up to rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            same(one, two)
    elif hasattr(expected, "__dataclass_fields__"):
        same(asdict(found), asdict(expected))
    else:
        assert found == expected


def test_a_single_text_has_a_single_result(call: Callable[..., Any], registry: Registry) -> None:
    """As with the local objects."""
    text, other, small = TEXTS[0], TEXTS[1], registry["small"].checkpoint
    np.testing.assert_allclose(call("small", "embed", text), Embedder(small).embed(text), atol=1e-5)
    np.testing.assert_allclose(
        call("small", "similarity", text, TEXTS[:3]), Embedder(small).similarity(text, TEXTS[:3]), atol=1e-5
    )
    same(call("small", "similarity", text, other), Embedder(small).similarity(text, other))
    same(call("small", "classify", text), Classifier(small).classify(text))
    same(call("small", "zero_shot", text, ["cat", "dog"]), ZeroShot(small).classify(text, ["cat", "dog"]))
    same(call("small", "tag", text), Tagger(small).tag(text))
    same(call("small", "answer", text, other), Reader(small).answer(text, other))
    same(call("small", "answer", text, [other, text]), Reader(small).answer(text, [other, text]))
    same(call("small", "rerank", text, other), Reranker(small).rerank(text, other))
    same(call("small", "fill", "a [MASK]"), MaskedLM(small).fill("a [MASK]"))
    with pytest.raises(InputError, match="similarity takes two texts"):
        call("small", "similarity", text)
    with pytest.raises(InputError, match="answer takes a question and its document"):
        call("small", "answer", text)
    with pytest.raises(InputError, match="pass pairs of a question"):
        call("small", "answer", [text], [other])


@pytest.mark.parametrize("model", ["small", "embed", "fill"])
def test_embed(call: Callable[..., Any], registry: Registry, model: str) -> None:
    local = Embedder(registry[model].checkpoint)
    found = call(model, "embed", TEXTS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, local.embed(TEXTS), atol=1e-5)
    short = Embedder(registry[model].checkpoint, dimension=7)
    np.testing.assert_allclose(call(model, "embed", TEXTS[:3], dimension=7), short.embed(TEXTS[:3]), atol=1e-5)
    assert call(model, "embed", []).shape == (0, local.dimension)


def test_embed_each(server: Running, registry: Registry) -> None:
    with Client(server.url, model="embed") as client:
        found = list(client.embed_each(TEXTS))
    for one, two in zip(found, Embedder(registry["embed"].checkpoint).embed_each(TEXTS), strict=True):
        np.testing.assert_allclose(one.vector, two.vector, atol=1e-5)
        same(replace(one, vector=None), replace(two, vector=None))  # type: ignore[arg-type]
    assert max(one.windows for one in found) > 1


def test_similarity(call: Callable[..., Any], registry: Registry) -> None:
    local = Embedder(registry["embed"].checkpoint)
    a, b = TEXTS[:4], TEXTS[10:13]
    np.testing.assert_allclose(call("embed", "similarity", a, b), local.similarity(a, b), atol=1e-5)
    np.testing.assert_allclose(call("embed", "similarity", a), local.similarity(a), atol=1e-5)


def test_classify(call: Callable[..., Any], registry: Registry) -> None:
    local = Classifier(registry["classify"].checkpoint)
    items = [*TEXTS, ("A cat.", "A dog."), (TEXTS[3], TEXTS[90])]
    same(call("classify", "classify", items), local.classify(items))  # type: ignore[arg-type]
    options: dict[str, Any] = {"window_size": 16, "window_pooling": "max"}
    same(call("classify", "classify", LONG, **options), local.classify(LONG, **options))
    same(call("classify", "classify", LONG, window_size="sentence"), local.classify(LONG, window_size="sentence"))
    with pytest.raises(InputError, match="window_size"):
        call("classify", "classify", LONG, window_size=1)


def test_zero_shot(call: Callable[..., Any], registry: Registry) -> None:
    local = ZeroShot(registry["nli"].checkpoint)
    labels, template = ["cat", "dog", "mat"], "find a {}"
    same(call("nli", "zero_shot", TEXTS[:9], labels), local.classify(TEXTS[:9], labels))
    found = call("nli", "zero_shot", TEXTS[89:], labels, template=template, multi_label=True)
    same(found, local.classify(TEXTS[89:], labels, template=template, multi_label=True))


def test_tag(call: Callable[..., Any], registry: Registry) -> None:
    local = Tagger(registry["tag"].checkpoint)
    same(call("tag", "tag", TEXTS), local.tag(TEXTS))
    found = call("tag", "tag", TEXTS[:5], aggregation_strategy="first", ignore_labels=["O", "nothing"])
    same(found, local.tag(TEXTS[:5], aggregation_strategy="first", ignore_labels=["O", "nothing"]))


def test_answer(call: Callable[..., Any], registry: Registry) -> None:
    local = Reader(registry["answer"].checkpoint)
    questions: list[Any] = [("find the cat", TEXTS[i]) for i in range(80)] + [("the dog", [*LONG, "a mat"])]
    same(call("answer", "answer", questions), local.answer(questions))
    options: dict[str, Any] = {"top_k": 3, "max_answer_length": 5, "no_answer_threshold": 0.5}
    same(call("answer", "answer", questions[-3:], **options), local.answer(questions[-3:], **options))


def test_rerank(call: Callable[..., Any], registry: Registry) -> None:
    local = Reranker(registry["rerank"].checkpoint)
    found, expected = call("rerank", "rerank", "find the cat", TEXTS), local.rerank("find the cat", TEXTS)
    # Documents whose scores differ by rounding may change places.
    np.testing.assert_allclose([one.score for one in found], [one.score for one in expected], atol=1e-5)
    same(sorted(found, key=lambda one: one.index), sorted(expected, key=lambda one: one.index))
    same(call("rerank", "rerank", "the dog", TEXTS[:9], top_k=2), local.rerank("the dog", TEXTS[:9], top_k=2))
    assert call("rerank", "rerank", "the dog", []) == []


def test_fill(call: Callable[..., Any], registry: Registry) -> None:
    local = MaskedLM(registry["fill"].checkpoint)
    mask = local.tokenizer.mask_token
    texts = [f"{text} {mask} {text}" for text in TEXTS]
    same(call("fill", "fill", texts), local.fill(texts))
    candidates = ["cat", "dog", "mat"]
    same(
        call("fill", "fill", texts[:3], top_k=2, candidates=candidates),
        local.fill(texts[:3], top_k=2, candidates=candidates),
    )


def test_errors_are_those_of_the_local_tasks(call: Callable[..., Any], registry: Registry) -> None:
    mask = registry["fill"].checkpoint.tokenizer.mask_token
    with pytest.raises(InputError, match=r"^text 70: no "):
        call("fill", "fill", [f"a {mask}"] * 70 + ["none"])
    with pytest.raises(InputError, match=r"embed takes a list of texts, not dict; .* table\['text'\]"):
        call("embed", "embed", {"text": ["a"]})
    with pytest.raises(TypeError, match=r"embed\(\) has no argument 'promt': did you mean prompt=\?"):
        call("embed", "embed", ["a"], promt="b")
    with pytest.raises(NotFoundError, match="there is no model 'nonsense' here"):
        call("nonsense", "embed", ["a"])
    with pytest.raises(InputError, match="prompt_name='nonsense'"):
        call("embed", "embed", ["a"], prompt_name="nonsense")
    np.testing.assert_array_equal(
        call("embed", "embed", ["a cat"], prompt="the "), call("embed", "embed", ["the a cat"])
    )


def test_search(call: Callable[..., Any], start: Start, registry: Registry, tmp_path: Path) -> None:
    with Index.create(tmp_path / "index", Embedder(registry["embed"].checkpoint)) as index:
        index.add(TEXTS[:30])
        url = start(index=(index, "embed")).url
        queries = [*TEXTS[3:5], "find the cat"]
        option_sets: list[dict[str, Any]] = [{"mode": "dense"}, {"weights": {"dense": 1, "lexical": 0.5}}]
        for options in option_sets:
            for found, local in zip(
                call(None, "search_each", queries, 4, url=url, **options),
                index.search_batch(queries, 4, **options),
                strict=True,
            ):
                assert found.query == local.query
                assert set(found.timings) == set(local.timings)
                same(list(found), [replace(hit, source=None) for hit in local])
        with pytest.raises(InputError, match="weights="):
            call(None, "search", queries[0], weights={"dense": 1}, url=url)
        assert call(None, "search", queries[0], 2, mode="dense", url=url).query == queries[0]
    with pytest.raises(Exception, match="no index"):
        call(None, "search", "anything")


def test_attribute(call: Callable[..., Any], registry: Registry) -> None:
    local = Classifier(registry["classify"].checkpoint)
    items = [TEXTS[0], (TEXTS[1], TEXTS[2])]
    same(call("classify", "attribute", items, max_pieces=4), local.attribute(items, max_pieces=4))  # type: ignore[arg-type]
    label = local.classify(TEXTS[0]).label
    same(call("classify", "attribute", TEXTS[0], label=label), local.attribute(TEXTS[0], label=label))


def test_predict_tokens(call: Callable[..., Any], registry: Registry) -> None:
    local = MaskedLM(registry["fill"].checkpoint)
    same(call("fill", "predict_tokens", TEXTS[:2], top_k=2), local.predict_tokens(TEXTS[:2], top_k=2))
    same(call("fill", "predict_tokens", TEXTS[0]), local.predict_tokens(TEXTS[0]))


def test_ask(call: Callable[..., Any], start: Start, registry: Registry, tmp_path: Path) -> None:
    with Index.create(tmp_path / "index", Embedder(registry["embed"].checkpoint)) as index:
        index.add(TEXTS[:30])
        url = start(index=(index, "embed")).url
        options: dict[str, Any] = {"mode": "dense", "top_k": 2, "no_answer_threshold": 1.0}
        models = (registry[name].checkpoint for name in registry)
        first = next(model for model in models if "answer" in {info.kind for info in model.heads.values()})
        expected = index.ask("find the cat", 4, reader=Reader(first), **options)
        result = call(None, "ask", "find the cat", 4, url=url, **options)
        assert result.has_answer
        assert set(result.timings) == set(expected.timings)
        sources = [
            replace(answer, source=None, passage=replace(answer.passage, source=None)) for answer in expected.answers
        ]
        same(list(result.answers), sources)
        assert [hit.text for hit in result.passages] == list(
            dict.fromkeys(answer.passage.text for answer in result.answers)
        )
        same(
            [result.no_answer_score, result.tokens_total, result.tokens_read, result.windows],
            [expected.no_answer_score, expected.tokens_total, expected.tokens_read, expected.windows],
        )


def test_models_info_and_ready(call: Callable[..., Any], registry: Registry) -> None:
    assert call(None, "models") == list(registry)
    assert call(None, "info")["model_id"] == registry.default
    assert call(None, "ready") is True
