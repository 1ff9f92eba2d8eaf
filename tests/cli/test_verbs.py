"""Each verb on a tiny real model: what it prints is what the task says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertie
from bertie.cli import main

LONG = " ".join(["the cat sat on the mat"] * 20)  # 120 tokens, and the models read 40
VERBS = ("fill", "embed", "classify", "tag", "answer", "rerank", "similarity", "tokenize")
CONTEXT = ["--context", "the dog ran on a mat"]


def lines(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main([*argv, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def plain(result: Any) -> Any:
    return json.loads(json.dumps(asdict(result)))


def test_embed(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the cat sat", "a dog", LONG]
    records = lines(capsys, "embed", *texts, "-m", models["embed"])
    assert [record["row"] for record in records] == [1, 2, 3]
    assert np.array_equal(
        np.array([record["vector"] for record in records], np.float32), _embedder(models).embed(texts)
    )
    assert [record["windows"] for record in records[:2]] == [1, 1]
    assert records[2]["windows"] > 1
    assert records[2]["tokens_total"] == records[2]["tokens_read"] == 120


def test_embed_options(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--pooling", "cls", "--normalize", "--dimension", "4", "--overflow", "truncate"]
    records = lines(capsys, "embed", LONG, "-m", models["embed"], *options)[0]
    ours = _embedder(models, pooling="cls", normalize=True, dimension=4, overflow="truncate").embed([LONG])
    assert np.array_equal(np.array([records["vector"]], np.float32), ours)
    assert np.isclose(np.linalg.norm(records["vector"]), 1)
    assert records["tokens_read"] == 38


def _embedder(models: dict[str, str], **options: Any) -> bertie.Embedder:
    return bertie.Embedder.load(models["embed"], **options)


def test_embed_with_a_prompt(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-m", models["embed"], "--json"]
    assert main(["embed", "cat sat", "--prompt", "the ", *argv]) == 0
    prompted = json.loads(capsys.readouterr().out)
    assert main(["embed", "the cat sat", *argv]) == 0
    assert prompted["vector"] == json.loads(capsys.readouterr().out)["vector"]
    with pytest.raises(SystemExit, match="2"):
        main(["embed", "cat sat", "--prompt", "the ", "--prompt-name", "query", *argv])


def test_embed_tokens(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    ours = _embedder(models).token_embeddings(["the cat sat", LONG], progress=False)
    records = lines(capsys, "embed", "the cat sat", LONG, "--tokens", "-m", models["embed"])
    for record, result in zip(records, ours, strict=True):
        assert np.array_equal(np.array(record["vectors"], np.float32), result.vectors)
        assert record["tokens"] == [token.text for token in result.tokens]
    assert main(["embed", "the cat sat", "--tokens", "-m", models["embed"], "-o", "out.parquet"]) == 0
    assert main(["embed", "the cat sat", "--tokens", "-m", models["embed"]]) == 0
    assert "cat" in capsys.readouterr().out
    assert main(["embed", "a", "--tokens", "--pooling", "cls", "-m", models["embed"]]) == 2
    assert main(["embed", "a", "--tokens", "-o", "out.npy", "-m", models["embed"]]) != 0


def test_attend(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    ours = _embedder(models).attention("the cat sat", layer=0, head=1)
    (record,) = lines(capsys, "attend", "the cat sat", "--layer", "0", "--head", "1", "-m", models["embed"])
    np.testing.assert_allclose(record["weights"], ours.weights, atol=1e-5)
    assert [token["text"] for token in record["tokens"]] == [token.text for token in ours.tokens]
    assert main(["attend", "the cat sat", "-k", "2", "-m", models["embed"]]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("mean over heads")
    assert len(printed) == 2 + len(ours.tokens)
    assert main(["attend", "the cat sat", "--layer", "99", "-m", models["embed"]]) == 1
    assert "layer=99 must lie between 0 and" in capsys.readouterr().err


def test_too_many_texts_are_refused_before_they_are_embedded(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertie.cli.similarity.MAX_TEXTS", 3)
    (here / "many.csv").write_text("text\n" + "a\n" * 4)
    with monkeypatch.context() as patch:
        patch.setattr("bertie.cli.similarity.load", lambda *args, **options: pytest.fail("loads the model"))
        assert main(["similarity", "many.csv", "-m", models["embed"]]) == 1
    assert "many.csv has over 3 texts, too many for a similarity matrix" in capsys.readouterr().err
    (here / "few.csv").write_text("id,text\n1,a\n2,\n3,cat\n4,dog\n")
    assert main(["similarity", "few.csv", "-m", models["embed"], "--skip-empty", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_fill(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the [MASK] sat on the [MASK]", "a [MASK]"]
    records = lines(capsys, "fill", *texts, "-m", models["fill"], "--top-k", "2")
    ours = bertie.MaskedLM.load(models["fill"]).fill(texts, top_k=2)
    assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]


def test_classify_pairs_with_a_head_of_pretraining(
    models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pairs.jsonl").write_text('{"text_a": "the cat sat", "text_b": "on the mat"}\n')
    (record,) = lines(capsys, "classify", "pairs.jsonl", "--head", "nsp", "-m", models["nsp"])
    ours = bertie.Classifier.load(models["nsp"], head="nsp").classify([("the cat sat", "on the mat")])[0]
    assert record == {"row": 1} | plain(ours)
    assert set(record["scores"]) == {"is_next", "not_next"}
    assert main(["classify", "the cat sat", "--head", "nsp", "-m", models["nsp"]]) == 1
    assert "the text must be a pair of texts, which the head 'nsp' takes" in capsys.readouterr().err


def test_choose(models: dict[str, str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = ("the cat sat", ["on the mat", "a dog ran"])
    ours = {"row": 1} | plain(bertie.Chooser.load(models["choose"]).choose(*question))
    assert lines(capsys, "choose", question[0], *question[1], "-m", models["choose"]) == [ours]
    row = {"question": question[0], "choices": question[1]}
    Path("in.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, "choices": ["a"]}) + "\n")
    assert main(["choose", "in.jsonl", "-m", models["choose"], "-o", "out.jsonl"]) == 1
    assert "in.jsonl, row 2: the context has 1 choice; give two or more" in capsys.readouterr().err
    assert lines(capsys, "choose", "in.jsonl", "-m", models["choose"], "--on-error", "skip") == [ours]
    Path("in.csv").write_text('context,choices\nthe cat sat,"[""on the mat"", ""a dog ran""]"\n')
    assert lines(capsys, "choose", "in.csv", "-m", models["choose"]) == [ours]
    assert main(["choose", "in.csv", "-m", models["choose"]]) == 0
    assert capsys.readouterr().out.count("→") == 1
    assert main(["choose", "only a context", "-m", models["choose"]]) == 2


def test_detect_replaced(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the cat sat", LONG]
    ours = bertie.ReplacedTokenDetector.load(models["detect-replaced"]).detect(texts)
    records = lines(capsys, "detect-replaced", *texts, "-m", models["detect-replaced"])
    assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]
    assert records[1]["windows"] > 1
    for threshold, count in (("0", 3), ("1", 0)):
        assert main(["detect-replaced", texts[0], "--threshold", threshold, "-m", models["detect-replaced"]]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 1 + count


def test_fill_candidates_of_several_tokens(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = lines(capsys, "fill", "a [MASK]", "-m", models["fill"], "--candidates", "cat, the dog")
    ours = bertie.MaskedLM.load(models["fill"]).fill("a [MASK]", candidates=["cat", "the dog"])
    assert record == {"row": 1} | plain(ours)
    assert main(["fill", "a [MASK]", "-m", models["fill"], "--candidates", "cat,the dog"]) == 0
    assert "the dog" in capsys.readouterr().out


def test_fill_candidates(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "fill", "a [MASK]", "-m", models["fill"], "--candidates", "cat,dog")[0]
    assert {record["token"] for record in records["masks"][0]["candidates"]} == {"cat", "dog"}


def test_fill_scores(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "fill", "the cat sat", "a dog", "-m", models["fill"], "--score")
    ours = bertie.MaskedLM.load(models["fill"]).pseudo_log_likelihood(["the cat sat", "a dog"])
    assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]


def test_fill_every_token(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "fill", "the cat sat", "a dog", "-m", models["fill"], "--every-token", "--top-k", "2")
    ours = bertie.MaskedLM.load(models["fill"]).predict_tokens(["the cat sat", "a dog"], top_k=2)
    assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]


def test_classify_explain(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "classify", "the cat sat", "a dog", "-m", models["classify"], "--explain")
    ours = bertie.Classifier.load(models["classify"]).attribute(["the cat sat", "a dog"])
    assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]


def test_classify(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "classify", "the cat sat", "a dog", "-m", models["classify"])
    ours = bertie.Classifier.load(models["classify"]).classify(["the cat sat", "a dog"])
    assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]


def test_classify_pairs(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    Path("pairs.tsv").write_text("id\ttext_a\ttext_b\nx7\tthe cat\ta dog\n")
    records = lines(capsys, "classify", "pairs.tsv", "-m", models["classify"])
    ours = bertie.Classifier.load(models["classify"]).classify([("the cat", "a dog")])
    assert records == [{"row": 1, "id": "x7"} | plain(ours[0])]
    Path("named.csv").write_text("p,h\nthe cat,a dog\n")
    named = lines(capsys, "classify", "named.csv", "-m", models["classify"], "--text-a", "p", "--text-b", "h")
    assert named == [{"row": 1} | plain(ours[0])]


def test_zero_shot_classification(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["classify", "the cat sat", "-m", models["nli"], "--labels", "cat, dog", "--template", "a {}"]
    argv.append("--multi-label")
    records = lines(capsys, *argv)
    ours = bertie.ZeroShot.load(models["nli"]).classify(
        ["the cat sat"], ["cat", "dog"], template="a {}", multi_label=True
    )
    assert records == [{"row": 1} | plain(ours[0])]
    assert main(["classify", "the cat sat", "-m", models["nli"], "--labels", "cat", "dog"]) == 0  # dog is a text
    assert "--labels has one label" in capsys.readouterr().err


def test_tag(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "tag", "the cat sat on the mat", "-m", models["tag"], "--aggregation-strategy", "first")
    ours = bertie.Tagger.load(models["tag"]).tag(["the cat sat on the mat"], aggregation_strategy="first")
    assert records == [{"row": 1} | plain(ours[0])]
    assert records[0]["spans"]


def test_answer(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    Path("long.txt").write_text(LONG + "\n" + LONG)
    Path("many.jsonl").write_text('{"text": "a dog ran"}\n{"text": "the cat sat"}\n')
    reader = bertie.Reader.load(models["answer"])
    options = {"top_k": 2, "max_answer_length": 3, "no_answer_threshold": 0.5}
    flags = ["--top-k", "2", "--max-answer-length", "3", "--no-answer-threshold", "0.5", "-m", models["answer"]]
    for context, documents in (
        ("the dog ran", "the dog ran"),
        ("long.txt", LONG + "\n" + LONG),
        ("many.jsonl", ["a dog ran", "the cat sat"]),
    ):
        records = lines(capsys, "answer", "the cat", "a dog", "--context", context, *flags)
        ours = reader.answer([("the cat", documents), ("a dog", documents)], **options)  # type: ignore[call-overload]
        assert records == [{"row": i} | plain(result) for i, result in enumerate(ours, 1)]


def test_answer_from_columns(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    Path("q.jsonl").write_text('{"id": 5, "q": "the cat", "context": "a dog sat on the mat"}\n')
    records = lines(capsys, "answer", "q.jsonl", "--question-column", "q", "-m", models["answer"])
    ours = bertie.Reader.load(models["answer"]).answer([("the cat", "a dog sat on the mat")])
    assert records == [{"row": 1, "id": 5} | plain(ours[0])]


def test_rerank(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    documents = ["the cat sat", "a dog ran", "mat", LONG]
    ours = bertie.Reranker.load(models["rerank"]).rerank("find a cat", documents)
    records = lines(capsys, "rerank", "find a cat", *documents, "-m", models["rerank"])
    assert [(record["row"] - 1, record["score"], record["text"], record["windows"]) for record in records] == [
        (document.index, document.score, document.text, document.windows) for document in ours
    ]
    Path("docs.txt").write_text("\n".join(documents))
    assert lines(capsys, "rerank", "find a cat", "docs.txt", "-m", models["rerank"]) == records
    assert lines(capsys, "rerank", "find a cat", "docs.txt", "--top-k", "2", "-m", models["rerank"]) == records[:2]


def test_rerank_pairs_in_order(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    Path("pairs.csv").write_text("query,passage\nfind a cat,the cat sat\nfind a dog,mat\n")
    records = lines(capsys, "rerank", "pairs.csv", "-m", models["rerank"])
    pairs = [("find a cat", "the cat sat"), ("find a dog", "mat")]
    assert [record["score"] for record in records] == pytest.approx(
        bertie.Reranker.load(models["rerank"]).predict(pairs).tolist()
    )
    assert [record["row"] for record in records] == [1, 2]


def test_similarity(models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path) -> None:
    texts = ["the cat sat", "a dog", "mat"]
    ours = _embedder(models).similarity(texts)
    records = lines(capsys, "similarity", *texts, "-m", models["similarity"])
    assert np.allclose([record["scores"] for record in records], ours, atol=1e-6)
    assert {"tokens_total", "tokens_read", "windows", "row"} <= set(records[0])
    Path("pairs.csv").write_text("text_a,text_b\nthe cat sat,a dog\nmat,mat\n")
    pairs = lines(capsys, "similarity", "pairs.csv", "-m", models["similarity"])
    assert np.allclose([record["score"] for record in pairs], [ours[0, 1], 1], atol=1e-6)


def test_tokenize(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "tokenize", "the cat", LONG, "-m", models["tokenize"])
    assert records[0]["tokens"] == ["[CLS]", "the", "cat", "[SEP]"]
    assert records[0]["ids"] == [2, 6, 7, 3]
    assert records[0]["offsets"][1:3] == [[0, 3], [4, 7]]
    assert records[0]["tokens_total"] == 2
    assert records[1]["windows"] == lines(capsys, "embed", LONG, "-m", models["embed"])[0]["windows"] > 1


@pytest.mark.parametrize("verb", VERBS)
def test_every_result_has_token_counts(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, verb: str
) -> None:
    columns = {"answer": ("question", "context"), "rerank": ("query", "passage")}.get(verb, ("text",))
    text = "the [MASK] sat"
    Path("in.jsonl").write_text(json.dumps(dict.fromkeys(columns, text) | {"id": "a1"}))
    records = lines(capsys, verb, "in.jsonl", "-m", models[verb])[0]
    assert {"row", "id", "tokens_total", "tokens_read", "windows"} <= set(records)
    assert records["tokens_read"] == records["tokens_total"] > 0
    assert records["id"] == "a1"


@pytest.mark.parametrize("verb", VERBS)
def test_the_first_example_of_the_help_runs(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path, verb: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    example = capsys.readouterr().out.split("example:\n")[1].splitlines()[0]
    program, *argv = shlex.split(example, comments=True)
    assert program == "bertie"
    assert "-m" not in argv  # it is for the built-in model
    assert main([*argv, "-m", models[verb]]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("row  ")
    assert len(out.splitlines()) > 1
    assert err == ""


def test_parsing_imports_no_package() -> None:
    code = (
        "import sys, bertie.cli; from bertie.cli.main import build_parser; build_parser(); "
        "print([m for m in ('torch', 'numpy', 'tokenizers', 'pyarrow', 'zstandard') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_flags_between_texts(models: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    records = lines(capsys, "embed", "the cat", "-m", models["embed"], "a dog", "--pooling", "cls", "mat")
    assert len(records) == 3


def test_all_examples_of_the_help_parse() -> None:
    from bertie.cli.main import GROUPS, build_parser

    for module in (module for modules in GROUPS.values() for module in modules):
        for line in module.EXAMPLE.splitlines():
            line = re.sub(r"^\s*torchrun --no-python .*? bertie ", "bertie ", line)
            command = next(part for part in re.split(" [|>] ", line) if part.strip().startswith("bertie "))
            build_parser().parse_args(shlex.split(command, comments=True)[1:])


def test_the_only_text_column_is_the_default(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    Path("in.csv").write_text("id,stars,review\n1,5,the cat\n2,4,a dog\n")
    records = lines(capsys, "embed", "in.csv", "-m", models["embed"])
    assert [record["id"] for record in records] == ["1", "2"]
    named = lines(capsys, "embed", "in.csv", "--column", "stars", "-m", models["embed"])
    assert named[0]["vector"] != records[0]["vector"]


def test_the_error_names_the_row_that_is_too_long(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    Path("in.txt").write_text(f"the cat\n{LONG}\n")
    assert main(["embed", "in.txt", "-m", models["embed"], "--overflow", "error"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("bertie: in.txt, row 2: the text has 122 tokens")
    assert "--overflow window" in err


def test_the_error_names_the_row_without_a_mask(
    models: dict[str, str], capsys: pytest.CaptureFixture[str], here: Path
) -> None:
    Path("in.txt").write_text("the [MASK]\na cat\n")
    assert main(["fill", "in.txt", "-m", models["fill"]]) == 1
    assert capsys.readouterr().err.startswith("bertie: in.txt, row 2: ")
