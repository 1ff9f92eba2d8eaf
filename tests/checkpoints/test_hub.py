"""From a name to a folder: a path, a built-in model, a hub id; and which files of a repository are fetched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

import bertie
from bertie.checkpoints import hub
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import resolve
from bertie.errors import BertieWarning, CheckpointError, ConfigError, NotFoundError
from tests.checkpoints.test_roundtrip import _bin, assert_same, parameters, sentence_folder, with_tokenizer
from tests.parity.tiny import build


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("plain") / "m")


# --- folders and built-in models ---


def test_folder(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(plain) == plain
    assert resolve(str(plain)) == plain
    monkeypatch.chdir(plain.parent)
    assert resolve("m") == Path("m")
    monkeypatch.setenv("HOME", str(plain.parent))
    assert resolve("~/m") == plain
    with pytest.raises(NotFoundError, match="revision='main'"):
        resolve(plain, "main")
    with pytest.raises(NotFoundError, match="is a file"):
        resolve(plain / "config.json")


def test_built_in(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path)
    shutil.copytree(plain, tmp_path / "small")
    (tmp_path / "empty").mkdir()
    assert hub.built_in() == ["small"]
    assert resolve("small") == tmp_path / "small"
    assert Checkpoint.load("small").source == "small"
    with pytest.raises(NotFoundError, match="revision='v1'"):
        resolve("small", "v1")
    with pytest.raises(NotFoundError, match=r"built-in model \(small\)"):
        resolve("no such name")


def test_a_folder_does_not_replace_a_built_in_model(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path / "built-in")
    shutil.copytree(plain, tmp_path / "built-in/small")
    shutil.copytree(plain, tmp_path / "here/small")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.warns(BertieWarning, match=r"small is the built-in model; the folder .* is written \./small"):
        assert resolve("small") == tmp_path / "built-in/small"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for folder in ("./small", Path("small"), Path("./small"), "../here/small", str(Path("small").resolve())):
            assert resolve(folder).resolve() == tmp_path / "here/small", folder
            source = Checkpoint.load(folder).source
            assert resolve(source).resolve() == tmp_path / "here/small", folder
            assert resolve(str(resolve(folder))).resolve() == tmp_path / "here/small", folder
            assert hub.is_local_folder(source)
    assert not hub.is_local_folder("small")
    shutil.rmtree("small")
    assert resolve(Path("small")) == tmp_path / "built-in/small"


def test_built_in_and_small(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the package's own model comes: int8, by name, with a report beside it."""
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path)
    first = Checkpoint.load(plain)
    first.save(tmp_path / hub.DEFAULT, precision="int8")
    (tmp_path / hub.DEFAULT / "quantization.json").write_text("{}")
    assert hub.built_in() == [hub.DEFAULT]
    model = bertie.load(hub.DEFAULT)
    assert isinstance(model, bertie.MaskedLM)
    for name, x in parameters(first).items():
        found = parameters(model.checkpoint)[name]
        torch.testing.assert_close(found, x, atol=x.detach().abs().max().item() / 254, rtol=1e-4)
    # Inspected, it has the same names and shapes.
    shapes = {name: p.shape for name, p in parameters(Checkpoint.inspect(hub.DEFAULT)).items()}
    assert shapes == {name: p.shape for name, p in parameters(first).items()}


@pytest.mark.parametrize(
    "name", ["", " ", "a/b/c", "no such name", "../x", "~nobody-at-all/x", "a\0b", "x" * 5000, "C:\\x", "-x", "a--b"]
)
def test_impossible_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused without asking the hub."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **options: pytest.fail(f"looks for {args[0]}"))
    with pytest.raises(NotFoundError) as caught:
        resolve(name)
    assert len(str(caught.value)) < 600


def test_ignore_is_a_list(plain: Path) -> None:
    with pytest.raises(ConfigError, match="ignore='auto_map' must be a list"):
        Checkpoint.load(plain, ignore="auto_map")


# --- the hub's cache, without the hub ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def put(cache: Path, name: str, folder: Path, revision: str = "main", commit: str = "a" * 40) -> Path:
    """As huggingface_hub lays it out: refs to commits, snapshots of links to blobs."""
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text(commit)
    (repo / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(p for p in folder.rglob("*") if p.is_file())):
        blob = repo / "blobs" / f"{commit[:4]}{number:036d}"
        shutil.copy(file, blob)
        link = repo / "snapshots" / commit / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return repo / "snapshots" / commit


def test_cached_hub_id(cache: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = put(cache, "org/name", plain)
    assert resolve("org/name") == expected
    found = Checkpoint.load("org/name")
    assert found.source == "org/name"
    assert_same(parameters(found), parameters(Checkpoint.load(plain)))
    # Another revision has its own weights.
    other = tmp_path_factory.mktemp("other")
    build("bert", "ForMaskedLM", seed=7).save_pretrained(other)
    put(cache, "org/name", other, "v2", "b" * 40)
    assert resolve("org/name", "v2").name == "b" * 40
    changed = parameters(Checkpoint.load("org/name", revision="v2"))
    assert not torch.equal(changed["encoder.embeddings.words.weight"], found.model.encoder.embeddings.words.weight)
    with pytest.raises(NotFoundError, match="revision 'v3'"):
        resolve("org/name", "v3")
    # One word without an owner may be a hub id as well.
    put(cache, "oneword", plain)
    assert resolve("oneword").parent.parent.name == "models--oneword"


def test_names_without_an_owner(cache: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in sentence-transformers: all-MiniLM-L6-v2 means sentence-transformers/all-MiniLM-L6-v2."""
    expected = put(cache, "sentence-transformers/all-MiniLM-L6-v2", plain)
    assert resolve("all-MiniLM-L6-v2") == expected
    assert Checkpoint.load("all-MiniLM-L6-v2").source == "all-MiniLM-L6-v2"
    with pytest.raises(NotFoundError, match="revision 'v3'"):
        resolve("all-MiniLM-L6-v2", "v3")
    with pytest.raises(NotFoundError, match=r"'unknown' is not .* unknown: .*; sentence-transformers/unknown: "):
        resolve("unknown")
    monkeypatch.chdir(plain.parent)  # a folder of that name comes first
    shutil.copytree(plain, "all-MiniLM-L6-v2", dirs_exist_ok=True)
    assert resolve("all-MiniLM-L6-v2") == Path("all-MiniLM-L6-v2")


def test_cached_formats(cache: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("bin")
    _bin(build("bert", "ForMaskedLM"), other)
    put(cache, "org/bin", other)
    assert_same(parameters(Checkpoint.load("org/bin")), parameters(Checkpoint.load(plain)))
    put(cache, "org/sentence", sentence_folder(tmp_path_factory.mktemp("st") / "m", "0_Transformer"))
    assert Checkpoint.load("org/sentence").sentence is not None


def test_what_the_cache_lacks(cache: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(NotFoundError, match="'org/unknown' is not a folder or a built-in model"):
        resolve("org/unknown")
    part = tmp_path_factory.mktemp("part")
    shutil.copy(plain / "config.json", part)
    put(cache, "org/part", part)
    with pytest.raises(CheckpointError, match="has no weights"):
        Checkpoint.load("org/part")


def test_unreachable_hub(tmp_path: Path) -> None:
    """In a process of its own, as the address is read once: refused at once, without minutes of retries."""
    code = "import time, bertie.checkpoints.checkpoint as h\nt = time.time()\ntry:\n    h.resolve('org/name')\n"
    code += "except h.NotFoundError as e:\n    print(time.time() - t, e)"
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, _, message = done.stdout.partition(" ")
    assert float(seconds) < 10
    assert "'org/name'" in message


# --- which files of a repository are fetched ---

NEEDED = [
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.txt", "vocab.json", "merges.txt", "spm.model", "spiece.model", "sentencepiece.bpe.model"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "checksums.json"),
    *("sentence_xlm-roberta_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("model-00001-of-00002.safetensors", "pytorch_model.bin.index.json", "1_Pooling/config.json"),
    *("2_Dense/config.json", "2_Dense/model.safetensors", "0_Transformer/config.json", "0_Transformer/vocab.txt"),
    *("0_Transformer/model.safetensors", "0_Transformer/sentence_bert_config.json", "10_Dense/model.safetensors"),
    *("heads.safetensors", "0_Transformer/heads.safetensors"),
    *("model.int8.safetensors", "0_Transformer/model.int8.safetensors"),
]
UNNEEDED = [
    *("README.md", ".gitattributes", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.onnx"),
    *("onnx/model.onnx", "onnx/config.json", "onnx/tokenizer.json", "openvino/openvino_model.bin"),
    *("openvino/openvino_model.xml", "openvino/config.json", "coreml/model.mlpackage/weights.bin", "training_args.bin"),
    *("checkpoint-500/model.safetensors", "checkpoint-500/optimizer.pt", "checkpoint-500/config.json", "data.json"),
    *("model.fp16.safetensors", "adapter_model.safetensors", "train_script.py", "eval/similarity.csv", "optimizer.bin"),
    *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "2_Dense/pytorch_model.bin"),
]


def test_patterns() -> None:
    fetched = set(filter_repo_objects([*NEEDED, *UNNEEDED], allow_patterns=hub._PATTERNS))
    assert fetched == set(NEEDED)


@pytest.mark.parametrize(
    ("files", "pickles"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], []),
        (["config.json", "model-00001-of-00001.safetensors", "pytorch_model.bin"], []),
        (["config.json", "heads.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["config.json", "model.int8.safetensors", "pytorch_model.bin"], []),
        (["config.json", "pytorch_model.bin", "training_args.bin", "openvino/x.bin"], ["pytorch_model.bin"]),
        (
            ["config.json", "pytorch_model.bin", "2_Dense/config.json", "2_Dense/model.safetensors"],
            ["pytorch_model.bin"],
        ),
        (
            [
                "config.json",
                "model.safetensors",
                "pytorch_model.bin",
                "2_Dense/config.json",
                "2_Dense/pytorch_model.bin",
            ],
            ["2_Dense/pytorch_model.bin"],
        ),
        (["0_Transformer/config.json", "0_Transformer/model.safetensors", "0_Transformer/pytorch_model.bin"], []),
    ],
)
def test_pickles_only_where_there_is_nothing_else(
    files: list[str], pickles: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fake(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("org/name", "v1")
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            fetched.append(file)
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve("org/name", "v1") == tmp_path
    assert sorted(file for file in fetched if file.endswith(".bin")) == pickles


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("x"), ValueError(""), TimeoutError("slow")])
def test_whatever_the_hub_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    with pytest.raises(NotFoundError, match=f"org/name.*({error or type(error).__name__})"):
        resolve("org/name")
