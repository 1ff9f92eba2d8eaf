"""Embedding jobs give what one machine gives: every row once, also when actors are killed."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie import cluster
from bertie.cli import main
from bertie.errors import BertieError, ExistsError, InputError, NotFoundError
from bertie.pipeline import pipeline
from bertie.tasks import Embedder
from tests.cluster.jobs import embeddings_of, read_output, sentences

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")


def compare_files(model: Path, tmp_path: Path) -> None:
    """Several files of several kinds, in order, bit for bit what one machine gives of each."""
    texts = sentences(2300), sentences(5, 1), sentences(1100, 2)
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"id": i, "body": text}) + "\n" for i, text in enumerate(texts[0]))
    )
    (tmp_path / "b.csv").write_text("id,body\n" + "".join(f"b{i},{text}\n" for i, text in enumerate(texts[1])))
    with gzip.open(tmp_path / "c.csv.gz", "wt") as file:
        file.write("body\n" + "".join(text + "\n" for text in texts[2]))
    files = [tmp_path / name for name in ("a.jsonl", "b.csv", "c.csv.gz")]
    done = cluster.embed(files, tmp_path / "out", model, rows=1500, threads=1, normalize=True)

    table = read_output(done.folder)
    names = sorted(file.name for file in done.folder.iterdir())
    assert names == [*(f"{i:05}-{j:06}.parquet" for i, j in ((0, 0), (0, 1), (1, 0), (2, 0))), "manifest.json"]
    assert (done.rows, done.shards) == (len(table), 4) == (3405, 4)
    assert table["file"].to_pylist() == [str(file) for file, some in zip(files, texts, strict=True) for _ in some]
    assert table["row"].to_pylist() == [n for some in texts for n in range(1, len(some) + 1)]
    assert table["id"].to_pylist() == [*map(str, range(2300)), *(f"b{i}" for i in range(5)), *[None] * 1100]
    local = Embedder.load(model, normalize=True)
    found = [list(local.embed_each(some)) for some in texts]
    np.testing.assert_array_equal(embeddings_of(table), np.stack([one.vector for some in found for one in some]))
    for name in ("tokens_total", "tokens_read", "windows"):
        assert table[name].to_pylist() == [getattr(one, name) for some in found for one in some]


def test_files(without_ray: None, model: Path, tmp_path: Path) -> None:
    compare_files(model, tmp_path)


@pytest.mark.slow
def test_files_by_ray(ray_cluster: None, model: Path, tmp_path: Path) -> None:
    compare_files(model, tmp_path)


def test_chunks_are_bounded_by_characters(
    without_ray: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards end where chunks do: long texts make both smaller, and batches are those of one machine."""
    monkeypatch.setattr(pipeline, "CHUNK_CHARACTERS", 5000)
    texts = [one for i in range(30) for one in (*sentences(3, i), "the cat sat on a mat " * 20)]
    done = cluster.embed(texts, tmp_path / "out", model, rows=1, threads=1)
    assert done.shards == 3
    np.testing.assert_array_equal(embeddings_of(read_output(done.folder)), Embedder.load(model).embed(texts))


def test_the_same_chunks_as_the_command_line() -> None:
    from bertie.cli.stream import CHUNK_CHARACTERS, CHUNK_ROWS

    assert (CHUNK_ROWS, CHUNK_CHARACTERS) == (pipeline.CHUNK_ITEMS, pipeline.CHUNK_CHARACTERS)


def test_command_line(without_ray: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in sentences(50)))
    same = [str(tmp_path / "a.txt"), "-m", str(model), "--dimension", "8"]
    out = str(tmp_path / "out")
    assert main(["embed", *same, "-o", str(tmp_path / "local.npy")]) == 0
    assert main(["embed", *same, "-o", out, "--ray", "local", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": out, "rows": 50, "shards": 1}
    np.testing.assert_array_equal(embeddings_of(read_output(Path(out))), np.load(tmp_path / "local.npy"))
    assert main(["embed", *same, "-o", out, "--ray", "local"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["embed", *same, "-o", out, "--ray", "local", "--resume", "--normalize"]) == 1
    assert "normalize" in capsys.readouterr().err
    for wrong in (["hello", "--ray", "local", "-o", out], [*same, "--ray", "local"], [*same, "--workers", "2"]):
        assert main(["embed", *wrong]) == 2


def process_tree() -> dict[int, tuple[int, str]]:
    """Parent and name of every process."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                parent = Path("/proc", name, "stat").read_text().rsplit(")", 1)[1].split()[1]
                found[int(name)] = int(parent), Path("/proc", name, "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def actor_processes() -> list[int]:
    """Our own that are at work on a shard."""
    processes = process_tree()

    def ours(process: int) -> bool:
        while process in processes and process != os.getpid():
            process = processes[process][0]
        return process == os.getpid()

    return [one for one, (_, name) in processes.items() if "MapWorker" in name and "submit" in name and ours(one)]


def kill_midway(out: Path, shards: int) -> tuple[threading.Thread, list[int]]:
    """One worker, when so many shards are there."""
    killed: list[int] = []

    def wait() -> None:
        while not killed:
            time.sleep(0.02)
            if len(list(out.glob("*.parquet"))) >= shards and (busy := actor_processes()):
                os.kill(busy[0], signal.SIGKILL)
                killed.append(busy[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, killed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_killed_actor(ray_cluster: None, model: Path, tmp_path: Path) -> None:
    texts = sentences(12_000)
    thread, killed = kill_midway(tmp_path / "out", 3)
    done = cluster.embed(texts, tmp_path / "out", model, rows=1024, threads=1)
    thread.join(5)
    assert killed
    assert (done.rows, done.shards) == (12_000, 12)
    table = read_output(done.folder)
    assert table["row"].to_pylist() == list(range(1, 12_001))
    np.testing.assert_array_equal(embeddings_of(table), Embedder.load(model).embed(texts))


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([{"text": "a"}] * 2 + [{"text": None}], {}, r"a\.jsonl, row 3: no value in column 'text'"),
        (
            [{"text": "a"}] * 2 + [{"text": "a " * 60}],
            {"overflow": "error"},
            r"a\.jsonl, row 3: the text has 62 tokens",
        ),
        ([{"text": "a", "id": 1}, {"text": "a", "id": "x"}], {}, r"a\.jsonl, row 2: id 'x' must be an integer"),
    ],
)
def test_invalid_row(
    without_ray: None, model: Path, tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], said: str
) -> None:
    good, bad = tmp_path / "0.jsonl", tmp_path / "a.jsonl"
    good.write_text('{"text": "a", "id": 1}\n')
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=said):
        cluster.embed([good, bad], tmp_path / "out", model, threads=1, **options)


def test_invalid_input(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is said before a cluster is started, and leaves no folder behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("x,y\ncat,dog\n")
    out = tmp_path / "out"
    cases: list[tuple[Any, dict[str, Any], type[BertieError], str]] = [
        ([], {}, InputError, "is empty"),
        ("a cat", {}, InputError, "put it into a list"),
        (["a.csv"], {}, InputError, r"Path\('a.csv'\)"),
        (["a cat", 7], {}, InputError, "7 is neither a text nor a Path"),
        ([Path("none.csv")], {}, NotFoundError, "no such file"),
        ([Path("a.csv")], {}, InputError, "no column 'text'.*column="),
        ([Path("/dev/null")], {"format": "text"}, InputError, "empty|no plain file"),
        (["a"], {"workers": 0}, InputError, "workers=0"),
        (["a"], {"device": "cuda:1"}, InputError, "Ray assigns GPUs"),
        (["a"], {"dimension": 99}, InputError, "dimension=99"),
        (["a"], {"prompt_name": "q"}, InputError, "prompt_name='q'"),
    ]
    for texts, options, kind, said in cases:
        with pytest.raises(kind, match=said):
            cluster.embed(texts, out, model, **options)
        assert not out.exists()
    with pytest.raises(ExistsError, match="is a file"):
        cluster.embed(["a"], tmp_path / "a.csv", model)
    with pytest.raises(InputError, match="cannot be created"):
        cluster.embed(["a"], tmp_path / "no" / "out", model)


@pytest.mark.slow
def test_a_hundred_thousand_texts(ray_cluster: None, model: Path, tmp_path: Path) -> None:
    texts = sentences(100_000)
    thread, killed = kill_midway(tmp_path / "out", 20)
    done = cluster.embed(texts, tmp_path / "out", model, rows=2048, threads=1)
    thread.join(5)
    assert killed
    table = read_output(done.folder)
    assert table["row"].to_pylist() == list(range(1, 100_001))
    np.testing.assert_array_equal(embeddings_of(table), Embedder.load(model).embed(texts))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_command_is_resumed(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    """The command, with a cluster of its own."""
    texts, out = sentences(30_000), tmp_path / "out"
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in texts))
    command = [sys.executable, "-m", "bertie", "embed", str(tmp_path / "a.txt"), "-m", str(model), "-o", str(out)]
    command += ["--ray", "local", "--threads", "1", "--resume"]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: bool(list(out.glob("*.parquet"))))
    run.send_signal(how)
    said = run.communicate(timeout=60)[1]
    if how is signal.SIGINT:
        assert run.returncode == 130
        assert "are complete in" in said
        assert "continue with: bertie embed" in said
    there = [file.stat().st_ino for file in sorted(out.glob("*.parquet"))][:1]
    subprocess.run(command, check=True)
    assert [file.stat().st_ino for file in sorted(out.glob("*.parquet"))][:1] == there
    np.testing.assert_array_equal(embeddings_of(read_output(out)), Embedder.load(model).embed(texts))


def wait_for(there: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)
