"""Folders of BEIR, exact search over them, and `bertie eval --beir`."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.cli import main
from bertie.errors import InputError, MissingPackageError, NotFoundError
from bertie.evaluation.retrieval import retrieval
from bertie.search import beir
from bertie.search.beir import RetrievalDataset, read_beir
from bertie.tasks import Embedder, LateInteraction, Reranker
from tests.tasks import tiny

pytest.importorskip("ir_measures")
pytest.importorskip("bm25s")
pytest.importorskip("Stemmer")

COLBERT = str(Path(__file__).parent.parent / "parity" / "pylate" / "model")
TEXTS = tiny.sentences(40, seed=3)
CORPUS = [{"_id": f"d{i}", "title": "" if i % 3 else "Novel", "text": text} for i, text in enumerate(TEXTS)]
QUERIES = [{"_id": f"q{i}", "text": text} for i, text in enumerate(tiny.sentences(6, seed=4))]
QRELS = [(f"q{i}", f"d{7 * i + j}", 1 + j) for i in range(5) for j in range(2)]  # q5 is not qrels


def jsonl(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tsv(rows: list[Any], head: str = "query-id\tcorpus-id\tscore") -> str:
    return "\n".join([head, *("\t".join(map(str, row)) for row in rows)]) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As BEIR ships it."""
    (tmp_path / "qrels").mkdir()
    (tmp_path / "corpus.jsonl").write_text(jsonl(CORPUS))
    (tmp_path / "queries.jsonl").write_text(jsonl(QUERIES))
    (tmp_path / "qrels" / "test.tsv").write_text(tsv(QRELS))
    return tmp_path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    top = tmp_path_factory.mktemp("models")
    one = tiny.save(top / "one", "wordpiece", "")
    cross = tiny.save(top / "cross", "wordpiece", "ForSequenceClassification", labels=["LABEL_0"])
    two = tiny.save(top / "two", "bpe", "")
    return {"one": str(one), "two": str(two), "cross": str(cross)}


# --- reading ---


def test_a_folder_of_beir(folder: Path) -> None:
    result = read_beir(folder)
    assert list(result.queries.items()) == [(row["_id"], row["text"]) for row in QUERIES[:5]]
    assert result.corpus["d0"] == f"Novel {TEXTS[0]}"
    assert result.corpus["d1"] == TEXTS[1]
    assert list(result.corpus) == [f"d{i}" for i in range(40)]
    assert result.qrels == {f"q{i}": {f"d{7 * i}": 1, f"d{7 * i + 1}": 2} for i in range(5)}


def test_other_layouts_are_the_same_collection(folder: Path, tmp_path: Path) -> None:
    """Compressed, with `id`, numbers for ids, queries and judgements a split, no titles, a title without text."""
    other = tmp_path / "other"
    other.mkdir()
    corpus = [{"id": i, "text": text} for i, text in enumerate(TEXTS)] + [{"id": "t", "title": "Alone", "text": ""}]
    queries = [{"id": i, "text": row["text"]} for i, row in enumerate(QUERIES)]
    for name, text in (
        ("corpus.jsonl.gz", jsonl(corpus)),
        ("queries.dev.jsonl.gz", jsonl(queries[:2])),
        ("queries.test.jsonl.gz", jsonl(queries[2:])),
        ("qrels.dev.tsv.gz", tsv([(0, 3, 1), (1, 4, 0)], "query_id\tdoc_id\tscore")),
        ("qrels.test.tsv.gz", tsv([(2, 5, 1)], "query_id\tdoc_id\tscore")),
    ):
        (other / name).write_bytes(gzip.compress(text.encode()))
    dev, test = read_beir(other, "dev"), read_beir(other)
    assert dev.qrels == {"0": {"3": 1}, "1": {"4": 0}}
    assert list(dev.queries) == ["0", "1"]
    assert dict(test.queries) == {"2": QUERIES[2]["text"]}
    assert dev.corpus["3"] == TEXTS[3]
    assert dev.corpus["t"] == "Alone"
    with pytest.raises(NotFoundError, match=r"qrels/train\.tsv .*its splits: dev, test"):
        read_beir(other, "train")


def test_judgements_without_a_split_are_those_of_test(folder: Path) -> None:
    (folder / "qrels" / "test.tsv").rename(folder / "qrels.tsv")
    assert len(read_beir(folder).queries) == 5
    with pytest.raises(NotFoundError, match="its splits: test"):
        read_beir(folder, "dev")


@pytest.mark.parametrize(
    ("file", "text", "output"),
    [
        ("qrels/test.tsv", tsv([("q0", "d1", 1), ("q9", "d1", 1)]), r"test\.tsv, row 2: .* no query 'q9' in .*queries"),
        ("qrels/test.tsv", tsv([("q0", "d1", 1), ("q0", "x", 1)]), r"test\.tsv, row 2: .* no document 'x' in .*corpus"),
        ("qrels/test.tsv", tsv([("q0", "d1", 1), ("q0", "d1", 2)]), r"row 2: conflicting scores for .*'q0' and .*'d1'"),
        ("qrels/test.tsv", tsv([("q0", "d1", "high")]), r"row 1 must hold two ids and an integer.*high"),
        ("qrels/test.tsv", "q0\td1\t1\nq1\td2\t1\n", "must begin with a header"),
        ("qrels/test.tsv", "query-id\tcorpus-id\nq0\td1\n", "must begin with a header"),
        ("queries.jsonl", jsonl([{"_id": "q0", "text": " "}, *QUERIES[1:]]), r"queries\.jsonl, row 1: .*'q0' is empty"),
        ("queries.jsonl", jsonl([*QUERIES, QUERIES[1]]), r"queries\.jsonl, row 7: the query 'q1' is a duplicate"),
        ("queries.jsonl", jsonl([{"_id": "q0"}]), "row 1: no value in column 'text'"),
        ("queries.jsonl", jsonl([{"name": "q0", "text": "a"}]), "no column '_id' or 'id', only 'name', 'text'"),
        (
            "corpus.jsonl",
            jsonl([*CORPUS, CORPUS[1]]),
            r"corpus\.jsonl, row 41: duplicate id 'd1', which has relevance judgments",
        ),
        (
            "corpus.jsonl",
            jsonl([{"_id": None, "text": "a"}]),
            r"corpus\.jsonl, row 1: None in column '_id' is not an id",
        ),
        ("corpus.jsonl", jsonl(CORPUS) + "{", "line 41 is not JSON"),
        ("corpus.jsonl", "", "is empty"),
    ],
)
def test_what_is_wrong_is_said_with_its_file_and_row(folder: Path, file: str, text: str, output: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=output):
        read_beir(folder)


def test_an_id_that_stands_twice_and_is_not_judged_is_warned_of(folder: Path) -> None:
    (folder / "corpus.jsonl").write_text(jsonl([*CORPUS, {"_id": "d39", "text": "anew"}]))
    with pytest.warns(UserWarning, match="row 41: duplicate id 'd39'"):
        assert read_beir(folder).corpus["d39"] == "anew"


def test_what_is_missing_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no folder"):
        read_beir(tmp_path / "nowhere")
    (folder / "corpus.jsonl").unlink()
    with pytest.raises(NotFoundError, match=r"no corpus\.jsonl"):
        read_beir(folder)


# --- searching ---


@pytest.mark.parametrize(("block", "depth"), [(256, 1000), (7, 1000), (7, 5), (1, 3)])
def test_dense_is_the_best_of_all_products(
    folder: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, block: int, depth: int
) -> None:
    monkeypatch.setattr(beir, "BLOCK", block)
    monkeypatch.setattr(beir, "DEPTH", depth)
    result, embedder = read_beir(folder), Embedder.load(models["one"])
    done: list[int] = []
    run = beir.dense_run(result, embedder, advance=done.append)
    assert sum(done) == 40
    documents = embedder.embed(list(result.corpus.values())).astype(np.float64)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    for query, text in result.queries.items():
        (vector,) = embedder.embed([text]).astype(np.float64)
        cosines = dict(zip(result.corpus, documents @ vector / np.linalg.norm(vector), strict=True))
        best = sorted(cosines.values(), reverse=True)[:depth]
        assert list(run[query].values()) == pytest.approx(best, abs=1e-6)
        assert all(run[query][d] == pytest.approx(cosines[d], abs=1e-6) for d in run[query])


def test_queries_and_documents_have_their_prompts(folder: Path, models: dict[str, str]) -> None:
    result, embedder = read_beir(folder), Embedder.load(models["one"])
    plain = beir.dense_run(result, embedder)
    embedder.modules.prompts = {"query": "Find: ", "passage": "Read: "}
    prompted = beir.dense_run(result, embedder)
    embedder.modules.prompts = {}
    texts = {name: f"Read: {text}" for name, text in result.corpus.items()}
    asked = {name: f"Find: {text}" for name, text in result.queries.items()}
    written = beir.dense_run(RetrievalDataset(texts, asked, result.qrels), embedder)
    for query in result.queries:
        assert prompted[query] == pytest.approx(written[query], abs=1e-5)
        assert prompted[query] != pytest.approx(plain[query], abs=1e-5)


def test_lexical_is_bm25_as_lucene_has_it() -> None:
    """Words that no stemmer changes and no list of stop words has."""
    texts = {"a": "cat dog cat", "b": "dog bird", "c": "bird bird bird fox", "d": "cat", "e": "wolf wolf"}
    result = beir.bm25_run(RetrievalDataset(texts, {"q": "cat bird", "none": "zebra"}, {}))
    lengths = {name: len(text.split()) for name, text in texts.items()}
    mean = sum(lengths.values()) / len(lengths)
    by_hand: Counter[str] = Counter()
    for word in ("cat", "bird"):
        holders = [name for name, text in texts.items() if word in text.split()]
        idf = math.log(1 + (len(texts) - len(holders) + 0.5) / (len(holders) + 0.5))
        for name in holders:
            times = texts[name].split().count(word)
            by_hand[name] += idf * times / (times + 1.2 * (1 - 0.75 + 0.75 * lengths[name] / mean))
    assert result["q"] == pytest.approx(by_hand, abs=1e-5)
    assert list(result["q"]) == [name for name, _ in by_hand.most_common()]
    assert result["none"] == {}


def test_hybrid_is_by_reciprocal_ranks() -> None:
    rng = np.random.default_rng(0)
    runs = [{"q": {f"d{i}": float(rng.random()) for i in rng.permutation(30)[:20]}} for _ in range(2)]
    worth: Counter[str] = Counter()
    for run in runs:
        for place, document in enumerate(sorted(run["q"], key=lambda d: -run["q"][d]), 1):
            worth[document] += 1 / (60 + place)
    result = beir.fuse_by_rank(*runs)
    assert result["q"] == pytest.approx(worth)
    assert beir.fuse_by_rank({"q": {"a": 1.0}}, {}) == {"q": {"a": pytest.approx(1 / 61)}}


def test_reranked_is_the_order_of_the_pairs(folder: Path, models: dict[str, str]) -> None:
    result, reranker = read_beir(folder), Reranker.load(models["cross"])
    run = beir.dense_run(result, Embedder.load(models["one"]))
    done: list[int] = []
    again = beir.rerank_run(result, reranker, run, depth=6, advance=done.append)
    assert sum(done) == 6 * 5
    for query, one in run.items():
        first, others = list(one)[:6], list(one)[6:]
        scores = reranker.predict([(result.queries[query], result.corpus[d]) for d in first])
        assert [again[query][d] for d in first] == pytest.approx(scores.tolist(), abs=1e-5)
        ranked = sorted(again[query], key=lambda d: -again[query][d])
        assert ranked[6:] == others
        assert set(ranked[:6]) == set(first)


def test_fused_is_by_weighted_scores() -> None:
    runs = {
        "dense": {"q": {"a": 0.9, "b": 0.5, "c": 0.1, "d": 0.0}, "r": {"a": 1.0}},
        "rerank": {"q": {"c": 5.0, "b": 4.0, "a": 3.0, "d": -9.0}},
    }
    result = beir.fuse_by_score(runs, {"dense": 1.0, "rerank": 0.5}, depth=3)  # without d
    assert result == {"q": {"a": pytest.approx(1.0), "b": pytest.approx(0.75), "c": pytest.approx(0.5)}, "r": {}}
    assert list(result["q"]) == ["a", "b", "c"]
    with pytest.raises(InputError, match="weights="):
        beir.fuse_by_score(runs, {"dense": 1.0})


def test_tuned_finds_the_best_of_all_weights() -> None:
    rng = np.random.default_rng(0)
    names = [f"d{i}" for i in range(30)]
    qrels = {f"q{i}": {str(one): 1 for one in rng.permutation(names)[:3]} for i in range(12)}
    runs = {
        name: {query: {d: float(helps * (d in right) + rng.normal()) for d in names} for query, right in qrels.items()}
        for name, helps in (("dense", 1.5), ("lexical", 1.0), ("rerank", 0.0))
    }
    tried = list(beir.grid_search(qrels, runs))
    assert len(tried) == 66
    assert all(sum(weights.values()) == pytest.approx(1.0) for weights, _ in tried)
    weights = beir.tune_weights(qrels, runs)
    best = retrieval(qrels, beir.fuse_by_score(runs, weights), resamples=10)["ndcg_10"].value
    assert best == pytest.approx(max(gain for _, gain in tried))
    assert weights["dense"] > 0
    assert best > max(retrieval(qrels, run, resamples=10)["ndcg_10"].value for run in runs.values())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bm25s", None)
    with pytest.raises(MissingPackageError, match=r"bertie\[search\]"):
        beir.bm25_run(RetrievalDataset({"a": "b"}, {"q": "b"}, {}))


# --- the command ---


def evaluated(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    assert main(["eval", *map(str, argv), "--resamples", "50", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_command_prints_the_scores_of_the_run(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = read_beir(folder)
    words, vectors = beir.bm25_run(result), beir.dense_run(result, Embedder.load(models["one"]))
    both = beir.fuse_by_rank(words, vectors)
    again = beir.rerank_run(result, Reranker.load(models["cross"]), both)
    for flags, run in (
        ([], vectors),
        (["--mode", "lexical"], words),
        (["--mode", "hybrid"], both),
        (["--mode", "hybrid", "--reranker", models["cross"], "--rerank-weight", "1"], again),
        (["--mode", "hybrid", "--reranker", models["cross"], "--rerank-weight", "0"], both),
        (["--mode", "hybrid", "--reranker", models["cross"]], again),
        (
            ["--mode", "hybrid", "--reranker", models["cross"], "--rerank-weight", "0.3"],
            beir.interpolate_run(both, again, 0.3),
        ),
    ):
        output = evaluated(capsys, "--beir", folder, "-m", models["one"], *flags)
        expected = retrieval(result.qrels, run, resamples=50)
        assert output == {name: pytest.approx(score.as_dict(), abs=1e-6) for name, score in expected.items()}, flags
        assert list(output) == ["ndcg_10", "map", "recall_100", "mrr"]


def test_the_command_reranks_with_a_late_interaction_model(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = read_beir(folder)
    first = beir.dense_run(result, Embedder.load(models["one"]))
    run = beir.rerank_run(result, LateInteraction.load(COLBERT), first)
    output = evaluated(capsys, "--beir", folder, "-m", models["one"], "--reranker", COLBERT)
    expected = retrieval(result.qrels, run, resamples=50)
    assert output == {name: pytest.approx(score.as_dict(), abs=1e-6) for name, score in expected.items()}


def test_the_command_finds_weights_on_another_split(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (folder / "qrels" / "test.tsv").read_text().splitlines()
    (folder / "qrels" / "dev.tsv").write_text("\n".join(lines[:-1]) + "\n")
    embedder, cross = Embedder.load(models["one"]), Reranker.load(models["cross"])

    def runs(result: RetrievalDataset) -> dict[str, Any]:
        mine: dict[str, Any] = {"dense": beir.dense_run(result, embedder), "lexical": beir.bm25_run(result)}
        return mine | {"rerank": beir.rerank_run(result, cross, beir.fuse_by_rank(*mine.values()))}

    dev, test = read_beir(folder, "dev"), read_beir(folder)
    weights = beir.tune_weights(dev.qrels, runs(dev))
    expected = retrieval(test.qrels, beir.fuse_by_score(runs(test), weights), resamples=50)
    argv = ["--beir", str(folder), "-m", models["one"], "--mode", "hybrid", "--reranker", models["cross"]]
    assert main(["eval", *argv, "--tune", "dev", "--resamples", "50", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {name: pytest.approx(score.as_dict(), abs=1e-6) for name, score in expected.items()}
    told = next(line for line in err.splitlines() if "--weights" in line).split("--weights ")[1]
    assert evaluated(capsys, *argv, "--weights", told) == json.loads(out)
    assert main(["eval", *argv, "--tune", "test"]) == 2
    assert "must differ from the split that is evaluated" in capsys.readouterr().err
    assert main(["eval", *argv, "--weights", "dense=1"]) == 1
    assert "must be numbers of at least 0 for each of dense, lexical, rerank" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", *argv, "--weights", "dense"])
    assert "'dense' must be like dense=1,lexical=0.3,rerank=2" in capsys.readouterr().err


def test_the_command_compares_two_models(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    one = evaluated(capsys, "--beir", folder, "-m", models["one"])
    two = evaluated(capsys, "--beir", folder, "-m", models["two"])
    both = evaluated(capsys, "--beir", folder, "-m", models["one"], "--baseline", models["two"])
    other = both.pop("baseline")
    assert both == one
    assert other["scores"] == two
    for metric, gap in other["difference"].items():
        assert gap["value"] == pytest.approx(one[metric]["value"] - two[metric]["value"])
        assert gap["low"] <= gap["value"] <= gap["high"]
    assert (
        main(["eval", "--beir", str(folder), "-m", models["one"], "--baseline", models["two"], "--resamples", "50"])
        == 0
    )
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["metric", "test", "95%", "two", "difference", "p"]
    assert table[1].split()[:2] == ["ndcg_10", f"{one['ndcg_10']['value']:.4f}"]
    assert len(table) == 5


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        ([], "pass either a FILE of labelled texts or a folder with --beir"),
        (["x.csv", "--beir", "."], "pass either a FILE of labelled texts or a folder with --beir"),
        (["--beir", ".", "--task", "rerank"], "--beir evaluates retrieval: leave out --task"),
        (["--beir", ".", "--columns", "text=a"], "leave out --columns"),
        (["x.csv", "--mode", "hybrid"], "only --beir evaluates retrieval: leave out --mode"),
        (["--beir", ".", "--mode", "lexical", "--baseline", "m"], "leave out --baseline"),
        (["x.csv", "--tune", "dev"], "only --beir evaluates retrieval: leave out --tune"),
        (["--beir", ".", "--tune", "dev", "--weights", "dense=1"], "leave out --weights"),
    ],
)
def test_a_command_that_makes_no_sense(argv: list[str], output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *argv]) == 2
    assert output in capsys.readouterr().err


def test_errors_and_warnings_are_one_line(
    folder: Path, models: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "--beir", str(folder), "--split", "dev", "-m", models["one"]]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "its splits: test" in err
    (folder / "corpus.jsonl").write_text(jsonl([*CORPUS, {"_id": "d39", "text": "anew"}]))
    evaluated_argv = ["eval", "--beir", str(folder), "--mode", "lexical", "--resamples", "50", "--json"]
    assert main(evaluated_argv) == 0
    out, err = capsys.readouterr()
    assert "ndcg_10" in json.loads(out)
    assert err.startswith("bertie: ")
    assert "row 41" in err
