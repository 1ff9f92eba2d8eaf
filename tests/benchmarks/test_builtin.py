from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from benchmarks.builtin_report import Column, Figure
from benchmarks.builtin_subject import Subject
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score

from benchmarks import builtin, builtin_data, builtin_report
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.evaluation.intervals import Difference
from bertie.training.pretrain.masking import Masking
from tests.tasks import tiny

pytest.importorskip("ir_measures")
pytest.importorskip("seqeval")

OPTIONS = argparse.Namespace(quick=False, sentiment=None)


def write(path: Path, rows: list[dict[str, Any]] | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of every set, in the sets' own formats."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    texts = tiny.sentences(120)
    pairs = [{"text_a": texts[i], "text_b": texts[i + 1], "score": float(draw.integers(0, 51)) / 10} for i in range(40)]
    for name in builtin_data.STS_SETS.values():
        write(folder / f"{name}.jsonl.gz", pairs)
    for name, split in builtin_data.SEARCHES.values():
        corpus = [{"id": f"d{i}", "title": text[:9], "text": text} for i, text in enumerate(texts[:30])]
        write(folder / name / "corpus.jsonl.gz", corpus)
        asked = [{"id": f"q{i}", "text": text} for i, text in enumerate(texts[60:70])]
        write(folder / name / f"queries{split}.jsonl.gz", asked)
        predictions = "".join(f"q{i}\td{draw.integers(30)}\t{grade}\n" for i in range(8) for grade in (1, 2))
        write(folder / name / f"qrels{split}.tsv.gz", "query_id\tdoc_id\tscore\n" + predictions)
    labels = ("entailment", "neutral", "contradiction")
    write(folder / "snli/test.jsonl.gz", [row | {"label": labels[i % 3]} for i, row in enumerate(pairs)])
    words = [text.split() for text in texts[:20]]
    for name, kind in (("wikiann/test.en", "PER"), ("wnut17/test", "person")):
        tagged = [{"tokens": one, "tags": [f"B-{kind}", *["O"] * (len(one) - 1)]} for one in words]
        write(folder / f"{name}.jsonl.gz", tagged)
    answers = [{"text": words[0][0]}, {"text": "no such words"}]
    write(
        folder / "squad_v1/dev.jsonl.gz",
        [{"question": texts[i], "context": " ".join(texts[i : i + 6]), "answers": answers} for i in range(10)],
    )
    passages = [
        {"qid": i // 4, "query": texts[i // 4], "passage": texts[50 + i], "label": int(i % 4 == 1)} for i in range(40)
    ]
    write(folder / "wikiqa/test.jsonl.gz", passages)
    for split in ("valid", "test"):
        later = " = = Later ( life ) = = \n \n In 1 @,@ 907 the well @-@ read <unk> . \n"
        body = "".join(f" \n = {split} {i} = \n \n {tiny.document(30, i)} \n{later}" for i in range(3))
        write(folder / f"wikitext103_heldout/{split}.txt.gz", body)
    listed = "split\ttitle\tpretrain_file\nvalid\tvalid 1\tsomewhere\ntest\ttest 0\tsomewhere\n"
    (folder / "wikitext103_heldout/titles_also_in_pretrain.tsv").write_text(listed)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Masked words, and all heads."""
    bare = tiny.save(tmp_path_factory.mktemp("bare"), "wordpiece", "ForMaskedLM")
    checkpoint = Checkpoint.load(bare)
    one_of = "single_label_classification"
    checkpoint.add_head("mood", HeadInfo("classify", {0: "negative", 1: "neutral", 2: "positive"}, one_of))
    checkpoint.add_head("nli", HeadInfo("classify", {0: "contradiction", 1: "entailment", 2: "neutral"}, one_of))
    checkpoint.add_head("names", HeadInfo("tag", dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))))
    checkpoint.add_head("qa", HeadInfo("answer"))
    checkpoint.add_head("order", HeadInfo("classify", {0: "LABEL_0"}, task="rerank"))
    folder = tmp_path_factory.mktemp("models") / "small"
    checkpoint.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def subject(model: str) -> Subject:
    return Subject(model)


# --- data ---


def test_articles_are_the_held_out_ones_that_nobody_trained_on(data: Path) -> None:
    result = builtin_data.articles(data)
    assert [text.split("\n")[0] for text in result] == ["valid 0", "valid 2", "test 1", "test 2"]
    assert result[0].endswith("\nLater ( life )\nIn 1,907 the well-read <unk> .")
    assert "=" not in "".join(result)


def test_a_title_is_not_said_twice() -> None:
    assert builtin_data.document({"title": "On wings .", "text": "On wings . They lift."}) == "On wings . They lift."
    assert builtin_data.document({"title": "On wings", "text": "They lift."}) == "On wings. They lift."
    assert builtin_data.document({"title": "On wings", "text": ""}) == "On wings."
    assert builtin_data.document({"text": "They lift."}) == "They lift."


def test_a_random_part_is_always_the_same(tmp_path: Path) -> None:
    write(tmp_path / "rows.gz", [{"i": i} for i in range(100)])
    first, again = (builtin_data.rows(tmp_path / "rows.gz", 10) for _ in range(2))
    assert first == again
    assert len({row["i"] for row in first}) == 10
    assert len(builtin_data.rows(tmp_path / "rows.gz", 100)) == 100


# --- parts ---


def test_masked_words_are_judged_as_transformers_judges_them(
    subject: Subject, model: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, hidden = [], []
    choose, apply = Masking.choose, Masking.apply

    def choosing(self: Masking, special: Any, words: Any, cu: Any, rng: Any) -> Any:
        asked.append((cu, choose(self, special, words, cu, rng)))
        return asked[-1][1]

    def applying(*given: Any) -> Any:
        hidden.append(apply(*given))
        return hidden[-1]

    monkeypatch.setattr(Masking, "choose", choosing)
    monkeypatch.setattr(Masking, "apply", applying)
    figures = builtin.masked_words(subject, data, OPTIONS)

    other = transformers.BertForMaskedLM.from_pretrained(model).eval()
    loss = right = count = 0.0
    for (cu, places), (read, expected) in zip(asked, hidden, strict=True):
        for low, high in pairwise(cu):
            inside = (places >= low) & (places < high)
            with torch.no_grad():
                logits = other(input_ids=torch.from_numpy(read[low:high])[None]).logits[0, places[inside] - low]
            truth = torch.from_numpy(expected[inside])
            loss += float(torch.nn.functional.cross_entropy(logits, truth, reduction="sum"))
            right, count = right + float((logits.argmax(-1) == truth).sum()), count + len(truth)
    assert count > 100
    assert figures["WikiText-103 held-out, loss"].value == pytest.approx(loss / count, rel=1e-5)
    assert figures["WikiText-103 held-out, accuracy"].value == pytest.approx(right / count)
    assert figures["WikiText-103 held-out, accuracy"].n == count


def test_masked_words_are_the_same_each_time_and_need_a_head(subject: Subject, data: Path, tmp_path: Path) -> None:
    first, again = (builtin.masked_words(subject, data, OPTIONS) for _ in range(2))
    assert first == again
    bare = Subject(str(tiny.save(tmp_path, "wordpiece", "")))
    assert builtin.masked_words(bare, data, OPTIONS) == {}


def test_similarity_is_spearman_of_cosines(subject: Subject, data: Path) -> None:
    figures = builtin.similarity(subject, data, OPTIONS)
    read = builtin_data.rows(data / "stsb/test.jsonl.gz")
    a, b = (torch.from_numpy(subject.embedder.embed([row[side] for row in read])) for side in ("text_a", "text_b"))
    rho = spearmanr([row["score"] for row in read], torch.cosine_similarity(a, b)).statistic
    figure = figures["STS-B test"]
    assert figure.value == pytest.approx(rho, abs=1e-3)
    assert figure.low is not None
    assert figure.low < rho < (figure.high or 0)
    assert len(figure.units or ()) == 40


def test_the_interval_of_a_mean_is_that_of_draws() -> None:
    rng = np.random.default_rng(0)
    made = [(0.3, 0.05), (0.6, 0.02), (0.9, 0.01)]
    drawn = np.mean([rng.normal(value, sd, 100_000) for value, sd in made], axis=0)
    result = builtin_report.mean([Figure(value, value - 1.96 * sd, value + 1.96 * sd, 10) for value, sd in made])
    assert result.value == pytest.approx(0.6)
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(drawn, (0.025, 0.975))), abs=1e-3)
    assert result.n == 30


def test_search_finds_what_is_nearest(subject: Subject, data: Path) -> None:
    collection = builtin_data.SearchCollection.read(data, "cranfield", "")
    assert len(collection.queries) == 8  # of ten: two have no relevance judgments
    result = subject.vectors(collection.texts)
    run = collection.run(result[[3, 5, 7, 9, 11, 13, 15, 17]] @ result.T)
    assert [next(iter(one)) for one in run.values()] == ["d3", "d5", "d7", "d9", "d11", "d13", "d15", "d17"]
    figures = builtin.search(subject, data, OPTIONS)
    assert {"Cranfield, nDCG@10", "mean nDCG@10", "CoSQA, nDCG@10, first 50 reranked", "NPL, recall_100"} <= set(
        figures
    )
    assert figures["Cranfield, recall_100"].value == 1.0  # all thirty documents are named
    assert np.mean(figures["CACM, nDCG@10"].units or ()) == pytest.approx(figures["CACM, nDCG@10"].value, abs=1e-7)


def test_reranking_changes_the_first_and_keeps_the_others_behind(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Backwards:
        def predict(self, pairs: list[tuple[str, str]]) -> np.ndarray:
            return np.array([float(collection.texts.index(text)) for _, text in pairs])

    monkeypatch.setattr(builtin, "RERANK_DEPTH", 3)
    collection = builtin_data.SearchCollection.read(data, "cranfield", "")
    run = {"q0": {"d1": 0.9, "d2": 0.8, "d3": 0.7, "d4": 0.6, "d5": 0.5}}
    result = builtin.rerank(Backwards(), collection, run)["q0"]  # type: ignore[arg-type]
    assert sorted(result, key=lambda d: -result[d]) == ["d3", "d2", "d1", "d4", "d5"]


def test_bm25_finds_words_in_any_form_and_nothing_else(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bm25s")
    pytest.importorskip("Stemmer")
    write(tmp_path / "set/corpus.jsonl.gz", [{"id": "a", "text": "The cat."}, {"id": "b", "text": "The Rivers."}])
    write(tmp_path / "set/queries.jsonl.gz", [{"id": "q", "text": "the river"}, {"id": "r", "text": "the mountain"}])
    write(tmp_path / "set/qrels.tsv.gz", "query_id\tdoc_id\tscore\nq\tb\t1\nr\ta\t1\n")
    monkeypatch.setattr(builtin, "SEARCHES", {"Set": ("set", "")})
    figures = builtin.bm25(tmp_path)
    assert figures["Set, nDCG@10"].units == [1.0, 0.0]
    assert figures["Set, recall_100"].value == 0.5  # "the" is no word to find anything by


def test_heads_are_scored_by_what_they_say(subject: Subject, data: Path, tmp_path: Path) -> None:
    moods = [
        {"text": text, "label": ("negative", "neutral", "positive")[i % 3]} for i, text in enumerate(tiny.sentences(30))
    ]
    write(tmp_path / "mood.gz", moods)
    figures = builtin.heads(subject, data, argparse.Namespace(quick=False, sentiment=tmp_path / "mood.gz"))
    classifier = subject.classifier({"negative", "positive"})
    assert classifier is not None
    output = classifier.predict([row["text"] for row in moods])
    expected = accuracy_score([row["label"] for row in moods], output)
    assert figures["sentiment (GoEmotions), accuracy"].value == pytest.approx(expected)
    read = builtin_data.rows(data / "snli/test.jsonl.gz")
    nli_classifier = subject.classifier({"entailment"})
    assert nli_classifier is not None
    output = nli_classifier.predict([(row["text_a"], row["text_b"]) for row in read])
    assert figures["NLI (SNLI), accuracy"].value == pytest.approx(accuracy_score([r["label"] for r in read], output))
    assert figures["NER (WikiANN), F1"] == figures["NER (WNUT-17), F1"]  # the same, in other types
    assert {"QA (SQuAD dev), f1", "QA (SQuAD dev), exact_match"} <= set(figures)
    assert {f"reranking (WikiQA) by {way}, MAP" for way in ("embeddings", "rerank head")} <= set(figures)
    assert figures["reranking (WikiQA) by embeddings, MAP"].n == 10


def test_types_of_names_are_the_three() -> None:
    tags = ["O", "B-person", "I-group", "B-corporation", "I-location", "B-product", "B-PER", "I-MISC"]
    assert [builtin.as_type(tag) for tag in tags] == ["O", "B-PER", "I-ORG", "B-ORG", "I-LOC", "O", "B-PER", "O"]


def test_long_texts_are_read_whole(subject: Subject, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin, "articles", lambda _: [tiny.document(600)])
    figures = builtin.long_texts(subject, data, OPTIONS)
    assert figures["tokens"].value == figures["tokens read"].value == 2000
    assert figures["windows"].value >= 2000 / tiny.REACH


# --- speed ---


def test_times_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pretend(command: list[str], **options: Any) -> Any:
        name, threads = command[3], command[-1]
        asked.append((name, threads, options["env"]["OMP_NUM_THREADS"], options["env"]["RAYON_NUM_THREADS"]))
        return argparse.Namespace(stdout=json.dumps({f"texts per second, {threads}": float(len(asked))}))

    monkeypatch.setattr(subprocess, "run", pretend)
    result = builtin.speed(["a", "b"], Path(), 3)
    assert asked == [(name, k, k, k) for _ in range(3) for k in "12" for name in "ab"]
    assert result["a"]["texts per second, 1"] == Figure(5.0, 1.0, 9.0, 3)


def test_one_process_times_itself(model: str, data: Path) -> None:
    threads = torch.get_num_threads()
    try:
        result = builtin.time_process(model, data, 1)
    finally:
        torch.set_num_threads(threads)
    assert result["sentences per second, 1 thread"] > 0
    assert result["peak memory, MiB"] >= result["memory of the imports, MiB"] > 10


# --- what is shown ---


def column(name: str, seed: int, shift: float = 0.0) -> Column:
    units = np.random.default_rng(seed).random(50) * 0.5 + shift
    figure = Figure(float(units.mean()), float(units.mean()) - 0.05, float(units.mean()) + 0.05, 50, units.tolist())
    return Column(
        name, {"search": {"Cranfield, nDCG@10": figure}, "speed": {"sentences per second, 1 thread": Figure(100.0)}}
    )


def test_columns_are_compared_on_the_same_queries(data: Path) -> None:
    one, other, words = column("one", 0, 0.2), column("other", 0), column(builtin_report.BM25, 1)
    one.parts["search"]["Cranfield, nDCG@10, first 50 reranked"] = one.parts["search"]["Cranfield, nDCG@10"]
    result = {(label, a, b): gap for label, a, b, gap in builtin_report.compare_models([one, other, words], data)}
    gap = result["Cranfield, nDCG@10", "one", "other"]
    assert (gap.value, gap.low, gap.high) == pytest.approx((0.2, 0.2, 0.2))
    assert set(result) == {
        ("Cranfield, nDCG@10", "one", "other"),
        ("Cranfield, nDCG@10", "one", "BM25"),
        ("Cranfield, nDCG@10, first 50 reranked", "one", "BM25"),
        ("Cranfield, nDCG@10", "other", "BM25"),
    }
    assert "| Cranfield, nDCG@10 | one | other | +0.2000 [+0.2000, +0.2000] | 0.002 |" in builtin_report.differences(
        [("Cranfield, nDCG@10", "one", "other", Difference(0.2, 0.2, 0.2, 0.002))]
    )


def test_earlier_runs_come_back_without_speeds_of_another_moment(tmp_path: Path) -> None:
    def kept(name: str, *columns: Column) -> str:
        (tmp_path / name).write_text(json.dumps({"columns": [asdict(one) for one in columns]}))
        return str(tmp_path / name)

    first, second = (
        kept("1.json", column("one", 0), column("two", 1)),
        kept("2.json", column("two", 2), column("three", 3)),
    )
    columns, fresh = builtin.start_columns([first], ["speed"])
    assert not fresh
    assert columns == {"one": column("one", 0), "two": column("two", 1)}
    columns, _ = builtin.start_columns([first, second], ["speed"])
    assert list(columns) == ["one", "two", "three"]
    assert columns["two"].parts["search"] == column("two", 2).parts["search"]
    assert not any("speed" in one.parts for one in columns.values())
    columns, fresh = builtin.start_columns(["models/small", first], ["speed"])
    assert list(fresh) == ["models/small"]
    assert columns["small"] is fresh["models/small"]
    assert not any("speed" in one.parts for one in columns.values())
    columns, _ = builtin.start_columns(["models/small", first], ["search"])
    assert "speed" in columns["one"].parts


def test_the_table_has_a_row_a_figure() -> None:
    other = Column("other", {"size": {"parameters": Figure(22_713_216)}})
    lines = builtin_report.table([column("one", 0), other]).split("\n")
    assert lines[:3] == ["| | one | other |", "|---|---|---|", "| parameters | – | 22,713,216 |"]
    assert lines[4] == "| sentences per second, 1 thread | 100 | – |"
    assert str(Figure(0.82034, 0.7986, 0.8419)) == "0.8203 [0.7986, 0.8419]"
    assert str(Figure(1234.5, 1200.4, 1300)) == "1,234 [1,200, 1,300]"


def test_bars_are_as_long_as_the_figures() -> None:
    columns = [
        Column("one", {"heads": {"a": Figure(0.4, 0.3, 0.5), "b <&": Figure(0.8, 0.7, 0.85)}}),
        Column("two & co", {"heads": {"a": Figure(0.2)}}),
    ]
    plots = builtin_report.plots(columns)
    assert list(plots) == ["builtin-heads.svg"]
    root = ET.fromstring(plots["builtin-heads.svg"])
    named = {r[0].text: r for r in root.iter("{http://www.w3.org/2000/svg}rect") if len(r)}
    length = {title: float(r.get("width") or 0) for title, r in named.items()}
    assert length["one, b <&: 0.8000 [0.7000, 0.8500]"] == pytest.approx(
        2 * length["one, a: 0.4000 [0.3000, 0.5000]"], abs=0.2
    )
    assert length["two & co, a: 0.2"] == pytest.approx(length["one, a: 0.4000 [0.3000, 0.5000]"] / 2, abs=0.2)
    left = float(next(iter(named.values())).get("x") or 0)
    whiskers = [line for line in root.iter("{http://www.w3.org/2000/svg}line") if line.get("class") is None]
    low, high = (float(whiskers[0].get(end) or 0) - left for end in ("x1", "x2"))
    assert (low / high, high) == pytest.approx(
        (0.3 / 0.5, length["one, a: 0.4000 [0.3000, 0.5000]"] * 0.5 / 0.4), abs=0.2
    )


def test_the_command(model: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "out.json"
    arguments = [
        model,
        "--data",
        str(data),
        "--only",
        "size,sts",
        "--json",
        str(out),
        "--plots",
        str(tmp_path / "docs"),
    ]
    monkeypatch.setattr(sys, "argv", ["builtin", *arguments])
    assert builtin.main() == 0
    printed = capsys.readouterr().out
    (result,) = builtin.read_columns(out)
    assert result.name == "small"
    assert list(result.parts) == ["size", "similarity"]
    assert f"| STS-B test | {result.parts['similarity']['STS-B test']} |" in printed
    assert (tmp_path / "docs/builtin-similarity.svg").is_file()
    monkeypatch.setattr(sys, "argv", ["builtin", model, "--data", str(data), "--only", "sts,nonsense"])
    with pytest.raises(SystemExit):
        builtin.main()
    assert "--only nonsense: there are size, mlm" in capsys.readouterr().err
