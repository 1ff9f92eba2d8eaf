from pathlib import Path

from benchmarks.needles import find_needles


def test_a_sentence_is_found_wherever_it_is(tmp_path: Path) -> None:
    table = find_needles(tmp_path, "window")
    assert table.pop("classify, outvoted") == [False] * 5, "one sentence against all others"
    assert table == {task: [True] * 5 for task in ("classify", "tag", "answer", "rerank", "embed", "fill")}


def test_and_only_at_the_beginning_if_the_rest_is_cut_off(tmp_path: Path) -> None:
    for task, hits in find_needles(tmp_path, "truncate").items():
        assert hits == [True, False, False, False, False], task
