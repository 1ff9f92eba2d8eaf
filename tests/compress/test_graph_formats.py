"""Exported files, run by ONNX Runtime and OpenVINO, equal transformers: each family with a head, in ragged batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose

from bertie.checkpoints.model_spec import FAMILIES
from bertie.compress import graph_formats
from bertie.errors import ConfigError, MissingPackageError
from tests.compress.padded import expected, padded_inputs, ragged, tiny_model, unpadded
from tests.parity.tiny import TINY

# Every family, with different heads.
CASES = {
    "albert": "ForSequenceClassification",
    "bert": "Model",
    "big_bird": "ForQuestionAnswering",
    "camembert": "ForTokenClassification",
    "deberta": "ForMaskedLM",
    "deberta-v2": "ForSequenceClassification",
    "deberta-v3": "ForQuestionAnswering",
    "distilbert": "ForTokenClassification",
    "electra": "ForPreTraining",
    "ernie": "ForSequenceClassification",
    "eurobert": "ForSequenceClassification",
    "longformer": "ForQuestionAnswering",
    "modernbert": "ForMaskedLM",
    "mpnet": "Model",
    "nomic_bert": "Model",
    "gemma3_text": "Model",
    "llama": "Model",
    "mistral": "Model",
    "qwen2": "Model",
    "qwen3": "Model",
    "t5": "EncoderModel",
    "roberta": "ForMultipleChoice",
    "xlm-roberta": "ForQuestionAnswering",
}


def test_every_family_has_a_case() -> None:
    assert {TINY[name].model_type for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize(("name", "suffix"), CASES.items())
def test_equals_transformers(name: str, suffix: str, tmp_path: Path) -> None:
    theirs, model, key = tiny_model(name, suffix)
    proto = graph_formats.to_onnx(model)
    onnx.checker.check_model(proto, full_check=True)
    plain, xml = tmp_path / "model.onnx", tmp_path / "model.xml"
    graph_formats.write_onnx(proto, plain, "fp32")
    graph_formats.write_openvino(plain, xml, "fp32")
    runs = [graph_formats.open_graph(path) for path in (plain, xml)]
    for count in (6, 1):  # a batch of one text, too
        ids, segments = ragged(name, suffix, count, seed=count)
        wanted = expected(theirs, key, ids, segments)
        inputs = padded_inputs(model, ids, segments)
        for run in runs:
            outputs = run(inputs)
            assert list(outputs) == model.output_names
            got = unpadded(model, list(outputs.values()), inputs["attention_mask"])
            for a, b in zip(got, wanted, strict=True):
                assert_allclose(a, b, atol=2e-5, rtol=0)


def test_axes_and_names(tmp_path: Path) -> None:
    _, model, _ = tiny_model("bert", "Model")
    graph = graph_formats.to_onnx(model).graph
    for value in (*graph.input, *graph.output):
        dimensions = [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        assert dimensions[:2] == ["batch", "sequence"], value.name
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", "token_type_ids"]
    assert [value.name for value in graph.output] == ["last_hidden_state"]
    assert not any(node.metadata_props for node in graph.node)  # no paths of the machine that exported it
    assert all(np.prod(tensor.dims) for tensor in graph.initializer)


def test_large_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_formats, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"the weights take .* GB in fp32; ONNX files hold at most"):
        graph_formats.to_onnx(tiny_model("bert", "Model")[1])


def test_missing_packages() -> None:
    with pytest.raises(MissingPackageError, match=r"no_such_package .*pip install 'bertie\[export\]'"):
        graph_formats.require("no_such_package")
