"""`bertie pretrain`: from nothing and from a model, stopped and gone on with, refused, and what it leaves behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.cli import main
from bertie.text.batch import Batch
from bertie.text.tokenizer_training import extend, train
from bertie.training.loop import Trainer
from bertie.training.pretrain.corpus import CorpusSettings, build_corpus
from bertie.training.state import StateFolder
from tests.training.pretrain.corpus_texts import texts

RECIPE = """
[data]
corpus = "corpus"
tokenizer = "tokenizer"
[model]
model_type = "bert"
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
intermediate_size = 24
max_position_embeddings = 64
[training]
steps = 40
batch_tokens = 256
max_length = 64
lr = 3e-3
evals = 4
seed = 1
[[objective]]
kind = "mlm"
rate = 0.3
"""
MODEL_FILES = {"checksums.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
REPORT = {"curve.csv", "curve.html", "evaluations.csv", "samples.jsonl", "run.json", "recipe.json"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, a corpus with a held-out part, a recipe, and a model that it made."""
    top = tmp_path_factory.mktemp("pretrain")
    (top / "in.txt").write_text("\n\n".join(texts(80, seed=2)) + "\n")
    tokenizer = train((top / "in.txt").read_text().split("\n"), vocab_size=200, max_length=64)
    tokenizer.save(top / "tokenizer")
    build_corpus([str(top / "in.txt")], tokenizer, top / "corpus", CorpusSettings(held_out=0.2))
    (top / "recipe.toml").write_text(RECIPE)
    assert main(["pretrain", str(top / "recipe.toml"), "--data", str(top), "-o", str(top / "model")]) == 0
    return top


def pretrain(data: Path, *argv: str) -> int:
    try:
        return main(["pretrain", "--data", str(data), *argv])
    except SystemExit as error:
        return int(error.code or 0)


def recipe(data: Path) -> str:
    return str(data / "recipe.toml")


def weights(folder: str | Path) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def told(folder: str | Path, name: str) -> Any:
    return json.loads(Path(folder, "training", name).read_text())


# --- new models ---


def test_a_new_model(data: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain(data, recipe(data), "-o", "deep/out") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("deep/out: ")
    assert " tokens in " in lines[0]
    assert lines[1].startswith("  held-out loss ")
    assert lines[-1] == f"  curves: {Path('deep/out/training/curve.html')}"
    assert "step 40 of 40: loss" in err
    assert {file.name for file in Path("deep/out").iterdir()} == MODEL_FILES | {"special_tokens_map.json", "training"}
    assert {file.name for file in Path("deep/out/training").iterdir()} == REPORT
    assert not list(Path("deep").glob("*.training")) + list(Path("deep").glob(".*"))
    assert weights("deep/out") == weights(data / "model")  # the same recipe, the same model


def test_the_report_of_a_run(data: Path) -> None:
    run = told(data / "model", "run.json")
    assert run["steps"] == 40
    assert 40 * 200 < run["tokens"] <= 40 * 256
    assert run["parameters"] == sum(p.numel() for p in Checkpoint.load(data / "model").model.parameters())
    assert run["rolled_back"] == []
    with Path(data / "model" / "training" / "curve.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows if row["loss"]]
    assert steps == sorted(steps)
    assert steps[-1] == 40
    assert float(rows[0]["loss"]) > run["loss"] > 0
    assert run["evaluation"]["step"] == 40
    samples = [json.loads(line) for line in (data / "model" / "training" / "samples.jsonl").read_text().splitlines()]
    assert sorted({one["step"] for one in samples}) == [10, 20, 30, 40]
    assert "<svg" in (data / "model" / "training" / "curve.html").read_text()
    asked = told(data / "model", "recipe.json")
    assert (asked["steps"], asked["lr"], asked["corpus"], asked["objectives"]) == (
        40,
        3e-3,
        "corpus",
        [{"kind": "mlm", "rate": 0.3}],
    )


def test_json_output_and_flags_that_override_the_recipe(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--steps", "12", "--lr", "1e-3", "--evals", "0", "--seed", "7", "--schedule", "wsd", "--json"]
    assert pretrain(data, recipe(data), "-o", "out", *argv) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == told("out", "run.json")
    asked = told("out", "recipe.json")
    assert (asked["steps"], asked["tokens"], asked["lr"], asked["seed"], asked["schedule"]) == (
        12,
        None,
        1e-3,
        7,
        "wsd",
    )
    assert said["steps"] == 12
    assert said["evaluation"] is None
    assert {file.name for file in Path("out/training").iterdir()} == REPORT - {"samples.jsonl"}
    assert pretrain(data, recipe(data), "-o", "other", "--tokens", "1000", "--evals", "0", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 4


def test_transformers_loads_the_model(data: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    theirs = AutoModelForMaskedLM.from_pretrained(data / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    encoded = tokenizer("ba de gi [MASK].", return_tensors="pt")
    ours = Checkpoint.load(data / "model")
    assert ours.tokenizer is not None
    encoding = ours.tokenizer.encode("ba de gi [MASK].")
    assert encoding.ids.tolist() == encoded["input_ids"][0].tolist()
    with torch.no_grad():
        wanted = theirs(**encoded).logits[0]
        found = ours.model.eval()(Batch.from_encodings([encoding]), "mlm")
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


# --- continued pretraining ---


def test_continued_pretraining(data: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-m", str(data / "model"), "--corpus", "corpus", "--steps", "20", "--batch-tokens", "256", "--evals", "1"]
    assert pretrain(data, *argv, "-o", "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    before = told(data / "model", "run.json")["evaluation"]["loss"]
    assert abs(said["evaluation"]["loss"] - before) < 0.2  # not from nothing
    assert told("out", "recipe.json")["lr"] == 5e-5
    assert weights("out") != weights(data / "model")
    old, new = Checkpoint.load(data / "model"), Checkpoint.load("out")
    assert old.config == new.config
    pairs = zip(old.model.parameters(), new.model.parameters(), strict=True)
    far = max((a - b).abs().max().item() for a, b in pairs)
    assert 0 < far < 20 * 5e-5 * 1.5


def test_continued_pretraining_with_an_extended_vocabulary(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    domain = ["zarquon flibber zarquon ba de " * 3, "flibber zarquon gi ko flibber " * 3] * 6
    longer = extend(data / "model", domain, new_tokens=2, min_frequency=2)
    longer.save("longer")
    Path("in.txt").write_text("\n\n".join(f"{text} {i}" for i, text in enumerate(domain)) + "\n")
    build_corpus(["in.txt"], longer, Path("domain"), CorpusSettings(held_out=0.2))
    argv = ["-m", str(data / "model"), "--corpus", "domain", "--steps", "5", "--batch-tokens", "128"]
    assert main(["pretrain", *argv, "--tokenizer", "longer", "-o", "out", "--json"]) == 0
    capsys.readouterr()
    made = Checkpoint.load("out")
    assert made.tokenizer is not None
    old = Checkpoint.load(data / "model")
    assert made.model.config.vocab == longer.vocab_size == old.model.config.vocab + 2
    assert len(made.tokenizer.encode("zarquon", special=False).ids) == 1
    # Without it, the corpus is of a tokenizer that the model does not have.
    assert main(["pretrain", *argv, "-o", "other"]) == 1
    assert "was built with another tokenizer" in capsys.readouterr().err
    assert not Path("other").exists()


# --- interrupted runs ---


def stopped(data: Path, out: Path, *argv: str, after: int) -> None:
    """A run in a process of its own, killed as soon as it has saved a step beyond this one."""
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertie", "pretrain", "--data", str(data), "-o", str(out), *argv],
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    state = out.with_name(f"{out.name}.training") / "state.pt"
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and process.poll() is None:
            if state.exists() and torch.load(state, weights_only=True)["progress"]["step"] > after:
                break
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said


def test_a_killed_run_resumes(data: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the same model, curve and samples."""
    many = ["--steps", "150", "--save-steps", "5"]
    stopped(data, here / "out", recipe(data), *many, after=2)
    assert not Path("out").exists()
    assert pretrain(data, recipe(data), *many, "-o", "out") == 1
    assert "holds an interrupted run; pass --resume to resume it" in capsys.readouterr().err
    assert pretrain(data, recipe(data), *many, "--lr", "1e-4", "-o", "out", "--resume") == 1
    assert "holds a run with another recipe" in capsys.readouterr().err
    assert pretrain(data, recipe(data), *many, "-o", "out", "--resume") == 0
    assert not Path("out.training").exists()
    assert pretrain(data, recipe(data), *many, "-o", "whole", "--resume") == 0  # nothing was stopped: from the start
    assert weights("out") == weights("whole")
    for name in ("samples.jsonl", "recipe.json"):
        assert Path("out/training", name).read_bytes() == Path("whole/training", name).read_bytes()
    curves = []
    for name in ("out", "whole"):
        lines = Path(name, "training/curve.csv").read_text().splitlines()
        curves.append([(row["step"], row["loss"], row["lr"]) for row in csv.DictReader(lines)])
    assert curves[0] == curves[1]
    assert told("out", "run.json")["loss"] == told("whole", "run.json")["loss"]
    assert pretrain(data, recipe(data), *many, "-o", "out", "--resume") == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_existing_folders_are_kept(data: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--steps", "2", "--evals", "1"]
    assert pretrain(data, recipe(data), *quick, "-o", "out") == 0
    first = weights("out")
    capsys.readouterr()
    assert pretrain(data, recipe(data), *quick, "-o", "out") == 1
    assert capsys.readouterr().err.endswith("out holds a model already; pass --overwrite, or another name\n")
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    assert pretrain(data, recipe(data), *quick, "-o", "full", "--overwrite") == 1
    assert "is not empty and holds no model" in capsys.readouterr().err
    # One that was stopped is begun anew, and leaves nothing of its own.
    Path("out.training/report").mkdir(parents=True)
    Path("out.training/report/samples.jsonl").write_text('{"step": 1, "text": "old"}\n')
    assert pretrain(data, recipe(data), *quick, "--seed", "2", "-o", "out", "--overwrite") == 0
    assert weights("out") != first
    assert "old" not in Path("out/training/samples.jsonl").read_text()
    assert not list(here.glob("*.training")) + list(here.glob(".*"))


def test_the_second_run_to_a_folder_is_refused(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started while the first one saves its state."""
    save, flags, codes = StateFolder.save, ["--resume", "--overwrite"], []

    def save_and_start_another(*args: Any) -> None:
        save(*args)
        if flags:
            codes.append(pretrain(data, recipe(data), "-o", "out", flags.pop()))

    monkeypatch.setattr(StateFolder, "save", save_and_start_another)
    assert pretrain(data, recipe(data), "-o", "out") == 0
    assert codes == [1, 1]
    assert capsys.readouterr().err.count(f"bertie: {here / 'out'} is being written by another process\n") == 2
    assert weights("out") == weights(data / "model")
    assert [path.name for path in here.iterdir()] == ["out"]


def test_ctrl_c_saves(data: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer._step

    def interrupted(self: Trainer) -> int:
        if self.state.step == 7:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "_step", interrupted)
    assert pretrain(data, recipe(data), "-o", "out") == 130
    assert not Path("out").exists()
    assert torch.load("out.training/state.pt", weights_only=True)["progress"]["step"] == 8
    monkeypatch.undo()
    assert main(["pretrain", recipe(data), "--data", str(data), "-o", str(here / "out"), "--resume"]) == 0
    assert weights(here / "out") == weights(data / "model")


def test_killed_before_the_final_rename(data: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is written, but not renamed yet: resuming completes the report."""

    def die(*_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bertie.training.pretrain.run.publish", die)
    assert pretrain(data, recipe(data), "-o", str(here / "out")) == 130
    assert not (here / "out").exists()
    monkeypatch.undo()
    assert pretrain(data, recipe(data), "-o", str(here / "out"), "--resume") == 0
    assert weights(here / "out") == weights(data / "model")
    for name in ("samples.jsonl", "evaluations.csv"):
        assert (here / "out/training" / name).read_bytes() == (data / "model/training" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes(data: Path, here: Path, strategy: str) -> None:
    """As torchrun starts them: one model, one answer, nearly the weights of one process."""
    root = Path(__file__).parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"PYTHONPATH": str(root / "src"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"WORLD_SIZE": "2"}
    argv = ["pretrain", recipe(data), "--data", str(data), "-o", str(here / "out"), "--strategy", strategy, "--json"]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "bertie", *argv],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert json.loads(said[0][0]) == told("out", "run.json")
    assert said[1] == ("", "")
    alone = told(data / "model", "run.json")
    assert told("out", "run.json")["tokens"] == alone["tokens"]
    assert told("out", "run.json")["loss"] == pytest.approx(alone["loss"], abs=0.05)  # their dropout differs
    assert not list(here.glob("*.training"))


# --- errors ---


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        ([], 2, "pass a RECIPE, or a model to continue from (-m)"),
        (["none.toml"], 1, "there is no recipe 'none.toml', neither a file nor one that comes with Bertie"),
        (["RECIPE", "--corpus", "none"], 1, "none holds no corpus (build it: bertie corpus)"),
        (["RECIPE", "--max-length", "65"], 1, "max_length=65 must be at most 64, the model's"),
        (["RECIPE", "--tokens", "100", "--steps", "3"], 1, "[training] needs either tokens or steps"),
        (["RECIPE", "--batch-tokens", "20"], 1, "budget=20 must be at least max_length=64"),
        (["RECIPE", "--warmup", "1"], 1, "warmup=1.0 must be a number from 0 up to, but not including, 1"),
        (["RECIPE", "--mixed-precision", "fp16"], 1, "mixed_precision='fp16' is for GPUs"),
        (["RECIPE", "--save-steps", "0"], 1, "save_steps=0 must be at least 1"),
        (["RECIPE", "--tokenizer", "none"], 1, "none"),
        (["-m", "MODEL", "--steps", "2"], 1, "the recipe names no corpus; build one with bertie corpus"),
        (["-m", "nowhere", "--corpus", "corpus"], 1, "nowhere"),
    ],
)
def test_what_is_refused(
    data: Path, here: Path, capsys: pytest.CaptureFixture[str], argv: list[str], status: int, said: str
) -> None:
    named = {"RECIPE": recipe(data), "MODEL": str(data / "model")}
    argv = [*(named.get(one, one) for one in argv), "--device", "cpu"]
    assert pretrain(data, *argv, "-o", "out") == status
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert "Traceback" not in err
    assert not list(here.iterdir())


def test_event_files_stay_with_the_model(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(data)
    out = tmp_path / "out"
    assert main(["pretrain", "recipe.toml", "--steps", "10", "--evals", "1", "-o", str(out), "--tensorboard"]) == 0
    assert list((out / "training" / "tensorboard").glob("events.*"))
