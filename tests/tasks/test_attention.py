"""Attention weights, hidden states and token embeddings are those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertie import Classifier, Embedder
from bertie.errors import InputError
from tests.checkpoints.tiny_sentence import save_bert

TEXT = "the cat sat on a mat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("model"), limit=12)


def test_equal_transformers(folder: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        encoded = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
        theirs = model(**encoded, output_attentions=True, output_hidden_states=True)
    embedder = Embedder.load(folder)
    found = embedder.hidden_states(TEXT)
    np.testing.assert_allclose(found.states, torch.cat(theirs.hidden_states).numpy(), atol=1e-5)
    for layer, expected in enumerate(theirs.attentions):
        mean = embedder.attention(TEXT, layer=layer)
        np.testing.assert_allclose(mean.weights, expected[0].mean(0).numpy(), atol=1e-5)
        for head in range(mean.heads):
            one = embedder.attention(TEXT, layer=layer, head=head)
            np.testing.assert_allclose(one.weights, expected[0, head].numpy(), atol=1e-5)
    np.testing.assert_array_equal(embedder.attention(TEXT).weights, mean.weights)  # the last layer is the default
    tokens = embedder.token_embeddings(TEXT)
    np.testing.assert_allclose(tokens.vectors, theirs.last_hidden_state[0].numpy(), atol=1e-5)
    assert tokens.tokens == found.tokens == mean.tokens
    assert [TEXT[token.start : token.end] for token in tokens.tokens if not token.special] == TEXT.split()


def test_token_embeddings_of_long_texts(folder: Path) -> None:
    """Each token has a vector, from the window that owns it; the same alone and among others."""
    embedder = Embedder.load(folder)
    texts = [TEXT, f"{TEXT} " * 6, ""]
    results = embedder.token_embeddings(texts, progress=False)
    assert [len(result.tokens) for result in results] == [len(result.vectors) for result in results] == [8, 38, 2]
    assert [result.windows > 1 for result in results] == [False, True, False]
    for text, result in zip(texts, results, strict=True):
        np.testing.assert_array_equal(embedder.token_embeddings(text).vectors, result.vectors)
    whole = [token.text for token in results[1].tokens if not token.special]
    assert whole == TEXT.split() * 6
    truncated = Embedder.load(folder, overflow="truncate").token_embeddings(texts[1])
    assert len(truncated.tokens) == len(truncated.vectors) == 12
    prompted = embedder.token_embeddings("cat sat", prompt="the ")
    np.testing.assert_array_equal(prompted.vectors, embedder.token_embeddings("the cat sat").vectors)


def test_any_task(tmp_path: Path) -> None:
    """A task that is not an embedder shows its encoder as well."""
    from tests.tasks import tiny

    classifier = Classifier.load(tiny.save(tmp_path / "m", "wordpiece", "ForSequenceClassification"))
    result = classifier.attention("Emma walked.")
    np.testing.assert_allclose(result.weights.sum(1), 1, atol=1e-5)
    assert len(classifier.hidden_states("Emma walked.").states) == result.layers + 1


def test_errors(folder: Path) -> None:
    embedder = Embedder.load(folder)
    for options in ({"layer": 99}, {"layer": -1}, {"head": 99}):
        with pytest.raises(InputError, match="must lie between 0 and"):
            embedder.attention(TEXT, **options)
    for method in (embedder.attention, embedder.hidden_states):
        with pytest.raises(InputError, match=r"text has 32 tokens, and .* shown for at most 12"):
            method("a " * 30)
        with pytest.raises(InputError, match="text"):
            method(3)  # type: ignore[arg-type]
