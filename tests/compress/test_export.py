"""`bertie.export`: the folder, the report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sentence_transformers.backend.utils import backend_should_export

import bertie
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.compress import export as export_module
from bertie.compress import graph_formats
from bertie.compress.export_report import ExportedFile, OutputComparison
from bertie.compress.padded_model import PaddedModel
from bertie.config import Calibration
from bertie.errors import ConfigError, ExistsError, ExportError, InputError
from tests.checkpoints.tiny_sentence import old_folder, save_bert
from tests.cli.conftest import HEADS
from tests.tasks import tiny

TEXTS = [*tiny.sentences(12), tiny.document(30)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("source") / "bert", "wordpiece", "")


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bertie.ExportReport]:
    out = tmp_path_factory.mktemp("exported") / "all"
    options: dict[str, Any] = {"to": ["onnx", "openvino"], "precision": ["fp32", "fp16", "int8"]}
    return out, bertie.export(source, out, texts=TEXTS, **options)


def test_layout(exported: tuple[Path, bertie.ExportReport]) -> None:
    out, report = exported
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    graphs = set(graph_formats.FILES.values())
    assert graphs == {file.file for file in report.files}
    weights = {name.replace(".xml", ".bin") for name in graphs if name.endswith(".xml")}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    sentence = {
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
    }
    assert files == graphs | weights | tokenizer | sentence | {"config.json", "export.json", "README.md"}
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertModel"]
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == tiny.REACH
    assert not [path for path in out.parent.iterdir() if path != out]


def test_report(exported: tuple[Path, bertie.ExportReport], source: Path) -> None:
    out, report = exported
    assert json.loads((out / "export.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    assert (report.task, report.head, report.max_length) == ("embed", None, tiny.REACH)
    assert report.outputs == ("last_hidden_state", "sentence_embedding")
    limits = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.1}
    for file in report.files:
        assert file.bytes == sum(path.stat().st_size for path in graph_formats.parts(out / file.file))
        for output in file.outputs.values():
            assert output.relative_error < limits[file.precision]
            assert output.min_cosine > 0.98
        assert file.outputs["sentence_embedding"].agreement is not None
    assert "| onnx/model_quantized.onnx |" in (out / "README.md").read_text()
    assert 'SentenceTransformer("path/to/this/folder", backend="openvino")' in (out / "README.md").read_text()
    assert "sentence_embedding" in str(report)


def test_embeddings_are_those_of_bertie(exported: tuple[Path, bertie.ExportReport], source: Path) -> None:
    out, _ = exported
    embedder = bertie.Embedder.load(source)
    texts = tiny.sentences(5, seed=3)
    encodings = embedder.tokenizer.encode_batch(texts)
    length = max(map(len, encodings))
    inputs = {
        "input_ids": np.stack([np.pad(encoding.ids, (0, length - len(encoding))) for encoding in encodings]),
        "attention_mask": np.stack([np.pad(np.ones(len(e), np.int64), (0, length - len(e))) for e in encodings]),
        "token_type_ids": np.zeros((len(texts), length), np.int64),
    }
    for file in ("onnx/model.onnx", "openvino/openvino_model.xml"):
        vectors = graph_formats.open_graph(out / file)(inputs)["sentence_embedding"]
        assert_allclose(vectors, embedder.embed(texts), atol=1e-5)


def test_sentence_transformers_finds_the_files(exported: tuple[Path, bertie.ExportReport]) -> None:
    """By its own rule, without the package optimum, which it needs to run them."""
    out, _ = exported
    for name, file, glob in (("ONNX", "model.onnx", "*.onnx"), ("OpenVINO", "openvino_model.xml", "openvino*.xml")):
        export, arguments = backend_should_export(out, True, {}, file, glob, name)
        assert not export
        assert arguments == {"subfolder": name.lower(), "file_name": file}
    asked = {"file_name": "model_quantized.onnx"}
    assert not backend_should_export(out, True, asked, "model.onnx", "*.onnx", "ONNX")[0]


def test_subfolders_move_to_the_top(tmp_path: Path) -> None:
    old = old_folder(save_bert(tmp_path / "bert"), tmp_path / "old")
    words = ["the cat sat", "a dog ran on the mat", "find a cat"]
    report = bertie.export(old, tmp_path / "out", texts=words)
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [entry["path"] for entry in modules] == ["", "1_Pooling", "2_Dense", "3_Normalize"]
    assert (tmp_path / "out" / "sentence_bert_config.json").is_file()
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "0_Transformer").exists()
    assert report.max_length == 6
    assert (
        report.files[0].outputs["sentence_embedding"].rows == 6
    )  # windows of three texts, and the long one with the first


def test_one_of_several_heads(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(source)
    for name in ("sentiment", "qa", "rerank", "ner"):
        checkpoint.add_head(name, HEADS[name])
    checkpoint.set_calibration("sentiment", Calibration(temperature=2.0))
    report = bertie.export(checkpoint, tmp_path / "sentiment", head="sentiment", texts=TEXTS)
    config = json.loads((tmp_path / "sentiment" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert list(config["id2label"].values()) == ["negative", "neutral", "positive"]
    assert "bertie" not in config
    assert (report.task, report.outputs) == ("classify", ("logits",))
    assert any("temperature, 2" in note for note in report.notes)
    rerank = bertie.export(checkpoint, tmp_path / "rerank", task="rerank", texts=TEXTS)
    assert rerank.head == "rerank"
    assert json.loads((tmp_path / "rerank" / "config_sentence_transformers.json").read_text())["model_type"] == (
        "CrossEncoder"
    )
    with pytest.raises(bertie.NotFoundError, match="has several heads: pass head="):
        bertie.export(checkpoint, tmp_path / "none", texts=TEXTS)
    assert not (tmp_path / "none").exists()


def test_a_task_is_exported_as_it_is(source: Path, tmp_path: Path) -> None:
    embedder = bertie.Embedder.load(source, pooling="cls", normalize=True)
    bertie.export(embedder, tmp_path / "out", texts=TEXTS)
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (True, False)
    kinds = [entry["type"].split(".")[-1] for entry in json.loads((tmp_path / "out" / "modules.json").read_text())]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    with pytest.raises(ConfigError, match="dimension=4 cannot be exported"):
        bertie.export(bertie.Embedder.load(source, dimension=4), tmp_path / "other")
    with pytest.raises(ConfigError, match="Embedder has its own"):
        bertie.export(embedder, tmp_path / "other", task="fill")
    with pytest.raises(ConfigError, match="is in int8 on cpu; load it with precision='fp32'"):
        bertie.export(bertie.Embedder.load(source, precision="int8"), tmp_path / "other")


class Wrong(PaddedModel):
    """Forgets the attention mask."""

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
        return super().forward(input_ids, torch.ones_like(attention_mask) + 0 * attention_mask, token_type_ids)


def test_a_wrong_graph_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "PaddedModel", Wrong)
    with pytest.raises(ExportError, match=r"onnx/model.onnx: last_hidden_state .*; nothing was written"):
        bertie.export(source, tmp_path / "out", texts=TEXTS)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_the_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(ExportError, match=r"relative error of .*; allowed: 0\.0001"):
        bertie.export(source, tmp_path / "out", precision="int8", max_error=1e-4, texts=TEXTS, overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("difference", "error", "wrong"), [(1e-6, 1e-6, False), (1e-6, 1e-3, True), (0.1, 1e-5, True), (1e-6, np.nan, True)]
)
def test_judgement(difference: float, error: float, wrong: bool) -> None:
    output = OutputComparison(difference, 1.0, error, 1.0, 1.0, 10)
    file = ExportedFile("onnx/model.onnx", "onnx", "fp32", 1, {"logits": output}, 1.0, 1.0)
    assert (file.problem(1e-4) is not None) == wrong


def test_invalid_arguments(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ConfigError, "to='torchscript' must be one of onnx, openvino", {"to": "torchscript"}),
        (ConfigError, "precision='int4' must be one of fp32, fp16, int8", {"precision": ["fp32", "int4"]}),
        (ConfigError, "precision=\\[\\] must list", {"precision": []}),
        (ConfigError, "task='translate' must be one of", {"task": "translate"}),
        (ConfigError, "max_error=0 must be greater than 0", {"max_error": 0}),
        (InputError, "none of them empty", {"texts": ["a", ""]}),
        (bertie.NotFoundError, "has no head 'tag'", {"task": "tag"}),
    ]
    for kind, message, options in wrong:
        with pytest.raises(kind, match=message):
            bertie.export(source, out, **options)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ExistsError, match="overwrite=True"):
        bertie.export(source, tmp_path / "full")
    with pytest.raises(ExistsError, match="would be replaced"):
        bertie.export(source, source, overwrite=True)
    assert (source / "model.safetensors").is_file()
    assert not out.exists()
