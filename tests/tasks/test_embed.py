from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Embedder
from bertie.errors import InputError
from bertie.tasks import base, embed
from bertie.tasks.base import TaskInput
from bertie.tasks.embed import _Options
from tests.checkpoints.tiny_sentence import WORDS, old_folder, save_bert

TEXTS = ["the cat sat", "a dog ran on the mat", "", "dog", "a " * 30, "find the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    base = save_bert(tmp_path_factory.mktemp("base"), limit=10)
    modules = [Transformer(str(base)), Pooling(16, "mean", include_prompt=False), Normalize()]
    saved = tmp_path_factory.mktemp("sentence")
    SentenceTransformer(modules=modules, device="cpu", prompts={"query": "find : "}).save(str(saved))
    return saved


@pytest.mark.parametrize("prompt", [None, "query"])
def test_same_vectors_as_sentence_transformers(folder: Path, prompt: str | None) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [text for text in TEXTS if text or not prompt]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, prompt_name=prompt)
    ours = Embedder.load(folder, overflow="truncate").embed(texts, prompt=prompt)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_old_folder_with_the_transformer_in_a_folder(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    old = old_folder(save_bert(tmp_path / "base"), tmp_path / "old")
    theirs = SentenceTransformer(str(old), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(Embedder.load(old, overflow="truncate").embed(TEXTS), theirs, atol=1e-6)


def test_a_text_beyond_reach_is_an_error_if_so_asked(folder: Path) -> None:
    with pytest.raises(InputError, match="text 1 has 32 tokens and the model reads 10"):
        Embedder.load(folder, overflow="error").embed(["dog", "a " * 30])


def test_a_plain_encoder_is_pooled_by_the_mean(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = save_bert(tmp_path)
    embedder = Embedder.load(folder)
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["the cat", "dog", "a dog ran on the mat"]
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    np.testing.assert_allclose(embedder.embed(texts), np.stack([state.mean(0).numpy() for state in states]), atol=1e-5)
    assert embedder.embed([]).shape == (0, 16)


def test_refusals(folder: Path) -> None:
    embedder = Embedder.load(folder)
    with pytest.raises(InputError, match="list of texts"):
        embedder.embed("the cat")
    with pytest.raises(InputError, match=r"prompt='passage' is not one of the checkpoint's prompts: .*query"):
        embedder.embed(["dog"], prompt="passage")
    with pytest.raises(InputError, match="overflow='cut' must be one of window, error, truncate"):
        Embedder(embedder.checkpoint, overflow="cut")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity_by_every_measure(folder: Path, how: str) -> None:
    from sentence_transformers import SimilarityFunction

    embedder = Embedder.load(folder)
    embedder.modules.similarity = how
    some, others = embedder.embed(["the cat sat", "a dog", "mat"]), embedder.embed(["dog", "the mat"])
    theirs = SimilarityFunction.to_similarity_fn(how)(some, others).numpy()
    np.testing.assert_allclose(embedder.compare(some, others), theirs, atol=1e-5)
    np.testing.assert_allclose(
        embedder.similarity(["the cat sat", "a dog", "mat"], ["dog", "the mat"]), theirs, atol=1e-5
    )


def many(count: int) -> list[str]:
    """Of all lengths up to twice the max_length, in no order."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS[5:], n)) for n in draw.integers(0, 20, count)]


def forced(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Small chunks and batches, and so many threads, as if there were a GPU."""
    true = Embedder._in_flight
    monkeypatch.setattr(base, "ITEMS_AT_ONCE", 7)
    monkeypatch.setattr(base, "TOKENS_A_BATCH", 40)

    def in_flight(self: Embedder, chunks: Any, how: Any, *_: Any) -> Any:
        return true(self, chunks, how, threads, late=True)

    monkeypatch.setattr(Embedder, "_in_flight", in_flight)


@pytest.mark.parametrize("threads", [0, 1, 2, 3])
@pytest.mark.parametrize("prompt", [None, "query"])
def test_many_at_a_time_as_all_tasks_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int, prompt: str | None
) -> None:
    texts, embedder = many(60), Embedder.load(folder)
    before = {None: "", "query": "find : "}[prompt]
    options = _Options(embedder._tokens(before))
    wanted = list(embedder.run(TaskInput(f"text {i}", (before + text,), options) for i, text in enumerate(texts)))
    assert {one.windows for one in wanted} > {1, 2}
    forced(monkeypatch, threads)
    found = list(embedder.embed_each(texts, prompt=prompt))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.vector, other.vector, atol=1e-6)
        assert (one.tokens_total, one.tokens_read, one.windows) == (
            other.tokens_total,
            other.tokens_read,
            other.windows,
        )
    np.testing.assert_array_equal(embedder.embed(texts, prompt=prompt), [one.vector for one in found])


@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_wrong_comes_after_what_was_right(folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    embedder = Embedder.load(folder)
    forced(monkeypatch, threads)
    texts = [*many(18), "a\ud800", *many(30)]
    found, before = [], threading.active_count()
    with pytest.raises(InputError, match="text 18: character 1 is the lone surrogate"):
        found.extend(embedder.embed_each(texts))
    assert len(found) >= 7
    assert threading.active_count() == before


def test_what_is_given_up_leaves_no_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced(monkeypatch, 2)
    before = threading.active_count()
    results = Embedder.load(folder).embed_each(many(60))
    next(results)
    assert threading.active_count() > before
    del results
    assert threading.active_count() == before


def test_threads_are_for_slow_tokenizers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: who tokenizes, and whether a block may land late."""
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(base, "ITEMS_AT_ONCE", 3)
    monkeypatch.setattr(Embedder, "_in_flight", lambda self, chunks, how, threads, late: seen.append((threads, late)))
    embedder = Embedder.load(folder)
    texts = many(10)
    for device, quick in (("cpu", True), ("meta", True), ("meta", False)):
        monkeypatch.setattr(type(embedder.model), "device", torch.device(device))
        monkeypatch.setattr(type(embedder.tokenizer), "is_compiled", lambda self, some, quick=quick: quick)
        embedder._blocks(texts, None)
        embedder._blocks(texts[:2], None)
    assert seen == [(0, False)] * 2 + [(0, True), (0, False)] + [(embed.THREADS, True), (0, False)]


def test_weigh_by_how_rare_words_are(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    seen = ["the the cat", "the dog", "the mat", "a cat"]
    embedder = Embedder.load(folder).weight_tokens(iter(seen), smoothing=0.5)
    words = embedder.modules.pooling.token_weights
    assert words is not None
    frequencies = {"the": 0.75, "cat": 0.5, "dog": 0.25, "mat": 0.25, "a": 0.25, "[CLS]": 1.0, "[SEP]": 1.0}
    assert words.tolist() == pytest.approx([round(0.5 / (0.5 + frequencies.get(word, 0.0)), 4) for word in WORDS])
    embedder.save(tmp_path / "new")
    again = Embedder.load(tmp_path / "new", overflow="truncate")
    theirs = SentenceTransformer(str(tmp_path / "new"), device="cpu")
    for prompt in (None, "query"):
        texts = [text for text in TEXTS if text or not prompt]
        vectors = again.embed(texts, prompt=prompt)
        np.testing.assert_allclose(vectors, theirs.encode(texts, prompt_name=prompt), atol=1e-6)
        for text, vector in zip(texts, vectors, strict=True):
            np.testing.assert_array_equal(again.embed([text], prompt=prompt)[0], vector)
    anew = Embedder.load(tmp_path / "new").weight_tokens(["cat"])
    assert anew.modules.pooling.token_weights is not None
    assert anew.modules.pooling.token_weights[WORDS.index("the")] == 1
    for wrong, message in (
        ({"texts": []}, "at least one text"),
        ({"texts": "the cat"}, "weight_tokens takes a list of texts"),
        ({"texts": ["a", 3]}, "text 1"),
        ({"texts": ["a"], "smoothing": 0}, "smoothing=0 must be a number above 0"),
        ({"texts": ["a"], "smoothing": "1"}, "smoothing='1' must be"),
    ):
        with pytest.raises(InputError, match=message):
            again.weight_tokens(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="token weights need mean pooling; this model's is max"):
        Embedder.load(folder, pooling="max").weight_tokens(seen)


def test_weights_of_words_are_trained(folder: Path, tmp_path: Path) -> None:
    embedder = Embedder.load(folder).weight_tokens(["the cat", "a dog"])
    embedder.save(tmp_path / "weighted")
    pairs = [("the cat sat", "a cat"), ("the dog ran", "a dog"), ("the mat", "on a mat"), ("find", "query")]
    trained = Embedder(tmp_path / "weighted", epochs=3, lr=0.05, batch_size=4, freeze="encoder").fit(pairs)
    before, after = embedder.modules.pooling.token_weights, trained.modules.pooling.token_weights
    assert before is not None
    assert after is not None
    assert not torch.equal(before, after)
    trained.save(tmp_path / "trained")
    again = Embedder.load(tmp_path / "trained")
    assert again.modules.pooling.token_weights is not None
    assert torch.equal(again.modules.pooling.token_weights, after)
    np.testing.assert_allclose(again.embed(TEXTS), trained.embed(TEXTS), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"dimensions": 3}, {"pooling": "max"}], ids=str)
@pytest.mark.parametrize("kind", ["sentence", "plain", "weighted"])
def test_a_few_at_once_as_among_many(
    folder: Path, tmp_path: Path, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way for a query says what the way for many says, whichever texts and settings it takes."""
    embedder = Embedder.load(folder if kind == "sentence" else save_bert(tmp_path, limit=10), **options)
    if kind == "weighted" and "pooling" not in options:
        embedder.weight_tokens(TEXTS)
    texts = [*TEXTS[:3], "a " * 30]
    prompt = "query" if kind == "sentence" else None
    for few in ([texts[0]], texts[:3], texts):
        found = embedder.embed(few)
        with monkeypatch.context() as slow:
            slow.setattr(embedder, "_at_once", lambda texts, prompt: None)
            np.testing.assert_array_equal(found, embedder.embed(few), strict=True)
    taken = [embedder._at_once(some, None) is not None for some in (texts[:1], texts[:3], texts, TEXTS)]
    usual = options.keys() <= {"normalize"}
    assert taken == [usual, usual, False, False]  # one is too long; too many
    assert embedder._at_once((texts[0],), None) is None
    assert embedder._at_once(texts[:1], prompt) is None or kind != "sentence"  # pooling leaves the prompt out
    for wrong in ([3], ["\ud800"], [None]):
        with pytest.raises(InputError, match="text 0"):
            embedder.embed(wrong)  # type: ignore[arg-type]
