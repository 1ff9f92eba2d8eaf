"""ELMo's word vectors, and the tagger over them."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import bertie
from bertie.checkpoints.elmo import _datasets
from bertie.errors import CheckpointError, ConfigError, InputError, MissingPackageError, NotFoundError, TrainingError
from bertie.tasks import elmo as elmo_task
from bertie.training.finetune import elmo_tagging
from bertie.training.finetune.data import read_dataset
from tests.tasks.tiny_elmo import TAGS, WORDS, tiny_elmo, tiny_tagger

SENTENCES: list[list[str]] = [
    "a few words in a row".split(),
    ["one"],
    [],
    [f"w{i}" for i in range(300)],
    "Zürich , 東京 and 😀".split(),
]


# --- vectors ---


@pytest.mark.parametrize("budget", [1, 64, 100_000])
def test_vectors_do_not_depend_on_the_batch(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_elmo()
    alone = [model.embed_tokens([words])[0].layers for words in SENTENCES]
    monkeypatch.setattr(elmo_task, "BATCH_WORDS", budget)
    monkeypatch.setattr(elmo_task, "CHUNK_WORDS", budget)
    for sentences, expected in ((SENTENCES, alone), (SENTENCES[::-1], alone[::-1])):
        for result, layers in zip(model.embed_tokens(sentences), expected, strict=True):
            assert_allclose(result.layers, layers, atol=1e-6)


def test_vectors_do_not_depend_on_earlier_calls() -> None:
    """AllenNLP's do: its LSTM starts from the state in which the last batch left it."""
    model = tiny_elmo()
    first = model.embed_tokens([["the", "same", "words"]])[0].layers
    model.embed_tokens([["other", "words"]])
    assert_array_equal(model.embed_tokens([["the", "same", "words"]])[0].layers, first)


def test_both_directions_see_their_side_of_the_sentence() -> None:
    model = tiny_elmo()
    width = model.config.width
    a, b = (model.embed_tokens([words.split()])[0].layers for words in ("x y z", "x y other"))
    assert_array_equal(a[0, :2], b[0, :2])  # characters alone
    assert_allclose(a[:, :2, :width], b[:, :2, :width], atol=1e-6)  # forward
    assert np.abs(a[1:, :2, width:] - b[1:, :2, width:]).max() > 1e-4  # backward


def test_results() -> None:
    model = tiny_elmo()
    text = "Ada's son, 東京!"
    result = model.embed_tokens(text)
    assert result.words == ("Ada's", "son", ",", "東京", "!")
    assert [text[start:end] for start, end in result.offsets] == list(result.words)
    assert result.layers.shape == (3, 5, 96)
    assert (result.tokens_total, result.tokens_read, result.windows, result.words_cut) == (5, 5, 1, 0)
    assert_allclose(result.mean, result.layers.mean(0))
    same = model.embed_tokens([list(result.words)])[0]
    assert_array_equal(same.layers, result.layers)
    assert same.offsets == ((0, 5), (6, 9), (10, 11), (12, 14), (15, 16))  # of the words joined by spaces
    assert repr(result).startswith('ElmoResult(words=("Ada\'s",')


def test_words_that_are_cut_are_counted() -> None:
    model = tiny_elmo()
    result = model.embed_tokens([["x" * 48, "x" * 49, "x" * 500, "東" * 17]])[0]
    assert result.words_cut == 3
    assert_array_equal(result.layers[0, 1], result.layers[0, 0])  # the model cannot tell them apart
    assert result.words[2] == "x" * 500
    assert tiny_elmo(max_characters=5).embed_tokens(["abc abcd"])[0].words_cut == 1


def test_nothing_to_read() -> None:
    model = tiny_elmo()
    assert model.embed_tokens([]) == []
    results = model.embed_tokens(["", " \n", []])
    assert [result.layers.shape for result in results] == [(3, 0, 96)] * 3
    assert [result.tokens_total for result in results] == [0, 0, 0]


@pytest.mark.parametrize(
    ("sentences", "message"),
    [
        ([3], "text 0 must be a text or a list of words, not int"),
        (["a", ["b", None]], "text 1, word 1 must be a str"),
        ([["\ud800"]], "lone surrogate"),
        (None, "not NoneType"),
        ({"text": ["a"]}, r"table\['text'\]"),
    ],
)
def test_invalid_sentences(sentences: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tiny_elmo().embed_tokens(sentences)


def test_other_inputs() -> None:
    model = tiny_elmo()
    expected = model.embed_tokens([["a", "b"]])[0].layers
    for sentences in ((("a", "b"),), iter([["a", "b"]]), [np.array(["a", "b"])], ["a b"]):
        assert_array_equal(model.embed_tokens(sentences)[0].layers, expected)  # type: ignore[arg-type]


def test_random_models_follow_from_the_seed() -> None:
    a, b = tiny_elmo(), tiny_elmo()
    assert_array_equal(a.embed_tokens("x y").layers, b.embed_tokens("x y").layers)
    other = bertie.Elmo.random(a.config, seed=2)
    assert not np.array_equal(other.embed_tokens("x y").layers, a.embed_tokens("x y").layers)


def test_the_original_model_has_its_published_number_of_parameters() -> None:
    numbers = sum(prod(dataset.shape) for dataset in _datasets(bertie.ElmoConfig()))
    assert numbers == 93_600_848  # AllenNLP's page says 93.6 million


def test_unknown_arguments_are_explained() -> None:
    model = tiny_elmo()
    with pytest.raises(TypeError, match="batch_size"):
        model.embed_tokens(["a"], batch_size=8)  # type: ignore[call-overload]
    with pytest.raises(AttributeError, match="embed_tokens"):
        _ = model.embed_token
    with pytest.raises(ConfigError, match="device='nonsense'"):
        model.to("nonsense")
    assert repr(model) == "Elmo(model='random', layers=3, dimension=96, device='cpu')"


def test_copies() -> None:
    model = tiny_elmo()
    expected = model.embed_tokens("x y").layers
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_array_equal(other.embed_tokens("x y").layers, expected)


# --- the tagger ---


@pytest.fixture(scope="module")
def tagger() -> bertie.ElmoTagger:
    return tiny_tagger(lstm_width=6).fit(WORDS, TAGS, progress=False)


@pytest.mark.parametrize("options", [{}, {"lstm_width": 6}, {"layer_norm": True}, {"dropout": 0.2}])
def test_fit_learns(options: dict[str, Any]) -> None:
    tagger = tiny_tagger(**options).fit(WORDS, TAGS, progress=False)
    assert tagger.score(WORDS, TAGS) > 0.9
    assert tagger.labels == ("O", "B-LOC", "B-PER", "I-LOC")
    assert tagger.layer_weights.shape == (3,)
    assert np.isclose(tagger.layer_weights.sum(), 1)
    assert np.abs(tagger.layer_weights - 1 / 3).max() > 1e-3  # the mix was trained
    assert tagger.gamma != 1
    assert tagger.history_.curve[-1]["loss"] < tagger.history_.curve[0]["loss"] / 2


def test_fit_is_reproducible_and_leaves_elmo_alone() -> None:
    model = tiny_elmo()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    weights = [
        bertie.ElmoTagger(model, lstm_width=4, epochs=2, batch_size=8, seed=seed)
        .fit(WORDS, TAGS, progress=False)
        .head_.model.state_dict()
        for seed in (0, 0, 1)
    ]
    assert all(value.equal(weights[1][name]) for name, value in weights[0].items())
    assert not all(value.equal(weights[2][name]) for name, value in weights[0].items())
    assert all(value.equal(before[name]) for name, value in model.model.state_dict().items())


def test_fit_keeps_the_best_epoch() -> None:
    tagger = tiny_tagger(epochs=30, patience=3).fit(WORDS, TAGS, dev=(WORDS[:8], TAGS[:8]), progress=False)
    history = tagger.history_
    scores = [row["f1"] for row in history.evaluations]
    assert history.evaluations[scores.index(max(scores))]["step"] == history.best_step
    assert tagger.score(WORDS[:8], TAGS[:8]) == max(scores)
    assert history.stopped_early
    assert len(scores) < 30


def test_features_may_be_in_a_file(tagger: bertie.ElmoTagger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elmo_tagging, "MEMORY_BYTES", 0)
    again = tiny_tagger(lstm_width=6).fit(WORDS, TAGS, progress=False)
    for name, value in tagger.head_.model.state_dict().items():
        assert value.equal(again.head_.model.state_dict()[name]), name
    data, model = read_dataset("tag", WORDS, TAGS), tiny_elmo()
    expected = np.concatenate([layers.transpose(1, 0, 2) for layers in model.layers(WORDS)])
    for words in (1, 7, 10_000):
        monkeypatch.setattr(elmo_tagging, "CHUNK_WORDS", words)
        features = elmo_tagging.Features.compute(model, data)
        assert isinstance(features.rows, np.memmap)
        assert_allclose(features.rows, expected, atol=1e-6)


def test_data_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    rows = [{"words": w, "tags": t} for w, t in zip(WORDS, TAGS, strict=True)]
    file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    tagger = tiny_tagger().fit(file, columns={"tokens": "words"}, progress=False)
    assert tagger.score(str(file), columns={"tokens": "words"}) > 0.9


def test_predict_and_tag(tagger: bertie.ElmoTagger) -> None:
    assert tagger.predict([*WORDS[:4], []]) == [*TAGS[:4], []]
    result = tagger.tag("in New York with Ada")
    assert [(span.label, span.start, span.end, span.text) for span in result.spans] == [
        ("LOC", 3, 11, "New York"),
        ("PER", 17, 20, "Ada"),
    ]
    assert all(0.25 < span.score <= 1 for span in result.spans)
    assert (result.tokens_total, result.tokens_read, result.windows) == (5, 5, 1)
    assert tagger.tag([["in", "New", "York", "with", "Ada"], ""]) == [result, bertie.TaggingResult((), 0, 0, 1)]
    (only,) = tagger.tag("in New York with Ada", ignore_labels=["O", "PER"]).spans
    assert only.label == "LOC"


def test_tags_do_not_depend_on_the_batch(tagger: bertie.ElmoTagger) -> None:
    together = tagger.tag(["Ada lives in London", "no names at all " * 50, "Grace"])
    for text, result in zip(["Ada lives in London", "no names at all " * 50, "Grace"], together, strict=True):
        alone = tagger.tag(text)
        assert [(s.label, s.start, s.end) for s in alone.spans] == [(s.label, s.start, s.end) for s in result.spans]
        assert_allclose([s.score for s in alone.spans], [s.score for s in result.spans], atol=1e-5)


def test_scores_have_intervals(tagger: bertie.ElmoTagger) -> None:
    scores = tagger.evaluate(WORDS, TAGS)
    assert set(scores) == {"precision", "recall", "f1", "accuracy"}
    assert scores["f1"].low < scores["f1"].value <= scores["f1"].high
    assert scores["f1"].value == tagger.score(WORDS, TAGS)


def test_plain_tags_are_scored_by_accuracy() -> None:
    tags = [["X" if tag == "O" else "Y" for tag in row] for row in TAGS]
    tagger = tiny_tagger().fit(WORDS, tags, dev=(WORDS, tags), progress=False)
    assert set(tagger.evaluate(WORDS, tags)) == {"accuracy", "macro_f1"}
    assert tagger.score(WORDS, tags) > 0.9


def test_save_and_load(tagger: bertie.ElmoTagger, tmp_path: Path) -> None:
    tagger.save(tmp_path / "tagger")
    again = bertie.ElmoTagger.load(tmp_path / "tagger")
    assert again.labels == tagger.labels
    assert again.tag("Ada lives in Paris") == tagger.tag("Ada lives in Paris")
    assert again.get_params()["lstm_width"] == 6
    again.save(tmp_path / "again")
    for file in (tmp_path / "tagger").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    # ELMo's own files are complete, for others to read.
    assert_array_equal(
        bertie.Elmo.load(tmp_path / "tagger").embed_tokens("x").layers, tagger.elmo.embed_tokens("x").layers
    )


@pytest.mark.parametrize(
    ("file", "edit", "message"),
    [
        ("tagger.json", b"{}", "labels is missing"),
        ("tagger.json", b'{"labels": [], "hyperparameters": {}}', "list of names"),
        ("tagger.json", b'{"labels": ["O", 3], "hyperparameters": {}}', "list of names"),
        ("tagger.json", b'{"labels": ["O"], "hyperparameters": {"lstm_width": 1e9}}', "lstm_width"),
        ("tagger.json", b'{"labels": ["O"], "hyperparameters": {"lstm_width": 1, "layer_norm": 1}}', "layer_norm"),
        (
            "tagger.json",
            b'{"labels": ["O"], "hyperparameters": {"lstm_width": 6, "layer_norm": false, "model": "/etc"}}',
            "unknown key model",
        ),
        (
            "tagger.json",
            b'{"labels": ["O"], "hyperparameters": {"lstm_width": 6, "layer_norm": false}}',
            r"does not fit tagger\.json: out",
        ),
        ("tagger.safetensors", b"nonsense", "tagger.safetensors cannot be read"),
    ],
)
def test_invalid_folders(tagger: bertie.ElmoTagger, tmp_path: Path, file: str, edit: bytes, message: str) -> None:
    tagger.save(tmp_path / "tagger")
    (tmp_path / "tagger" / "checksums.json").unlink()
    (tmp_path / "tagger" / file).write_bytes(edit)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        bertie.ElmoTagger.load(tmp_path / "tagger")


def test_missing_parts(tagger: bertie.ElmoTagger, tmp_path: Path) -> None:
    tagger.save(tmp_path / "tagger")
    (tmp_path / "tagger" / "tagger.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 'tagger\.safetensors', which is missing"):
        bertie.ElmoTagger.load(tmp_path / "tagger")
    tiny_elmo().save(tmp_path / "elmo")
    with pytest.raises(NotFoundError, match=r"no tagger\.json"):
        bertie.ElmoTagger.load(tmp_path / "elmo")
    with pytest.raises(NotFoundError, match="not trained"):
        bertie.ElmoTagger(tmp_path / "elmo").predict(WORDS)
    shutil.rmtree(tmp_path / "elmo")
    with pytest.raises(NotFoundError, match="neither a folder nor a file"):
        bertie.ElmoTagger(tmp_path / "elmo").fit(WORDS, TAGS, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs=0 must be a whole number of at least 1"),
        ({"epochs": True}, "epochs=True"),
        ({"lstm_width": -1}, "lstm_width=-1"),
        ({"batch_size": "8"}, "batch_size='8'"),
        ({"patience": 0}, "patience=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": "a"}, "dropout='a'"),
        ({"lr": 0}, "lr=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_invalid_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bertie.ElmoTagger(tiny_elmo(), **options)


def test_invalid_data(tagger: bertie.ElmoTagger, monkeypatch: pytest.MonkeyPatch) -> None:
    for X, y, message in (
        (WORDS, TAGS[:-1], "24 texts and y 23 labels"),
        (WORDS, None, "has no labels"),
        ([["a", "b"]], [["O"]], "row 1"),
        ([["a", "b"]], [["O", "O"]], "needs two tags"),
    ):
        with pytest.raises(InputError, match=message):
            tiny_tagger().fit(X, y, progress=False)
    with pytest.raises(InputError, match=r"but predict\(\) takes lists of words; use tag\(\) for texts"):
        tagger.predict(["Ada lives in London"])
    with pytest.raises(InputError, match="wrap a single one in a list"):
        tagger.predict("Ada")
    with pytest.raises(TrainingError, match="pass a smaller lr="):
        tiny_tagger(lr=1e30).fit(WORDS, TAGS, progress=False)
    monkeypatch.setitem(sys.modules, "seqeval.metrics.sequence_labeling", None)
    with pytest.raises(MissingPackageError, match="seqeval"):
        tiny_tagger().fit(WORDS, TAGS, dev=(WORDS, TAGS), progress=False)


def test_scikit_learn() -> None:
    from sklearn.base import clone
    from sklearn.model_selection import cross_val_score

    tagger = tiny_tagger(epochs=15)
    copied, own = clone(tagger).get_params(), tagger.get_params()
    assert {name for name in own if copied[name] != own[name]} == {"model"}  # which is copied
    assert tagger.set_params(seed=3).get_params()["seed"] == 3
    assert cross_val_score(tagger, WORDS, TAGS, cv=2).mean() > 0.5


def test_unknown_arguments_of_the_tagger() -> None:
    with pytest.raises(TypeError, match=r"ElmoTagger\(\) has no argument 'learning_rate': use lr="):
        bertie.ElmoTagger(tiny_elmo(), learning_rate=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="hyperparameters are arguments of the constructor"):
        tiny_tagger().fit(WORDS, TAGS, epochs=3)  # type: ignore[call-arg]


def test_a_tagger_is_shown_with_its_mix(tagger: bertie.ElmoTagger) -> None:
    assert "layer_weights=[0." in repr(tagger)
    assert repr(tiny_tagger()) == "ElmoTagger(model='random')"
