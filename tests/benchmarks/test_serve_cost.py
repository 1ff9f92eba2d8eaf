"""CPU time per request, and models with random weights for serving benchmarks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.serve_servers import Running

from benchmarks import serve_cost, serve_models
from bertie import Embedder
from tests.benchmarks.stub_server import Stub


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_cpu_time_is_that_of_the_server(stub: Stub) -> None:
    stub.plain = True
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], text=True) as process:
        try:
            result = serve_cost.measure(Running("stub", stub.url, process), "/embed", [b"{}"], 4, 1.0)
        finally:
            process.kill()
    assert result["rate"] > 0
    assert result["cpu_us"] == pytest.approx(sum(result["processes"]))
    assert result["cpu_us"] > 0
    (thread,) = result["threads"]
    assert thread["main"]


def test_requests_of_each_endpoint() -> None:
    assert serve_cost.bodies_of("/health", ["a"]) == []
    assert json.loads(serve_cost.bodies_of("/embed", ["a"])[0]) == {"inputs": "a"}
    body = json.loads(serve_cost.bodies_of("/embeddings base64", ["a"])[0])
    assert body == {"input": "a", "model": "model", "encoding_format": "base64"}


def test_profiles_are_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    serve_cost.print_stacks("process 1;main;parse 3\nprocess 1;main;embed 6\nprocess 2;main 1\n")
    own, inclusive = capsys.readouterr().out.split("with callees")
    assert "60.0%  embed" in own
    assert "10.0%  main" in own
    assert "100.0%  main" in inclusive


def test_the_cheap_model_has_replies_of_the_real_size(tmp_path: Path) -> None:
    folder = serve_models.embedder(tmp_path / "model", cheap=True)
    embedder = Embedder.load(str(folder), device="cpu")
    texts = serve_models.book_texts(3, 16)
    embeddings = embedder.embed(texts)
    assert embeddings.shape == (3, serve_models.DIMENSION)
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-5)
    costs = serve_cost.offline(str(folder), texts, 0.05)
    assert costs["embed"] > 0
