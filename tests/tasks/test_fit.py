"""`fit` on every task: it learns, it predicts, what it saves loads here and in transformers, scikit-learn knows it."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import Calibration
from bertie.errors import ConfigError, InputError, MissingPackageError, NotFoundError
from bertie.tasks.tag import align_words
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.tasks import tiny

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # the models here know nothing that could be lost

FAST: dict[str, Any] = {"lr": 2e-3, "epochs": 5, "batch_size": 8}


def moody(count: int, seed: int) -> tuple[list[str], list[str]]:
    """Sentences with a word that gives them away."""
    draw = random.Random(seed)
    plain = [word for word in tiny.WORDS if word not in ("beautiful", "terrible")]
    texts, moods = [], []
    for i in range(count):
        words = [draw.choice(plain) for _ in range(draw.randint(3, 8))]
        words[draw.randrange(len(words))] = ("terrible", "beautiful")[i % 2]
        texts.append(" ".join(words) + draw.choice(".!?"))
        moods.append(("bad", "good")[i % 2])
    return texts, moods


TEXTS, MOODS = moody(96, seed=3)
NAMES = ("emma", "jane", "austen", "london")


def worded(count: int = 64) -> tuple[list[list[str]], list[list[str]]]:
    draw = random.Random(1)
    words = [[draw.choice((*NAMES, *tiny.WORDS[:12])) for _ in range(draw.randint(3, 9))] for _ in range(count)]
    return words, [["B-PER" if word.lower() in NAMES else "O" for word in one] for one in words]


def asked(count: int = 96) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The answer is the only name."""
    draw = random.Random(2)
    plain = [word for word in tiny.WORDS if word.lower() not in NAMES]
    pairs, answers = [], []
    for _ in range(count):
        words = [draw.choice(plain) for _ in range(6)]
        at = draw.randrange(6)
        words[at] = draw.choice(NAMES)
        pairs.append(("who was found", " ".join(words)))
        answers.append([words[at]])
    return pairs, answers


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small and fresh, as transformers makes one: it learns fast."""
    folder = tmp_path_factory.mktemp("encoder")
    text = tiny.tokenizer("wordpiece")
    text.model_max_length = tiny.REACH
    config = transformers.BertConfig(
        vocab_size=len(text),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=tiny.REACH,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    text.save_pretrained(folder)
    return folder


def agree(one: Checkpoint, folder: Path, kind: str, text: str) -> None:
    """What was saved gives the same logits in transformers."""
    theirs = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder).eval()
    coded = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    assert one.tokenizer is not None
    (head,) = one.heads
    with torch.no_grad():
        expected = theirs(**coded).logits.flatten()
        got = one.model(bertie.Batch.from_encodings([one.tokenizer.encode(text)]), head).flatten()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_classifier(encoder: Path, tmp_path: Path) -> None:
    task = bertie.Classifier(encoder, abstain=0.9, **FAST)
    fitted = task.fit(TEXTS, MOODS, dev=(TEXTS, MOODS), progress=False)
    assert fitted is task
    assert task.score(TEXTS, MOODS) > 0.9
    assert task.history_.evaluations[-1]["accuracy"] > 0.9
    assert list(task.classes_) == ["bad", "good"]
    table = task.predict_proba(TEXTS[:7])
    assert table.dtype == np.float32
    assert table.shape == (7, 2)
    assert table.sum(1) == pytest.approx(1.0, abs=1e-6)
    assert task.predict(TEXTS[:7]).tolist() == [task.classes_[i] for i in table.argmax(1)]
    temperature = task.info.calibration
    assert temperature.temperature != 1.0
    assert temperature.precision == 0.9
    assert {one.sure for one in task.classify(TEXTS)} <= {True, False}
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Classifier)
    assert loaded.info == task.info
    assert loaded.classify(TEXTS[:3]) == task.classify(TEXTS[:3])
    agree(loaded.checkpoint, tmp_path / "out", "SequenceClassification", TEXTS[0])


def test_probabilities_are_divided_by_the_temperature(encoder: Path) -> None:
    task = bertie.Classifier(encoder, **FAST).fit(TEXTS, MOODS, progress=False)
    plain = task.predict_proba(TEXTS[:5])
    task.checkpoint.set_calibration("classify", Calibration(temperature=3.0))
    expected = plain ** (1 / 3)
    assert task.predict_proba(TEXTS[:5]) == pytest.approx(expected / expected.sum(1, keepdims=True), abs=1e-5)
    assert task.predict(TEXTS[:5]).tolist() == [task.classes_[i] for i in plain.argmax(1)]


def test_labels_come_back_as_they_were_given(encoder: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1)
    numbers = [int(mood == "good") for mood in MOODS]
    found = task.fit(TEXTS, numbers, progress=False).predict(TEXTS[:4])
    assert found.dtype.kind == "i"
    assert set(found.tolist()) <= {0, 1}


def test_several_labels_a_text(encoder: Path, tmp_path: Path) -> None:
    wanted = [[mood, "short"] if len(text.split()) < 6 else [mood] for text, mood in zip(TEXTS, MOODS, strict=True)]
    task = bertie.Classifier(encoder, **FAST).fit(TEXTS, wanted, dev=(TEXTS, wanted), progress=False)
    assert task.problem == "multi"
    assert task.info.calibration.threshold is not None
    assert task.score(TEXTS, wanted) > 0.8
    assert isinstance(task.predict(TEXTS[:2])[0], tuple)
    task.save(tmp_path / "out")
    assert bertie.Classifier.load(tmp_path / "out").predict(TEXTS).tolist() == task.predict(TEXTS).tolist()


def test_pairs(encoder: Path) -> None:
    pairs = [(text, "a river") for text in TEXTS]
    assert bertie.Classifier(encoder, **FAST).fit(pairs, MOODS, progress=False).score(pairs, MOODS) > 0.85


def test_long_texts_train_on_windows_with_the_label_at_the_whole(encoder: Path) -> None:
    texts = [f"{tiny.document(12, i)} {'Emma' if i % 2 else 'Berlin'} {tiny.document(12, i + 50)}" for i in range(24)]
    labels = [i % 2 for i in range(24)]
    task = bertie.Classifier(encoder, epochs=2, batch_size=4).fit(texts, labels, progress=False)
    assert task.classify(texts[:1])[0].windows > 3
    whole = sum(one.tokens_total for one in task.classify(texts))
    assert task.history_.tokens / 2 > whole  # every token in each epoch, and overlaps
    cut = bertie.Classifier(encoder, epochs=2, batch_size=4, overflow="truncate").fit(texts, labels, progress=False)
    assert cut.history_.tokens / 2 <= 24 * tiny.REACH
    with pytest.raises(InputError, match="row 1 has"):
        bertie.Classifier(encoder, overflow="error").fit(texts, labels, progress=False)


def test_windows_are_pooled_in_training_as_in_reading(encoder: Path) -> None:
    """The loss that training sees is that of the probabilities that the classifier gives."""
    texts, labels = [tiny.document(20, i) for i in range(4)], ["a", "b", "a", "b"]
    task = bertie.Classifier(encoder, epochs=1, lr=1e-12, batch_size=4, dropout=0.0)
    task.fit(texts, labels, progress=False)
    table = task.predict_proba(texts)
    expected = -np.log([row[int(label == "b")] for row, label in zip(table, labels, strict=True)]).mean()
    assert task.history_.curve[-1]["loss"] == pytest.approx(expected, rel=1e-4)


def test_regressor(encoder: Path, tmp_path: Path) -> None:
    values = [3.0 + 2.0 * (mood == "good") + 0.01 * len(text) for text, mood in zip(TEXTS, MOODS, strict=True)]
    task = bertie.Regressor(encoder, **FAST | {"epochs": 15}).fit(TEXTS, values, dev=(TEXTS, values), progress=False)
    assert task.score(TEXTS, values) > 0.9
    assert task.predict(TEXTS).mean() == pytest.approx(np.mean(values), abs=0.3)
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Regressor)
    assert loaded.predict(TEXTS[:5]) == pytest.approx(task.predict(TEXTS[:5]))
    agree(loaded.checkpoint, tmp_path / "out", "SequenceClassification", TEXTS[0])


def test_tagger(encoder: Path, tmp_path: Path) -> None:
    words, tags = worded()
    task = bertie.Tagger(encoder, **FAST).fit(words, tags, dev=(words, tags), progress=False)
    assert task.score(words, tags) > 0.95
    assert [len(one) for one in task.predict(words)] == [len(one) for one in words]
    (found,) = task.tag(["Jane and the Emma of that."])
    assert [span.text for span in found.spans] == ["Jane", "Emma"]
    task.save(tmp_path / "out")
    loaded = bertie.Tagger.load(tmp_path / "out")
    assert loaded.predict(words) == task.predict(words)
    agree(loaded.checkpoint, tmp_path / "out", "TokenClassification", TEXTS[0])
    with pytest.raises(InputError, match="text 0 must be a list of words"):
        task.predict(["Jane walked"])  # type: ignore[list-item]


def test_a_package_that_scores_need_is_missed_before_the_training(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, tags = worded(4)
    monkeypatch.setitem(sys.modules, "seqeval.metrics.sequence_labeling", None)
    monkeypatch.setattr("bertie.training.loop.Trainer.run", lambda self: pytest.fail("it was trained"))
    with pytest.raises(MissingPackageError, match="seqeval"):
        bertie.Tagger(encoder, **FAST).fit(words, tags, dev=(words, tags), progress=False)
    with pytest.raises(MissingPackageError, match="seqeval"):
        bertie.MultiTask(encoder, {"names": "tag"}).fit(
            {"names": (words, tags)}, dev={"names": (words, tags)}, progress=False
        )


def test_a_word_that_the_tokenizer_parts_goes_on_with_itself(encoder: Path) -> None:
    """U.S. is four words to BERT's tokenizer: the first says B, the others I, and together they count as one."""
    words, tags = [["the", "U.S.", "walked"], ["in", "London", "found"]], [["O", "B-LOC", "I-LOC"], ["O", "B-LOC", "O"]]
    task = bertie.Tagger(encoder, epochs=1).fit(words, tags, progress=False)
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


def test_reader(encoder: Path, tmp_path: Path) -> None:
    pairs, answers = asked()
    task = bertie.Reader(encoder, **FAST).fit(pairs, answers, dev=(pairs, answers), progress=False)
    assert task.score(pairs, answers) > 0.75
    task.save(tmp_path / "out")
    assert bertie.Reader.load(tmp_path / "out").predict(pairs[:5]) == task.predict(pairs[:5])


def test_reranker(encoder: Path, tmp_path: Path) -> None:
    pairs, labels = [(str(i // 4), text) for i, text in enumerate(TEXTS)], [int(mood == "good") for mood in MOODS]
    task = bertie.Reranker(encoder, **FAST).fit(pairs, labels, dev=(pairs, labels), progress=False)
    assert task.score(pairs, labels) > 0.85
    best = task.rerank("0", TEXTS[:20])[0]
    assert MOODS[best.index] == "good"
    task.save(tmp_path / "out")
    loaded = bertie.load(tmp_path / "out")
    assert isinstance(loaded, bertie.Reranker)
    assert loaded.predict(pairs[:5]) == pytest.approx(task.predict(pairs[:5]))
    from sentence_transformers import CrossEncoder

    theirs = CrossEncoder(str(tmp_path / "out"), device="cpu").predict(pairs[:5])
    assert task.predict(pairs[:5]) == pytest.approx(theirs, abs=1e-5)


def test_fit_begins_anew(encoder: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1, seed=5)
    first = task.fit(TEXTS, MOODS, progress=False).predict_proba(TEXTS[:5])
    again = task.fit(TEXTS, MOODS, progress=False).predict_proba(TEXTS[:5])
    assert (first == again).all()
    given = Checkpoint.load(encoder)
    before = {name: tensor.clone() for name, tensor in given.model.state_dict().items()}
    held = bertie.Classifier(given, epochs=1, seed=5).fit(TEXTS, MOODS, progress=False)
    assert (held.predict_proba(TEXTS[:5]) == first).all()
    assert all((before[name] == tensor).all() for name, tensor in given.model.state_dict().items())
    other = bertie.Classifier(encoder, epochs=1, seed=6).fit(TEXTS, MOODS, progress=False)
    assert (other.predict_proba(TEXTS[:5]) != first).any()


def test_training_goes_on_from_a_head_with_the_same_labels(encoder: Path, tmp_path: Path) -> None:
    bertie.Classifier(encoder, **FAST).fit(TEXTS, MOODS, progress=False).save(tmp_path / "one")
    more = bertie.Classifier(tmp_path / "one", epochs=1, lr=1e-9).fit(TEXTS, MOODS, progress=False)
    assert more.score(TEXTS, MOODS) > 0.9
    loud = [mood.upper() for mood in MOODS]
    fresh = bertie.Classifier(tmp_path / "one", epochs=1, lr=1e-9).fit(TEXTS, loud, progress=False)
    out = [one.checkpoint.model.head("classify").out.weight for one in (more, fresh)]  # type: ignore[union-attr]
    assert (out[0] - out[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"lora": 2, "lr": 1e-3},
        {"freeze": "encoder", "lr": 2e-2},
        {"freeze": 1, "unfreeze": 1},
        {"layer_decay": 0.8, "schedule": "cosine"},
        {"gradient_checkpointing": True, "batch_tokens": 200},
        {"class_weights": "balanced", "label_smoothing": 0.1},
        {"dev_fraction": 0.2, "patience": 2},
    ],
    ids=str,
)
def test_options(encoder: Path, options: dict[str, Any], tmp_path: Path) -> None:
    task = bertie.Classifier(encoder, **FAST | options).fit(TEXTS, MOODS, progress=False)
    assert task.history_.curve[-1]["loss"] < task.history_.curve[0]["loss"]
    task.save(tmp_path / "out")
    agree(bertie.Classifier.load(tmp_path / "out").checkpoint, tmp_path / "out", "SequenceClassification", TEXTS[0])


def test_reach_is_kept(encoder: Path, tmp_path: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1, max_length=16).fit(TEXTS, MOODS, progress=False)
    task.save(tmp_path / "out")
    assert bertie.load(tmp_path / "out").checkpoint.max_length == 16
    with pytest.raises(ConfigError, match="max_length=1000"):
        bertie.Classifier(encoder, max_length=1000).fit(TEXTS, MOODS, progress=False)


def test_not_fitted(encoder: Path) -> None:
    for task in (bertie.Classifier(encoder), bertie.Classifier(Checkpoint.load(encoder))):
        with pytest.raises(NotFoundError, match="no head 'classify'"):
            task.predict(TEXTS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        bertie.Classifier(encoder, epoch=3)  # type: ignore[call-arg]


def test_scikit_learn(encoder: Path) -> None:
    from sklearn.base import clone, is_classifier, is_regressor
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import Pipeline
    from sklearn.preprocessing import FunctionTransformer

    task = bertie.Classifier(encoder, **FAST)
    twin = clone(task)
    assert twin.get_params() == task.get_params()
    assert is_classifier(task)
    assert is_regressor(bertie.Regressor(encoder))
    scores = cross_val_score(task, TEXTS, MOODS, cv=2)
    assert scores.min() > 0.7
    steps = [("lower", FunctionTransformer(lambda texts: [text.lower() for text in texts])), ("model", task)]
    pipeline = Pipeline(steps).fit(TEXTS, MOODS)
    assert pipeline.score(TEXTS, MOODS) > 0.9
    assert pipeline.predict_proba(TEXTS[:2]).shape == (2, 2)
    search = GridSearchCV(bertie.Classifier(encoder, **FAST), {"epochs": [1, 6]}, cv=2).fit(TEXTS[:60], MOODS[:60])
    assert set(search.best_params_) == {"epochs"}
    assert task.set_params(lr=1e-5).recipe.lr == 1e-5


def test_copies(encoder: Path) -> None:
    task = bertie.Classifier(encoder, epochs=1).fit(TEXTS, MOODS, progress=False)
    expected = task.predict_proba(TEXTS[:3])
    assert (copy.deepcopy(task).predict_proba(TEXTS[:3]) == expected).all()
    assert (
        bertie.Classifier(encoder).get_params() == pickle.loads(pickle.dumps(bertie.Classifier(encoder))).get_params()
    )


def test_heads_over_one_encoder(encoder: Path, tmp_path: Path) -> None:
    words, tags = worded()
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
    assert [one["mood"] for one in read] == heads["mood"].classify(TEXTS[:5])  # type: ignore[attr-defined]
    assert [one["names"] for one in read] == heads["names"].tag(TEXTS[:5])  # type: ignore[attr-defined]
    heads.save(tmp_path / "out")
    loaded = bertie.MultiTask.load(tmp_path / "out")
    assert loaded.read(TEXTS[:5]) == read
    assert sorted(loaded) == sorted(kinds)
    tagger = bertie.load(tmp_path / "out", head="names")
    assert isinstance(tagger, bertie.Tagger)
    assert tagger.predict(words[:5]) == heads["names"].predict(words[:5])  # type: ignore[attr-defined]
    with pytest.raises(NotFoundError, match="pass head="):
        bertie.load(tmp_path / "out")
    with pytest.raises(InputError, match="needs a head for classes"):
        bertie.Classifier.load(tmp_path / "out", head="names")
    with pytest.raises(ConfigError, match=r"together with bertie\.MultiTask"):
        heads["mood"].fit(TEXTS, MOODS)
    transformers.AutoModel.from_pretrained(tmp_path / "out")


def test_one_pass_for_all_heads(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, tags = worded(20)
    heads = bertie.MultiTask(encoder, {"mood": "classify", "names": "tag"}, epochs=1, lora=2, lr=1e-3)
    heads.fit({"mood": (TEXTS, MOODS), "names": (words, tags)}, progress=False)
    passes = []
    hidden = type(heads.checkpoint.model).hidden
    monkeypatch.setattr(type(heads.checkpoint.model), "hidden", lambda self, *a: passes.append(1) or hidden(self, *a))
    heads.read(TEXTS[:5])
    assert len(passes) == 1


def test_heads_refuse(encoder: Path) -> None:
    with pytest.raises(ConfigError, match="tasks\\['x'\\]='sort' must be one of"):
        bertie.MultiTask(encoder, {"x": "sort"})
    with pytest.raises(InputError, match="names"):
        bertie.MultiTask(encoder, {"mood": "classify"}).fit({"mood": (TEXTS, MOODS), "names": (TEXTS, MOODS)})
    with pytest.raises(NotFoundError, match="call fit first"):
        bertie.MultiTask(encoder, {"mood": "classify"}).read(TEXTS)
