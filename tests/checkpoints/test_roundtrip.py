"""What transformers saves loads here, what is saved here loads there: tensor by tensor, and whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

from bertie.checkpoints import storage as store
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.data import draft_folder
from bertie.errors import BertieError, CheckpointError, ExistsError
from bertie.text.batch import Batch
from tests.parity.test_transformers import their_outputs
from tests.parity.tiny import CASES, TINY, build, texts

# Untied, the original keeps a second bias that it never adds: Bertie writes the live one in its place.
DEAD = {"bert-untied": "cls.predictions.bias", "roberta-untied": "lm_head.bias"}


def weights(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def parameters(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return dict(checkpoint.model.named_parameters())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def their_model(name: str, suffix: str, folder: Path) -> Any:
    return getattr(transformers, TINY[name].stem + suffix).from_pretrained(folder).eval()


@pytest.mark.parametrize(("name", "suffix"), CASES)
def test_there_and_back(name: str, suffix: str, tmp_path: Path) -> None:
    theirs = build(name, suffix)
    theirs.save_pretrained(tmp_path / "a")
    checkpoint = Checkpoint.load(tmp_path / "a")
    assert checkpoint.tokenizer is None
    checkpoint.save(tmp_path / "b")

    config_a, config_b = (json.loads((tmp_path / x / "config.json").read_text()) for x in "ab")
    assert config_a == config_b
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    dead = DEAD.get(name)
    assert_same({k: v for k, v in b.items() if k != dead}, {k: v for k, v in a.items() if k != dead})

    back = their_model(name, suffix, tmp_path / "b")
    expected = {k: v for k, v in theirs.state_dict().items() if k != dead}
    assert_same({k: v for k, v in back.state_dict().items() if k != dead}, expected)
    assert_same(parameters(Checkpoint.load(tmp_path / "b")), parameters(checkpoint))

    if suffix == TINY[name].heads[0]:
        ids, segments = texts(name, suffix, 3, seed=5)
        for i, s in zip(ids, segments, strict=True):
            found, wanted = their_outputs(back, i, s), their_outputs(theirs, i, s)
            for k in wanted:  # the same numbers, in memory that is aligned otherwise
                assert_close(found[k], wanted[k], atol=1e-6, rtol=0)


# --- formats ---

FAMILIES = list({tiny.model_type: name for name, tiny in reversed(TINY.items())}.values())


def _sharded(theirs: Any, folder: Path) -> None:
    theirs.save_pretrained(folder, max_shard_size="5KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def _bin(theirs: Any, folder: Path) -> None:
    theirs.save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _old_bin(theirs: Any, folder: Path) -> None:
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()


def _sharded_bin(theirs: Any, folder: Path) -> None:
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = [dict(list(tensors.items())[i::3]) for i in range(3)]
    names = [f"pytorch_model-0000{i + 1}-of-00003.bin" for i in range(3)]
    for part, file in zip(parts, names, strict=True):
        torch.save(part, folder / file)
    where = {key: file for part, file in zip(parts, names, strict=True) for key in part}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("write", [_sharded, _bin, _old_bin, _sharded_bin])
@pytest.mark.parametrize("name", FAMILIES)
def test_formats(name: str, write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    theirs = build(name, TINY[name].heads[0])
    theirs.save_pretrained(tmp_path / "plain")
    write(theirs, tmp_path / "other")
    found, plain = Checkpoint.load(tmp_path / "other"), Checkpoint.load(tmp_path / "plain")
    assert_same(parameters(found), parameters(plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    suffix = TINY[name].heads[0]
    theirs = build(name, suffix).to(dtype)
    theirs.save_pretrained(tmp_path / "half")
    assert {v.dtype for v in weights(tmp_path / "half").values()} == {dtype}
    theirs.float().save_pretrained(tmp_path / "full")
    half, full = Checkpoint.load(tmp_path / "half"), Checkpoint.load(tmp_path / "full")
    assert_same(parameters(half), parameters(full))
    # In its own precision, and back: the same bits.
    Checkpoint.load(tmp_path / "half", precision="fp16" if dtype == torch.float16 else "bf16").save(tmp_path / "back")
    assert_same(weights(tmp_path / "back"), weights(tmp_path / "half"))
    # Widened, the config says so: others load what it says.
    half.save(tmp_path / "wide")
    assert {p.dtype for p in their_model(name, suffix, tmp_path / "wide").parameters()} == {torch.float32}


def test_overflow_in_half_precision_is_an_error(tmp_path: Path) -> None:
    theirs = build("bert", "Model")
    with torch.no_grad():
        theirs.embeddings.word_embeddings.weight[3, 3] = 1e5
    theirs.save_pretrained(tmp_path / "m")
    Checkpoint.load(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"word_embeddings.*not finite in torch\.float16"):
        Checkpoint.load(tmp_path / "m", precision="fp16")


# --- tokenizer and sentence files ---

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "##s", "on", "mat", ".", "a", "b"]


def with_tokenizer(folder: Path, suffix: str = "ForMaskedLM") -> Path:
    build("bert", suffix).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, "model_max_length": 32}))
    return folder


def test_tokenizer(tmp_path: Path) -> None:
    first = Checkpoint.load(with_tokenizer(tmp_path / "a"))
    first.save(tmp_path / "b")
    second = Checkpoint.load(tmp_path / "b")
    second.save(tmp_path / "c")
    assert first.tokenizer is not None
    assert second.tokenizer is not None
    their = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    for text in ("The cats sat on the mat.", "", "[MASK] é b"):
        ids = first.tokenizer.encode(text).ids.tolist()
        assert second.tokenizer.encode(text).ids.tolist() == ids
        assert their(text)["input_ids"] == ids
    assert second.max_length == first.max_length == 32
    for file in (tmp_path / "b").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes(), file.name


def sentence_folder(folder: Path, transformer: str) -> Path:
    with_tokenizer(folder / transformer, "Model")
    modules = [("", "Transformer", transformer), ("1", "Pooling", "1_Pooling"), ("2", "Dense", "2_Dense")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (_, kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / transformer / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 24, "do_lower_case": False})
    )
    for path, config in (
        ("1_Pooling", {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}),
        (
            "2_Dense",
            {
                "in_features": 16,
                "out_features": 6,
                "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh",
            },
        ),
    ):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    dense = nn.Linear(16, 6)
    tensors = {"linear.weight": dense.weight.detach(), "linear.bias": dense.bias.detach()}
    save_file(tensors, folder / "2_Dense" / "model.safetensors")
    return folder


@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_sentence_model(transformer: str, tmp_path: Path) -> None:
    """Also with the transformer in a folder of its own; the checksums cover every file."""
    first = Checkpoint.load(sentence_folder(tmp_path / "a", transformer))
    first.save(tmp_path / "b")
    second = Checkpoint.load(tmp_path / "b")
    assert first.sentence is not None
    assert second.sentence is not None
    assert (tmp_path / "b" / transformer / "model.safetensors").is_file()
    listed = json.loads((tmp_path / "b" / "checksums.json").read_text())
    files = {p.relative_to(tmp_path / "b").as_posix() for p in (tmp_path / "b").rglob("*") if p.is_file()}
    assert set(listed) == files - {"checksums.json"}
    assert first.tokenizer is not None
    batch = Batch.from_encodings(first.tokenizer.encode_batch(["the cat", "a mat on a mat"]))
    a, b = (one.sentence(one.model.hidden(batch), batch) for one in (first, second) if one.sentence)
    assert torch.equal(a, b)

    for file in sorted(files):
        raw = (tmp_path / "b" / file).read_bytes()
        (tmp_path / "b" / file).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(BertieError, match=r"checksums|changed"):
            Checkpoint.load(tmp_path / "b")
        (tmp_path / "b" / file).write_bytes(raw)
    Checkpoint.load(tmp_path / "b")


def test_cross_encoder_marks_are_kept(tmp_path: Path) -> None:
    import dataclasses

    folder = with_tokenizer(tmp_path / "a", "ForSequenceClassification")
    config = json.loads((folder / "config.json").read_text())
    mark = "sbert_ce_default_activation_function"
    (folder / "config.json").write_text(json.dumps({**config, mark: "torch.nn.modules.linear.Identity"}))
    checkpoint = Checkpoint.load(folder)
    assert checkpoint.cross_encoder is not None
    checkpoint.save(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert saved == {**config, mark: "torch.nn.modules.linear.Identity"}
    checkpoint.cross_encoder = dataclasses.replace(checkpoint.cross_encoder, activation="Sigmoid")
    checkpoint.save(tmp_path / "c")
    again = Checkpoint.load(tmp_path / "c")
    assert again.cross_encoder is not None
    assert again.cross_encoder.activation == "Sigmoid"


# --- writing ---


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.load(with_tokenizer(tmp_path_factory.mktemp("model") / "m"))


def test_an_inspected_model_has_nothing_to_save(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "m")
    inspected = Checkpoint.inspect(tmp_path / "m")
    assert inspected.model.device.type == "meta"
    with pytest.raises(CheckpointError, match="inspected, not loaded"):
        inspected.save(tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_modes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "new" / "parents" / "m")
    folder = tmp_path / "new" / "parents" / "m"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o644}
    assert [p.name for p in folder.parent.iterdir()] == ["m"]


def test_refuses_to_overwrite(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    checkpoint.save(tmp_path / "m")  # an empty folder may be filled
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path / "m").iterdir())
    with pytest.raises(ExistsError, match="overwrite=True"):
        checkpoint.save(tmp_path / "m")
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "m").iterdir()) == before
    (tmp_path / "m" / "old.txt").write_text("old")
    checkpoint.save(tmp_path / "m", overwrite=True)
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "m").iterdir()) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExistsError, match="is a file"):
        checkpoint.save(tmp_path / "file", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "m"]


@pytest.mark.parametrize("at", ["write_safetensors", "_digest", "rename"])
@pytest.mark.parametrize("old", [False, True])
def test_a_failure_leaves_nothing_behind(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, old: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_at_the_end(a: Path, b: Path) -> None:
        if b == tmp_path / "m" and not (a / "marker").exists():
            full()
        rename(a, b)

    rename = os.rename
    if old:
        checkpoint.save(tmp_path / "m")
        (tmp_path / "m" / "marker").write_text("old")
    if at == "rename":
        monkeypatch.setattr(os, "rename", full_at_the_end)
        monkeypatch.setattr(draft_folder, "_exchange", lambda a, b: False)
    else:
        monkeypatch.setattr(store, at, full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "m", overwrite=True)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == (["m"] if old else [])
    if old:
        assert (tmp_path / "m" / "marker").read_text() == "old"
        Checkpoint.load(tmp_path / "m")


_SAVER = """
import collections, json, os, random, signal, sys, time
import torch
from bertie.checkpoints.checkpoint import Checkpoint

torch.set_num_threads(1)
checkpoint, target, draw = Checkpoint.load(sys.argv[1]), sys.argv[2], random.Random(0)
outcomes = collections.Counter()
for trial in range(60):
    child = os.fork()
    if child == 0:
        for number in range(100000):
            with torch.no_grad():
                for p in checkpoint.model.parameters():
                    p.fill_(trial * 1000 + number)
            checkpoint.save(target, overwrite=True)
    time.sleep(draw.uniform(0, 0.04))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not os.path.exists(target):
        outcomes["absent"] += 1
        continue
    found = Checkpoint.load(target)  # checksums and all
    values = {float(v) for p in found.model.parameters() for v in (p.min(), p.max())}
    outcomes["whole" if len(values) == 1 else "mixed"] += 1
print(json.dumps(outcomes))
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    """kill -9 at random moments: the target is one whole folder, old or new, or is not there."""
    source, target = with_tokenizer(tmp_path / "a"), tmp_path / "out" / "m"
    (tmp_path / "saver.py").write_text(_SAVER)
    command = [sys.executable, str(tmp_path / "saver.py"), str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert outcomes.keys() <= {"whole", "absent"}
    assert sum(outcomes.values()) == 60
    Checkpoint.load(source).save(target, overwrite=True)  # what was left behind is in nobody's way
    Checkpoint.load(target)
