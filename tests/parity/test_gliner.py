"""The same numbers as the package `gliner`: its results on tiny random models are in gliner/ (gliner_reference.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file

import bertie
from bertie.checkpoints.gliner import folder_names
from bertie.nn.span_head import span_bounds
from bertie.pipeline.inputs import TaskInput
from bertie.tasks.zero_shot_tag import ZeroShotTagger
from bertie.text.prompted_words import word_starts
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.span_objective import LABELS as LABEL_ROWS
from bertie.training.span_objective import SpanObjective
from tests.parity.gliner_reference import FOLDER, LABELS, LOSSES, OPTIONS, SPANS, TEXTS

MODELS = ("lstm", "plain")


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def reference(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((FOLDER / name / "reference.json").read_text("utf-8"))
    return cases


def logits(task: ZeroShotTagger, texts: list[str], labels: list[str]) -> list[np.ndarray]:
    """(S, C) of each text."""
    options = task.options(labels)
    inputs = [TaskInput("", (text,), options) for text in texts]
    outputs = task.pipeline.forward(task.pipeline.encode(inputs)).collect()
    return [output.reshape(-1, len(labels)) for output in outputs]


def test_logits(name: str) -> None:
    """In one ragged batch, and each text by itself."""
    task = ZeroShotTagger.load(FOLDER / name)
    for case in reference(name):
        count, width = len(case["labels"]), task.settings.head.max_width
        together = logits(task, TEXTS, case["labels"])
        for text, ours, expected in zip(TEXTS, together, case["logits"], strict=True):
            words = max(n for n in range(1, 99) if len(span_bounds(n, width)) * count <= len(expected))
            bounds = span_bounds(words, width)
            order = np.lexsort((bounds[:, 1], bounds[:, 0]))  # theirs: by start, then width
            assert_allclose(ours[order], np.array(expected).reshape(-1, count), atol=1e-5)
            assert_allclose(logits(task, [text], case["labels"])[0], ours, atol=0)


@pytest.mark.parametrize(("flat", "multi_label"), OPTIONS)
def test_entities(name: str, flat: bool, multi_label: bool) -> None:
    task = bertie.load(FOLDER / name)
    assert isinstance(task, ZeroShotTagger)
    for case in reference(name):
        results = task.tag(TEXTS, case["labels"], threshold=case["threshold"], flat=flat, multi_label=multi_label)
        expected = case["entities"][f"{flat}-{multi_label}"]
        assert any(expected)
        for result, spans in zip(results, expected, strict=True):
            ours = [(span.label, span.start, span.end, span.text) for span in result.spans]
            assert ours == [(span["label"], span["start"], span["end"], span["text"]) for span in spans]
            assert_allclose([span.score for span in result.spans], [span["score"] for span in spans], atol=1e-5)


def test_loss_and_gradients(name: str) -> None:
    task = ZeroShotTagger.load(FOLDER / name)
    examples = [example(task, text, spans) for text, spans in zip(TEXTS, SPANS, strict=False)]
    alpha, gamma = LOSSES[name]
    objective = SpanObjective(task.settings.head.max_width, alpha=alpha, gamma=gamma)
    loss = objective.forward(task.model, objective.collate(examples), "span")
    loss.backward()
    expected = load_file(FOLDER / name / "gradients.safetensors")
    torch.testing.assert_close(loss.detach(), expected.pop("loss"), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    ours = folder_names(task.checkpoint.spec.weight_map.store(task.model))
    assert {key for key, value in ours.items() if value.any()} <= set(expected)
    for key, gradient in expected.items():
        assert_allclose(ours[key], gradient, atol=1e-5, rtol=1e-4, err_msg=key)


def example(task: ZeroShotTagger, text: str, spans: list[tuple[int, int, str]]) -> TrainingExample:
    """A text after a prompt of all labels."""
    options = task.options(LABELS[0])
    (read,) = task.pipeline.read([TaskInput("", (text,), options)])
    encoding, rows = read.encoding, word_starts(read.encoding)
    values = np.array([(a, b, LABELS[0].index(label)) for a, b, label in spans], np.int64).reshape(-1, 3)
    window = TrainingWindow(encoding.ids, encoding.segments, 1.0, values, np.ones(len(rows), np.float32), rows)
    return TrainingExample((window,), extras={LABEL_ROWS: 1 + options.prompt.labels})


def test_the_package_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    gliner = pytest.importorskip("gliner")
    task = ZeroShotTagger.load(FOLDER / name)
    task.save(tmp_path / "saved")
    model = gliner.GLiNER.from_pretrained(str(tmp_path / "saved"), strict=True)
    for case in reference(name):
        found = model.inference(TEXTS, case["labels"], threshold=case["threshold"])
        for spans, expected in zip(found, case["entities"]["True-False"], strict=True):
            assert [span["text"] for span in spans] == [span["text"] for span in expected]
            assert_allclose([span["score"] for span in spans], [span["score"] for span in expected], atol=1e-5)
