"""Sparse embeddings against sentence-transformers' SparseEncoder, over windows, in batches and through files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

import bertie
from bertie import Checkpoint, Embedder, SparseEmbedder
from bertie.errors import InputError, NotFoundError
from bertie.tasks.sparse_matrix import SparseMatrix
from tests.checkpoints.test_splade import splade_folder
from tests.tasks.tiny import document, save, sentences

TEXTS = [*sentences(9), "", "River"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return splade_folder(tmp_path_factory.mktemp("splade"))


@pytest.fixture(scope="module")
def embedder(made: tuple[Path, Any]) -> SparseEmbedder:
    return SparseEmbedder.load(made[0])


def dense(embedder: SparseEmbedder, texts: list[str]) -> np.ndarray:
    matrix = embedder.matrix(embedder.embed(texts))
    return np.stack([matrix.dense(i) for i in range(len(texts))])


def test_as_in_sentence_transformers(made: tuple[Path, Any], embedder: SparseEmbedder) -> None:
    theirs = made[1].encode(TEXTS).to_dense().cpu().numpy()
    np.testing.assert_allclose(dense(embedder, TEXTS), theirs, atol=1e-5)
    similar = made[1].similarity(made[1].encode(TEXTS[:3]), made[1].encode(TEXTS)).to_dense().cpu().numpy()
    np.testing.assert_allclose(embedder.similarity(TEXTS[:3], TEXTS), similar, rtol=1e-5)
    decoded = made[1].decode(made[1].encode(TEXTS[0]), top_k=5)
    result = embedder.embed(TEXTS[0], top_k=5)
    assert [token for token, _ in decoded] == list(result.tokens)
    np.testing.assert_allclose([weight for _, weight in decoded], result.weights, atol=1e-5)


def test_terms_are_sorted_and_named(embedder: SparseEmbedder) -> None:
    result = embedder.embed("Emma wrote a letter.")
    assert (np.diff(result.weights) <= 0).all()
    assert (result.weights > 0).all()
    assert result.tokens == tuple(embedder.tokenizer.token(id) for id in result.ids)
    top = embedder.embed("Emma wrote a letter.", top_k=3)
    np.testing.assert_array_equal(top.ids, result.ids[:3])
    assert repr(top).startswith("SparseEmbeddingResult(terms={")
    with pytest.raises(InputError, match="top_k=0 must be at least 1"):
        embedder.embed("x", top_k=0)


def test_a_result_does_not_depend_on_the_batch(embedder: SparseEmbedder) -> None:
    together = embedder.embed(TEXTS)
    for text, result in zip(TEXTS, together, strict=True):
        alone = embedder.embed(text)
        np.testing.assert_array_equal(alone.ids, result.ids)
        np.testing.assert_array_equal(alone.weights, result.weights)


def test_a_long_text_has_the_maximum_over_its_windows(made: tuple[Path, Any], embedder: SparseEmbedder) -> None:
    text = document(30)
    result = embedder.embed(text)
    assert result.windows > 1
    assert result.tokens_read == result.tokens_total
    (read,) = embedder.pipeline.read(embedder.inputs([text], None, ""))
    largest = np.zeros(embedder.vocabulary_size, np.float32)
    for window in read.windows:
        hidden = embedder.model.hidden(bertie.Batch.from_ids([window.encoding.ids]), "mlm")
        logits = embedder.model.head("mlm")(hidden, None, embedder.model.encoder.embeddings.words.weight)
        largest = np.maximum(largest, logits.relu().log1p().amax(0).detach().numpy())
    np.testing.assert_allclose(embedder.matrix([result]).dense(0), largest, atol=1e-5)
    truncated = SparseEmbedder.load(made[0], overflow="truncate")
    theirs = made[1].encode([text]).to_dense().cpu().numpy()
    np.testing.assert_allclose(dense(truncated, [text]), theirs, atol=1e-5)


def test_a_splade_folder_is_never_pooled(made: tuple[Path, Any]) -> None:
    assert isinstance(bertie.load(made[0]), SparseEmbedder)
    with pytest.raises(InputError, match=r"is a SPLADE model, with sparse embeddings: use bertie\.SparseEmbedder"):
        Embedder.load(made[0])
    with pytest.raises(InputError, match=r"bertie\.SparseEmbedder"):
        Embedder(Checkpoint.load(made[0]))


def test_any_masked_language_model_can_be_one(tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    source = SparseEmbedder.load(save(tmp_path / "mlm", "bpe", "ForMaskedLM"))
    source.save(tmp_path / "saved")
    theirs = SparseEncoder(str(tmp_path / "saved"), device="cpu").encode(TEXTS).to_dense().numpy()
    saved = bertie.load(tmp_path / "saved")
    assert isinstance(saved, SparseEmbedder)
    np.testing.assert_allclose(dense(saved, TEXTS), theirs, atol=1e-5)
    np.testing.assert_array_equal(dense(source, TEXTS), dense(saved, TEXTS))
    with pytest.raises(NotFoundError, match="no head 'mlm'"):
        SparseEmbedder.load(save(tmp_path / "bare", "wordpiece", ""))


def test_a_matrix_is_written_as_scipy_does(embedder: SparseEmbedder, tmp_path: Path) -> None:
    matrix = embedder.matrix(embedder.embed(TEXTS))
    matrix.save(tmp_path / "terms.npz")
    theirs = scipy.sparse.load_npz(tmp_path / "terms.npz")
    np.testing.assert_array_equal(theirs.toarray(), dense(embedder, TEXTS))
    scipy.sparse.save_npz(tmp_path / "scipy.npz", theirs)
    again = SparseMatrix.load(tmp_path / "scipy.npz")
    np.testing.assert_allclose(again.dot(matrix), (theirs @ theirs.T).toarray(), rtol=1e-5)
    np.savez(tmp_path / "other.npz", data=np.ones(1))
    with pytest.raises(InputError, match="does not hold a matrix in compressed sparse rows"):
        SparseMatrix.load(tmp_path / "other.npz")
    with pytest.raises(InputError, match="of different models"):
        matrix.dot(SparseMatrix(matrix.data, matrix.indices, matrix.indptr, (len(matrix), 1 << 20)))


def test_single_texts(embedder: SparseEmbedder) -> None:
    first, second = TEXTS[:2]
    table = embedder.similarity([first], [second, first])
    assert embedder.similarity(first, second) == table[0, 0]
    np.testing.assert_array_equal(embedder.similarity(first, [second, first]), table[0])
    np.testing.assert_array_equal(embedder.similarity([second, first], first)[1:], table[0, 1:])
    assert embedder.embed([]) == []
    with pytest.raises(InputError, match="similarity takes two texts"):
        embedder.similarity(first)


def test_bfloat16(made: tuple[Path, Any], embedder: SparseEmbedder) -> None:
    half = SparseEmbedder.load(made[0], precision="bf16")
    assert half.model.dtype == torch.bfloat16
    np.testing.assert_allclose(dense(half, TEXTS), dense(embedder, TEXTS), atol=0.1)
