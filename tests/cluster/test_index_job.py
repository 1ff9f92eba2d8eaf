"""An index built on a cluster is the same as one built by a single process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bertie import cluster
from bertie.cli import main
from bertie.errors import InputError, NotFoundError
from bertie.search.index import Index
from tests.checkpoints.tiny_sentence import save_bert
from tests.cluster.jobs import sentences

pq = pytest.importorskip("pyarrow.parquet")
ray = pytest.importorskip("ray")


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
    monkeypatch.setattr("bertie.search.document_input.GROUP_CHARACTERS", 2000)  # several groups
    monkeypatch.chdir(folder)
    Path("files").mkdir()
    write_documents(Path("files"))
    Path("files", "note.xyz").write_text("none of ours")
    one, two = (Index.create(name, model, chunk_size=24) for name in ("one", "two"))
    skipped: list[tuple[str, str]] = []
    assert cluster.index(one, "files", threads=1, on_skip=lambda *why: skipped.append(why)) == two.refresh("files")
    assert [Path(path).name for path, _ in skipped] == ["note.xyz"]
    assert len(one) > 150
    assert contents(one) == contents(two)
    Path("files", "03.md").unlink()
    Path("files", "05.md").write_text("# a dog\n\na dog ran")
    Path("files", "99.md").write_text("# a mat\n\na mat")
    again = cluster.index(one, [Path("files")], threads=1)
    assert again == two.refresh([Path("files")])
    assert (again.added, again.changed, again.deleted) == (1, 1, 1)
    assert contents(one) == contents(two)


def test_index(without_ray: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_indexes(model, tmp_path, monkeypatch)


@pytest.mark.slow
def test_index_by_ray(ray_cluster: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare_indexes(model, tmp_path, monkeypatch)


def test_index_on_the_command_line(
    without_ray: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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


def test_index_errors(without_ray: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.search.document_input.GROUP_CHARACTERS", 1)  # a group each
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.md").write_text("a cat sat")
    (tmp_path / "files" / "b.md").write_bytes(b"a \xff dog")
    index = Index.create(tmp_path / "index", model)
    with pytest.raises(InputError, match=r"b\.md"):
        cluster.index(index, tmp_path / "files", threads=1)
    assert [name for name, _, _ in index.store.documents()] == ["a.md"]  # what came before it
    with pytest.raises(NotFoundError):
        cluster.index(index, tmp_path / "none")
    with pytest.raises(InputError, match="on_error"):
        cluster.index(index, tmp_path / "files", on_error="stop")  # type: ignore[arg-type]
    other = tmp_path / "other"
    save_bert(other, limit=30)
    (tmp_path / "files" / "c.md").write_text("a dog ran")
    index.close()
    with Index.open(tmp_path / "index") as index:
        index.config["model"] = str(other)  # type: ignore[index]
        with pytest.raises(InputError, match="another model"):
            cluster.index(index, tmp_path / "files", threads=1, on_error="skip")
