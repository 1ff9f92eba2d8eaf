from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bertie
from bertie import Checkpoint, ZeroShotTagger
from bertie.checkpoints.gliner import FILE
from bertie.errors import CheckpointError, ConfigError
from tests.parity.gliner_reference import FOLDER, LABELS, TEXTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a model that the package `gliner` saved."""
    target = tmp_path / "model"
    shutil.copytree(FOLDER / "lstm", target)
    return target


def change(folder: Path, **entries: Any) -> None:
    """Set keys of the config; None removes one."""
    config = json.loads((folder / FILE).read_text("utf-8")) | entries
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / FILE).write_text(json.dumps(config), encoding="utf-8")


def scores(folder: Path) -> list[Any]:
    return ZeroShotTagger.load(folder).tag(TEXTS, LABELS[0], threshold=0.6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("span_mode", "token_level"),
        ("span_mode", "markerV1"),
        ("labels_encoder", "BAAI/bge-small-en-v1.5"),
        ("labels_decoder", "gpt2"),
        ("relations_layer", "mlp"),
        ("subtoken_pooling", "mean"),
        ("words_splitter_type", "spacy"),
        ("fuse_layers", True),
        ("post_fusion_schema", "l2l-l2t"),
        ("model_type", "gliner_bi_encoder_span"),
        ("span_encoder_config", {"model_type": "rnn"}),
        ("precomputed_prompts_mode", True),
        ("max_width", 0),
        ("num_rnn_layers", -1),
        ("something_new", 1),
    ],
)
def test_what_is_not_supported_is_refused_by_name(folder: Path, key: str, value: Any) -> None:
    change(folder, **{key: value})
    with pytest.raises(ConfigError, match=rf"gliner_config\.json: .*{key}"):
        Checkpoint.load(folder)


def test_keys_of_the_encoder_are_accounted_for(folder: Path) -> None:
    config = json.loads((folder / FILE).read_text("utf-8"))
    change(folder, encoder_config=config["encoder_config"] | {"novel_key": 3})
    with pytest.raises(ConfigError, match="novel_key"):
        Checkpoint.load(folder)


def test_keys_that_describe_training_are_ignored(folder: Path) -> None:
    before = scores(folder)
    change(folder, lr_encoder=1e-5, loss_gamma=2, num_steps=3, root_dir="logs", random_drop=True)
    assert scores(folder) == before


def test_weights_are_accounted_for(folder: Path) -> None:
    change(folder, num_rnn_layers=0)
    with pytest.raises(CheckpointError, match=r"unexpected: rnn\.lstm"):
        Checkpoint.load(folder)
    change(folder, num_rnn_layers=2)
    with pytest.raises(CheckpointError, match=r"missing: rnn\.lstm"):
        Checkpoint.load(folder)
    change(folder, num_rnn_layers=1, hidden_size=10)
    with pytest.raises(CheckpointError, match="has shape"):
        Checkpoint.load(folder)


def test_markers_must_be_tokens(folder: Path) -> None:
    change(folder, class_token_index=3)
    with pytest.raises(CheckpointError, match="class_token_index=3 must be the id of '<<ENT>>'"):
        Checkpoint.load(folder)
    index = ZeroShotTagger.load(FOLDER / "lstm").tokenizer.id("<<ENT>>")
    change(folder, class_token_index=index, sep_token="<<END>>")
    with pytest.raises(CheckpointError, match="sep_token='<<END>>' must be a token"):
        Checkpoint.load(folder)


def test_older_folders_have_no_tokens_for_prompts(folder: Path) -> None:
    """With -1, the package adds them to the tokenizer when it loads a folder."""
    before = scores(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    added = ("[FLERT]", "<<ENT>>", "<<SEP>>")
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in added]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings = {key: value for key, value in settings.items() if "added" not in key and "extra" not in key}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    change(folder, class_token_index=-1, vocab_size=-1)
    assert scores(folder) == before


def test_the_encoder_may_be_named_instead(folder: Path, tmp_path: Path) -> None:
    """In older folders the config and the tokenizer are those of another model."""
    before = scores(folder)
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((folder / FILE).read_text("utf-8"))
    (base / "config.json").write_text(json.dumps(config["encoder_config"] | {"vocab_size": 7}), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(base / name)
    change(folder, encoder_config=..., model_name=str(base))
    assert scores(folder) == before
    change(folder, model_name="")
    with pytest.raises(ConfigError, match="model_name='' must name the encoder"):
        Checkpoint.load(folder)


def test_pickled_weights(folder: Path) -> None:
    before = scores(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert scores(folder) == before


@pytest.mark.parametrize("name", ["lstm", "plain"])
def test_round_trip(name: str, tmp_path: Path) -> None:
    """The same tensors under the same names, and the same config."""
    source = FOLDER / name
    checkpoint = Checkpoint.load(source)
    checkpoint.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "config.json").exists()
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "saved"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    old, new = (json.loads((folder / FILE).read_text("utf-8")) for folder in (source, tmp_path / "saved"))
    new["encoder_config"]["dtype"] = old["encoder_config"]["dtype"]
    assert old == new
    assert scores(tmp_path / "saved") == scores(source)


def test_smaller_files(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(FOLDER / "lstm")
    for precision in ("fp16", "int8"):
        checkpoint.save(tmp_path / precision, precision=precision)
        loaded = ZeroShotTagger.load(tmp_path / precision)
        assert [len(result.spans) > 0 for result in loaded.tag(TEXTS[:2], LABELS[0], threshold=0.3)] == [True, True]


def test_a_config_that_was_added_later_is_noticed(tmp_path: Path) -> None:
    Checkpoint.load(FOLDER / "plain").save(tmp_path / "saved")
    change(tmp_path / "saved", max_width=2)
    with pytest.raises(CheckpointError, match=r"gliner_config\.json has changed"):
        Checkpoint.load(tmp_path / "saved")


def test_other_heads_replace_the_span_head(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(FOLDER / "plain").with_head("classify", ["a", "b"])
    checkpoint.save(tmp_path / "saved")
    assert isinstance(bertie.load(tmp_path / "saved"), bertie.Classifier)
    assert not (tmp_path / "saved" / FILE).exists()


def test_inspect_reads_no_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint.inspect(folder)
    assert checkpoint.device.type == "meta"
    assert list(checkpoint.heads) == ["span"]
    tensors["prompt_rep_layer.0.bias"] = tensors["prompt_rep_layer.0.bias"][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"prompt_rep_layer\.0\.bias has shape"):
        Checkpoint.inspect(folder)
