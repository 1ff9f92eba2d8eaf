from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Embedder
from bertie.errors import BertieWarning, InputError
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
def test_embeddings_equal_sentence_transformers(folder: Path, prompt: str | None) -> None:
    from sentence_transformers import SentenceTransformer

    texts = [text for text in TEXTS if text or not prompt]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, prompt_name=prompt)
    ours = Embedder.load(folder, overflow="truncate").embed(texts, prompt_name=prompt)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_literal_prompts(folder: Path) -> None:
    """A prompt that is given as a text equals the same prompt by its name, and sentence-transformers' own."""
    from sentence_transformers import SentenceTransformer

    texts = [text for text in TEXTS if text]
    embedder, theirs = Embedder.load(folder, overflow="truncate"), SentenceTransformer(str(folder), device="cpu")
    named = embedder.embed(texts, prompt_name="query")
    np.testing.assert_array_equal(embedder.embed(texts, prompt="find : "), named)
    np.testing.assert_array_equal([each.vector for each in embedder.embed_each(texts, prompt="find : ")], named)
    np.testing.assert_allclose(embedder.embed(texts, prompt="a dog "), theirs.encode(texts, prompt="a dog "), atol=1e-6)
    np.testing.assert_array_equal(embedder.embed(texts[0], prompt=""), embedder.embed(texts[0]))
    with pytest.warns(
        BertieWarning, match=r"prompt='query' is prepended literally to each text.*use prompt_name='query'"
    ):
        embedder.embed(texts, prompt="query")


def test_old_folder_with_a_transformer_subfolder(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    old = old_folder(save_bert(tmp_path / "base"), tmp_path / "old")
    theirs = SentenceTransformer(str(old), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(Embedder.load(old, overflow="truncate").embed(TEXTS), theirs, atol=1e-6)


def test_overflow_error(folder: Path) -> None:
    with pytest.raises(InputError, match="text 1 has 32 tokens, but the maximum length is 10"):
        Embedder.load(folder, overflow="error").embed(["dog", "a " * 30])


def test_a_plain_encoder_is_mean_pooled(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    folder = save_bert(tmp_path)
    embedder = Embedder.load(folder)
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["the cat", "dog", "a dog ran on the mat"]
    with torch.no_grad():
        states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0] for text in texts]
    np.testing.assert_allclose(embedder.embed(texts), np.stack([state.mean(0).numpy() for state in states]), atol=1e-5)
    assert embedder.embed([]).shape == (0, 16)


def test_invalid_arguments(folder: Path) -> None:
    embedder = Embedder.load(folder)
    with pytest.raises(InputError, match="list of texts"):
        embedder.embed(b"the cat")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"prompt_name='passage' is not one of the checkpoint's prompts: .*query"):
        embedder.embed(["dog"], prompt_name="passage")
    with pytest.raises(InputError, match=r"prompt='find : ' is a text and prompt_name='query' a name; pass one"):
        embedder.embed(["dog"], prompt="find : ", prompt_name="query")
    with pytest.raises(InputError, match="prompt=3 must be a text"):
        embedder.embed(["dog"], prompt=3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="overflow='cut' must be one of window, error, truncate"):
        Embedder(embedder.checkpoint, overflow="cut")  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity_functions(folder: Path, how: str) -> None:
    from sentence_transformers import SimilarityFunction

    embedder = Embedder.load(folder)
    embedder.modules.similarity = how
    some, others = embedder.embed(["the cat sat", "a dog", "mat"]), embedder.embed(["dog", "the mat"])
    theirs = SimilarityFunction.to_similarity_fn(how)(some, others).numpy()
    np.testing.assert_allclose(embedder.compare(some, others), theirs, atol=1e-5)
    np.testing.assert_allclose(embedder.compare(some[0], others), theirs[0], atol=1e-5)
    np.testing.assert_allclose(embedder.compare(some, others[1]), theirs[:, 1], atol=1e-5)
    assert float(embedder.compare(torch.from_numpy(some[0]), others[1])) == pytest.approx(theirs[0, 1], abs=1e-5)
    with pytest.raises(InputError, match=r"use similarity\(a, b\) for texts"):
        embedder.compare("the cat", "dog")
    with pytest.raises(InputError, match=r"the embeddings have \d+ and 3 dimensions"):
        embedder.compare(some, others[:, :3])
    np.testing.assert_allclose(
        embedder.similarity(["the cat sat", "a dog", "mat"], ["dog", "the mat"]), theirs, atol=1e-5
    )


def many(count: int) -> list[str]:
    """Texts of all lengths up to twice the maximum length, in random order."""
    draw = np.random.default_rng(0)
    return [" ".join(draw.choice(WORDS[5:], n)) for n in draw.integers(0, 20, count)]


def test_weight_tokens(folder: Path, tmp_path: Path) -> None:
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
        vectors = again.embed(texts, prompt_name=prompt)
        np.testing.assert_allclose(vectors, theirs.encode(texts, prompt_name=prompt), atol=1e-6)
        for text, vector in zip(texts, vectors, strict=True):
            np.testing.assert_array_equal(again.embed([text], prompt_name=prompt)[0], vector)
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
            again.weight_tokens(**wrong)
    with pytest.raises(InputError, match="token weights need mean pooling; this model's is max"):
        Embedder.load(folder, pooling="max").weight_tokens(seen)


def test_token_weights_are_trained(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("options", [{}, {"normalize": True}, {"dimension": 3}, {"pooling": "max"}], ids=str)
@pytest.mark.parametrize("kind", ["sentence", "plain", "weighted"])
def test_embedding_is_independent_of_the_batch(
    folder: Path, tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """The embedding of a text is the same to the bit, alone, with a few others, and as one of many."""
    embedder = Embedder.load(folder if kind == "sentence" else save_bert(tmp_path, limit=10), **options)
    if kind == "weighted" and "pooling" not in options:
        embedder.weight_tokens(TEXTS)
    texts = [*TEXTS[:3], "a " * 30]
    prompts = (None, "query") if kind == "sentence" else (None,)
    for prompt in prompts:
        together = embedder.embed([*texts, *many(40)], prompt_name=prompt)
        for i, text in enumerate(texts):
            np.testing.assert_array_equal(embedder.embed([text], prompt_name=prompt)[0], together[i], strict=True)
            (each,) = embedder.embed_each((text,), prompt_name=prompt)
            np.testing.assert_array_equal(each.vector, together[i], strict=True)
    for wrong in ([3], ["\ud800"], [None]):
        with pytest.raises(InputError, match="text 0"):
            embedder.embed(wrong)  # type: ignore[arg-type]
