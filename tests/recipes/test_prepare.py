"""recipes/bertie-small/prepare.py, on a little data of every kind that it reads."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bertie.recipes import FOLDER

HERE = FOLDER / "bertie-small"


@pytest.fixture(scope="module")
def prepare() -> Iterator[ModuleType]:
    sys.path.insert(0, str(HERE))
    yield import_module("prepare")
    sys.path.remove(str(HERE))


def part(name: str) -> Any:
    """A module beside prepare.py, which the fixture has made importable."""
    return import_module(f"preparation.{name}")


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


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a package under a permissive licence and one under another."""
    folder = tmp_path / "site-packages"
    for name, licence in (("free", "MIT"), ("copyleft", "GPL-3.0-only")):
        (folder / f"{name}-1.0.dist-info").mkdir(parents=True)
        (folder / f"{name}-1.0.dist-info/METADATA").write_text(f"Name: {name}\nLicense-Expression: {licence}\n")
        (folder / f"{name}-1.0.dist-info/RECORD").write_text(f"{name}.py,,\n")
        (folder / f"{name}.py").write_text(
            f'def mean_of(values):\n    """Computes the {name} mean\n    of *values*. Slowly.\n\n    Args\n    """\n'
            "    return sum(values) / len(values)\n\n\ndef bare(value):\n    return value\n"
        )
    return folder


def run(prepare: ModuleType, data: Path, out: Path, *options: str) -> dict[str, Any]:
    prepare.main([str(data), str(out), *options])
    made: dict[str, Any] = {}
    for file in sorted(out.iterdir()):
        lines = gzip.decompress(file.read_bytes()).decode().splitlines()
        made[file.name.split(".jsonl")[0]] = [json.loads(line) for line in lines] if "jsonl" in file.name else lines
    if "sentences" in made:
        made["sentences"] = [row["text"] for row in made["sentences"]]
    return made


def test_everything(
    prepare: ModuleType, data: Path, packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part("emotions"), "NEUTRAL", 1.0)  # there is one neutral comment only
    made = run(prepare, data, tmp_path / "out", "--packages", str(packages))

    assert {(row["text"], row["label"]) for row in made["sentiment.train"]} == {
        ("train joy", "positive"),
        ("train anger", "negative"),
        ("train neutral", "neutral"),
        ("leaning", "positive"),
    } | {(row["text"], row["label"]) for row in made["sentiment.train"][4:]}
    assert made["sentiment.dev"] == [{"text": "dev love", "label": "positive"}]
    assert made["sentiment.test"] == [{"text": "test fear", "label": "negative"}]

    names = [(row["tokens"], row["tags"]) for row in made["ner.train"] if row["source"] == "wnut17"]
    assert names == [(["New", "Firm", "train", "Pad"], ["B-ORG", "I-ORG", "O", "O"])] * 2
    assert ["Ada", "of", "train"] in [row["tokens"] for row in made["ner.train"]]
    assert ["ada", "of", "TEST"] not in [row["tokens"] for row in made["ner.train"]]
    assert [row["source"] for row in made["ner.test"]] == ["wikiann", "wnut17"]
    assert ["Ada", "of", "train"] in [row["tokens"] for row in made["names.train"]]
    assert {row["source"] for row in made["names.train"]} == {"wikiann"}

    answered = [row for row in made["qa.train"] if row["answers"]]
    assert len(answered) == 12 + 5 + 12
    assert "leaked?" not in {row["question"] for row in made["qa.train"]}
    assert len(made["qa.dev"]) == 5

    assert [row["text_b"] for row in made["nli.train"]][:2] == ["train 1.", "train 2."]
    assert made["nli.dev"][0] == {"text_a": "A man runs.", "text_b": "dev 1.", "label": "neutral"}

    texts = made["sentences"]
    assert len(texts) == len(set(texts))
    for text in ("Castle", "Where is my card?", "train 1.", "Rome 3?", "New Firm train Pad", ("word " * 70).strip()):
        assert text in texts, text
    assert "The wall stood for a long time on the hill above the town." in texts
    assert "Computes the free mean of values." in texts
    assert any(text.startswith("def mean_of(values):\n") for text in texts)
    joined = " ".join(texts)
    for text in ("camera", "Shackleton", "book a table", "dev", "test", "Too short", "Bern", "copyleft", "bare"):
        assert text not in joined, text  # left out, or evaluated on


def test_questions_with_several_paragraphs(
    prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the article's order, and the answer is where it is said to be."""
    monkeypatch.setattr(part("questions"), "LONG_CHARACTERS", (100, 200))
    made = run(prepare, data, tmp_path / "out", "--only", "qa")["qa.train"]
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
        assert paragraphs == [context for context in sorted(set(plain.values())) if context in paragraphs]
        assert len(row["context"]) - len(paragraphs[0]) - len(paragraphs[-1]) < 200


def test_questions_without_an_answer(
    prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a paragraph of the article, one that BM25 finds, or a random one; the answer is in none of them."""
    made = run(prepare, data, tmp_path / "out", "--only", "qa")
    texts = {row["id"]: row["answers"][0]["text"] for row in [*made["qa.train"], *made["qa.dev"]] if row["answers"]}
    for name, article in (("qa.train", ("Rome", "Oslo")), ("qa.noanswer.dev", ("Bern",))):
        rows = [row for row in made[name] if not row["answers"]]
        assert rows
        for row in rows:
            own, _, source = row["id"].rpartition("-")
            assert texts[own] not in row["context"]
            assert source in ("same", "found", "random")
            if source == "same" and row["title"] in article:
                assert f"of {row['title']} " in row["context"]
    pairs = made["qa.noanswer.dev"]
    assert sum(bool(row["answers"]) for row in pairs) * 2 == len(pairs)
    module = part("questions")
    found = list(module.without_answer([question("Rome", number) for number in range(6)], (0, 6, 0)))
    assert {row["id"].rpartition("-")[2] for row in found} == {"found"}
    long = [question(article, number) for article in ("Rome", "Oslo") for number in range(6)]
    for row in module.exchanged(long, 12):
        assert f"of {row['title']} " not in row["context"]


def test_ranking(prepare: ModuleType, data: Path, packages: Path, tmp_path: Path) -> None:
    made = run(prepare, data, tmp_path / "out", "--packages", str(packages), "--only", "rerank")
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in made["rerank.train"]:
        groups.setdefault(row["query"], []).append(row)
    for number in range(6):
        rows = [row for query in (f"Rome {number}?", f"Rome {number}") for row in groups.get(query, ())]
        right = {row["passage"] for row in rows if row["label"]}
        assert right == {f"Paragraph {number} of Rome says answer{number}x here."}
        wrong = [row["passage"] for row in rows if not row["label"]]
        assert wrong
        assert not any(f"answer{number}x" in passage for passage in wrong)
    code = {query: rows for query, rows in groups.items() if any("def mean_of" in row["passage"] for row in rows)}
    assert len(code) == 1
    assert {row["query"] for row in made["rerank.dev"]} >= {f"Bern {number}?" for number in range(5)} & set(groups)
    passages = [row["passage"] for row in made["rerank.train"]]
    assert sum(one != other for one, other in pairwise(passages)) < len(passages) / 2, "not ordered by passage"


def test_candidates(prepare: ModuleType) -> None:
    """The best ones of BM25 first, neither the right passage nor those that score nearly as well."""
    pool = part("text").Pool(["red cats eat fish", "red cats eat bread", "a red house", "green grass"])
    assert pool.candidates("red cats eat fish", "red cats eat fish", 3) == ["red cats eat bread", "a red house"]
    assert pool.candidates("red cats eat fish", "red cats eat fish", 3, below=0.5) == ["a red house"]
    assert pool.candidates("red cats eat fish", "red cats eat fish", 1) == ["red cats eat bread"]


def test_ranking_sentences(prepare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence with the answer first, then some without it; none that something is evaluated on."""
    ranking = part("ranking")
    evaluated = "A sentence of the test of another set."
    context = (
        f"Lima lies by the sea in Peru. It has answer7x people, all told. {evaluated} Nobody counts its many dogs. "
        "It rains there but seldom. Short one. So answer7x is what they say."
    )
    rows = [question(article, number) for article in ("Rome", "Oslo") for number in range(6)]
    seen = {part("files").key(evaluated.upper())}
    made = list(ranking.sentence_pairs([*rows, question("Lima", 7, context)], 13, seen))
    right, *wrong = [row for row in made if row["query"] in ("Lima 7?", "Lima 7")]
    assert right == {"query": right["query"], "passage": "It has answer7x people, all told.", "label": 1}
    assert [row["label"] for row in wrong] == [0] * len(wrong)
    assert {row["query"] for row in wrong} == {right["query"]}
    texts = [row["passage"] for row in wrong]
    assert len(texts) == len(set(texts)) == 4  # all of its paragraph, none of its article's others, one of any
    beside = {"Lima lies by the sea in Peru.", "Nobody counts its many dogs.", "It rains there but seldom."}
    assert set(texts[:3]) == beside
    assert texts[3].startswith("Paragraph ")
    queries = {row["query"] for row in made}
    assert 0 < sum(not query.endswith("?") for query in queries) < len(queries)
    monkeypatch.setattr(ranking, "BARE", 1.0)
    (right, *_) = ranking.sentence_pairs([question("Lima", 7, context)], 1, set())
    assert right["query"] == "Lima 7"
    assert list(ranking.sentence_pairs([question("Lima", 7, "Not answer7x.")], 1, set())) == []  # too short


def test_everyday(prepare: ModuleType, data: Path, tmp_path: Path) -> None:
    """Complete sentences of 4 to 30 words: of articles' beginnings and of training texts, none of an evaluation set."""
    put(
        data / "ud_english_ewt/train.jsonl.gz",
        [{"text": text} for text in ("We all went home.", "no full stop at all")],
    )
    put(data / "snli/dev.jsonl.gz", [{"text_a": "Two dogs play outside.", "text_b": "x", "label": "neutral"}])
    rows = [{"text_a": "Two dogs play outside .", "text_b": "A cat is asleep.", "label": "neutral"}]
    put(data / "snli/train_subset.jsonl.gz", rows)
    lead = ["Paris is the capital of France.", "It lies on the river Seine.", f"It is a {'very ' * 30}old town."]
    (data / "pretrain/paris.txt").write_text(f"Paris\n{' '.join(lead)}\n")
    made = run(prepare, data, tmp_path / "out", "--only", "everyday")["everyday"]
    assert {row["text"] for row in made} == {"We all went home.", "A cat is asleep.", *lead[:2]}


def test_names(prepare: ModuleType, data: Path, tmp_path: Path) -> None:
    """Text without names is added, if there is any; rows in which a full stop begins a name are dropped."""
    with gzip.open(data / "wikiann/train.en.jsonl.gz", "at") as out:
        out.write(json.dumps({"tokens": [".", "Rome", "fell"], "tags": ["B-ORG", "I-ORG", "O"]}) + "\n")
    disease = [["The", "gene", "causes", "Wilson", "disease"], ["In", "Boston", "it", "was", "found"]]
    tags = [["O", "O", "O", "B-Disease", "I-Disease"], ["O"] * 5]
    rows = [{"tokens": one, "tags": two} for one, two in zip(disease, tags, strict=True)]
    put(data / "ncbi_disease/train.jsonl.gz", rows)
    trees = [
        {"text": "", "tokens": ["I", "like", "this", tag.lower()], "tags": ["X", "X", "X", tag]}
        for tag in ("PROPN", "NOUN")
    ]
    put(data / "ud_english_ewt/train.jsonl.gz", trees)
    made = run(prepare, data, tmp_path / "out", "--only", "ner")["ner.train"]
    added = {row["source"]: (row["tokens"], set(row["tags"])) for row in made}
    assert added["ncbi_disease"] == (disease[0], {"O"})
    assert added["ud_english_ewt"] == (["I", "like", "this", "noun"], {"O"})
    assert len([row for row in made if row["source"] in ("ncbi_disease", "ud_english_ewt")]) == 2
    assert not [row for row in made if "." in row["tokens"]]


def test_sentences_to_label(prepare: ModuleType) -> None:
    """Sentences of passages with a capitalized word that is not the first."""
    wikipedia, entities = part("wikipedia"), part("entities")
    text = "It rained in Boston all day. Nothing else happened on that day. Ada came. Later she left for Rome alone."
    passage = wikipedia.WikiPassage("Rain", "", text, "", True)
    rows = list(entities._unlabelled([passage]))
    assert [" ".join(row["tokens"]) for row in rows] == [
        "It rained in Boston all day .",
        "Later she left for Rome alone .",
    ]


def test_titles(prepare: ModuleType) -> None:
    """A title before a person is no part of the name."""
    row = {
        "tokens": "Later Ada Lovelace wrote it".split(),
        "tags": ["O", "B-PER", "I-PER", "O", "O"],
        "source": "wikiann",
    }
    made = [part("entities").with_title(row, random.Random(seed)) for seed in range(30)]
    for one in made:
        before = one["tags"].index("B-PER")
        assert one["tokens"][0] == "Later"
        assert one["tokens"][-2:] == ["wrote", "it"]
        assert one["tokens"][1:before][0].rstrip(".") in part("entities").TITLES
        assert one["tags"][1:before] == ["O"] * (before - 1)
        name = [token for token, tag in zip(one["tokens"], one["tags"], strict=True) if tag.endswith("PER")]
        assert name in (["Ada", "Lovelace"], ["Lovelace"])
    assert len({len(one["tokens"]) for one in made}) > 2
    assert ["Gen", ".", "Lovelace"] in [one["tokens"][1:4] for one in made]
    alone = {"tokens": ["Ada"], "tags": ["B-PER"], "source": "wikiann"}
    assert part("entities").with_title(alone, random.Random(0)) == alone


class FakeModel:
    """Labels capitalized words as persons, surely unless the sentence has a doubt in it."""

    def label(self, sentences: Any) -> Iterator[tuple[list[str], list[str], list[float]]]:
        for words in sentences:
            names = ["O" if word.islower() or not word.isalpha() else "B-PER" for word in words]
            yield words, names, [0.5 if word == "doubt" else 0.99 for word in words]


def test_text_labelled_by_another_model(prepare: ModuleType) -> None:
    """Only sentences of which it is sure, and in which names have capital letters."""
    silver = part("silver")
    texts = ["yesterday Ada went home .", "perhaps doubt took Bob", "nobody came to us", "there Dr . Smith spoke"]
    made = list(silver.silver([text.split() for text in texts], FakeModel()))
    assert [row["tokens"][1] for row in made] == ["Ada", "Dr"]
    assert made[1]["tags"] == ["O", "O", "O", "B-PER", "O"]
    assert not silver.plausible(["we", "met", "bob"], ["O", "O", "B-PER"], ["O", "O", "B-PER"])
    assert not silver.plausible(["Bob", "likes", "Windows"], ["B-PER", "O", "O"], ["B-PER", "O", "O"])
    assert silver.plausible(["Bob", "likes", "Windows"], ["B-PER", "O", "B-MISC"], ["B-PER", "O", "O"])


def test_texts_of_several_comments(prepare: ModuleType) -> None:
    """Positive and negative ones are among neutral ones, and together only if one kind is in the minority."""
    rows = [
        {"text": f"{label}{number}", "label": label}
        for label in ("positive", "negative", "neutral")
        for number in (1, 2)
    ]
    made = list(part("emotions").documents(rows, 400))
    assert {row["label"] for row in made} == {"positive", "negative", "neutral"}
    neutral = opposed = 0
    for row in made:
        labels = [word.rstrip("12.") for word in row["text"].split()]
        assert 3 <= len(labels) <= 30
        assert row["label"] in labels
        if row["label"] == "neutral":
            assert set(labels) == {"neutral"}
            neutral += 1
        else:
            opposite = "negative" if row["label"] == "positive" else "positive"
            assert labels.count(row["label"]) > labels.count(opposite)
            opposed += opposite in labels
    assert 5 < neutral < 60
    assert 20 < opposed < 300


def test_some_neutral_comments_are_dropped(prepare: ModuleType, tmp_path: Path) -> None:
    rows = [{"text": f"comment {number}", "labels": ["neutral"]} for number in range(500)]
    for split in ("train", "dev", "test"):
        put(
            tmp_path / f"go_emotions/{split}.jsonl.gz", rows if split == "train" else [{"text": "a", "labels": ["joy"]}]
        )
    kept = dict(part("emotions").sentiment(tmp_path, set()))["sentiment.train"]
    assert 150 < len(kept) < 250


def test_hypotheses(prepare: ModuleType, data: Path) -> None:
    """One true and one false hypothesis for each text, in turn."""
    inference, passage = part("inference"), part("wikipedia").WikiPassage
    requests = [{"text": "when does my flight leave", "label": "flight_status"}] * 30
    put(data / "clinc150/train.jsonl.gz", [*requests, {"text": "play a song", "label": "play_music"}])
    put(
        data / "banking77/train.jsonl.gz", [{"text": text, "label": text} for text in ("card_arrival", "exchange_rate")]
    )
    draw = random.Random(0)
    passages = [
        passage("Ada", "", "Ada was a football player of a league. She won.", "sport", True),
        passage("Linz", "", "Linz is a city on a river.", "geography", True),
    ]
    kinds = {
        "topics": list(inference.topics(passages, draw)),
        "titles": list(inference.titles(passages, draw)),
        "intents": list(inference.intents(data, draw)),
        "emotions": list(inference.emotions(data, draw)),
    }
    for kind, rows in kinds.items():
        assert rows, kind
        assert [row["label"] for row in rows] == ["entailment", "contradiction"] * (len(rows) // 2), kind
        for right, wrong in zip(rows[::2], rows[1::2], strict=True):
            assert right["text_a"] == wrong["text_a"]
            assert right["text_b"].split()[-1] != wrong["text_b"].split()[-1]
    sport = next(row for row in kinds["topics"] if row["text_a"].startswith("Ada"))
    assert sport["text_b"].endswith(" sport.")
    assert {row["text_b"].split()[-1] for row in kinds["titles"] if row["label"] == "entailment"} == {"Ada.", "Linz."}
    flights = {row["text_b"].removesuffix(".").split()[-1] for row in kinds["intents"] if "flight" in row["text_a"]}
    assert {"status", "travel"} <= flights
    joy = {
        row["text_b"] for row in kinds["emotions"] if row["text_a"] == "train joy" and row["label"] == "contradiction"
    }
    assert not any("joy" in text or "positive" in text for text in joy)


def test_topics(prepare: ModuleType) -> None:
    topics = part("topics")
    assert topics.find_topic("The river flows by a city and a lake, and a church.") == "geography"
    assert topics.find_topic("The church by the river.") == ""
    assert topics.find_topic("Nothing to tell.") == ""
    for topic in topics.TOPICS:
        others = topics.unrelated(topic)
        assert topic not in others
        assert len(others) > 5
    assert {topic for pair in topics.RELATED for topic in pair} <= set(topics.TOPICS)
    assert set(topics.TOPICS) >= topics.SCIENCES


def test_keyword_queries(prepare: ModuleType) -> None:
    """Words of the passage in their order, neither common nor unique ones."""
    rare = "granite marble basalt quartz topaz garnet copper silver bronze".split()
    passages = [f"the stone {' '.join(rare)} unique{number}" for number in range(2)] + ["the stone"] * 80
    made = part("text").KeywordQueries(passages, random.Random(0))
    for _ in range(50):
        words = made.of(passages[0]).split()
        assert 2 <= len(words) <= 6
        assert words == sorted(words, key=rare.index)
        assert set(words) <= set(rare)
    assert made.of("the stone") == ""


def test_functions(prepare: ModuleType, packages: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    functions = part("functions")
    (found,) = functions.functions([str(packages), str(tmp_path / "nowhere")], set())
    assert (found.package, found.name, found.summary) == ("free", "mean_of", "Computes the free mean of values.")
    assert "Args" not in found.source
    assert found.source.endswith("    return sum(values) / len(values)")
    assert "free (MIT): 1 functions" in (said := capsys.readouterr().out)
    assert "nowhere" in said
    assert functions.functions([str(packages)], {part("files").key(found.summary)}) == []
    for text in ("See mean for more.", "Deprecated since version two", "a <b> c d", "Two words", "x" * 31 + " y z"):
        assert functions.summarize(text) == "", text


def test_for_the_tokenizer(prepare: ModuleType, data: Path, tmp_path: Path) -> None:
    """Every fifth document of each file, as text that `bertie corpus` would read, without the excluded titles."""
    (data / "pretrain/more.txt").write_text("Other\nAnother file begins anew.\n")
    lines = run(prepare, data, tmp_path / "out", "--only", "sample")["sample.txt.gz"]
    documents = "\n".join(lines).split("\n\n")
    assert [one.split("\n")[0] for one in documents] == ["Other", "Castle", "Page 5"]
    assert documents[2].strip() == "Page 5\n5 is a number."


def test_sizes(prepare: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many rows as the constants say, in their old order, and no others than before."""
    whole = run(prepare, data, tmp_path / "whole", "--only", "qa", "ner", "nli", "sentences")
    monkeypatch.setattr(prepare, "CUT", {"qa.train": 4, "ner.dev": 1, "nli.dev": 100})
    made = run(prepare, data, tmp_path / "out", "--only", "qa", "ner", "nli", "sentences")
    documents = import_module("bertie.training.pretrain.corpus.documents")
    read = documents.Documents([str(tmp_path / "out/sentences.jsonl.gz")])  # as `bertie corpus` reads it
    assert [document for _, document in read] == made["sentences"] == whole["sentences"]
    places = [whole["qa.train"].index(row) for row in made["qa.train"]]
    assert len(set(places)) == 4
    assert places == sorted(places)
    assert len(made["ner.dev"]) == 1
    assert made["nli.dev"] == whole["nli.dev"]
    assert made["ner.train"] == whole["ner.train"]


def test_titles_to_leave_out(prepare: ModuleType) -> None:
    titles = part("wikipedia").read_titles(str(part("wikipedia").EXCLUDE))
    assert len(titles) == len(set(titles)) == 49
    assert {"Oxaziridine", "Hu Zhengyan", "Shackleton ( crater )"} <= set(titles)


def test_same_bytes(prepare: ModuleType, data: Path, packages: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(prepare, data, tmp_path / name, "--packages", str(packages))
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert len(files) == 19
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_answer_out_of_place(prepare: ModuleType, data: Path, tmp_path: Path) -> None:
    row = question("Rome", 1)
    row["answers"][0]["answer_start"] += 1
    put(data / "squad_v1/train.jsonl.gz", [row])
    with pytest.raises(SystemExit, match="not at its answer_start"):
        run(prepare, data, tmp_path / "out", "--only", "qa")


def test_sample(prepare: ModuleType) -> None:
    """Each item of the stream is kept about equally often."""
    counts = dict.fromkeys("abcdefghij", 0)
    for seed in range(2000):
        sample = part("text").Sample(3, random.Random(seed))
        for one in counts:
            sample.take(one)
        assert len(set(sample.kept)) == 3
        for one in sample.kept:
            counts[one] += 1
    assert all(520 < count < 680 for count in counts.values()), counts  # 600, and four standard deviations


def test_split(prepare: ModuleType) -> None:
    text = 'Mr. A. Fox ran 3.5 km. Did he? "Yes!" (He did.) It cost $5. In 1990 it ended'
    assert list(part("text").split(text)) == [
        "Mr. A. Fox ran 3.5 km.",
        "Did he?",
        '"Yes!"',
        "(He did.)",
        "It cost $5.",
        "In 1990 it ended",
    ]


DATA_NOUN = """\
  1 This software and database is being provided to you, the LICENSEE
00001740 03 n 01 dog 0 001 @ 00001930 n 0000 | a member of the genus Canis (probably); "the dog barked all night"
00001930 18 n 01 Paris 0 000 | the capital and largest city of France; and international center of culture
00002137 07 n 02 wealth 0 riches 0 001 ! 00002452 n 0101 | the state of being rich
00002452 07 n 01 poverty 0 001 ! 00002137 n 0101 | the state of having little; "they lived; in poverty"; "so poor"
"""


def test_dictionary(prepare: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "data.noun").write_text(DATA_NOUN)
    (tmp_path / "data.verb").write_text(
        "00001740 29 v 01 breathe 0 000 00 | draw air into, and expel out of, the lungs\n"
    )
    (tmp_path / "data.adj").write_text("00001740 00 s 01 able(p) 0 000 | having the means\n")
    (tmp_path / "data.adv").write_text('00001740 02 r 01 quickly 0 000 | with speed; "he works quickly now"\n')
    assert list(part("dictionary").dictionary(tmp_path)) == [
        "A dog is a member of the genus Canis.",
        "The dog barked all night.",
        "Paris is the capital and largest city of France.",
        "A wealth is the state of being rich.",
        "It is not wealth but poverty.",
        "A poverty is the state of having little.",
        "They lived; in poverty.",
        "Poverty is the opposite of wealth.",
        "To breathe is to draw air into, and expel out of, the lungs.",
        "Able means having the means.",
        "He works quickly now.",
    ]


def test_scores(prepare: ModuleType, tmp_path: Path) -> None:
    """Labels become the mean of themselves and the scores of a cross-encoder."""
    from bertie.tasks import Reranker

    rows = [
        {"query": "What is the capital of France?", "passage": "Paris is the capital of France.", "label": 1},
        {"query": "What is the capital of France?", "passage": "Bread is made from flour.", "label": 0},
    ]
    put(tmp_path / "in.jsonl.gz", rows)
    import_module("score").main(
        [str(tmp_path / "in.jsonl.gz"), str(tmp_path / "out.jsonl.gz"), "--model", "bertie-small"]
    )
    with gzip.open(tmp_path / "out.jsonl.gz", "rt") as file:
        scored = [json.loads(line) for line in file]
    results = Reranker.load("bertie-small").predict([(row["query"], row["passage"]) for row in rows])
    assert [row["label"] for row in scored] == [
        pytest.approx((1 + results[0]) / 2, abs=1e-4),
        pytest.approx(results[1] / 2, abs=1e-4),
    ]
    assert [row["query"] for row in scored] == [row["query"] for row in rows]
