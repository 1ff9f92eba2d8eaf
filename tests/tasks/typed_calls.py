"""The types of calls with a single text and with several, checked by mypy (pyproject.toml names this file)."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import bertie


def single_texts(
    embedder: bertie.Embedder,
    classifier: bertie.Classifier,
    zero_shot: bertie.ZeroShot,
    tagger: bertie.Tagger,
    reader: bertie.Reader,
    reranker: bertie.Reranker,
    masked_lm: bertie.MaskedLM,
    several: bertie.MultiTask,
) -> None:
    """One text: one result."""
    assert_type(embedder.embed("a"), NDArray[np.float32])
    assert_type(embedder.encode("a"), NDArray[np.float32])
    assert_type(embedder.similarity("a", "b"), float)
    assert_type(classifier.classify("a"), bertie.ClassificationResult)
    assert_type(zero_shot.classify("a", ["b", "c"]), bertie.ZeroShotResult)
    assert_type(tagger.tag("a", ignore_labels=["O"]), bertie.TaggingResult)
    assert_type(reader.answer("a", "b"), bertie.AnswerResult)
    assert_type(reader.answer("a", ["b", "c"], top_k=2), bertie.AnswerResult)
    assert_type(reader.answer(("a", "b")), bertie.AnswerResult)
    assert_type(reranker.rerank("a", "b"), bertie.RankedDocument)
    assert_type(reranker.predict(("a", "b")), float)
    assert_type(masked_lm.fill("[MASK]", top_k=2), bertie.FillMaskResult)
    assert_type(masked_lm.pseudo_log_likelihood("a"), bertie.PseudoLikelihood)
    assert_type(several.read("a"), dict[str, Any])


def several_texts(
    embedder: bertie.Embedder,
    classifier: bertie.Classifier,
    zero_shot: bertie.ZeroShot,
    tagger: bertie.Tagger,
    reader: bertie.Reader,
    reranker: bertie.Reranker,
    masked_lm: bertie.MaskedLM,
    several: bertie.MultiTask,
) -> None:
    """A list: a list, or an array."""
    assert_type(embedder.embed(["a"]), NDArray[np.float32])
    assert_type(embedder.similarity(["a"], ["b"]), NDArray[np.float32])
    assert_type(embedder.similarity("a", ["b"]), NDArray[np.float32])
    assert_type(classifier.classify(["a"]), list[bertie.ClassificationResult])
    assert_type(classifier.classify([("a", "b")]), list[bertie.ClassificationResult])
    assert_type(zero_shot.classify(["a"], ["b", "c"]), list[bertie.ZeroShotResult])
    assert_type(tagger.tag(iter(["a"])), list[bertie.TaggingResult])
    assert_type(reader.answer([("a", "b")]), list[bertie.AnswerResult])
    assert_type(reranker.rerank("a", ["b"]), list[bertie.RankedDocument])
    assert_type(reranker.predict([("a", "b")]), NDArray[np.float32])
    assert_type(masked_lm.fill(["[MASK]"]), list[bertie.FillMaskResult])
    assert_type(masked_lm.pseudo_log_likelihood(["a"]), list[bertie.PseudoLikelihood])
    assert_type(several.read(["a"]), list[dict[str, Any]])


def clients(client: bertie.Client) -> None:
    """The same with a client."""
    assert_type(client.embed("a"), NDArray[np.float32])
    assert_type(client.similarity("a", "b"), float)
    assert_type(client.similarity(["a"], "b"), NDArray[np.float32])
    assert_type(client.classify("a", head="b"), bertie.ClassificationResult)
    assert_type(client.classify([("a", "b")]), list[bertie.ClassificationResult])
    assert_type(client.zero_shot("a", ["b", "c"]), bertie.ZeroShotResult)
    assert_type(client.zero_shot(["a"], ["b", "c"], multi_label=True), list[bertie.ZeroShotResult])
    assert_type(client.tag("a", ignore_labels=["O"]), bertie.TaggingResult)
    assert_type(client.tag(["a"]), list[bertie.TaggingResult])
    assert_type(client.answer("a", "b", top_k=2), bertie.AnswerResult)
    assert_type(client.answer("a", ["b", "c"]), bertie.AnswerResult)
    assert_type(client.answer([("a", "b")]), list[bertie.AnswerResult])
    assert_type(client.rerank("a", "b"), bertie.RankedDocument)
    assert_type(client.rerank("a", ["b"], top_k=1), list[bertie.RankedDocument])
    assert_type(client.fill("[MASK]", top_k=2), bertie.FillMaskResult)
    assert_type(client.fill(["[MASK]"]), list[bertie.FillMaskResult])


async def asynchronous_clients(client: bertie.AsyncClient) -> None:
    """The same with await."""
    assert_type(await client.embed("a"), NDArray[np.float32])
    assert_type(await client.similarity("a", "b"), float)
    assert_type(await client.classify("a"), bertie.ClassificationResult)
    assert_type(await client.tag(["a"]), list[bertie.TaggingResult])
    assert_type(await client.answer("a", "b"), bertie.AnswerResult)
    assert_type(await client.rerank("a", "b"), bertie.RankedDocument)
