from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from bertie.evaluation.card import _yaml, model_card
from bertie.evaluation.report import ModelReport
from tests.evaluation.model_reports import bare, full, of_kind


def front(card: str) -> dict[str, Any]:
    result = re.match(r"---\n(.*?)\n---\n", card, re.S)
    assert result is not None
    output = yaml.safe_load(result.group(1))
    assert isinstance(output, dict)
    return output


def test_front_matter() -> None:
    study = full()
    output = front(model_card(study))
    assert output["language"] == ["en", "de"]
    assert output["library_name"] == "bertie"
    assert output["pipeline_tag"] == "text-classification"
    assert output["base_model"] == "some/encoder"
    assert "matthews_correlation" in output["metrics"]
    (model,) = output["model-index"]
    assert [one["dataset"]["split"] for one in model["results"]] == ["dev", "test"]
    metrics = {one["name"]: one for one in model["results"][1]["metrics"]}
    assert metrics["macro_f1"]["type"] == "f1"
    assert metrics["accuracy"]["value"] == pytest.approx(study.evaluations["test"].scores["accuracy"].value)


def test_the_hub_reads_it() -> None:
    card = ModelCard(model_card(full()))
    assert card.data.library_name == "bertie"  # type: ignore[attr-defined]
    results = card.data.eval_results  # type: ignore[attr-defined]
    assert results is not None
    assert {(one.task_type, one.dataset_split) for one in results} == {
        ("text-classification", "dev"),
        ("text-classification", "test"),
    }
    assert "accuracy" in {one.metric_type for one in results}


def test_nothing_is_made_up() -> None:
    card = model_card(bare())
    output = front(card)
    assert not {"language", "base_model", "license"} & set(output)
    assert re.findall(r"^## (.*)$", card, re.M) == ["Model description", "Usage", "Results", "Limitations"]
    assert "None" not in card


def test_sections() -> None:
    study = full()
    card = model_card(study)
    assert re.findall(r"^## (.*)$", card, re.M) == [
        *("Model description", "Usage", "Training data", "Recipe", "Results", "Calibration", "Limitations"),
    ]
    interval = str(study.evaluations["test"].scores["accuracy"]).replace("[", r"\[").replace("]", r"\]")
    assert interval in card
    assert "2 of 120 rows of test (1.67%) also occur in the training data, as exact or near-duplicates" in card
    assert "Of the 1,000 tokens of test, 900 were read." in card
    assert "secret" not in card
    assert "<script" not in card.split("---\n", 2)[2]


@pytest.mark.parametrize(
    ("study", "tag", "name", "head"),
    [
        (bare(), "text-classification", "Classifier", "SequenceClassification"),
        (of_kind("multi_label"), "text-classification", "Classifier", "SequenceClassification"),
        (of_kind("regress"), "text-classification", "Regressor", "SequenceClassification"),
        (of_kind("tag"), "token-classification", "Tagger", "TokenClassification"),
        (of_kind("answer"), "question-answering", "Reader", "QuestionAnswering"),
        (of_kind("rerank"), "text-ranking", "Reranker", "SequenceClassification"),
    ],
)
def test_how_to_use_it(study: ModelReport, tag: str, name: str, head: str) -> None:
    card = model_card(study)
    assert front(card)["pipeline_tag"] == tag
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert f"bertie.{name}.load" in blocks[0]
    assert f"AutoModelFor{head}." in blocks[1]
    for block in blocks:
        compile(block, "card", "exec")


def test_a_metric_that_is_not_defined_has_no_result() -> None:
    study = of_kind("regress")
    one = study.evaluations["test"]
    broken = replace(one.scores["pearson"], value=float("nan"))
    study = replace(study, evaluations={"test": replace(one, scores={**one.scores, "pearson": broken})})
    names = [metric["name"] for metric in front(model_card(study))["model-index"][0]["results"][0]["metrics"]]
    assert "pearson" not in names
    assert "spearman" in names


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x: y", "b": ["- z", "#c", "yes", "1.0", "null", "\\", '"', "line\nbreak", "é😀"]},
        {"n": 1e-05, "m": 3, "f": 0.5, "t": True, "nothing": None, "big": 1e20},
        {"deep": [{"a": {"b": [{"c": 1, "d": ["e"]}]}}, {"a": "x"}], "empty": []},
    ],
)
def test_yaml_says_what_was_meant(value: dict[str, Any]) -> None:
    assert yaml.safe_load(_yaml(value)) == value
