"""Models with relative positions on a CPU: the compiled encoder against PyTorch, transformers and
sentence-transformers.

    python -m benchmarks.relative --data DATA [--model FOLDER] [--threads 2] [--repeats 3]

DeBERTa-v3-small's shape with random weights encodes 64 texts of random tokens, against transformers; with --model, a
folder such as all-mpnet-base-v2 embeds 96 real texts, against sentence-transformers. The peers get batches of 1, 4 and
16 texts sorted by length, in fp32. Rounds are interleaved; median texts/s, and cosine similarity to the peer's
embeddings.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.cpu import mixed, padded
from bertie import Batch, Checkpoint, Embedder
from bertie.config import Precision
from bertie.ops import disable
from bertie.text.batch import pack

Encode = Callable[[], np.ndarray]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
SIZES = (1, 4, 16)


def deberta() -> tuple[int, dict[str, Encode]]:
    """Embeddings are the mean of the hidden states."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    shape = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
    relative = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    attention = {
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "type_vocab_size": 0,
    }
    peer = DebertaV2Model(
        DebertaV2Config(vocab_size=5000, max_position_embeddings=512, **shape, **relative, **attention)
    ).eval()
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(87), 0.75, size=64).astype(int), 4, 512)
    ids = [draw.integers(10, 5000, n).tolist() for n in lengths]

    def bertie(folder: str, precision: Precision) -> Encode:
        model = Checkpoint.load(folder, precision=precision, head="none", device="cpu").model

        def encode() -> np.ndarray:
            out = np.empty((len(ids), 768), np.float32)
            with torch.inference_mode():
                for group in pack([len(text) for text in ids], 4096):
                    batch = Batch.from_ids([ids[i] for i in group])
                    states = torch.split(model.hidden(batch).float(), batch.lengths)
                    out[group] = np.stack([state.mean(0).numpy() for state in states])
            return out

        return encode

    def peer_encode(size: int) -> Encode:
        def encode() -> np.ndarray:
            out, order = np.empty((len(ids), 768), np.float32), np.argsort(-lengths)
            with torch.inference_mode():
                for start in range(0, len(ids), size):
                    rows = order[start : start + size]
                    input_ids, mask = (torch.from_numpy(x) for x in padded([ids[i] for i in rows]))
                    states = peer(input_ids=input_ids, attention_mask=mask).last_hidden_state
                    out[rows] = np.stack([row[: lengths[i]].mean(0) for row, i in zip(states, rows, strict=True)])
            return out

        return encode

    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        calls = {name: bertie(folder, name) for name in PRECISIONS}
    return len(ids), calls | {f"transformers, {size}": peer_encode(size) for size in SIZES}


def sentences(model: Path, data: Path) -> tuple[int, dict[str, Encode]]:
    from sentence_transformers import SentenceTransformer

    texts, peer = mixed(data, 96), SentenceTransformer(str(model), device="cpu")

    def bertie(precision: Precision) -> Encode:
        embedder = Embedder.load(model, precision=precision, overflow="truncate")
        return lambda: embedder.embed(texts)

    def peer_encode(size: int) -> Encode:
        return lambda: peer.encode(texts, batch_size=size, normalize_embeddings=True)

    calls = {name: bertie(name) for name in PRECISIONS}
    return len(texts), calls | {f"sentence-transformers, {size}": peer_encode(size) for size in SIZES}


def without_native(encode: Encode) -> Encode:
    """The same by PyTorch, without the compiled encoder."""

    def call() -> np.ndarray:
        with disable("native.encoder"):
            return encode()

    return call


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.relative", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the datasets, for --model")
    parser.add_argument("--model", type=Path, help="folder of an embedding model with relative positions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.model is not None and options.data is None:
        parser.error("--model needs --data")
    torch.set_num_threads(options.threads)
    count, calls = deberta() if options.model is None else sentences(options.model, options.data)
    calls["PyTorch, fp32"] = without_native(calls["fp32"])
    times: dict[str, list[float]] = {name: [] for name in calls}
    embeddings = {name: encode() for name, encode in calls.items()}  # also packs the weights
    for _ in range(options.repeats):
        for name, encode in calls.items():
            start = time.perf_counter()
            encode()
            times[name].append(time.perf_counter() - start)
    expected = next(rows for name, rows in embeddings.items() if name.endswith(", 1"))
    print("| | texts/s | cosine to the peer, mean (min) |\n|---|---|---|")
    for name, rows in embeddings.items():
        norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(expected, axis=1)
        cosine = (rows * expected).sum(1) / norms
        print(f"| {name} | {count / statistics.median(times[name]):.1f} | {cosine.mean():.5f} ({cosine.min():.4f}) |")


if __name__ == "__main__":
    main()
