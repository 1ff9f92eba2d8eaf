"""Bad input of every verb: one line that says what to do, nothing on standard output, and the right exit status."""

from __future__ import annotations

import io
import json
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from bertie.cli import main
from bertie.cli.common import UsageError
from bertie.cli.main import build_parser

VERBS = ("fill", "embed", "classify", "tag", "answer", "rerank", "similarity", "tokenize")
COLUMNS = {"answer": ("question", "context"), "rerank": ("query", "passage")}
ROW = "the [MASK] sat"

# What is wrong, the arguments (the model follows), the exit status, and what the line says.
WRONG: list[tuple[str, list[str], int, str]] = [
    ("no such file", ["none.csv"], 1, "no such file: 'none.csv'"),
    ("a folder", ["folder"], 1, "is a folder"),
    ("an empty file", ["empty.txt"], 1, "is empty"),
    ("only a header", ["header.csv"], 1, "is empty"),
    ("no such column", ["other.jsonl"], 1, "has no column"),
    ("a value is missing", ["null.jsonl"], 1, "row 2: no value in column"),
    ("a value is nan", ["nan.jsonl"], 1, "row 2: no value in column"),
    ("not utf-8", ["latin.csv"], 1, "line 3 is not UTF-8"),
    ("not json", ["broken.jsonl"], 1, "line 2 is not JSON"),
    ("an unknown ending", ["good.jsonl", "-o", "out.xyz"], 1, "the suffix must be one of"),
    ("no folder for the output", ["good.jsonl", "-o", "none/out.jsonl"], 1, "there is no folder none"),
    ("the output is a folder", ["good.jsonl", "-o", "folder.jsonl"], 1, "is a folder"),
    ("the output is there", ["good.jsonl", "-o", "there.jsonl"], 1, "already exists; pass --overwrite"),
    ("resume without output", ["good.jsonl", "--resume"], 2, "pass it with -o"),
    ("a file among others", ["good.jsonl", "good.jsonl", "x"], 2, "pass one file"),
    ("an unknown flag", ["good.jsonl", "--nonsense"], 2, "--nonsense"),
    ("nothing to read", [], 2, "required"),
]


@pytest.fixture
def files(here: Path) -> Path:
    for verb in VERBS:
        folder = here / verb
        folder.mkdir()
        (folder / "folder").mkdir()
        (folder / "folder.jsonl").mkdir()
        columns = COLUMNS.get(verb, ("text",))
        good = json.dumps(dict.fromkeys(columns, ROW)) + "\n"
        (folder / "good.jsonl").write_text(good)
        (folder / "there.jsonl").write_text("kept")
        (folder / "empty.txt").write_text("")
        (folder / "header.csv").write_text(",".join(columns) + "\n")
        (folder / "other.jsonl").write_text('{"one": "x", "two": "y"}\n')
        (folder / "null.jsonl").write_text(good + json.dumps(dict.fromkeys(columns)) + "\n")
        (folder / "nan.jsonl").write_text(good + json.dumps(dict.fromkeys(columns, float("nan"))) + "\n")
        header = ",".join(columns) + "\n"
        (folder / "latin.csv").write_text(header + ",".join([ROW] * len(columns)) + "\n", "latin1")
        with open(folder / "latin.csv", "ab") as file:
            file.write(",".join(["caf\xe9"] * len(columns)).encode("latin1") + b"\n")
        (folder / "broken.jsonl").write_text(good + '{"text": ')
    return here


@pytest.mark.parametrize("verb", VERBS)
def test_bad_input(
    models: dict[str, str],
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
) -> None:
    monkeypatch.chdir(files / verb)
    before = sorted(Path().rglob("*"))
    for what, argv, status, message in WRONG:
        if verb == "rerank" and what == "a file among others":
            argv = ["query", *argv]
        assert run([verb, *argv, "-m", models[verb]]) == status, what
        out, err = capsys.readouterr()
        assert out == "", what
        assert err.startswith("bertie: "), what
        assert err.count("\n") == 1, what
        assert message in err, (what, err)
        assert run([verb, *argv, "-m", models[verb], "--json"]) == status, what
        out, err = capsys.readouterr()
        assert message in json.loads(out)["message"], what
        assert err == "", what
    assert Path("there.jsonl").read_text() == "kept"
    assert sorted(Path().rglob("*")) == before


def run(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.parametrize("verb", VERBS)
def test_no_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setattr("bertie.checkpoints.hub.built_in", list)
    more = {"answer": ["--context", "a cat"], "rerank": ["a cat"]}.get(verb, [])
    assert main([verb, ROW, *more]) == 2
    assert capsys.readouterr().err == (
        "bertie: this installation has no built-in model; pass a folder or a hub id with -m\n"
    )


@pytest.mark.parametrize(
    ("verb", "model", "message"),
    [
        ("fill", "embed", "no head 'mlm'"),
        ("classify", "embed", "no head 'classify'"),
        ("tag", "classify", "no head 'tag'"),
        ("answer", "tag", "no head 'answer'"),
        ("rerank", "embed", "no head 'classify'"),
        ("rerank", "classify", "needs a head with one score"),
    ],
)
def test_a_model_without_that_head(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, verb: str, model: str, message: str
) -> None:
    more = {"answer": ["--context", "a cat"], "rerank": ["a cat"]}.get(verb, [])
    assert main([verb, ROW, *more, "-m", models[model], "-o", "out.jsonl"]) == 1
    assert message in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (["embed", "a cat", "--prompt-name", "nonsense"], 1, "prompt_name='nonsense'"),
        (["embed", "a cat", "--dimension", "99"], 1, "dimension=99"),
        (["embed", "a cat", "--device", "nonsense"], 1, "--device nonsense"),
        (["embed", "a cat", "--format", "csv"], 2, "--format csv is for a file"),
        (["fill", "a [MASK]", "--top-k", "0"], 1, "top_k=0"),
        (["fill", "a [MASK]", "--candidates", " "], 1, "no tokens"),
        (["fill", "a cat", "--score", "--candidates", "a"], 2, "--score"),
        (["classify", "a cat", "--multi-label"], 2, "need --labels"),
        (["classify", "a cat", "--labels", "x,x"], 1, "distinct"),
        (["classify", "a cat", "--labels", "x", "--template", "none"], 1, "{}"),
        (["answer", "a cat"], 2, "pass --context"),
        (["answer", "-", "--context", "-"], 2, "standard input"),
        (["answer", "a cat", "--context", "the mat", "--top-k", "0"], 1, "top_k=0"),
        (["answer", "a cat", "--context", "none.txt"], 1, "no such file: 'none.txt'"),
        (["rerank", "a cat"], 2, "a query needs documents"),
        (["rerank", "a cat", "a", "b", "--top-k", "0"], 2, "--top-k 0"),
        (["rerank", "a cat", "a", "b", "--resume", "-o", "x.csv"], 2, "--resume is for a file of pairs"),
        (["embed", "a cat", "-o", "x.parquet.gz"], 1, "omit that suffix"),
        (["classify", "a cat", "-o", "x.npy"], 1, "the suffix must be one of"),
        (["embed", "a cat", "-m"], 2, "expected one argument"),
        (["embed", "a cat", "--over"], 2, "embed has no flag --over; did you mean --overflow?"),
    ],
)
def test_wrong_options(
    models: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    here: Path,
    argv: list[str],
    status: int,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n")))
    model = models["nli" if argv[0] == "classify" else argv[0]]
    assert run([*argv[:2], "-m", model, *argv[2:]]) == status
    out, err = capsys.readouterr()
    assert message in err, err
    assert err.count("\n") == 1
    assert out == ""
    assert list(here.iterdir()) == []


def test_a_text_that_is_no_file_name(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """Too long for a file's name, empty, or with a slash: a text."""
    for text in ("the cat " * 1000, "", "and/or"):
        assert main(["embed", text, "-m", models["embed"], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["row"] == 1


def test_rows_before_an_error_are_kept(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertie.cli.stream.CHUNK_ROWS", 4)
    Path("in.jsonl").write_text('{"text": "a cat"}\n' * 10 + '{"text": null}\n')
    argv = ["embed", "in.jsonl", "-m", models["embed"], "-o", "out.jsonl"]
    assert main(argv) == 1
    assert "row 11: no value in column 'text'" in (err := capsys.readouterr().err)
    assert "8 rows are safe in out.jsonl.part; continue with: bertie " in err
    assert main([*argv, "--resume"]) == 1
    assert "row 11" in capsys.readouterr().err
    # The same size, so that it is taken for the same file: the rest is done, and nothing twice.
    Path("in.jsonl").write_text('{"text": "a cat"}\n' * 10 + '{"text": "no"}\n')
    assert main([*argv, "--resume"]) == 0
    assert [json.loads(line)["row"] for line in Path("out.jsonl").read_text().splitlines()] == list(range(1, 12))


def test_another_run_is_not_resumed(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertie.cli.stream.CHUNK_ROWS", 4)
    Path("in.jsonl").write_text('{"text": "a cat"}\n' * 10 + '{"text": null}\n')
    argv = ["embed", "in.jsonl", "-o", "out.jsonl"]
    assert main([*argv, "-m", models["embed"]]) == 1
    capsys.readouterr()
    assert main([*argv, "-m", models["embed"], "--resume", "--pooling", "cls"]) == 1
    assert "was started with pooling=None, and now pooling='cls'" in capsys.readouterr().err
    assert main([*argv, "-m", models["fill"], "--resume"]) == 1
    assert "was started with model=" in capsys.readouterr().err
    assert main([*argv, "-m", models["embed"]]) == 1
    assert "pass --resume to resume it" in capsys.readouterr().err
    config = Path(models["embed"]) / "config.json"
    before = config.stat()
    os.utime(config, ns=(0, 0))
    assert main([*argv, "-m", models["embed"], "--resume"]) == 1
    assert "was started with model_files=" in capsys.readouterr().err
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    Path("in.jsonl").write_text('{"text": "a cat"}\n' * 20)
    assert main([*argv, "-m", models["embed"], "--resume"]) == 1
    assert "was started with input_size=" in capsys.readouterr().err
    assert main([*argv, "-m", models["embed"], "--overwrite"]) == 0
    assert len(Path("out.jsonl").read_text().splitlines()) == 20
    assert main([*argv, "-m", models["embed"], "--resume"]) == 0
    assert "nothing to resume" in capsys.readouterr().err


def test_control_c_before_the_verb_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("bertie.cli.main"), "build_parser", interrupted)
    assert main(["embed", "a"]) == 130
    assert capsys.readouterr().err == "bertie: interrupted\n"


def test_numbers_of_flags_must_be_finite() -> None:
    for argv in (["serve", "--grace", "nan"], ["answer", "who?", "--context", "x", "--no-answer-threshold", "inf"]):
        with pytest.raises(UsageError, match=f"{argv[-2]}: {argv[-1]!r} must be a finite number"):
            build_parser().parse_args(argv)
