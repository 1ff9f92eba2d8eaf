"""Entity metrics against seqeval."""

from __future__ import annotations

from itertools import chain

import pytest
from seqeval import metrics as seqeval
from sklearn import metrics as sk

from bertie.evaluation import metrics
from bertie.evaluation.metrics import tagging
from tests.evaluation.metric_data import tagged, values


@pytest.mark.parametrize("scheme", ["BI", "BIES"])
def test_entities_are_seqevals(scheme: str) -> None:
    gold, output = tagged(["O", "O", *(f"{part}-{kind}" for part in scheme for kind in ("PER", "A-B"))])
    assert values(tagging(gold, output, resamples=0)) == pytest.approx(
        {
            "precision": seqeval.precision_score(gold, output),
            "recall": seqeval.recall_score(gold, output),
            "f1": seqeval.f1_score(gold, output),
            "accuracy": seqeval.accuracy_score(gold, output),
        }
    )


def test_bilou_is_read_as_bioes() -> None:
    gold, output = tagged(["O", "B-X", "I-X", "E-X", "S-X"])
    other = {"E-X": "L-X", "S-X": "U-X"}
    renamed = [[[other.get(tag, tag) for tag in one] for one in sentences] for sentences in (gold, output)]
    assert values(tagging(*renamed, resamples=0)) == values(tagging(gold, output, resamples=0))


def test_plain_tags() -> None:
    gold, output = tagged(["NOUN", "VERB", "X", "ADP"])
    flat, flat_said = list(chain(*gold)), list(chain(*output))
    assert values(tagging(gold, output, resamples=0)) == pytest.approx(
        {
            "accuracy": sk.accuracy_score(flat, flat_said),
            "macro_f1": sk.f1_score(flat, flat_said, average="macro"),
        }
    )
    assert metrics.main_metric("tag", tagging(gold, output, resamples=0)) == "accuracy"


def test_no_entities_at_all() -> None:
    assert values(tagging([["O", "O"]], [["O", "O"]])) == {"precision": 0, "recall": 0, "f1": 0, "accuracy": 1}
