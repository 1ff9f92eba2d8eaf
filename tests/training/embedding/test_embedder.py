"""`Embedder.fit`: every kind of data, what it learns, what it saves, and how it is evaluated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from bertie import Checkpoint, Embedder, Recipe
from bertie.errors import ConfigError, InputError
from bertie.evaluation.metrics import retrieval_from_ranks
from bertie.training.embedding import losses
from bertie.training.embedding.similarity_functions import Embeddings
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.tasks import tiny

pytestmark = pytest.mark.filterwarnings("ignore:lr=")  # the models here know nothing that could be lost

FAST: dict[str, Any] = {"lr": 2e-3, "epochs": 4, "batch_size": 16, "micro_tokens": 300}
TOPICS = "Emma Jane London Berlin river mountain novel letter children windows houses gardens".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("mlm"), "wordpiece", "ForMaskedLM")


def about(draw: random.Random, topic: str) -> str:
    words = [draw.choice(tiny.WORDS[:10]) for _ in range(draw.randint(2, 6))]
    words.insert(draw.randrange(len(words) + 1), topic)
    return " ".join([*words, topic])


def pairs(count: int, seed: int = 0, columns: int = 2) -> list[tuple[str, ...]]:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        topic, *others = draw.sample(TOPICS, max(1, columns - 1))
        rows.append((about(draw, topic), about(draw, topic), *(about(draw, other) for other in others)))
    return rows


def scored(count: int, seed: int = 0) -> tuple[list[tuple[str, str]], list[float]]:
    draw = random.Random(seed)
    texts, scores = [], []
    for i in range(count):
        one, other = draw.sample(TOPICS, 2)
        texts.append((about(draw, one), about(draw, one if i % 2 else other)))
        scores.append(5.0 * (i % 2))
    return texts, scores


def test_training_on_pairs_improves_retrieval(folder: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    draw = random.Random(9)
    held = [(about(draw, topic), about(draw, topic)) for topic in TOPICS]  # one pair each, so that all can be right
    embedder = Embedder(folder, **FAST | {"epochs": 12})
    before = embedder.score(held)
    assert embedder.fit(pairs(160), dev=held, progress=False) is embedder
    after = embedder.score(held)
    assert after > before + 0.2
    assert [set(one) for one in embedder.history_.evaluations] == [
        {"step", "epoch", "recall_1", "recall_10", "mrr_10"}
    ] * 12
    assert not embedder.model.auxiliary
    assert not embedder.model.training

    # What is saved is a folder of sentence-transformers, without the head that was there.
    embedder.save(tmp_path / "out")
    texts = [text for one in held for text in one]
    theirs = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(texts)
    ours = embedder.embed(texts)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    again = Embedder.load(tmp_path / "out")
    np.testing.assert_array_equal(again.embed(texts), ours)
    assert again.score(held) == after
    assert not again.checkpoint.heads


def test_ranks_equal_an_exhaustive_search(folder: Path) -> None:
    """Against a loop over all texts; of several that belong to a text, the others are not in the way."""
    data = pairs(20, 3, columns=3)
    data += [(data[0][0], *data[5][1:]), (data[1][0], data[1][0], data[2][1])]  # a second right one, and itself
    embedder = Embedder(folder)
    vectors = {text: embedder.embed([text])[0] for row in data for text in row}
    candidates = {text for row in data for text in row[1:]}
    right: dict[str, set[str]] = {}
    for one, two, *_ in data:
        right.setdefault(one, {one}).add(two)

    def cosine(a: str, b: str) -> float:
        return float(vectors[a] @ vectors[b] / np.linalg.norm(vectors[a]) / np.linalg.norm(vectors[b]))

    ranks = [1 + sum(cosine(a, c) >= cosine(a, p) for c in candidates - right[a]) for a, p, _ in data]
    above = [cosine(a, p) > cosine(a, n) for a, p, n in data]
    predictions = training_for(embedder).predict_labelled(read_dataset("embed", data))
    assert predictions.kind == "retrieval"
    assert [one[0] for one in predictions.predicted] == ranks
    assert [bool(one[1]) for one in predictions.predicted] == above
    scores = training_for(embedder).metrics(read_dataset("embed", data))
    assert scores["accuracy"] == pytest.approx(np.mean(above))
    assert scores["recall_1"] == pytest.approx(np.mean(np.array(ranks) == 1))
    assert scores["mrr_10"] == pytest.approx(np.mean([1 / r if r <= 10 else 0 for r in ranks]))


def test_ties_count_as_misses() -> None:
    assert retrieval_from_ranks([1, 1], [3, 12])["recall_1"].value == 0
    with pytest.raises(InputError, match="from 1 on"):
        retrieval_from_ranks([1], [0])


def test_scores(folder: Path) -> None:
    held = scored(24, 9)
    embedder = Embedder(folder, **FAST | {"epochs": 10}).fit(*scored(120), dev=held, progress=False)
    a, b = (embedder.embed([row[i] for row in held[0]]) for i in range(2))
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert embedder.score(*held) == pytest.approx(spearmanr(cosines, held[1])[0])
    assert embedder.score(*held) > 0.5
    assert set(embedder.history_.evaluations[0]) == {"step", "epoch", "spearman", "pearson"}


CASES: dict[str, Any] = {
    "infonce": (pairs(24), None, losses.InfoNCELoss),
    "triplets": (pairs(24, columns=3), None, losses.InfoNCELoss),
    "triplet": (pairs(24, columns=3), None, losses.TripletLoss),
    "cosent": (*scored(24), losses.CoSENTLoss),
    "contrastive": (scored(24)[0], [i % 2 for i in range(24)], losses.ContrastiveLoss),
    "cosine": (scored(24)[0], [float(i % 2) for i in range(24)], losses.CosineSimilarityLoss),
    "classes": (pairs(24), ["same", "other"] * 12, losses.SoftmaxLoss),
    "lists": (pairs(24, columns=4), [[2.0, 0.5, -1.0]] * 24, losses.KLDivergenceLoss),
    "margin-mse": (pairs(24, columns=4), [[2.0, 0.5, -1.0]] * 24, losses.MarginMSELoss),
}


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_data(folder: Path, name: str) -> None:
    X, y, kind = CASES[name]
    named: Any = {"loss": name} if name in ("triplet", "contrastive", "cosine", "margin-mse") else {}
    embedder = Embedder(folder, epochs=1, batch_size=8, pooling="cls", **named)
    start = embedder.embed(["the river"])
    embedder.fit(X, y, dev=scored(8), progress=False)
    assert np.isfinite(embedder.embed(["the river"])).all()
    assert not np.array_equal(embedder.embed(["the river"]), start)
    data = read_dataset("embed", X, y)
    assert type(training_for(embedder).objective(data).loss) is kind  # type: ignore[attr-defined]
    assert embedder.modules.pooling.modes == ("cls",)
    assert embedder.modules.similarity == ("dot" if name == "margin-mse" else None)
    assert embedder.checkpoint.sentence is embedder.modules


def test_matryoshka_and_a_custom_loss(folder: Path) -> None:
    loss = losses.InfoNCELoss(scale=10.0, symmetric=True)
    embedder = Embedder(folder, loss=loss, matryoshka=[16, 8], epochs=1, normalize=True)
    embedder.fit(pairs(20), progress=False)
    assert training_for(embedder).objective(read_dataset("embed", pairs(4))).loss == losses.MatryoshkaLoss(  # type: ignore[attr-defined]
        loss, (32, 16, 8)
    )
    np.testing.assert_allclose(np.linalg.norm(embedder.embed(["the river"]), axis=1), 1, atol=1e-6)
    with pytest.raises(ConfigError, match="at most 32"):
        Embedder(folder, matryoshka=[64]).fit(pairs(4), progress=False)


def test_scikit_learn(folder: Path) -> None:
    from sklearn.base import clone

    embedder = Embedder(folder, epochs=1, loss="triplet", matryoshka=[4])
    again = clone(embedder)
    assert again.get_params() == embedder.get_params()
    assert again.set_params(epochs=2, normalize=True).get_params()["epochs"] == 2
    assert again.normalize is True
    assert "modules" not in again.__dict__
    assert again.embed(["a river"]).shape == (1, 32)
    with pytest.raises(TypeError, match="has no argument 'epoch'"):
        Embedder(folder, epoch=3)  # type: ignore[call-arg]


def test_fit_starts_again_from_the_given_model(folder: Path) -> None:
    """`fit` begins anew from what was given."""
    embedder = Embedder(folder, **{**FAST, "epochs": 1})
    once = embedder.fit(pairs(32), progress=False).embed(["a river"])
    np.testing.assert_array_equal(embedder.fit(pairs(32), progress=False).embed(["a river"]), once)
    loaded = Embedder(Checkpoint.load(folder), **{**FAST, "epochs": 1})
    before = loaded.embed(["a river"])
    given = loaded.checkpoint
    np.testing.assert_array_equal(loaded.fit(pairs(32), progress=False).embed(["a river"]), once)
    np.testing.assert_array_equal(Embedder(given).embed(["a river"]), before)


def test_training_reads_long_texts_and_prompts_as_embed_does(tmp_path: Path) -> None:
    """What the loss is given is what `embed` gives, without dropout."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    base = tiny.save(tmp_path / "base", "wordpiece", "")
    modules = [Transformer(str(base)), Pooling(32, "mean", include_prompt=False), Normalize()]
    SentenceTransformer(
        modules=modules, device="cpu", prompts={"query": "find the novel "}, default_prompt_name="query"
    ).save(str(tmp_path / "model"))
    embedder = Embedder.load(tmp_path / "model")
    long = " ".join(tiny.sentences(20))
    data = read_dataset("embed", [(long, "the river"), ("a letter", long)])
    seen = embedder.embed([text for example in data.examples for text in example.texts])
    training = training_for(embedder)
    objective = training.objective(data)
    objective.attach(embedder.model, embedder.modules)  # type: ignore[attr-defined]
    mini = objective.collate(list(training.items(data)))
    assert len(mini.batch) > 6
    with torch.no_grad():
        embeddings = objective.embed(embedder.model, mini, "").numpy()  # type: ignore[attr-defined]
    np.testing.assert_allclose(embeddings, seen, atol=1e-6)


def test_refusals(folder: Path) -> None:
    embedder = Embedder(folder, epochs=1)
    with pytest.raises(InputError, match="has classes, which embeddings cannot be evaluated on"):
        embedder.fit(pairs(8), dev=(pairs(4), ["same", "other"] * 2), progress=False)
    with pytest.raises(InputError, match=r"TripletLoss takes three texts per row .*, and the training data has 2"):
        Embedder(folder, loss="triplet").fit(pairs(8), progress=False)
    with pytest.raises(InputError, match=r"CoSENTLoss takes two texts and a score per row .* has pairs"):
        Embedder(folder, loss="cosent").fit(pairs(8), progress=False)
    with pytest.raises(ConfigError, match="loss='nce' must be one of infonce"):
        Embedder(folder, loss="nce").fit(pairs(8), progress=False)
    with pytest.raises(InputError, match="pooling='sum' must be one of cls, mean"):
        Embedder(folder, pooling="sum")  # type: ignore[arg-type]
    from bertie import Classifier

    with pytest.raises(ConfigError, match="loss='infonce' is for training an Embedder"):
        Classifier.from_recipe(folder, Recipe(loss="infonce"))
    with pytest.raises(TypeError, match="has no argument 'loss'"):
        Classifier(folder, loss="infonce")  # type: ignore[call-arg]


def test_fingerprints_are_the_same_in_another_process(folder: Path, tmp_path: Path) -> None:
    """A loss is told from another by what it is set to, not by where it lies in memory."""
    data = read_dataset("embed", pairs(8))
    fingerprints = []
    for scale in (20.0, 20.0, 10.0):

        def own(column: Embeddings) -> tuple[Embeddings, int]:
            return column, 0

        embedder = Embedder(folder, loss=losses.InfoNCELoss(scale=scale, gather=own))
        fingerprints.append(training_for(embedder).fingerprint([data]))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
