"""The command line with SPLADE and ColBERT models: embed, rerank, inspect, index, search, train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

import bertie
from bertie.cli import main
from tests.checkpoints.test_splade import splade_folder
from tests.tasks import tiny

COLBERT = str(Path(__file__).parent.parent / "parity" / "pylate" / "model")
TEXTS = ["the river and the mountain", "Emma wrote a letter."]


@pytest.fixture(scope="module")
def splade(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(splade_folder(tmp_path_factory.mktemp("splade"))[0])


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) != 0
    return capsys.readouterr().err


def test_embed_sparse(splade: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    embedder = bertie.SparseEmbedder.load(splade)
    records = [
        json.loads(line) for line in run(capsys, "embed", *TEXTS, "-m", splade, "-k", "3", "--json").splitlines()
    ]
    for record, result in zip(records, embedder.embed(TEXTS, top_k=3), strict=True):
        assert record["tokens"] == list(result.tokens)
        np.testing.assert_array_equal(np.float32(record["weights"]), result.weights)
    assert "count" in run(capsys, "embed", TEXTS[0], "-m", splade).splitlines()[0]
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    output = str(tmp_path / "terms.npz")
    run(capsys, "embed", str(tmp_path / "texts.txt"), "-m", splade, "-o", output)
    matrix = embedder.matrix(embedder.embed(TEXTS))
    np.testing.assert_array_equal(scipy.sparse.load_npz(output).toarray(), [matrix.dense(0), matrix.dense(1)])
    assert "exists; --overwrite replaces it" in refused(capsys, "embed", TEXTS[0], "-m", splade, "-o", output)
    assert "--dimension is not for sparse" in refused(capsys, "embed", TEXTS[0], "-m", splade, "--dimension", "4")
    assert "use bertie.SparseEmbedder" in refused(capsys, "similarity", *TEXTS, "-m", splade)


def test_embed_and_rerank_with_late_interaction(capsys: pytest.CaptureFixture[str]) -> None:
    late = bertie.LateInteraction.load(COLBERT)
    for flag, embed in (((), late.embed_documents), (("--queries",), late.embed_queries)):
        record = json.loads(run(capsys, "embed", "the cat", *flag, "-m", COLBERT, "--json"))
        np.testing.assert_array_equal(np.float32(record["vectors"]), embed("the cat"))
        assert len(record["tokens"]) == len(record["vectors"])
    assert "vector" in run(capsys, "embed", "the cat", "-m", COLBERT)
    lines = run(capsys, "rerank", "cats eat", *TEXTS, "-m", COLBERT, "--json").splitlines()
    assert [json.loads(line)["score"] for line in lines] == [one.score for one in late.rerank("cats eat", TEXTS)]
    assert "--pooling is not for a late-interaction model" in refused(
        capsys, "embed", "a", "--pooling", "cls", "-m", COLBERT
    )


def test_inspect(splade: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "SPLADE: weights of 160 terms (bertie.SparseEmbedder)" in run(capsys, "inspect", splade)
    text = run(capsys, "inspect", COLBERT)
    assert "ColBERT: 8 dimensions per token, queries expanded to 12 tokens (bertie.LateInteraction)" in text
    assert json.loads(run(capsys, "inspect", COLBERT, "--json"))["late_interaction"]["query_prefix"] == "[Q] "


def test_index_and_search(splade: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "docs" / f"{i}.txt").write_text(text)
    index, docs = str(tmp_path / "index"), str(tmp_path / "docs")
    dense = str(tiny.save(tmp_path / "dense", "wordpiece", ""))
    create = ["index", docs, "-o", index, "-m", dense, "--chunk-size", "40"]
    run(capsys, *create, "--sparse", splade, "--late-interaction", COLBERT)
    assert list((tmp_path / "index" / "sparse").iterdir())
    assert list((tmp_path / "index" / "tokens").iterdir())
    hits = json.loads(run(capsys, "search", index, "river", "--mode", "sparse", "--json"))["hits"]
    assert set(hits[0]["scores"]) == {"sparse"}
    hits = json.loads(run(capsys, "search", index, "river", "--rerank", "--json"))["hits"]
    scores = {Path(hit["document"]).name: hit["scores"]["rerank"] for hit in hits}
    late = bertie.LateInteraction.load(COLBERT)
    np.testing.assert_allclose([scores["0.txt"], scores["1.txt"]], late.similarity("river", TEXTS), atol=0.02)
    run(capsys, *create, "--refresh")
    assert "which cannot be changed" in refused(capsys, *create, "--refresh", "--sparse", "another")


@pytest.mark.filterwarnings("ignore:lr=")
@pytest.mark.parametrize(("task", "kind"), [("sparse", "SparseEmbedder"), ("late-interaction", "LateInteraction")])
def test_train(task: str, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = tiny.sentences(40)
    rows = [{"query": a, "passage": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = str(tiny.save(tmp_path / "mlm", "wordpiece", "ForMaskedLM"))
    data = str(tmp_path / "pairs.jsonl")
    argv: list[Any] = ["train", task, data, "--dev", data, "-m", model, "-o", str(tmp_path / "out"), "--epochs", "1"]
    record = json.loads(run(capsys, *argv, "--batch-size", "8", "--no-baselines", "--json"))
    assert record
    assert type(bertie.load(tmp_path / "out")).__name__ == kind
    assert type(bertie.load(tmp_path / "out")).__name__ in (tmp_path / "out" / "README.md").read_text()
