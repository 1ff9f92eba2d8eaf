"""The engine of a server on a GPU, without threads: batches in flight, replays of larger recordings, as on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bertie import Embedder
from bertie.serve.engine import DEPTH, Engine
from bertie.serve.lanes import QueuedJob
from bertie.serve.tickets import Ticket
from tests.checkpoints.tiny_sentence import save_bert
from tests.tasks.test_embed import many

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def submit(engine: Engine, embedder: Embedder, text: str) -> QueuedJob:
    chunk = embedder.pipeline.encode(list(embedder.inputs([text], embedder.options())))
    job = engine.make_job(Ticket(), embedder, chunk.windows, embedder.parameters(chunk), on_done=lambda job: None)
    engine.put(job)
    return job


def test_embeddings(tmp_path: Path) -> None:
    texts, folder = many(200), save_bert(tmp_path, limit=32)
    expected = Embedder.load(folder, device="cpu").embed(texts)
    embedder = Embedder.load(folder, device="cuda")
    engine = Engine(embedder.model, budget=512, max_wait=60.0, workers=0)
    while engine.advance():
        pass
    assert engine.load().warm
    jobs = []
    for text in texts:
        jobs.append(submit(engine, embedder, text))
        if len(jobs) % 7 == 0:
            engine.advance()
            assert len(engine._launched) <= DEPTH
    while engine.advance():
        pass
    assert [job.error for job in jobs] == [None] * len(texts)
    assert all(len(job.outputs) == 1 for job in jobs)
    np.testing.assert_allclose(np.stack([job.outputs[0] for job in jobs]), expected, atol=2e-5)
    engine.close()
