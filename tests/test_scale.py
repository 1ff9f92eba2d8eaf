"""Ray jobs give what one machine gives: every row once, also when workers are killed and runs are stopped."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import scale as tables
from bertie import cluster as scale
from bertie.cli import main
from bertie.cluster import connection, ray_job
from bertie.cluster.connection import RayResources
from bertie.cluster.embed_job import EmbedActor
from bertie.cluster.shard_folder import MANIFEST, ShardFolder
from bertie.cluster.text_shards import read_shards
from bertie.errors import BertieError, ExistsError, InputError, MissingPackageError, NotFoundError
from bertie.search.index import Index
from bertie.tasks import Embedder, base
from tests import test_docs
from tests.checkpoints.tiny_sentence import WORDS, save_bert
from tests.test_readme import blocks, has_built_in, run

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")

KNOWN = [word for word in WORDS if word[0] != "["]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(KNOWN, k=draw.randrange(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_bert(folder)
    return folder


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    """One for all tests: it takes seconds to start."""
    ray.init("local", num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Nodes:
    """Of Ray, what a cluster has."""

    def __init__(self, *resources: dict[str, float]) -> None:
        self._resources = resources

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 99.0, "GPU": 99.0}}
        return [dead, *({"Alive": True, "Resources": one} for one in self._resources)]


class Attempts:
    """The attempt counter and its remote handle in one."""

    before = 0

    def __init__(self) -> None:
        self.begin = self
        self._attempts = ray_job.AttemptCounter()

    def remote(self, name: str) -> int:
        return self._attempts.begin(name) + self.before


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same readers and workers without Ray: for what does not depend on it."""

    def run_here(
        _: Any, sources: Any, read: Any, actor: Any, config: Any, actors: int, ordered: bool = False
    ) -> Iterator[Any]:
        made = actor(config, Attempts())
        for source in sources:
            for row in ray_job.read_task({"cell": pickle.dumps(source)}, read, config):
                one = pickle.loads(made(row)["cell"])
                if isinstance(one, BertieError):
                    raise one
                yield one

    monkeypatch.setattr(connection, "connect", lambda address: nullcontext(Nodes({"CPU": 1.0})))
    monkeypatch.setattr(ray_job, "run_job", run_here)
    monkeypatch.setattr(ray, "get", lambda one: one)


def read(folder: Path) -> Any:
    """All shards, in the order of their names."""
    import pyarrow as pa

    assert not list(folder.glob("*.part"))
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))])


def vectors(table: Any) -> np.ndarray:
    flat: np.ndarray = table["vector"].combine_chunks().flatten().to_numpy()
    return flat.reshape(len(table), -1)


def stop(folder: Path) -> None:
    """As if it had been stopped before its end."""
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"rows": None, "shards": None}))


# --- the same as elsewhere ---


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
    done = scale.embed(files, tmp_path / "out", model, rows=1500, threads=1, normalize=True)

    table = read(done.folder)
    names = sorted(file.name for file in done.folder.iterdir())
    assert names == [*(f"{i:05}-{j:06}.parquet" for i, j in ((0, 0), (0, 1), (1, 0), (2, 0))), "manifest.json"]
    assert (done.rows, done.shards) == (len(table), 4) == (3405, 4)
    assert table["file"].to_pylist() == [str(file) for file, some in zip(files, texts, strict=True) for _ in some]
    assert table["row"].to_pylist() == [n for some in texts for n in range(1, len(some) + 1)]
    assert table["id"].to_pylist() == [*map(str, range(2300)), *(f"b{i}" for i in range(5)), *[None] * 1100]
    local = Embedder.load(model, normalize=True)
    found = [list(local.embed_each(some)) for some in texts]
    np.testing.assert_array_equal(vectors(table), np.stack([one.vector for some in found for one in some]))
    for name in ("tokens_total", "tokens_read", "windows"):
        assert table[name].to_pylist() == [getattr(one, name) for some in found for one in some]


def test_files(alone: None, model: Path, tmp_path: Path) -> None:
    compare_files(model, tmp_path)


@pytest.mark.slow
def test_files_by_ray(started: None, model: Path, tmp_path: Path) -> None:
    compare_files(model, tmp_path)


def test_chunks_end_by_characters_too(
    alone: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards end where chunks do: long texts make both smaller, and batches are those of one machine."""
    monkeypatch.setattr(base, "CHARACTERS_AT_ONCE", 5000)
    texts = [one for i in range(30) for one in (*sentences(3, i), "the cat sat on a mat " * 20)]
    done = scale.embed(texts, tmp_path / "out", model, rows=1, threads=1)
    assert done.shards == 3
    np.testing.assert_array_equal(vectors(read(done.folder)), Embedder.load(model).embed(texts))


def test_the_same_chunks_as_the_command_line() -> None:
    from bertie.cli.stream import CHARACTERS_A_CHUNK, CHUNK_ROWS

    assert (CHUNK_ROWS, CHARACTERS_A_CHUNK) == (base.ITEMS_AT_ONCE, base.CHARACTERS_AT_ONCE)


def test_command_line(alone: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in sentences(50)))
    same = [str(tmp_path / "a.txt"), "-m", str(model), "--dimension", "8"]
    out = str(tmp_path / "out")
    assert main(["embed", *same, "-o", str(tmp_path / "local.npy")]) == 0
    assert main(["embed", *same, "-o", out, "--ray", "local", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": out, "rows": 50, "shards": 1}
    np.testing.assert_array_equal(vectors(read(Path(out))), np.load(tmp_path / "local.npy"))
    assert main(["embed", *same, "-o", out, "--ray", "local"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["embed", *same, "-o", out, "--ray", "local", "--resume", "--normalize"]) == 1
    assert "normalize" in capsys.readouterr().err
    for wrong in (["hello", "--ray", "local", "-o", out], [*same, "--ray", "local"], [*same, "--workers", "2"]):
        assert main(["embed", *wrong]) == 2


# --- an index ---


def write_documents(folder: Path) -> None:
    for i in range(40):
        (folder / f"{i:02}.md").write_text(f"# the cat {i}\n\n" + ". ".join(sentences(10, i)))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(60, 99)))


def contents(index: Index) -> tuple[Any, ...]:
    """All that a store has, in its order."""
    keys = [key for key, _ in index.store.passage_texts()]
    near = index.store.search(index.embed(["the cat sat"]), len(keys))[0]
    return sorted(index.store.documents()), index.store.fetch(keys), near[0].tolist(), near[1].tolist()


def compare_indexes(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files to an index, and again after changes: by Ray and by one process."""
    monkeypatch.setattr("bertie.search.index.GROUP_CHARACTERS", 2000)  # several groups
    monkeypatch.chdir(folder)
    Path("files").mkdir()
    write_documents(Path("files"))
    Path("files", "note.xyz").write_text("none of ours")
    one, two = (Index.create(name, model, chunk_size=24) for name in ("one", "two"))
    skipped: list[tuple[str, str]] = []
    assert scale.index(one, "files", threads=1, on_skip=lambda *why: skipped.append(why)) == two.refresh("files")
    assert [Path(path).name for path, _ in skipped] == ["note.xyz"]
    assert len(one) > 150
    assert contents(one) == contents(two)
    Path("files", "03.md").unlink()
    Path("files", "05.md").write_text("# a dog\n\na dog ran")
    Path("files", "99.md").write_text("# a mat\n\na mat")
    again = scale.index(one, [Path("files")], threads=1)
    assert again == two.refresh([Path("files")])
    assert (again.added, again.changed, again.deleted) == (1, 1, 1)
    assert contents(one) == contents(two)


def test_index(alone: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_indexes(model, tmp_path, monkeypatch)


@pytest.mark.slow
def test_index_by_ray(started: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_indexes(model, tmp_path, monkeypatch)


def test_index_on_the_command_line(
    alone: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("files").mkdir()
    write_documents(Path("files"))
    same = ["index", "files", "-m", str(model), "--chunk-size", "24", "--json", "--output"]
    assert main([*same, "one"]) == 0
    assert main([*same, "two", "--ray", "local", "--threads", "1"]) == 0
    one, two = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert one | {"index": "two"} == two
    with Index.open("one") as first, Index.open("two") as second:
        assert contents(first) == contents(second)
    assert main([*same, "three", "--threads", "1"]) == 2


def test_what_is_wrong_with_an_index(alone: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.search.index.GROUP_CHARACTERS", 1)  # a group each
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.md").write_text("a cat sat")
    (tmp_path / "files" / "b.md").write_bytes(b"a \xff dog")
    index = Index.create(tmp_path / "index", model)
    with pytest.raises(InputError, match=r"b\.md"):
        scale.index(index, tmp_path / "files", threads=1)
    assert [name for name, _, _ in index.store.documents()] == ["a.md"]  # what came before it
    with pytest.raises(NotFoundError):
        scale.index(index, tmp_path / "none")
    with pytest.raises(InputError, match="on_error"):
        scale.index(index, tmp_path / "files", on_error="stop")  # type: ignore[arg-type]
    other = tmp_path / "other"
    save_bert(other, limit=30)
    (tmp_path / "files" / "c.md").write_text("a dog ran")
    index.close()
    with Index.open(tmp_path / "index") as index:
        index.config["model"] = str(other)  # type: ignore[index]
        with pytest.raises(InputError, match="another model"):
            scale.index(index, tmp_path / "files", threads=1, on_error="skip")


# --- what goes wrong on the way ---


def family() -> dict[int, tuple[int, str]]:
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


def workers() -> list[int]:
    """Our own that are at work on a shard."""
    processes = family()

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
            if len(list(out.glob("*.parquet"))) >= shards and (busy := workers()):
                os.kill(busy[0], signal.SIGKILL)
                killed.append(busy[0])

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, killed


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the workers in /proc")
def test_a_killed_worker(started: None, model: Path, tmp_path: Path) -> None:
    texts = sentences(12_000)
    thread, killed = kill_midway(tmp_path / "out", 3)
    done = scale.embed(texts, tmp_path / "out", model, rows=1024, threads=1)
    thread.join(5)
    assert killed
    assert (done.rows, done.shards) == (12_000, 12)
    table = read(done.folder)
    assert table["row"].to_pylist() == list(range(1, 12_001))
    np.testing.assert_array_equal(vectors(table), Embedder.load(model).embed(texts))


def test_a_shard_that_kills_every_worker(
    alone: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after some, and says which it is."""
    monkeypatch.setattr(Attempts, "before", ray_job.MAX_RETRIES)
    scale.embed(sentences(20), tmp_path / "out", model, threads=1)
    monkeypatch.setattr(Attempts, "before", ray_job.MAX_RETRIES + 1)
    with pytest.raises(BertieError, match=r"texts\.jsonl, rows 1 to 20: 4 actors died"):
        scale.embed(sentences(20), tmp_path / "out", model, threads=1, overwrite=True)


def which(file: Path) -> tuple[int, int]:
    """What tells a file from one that took its place: the number of one that is gone may be given to the next."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def test_resume(alone: None, model: Path, tmp_path: Path) -> None:
    """What is there stays; what is missing or damaged is made again."""
    texts, out = sentences(5000), tmp_path / "out"
    scale.embed(texts, out, model, rows=1024, threads=1)
    whole = vectors(read(out))
    shards = sorted(out.glob("*.parquet"))
    before = [which(shard) for shard in shards]
    shards[1].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-100])
    (out / f"{shards[1].name}.{'0' * 32}.part").write_bytes(b"half")
    stop(out)
    with pytest.raises(ExistsError, match="resume=True"):
        scale.embed(texts, out, model, rows=1024, threads=1)
    done = scale.embed(texts, out, model, rows=1024, threads=1, resume=True)
    assert (done.rows, done.shards) == (5000, 5)
    assert [which(shard) == was for shard, was in zip(shards, before, strict=True)] == [1, 0, 1, 0, 1]
    np.testing.assert_array_equal(vectors(read(out)), whole)


def test_the_folder_keeps_to_what_was_asked(alone: None, model: Path, tmp_path: Path) -> None:
    texts, out = sentences(20), tmp_path / "out"
    done = scale.embed(texts, out, model, threads=1)
    assert scale.embed(texts, out, model, threads=1, resume=True) == done
    for changed in ({"normalize": True}, {"rows": 7}, {"dimension": 3}):
        with pytest.raises(InputError, match=f"was started with {next(iter(changed))}=.*, and now "):
            scale.embed(texts, out, model, threads=1, resume=True, **changed)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="was started with input="):
        scale.embed([*texts[:-1], "a cat"], out, model, threads=1, resume=True)
    with pytest.raises(ExistsError, match="overwrite=True"):
        scale.embed(texts, out, model, threads=1)
    assert vectors(read(out)).shape == (20, 16)
    scale.embed(texts[:7], out, model, threads=1, overwrite=True)
    assert vectors(read(out)).shape == (7, 16)
    (out / MANIFEST).unlink()
    with pytest.raises(ExistsError, match="shards of an unknown run"):
        scale.embed(texts, out, model, resume=True)
    (out / "film.part").write_text("mine")
    with pytest.raises(ExistsError, match="other files"):
        scale.embed(texts, out, model, overwrite=True)
    assert (out / "film.part").exists()


def test_one_process_at_a_time(alone: None, model: Path, tmp_path: Path) -> None:
    with ShardFolder(tmp_path / "out", resume=False, overwrite=False) as folder:
        begun = folder.path / f"00000-000000.parquet.{'0' * 32}.part"
        begun.write_bytes(b"half")
        with pytest.raises(InputError, match="another process"):
            scale.embed(["a cat"], tmp_path / "out", model)
        assert begun.exists()
    assert not (tmp_path / "out").exists()


def test_a_folder_that_the_workers_do_not_see(
    alone: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbedActor, "_write", lambda self, shard: None)
    with pytest.raises(BertieError, match="1 shards were written, but 0 are in"):
        scale.embed(["a cat"], tmp_path / "out", model)


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
def test_a_bad_row(
    alone: None, model: Path, tmp_path: Path, rows: list[dict[str, Any]], options: dict[str, Any], said: str
) -> None:
    good, bad = tmp_path / "0.jsonl", tmp_path / "a.jsonl"
    good.write_text('{"text": "a", "id": 1}\n')
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=said):
        scale.embed([good, bad], tmp_path / "out", model, threads=1, **options)


def test_wrong_input(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is said before a cluster is started, and leaves no folder behind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("x,y\ncat,dog\n")
    out = tmp_path / "out"
    cases: list[tuple[Any, dict[str, Any], type[BertieError], str]] = [
        ([], {}, InputError, "is empty"),
        ("a cat", {}, InputError, "put it into a list"),
        (["a.csv"], {}, InputError, r"Path\('a.csv'\)"),
        (["a cat", 7], {}, InputError, "7 is neither a text nor a Path"),
        ([Path("none.csv")], {}, NotFoundError, "no file"),
        ([Path("a.csv")], {}, InputError, "no column 'text'.*column="),
        ([Path("/dev/null")], {"format": "text"}, InputError, "empty|no plain file"),
        (["a"], {"workers": 0}, InputError, "workers=0"),
        (["a"], {"device": "cuda:1"}, InputError, "Ray assigns GPUs"),
        (["a"], {"dimension": 99}, InputError, "dimension=99"),
        (["a"], {"prompt": "q"}, InputError, "prompt='q'"),
    ]
    for texts, options, kind, said in cases:
        with pytest.raises(kind, match=said):
            scale.embed(texts, out, model, **options)
        assert not out.exists()
    with pytest.raises(ExistsError, match="is a file"):
        scale.embed(["a"], tmp_path / "a.csv", model)
    with pytest.raises(InputError, match="cannot be made"):
        scale.embed(["a"], tmp_path / "no" / "out", model)


# --- the cluster ---


def test_no_ray(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"bertie\[ray\]"):
        scale.embed(["a"], tmp_path / "out", model)


def test_no_cluster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at the port; or someone who is not Ray, and says nothing."""
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", 3.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        with pytest.raises(NotFoundError, match=r"no Ray cluster answers at '127.*refused"):
            connection.check_reachable(f"127.0.0.1:{port}")
        other.listen()
        with pytest.raises(NotFoundError, match="no answer in 3 s"):
            connection.check_reachable(f"127.0.0.1:{port}")
    for address in ("nonsense", "host:port", ":1", "host:"):
        with pytest.raises(InputError, match="must be local, auto or host:port"):
            connection.check_reachable(address)
    with pytest.raises(InputError, match="does not run through the Ray client"):
        connection.check_reachable("ray://127.0.0.1:10001")


def test_one_worker_a_device() -> None:
    small, large, gpus = {"CPU": 2.0}, {"CPU": 9.0}, {"CPU": 16.0, "GPU": 8.0}
    for nodes, asked, wanted in (
        ((small,), (None, None, None), (1, 2)),
        ((large,), (None, None, None), (2, 4)),
        ((large,), (None, None, 3), (3, 3)),
        ((small, large), (None, 2, 1), (2, 1)),
        ((gpus, gpus, small), (None, None, None), (16, None)),
        ((gpus,), ("cuda", 3, None), (3, None)),
        ((gpus,), ("cpu", None, 4), (4, 4)),
        ((gpus,), (None, 100, None), (8, None)),
    ):
        assert RayResources(device=asked[0], workers=asked[1], threads=asked[2]).allocate(Nodes(*nodes)) == wanted  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no node of the cluster has a GPU"):
        RayResources(device="cuda").allocate(Nodes(large))
    with pytest.raises(InputError, match="threads=10"):
        RayResources(threads=10).allocate(Nodes(large))


def test_another_version_on_the_cluster() -> None:
    plan = ray_job.JobConfig(version="0.0.0", model="", options={}, threads=1)
    (row,) = ray_job.read_task({"cell": b""}, read_shards, plan)
    assert "install the same" in str(pickle.loads(row["cell"]))


# --- the page ---

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"


def test_the_tables_are_computed() -> None:
    page = PAGE.read_text("utf-8")
    assert page == tables.fill_tables(page), "python -m benchmarks.scale --write docs/scale.md"
    assert page != tables.fill_tables(page, 10**6)
    assert tables.duration(tables.BILLION / 4286 / 3600) == "64.8 h"
    for one in tables.RATES:
        assert one.file is None or f"{one.rate:,}" in (ROOT / one.file).read_text("utf-8")


def test_the_commands_can_be() -> None:
    found = test_docs.commands(PAGE.read_text("utf-8"))
    assert found
    for words in found:
        test_docs.check(words)


@has_built_in
def test_the_python_runs(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    for block in blocks(PAGE.read_text("utf-8")):
        run(block, scope, capsys)


# --- whole runs ---


@pytest.mark.slow
def test_a_hundred_thousand_texts(started: None, model: Path, tmp_path: Path) -> None:
    texts = sentences(100_000)
    thread, killed = kill_midway(tmp_path / "out", 20)
    done = scale.embed(texts, tmp_path / "out", model, rows=2048, threads=1)
    thread.join(5)
    assert killed
    table = read(done.folder)
    assert table["row"].to_pylist() == list(range(1, 100_001))
    np.testing.assert_array_equal(vectors(table), Embedder.load(model).embed(texts))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_gone_on_with(model: Path, tmp_path: Path, how: signal.Signals) -> None:
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
        assert "--resume continues" in said
    there = [file.stat().st_ino for file in sorted(out.glob("*.parquet"))][:1]
    subprocess.run(command, check=True)
    assert [file.stat().st_ino for file in sorted(out.glob("*.parquet"))][:1] == there
    np.testing.assert_array_equal(vectors(read(out)), Embedder.load(model).embed(texts))


def wait_for(there: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)
