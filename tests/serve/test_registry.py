"""Models by name: tasks found by their heads, and a reload that loses nobody."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import CheckpointError, ConfigError, InputError, NotFoundError
from bertie.serve.registry import Registry, name_models
from bertie.serve.tickets import Closed
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Regressor, Reranker, Tagger, ZeroShot
from tests.tasks.tiny import LABELS, save, sentences

ENGINE: dict[str, Any] = {"budget": 256, "devices": ["cpu"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads of all kinds."""
    checkpoint = Checkpoint.load(save(tmp_path_factory.mktemp("plain"), "wordpiece", "ForMaskedLM"))
    entails = {0: "contradiction", 1: "entailment", 2: "neutral"}
    checkpoint.add_head("mood", HeadInfo("classify", {0: "bad", 1: "good"}, "single_label_classification"))
    checkpoint.add_head("nli", HeadInfo("classify", entails, "single_label_classification"))
    checkpoint.add_head("value", HeadInfo("classify", {0: "LABEL_0"}, "regression", task="regress"))
    checkpoint.add_head("rank", HeadInfo("classify", {0: "LABEL_0"}, task="rerank"))
    checkpoint.add_head("names", HeadInfo("tag", dict(enumerate(LABELS))))
    checkpoint.add_head("spans", HeadInfo("answer"))
    folder = tmp_path_factory.mktemp("heads") / "my-model"
    checkpoint.save(folder)
    return folder


def test_tasks_are_found_by_their_heads(folder: Path) -> None:
    registry = Registry([folder], **ENGINE)
    try:
        assert list(registry) == ["my-model"] == [registry.default]
        with registry.use() as served:
            assert {name: type(task) for name, task in served.tasks.items()} == {
                "mlm": MaskedLM,
                "mood": Classifier,
                "nli": Classifier,
                "value": Regressor,
                "rank": Reranker,
                "names": Tagger,
                "spans": Reader,
                "embed": Embedder,
                "zero-shot": ZeroShot,
            }
            for task in served.tasks.values():
                assert task.checkpoint is served.checkpoint
            assert served.task(Classifier).head == "mood", "the plain one, as everywhere"
            assert served.task(Tagger) is served.task(Tagger)
            assert served.task(Tagger, overflow="truncate") is not served.task(Tagger)
            assert served.task(Embedder, dimension=8).embed(["the river"]).shape == (1, 8)
            with pytest.raises(NotFoundError, match="no head 'poems'"):
                served.task(Tagger, head="poems")
            before = served.engine.stats().requests
            assert_allclose(
                served.task(Embedder).embed(sentences(5)), Embedder.load(folder).embed(sentences(5)), atol=1e-5
            )
            said = served.task(ZeroShot).classify(["the river"], ["river", "novel"])[0]
            assert said.scores == pytest.approx(
                ZeroShot.load(folder).classify(["the river"], ["river", "novel"])[0].scores, abs=1e-5
            )
            assert served.engine.stats().requests == before + 2
        assert registry.ready
        assert registry["my-model"].engine.stats().batches >= 2
    finally:
        registry.close()
    assert not registry.ready


def test_a_bare_encoder_embeds(tmp_path: Path) -> None:
    registry = Registry({"bare": save(tmp_path / "x", "roberta", "")}, **ENGINE)
    try:
        with registry.use("bare") as served:
            assert list(served.tasks) == ["embed"]
    finally:
        registry.close()


def test_names(folder: Path) -> None:
    assert name_models([folder, f"other={folder}", "owner/model"]) == {
        "my-model": str(folder),
        "other": str(folder),
        "owner/model": "owner/model",
    }
    with pytest.raises(ConfigError, match="two models have the name 'my-model'"):
        name_models([folder, folder])
    with pytest.raises(ConfigError, match="'=x' must be a folder"):
        name_models(["=x"])
    with pytest.raises(InputError, match="put a single one into a list"):
        name_models(str(folder))
    with pytest.raises(ConfigError, match="at least one"):
        Registry({})


def test_only_named_models_are_served(folder: Path) -> None:
    registry = Registry([folder], **ENGINE)
    try:
        for name in (str(folder), "bertie-small", "../my-model", ""):
            with pytest.raises(NotFoundError, match="is not served here; served are: my-model"), registry.use(name):
                pass
    finally:
        registry.close()


def test_a_model_that_fails_to_load_closes_the_others(folder: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(NotFoundError):
        Registry({"good": folder, "bad": tmp_path / "nowhere" / "at" / "all"}, **ENGINE)
    assert threading.active_count() == before


def test_reload_drops_no_request(folder: Path, tmp_path: Path) -> None:
    """Requests all the time, while the model is exchanged for another and back; each is answered by one of the two."""
    at = tmp_path / "model"
    shutil.copytree(folder, at)
    other = Checkpoint.load(folder)
    with torch.no_grad():
        other.model.encoder.embeddings.words.weight.neg_()
    other.save(tmp_path / "other")
    texts = sentences(20)
    answers = [Embedder.load(one).embed(texts) for one in (folder, tmp_path / "other")]
    registry = Registry({"model": at}, **ENGINE)
    stop, seen = threading.Event(), set[int]()

    def ask(start: int) -> int:
        done = 0
        while not stop.is_set():
            i = (start + done) % len(texts)
            with registry.use("model") as served:
                vector = served.task(Embedder).embed([texts[i]])[0]
            mine = [n for n, one in enumerate(answers) if np.allclose(vector, one[i], atol=1e-5)]
            assert len(mine) == 1
            seen.add(mine[0])
            done += 1
        return done

    old = registry["model"]
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, 3 * n) for n in range(8)]
        try:
            for source in (tmp_path / "other", folder, tmp_path / "other"):
                shutil.rmtree(at)
                shutil.copytree(source, at)
                new = registry.reload("model")
                assert registry["model"] is new
            shutil.rmtree(at)
            at.mkdir()
            (at / "config.json").write_text("{")
            with pytest.raises(CheckpointError):
                registry.reload("model")
            assert registry["model"] is new, "the old one stays"
        finally:
            stop.set()
        assert all(one.result(30) > 0 for one in asking), "no errors, nobody left out"
    assert seen == {0, 1}
    registry.close()
    assert not old.engine.ready, "it was closed when its last request was done"
    with pytest.raises(Closed), registry.use("model") as served:
        served.task(Embedder).embed(["too late"])


def test_a_request_keeps_its_model(folder: Path) -> None:
    registry = Registry([folder], **ENGINE)
    try:
        with registry.use() as served:
            registry.reload("my-model")
            assert registry["my-model"] is not served
            assert served.task(Embedder).embed(["the river"]).shape == (1, 32)
            assert served.engine.ready
        for thread in registry._retiring:
            thread.join(20)
        assert not served.engine.ready
    finally:
        registry.close()


def test_a_folder_with_the_name_of_the_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bertie-small").mkdir()
    monkeypatch.chdir(tmp_path)
    assert name_models(["bertie-small"]) == {"bertie-small": "bertie-small"}
    assert name_models(["./bertie-small"]) == name_models([Path("bertie-small")]) == {"bertie-small": "./bertie-small"}
    whole = str(tmp_path / "bertie-small")
    assert name_models([whole]) == {"bertie-small": whole}
