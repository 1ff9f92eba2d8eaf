"""All stages of bertie-small at tiny sizes, with its own recipes: from the tokenizer to `bertie tour`."""

from __future__ import annotations

import gzip
import json
import random
import re
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bertie import recipes
from bertie.checkpoints import hub
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.cli import main, tour
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.initialization import new_model
from tests.cli.test_tour import VERBS

RECIPES = sorted((recipes.FOLDER / "bertie-small").glob("*.toml"))
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
INTERPOLATED = "3-interpolated"  # starts from the second stage interpolated with the student
SENTIMENT = "4-sentiment"  # starts from the third stage interpolated with its start; the encoder is frozen
LARGE = "5-large-batches"  # starts from the fourth stage interpolated with the student
AGAIN = "6-sentiment"  # starts from the fifth stage interpolated with the fourth; the encoder is frozen
TEACHER = "7-named-entities"  # a larger model, which labels sentences for the eighth stage
LABELLED = "8-labelled-names"  # starts from the sixth stage
STEPS = {
    "1-multitask": 90, "2-teachers": 40, INTERPOLATED: 20, SENTIMENT: 10, LARGE: 30, AGAIN: 5, TEACHER: 10,
    LABELLED: 30,
}  # fmt: skip
OUTPUTS = {
    "1-multitask": "stage-1",
    "2-teachers": "stage-2",
    INTERPOLATED: "stage-3",
    SENTIMENT: "stage-4",
    LARGE: "stage-5",
    AGAIN: "stage-6",
    TEACHER: "stage-7",
    LABELLED: "stage-8",
}
INTERPOLATIONS = {
    SENTIMENT: ("stage-3", "stage-2-interpolated", "0.6"),
    LARGE: ("stage-4", "student", "0.6"),
    AGAIN: ("stage-5", "stage-4", "0.7"),
}
SMALL = {"batch_tokens": 512, "max_length": 64, "layers": 2, "batch_size": 8, "clusters": 3}
HEADS = {"mlm", "qa", "ner", "rerank", "sentiment", "nli"}


def shrunk(file: Path) -> str:
    """The recipe with tiny sizes, as JSON's part of TOML has it."""
    given = tomllib.loads(file.read_text("utf-8"))
    if isinstance(given["model"], dict):
        given["model"] |= SHAPE
    given["training"].pop("tokens", None)
    given["training"] |= {"steps": STEPS[file.stem], "batch_tokens": 512, "micro_tokens": 512, "evals": 2}
    given["training"] |= {"max_length": 64} if "max_length" in given["training"] else {}
    for one in given["objective"]:
        for name, value in SMALL.items():
            if name in one:
                one[name] = value
    top = [f"{name} = {json.dumps(value)}" for name, value in given.items() if isinstance(value, str | list)]
    top = [line for line in top if not line.startswith("objective")]
    tables = [(f"[{name}]", given[name]) for name in ("data", "model", "training") if isinstance(given.get(name), dict)]
    tables += [("[[objective]]", one) for one in given["objective"]]
    for title, values in tables:
        top += [title, *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(top) + "\n"


def words_of_book() -> list[str]:
    return re.findall(r"[A-Za-z]+", tour.book()[1])[:1500]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    file.parent.mkdir(exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def write_heads(folder: Path, say: Callable[[int], str], draw: random.Random) -> None:
    """Data of the shape that prepare.py writes."""
    tags = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
    for split, count in (("train", 40), ("dev", 12)):
        feelings, relations = ("negative", "neutral", "positive"), ("entailment", "neutral", "contradiction")
        write(
            folder / f"sentiment.{split}.jsonl.gz",
            [{"text": say(7), "label": feelings[i % 3]} for i in range(count)],
        )
        write(
            folder / f"nli.{split}.jsonl.gz",
            [{"text_a": say(7), "text_b": say(5), "label": relations[i % 3]} for i in range(count)],
        )
        write(
            folder / f"ner.{split}.jsonl.gz",
            [{"tokens": say(7).split(), "tags": [tags[(i + k) % 7] for k in range(7)]} for i in range(count)],
        )
    write(folder / "ner.unlabelled.jsonl.gz", [{"tokens": say(6).split()} for _ in range(40)])
    write(folder / "names.train.jsonl.gz", [{"tokens": say(2).split(), "tags": tags[1:3]} for _ in range(40)])
    questions, passages = [], []
    for number in range(40):
        context = say(40)
        answer = context.split()[draw.randrange(5, 35)]
        found = [{"text": answer, "answer_start": context.index(answer)}]
        questions.append({"id": str(number), "title": "t", "context": context, "question": say(5), "answers": found})
        passages.append({"query": f"q{number // 4} {say(3)}", "passage": say(20), "label": int(number % 4 == 0)})
    write(folder / "qa.train.jsonl.gz", questions)
    write(folder / "rerank.train.jsonl.gz", passages)
    write(folder / "rerank.scored.jsonl.gz", [row | {"label": 0.1 + 0.8 * row["label"]} for row in passages])


def run(*argv: str) -> None:
    assert main(list(argv)) == 0


def interpolate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage's model, moved towards the student; its heads stay."""
    monkeypatch.syspath_prepend(str(recipes.FOLDER / "bertie-small"))
    import_module("interpolate").main(
        ["./stage-2", "./stage-2-interpolated", "--towards", "./student", "--weight", "0.8"]
    )
    names = ("stage-2", "student", "stage-2-interpolated")
    second, student, mixed = (Checkpoint.load(f"./{name}").model.state_dict() for name in names)
    layer, head = "encoder.blocks.1.ff.down.weight", "heads.ner.out.weight"
    torch.testing.assert_close(mixed[layer], 0.8 * second[layer] + 0.2 * student[layer])
    assert mixed[head].equal(second[head])


def test_all_stages_from_the_tokenizer_to_the_tour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    known = words_of_book()

    def say(count: int) -> str:
        return " ".join(draw.choices(known, k=count))

    monkeypatch.chdir(tmp_path)
    sources = ("core", "featured", "sentences", "everyday")
    for name in sources:
        words, lines, count = (40, 40, 6) if name in ("core", "featured") else (12, 1, 60)
        texts = [
            "\n".join(say(draw.randint(5, words)) + "." for _ in range(draw.randint(min(2, lines), lines)))
            for _ in range(count)
        ]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts) + "\n")
    all_texts = [f"{name}.txt" for name in sources]
    for folder, size in (("ours", 900), ("theirs", 400)):
        settings = ["--vocab-size", str(size), "--lowercase", "--max-length", "128", "-o", folder]
        run("tokenizer", "train", *all_texts, *settings)
    for name in sources:
        run("corpus", f"{name}.txt", "--tokenizer", "ours", "-o", f"corpus/{name}", "--held-out", "0.1")
        run("corpus", f"{name}.txt", "--tokenizer", "theirs", "-o", f"corpus-teacher/{name}", "--held-out", "0.1")
    # A sentence encoder without a head, as all-MiniLM-L6-v2 is.
    ours = Tokenizer.from_folder("ours")
    torch.manual_seed(2)
    shape = SHAPE | {"max_position_embeddings": 128, "vocab_size": ours.vocab_size}
    transformers.BertModel(transformers.BertConfig(**shape)).save_pretrained("student")
    ours.save("student")
    student = Checkpoint.load("student")
    student.sentence = SentenceModules.create(16, "mean", max_seq_length=128)
    student.save("student", overwrite=True)
    # A teacher that is wider than the student, as all-mpnet-base-v2 is.
    wide = SHAPE | {"hidden_size": 24, "max_position_embeddings": 128}
    teacher = new_model({"model_type": "bert", **wide}, Tokenizer.from_folder("theirs"), seed=1)
    teacher.sentence = SentenceModules.create(24, "mean", max_seq_length=128)
    teacher.save("teacher")
    # Teachers with the student's tokenizer.
    for seed, name in enumerate(("gte-small", "e5-small", "all-MiniLM-L6-v2")):
        teacher = new_model({"model_type": "bert", **SHAPE, "max_position_embeddings": 128}, ours, seed=seed)
        teacher.sentence = SentenceModules.create(16, "mean", max_seq_length=128)
        teacher.save(f"teachers/{name}")
    write_heads(tmp_path / "heads", say, draw)

    assert {file.stem for file in RECIPES} == set(STEPS)
    scores: dict[str, Any] = {}
    for file in RECIPES:
        out = re.search(r"-o WORK/(\S+)", file.read_text("utf-8"))
        assert out is not None
        assert out[1] == OUTPUTS[file.stem]
        if file.stem == INTERPOLATED:
            interpolate(monkeypatch)
        if file.stem == LABELLED:
            names = ("ner.unlabelled", "ner.labelled")
            files = [f"heads/{name}.jsonl.gz" for name in names]
            import_module("label").main([*files, "--model", "./stage-7", "--device", "cpu"])
        if file.stem in INTERPOLATIONS:
            model, other, weight = INTERPOLATIONS[file.stem]
            import_module("interpolate").main(
                [f"./{model}", f"./{model}-interpolated", "--towards", f"./{other}", "--weight", weight]
            )
        Path(file.name).write_text(shrunk(file))
        run("pretrain", file.name, "-o", out[1], "--device", "cpu")
        done = json.loads(Path(out[1], "training", "run.json").read_text())
        assert done["steps"] == STEPS[file.stem]
        assert done["rolled_back"] == []
        if file.stem == TEACHER:
            continue
        scores |= done["evaluation"]
    import_module("interpolate").main(["./stage-8", "./bertie-small", "--towards", "./stage-6", "--weight", "0.85"])
    assert scores.keys() >= {"loss", "accuracy", "sentiment", "nli", "ner"}

    made = Checkpoint.load("./bertie-small")
    assert set(made.heads) == HEADS
    assert made.sentence is not None
    assert made.max_length == 128
    assert list(made.heads["sentiment"].labels.values()) == ["negative", "neutral", "positive"]
    assert not list(tmp_path.glob("*.training"))
    names = ("student", "stage-3-interpolated", "stage-4")
    first, before, after = (Checkpoint.load(f"./{name}").model.state_dict() for name in names)
    changed = {name for name, tensor in before.items() if not after[name].equal(tensor)}
    assert changed
    assert all(name.startswith("heads.sentiment.") for name in changed)
    last = made.model.state_dict()
    assert all(not last[name].equal(tensor) for name, tensor in first.items() if name.startswith("encoder.blocks.0.ff"))

    run("quantize", "./bertie-small", "-o", f"models/{hub.DEFAULT}", "--precision", "int8")
    report = json.loads(Path("models", hub.DEFAULT, "quantization.json").read_text())
    assert report["hidden"]["min_cosine"] > 0.99
    folders = ("bertie-small", f"models/{hub.DEFAULT}")
    size = [sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) for name in folders]
    assert size[1] < 0.5 * size[0]  # type: ignore[index]
    monkeypatch.setattr(hub, "BUILT_IN", tmp_path / "models")
    capsys.readouterr()
    run("tour", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [step["verb"] for step in found["steps"]] == VERBS
    for step in found["steps"]:
        assert step["tokens_read"] == step["tokens_total"] > 0
        for example in step["examples"]:
            assert all(np.isfinite(score) for _, score in example["predictions"])
