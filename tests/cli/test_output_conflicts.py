"""An output that is one of the inputs is refused before anything is opened or written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bertie.cli import main
from bertie.cli.main import build_parser
from bertie.cli.output_conflicts import FILES, MODELS


@pytest.fixture
def files(here: Path, models: dict[str, str]) -> Path:
    (here / "in.jsonl").write_text('{"text": "a cat", "query": "a", "passage": "b","text_a": "a", "text_b": "b"}\n' * 9)
    (here / "soft.jsonl").symlink_to("in.jsonl")
    os.link("in.jsonl", "hard.jsonl")
    shutil.copy("in.jsonl", "out.jsonl.part")
    shutil.copytree(models["embed"], "model")
    (here / "model" / "1_Data").mkdir()
    (here / "model" / "1_Data" / "x.txt").write_text("the cat\n")
    (here / "linked").symlink_to("model")
    return here


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


WRITES = {
    "the file itself": ["embed", "in.jsonl", "-o", "in.jsonl"],
    "another spelling": ["tag", "in.jsonl", "-o", "./model/../in.jsonl"],
    "a symbolic link": ["fill", "in.jsonl", "-o", "soft.jsonl"],
    "the target of a link": ["classify", "soft.jsonl", "-o", "in.jsonl"],
    "a hard link": ["rerank", "hard.jsonl", "-o", "in.jsonl"],
    "documents": ["rerank", "a query", "in.jsonl", "-o", "in.jsonl"],
    "a partial file": ["similarity", "out.jsonl.part", "-o", "out.jsonl"],
    "a context": ["answer", "a question", "--context", "in.jsonl", "-o", "in.jsonl"],
    "tokens": ["tokenize", "in.jsonl", "-o", "in.jsonl"],
    "pairs": ["mine", "in.jsonl", "--corpus", "soft.jsonl", "-o", "hard.jsonl"],
    "a corpus": ["mine", "pairs.jsonl", "--corpus", "in.jsonl", "-o", "in.jsonl"],
    "a report": ["compare", "model", "linked", "-o", "model"],
    "a model": ["quantize", "model", "-o", "linked"],
    "a part of a model": ["quantize", "model", "-o", "model/1_Data"],
    "a folder with the model": ["quantize", "model", "-o", "."],
    "weighted tokens": ["weight-tokens", "in.jsonl", "-m", "model", "-o", "model"],
    "texts in the output": ["weight-tokens", "model/1_Data/x.txt", "-m", "x", "-o", "model"],
    "an extended tokenizer": ["tokenizer", "extend", "model", "in.jsonl", "-o", "linked"],
    "a trained model": ["train", "classify", "in.jsonl", "-m", "model", "-o", "model"],
    "training data": ["train", "classify", "model/1_Data/x.txt", "-m", "x", "-o", "model"],
    "a pretrained model": ["pretrain", "-m", "model", "--corpus", "c", "-o", "linked"],
}


@pytest.mark.parametrize("what", WRITES)
def test_the_input_is_not_overwritten(files: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    argv = [*WRITES[what], "--overwrite"]
    before = snapshot(files)
    assert main(argv) == 2
    assert f"-o {WRITES[what][-1]}: " in capsys.readouterr().err
    assert snapshot(files) == before


@pytest.mark.parametrize(
    "source", [["corpus", "in.jsonl", "--tokenizer", "model"], ["eval", "in.jsonl", "-m", "model"]]
)
def test_a_folder_is_not_written_over_a_file(
    files: Path, capsys: pytest.CaptureFixture[str], source: list[str]
) -> None:
    before = snapshot(files)
    assert main([*source, "-o", "soft.jsonl"]) == 2
    assert "in.jsonl is the input" in capsys.readouterr().err
    assert snapshot(files) == before


@pytest.mark.parametrize(("redirect", "message"), [("<", "standard input is the input"), (">>", "both the input and")])
def test_redirections(files: Path, models: dict[str, str], redirect: str, message: str) -> None:
    source, output = ("-", "-o in.jsonl --overwrite") if redirect == "<" else ("in.jsonl", "--json")
    command = f"{sys.executable} -m bertie tokenize {source} -m {models['tokenize']} {output} {redirect} in.jsonl"
    before = snapshot(files)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr + (files / "in.jsonl").read_text()
    if redirect == "<":
        assert snapshot(files) == before


def test_a_flag_with_the_name_of_the_output(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only arguments that name files are compared."""
    for name in ("int8", "classify"):
        Path(name).mkdir()
    assert main(["quantize", "none", "-o", "int8", "--precision", "int8"]) == 1
    assert main(["train", "classify", "in.jsonl", "-m", "none", "-o", "classify"]) == 1
    assert "-o " not in capsys.readouterr().err


def test_all_arguments_with_files_are_known() -> None:
    """A new verb that writes is covered, or its arguments are added here."""
    verbs = build_parser()._subparsers._group_actions[0].choices
    known = {*FILES, *MODELS, "output", "data"}
    for name, parser in dict(verbs).items():  # type: ignore[arg-type]
        dests = {action.dest: action for action in parser._actions}
        if "output" not in dests:
            continue
        for dest, action in dests.items():
            metavar = str(action.metavar or "")
            if any(word in metavar for word in ("FILE", "DIR", "FOLDER", "MODEL")):
                assert dest in known, (name, dest)
