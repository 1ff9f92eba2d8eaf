import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.errors import ConfigError
from tests.checkpoints.tiny_sentence import save_bert

pytest.importorskip("sentence_transformers")
pytest.importorskip("transformers")

PAIRS = [("the cat", "sat on the mat"), ("a dog", "ran"), ("cat", "a cat ran on a dog on a mat")]


def bert(folder: Path, labels: int, **marks: Any) -> Path:
    return save_bert(folder, labels, limit=20, initializer_range=0.5, **marks)


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def load(folder: Path) -> CrossEncoderConfig:
    found = CrossEncoderConfig.from_folder(folder, config_of(folder))
    assert found is not None
    return found


@torch.no_grad()
def ours(folder: Path, cross: CrossEncoderConfig, prompt: str = "") -> torch.Tensor:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for first, second in PAIRS:
        ids = tokenizer(prompt + first, second, return_tensors="pt", truncation=True, max_length=cross.max_length)
        rows.append(cross.module()(model(**ids).logits)[0])
    scores = torch.stack(rows)
    return scores[:, 0] if cross.num_labels == 1 else scores


def theirs(folder: Path, **kwargs: Any) -> torch.Tensor:
    from sentence_transformers import CrossEncoder

    return torch.from_numpy(CrossEncoder(str(folder), device="cpu").predict(PAIRS, **kwargs))


def write_back(source: Path, target: Path, cross: CrossEncoderConfig) -> Path:
    """The transformer's own files from `source`, the marks from Bertie alone."""
    target.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    config = {key: value for key, value in config_of(source).items() if key not in CrossEncoderConfig.CONFIG_KEYS}
    (target / "config.json").write_text(json.dumps(config | cross.config_entries()), encoding="utf-8")
    for path, content in cross.files().items():
        (target / path).write_bytes(content)
    return target


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("labels", "activation", "expected"),
    [(1, None, "Sigmoid"), (3, None, "Identity"), (1, torch.nn.Identity(), "Identity"), (3, torch.nn.Tanh(), "Tanh")],
)
def test_new_layout_both_ways(labels: int, activation: torch.nn.Module | None, expected: str, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    bert(tmp_path / "bert", labels)
    model = CrossEncoder(str(tmp_path / "bert"), device="cpu", activation_fn=activation, max_length=9)
    folder = tmp_path / "theirs"
    model.save_pretrained(str(folder))
    cross = load(folder)
    assert (cross.activation, cross.num_labels, cross.max_length) == (expected, labels, 9)
    scores = theirs(folder)
    same(ours(folder, cross), scores)
    copy = write_back(folder, tmp_path / "ours", cross)
    same(theirs(copy), scores)
    for path, content in cross.files().items():
        assert json.loads((folder / path).read_bytes()) == json.loads(content)


def test_prompts_both_ways(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder

    bert(tmp_path / "bert", 1)
    prompts = {"q": "find : "}
    model = CrossEncoder(str(tmp_path / "bert"), device="cpu", prompts=prompts, default_prompt_name="q")
    folder = tmp_path / "theirs"
    model.save_pretrained(str(folder))
    cross = load(folder)
    assert (cross.prompts, cross.default_prompt) == (prompts, "q")
    same(ours(folder, cross, "find : "), theirs(folder))


@pytest.mark.parametrize(
    ("labels", "marks", "expected"),
    [
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "Identity"),
        (
            1,
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0"}},
            "Identity",
        ),
        (1, {"sentence_transformers": {"version": "4.0.1"}}, "Sigmoid"),
        (3, {"sentence_transformers": {"version": "4.0.1"}}, "Identity"),
        (
            1,
            {
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"},
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            "Tanh",
        ),
    ],
)
def test_old_layouts_both_ways(labels: int, marks: dict[str, Any], expected: str, tmp_path: Path) -> None:
    folder = bert(tmp_path / "theirs", labels, **marks)
    cross = load(folder)
    assert (cross.activation, cross.max_length, cross.files(), cross.config_entries()) == (expected, 20, {}, marks)
    scores = theirs(folder)
    same(ours(folder, cross), scores)
    same(theirs(write_back(folder, tmp_path / "ours", cross)), scores)


@pytest.mark.parametrize(("labels", "activation"), [(1, None), (1, "Identity"), (3, None), (3, "Sigmoid")])
def test_fresh_loads_there_and_here(labels: int, activation: str | None, tmp_path: Path) -> None:
    cross = CrossEncoderConfig.create(labels, activation, max_length=8, prompts={"q": "find : "}, default_prompt="q")
    folder = write_back(bert(tmp_path / "bert", labels), tmp_path / "ours", cross)
    same(ours(folder, cross, "find : "), theirs(folder))
    assert load(folder) == cross
    assert load(folder).files() == cross.files()
    # Versions 4.0 to 5.3 know only config.json.
    (folder / "modules.json").unlink()
    assert load(folder).activation == cross.activation


@pytest.mark.parametrize("layout", ["old", "new"])
def test_changes_are_written(layout: str, tmp_path: Path) -> None:
    marks = {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}
    folder = bert(tmp_path / "bert", 1, **(marks if layout == "old" else {}))
    cross = load(folder) if layout == "old" else CrossEncoderConfig.create(1)
    cross = replace(cross, activation="Tanh")
    first = write_back(folder, tmp_path / "first", cross)
    assert (first / "modules.json").exists() == (layout == "new")
    assert load(first).activation == "Tanh"
    same(theirs(first), ours(first, load(first)))
    cross = replace(cross, max_length=7, prompts={"q": "find : "}, default_prompt="q")
    second = write_back(folder, tmp_path / "second", cross)
    assert load(second) == cross
    same(theirs(second), ours(second, cross, "find : "))


def test_null_marks_count_as_none(tmp_path: Path) -> None:
    config = {"sentence_transformers": None, "sbert_ce_default_activation_function": "torch.nn.Tanh"}
    found = CrossEncoderConfig.from_folder(tmp_path, config)
    assert found is not None
    assert (found.activation, found.config_entries()) == ("Tanh", config)
    assert CrossEncoderConfig.from_folder(tmp_path, {"sentence_transformers": None}) is None


def test_not_a_cross_encoder(tmp_path: Path) -> None:
    assert CrossEncoderConfig.from_folder(tmp_path, {"id2label": {"0": "a"}}) is None
    (tmp_path / "modules.json").write_text("[]", encoding="utf-8")
    mark = {"sentence_transformers": {"version": "5.0.0"}}
    assert CrossEncoderConfig.from_folder(tmp_path, mark) is None
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"model_type": "SentenceTransformer"}', encoding="utf-8"
    )
    assert CrossEncoderConfig.from_folder(tmp_path, mark) is None


OLD = "sbert_ce_default_activation_function"
MODEL = "config_sentence_transformers.json"
TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
DENSE = {"idx": 1, "name": "1", "path": "1_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
LOGITS = {
    "idx": 1,
    "name": "1",
    "path": "1",
    "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({OLD: "os.system"}, f"config.json: {OLD}='os.system' is not supported"),
        ({OLD: 3}, f"{OLD}=3 is not supported"),
        ({"sentence_transformers": {"activation_fn": "evil.Sigmoid"}}, "activation_fn='evil.Sigmoid' is not supported"),
        ({"sentence_transformers": "4.0"}, "sentence_transformers='4.0' is not supported; allowed: an object"),
        ({"sentence_transformers": {"pooling": 1}}, "config.json: sentence_transformers: unknown key pooling=1$"),
        ({OLD: "torch.nn.Tanh", "id2label": []}, r"id2label=\[\] is not supported"),
        ({OLD: "torch.nn.Tanh", "id2label": {}}, "id2label={} is not supported"),
        ({OLD: "torch.nn.Tanh", "id2label": {"0": "a"}, "num_labels": 2}, "num_labels=2 contradicts the 1 name"),
    ],
)
def test_bad_marks_say_what_is_wrong(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        CrossEncoderConfig.from_folder(tmp_path, config)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            MODEL,
            {"model_type": "CrossEncoder", "pooling": "mean"},
            f"{MODEL}: unknown key pooling='mean'",
        ),
        (
            MODEL,
            {"model_type": "CrossEncoder", "activation_fn": "os.system"},
            f"{MODEL}: activation_fn='os.system' is not supported",
        ),
        (MODEL, {"model_type": "CrossEncoder", "prompts": []}, r"prompts=\[\] is not supported; allowed: an object"),
        (
            MODEL,
            {"model_type": "CrossEncoder", "default_prompt_name": "q"},
            "default_prompt_name='q' is not supported; allowed: null",
        ),
        ("modules.json", [TRANSFORMER, DENSE], "a cross-encoder of Transformer, Dense is not supported"),
        ("modules.json", [TRANSFORMER, LOGITS], "LogitScore.* is not supported here"),
        ("modules.json", [TRANSFORMER | {"path": "../x"}], "path='../x' must be relative"),
        ("sentence_bert_config.json", {"transformer_task": "text-generation"}, "allowed: 'sequence-classification'"),
        (
            "sentence_bert_config.json",
            {"colour": 1},
            "sentence_bert_config.json: unknown key colour=1",
        ),
    ],
)
def test_bad_files_say_what_is_wrong(file: str, content: object, message: str, tmp_path: Path) -> None:
    for path, fresh in CrossEncoderConfig.create(1).files().items():
        (tmp_path / path).write_bytes(fresh)
    assert CrossEncoderConfig.from_folder(tmp_path, {}) is not None
    (tmp_path / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        CrossEncoderConfig.from_folder(tmp_path, {})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_labels": 0}, "num_labels=0"),
        (
            {"num_labels": 1, "activation": "Softmax"},
            "activation_fn='torch.nn.Softmax' is not supported; allowed: 'torch.nn.Identity'",
        ),
        ({"num_labels": 1, "max_length": 0}, "max_seq_length=0 is not supported"),
        ({"num_labels": 1, "default_prompt": "q"}, "default_prompt_name='q' is not supported"),
    ],
)
def test_fresh_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CrossEncoderConfig.create(**kwargs)
    with pytest.raises(ConfigError, match=message):
        replace(CrossEncoderConfig.create(3), **kwargs)
