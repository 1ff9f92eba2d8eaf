"""`bertie index` and `bertie search` on a tiny model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import bertie
from bertie.cli import main
from bertie.cli.search import format_results, parse_condition
from bertie.search.filters import matches_filters
from bertie.search.index import Index, SearchHit, SearchResults

pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def docs(here: Path) -> Path:
    folder = here / "docs"
    folder.mkdir()
    (folder / "cats.md").write_text("# Cats\n\nthe cat sat on the mat.\n\nA cat ran.")
    (folder / "dogs.txt").write_text("The dogs ran.")
    (folder / "rows.csv").write_text("id,text,year\nx,a mat on a mat,1999\ny,find the dog,2005\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def said(capsys: Capture, *argv: str) -> Any:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prompts(docs: Path, models: dict[str, str], capsys: Capture) -> None:
    """Those of `bertie index` are kept; that of `bertie search` replaces the one for queries."""
    said(capsys, "index", "docs", "-o", "ix", "-m", models["embed"], "--prompt", "the ", "--query-prompt", "find ")
    with Index.open("ix") as index:
        assert (index.config["passage_prompt"], index.config["query_prompt"]) == ("the ", "find ")
        ours = [index.search("dog", 2, mode="dense", prompt=prompt) for prompt in (None, "a ")]
    for flags, results in zip(([], ["--prompt", "a "]), ours, strict=True):
        found = said(capsys, "search", "ix", "dog", "-k", "2", "--mode", "dense", *flags)
        assert [hit["score"] for hit in found["hits"]] == pytest.approx([hit.score for hit in results])
    assert ours[0][0].score != ours[1][0].score
    assert said(capsys, "index", "docs", "-o", "ix", "--refresh", "--prompt", "the ")["unchanged"] == 4
    for argv, message in (
        (["index", "docs", "-o", "ix", "--refresh", "--prompt", "a "], "'a ': ix was built with 'the ', which cannot"),
        (["search", "ix", "dog", "--mode", "lexical", "--prompt", "a "], "--mode lexical has none"),
        (["search", "ix", "dog", "--prompt-name", "nonsense"], "prompt_name='nonsense'"),
    ):
        assert main(argv) != 0
        assert message in capsys.readouterr().err


def test_index_and_search(docs: Path, models: dict[str, str], capsys: Capture) -> None:
    found = said(capsys, "index", "docs", "--output", "ix", "-m", models["embed"])
    counts = {"added": 4, "changed": 0, "unchanged": 0, "deleted": 0, "passages": 4, "total": 4, "skipped": 1}
    assert found == {"index": "ix", **counts}
    assert said(capsys, "index", "docs", "--output", "ix", "--refresh")["unchanged"] == 4
    (docs / "dogs.txt").write_text("The dogs sat.")
    assert main(["index", "docs", "--output", "ix", "--refresh"]) == 0
    printed = capsys.readouterr()
    assert "0 documents added, 1 changed, 0 deleted, 3 unchanged; 1 passages embedded, 4 in total" in printed.out
    assert "1 files of other types: .png" in printed.err
    found = said(capsys, "search", "ix", "where is the dog?", "-k", "2")
    ours = bertie.Index.open("ix").search("where is the dog?", 2)
    assert [hit["document"] for hit in found["hits"]] == [hit.document for hit in ours]
    assert [hit["score"] for hit in found["hits"]] == pytest.approx([hit.score for hit in ours])
    assert set(found["timings"]) == set(ours.timings)
    assert found["hits"][0]["text"] == ours[0].text


def test_ask(here: Path, capsys: Capture) -> None:
    (here / "novels.md").write_text("# Novels\n\nEmma is a novel by Jane Austen.")
    said(capsys, "index", "novels.md", "-o", "ix")
    record = said(capsys, "ask", "ix", "Who wrote Emma?")
    (answer,) = record["answers"]
    assert (answer["text"], answer["start"], answer["end"]) == ("Jane Austen", 29, 40)
    assert (answer["source"], answer["passage"]["headings"]) == (str(here / "novels.md"), ["Novels"])
    assert main(["ask", "ix", "Who wrote Emma?", "--rerank"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Jane Austen  (p = ")
    assert "novels.md:29-40 › Novels" in printed
    assert main(["ask", "ix", "Who wrote Emma?", "--no-answer-threshold", "0"]) == 0
    assert capsys.readouterr().out.startswith("no answer (p = ")
    assert main(["ask", "ix", "Who?", "--no-answer-threshold", "2"]) == 2
    assert main(["ask", "ix", "Who?", "--passages", "0"]) == 2


def test_lexical_search_with_filters(docs: Path, models: dict[str, str], capsys: Capture) -> None:
    said(capsys, "index", "docs", "--output", "ix", "-m", models["embed"])
    for where, documents in (
        ("year=1999", ["rows.csv#x"]),
        ("year != 1999", ["cats.md"]),
        ("path=cats.md", ["cats.md"]),
    ):
        found = said(capsys, "search", "ix", "mats", "--mode", "lexical", "--where", where)
        assert [hit["document"] for hit in found["hits"]] == documents
    assert main(["search", "ix", "mats", "--mode", "lexical", "--where", "yaer=1999"]) == 0
    assert "--where 'yaer': the best passages have no such metadata, only " in capsys.readouterr().err
    assert main(["search", "ix", "mats", "--mode", "lexical"]) == 0
    out = capsys.readouterr().out
    assert "1. rows.csv#x:0-14\n   lexical " in out
    assert "\x1b" not in out
    assert "2 of 4 passages  load " in out


def test_search_reranks(docs: Path, models: dict[str, str], capsys: Capture) -> None:
    said(capsys, "index", "docs", "--output", "ix", "-m", models["embed"])
    found = said(capsys, "search", "ix", "the cat", "--reranker", models["rerank"], "-k", "2", "--depth", "3")
    ours = Index.open("ix").search("the cat", 2, rerank=bertie.Reranker.load(models["rerank"]), depth=3)
    assert [hit["document"] for hit in found["hits"]] == [hit.document for hit in ours]
    assert found["hits"][0]["scores"]["rerank"] == pytest.approx(ours[0].score)


def test_built_in_model(docs: Path, small: str, capsys: Capture) -> None:
    said(capsys, "index", "docs", "--output", "ix")
    assert Index.open("ix").config["model"] == small
    assert len(said(capsys, "search", "ix", "the cat", "--rerank", "-k", "1")["hits"]) == 1


def test_errors(docs: Path, models: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(status: int, *argv: str) -> str:
        assert main(list(argv)) == status
        return capsys.readouterr().err

    model = ["-m", models["embed"]]
    assert "pass the files" in fails(2, "index", "--output", "ix")
    assert "no such file or folder" in fails(1, "index", "nowhere", "--output", "ix", *model)
    assert not Path("ix").exists()
    assert main(["index", "docs", "--output", "ix", *model]) == 0
    assert "pass --refresh" in fails(1, "index", "docs", "--output", "ix", *model)
    assert "another model" in fails(1, "search", "ix", "a", "-m", models["fill"])
    assert "another model" in fails(1, "index", "docs", "--output", "ix", "--refresh", "-m", models["fill"])
    assert "--chunk-size 99: ix was built with 40" in fails(
        2, "index", "docs", "--output", "ix", "--refresh", "--chunk-size", "99"
    )
    assert (
        main(["index", "docs", "--output", "ix", "--refresh", "--chunk-size", "40", "--embedding-precision", "fp32"])
        == 0
    )
    assert "-k 0" in fails(2, "search", "ix", "a", "-k", "0")
    assert "NAME=VALUE" in fails(2, "search", "ix", "a", "--where", "year")
    assert "contains no index" in fails(1, "search", "docs", "a")
    (docs / "later.txt").write_bytes("dög".encode("latin-1"))
    monkeypatch.setattr("bertie.search.index.COMMIT_PASSAGES", 1)
    monkeypatch.setattr("bertie.search.document_input.GROUP_DOCUMENTS", 1)
    assert "2 documents are committed" in (message := fails(1, "index", "docs", "--output", "other", *model))
    assert "; continue with: bertie index " in message
    assert message.rstrip().endswith(" --refresh")
    message = fails(1, "index", "docs", "--output", "ix", "--refresh")
    assert "--encoding" in message
    assert "; or skip unreadable files and rows with --skip (on_error='skip')" in message
    assert main(["index", "docs", "--output", "ix", "--refresh", "--skip"]) == 0
    assert f"bertie: skipped {docs / 'later.txt'} is not utf-8" in capsys.readouterr().err, "the path once"
    assert main(["index", "docs", "--output", "ix", "--refresh", "--encoding", "latin-1"]) == 0


def test_verify(docs: Path, models: dict[str, str], capsys: Capture) -> None:
    said(capsys, "index", "docs", "--output", "ix", "-m", models["embed"])
    assert said(capsys, "index", "--verify", "--output", "ix") == {"index": "ix", "passages": 4}
    assert main(["index", "docs", "--verify", "--output", "ix"]) == 2
    assert "--verify needs the index only" in capsys.readouterr().err
    catalog = bytearray(Path("ix/index.sqlite").read_bytes())
    catalog[-1] ^= 1
    Path("ix/index.sqlite").write_bytes(catalog)
    assert main(["index", "--verify", "--output", "ix"]) == 1
    assert "index.sqlite is corrupt" in capsys.readouterr().err


def test_rebuild(docs: Path, models: dict[str, str], capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bertie.search.local_store.SEGMENT_ROWS", 2)
    said(capsys, "index", "docs", "--output", "ix", "-m", models["embed"])
    victim = next(Path("ix/segments").glob("*/vectors.npy"))
    victim.write_bytes(victim.read_bytes()[:-8])
    assert main(["search", "ix", "the cat"]) == 1
    assert "bertie index --rebuild -o ix" in capsys.readouterr().err
    assert said(capsys, "index", "--rebuild", "--output", "ix") == {"index": "ix", "embedded": 4}
    assert len(said(capsys, "search", "ix", "the cat")["hits"]) == 4


def test_filter_values_match_text_and_numbers() -> None:
    for text, met, not_met in (
        ("year=1999", [{"year": 1999}, {"year": "1999"}], [{"year": 2000}, {}]),
        ("year!=1999", [{"year": 2000}, {}], [{"year": 1999}, {"year": "1999"}]),
        ("year>=1999.5", [{"year": 2000}], [{"year": 1999}, {"year": "2000"}]),
        ("ok=true", [{"ok": True}, {"ok": "true"}], [{"ok": False}, {"ok": 1}]),
        ("path=a=b", [{"path": "a=b"}], [{"path": "a"}]),
        ("name<m", [{"name": "a"}], [{"name": "z"}]),
    ):
        assert all(matches_filters(one, parse_condition(text)) for one in met)  # type: ignore[arg-type]
        assert not any(matches_filters(one, parse_condition(text)) for one in not_met)  # type: ignore[arg-type]


def test_highlighting_and_control_characters() -> None:
    text = "x " * 300 + "The \x1b[2Jcat\nsat." + " y" * 300
    at = text.index("cat")
    hit = SearchHit("a\x1bb", text, 0, len(text), ("Top",), 0.5, {"dense": 0.5}, ((at, at + 3),), {}, None)
    results = SearchResults("cat", (hit,), {"dense": 0.0012})
    lit = format_results(results, 1000, color=True)
    assert "The  [2J\x1b[1;33mcat\x1b[0m sat. y" in lit
    assert lit.count("\x1b") == 4
    plain = format_results(results, 1000, color=False)
    assert "\x1b" not in plain
    lines = plain.splitlines()
    assert lines[0] == "1. a b:0-1216 › Top"
    assert lines[1] == "   dense 0.5"
    assert lines[2].startswith("   …")
    assert len(lines[2]) < 350
    assert lines[-1] == "1 of 1,000 passages  dense 1.2 ms"


KILLED = """
import sys
import bertie.search.document_input as documents
import bertie.search.index as module
import bertie.search.local_store as embedded
from bertie.cli import main
module.COMMIT_PASSAGES, documents.GROUP_CHARACTERS, embedded.SEGMENT_ROWS = 4, 100, 16
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_run_is_resumed(here: Path, models: dict[str, str], capsys: Capture) -> None:
    draw = random.Random(3)
    Path("docs").mkdir()
    words = "a the cat dog sat ran on mat find".split()
    for i in range(400):
        Path(f"docs/{i:03}.txt").write_text(" ".join(draw.choices(words, k=20)))
    root = Path(__file__).parents[2]
    argv = ["index", "docs", "--output", "ix", "--refresh", "-m", models["embed"]]
    env = os.environ | {"PYTHONPATH": str(root / "src")}
    before = kills = 0
    while True:
        child = subprocess.Popen([sys.executable, "-c", KILLED, *argv], env=env, stdout=subprocess.DEVNULL)
        grown, wait = before, draw.randrange(1, 60)
        while child.poll() is None and grown < before + wait:
            time.sleep(0.005)
            if Path("ix/index.sqlite").exists():
                with Index.open("ix") as index:
                    grown = len(index)
        if child.poll() is not None:
            assert child.returncode == 0
            break
        child.kill()
        child.wait()
        kills += 1
        with Index.open("ix") as index:
            assert len(index) >= grown
            before = len(index)
            assert len(list(index.store.documents())) == before
    assert kills > 3
    said(capsys, "index", "docs", "--output", "whole", "-m", models["embed"])
    with Index.open("ix") as one, Index.open("whole") as two:
        assert len(one) == len(two) == 400
        for query in ("the cat sat", "dogs find a mat"):
            found = [[(hit.document, hit.score) for hit in each.search(query, 50)] for each in (one, two)]
            assert {name for name, _ in found[0]} == {name for name, _ in found[1]}
    print(f"{kills} kills of one run")


def test_symbolic_links(docs: Path, models: dict[str, str], capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("the cat")
    (docs / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert main(["index", "docs", "-o", "ix", "-m", models["embed"]]) == 0
    printed = capsys.readouterr()
    assert "4 documents added" in printed.out
    assert f"skipped {docs / 'link.txt'}: it is a symbolic link" in printed.err
    assert said(capsys, "index", "docs", "-o", "ix", "--refresh", "--follow-symlinks")["added"] == 1
