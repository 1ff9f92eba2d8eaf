"""Every format in and out through a verb: the same results, whatever they come from and go to."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from bertie.cli import main

TEXTS = ["the cat sat", "a dog ran on the mat", "find : query", "mat"]


def inputs() -> dict[str, bytes]:
    rows = [{"id": f"n{i}", "text": text} for i, text in enumerate(TEXTS)]
    lines = "".join(text + "\n" for text in TEXTS).encode()
    jsonl = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), table)
    return {
        "in.txt": lines,
        "in.txt.gz": gzip.compress(lines),
        "in.csv": ("id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in rows)).encode(),
        "in.tsv.zst": zstandard.compress(("id\ttext\n" + "".join(f"{r['id']}\t{r['text']}\n" for r in rows)).encode()),
        "in.jsonl": jsonl,
        "in.parquet": table.getvalue(),
    }


@pytest.mark.parametrize("name", inputs())
def test_formats_in(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, name: str) -> None:
    Path(name).write_bytes(inputs()[name])
    assert main(["embed", name, "-m", models["embed"], "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main(["embed", *TEXTS, "-m", models["embed"], "--json"]) == 0
    direct = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    ids = [{} if "txt" in name else {"id": f"n{i}"} for i in range(len(TEXTS))]
    assert found == [one | named for one, named in zip(direct, ids, strict=True)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz", "out.csv", "out.tsv.zst", "out.parquet", "out.npy"])
def test_formats_out(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, name: str) -> None:
    assert main(["embed", *TEXTS, "-m", models["embed"], "-o", name]) == 0
    assert capsys.readouterr() == ("", "")
    assert [file.name for file in here.iterdir()] == [name]
    assert main(["embed", *TEXTS, "-m", models["embed"], "--json"]) == 0
    wanted = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    data = Path(name).read_bytes()
    if name.endswith(".npy"):
        assert np.array_equal(np.load(name), np.array([one["vector"] for one in wanted], np.float32))
        return
    assert read(name, data) == wanted


def read(name: str, data: bytes) -> list[dict[str, Any]]:
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    if name.endswith(".zst"):
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    if ".parquet" in name:
        found: list[dict[str, Any]] = parquet.read_table(io.BytesIO(data)).to_pylist()
        return found
    if ".jsonl" in name:
        return [json.loads(line) for line in data.decode().splitlines()]
    rows = csv.DictReader(io.StringIO(data.decode()), delimiter="," if ".csv" in name else "\t")
    return [{key: json.loads(value) for key, value in row.items()} for row in rows]


MORE = {
    "fill": ["the [MASK] sat", "a [MASK]"],
    "classify": ["the cat", "a dog"],
    "tag": ["the cat sat on the mat", ""],
    "answer": ["the cat", "a dog", "--context", "a dog sat on the mat", "--no-answer-threshold", "1"],
    "rerank": ["find a cat", "the cat", "a dog"],
    "similarity": ["the cat", "a dog"],
    "tokenize": ["the cat", "a dog sat"],
}


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out.csv"])
@pytest.mark.parametrize("verb", MORE)
def test_every_verb_writes_every_format(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, verb: str, name: str
) -> None:
    argv = [verb, *MORE[verb], "-m", models[verb]]
    assert main([*argv, "--json"]) == 0
    wanted = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main([*argv, "-o", name]) == 0
    if name == "out.csv":
        found = list(csv.DictReader(io.StringIO(Path(name).read_text())))
        assert [list(row) for row in found] == [list(one) for one in wanted]
        assert [row["tokens_total"] for row in found] == [str(one["tokens_total"]) for one in wanted]
    else:
        assert read(name, Path(name).read_bytes()) == wanted


def test_standard_input(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    argv = [sys.executable, "-m", "bertie", "tokenize", "-", "-m", models["tokenize"], "--json", "--format", "csv"]
    done = subprocess.run(argv, input=b"text\nthe cat\na dog\n", capture_output=True)
    assert [json.loads(line)["tokens_total"] for line in done.stdout.splitlines()] == [2, 2]
    assert done.stderr == b""


def test_closed_pipe(models: dict[str, str], here: Path) -> None:
    Path("in.txt").write_text("the cat\n" * 5000)
    command = f"{sys.executable} -m bertie tokenize in.txt -m {models['tokenize']} --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["row"] == 1
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


# Runs the command line again and again in children that are killed: forked, since importing torch takes seconds.
KILLED = """
import os, random, signal, sys, time
import torch, bertie.tasks
from bertie.cli import main, stream
from bertie.data import journal
stream.CHUNK_ROWS, journal.COMMIT_INTERVAL = 64, 0
torch.set_num_threads(1)
seed, kills, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
draw, count = random.Random(seed), 0
while True:
    child = os.fork()
    if not child:
        os._exit(main(argv))
    if count < kills:
        time.sleep(draw.uniform(0.02, 0.35))
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, status
        break
    count += 1
print(count)
"""


@pytest.mark.parametrize("name", ["out.npy", "out.jsonl"])
def test_killed_ten_times_and_resumed(models: dict[str, str], here: Path, name: str) -> None:
    Path("in.txt").write_text("".join(f"{'the cat sat on a mat ' * (i % 5)}dog {i}\n" for i in range(30_000)))
    argv = ["embed", "in.txt", "-m", models["embed"]]

    def run(kills: int, out: str) -> int:
        command = [sys.executable, "-c", KILLED, str(len(name)), str(kills), *argv, "-o", out, "--resume"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert run(0, f"whole.{name}") == 0
    assert run(10, name) == 10
    assert Path(name).read_bytes() == Path(f"whole.{name}").read_bytes()
    assert sorted(file.name for file in here.iterdir()) == sorted(["in.txt", name, f"whole.{name}"])


# Runs the command line slowly, so that a signal of a busy machine is not late.
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in background jobs
from bertie.cli import main
from bertie.data.journal import ResumableFile
append = ResumableFile.append
ResumableFile.append = lambda *args: (append(*args), time.sleep(1))
sys.exit(main(sys.argv[1:]))
"""


def test_control_c_keeps_committed_rows(models: dict[str, str], here: Path) -> None:
    Path("in.txt").write_text("".join(f"the cat sat {i}\n" for i in range(30_000)))
    argv = [sys.executable, "-c", SLOW, "embed", "in.txt", "-m", models["embed"], "-o", "out.jsonl"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    while not Path("out.jsonl.part.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    err = process.communicate()[1]
    assert process.returncode == 130
    assert "bertie: interrupted; " in err
    assert "rows are safe in out.jsonl.part; continue with: bertie " in err
    assert "Traceback" not in err
    assert not Path("out.jsonl").exists()
    kept = Path("out.jsonl.part").read_text().splitlines()
    assert [json.loads(line)["row"] for line in kept] == list(range(1, len(kept) + 1))
    assert len(kept) % 1024 == 0
    assert main([*argv[3:], "--resume"]) == 0
    assert main([*argv[3:-1], "whole.jsonl"]) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


def test_full_disk_keeps_committed_rows(models: dict[str, str], here: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    Path("in.txt").write_text("".join(f"the cat sat {i}\n" for i in range(6000)))
    argv = ["tokenize", "in.txt", "-m", models["tokenize"], "-o", "out.jsonl"]
    code = (
        "import resource, sys; from bertie.data import journal; from bertie.cli import main; "
        "journal.COMMIT_INTERVAL = 0; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000)); "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith("bertie: out.jsonl.part: File too large; ")
    assert "rows are safe in out.jsonl.part; continue with: bertie " in said
    assert main([*argv, "--resume"]) == 0
    assert main([*argv[:-1], "whole.jsonl"]) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()


MEMORY = """
import resource, sys
import torch, bertie.tasks
from bertie.cli import main
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_constant_memory(models: dict[str, str], here: Path) -> None:
    """Ten times the rows, the same memory."""

    def peak(rows: int, out: str) -> int:
        Path("in.txt").write_text("".join(f"the cat sat on the mat {i}\n" for i in range(rows)))
        argv = ["tokenize", "in.txt", "-m", models["tokenize"], "-o", out, "--overwrite"]
        return int(subprocess.run([sys.executable, "-c", MEMORY, *argv], capture_output=True, check=True).stdout)

    for out in ("out.jsonl", "out.parquet"):
        assert peak(200_000, out) - peak(20_000, out) < 24 << 10, out
