from pathlib import Path

from benchmarks.needles import find_needles


def test_windows_find_a_sentence_anywhere(tmp_path: Path) -> None:
    table = find_needles(tmp_path, "window")
    assert table.pop("classify, outvoted") == [False] * 5, "one sentence against all others"
    assert table == {task: [True] * 5 for task in ("classify", "tag", "answer", "rerank", "embed", "fill")}


def test_truncation_finds_it_at_the_beginning_only(tmp_path: Path) -> None:
    for task, hits in find_needles(tmp_path, "truncate").items():
        assert hits == [True, False, False, False, False], task
