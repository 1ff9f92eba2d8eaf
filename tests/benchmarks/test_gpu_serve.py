"""The GPU benchmark of the server: its models, its time limit, its results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu import serve
from benchmarks.serve_servers import Running, request_bodies

from benchmarks import serve_models
from bertie import Classifier
from tests.benchmarks.stub_server import Stub


def options(**changes: Any) -> argparse.Namespace:
    defaults = {"limit": 60.0, "json": None, "seconds": 0.3, "wrk_threads": 1, "processes": 1}
    return argparse.Namespace(**defaults | changes)


def test_what_does_not_fit_is_skipped_and_results_are_kept(tmp_path: Path) -> None:
    run = serve.Run(options(limit=5.0, json=tmp_path / "out.json"))
    assert run.has_time(1, "first")
    for rate in (10.0, 30.0, 20.0):
        run.record("embeddings, 1 per request", {"rate": rate, "failed": {}, "p99_ms": None})
    assert not run.has_time(100, "second")
    run.save()
    state = json.loads((tmp_path / "out.json").read_text())
    assert state["medians"] == {"embeddings, 1 per request": {"rate": 20.0}}
    assert len(state["runs"]["embeddings, 1 per request"]) == 3
    assert state["skipped"][0].startswith("second: ")


def test_the_table_relates_rates_to_offline(capsys: pytest.CaptureFixture[str]) -> None:
    run = serve.Run(options())
    run.record("embeddings, 32 per request", {"rate": 600.0, "p50_ms": 1.0, "p99_ms": 2.0, "cpu_us_per_request": 5.0})
    run.record("embeddings, offline", {"rate": 1000.0})
    serve.print_table(run)
    assert "| embeddings, 32 per request | 600 | 60% | 1.0 | 2.0 | 5 |" in capsys.readouterr().out


@pytest.mark.parametrize("generator", ["wrk", "Python"])
def test_closed_loop(stub: Stub, generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.plain = True
    if generator == "Python":
        monkeypatch.setattr("shutil.which", lambda name: None)
    elif serve.generator_name() != "wrk":
        pytest.skip("wrk is not installed")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        up = Running("stub", stub.url, process)
        bodies = request_bodies(["a", "b"], 2)
        result = serve.closed(up, "/embed", bodies, 4, options(seconds=1.0), 2)
        best = serve.tune(serve.Run(options(seconds=1.0)), up, "/embed", bodies, [1, 4])
        process.communicate("\n")
    assert result["rate"] == pytest.approx(2 * result["requests"])
    assert result["requests"] > 0
    assert result["cpu_us_per_request"] >= 0
    assert best == 4, "each request takes as long whatever the number of connections"


def test_the_classifier_reads_16_tokens(tmp_path: Path) -> None:
    folder = serve_models.deberta_classifier(tmp_path / "model", tiny=True)
    texts = serve.texts_of_length(str(folder), 16, 8)
    model = Classifier.load(str(folder), device="cpu")
    assert [len(encoding) for encoding in model.tokenizer.encode_batch(texts)] == [16] * 8
    assert len(model.classify(texts)) == 8


def test_the_packed_tokenizer_is_used(tmp_path: Path) -> None:
    serve_models.deberta_classifier(tmp_path / "first", tiny=True)
    serve_models.copy_tokenizer(tmp_path / "first", tmp_path / "packed")
    folder = serve_models.deberta_classifier(tmp_path / "second", tiny=True, tokenizer=tmp_path / "packed")
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "packed" / "tokenizer.json").read_bytes()
