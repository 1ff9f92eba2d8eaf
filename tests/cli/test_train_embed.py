"""`bertie train embed`: from files to a folder of sentence-transformers with its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.cli import main
from bertie.tasks import Embedder
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.cli.toys import write

QUICK = ["--epochs", "1", "--batch-size", "8", "--lr", "5e-5", "--resamples", "50"]


def pairs(count: int, shift: int = 0) -> list[dict[str, Any]]:
    words = ["cat", "dog", "mat", "query", "find"]
    more = ["sat", "ran", "on", "the"]
    return [
        {
            "anchor": f"{words[i % 5]} {more[(i // 5 + shift) % 4]} {'a ' * (i // 20 + 1)}".strip(),
            "positive": f"the {words[i % 5]} {more[(i // 5 + shift) % 4]} {'on ' * (i // 20 + 1)}".strip(),
            "negative": f"{words[(i + 1) % 5]} {more[(i // 5) % 4]}",
        }
        for i in range(count)
    ]


def scored(count: int) -> list[dict[str, Any]]:
    return [
        {"sentence1": item["anchor"], "sentence2": item["positive" if i % 3 else "negative"], "score": 5.0 * (i % 3)}
        for i, item in enumerate(pairs(count))
    ]


def run(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def test_pairs(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, count in (("train", 24), ("dev", 8), ("test", 10)):
        write(here / f"{split}.jsonl", pairs(count, shift=len(split)))
    argv = ["train", "embed", "train.jsonl", "--dev", "dev.jsonl", "--test", "test.jsonl", "-m", models["fill"], *QUICK]
    more = ["--loss", "infonce:scale=10", "--matryoshka", "8,4", "--pooling", "cls", "--baseline", models["embed"]]
    assert main([*argv, *more, "--output", "out", "--json", "--seeds", "2"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["task"] == "embed"
    embedder = Embedder.load("out")
    assert embedder.modules.pooling.modes == ("cls",)
    for split in ("dev", "test"):
        quick = training_for(embedder).metrics(read_dataset("embed", f"{split}.jsonl", training=False))
        assert {name: score["value"] for name, score in output[split].items()} == pytest.approx(quick)
        assert set(quick) == {"recall_1", "recall_10", "mrr_10", "accuracy"}
    assert set(output["baseline"]["difference"]) == set(quick)
    card = Path("out/README.md").read_text()
    assert "SentenceTransformer(" in card
    assert 'pipeline_tag: "sentence-similarity"' in card
    assert "infonce:scale=10" in card
    assert Path("out/report.html").is_file()
    assert json.loads(Path("out/report.json").read_text())["kind"] == "retrieval"

    from sentence_transformers import SentenceTransformer

    texts = [row["anchor"] for row in pairs(5)]
    theirs = SentenceTransformer("out", device="cpu").encode(texts)
    np.testing.assert_allclose(embedder.embed(texts), theirs, atol=1e-5)


def test_a_recipe_with_scores(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "train.jsonl", scored(24))
    write(here / "test.jsonl", scored(9))
    (here / "sts.toml").write_text(
        'task = "embed"\n[data]\ntrain = "train.jsonl"\ntest = "test.jsonl"\n'
        '[training]\nepochs = 1\nloss = "cosent"\nmatryoshka = [8]\ndev_fraction = 0.2\n'
    )
    assert main(["train", "--recipe", "sts.toml", "-m", models["embed"], "--output", "out", "--resamples", "20"]) == 0
    output = capsys.readouterr()
    assert "spearman" in output.out
    assert json.loads(Path("out/report.json").read_text())["recipe"]["matryoshka"] == [8]


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        (["--loss", "nce"], "loss='nce' must be one of infonce"),
        (["--loss", "cosent"], "CoSENTLoss takes two texts and a score per row"),
        (["--matryoshka", "a,b"], "invalid N,N,…|none value"),
        (
            ["--test", "scores.jsonl", "--dev", "train.jsonl"],
            "has pairs and scores.jsonl has scores; use scores in both",
        ),
        (["--columns", "anchor=query"], "has no column 'query'"),
        (["--pooling", "sum"], "pooling='sum' must be one of cls, mean"),
    ],
)
def test_refusals(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], output: str
) -> None:
    write(here / "train.jsonl", pairs(8))
    write(here / "scores.jsonl", scored(8))
    assert run(["train", "embed", "train.jsonl", "-m", models["embed"], "--output", "out", *QUICK, *flags]) != 0
    assert output in capsys.readouterr().err
    assert {item.name for item in here.iterdir()} == {"train.jsonl", "scores.jsonl"}


def test_other_tasks_have_no_loss(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "train.jsonl", [{"text": "cat", "label": "a"}, {"text": "dog", "label": "b"}])
    argv = ["train", "classify", "train.jsonl", "-m", models["embed"], "--output", "out", "--loss", "infonce"]
    assert run([*argv, *QUICK]) != 0
    assert "loss='infonce' is for training an Embedder" in capsys.readouterr().err


def test_mine(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pairs(20)
    write(here / "pairs.jsonl", [{"query": row["anchor"], "positive": row["positive"]} for row in rows])
    write(here / "corpus.jsonl", [{"text": row[name]} for row in rows for name in ("positive", "negative")])
    argv = ["mine", "pairs.jsonl", "--corpus", "corpus.jsonl", "-m", models["embed"], "--negatives", "2"]
    assert main([*argv, "--max-ratio", "1", "-o", "mined.jsonl", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    results = [json.loads(line) for line in Path("mined.jsonl").read_text().splitlines()]
    assert output["rows"] == len(results) > 0
    assert output["rows"] + output["incomplete"] == 20
    own = {row["anchor"]: row["positive"] for row in rows}
    for row in results:
        assert row["positive"] == own[row["query"]]
        assert len(set(row["negatives"])) == 2
        assert own[row["query"]] not in row["negatives"]
    assert main(["train", "embed", "mined.jsonl", "-m", models["embed"], "--output", "out", *QUICK]) == 0
    assert main([*argv, "--teacher", models["rerank"], "--max-ratio", "1", "-o", "taught.jsonl"]) == 0
    assert read_dataset("embed", "taught.jsonl").inputs == "lists"
    assert run([*argv, "-o", "mined.jsonl"]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert run([*argv, "-o", "mined.csv"]) == 2
