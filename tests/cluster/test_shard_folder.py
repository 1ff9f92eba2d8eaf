"""The output folder of an embedding job: resuming, overwriting, locking."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bertie import cluster
from bertie.cluster.embed_job import EmbedActor
from bertie.cluster.shard_folder import MANIFEST, ShardFolder
from bertie.errors import BertieError, ExistsError, InputError
from tests.cluster.jobs import embeddings_of, mark_interrupted, read_output, sentences

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")


def file_identity(file: Path) -> tuple[int, int]:
    """What tells a file from one that took its place: the number of one that is gone may be given to the next."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def test_resume(without_ray: None, model: Path, tmp_path: Path) -> None:
    """What is there stays; what is missing or damaged is made again."""
    texts, out = sentences(5000), tmp_path / "out"
    cluster.embed(texts, out, model, rows=1024, threads=1)
    whole = embeddings_of(read_output(out))
    shards = sorted(out.glob("*.parquet"))
    before = [file_identity(shard) for shard in shards]
    shards[1].unlink()
    shards[3].write_bytes(shards[3].read_bytes()[:-100])
    (out / f"{shards[1].name}.{'0' * 32}.part").write_bytes(b"half")
    mark_interrupted(out)
    with pytest.raises(ExistsError, match="resume=True"):
        cluster.embed(texts, out, model, rows=1024, threads=1)
    done = cluster.embed(texts, out, model, rows=1024, threads=1, resume=True)
    assert (done.rows, done.shards) == (5000, 5)
    assert [file_identity(shard) == was for shard, was in zip(shards, before, strict=True)] == [1, 0, 1, 0, 1]
    np.testing.assert_array_equal(embeddings_of(read_output(out)), whole)


def test_settings_of_a_folder(without_ray: None, model: Path, tmp_path: Path) -> None:
    texts, out = sentences(20), tmp_path / "out"
    done = cluster.embed(texts, out, model, threads=1)
    assert cluster.embed(texts, out, model, threads=1, resume=True) == done
    for changed in ({"normalize": True}, {"rows": 7}, {"dimension": 3}):
        with pytest.raises(InputError, match=f"was started with {next(iter(changed))}=.*, and now "):
            cluster.embed(texts, out, model, threads=1, resume=True, **changed)
    with pytest.raises(InputError, match="was started with input="):
        cluster.embed([*texts[:-1], "a cat"], out, model, threads=1, resume=True)
    with pytest.raises(ExistsError, match="overwrite=True"):
        cluster.embed(texts, out, model, threads=1)
    assert embeddings_of(read_output(out)).shape == (20, 16)
    cluster.embed(texts[:7], out, model, threads=1, overwrite=True)
    assert embeddings_of(read_output(out)).shape == (7, 16)
    (out / MANIFEST).unlink()
    with pytest.raises(ExistsError, match="shards of an unknown run"):
        cluster.embed(texts, out, model, resume=True)
    (out / "film.part").write_text("mine")
    with pytest.raises(ExistsError, match="other files"):
        cluster.embed(texts, out, model, overwrite=True)
    assert (out / "film.part").exists()


def test_lock(without_ray: None, model: Path, tmp_path: Path) -> None:
    with ShardFolder(tmp_path / "out", resume=False, overwrite=False) as folder:
        begun = folder.path / f"00000-000000.parquet.{'0' * 32}.part"
        begun.write_bytes(b"half")
        with pytest.raises(InputError, match="another process"):
            cluster.embed(["a cat"], tmp_path / "out", model)
        assert begun.exists()
    assert not (tmp_path / "out").exists()


def test_folder_not_shared_by_the_nodes(
    without_ray: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbedActor, "_write", lambda self, shard: None)
    with pytest.raises(BertieError, match="1 shards were written, but 0 are in"):
        cluster.embed(["a cat"], tmp_path / "out", model)
