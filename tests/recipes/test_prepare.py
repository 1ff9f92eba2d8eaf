"""recipes/bertie-small/prepare.py, on a little data of every kind that it reads."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bertie.recipes import FOLDER

HERE = FOLDER / "bertie-small" / "prepare.py"


@pytest.fixture(scope="module")
def prepare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bertie_small_prepare", HERE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def question(article: str, number: int, context: str = "") -> dict[str, Any]:
    context = context or f"Paragraph {number} of {article} says answer{number}x here."
    text = f"answer{number}x"
    answers = [{"text": text, "answer_start": context.index(text)}]
    return {"id": f"{article}{number}", "title": article, "context": context, "question": f"{article} {number}?"} | {
        "answers": answers
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    top = tmp_path / "data"
    emotions = {"train": ["joy", "anger", "neutral"], "dev": ["love"], "test": ["fear"]}
    for split, labels in emotions.items():
        put(top / f"go_emotions/{split}.jsonl.gz", [{"text": f"{split} {one}", "labels": [one]} for one in labels])
    with gzip.open(top / "go_emotions/train.jsonl.gz", "at") as out:
        for text, labels in (
            ("of two minds", ["joy", "anger"]),
            ("no mind", ["curiosity"]),
            ("leaning", ["surprise", "joy"]),
            ("Dev LOVE!", ["joy"]),  # dev has it as well
            ("train  joy.", ["joy"]),  # train has it already
        ):
            out.write(json.dumps({"text": text, "labels": labels}) + "\n")
    for split in ("train", "dev", "test"):
        tokens = ["Ada", "of", split]
        put(top / f"wikiann/{split}.en.jsonl.gz", [{"tokens": tokens, "tags": ["B-PER", "O", "O"]}])
        tags = ["B-corporation", "I-corporation", "O", "B-product"]
        put(top / f"wnut17/{split}.jsonl.gz", [{"tokens": ["New", "Firm", split, "Pad"], "tags": tags}])
    with gzip.open(top / "wikiann/train.en.jsonl.gz", "at") as out:
        out.write(json.dumps({"tokens": ["ada", "of", "TEST"], "tags": ["B-PER", "O", "O"]}) + "\n")
    train = [question(article, number) for article in ("Rome", "Oslo") for number in range(6)]
    dev = [question("Bern", number) for number in range(5)]
    put(top / "squad_v1/train.jsonl.gz", train)
    put(top / "squad_v1/dev.jsonl.gz", dev)
    leaked = question("", 3, dev[3]["context"]) | {"question": "leaked?"}
    put(top / "tydiqa_goldp/train.en.jsonl.gz", [question("", 100 + number) for number in range(5)] + [leaked])
    for split, file in (("train", "train_subset"), ("dev", "dev"), ("test", "test")):
        rows = [
            {"text_a": "A man runs.", "text_b": f"{split} {n}.", "label": "neutral", "pair_id": "x"} for n in (1, 2)
        ]
        put(top / f"snli/{file}.jsonl.gz", rows)
    with gzip.open(top / "snli/train_subset.jsonl.gz", "at") as out:
        out.write(json.dumps({"text_a": "A man runs .", "text_b": "test 1 .", "label": "neutral"}) + "\n")
    put(top / "banking77/train.jsonl.gz", [{"text": "Where is my card?", "label": "card"}])
    put(top / "clinc150/train.jsonl.gz", [{"text": "book a table", "label": "book"}])
    put(top / "stsb/train.jsonl.gz", [{"text_a": "book a table!", "text_b": "y", "score": 1.0}])
    (top / "pretrain").mkdir()
    sentence = "The {} stood for a long time on the hill above the town."
    (top / "pretrain/wiki.txt").write_text(
        f"Castle\n{sentence.format('castle')} {sentence.format('wall')} Too short.\n{'word ' * 70}\n\n"
        f"Shackleton (crater)\n{sentence.format('camera')}\n\n"
        + "\n\n".join(f"Page {number}\n{number} is a number." for number in range(1, 10))
    )
    return top


def run(prepare: ModuleType, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(data), str(out)])
    prepare.main()
    made: dict[str, Any] = {}
    for file in sorted(out.iterdir()):
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        made[file.name.split(".jsonl")[0]] = [json.loads(line) for line in lines] if "jsonl" in file.name else lines
    made["sentences"] = [row["text"] for row in made["sentences"]]
    return made


def test_everything(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(prepare, data, tmp_path / "out", monkeypatch)

    assert {(row["text"], row["label"]) for row in made["sentiment.train"]} == {
        ("train joy", "positive"),
        ("train anger", "negative"),
        ("train neutral", "neutral"),
        ("leaning", "positive"),
    }
    assert made["sentiment.dev"] == [{"text": "dev love", "label": "positive"}]
    assert made["sentiment.test"] == [{"text": "test fear", "label": "negative"}]

    assert [row["tokens"] for row in made["ner.train"]] == [["Ada", "of", "train"], ["New", "Firm", "train", "Pad"]]
    assert made["ner.train"][1]["tags"] == ["B-ORG", "I-ORG", "O", "O"]
    assert [row["source"] for row in made["ner.test"]] == ["wikiann", "wnut17"]

    assert len(made["qa.train"]) == 12 + 5 + 12
    assert "leaked?" not in {row["question"] for row in made["qa.train"]}
    assert len(made["qa.dev"]) == 5

    assert [row["text_b"] for row in made["nli.train"]] == ["train 1.", "train 2."]
    assert made["nli.dev"][0] == {"text_a": "A man runs.", "text_b": "dev 1.", "label": "neutral"}

    texts = made["sentences"]
    assert len(texts) == len(set(texts))
    for text in ("Castle", "Where is my card?", "train 1.", "Rome 3?", "New Firm train Pad", ("word " * 70).strip()):
        assert text in texts, text
    assert "The wall stood for a long time on the hill above the town." in texts
    joined = " ".join(texts)
    for text in (
        "camera",
        "Shackleton",
        "book a table",
        "dev",
        "test",
        "Too short",
        "Bern",
    ):  # left out, or measured with
        assert text not in joined, text


def test_questions_with_several_paragraphs(
    prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the article's order, and the answer is where it is said to be."""
    monkeypatch.setattr(prepare, "LONG_CHARACTERS", (100, 200))
    made = run(prepare, data, tmp_path / "out", monkeypatch)["qa.train"]
    plain = {row["id"]: row["context"] for row in made}
    long = [row for row in made if row["id"].endswith("-long")]
    assert len(long) == 12
    for row in long:
        (answer,), own = row["answers"], plain[row["id"].removesuffix("-long")]
        paragraphs = row["context"].split("\n\n")
        assert own in paragraphs
        assert len(paragraphs) > 1
        assert row["context"].find(own) <= answer["answer_start"] < row["context"].find(own) + len(own)
        assert row["context"][answer["answer_start"] :].startswith(answer["text"])
        every = [context for context in dict.fromkeys(plain.values()) if context in paragraphs]
        assert every == paragraphs
        assert len(row["context"]) - len(paragraphs[0]) - len(paragraphs[-1]) < 200


def test_ranking(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_ranked_sentences", lambda *_, **__: ())
    made = run(prepare, data, tmp_path / "out", monkeypatch)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in made["rerank.train"]:
        groups.setdefault(row["query"], []).append(row)
    assert len(groups) == 12 + 5
    for query, rows in groups.items():
        assert [row["label"] for row in rows] == [1, *[0] * (len(rows) - 1)]
        assert len({row["passage"] for row in rows}) == len(rows), "no passage twice"
        article, _, number = query.removesuffix("?").partition(" ")
        if article in ("Rome", "Oslo"):
            assert sum(f"of {article} " in row["passage"] for row in rows) >= 4  # its own and three beside it
            assert not any(f"answer{number}x" in row["passage"] for row in rows[1:])
    assert {row["query"] for row in made["rerank.dev"]} == {f"Bern {number}?" for number in range(5)}


def test_ranking_sentences(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence with the answer first, then some without it; none that something is measured with."""
    measured = "A sentence of the test of another set."
    context = (
        f"Lima lies by the sea in Peru. It has answer7x people, all told. {measured} Nobody counts its many dogs. "
        "It rains there but seldom. Short one. So answer7x is what they say."
    )
    train = [question(article, number) for article in ("Rome", "Oslo") for number in range(6)]
    put(data / "squad_v1/train.jsonl.gz", [*train, question("Lima", 7, context)])
    put(data / "wikiqa/test.jsonl.gz", [{"qid": "1", "query": "which?", "passage": measured.upper(), "label": 0}])
    made = run(prepare, data, tmp_path / "out", monkeypatch)["rerank.train"]
    last = max(place for place, row in enumerate(made) if row["passage"] == context)
    rows = [row for row in made[last + 1 :] if row["query"] in ("Lima 7?", "Lima 7")]
    right, *wrong = rows[[row["label"] for row in rows].index(1) :]
    assert right["passage"] == "It has answer7x people, all told."
    assert [row["label"] for row in wrong] == [0] * len(wrong)
    assert {row["query"] for row in wrong} == {right["query"]}
    texts = [row["passage"] for row in wrong]
    assert len(texts) == len(set(texts)) == 4  # all of its paragraph, none of its article's others, one of any
    beside = {"Lima lies by the sea in Peru.", "Nobody counts its many dogs.", "It rains there but seldom."}
    assert set(texts[:3]) == beside
    assert texts[3].startswith("Paragraph ")
    queries = {row["query"] for row in made[last + 1 :]}
    assert 0 < sum(not query.endswith("?") for query in queries) < len(queries)
    monkeypatch.setattr(prepare, "BARE", 1.0)
    (right, *_) = prepare._ranked_sentences([question("Lima", 7, context)], 1, set())
    assert right["query"] == "Lima 7"
    assert list(prepare._ranked_sentences([question("Lima", 7, "Not answer7x.")], 1, set())) == []  # too short


def test_for_the_tokenizer(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth document of each file, as text that `bertie corpus` would read, without the excluded titles."""
    (data / "pretrain/more.txt").write_text("Other\nAnother file begins anew.\n")
    lines = run(prepare, data, tmp_path / "out", monkeypatch)["sample.txt.gz"]
    documents = "\n".join(lines).split("\n\n")
    assert [one.split("\n")[0] for one in documents] == ["Other", "Castle", "Page 5"]
    assert documents[2].strip() == "Page 5\n5 is a number."


def test_sizes(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows as the constants say, in their old order, and no others than before."""
    whole = run(prepare, data, tmp_path / "whole", monkeypatch)
    monkeypatch.setattr(prepare, "CUT", {"qa.train": 4, "ner.dev": 1, "nli.dev": 100})
    monkeypatch.setattr(prepare, "SENTENCES", 3)
    made = run(prepare, data, tmp_path / "out", monkeypatch)
    read = prepare.Documents([str(tmp_path / "out/sentences.jsonl.gz")])  # as `bertie corpus` reads it
    assert [document for _, document in read] == made["sentences"]
    places = [whole["qa.train"].index(row) for row in made["qa.train"]]
    assert len(set(places)) == 4
    assert places == sorted(places)
    assert len(made["ner.dev"]) == 1
    assert made["nli.dev"] == whole["nli.dev"]
    assert made["sentiment.train"] == whole["sentiment.train"]
    assert made["sentences"] == whole["sentences"][:3]


def test_titles_to_leave_out(prepare: ModuleType) -> None:
    titles = prepare.read_titles(str(prepare.EXCLUDE))
    assert len(titles) == len(set(titles)) == 49
    assert {"Oxaziridine", "Hu Zhengyan", "Shackleton ( crater )"} <= set(titles)


def test_same_bytes(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        run(prepare, data, tmp_path / name, monkeypatch)
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert len(files) == 15
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_answer_out_of_place(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = question("Rome", 1)
    row["answers"][0]["answer_start"] += 1
    put(data / "squad_v1/train.jsonl.gz", [row])
    with pytest.raises(SystemExit, match="not at its answer_start"):
        run(prepare, data, tmp_path / "out", monkeypatch)


def test_sample(prepare: ModuleType) -> None:
    """Each item of the stream is kept about equally often."""
    import random

    counts = dict.fromkeys("abcdefghij", 0)
    for seed in range(2000):
        sample = prepare.Sample(3, random.Random(seed))
        for one in counts:
            sample.take(one)
        assert len(set(sample.kept)) == 3
        for one in sample.kept:
            counts[one] += 1
    assert all(520 < count < 680 for count in counts.values()), counts  # 600, and four standard deviations


def test_split(prepare: ModuleType) -> None:
    text = 'Mr. A. Fox ran 3.5 km. Did he? "Yes!" (He did.) It cost $5. In 1990 it ended'
    assert list(prepare.split(text)) == [
        "Mr. A. Fox ran 3.5 km.",
        "Did he?",
        '"Yes!"',
        "(He did.)",
        "It cost $5.",
        "In 1990 it ended",
    ]
