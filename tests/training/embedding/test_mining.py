"""Hard negatives: found exactly, in bounded memory, without those that are likely right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie import Embedder, Reranker
from bertie.errors import ConfigError, InputError
from bertie.training.embedding import mining
from bertie.training.embedding.mining import mine, nearest_passages, score_with_teacher, triplets
from bertie.training.finetune.data import read_dataset
from tests.checkpoints.tiny_sentence import save_bert
from tests.tasks import tiny


class Points(Embedder):
    """An embedder whose texts are their own vectors, on a circle: `12.5°`."""

    def __init__(self) -> None:
        self.truncate_dim = None
        self.calls: list[int] = []

    class modules:
        similarity = None
        prompts: dict[str, str] = {}  # noqa: RUF012

    def embed(self, texts: Any, *, prompt: str | None = None, prompt_name: str | None = None) -> np.ndarray:  # type: ignore[override]
        self.calls.append(len(texts))
        angles = np.radians([float(text.rstrip("°x")) for text in texts])
        return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def test_false_negatives_are_left_out() -> None:
    """The query lies at 0°, its positive at 20°; what is nearer than the max_ratio allows is likely right."""
    corpus = ["20°", "2°", "10°", "21°", "35°", "36°x", "50°", "35°", "80°", "170°"]
    mined = mine(Points(), ["0°"], ["20°"], corpus, negatives=3, max_ratio=0.95)
    # cos 20° · 0.95 = cos 26.8°: 2°, 10° and 21° are nearer. 35° comes twice, and counts once.
    assert mined.rows == [("0°", "20°", "35°", "36°x", "50°")]
    assert mined.filtered == 3
    assert mined.incomplete == []
    np.testing.assert_allclose(mined.scores[0], np.cos(np.radians([20, 35, 36, 50])), atol=1e-6)
    by_margin = mine(Points(), ["0°"], ["20°"], corpus, negatives=3, max_ratio=1.0, margin=0.29)
    assert by_margin.rows == [("0°", "20°", "50°", "80°", "170°")]  # cos 20° − 0.29 = cos 49.5°
    nothing = mine(Points(), ["0°"], ["20°"], corpus, negatives=3, max_ratio=1.0)
    assert nothing.rows == [("0°", "20°", "21°", "35°", "36°x")]
    skipped = mine(Points(), ["0°"], ["20°"], corpus, negatives=2, max_ratio=1.0, skip=6)
    assert skipped.rows == [("0°", "20°", "36°x", "50°")]


def test_known_answers_are_never_negatives() -> None:
    corpus = ["0°", "40°", "41°", "42°", "43°"]
    mined = mine(Points(), ["0°", "0°"], [["5°", "41°"], "42°"], corpus, negatives=2)
    assert mined.rows == [("0°", "5°", "40°", "43°")]  # beside 41° and 42° there is no room below them
    assert mined.incomplete == ["0°", "0°"]


def test_all_of_the_corpus_is_compared_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mining, "CORPUS_BLOCK", 16)
    monkeypatch.setattr(mining, "QUERY_BLOCK", 3)
    rng = np.random.default_rng(0)
    corpus = [f"{angle:.3f}°" for angle in rng.uniform(0, 360, 101)] + ["7°", "7°"]
    points = Points()
    queries = points.embed([f"{angle:.3f}°" for angle in rng.uniform(0, 360, 7)])
    scores, places = nearest_passages(points, queries, corpus, 12)
    assert max(points.calls) <= 16
    table = queries @ Points().embed(corpus).T
    np.testing.assert_allclose(scores, -np.sort(-table, axis=1)[:, :12], atol=1e-6)
    np.testing.assert_allclose(np.take_along_axis(table, places, axis=1), scores, atol=1e-6)
    assert all(len(set(row)) == 12 for row in places.tolist())
    assert nearest_passages(points, queries, corpus[:5], 12)[0].shape == (7, 5)


def test_refusals() -> None:
    with pytest.raises(InputError, match="1 queries and 2 positives"):
        mine(Points(), ["0°"], ["1°", "2°"], ["3°"])
    with pytest.raises(ConfigError, match="negatives=4, skip=0, depth=2"):
        mine(Points(), ["0°"], ["1°"], ["3°"], depth=2)
    with pytest.raises(ConfigError, match="skip at least 0"):
        mine(Points(), ["0°"], ["1°"], ["3°"], skip=-1)
    with pytest.raises(ConfigError, match="max_ratio=2 must be above 0"):
        mine(Points(), ["0°"], ["1°"], ["3°"], max_ratio=2)
    with pytest.raises(InputError, match="mine takes a list of queries, not str"):
        mine(Points(), "0°", ["1°"], ["3°"])
    with pytest.raises(InputError, match="the corpus is empty"):
        mine(Points(), ["0°"], ["1°"], [])


@pytest.mark.filterwarnings("ignore:lr=")
def test_what_is_mined_trains_and_so_does_a_teacher(tmp_path: Path) -> None:
    base = tiny.save(tmp_path / "base", "wordpiece", "")
    embedder = Embedder(base, epochs=1, batch_size=4)
    texts = list(dict.fromkeys(tiny.sentences(40)))
    mined = mine(embedder, texts[:8], texts[8:16], texts, negatives=2, max_ratio=1.0, depth=40)
    assert len(mined.rows) + len(mined.incomplete) == 8
    assert mined.rows
    data = read_dataset("embed", mined.table())
    assert [one.texts for one in data.examples] == mined.rows
    embedder.fit(mined.table(), progress=False)

    reranker = Reranker.load(save_bert(tmp_path / "cross", labels=1))
    taught = score_with_teacher(reranker, mined.rows)
    logits = np.log([np.array(one) / (1 - np.array(one)) for one in _sigmoids(reranker, mined.rows)])
    np.testing.assert_allclose(taught["scores"], logits, atol=1e-4)
    assert read_dataset("embed", taught).inputs == "lists"
    Embedder(base, epochs=1, loss="margin-mse").fit(taught, progress=False)


def _sigmoids(reranker: Reranker, rows: list[tuple[str, ...]]) -> list[list[float]]:
    return [reranker.predict([(row[0], passage) for passage in row[1:]]).tolist() for row in rows]


def test_triplets_from_classes() -> None:
    anchors = ["a", "a", "a", "b", "c", "c", "a"]
    others = ["1", "2", "3", "4", "5", "6", "7"]
    labels = ["entailment", "contradiction", "entailment", "entailment", "contradiction", "neutral", "contradiction"]
    assert triplets(anchors, others, labels) == [("a", "1", "2"), ("a", "3", "7")]
