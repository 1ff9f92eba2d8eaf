"""Fine-tuning of `Tagger`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError, MissingPackageError
from bertie.tasks.tag import align_words
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.training.finetune.toys import (
    FAST,
    TEXTS,
    assert_same_logits_in_transformers,
    tagged_words,
)

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # a fresh model has nothing to forget


def test_tagger(encoder: Path, tmp_path: Path) -> None:
    words, tags = tagged_words()
    task = bertie.Tagger(encoder, **FAST).fit(words, tags, dev=(words, tags), progress=False)
    assert task.score(words, tags) > 0.95
    assert [len(item) for item in task.predict(words)] == [len(item) for item in words]
    (results,) = task.tag(["Jane and the Emma of that."])
    assert [span.text for span in results.spans] == ["Jane", "Emma"]
    task.save(tmp_path / "out")
    loaded = bertie.Tagger.load(tmp_path / "out")
    assert loaded.predict(words) == task.predict(words)
    assert_same_logits_in_transformers(loaded.checkpoint, tmp_path / "out", "TokenClassification", TEXTS[0])
    with pytest.raises(InputError, match="text 0 must be a list of words"):
        task.predict(["Jane walked"])


def test_a_missing_metrics_package_is_an_error_before_training(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, tags = tagged_words(4)
    monkeypatch.setitem(sys.modules, "seqeval.metrics.sequence_labeling", None)
    monkeypatch.setattr("bertie.training.loop.Trainer.run", lambda self: pytest.fail("it was trained"))
    with pytest.raises(MissingPackageError, match="seqeval"):
        bertie.Tagger(encoder, **FAST).fit(words, tags, dev=(words, tags), progress=False)
    with pytest.raises(MissingPackageError, match="seqeval"):
        bertie.MultiTask(encoder, {"names": "tag"}).fit(
            {"names": (words, tags)}, dev={"names": (words, tags)}, progress=False
        )


def test_a_word_split_by_the_tokenizer_continues_its_span(encoder: Path) -> None:
    """U.S. is four words to BERT's tokenizer: the first says B, the others I, and together they count as one."""
    words, tags = [["the", "U.S.", "walked"], ["in", "London", "found"]], [["O", "B-LOC", "I-LOC"], ["O", "B-LOC", "O"]]
    task = bertie.Tagger(encoder, epochs=1, dev_fraction=0).fit(words, tags, progress=False)
    data = read_dataset("tag", words, tags)
    training = training_for(task)
    training.objective(data)
    (piece,) = next(training.items(data)).windows
    assert piece.values is not None
    assert piece.weights is not None
    encoding = task.tokenizer.encode("the U.S. walked")
    word, sub = align_words(encoding, "the U.S. walked", data.examples[0].words)
    said = [task.info.labels[int(i)] for i in piece.values]
    assert {said[t] for t in np.flatnonzero((word == 1) & (sub == 0))} == {"B-LOC"}
    assert {said[t] for t in np.flatnonzero((word == 1) & (sub > 0))} == {"I-LOC"}
    assert [float(piece.weights[word == w].sum()) for w in range(3)] == pytest.approx([1.0, 1.0, 1.0])
    assert float(piece.weights[word < 0].sum()) == 0.0


def test_words_are_aligned_with_tokens(encoder: Path) -> None:
    tokenizer = Checkpoint.load(encoder).tokenizer
    assert tokenizer is not None
    text, places = "Emma 's river-like U.S.", ((0, 4), (5, 7), (8, 18), (19, 23))
    encoding = tokenizer.encode(text)
    word, sub = align_words(encoding, text, places)
    for t, (start, end) in enumerate(encoding.offsets.tolist()):
        if encoding.sequence_ids[t] == 0:
            low, high = places[word[t]]
            assert low <= start < end <= high
    assert [int(sub[word == w].max()) for w in range(4)] == [0, 1, 2, 3]  # ' s; river - like; U . S .
