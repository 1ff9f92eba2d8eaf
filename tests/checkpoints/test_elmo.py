"""ELMo's files: read, written, refused."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import bertie
from bertie.checkpoints.elmo import describe, read_elmo, read_options
from bertie.checkpoints.elmo_folder import is_elmo_folder
from bertie.errors import BertieError, CheckpointError, ConfigError, ExistsError, MissingPackageError, NotFoundError
from tests.tasks.tiny_elmo import tiny_elmo

SOURCE = Path(__file__).parents[1] / "parity" / "elmo"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the files that h5py has written in bilm-tf's layout."""
    path = tmp_path / "elmo"
    path.mkdir()
    shutil.copy(SOURCE / "tanh_options.json", path / "options.json")
    shutil.copy(SOURCE / "tanh_weights.hdf5", path / "weights.hdf5")
    return path


def datasets(path: Path) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(lambda name, value: out.update({name: value[...]}) if isinstance(value, h5py.Dataset) else None)
    return out


# --- reading and writing ---


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_saved_datasets_are_those_that_were_read(name: str, tmp_path: Path) -> None:
    """Name by name and bit by bit: what AllenNLP reads of the original, it reads of the copy."""
    bertie.Elmo.load(SOURCE / f"{name}_options.json", SOURCE / f"{name}_weights.hdf5").save(tmp_path / "copy")
    theirs, ours = datasets(SOURCE / f"{name}_weights.hdf5"), datasets(tmp_path / "copy" / "weights.hdf5")
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert_array_equal(ours[key], value, err_msg=key)
    options = json.loads((SOURCE / f"{name}_options.json").read_text("utf-8"))
    assert json.loads((tmp_path / "copy" / "options.json").read_text("utf-8")) == options


@pytest.mark.parametrize("changes", [{}, {"highways": 0, "skip_connections": False}, {"width": 56, "layers": 1}])
def test_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_elmo(**changes)
    model.save(tmp_path / "a")
    again = bertie.Elmo.load(tmp_path / "a", device="cpu")
    assert again.config == model.config
    for (name, ours), theirs in zip(model.model.state_dict().items(), again.model.state_dict().values(), strict=True):
        assert ours.equal(theirs), name
    with pytest.raises(ExistsError):
        model.save(tmp_path / "a")
    model.save(tmp_path / "a", overwrite=True)
    model.save(tmp_path / "b")
    assert (tmp_path / "a" / "weights.hdf5").read_bytes() == (tmp_path / "b" / "weights.hdf5").read_bytes()


def test_without_a_projection_of_the_characters(tmp_path: Path) -> None:
    """bilm-tf writes none if there are as many filters as dimensions."""
    model = tiny_elmo(project_characters=False, width=56)
    model.save(tmp_path / "a")
    assert bertie.Elmo.load(tmp_path / "a").config == model.config


def test_names_of_files(folder: Path) -> None:
    expected = read_elmo(folder).state_dict()
    for file in list(folder.iterdir()):
        file.rename(folder / f"elmo_2x4096_{file.name}")
    assert is_elmo_folder(folder)
    assert all(value.equal(expected[name]) for name, value in read_elmo(folder).state_dict().items())
    (folder / "other_options.json").write_bytes((folder / "elmo_2x4096_options.json").read_bytes())
    with pytest.raises(NotFoundError, match=r"several files …options\.json"):
        read_elmo(folder)
    read_elmo(folder / "other_options.json", folder / "elmo_2x4096_weights.hdf5")


@pytest.mark.parametrize("kind", ["float16", "float64", "gzip"])
def test_other_encodings_of_numbers(kind: str, folder: Path) -> None:
    with h5py.File(folder / "weights.hdf5", "r+") as file:
        value = file["char_embed"][...]
        del file["char_embed"]
        if kind == "gzip":
            file.create_dataset("char_embed", data=value, compression="gzip")
        else:
            file["char_embed"] = value.astype(kind)
    ours = read_elmo(folder).characters.embedding
    assert_array_equal(ours, value.astype(np.float16).astype(np.float32) if kind == "float16" else value)


def test_training_options_are_ignored(folder: Path) -> None:
    options = json.loads((folder / "options.json").read_text("utf-8"))
    options |= {"bidirectional": True, "dropout": 0.1, "n_train_tokens": 768648884, "batch_size": 128}
    options["char_cnn"]["n_characters"] = 261  # as in training
    (folder / "options.json").write_text(json.dumps(options), "utf-8")
    assert read_options(folder / "options.json") == read_options(SOURCE / "tanh_options.json")


def test_describe(folder: Path) -> None:
    facts = describe(folder)
    assert facts["parameters"]["total"] == sum(p.numel() for p in read_elmo(folder).parameters())
    assert facts["shape"]["dimension"] == 12


# --- options that are refused ---


def change(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(options: dict[str, Any]) -> None:
        for name in path[:-1]:
            options = options[name]
        if value is None:
            del options[path[-1]]
        else:
            options[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("lstm", value=None), "lstm is missing"),
        (change("char_cnn", value=None), "char_cnn is missing; models that read words"),
        (change("char_cnn", value=[]), "an object"),
        (change("char_cnn", "filters", value=None), "char_cnn: filters is missing"),
        (change("char_cnn", "filters", value=[[1, 2, 3]]), "pairs"),
        (change("char_cnn", "filters", value=[[1, True]]), "pairs"),
        (change("char_cnn", "filters", value=[]), "pairs"),
        (change("char_cnn", "filters", value=[[51, 4]]), "from 1 to max_characters=50"),
        (change("char_cnn", "activation", value="gelu"), "activation='gelu' is not supported; allowed: relu, tanh"),
        (change("char_cnn", "n_characters", value=300), "n_characters=300 is not supported; allowed: 262, 261"),
        (change("char_cnn", "embedding", "dim", value=-4), "dim=-4"),
        (change("char_cnn", "embedding", "size", value=4), "unknown key size=4"),
        (change("char_cnn", "pooling", value="mean"), "unknown key pooling='mean'"),
        (change("char_cnn", "max_characters_per_token", value=1), "from 3 to"),
        (change("lstm", "n_layers", value=10**9), "n_layers=1000000000"),
        (change("lstm", "dim", value=10**30), "dim=1000"),
        (change("lstm", "dim", value="8"), "dim='8'"),
        (change("lstm", "cell_clip", value=float("nan")), "cell_clip=nan"),
        (change("lstm", "proj_clip", value=-1), "proj_clip=-1"),
        (change("lstm", "peephole", value=True), "unknown key peephole=True"),
        (change("use_attention", value=True), "unknown key use_attention=True"),
        (change("bidirectional", value=False), "bidirectional=False is not supported"),
    ],
)
def test_invalid_options(edit: Callable[[dict[str, Any]], None], message: str, folder: Path) -> None:
    options = json.loads((folder / "options.json").read_text("utf-8"))
    edit(options)
    (folder / "options.json").write_text(json.dumps(options), "utf-8")
    with pytest.raises(ConfigError, match=message):
        read_elmo(folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"lstm": {}, "lstm": {}}', b"[" * 10_000])
def test_options_that_are_no_object(content: bytes, folder: Path) -> None:
    (folder / "options.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"options\.json"):
        read_elmo(folder)


# --- weights that are refused ---


def replace(name: str, value: Any) -> Callable[[Any], None]:
    def edit(file: Any) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return edit


def add_virtual(file: Any) -> None:
    del file["CNN/b_cnn_0"]
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource("other.hdf5", "data", (3,))
    file.create_virtual_dataset("CNN/b_cnn_0", layout)


def add_external(file: Any) -> None:
    del file["CNN/b_cnn_0"]
    file.create_dataset("CNN/b_cnn_0", (3,), "f4", external=[("/etc/hostname", 0, h5py.h5f.UNLIMITED)])


def add_unwritten(file: Any) -> None:
    del file["CNN/b_cnn_0"]
    file.create_dataset("CNN/b_cnn_0", (3,), "f4", chunks=(1,))


def add_partly_written(file: Any) -> None:
    add_unwritten(file)
    file["CNN/b_cnn_0"][0] = 1.0


def add_cycle(file: Any) -> None:
    file["RNN_0/again"] = file["RNN_0"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (replace("CNN/b_cnn_0", None), "missing: CNN/b_cnn_0"),
        (replace("CNN", None), "missing: CNN/W_cnn_0, CNN/W_cnn_1, CNN/b_cnn_0, CNN/b_cnn_1$"),
        (replace("RNN_1", None), "and 1 more"),
        (lambda file: file.create_dataset("softmax/W", data=np.zeros(3, np.float32)), "left over: softmax/W"),
        (replace("char_embed", np.zeros((262, 3), np.float32)), r"shape \(262, 3\), and the options \(261, 3\)"),
        (replace("char_embed", np.zeros((261, 3), np.int64)), "type int64"),
        (replace("CNN/b_cnn_0", np.array([0, np.nan, 0], np.float32)), "b_cnn_0 has values that are not finite"),
        (replace("CNN/b_cnn_0", h5py.SoftLink("/CNN/b_cnn_1")), "'CNN/b_cnn_0' is a link"),
        (replace("CNN/b_cnn_0", h5py.ExternalLink("other.hdf5", "/x")), "'CNN/b_cnn_0' is a link"),
        (replace("CNN/b_cnn_0", np.dtype("f4")), "'CNN/b_cnn_0' is neither a group nor a dataset"),
        (replace("CNN/b_cnn_0", np.array(["a", "b", "c"], "S1")), "type"),
        (add_virtual, "stored in another file"),
        (add_external, "stored in another file"),
        (add_unwritten, "declared with 12 bytes, which are not all there"),
        (add_partly_written, "declared with 12 bytes, which are not all there"),
        (add_cycle, "nested more than"),
    ],
)
def test_invalid_weights(edit: Callable[[Any], None], message: str, folder: Path) -> None:
    with h5py.File(folder / "weights.hdf5", "r+") as file:
        edit(file)
    with pytest.raises(CheckpointError, match=message):
        read_elmo(folder)


def test_weights_of_another_model(folder: Path) -> None:
    shutil.copy(SOURCE / "relu_weights.hdf5", folder / "weights.hdf5")
    with pytest.raises(CheckpointError, match=r"missing: RNN_0.*; left over: CNN/W_cnn_2"):
        read_elmo(folder)


@pytest.mark.parametrize("content", [b"", b"not HDF5", b"\x89HDF\r\n\x1a\n" + b"\0" * 100])
def test_files_that_are_no_hdf5(content: bytes, folder: Path) -> None:
    (folder / "weights.hdf5").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"weights\.hdf5 cannot be read as HDF5"):
        read_elmo(folder)


def test_damaged_files_raise_clear_errors(folder: Path) -> None:
    """Or are read, where the damage only changes a number: files without checksums cannot tell."""
    rng, file = random.Random(0), folder / "weights.hdf5"
    data, messages = file.read_bytes(), list[str]()
    for attempt in range(60):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 3 == 0 else data)
        for _ in range(rng.choice([1, 4, 50])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file.write_bytes(damaged)
        try:
            read_elmo(folder)
        except BertieError as error:
            messages.append(str(error))
    assert len(messages) > 20
    assert all(message.startswith("weights.hdf5") for message in messages)


def test_saved_folders_have_checksums(tmp_path: Path) -> None:
    tiny_elmo().save(tmp_path / "a")
    file = tmp_path / "a" / "weights.hdf5"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"weights\.hdf5 has changed"):
        bertie.Elmo.load(tmp_path / "a")


# --- what is not there ---


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    for source, weights, message in (
        (tmp_path / "nothing", None, "neither a folder nor a file"),
        (folder / "options.json", None, "pass the weights, too"),
        (folder / "options.json", folder / "nothing", "is not a file"),
        (folder, folder / "weights.hdf5", "is a folder; pass the options file"),
        (tmp_path, None, "has no file …options.json"),
        ("~nobody-of-this-name/elmo", None, "cannot be looked up"),
        ("x" * 5000, None, "cannot be looked up"),
        (folder / "options.json", "x" * 5000, "cannot be looked up"),
    ):
        with pytest.raises(NotFoundError, match=message):
            read_elmo(source, weights)
    assert not is_elmo_folder("~nobody-of-this-name/elmo")
    assert not is_elmo_folder("x" * 5000)
    (folder / "weights.hdf5").unlink()
    with pytest.raises(NotFoundError, match=r"no file ….hdf5"):
        read_elmo(folder)
    assert not is_elmo_folder(folder)


def test_missing_package(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = read_elmo(folder)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackageError, match=r"h5py: pip install 'bertie\[elmo\]'"):
        read_elmo(folder)
    with pytest.raises(MissingPackageError, match="h5py"):
        bertie.Elmo(model).save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_other_tasks_name_the_right_class(folder: Path) -> None:
    with pytest.raises(NotFoundError, match=r"is an ELMo model: use bertie\.Elmo"):
        bertie.Embedder.load(folder)
