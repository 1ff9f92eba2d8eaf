"""Tasks pickle and copy: the same results in another process, and nothing shared with the original."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertie import Checkpoint, Classifier, Embedder, MaskedLM, MultiTask, Reader, Reranker, Tagger, ZeroShot
from bertie.checkpoints.fingerprint import weights_fingerprint
from tests.tasks.tiny import LABELS, document, sentences

Made = Callable[..., Path]
Call = Callable[[Any], Any]
NLI = ["contradiction", "neutral", "entailment"]
TEXTS = [*sentences(4), document(20), ""]


def pickled(task: Any) -> Any:
    return pickle.loads(pickle.dumps(task))


def call(task: Any) -> Any:
    """The task's results, as something to compare with ==."""
    if isinstance(task, Embedder):
        return task.embed(TEXTS).tolist()
    if isinstance(task, ZeroShot):
        return task.classify(TEXTS, ["London", "history"])
    if isinstance(task, Reranker):
        return task.rerank("who", TEXTS)
    if isinstance(task, Reader):
        return task.answer([("who", text) for text in TEXTS[:-1]], top_k=3)
    if isinstance(task, MaskedLM):
        return task.fill(["[MASK] " + text for text in TEXTS])
    if isinstance(task, MultiTask):
        return task.read(TEXTS)
    return task.tag(TEXTS) if isinstance(task, Tagger) else task.classify(TEXTS)


def every_task(made: Made) -> dict[str, Any]:
    nli = made("wordpiece", "ForSequenceClassification", labels=NLI)
    return {
        "classify": Classifier.load(nli),
        "zero-shot": ZeroShot.load(nli),
        "rerank": Reranker.load(made("wordpiece", "ForSequenceClassification", labels=["relevant"])),
        "answer": Reader.load(made("wordpiece", "ForQuestionAnswering")),
        "tag": Tagger.load(made("bpe", "ForTokenClassification", labels=LABELS)),
        "fill": MaskedLM.load(made("wordpiece", "ForMaskedLM")),
        "embed": Embedder.load(made("wordpiece", "")),
        "embed, int8": Embedder.load(made("wordpiece", ""), precision="int8", pooling="cls"),
        "embed, bf16": Embedder.load(made("bpe", ""), precision="bf16", normalize=True, dimension=8),
        "several": MultiTask.load(made("wordpiece", "ForTokenClassification", labels=LABELS)),
    }


def test_copies_have_the_same_results(made: Made) -> None:
    for name, task in every_task(made).items():
        expected = call(task)  # with the weights packed for the compiled encoder, which no copy can share
        for other in (copy.deepcopy(task), pickled(task), pickled(pickled(task)), copy.copy(task)):
            assert call(other) == expected, name
            assert type(other) is type(task)


def test_a_task_that_is_not_loaded_yet_stays_so(made: Made) -> None:
    classifier = Classifier(made("wordpiece", "ForSequenceClassification", labels=NLI), epochs=2)
    for other in (copy.deepcopy(classifier), pickled(classifier)):
        assert "model" not in other.__dict__
        assert other.get_params() == classifier.get_params()
        assert call(other) == call(classifier)


@pytest.fixture(scope="module")
def fitted(made: Made) -> Classifier:
    texts = sentences(16)
    labels = [index % 2 for index in range(16)]
    classifier = Classifier(made("wordpiece", ""), epochs=1, lr=1e-3, dev_fraction=0)
    return classifier.fit(texts, labels, progress=False)


def test_fitted_tasks_keep_their_head_and_the_type_of_their_labels(fitted: Classifier) -> None:
    import joblib

    file = io.BytesIO()
    joblib.dump(fitted, file)
    file.seek(0)
    for other in (copy.deepcopy(fitted), pickled(fitted), joblib.load(file)):
        assert call(other) == call(fitted)
        assert other.predict(TEXTS).tolist() == fitted.predict(TEXTS).tolist()
        assert set(other.predict(TEXTS).tolist()) <= {0, 1}
        assert other.recipe_ == fitted.recipe_


def test_copies_are_independent(fitted: Classifier, tmp_path: Path) -> None:
    expected = call(fitted)
    other = copy.deepcopy(fitted)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(0.5)
    assert call(other) != expected
    assert call(fitted) == expected
    pickled(fitted).save(tmp_path / "model")
    loaded = Classifier.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict_proba(TEXTS), fitted.predict_proba(TEXTS), atol=1e-6)


def test_fingerprints_of_copies(made: Made, fitted: Classifier, tmp_path: Path, monkeypatch: Any) -> None:
    """A copy knows its files while they are what it was loaded from: training it, or them, makes it another model."""
    monkeypatch.setenv("BERTIE_CACHE", str(tmp_path / "cache"))
    Checkpoint.load(made("wordpiece", "")).save(tmp_path / "model")
    checkpoint = Checkpoint.load(tmp_path / "model")
    original = weights_fingerprint(checkpoint)
    assert weights_fingerprint(fitted.checkpoint) != original
    for other in (copy.deepcopy(checkpoint), pickled(checkpoint)):
        assert other.origin is not None
        assert weights_fingerprint(other) == original
        with torch.no_grad():
            next(other.model.encoder.parameters()).add_(1.0)
        assert weights_fingerprint(other) != original
        assert weights_fingerprint(pickled(other)) == weights_fingerprint(other)
    data = pickle.dumps(checkpoint)
    fitted.checkpoint.save(tmp_path / "model", overwrite=True)
    assert weights_fingerprint(pickle.loads(data)) == original


@pytest.mark.parametrize(
    "method", [method for method in ("spawn", "fork") if method in multiprocessing.get_all_start_methods()]
)
def test_other_processes(made: Made, method: str) -> None:
    """Fork: torch's threads do not survive it, and computing with as many as before would wait for them forever."""
    embedder = Embedder.load(made("wordpiece", ""))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = embedder.embed(TEXTS * 100)
        with multiprocessing.get_context(method).Pool(1) as pool:
            result = pool.map_async(embedder.embed, [TEXTS * 100]).get(timeout=120)
            # Leaving the block only terminates the worker, which can miss the signal while it waits for work.
            pool.close()
            pool.join()
    finally:
        torch.set_num_threads(threads)
    np.testing.assert_array_equal(result[0], expected)
