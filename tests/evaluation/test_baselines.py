"""Cheap baselines of every kind of data, on small sets whose answers are known."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bertie.errors import InputError
from bertie.evaluation import metrics
from bertie.evaluation.baselines import BaselineScore, evaluate, pair_features

TOPICS = {
    "sport": "match goal team player league coach score season".split(),
    "money": "bank market shares profit rate loan price tax".split(),
    "space": "orbit rocket planet moon launch comet probe star".split(),
}
FILLER = "the a of in and to is was on for with it as by at".split()


def topics(n: int, seed: int, wrong: float = 0.0) -> tuple[list[tuple[str]], list[str]]:
    rng = random.Random(seed)
    texts, labels = [], []
    for _ in range(n):
        label = rng.choice([*TOPICS, "sport"])
        words = rng.choices(FILLER, k=6) + rng.choices(TOPICS[label], k=2)
        rng.shuffle(words)
        texts.append((" ".join(words),))
        labels.append(rng.choice(list(TOPICS)) if rng.random() < wrong else label)
    return texts, labels


def by_name(scores: list[BaselineScore]) -> dict[str, float]:
    assert all(row.score.low <= row.score.value <= row.score.high and row.seconds >= 0 for row in scores)
    return {row.name: row.score.value for row in scores}


def test_classification() -> None:
    train, test = topics(300, 0), topics(200, 1)
    codes = {label: np.eye(8)[i] for i, label in enumerate(TOPICS)}
    rng = np.random.default_rng(0)
    embeddings = tuple(
        np.array([codes[y] for y in labels]) + rng.normal(size=(len(labels), 8)) for _, labels in (train, test)
    )
    scores = evaluate(train, test, "classify", embeddings=(embeddings[0], embeddings[1]), resamples=50)
    values = by_name(scores)
    assert list(values) == ["majority class", "TF-IDF + logistic regression", "frozen embeddings + logistic regression"]
    assert values["majority class"] == pytest.approx(test[1].count("sport") / 200)
    assert values["TF-IDF + logistic regression"] > 0.97
    assert 0.5 < values["frozen embeddings + logistic regression"] < 0.97
    gap = metrics.paired(scores[1].kind, scores[1].arguments, scores[0].arguments, resamples=50)["accuracy"]
    assert gap.p < 0.05
    assert gap.value > 0.3


def test_unseen_labels_are_errors() -> None:
    train, (texts, labels) = topics(100, 0), topics(50, 1)
    values = by_name(evaluate(train, (texts, ["law", *labels[1:]]), "classify", resamples=50))
    assert values["TF-IDF + logistic regression"] <= 49 / 50


def test_multi_label() -> None:
    rng = random.Random(0)

    def rows(n: int) -> tuple[list[tuple[str]], list[tuple[str, ...]]]:
        chosen = [tuple(sorted(rng.sample(list(TOPICS), rng.randint(0, 2)))) for _ in range(n)]
        texts = [" ".join([*rng.choices(FILLER, k=4), *(rng.choice(TOPICS[y]) for y in labels)]) for labels in chosen]
        return [(text,) for text in texts], chosen

    scores = evaluate(rows(400), rows(200), "classify", resamples=50)
    assert {row.metric for row in scores} == {"macro_f1"}
    assert by_name(scores)["TF-IDF + logistic regression"] > 0.95 > by_name(scores)["majority class"]


def test_regression_on_pairs() -> None:
    rng = random.Random(0)
    words = [word for topic in TOPICS.values() for word in topic]

    def rows(n: int) -> tuple[list[tuple[str, str]], list[float]]:
        pairs, values = [], []
        for _ in range(n):
            shared = rng.randint(0, 5)
            common = rng.sample(words, 10)
            pairs.append((" ".join(common[:5]), " ".join(common[:shared] + common[5 : 10 - shared])))
            values.append(shared + rng.gauss(0, 0.3))
        return pairs, values

    train, test = rows(300), rows(150)
    own, others = (np.array(targets)[:, None] * [1.0, 0.5] + 0.1 for _, targets in (train, test))
    scores = evaluate(train, test, "regress", embeddings=(own, others), resamples=50)
    assert np.isnan(scores[0].score.value)  # the mean has no correlation
    values = {row.name: row.score.value for row in scores[1:]}
    assert values["TF-IDF + ridge regression"] > 0.9
    assert values["frozen embeddings + ridge regression"] > 0.99


def test_tagging() -> None:
    train = (
        [["Ada", "Lovelace", "met", "Bob"], ["Bob", "saw", "New", "York"], ["a", "New", "day"], ["a", "New", "York"]]
        * 5,
        [["B-PER", "I-PER", "O", "B-PER"], ["B-PER", "O", "B-LOC", "I-LOC"], ["O"] * 3, ["O", "B-LOC", "I-LOC"]] * 5,
    )
    test = (
        [["New", "day"], ["York", "and", "Bob"], ["in", "New", "York"]],
        [["O", "O"], ["O", "O", "B-PER"], ["O", "B-LOC", "I-LOC"]],
    )
    values = by_name(evaluate(train, test, "tag", resamples=20))
    assert values["dictionary of spans"] == 1.0
    assert values["most frequent tag of each word"] < 1.0
    plain = ([["a", "dog", "runs"]] * 3, [["DET", "NOUN", "VERB"]] * 3)
    scores = evaluate(plain, plain, "tag", resamples=20)
    assert [(row.name, row.metric, row.score.value) for row in scores] == [
        ("most frequent tag of each word", "accuracy", 1.0)
    ]


def test_tags_by_frozen_embeddings() -> None:
    """One embedding per word; of the training sentences only some have one."""
    rng = np.random.default_rng(0)
    sentences = [[("Ada", "ran", "home")[i] for i in rng.integers(0, 3, 4)] for _ in range(40)]
    tags = [["B-PER" if word == "Ada" else "O" for word in words] for words in sentences]
    codes = {"Ada": [1.0, 0.0], "ran": [0.0, 1.0], "home": [0.2, 0.9]}
    tables = [np.array([codes[word] for words in part for word in words]) for part in (sentences[:20], sentences[30:])]
    scores = evaluate(
        (sentences[:30], tags[:30]),
        (sentences[30:], tags[30:]),
        "tag",
        embeddings=(tables[0], tables[1]),
        embedded_rows=range(20),
        resamples=20,
    )
    assert by_name(scores)["frozen token embeddings + logistic regression"] == 1.0


def test_labels_of_multi_label_data() -> None:
    """In the order of a model's, so that both can be compared; the threshold is chosen on held-out rows."""
    rng = random.Random(0)
    texts = [(f"{rng.choice(FILLER)} {word}",) for word in ("goal", "bank", "moon") * 40]
    labels = [("sport",), ("money", "law"), ("space",)] * 40
    (_, linear) = evaluate(
        (texts, labels), (texts, labels), "classify", labels=["space", "sport", "money"], resamples=5
    )
    table, probabilities, threshold = linear.arguments
    assert table.shape == probabilities.shape == (120, 4)  # "law" is no label of the model: a column of its own
    assert table[:3].tolist() == [
        [False, True, False, False],
        [False, False, True, True],
        [True, False, False, False],
    ]
    assert 0 < threshold < 1
    assert not (probabilities[:, 3] >= threshold).any()


def test_question_answering() -> None:
    context = "The tower was built in 1889. It was designed by Gustave Eiffel. It weighs 7,300 tonnes."
    inputs = [("When was the tower built?", context), ("Who designed it?", context)]
    values = by_name(
        evaluate(
            (inputs, [["1889"], ["Gustave Eiffel"]]), (inputs, [["1889"], ["Gustave Eiffel"]]), "answer", resamples=20
        )
    )
    assert values["span of the expected type"] > values["most similar sentence"] > 0


def test_reranking() -> None:
    passages = ["rockets launch into orbit", "banks raise the loan rate", "the team won the match"]
    queries = ["when do rockets launch", "loan rate of banks", "which team won"]
    inputs = [(query, passage) for query in queries for passage in passages]
    gold = [float(i == j) for i in range(3) for j in range(3)]
    assert by_name(evaluate((inputs, gold), (inputs, gold), "rerank", resamples=20)) == {"TF-IDF similarity": 1.0}
    sides = np.eye(3)[[i for i in range(3) for _ in range(3)]], np.eye(3)[[0, 1, 2] * 3]
    features = pair_features(*sides)
    scores = by_name(evaluate((inputs, gold), (inputs, gold), "rerank", embeddings=(features, features), resamples=20))
    assert scores["similarity of frozen embeddings"] == 1.0


def test_pair_features() -> None:
    assert pair_features([[1.0, 2.0]], [[3.0, -1.0]]).tolist() == [[2.0, 3.0, 3.0, -2.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "embed"}, "kind='embed' must be one of classify, regress, tag, answer, rerank"),
        ({"test": ([], [])}, "test has 0 inputs and 0 targets"),
        ({"embeddings": (np.zeros((3, 2)), np.zeros((30, 2)))}, r"embeddings of train have shape \(3, 2\)"),
    ],
)
def test_what_cannot_be_evaluated(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"train": topics(30, 0), "test": topics(30, 1), "kind": "classify"} | change
    with pytest.raises(InputError, match=message):
        evaluate(**arguments, resamples=5)  # type: ignore[arg-type]
