"""Several heads over one encoder, trained together."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import ConfigError, InputError, NotFoundError
from tests.training.finetune.toys import (
    FAST,
    MOODS,
    TEXTS,
    tagged_words,
)

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def test_several_heads_over_one_encoder(encoder: Path, tmp_path: Path) -> None:
    words, tags = tagged_words()
    data = {
        "mood": (TEXTS, MOODS),
        "names": (words, tags),
        "rank": ([("q", t) for t in TEXTS], [m == "good" for m in MOODS]),
    }
    kinds = {"mood": "classify", "names": "tag", "rank": "rerank"}
    options = {**FAST, "lr": 2e-2, "epochs": 30, "freeze": "encoder"}
    before = Checkpoint.load(encoder).model.encoder.state_dict()
    heads = bertie.MultiTask(encoder, kinds, **options).fit(data, dev=data, progress=False)
    assert all((before[name] == tensor).all() for name, tensor in heads.checkpoint.model.encoder.state_dict().items())
    assert heads["mood"].score(TEXTS, MOODS) > 0.8
    assert heads["names"].score(words, tags) > 0.8
    read = heads.read(TEXTS[:5])
    assert [item["mood"] for item in read] == heads["mood"].classify(TEXTS[:5])
    assert [item["names"] for item in read] == heads["names"].tag(TEXTS[:5])
    heads.save(tmp_path / "out")
    loaded = bertie.MultiTask.load(tmp_path / "out")
    assert loaded.read(TEXTS[:5]) == read
    assert sorted(loaded) == sorted(kinds)
    tagger = bertie.load(tmp_path / "out", head="names")
    assert isinstance(tagger, bertie.Tagger)
    assert tagger.predict(words[:5]) == heads["names"].predict(words[:5])
    with pytest.raises(NotFoundError, match="pass head="):
        bertie.load(tmp_path / "out")
    with pytest.raises(InputError, match="needs a text-classification head"):
        bertie.Classifier.load(tmp_path / "out", head="names")
    with pytest.raises(ConfigError, match=r"together with bertie\.MultiTask"):
        heads["mood"].fit(TEXTS, MOODS)
    transformers.AutoModel.from_pretrained(tmp_path / "out")


def test_one_forward_pass_for_all_heads(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, tags = tagged_words(20)
    heads = bertie.MultiTask(encoder, {"mood": "classify", "names": "tag"}, epochs=1, lora=2, lr=1e-3)
    heads.fit({"mood": (TEXTS, MOODS), "names": (words, tags)}, progress=False)
    passes = []
    hidden = type(heads.checkpoint.model).hidden
    monkeypatch.setattr(type(heads.checkpoint.model), "hidden", lambda self, *a: passes.append(1) or hidden(self, *a))
    heads.read(TEXTS[:5])
    assert len(passes) == 1


def test_refusals(encoder: Path) -> None:
    with pytest.raises(ConfigError, match="tasks\\['x'\\]='sort' must be one of"):
        bertie.MultiTask(encoder, {"x": "sort"})
    with pytest.raises(InputError, match="names"):
        bertie.MultiTask(encoder, {"mood": "classify"}).fit({"mood": (TEXTS, MOODS), "names": (TEXTS, MOODS)})
    with pytest.raises(NotFoundError, match="call fit first"):
        bertie.MultiTask(encoder, {"mood": "classify"}).read(TEXTS)
