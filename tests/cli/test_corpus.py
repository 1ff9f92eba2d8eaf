"""`bertie corpus`: every flag, what it says, and a kill that changes nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bertie.cli import main
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.corpus import Corpus


@pytest.fixture
def source(here: Path) -> str:
    words = "a the cat dog sat ran on mat".split()
    documents = ["\n".join([f"cat {i}", " ".join(words[(i * j + j * j) % 8] for j in range(5 + i))]) for i in range(60)]
    (here / "text.txt").write_text("\n\n".join([*documents, documents[3].upper(), "mat"]) + "\n")
    return "text.txt"


def run(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def files(folder: Path) -> dict[str, bytes]:
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def test_a_corpus(models: dict[str, str], here: Path, source: str, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "titles.txt").write_text("Cat 7\nno such\n")
    flags = ["--min-words", "2", "--exclude", "titles.txt", "--held-out", "0.2", "--shard-tokens", "300"]
    argv = ["corpus", source, "--tokenizer", models["embed"], *flags]
    assert main([*argv, "-o", "out", "--json"]) == 0
    made: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert made == json.loads((here / "out/corpus.json").read_text())
    result = Corpus.open("out", Tokenizer.from_folder(models["embed"]))
    counts = made["counts"]
    assert (counts["read"], counts["short"], counts["exact_duplicates"], counts["excluded"]) == (62, 1, 1, 1)
    assert counts["kept"] + counts["held_out"] == 59
    assert len(result) == counts["kept"]
    assert len(Corpus.open("out/heldout")) == counts["held_out"] > 0
    assert main([*argv, "-o", "again"]) == 0
    output = capsys.readouterr().out
    assert f"{counts['kept']} kept: {made['tokens']:,} tokens" in output
    assert "1 excluded by 2 titles" in output
    assert "exact: 'CAT 3' (text.txt, line 181), similarity 100% to document 4" in output
    assert files(here / "again") == files(here / "out")


def test_clean(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.jsonl").write_text(json.dumps({"body": "cat\n* * *\nmat", "n": 1}) + "\n")
    for clean, lines in (("none", 3), ("letters", 2), ("spaces,letters", 2)):
        out = ["-o", clean, "--json"]
        assert main(["corpus", "a.jsonl", "--tokenizer", models["embed"], "--clean", clean, *out]) == 0
        assert json.loads(capsys.readouterr().out)["lines"] == lines


@pytest.mark.parametrize(
    ("flags", "status", "output"),
    [
        (["--clean", "html"], 1, "clean=['html'] must be among nfc, controls, spaces, letters"),
        (["--held-out", "1.5"], 1, "held_out=1.5"),
        (["--dedup", "fuzzy"], 2, "--dedup"),
        (["--dedup-memory", "0"], 2, "--dedup-memory"),
        (["--dedup-memory", "1e-7"], 1, "allow more memory"),
        (["--exclude", "none.txt"], 1, "none.txt"),
        (["--tokenizer", "nowhere"], 1, "nowhere"),
        (["--column", "text", "no.txt"], 1, "there is no file or folder no.txt"),
    ],
)
def test_wrong_use(
    models: dict[str, str], source: str, capsys: pytest.CaptureFixture[str], flags: list[str], status: int, output: str
) -> None:
    assert run(["corpus", source, "--tokenizer", models["embed"], "-o", "out", *flags]) == status
    error = capsys.readouterr().err
    assert output in error
    assert error.startswith("bertie: ")
    assert error.count("\n") == 1


def test_there_already(models: dict[str, str], source: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["corpus", source, "--tokenizer", models["embed"], "-o", "out"]
    assert main(argv) == 0
    capsys.readouterr()
    assert main(argv) == 1
    assert "out holds a corpus already" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err


SLOWLY = """
import sys, time
from importlib import import_module
from bertie.cli import corpus as verb
from bertie.training.pretrain.corpus import writing
module = import_module("bertie.cli.main")
module.VERBS = (verb,)
honest = writing.atomic_write
def slowly(path, content):
    honest(path, content)
    time.sleep(0.05)
writing.atomic_write = slowly
sys.exit(module.main(sys.argv[1:]))
"""


def test_killed_and_gone_on_with(models: dict[str, str], here: Path, source: str) -> None:
    argv = ["corpus", source, "--tokenizer", models["embed"], "--shard-tokens", "200", "--held-out", "0.1"]
    assert main([*argv, "-o", "whole"]) == 0
    assert len(list((here / "whole").glob("*.bin"))) > 5
    work = subprocess.Popen([sys.executable, "-c", SLOWLY, *argv, "-o", "out"], stderr=subprocess.DEVNULL)
    while not (here / "out/shard-00001.bin").exists() and work.poll() is None:
        time.sleep(0.01)
    os.kill(work.pid, signal.SIGKILL)
    assert work.wait() == -signal.SIGKILL
    assert not (here / "out/corpus.json").exists()
    assert main([*argv, "-o", "out", "--resume"]) == 0
    assert files(here / "out") == files(here / "whole")


def test_symbolic_links(source: str, models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "in").mkdir()
    (here / "in/a.txt").write_text("a cat\n")
    (here / "in/text.txt").symlink_to(here / source)
    argv = ["corpus", "in", "--tokenizer", models["embed"], "--json"]
    assert run([*argv, "-o", "without"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["counts"]["read"] == 1
    assert "skipped in/text.txt: it is a symbolic link" in printed.err
    assert run([*argv, "-o", "with", "--follow-symlinks"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["read"] > 1


def test_killed_before_the_journal_was_complete(models: dict[str, str], here: Path, source: str) -> None:
    (here / "out").mkdir()
    (here / "out/.build.json.draft").write_text("{")
    assert main(["corpus", source, "--tokenizer", models["embed"], "-o", "out", "--resume"]) == 0
    assert main(["corpus", source, "--tokenizer", models["embed"], "-o", "whole"]) == 0
    assert files(here / "out") == files(here / "whole")
