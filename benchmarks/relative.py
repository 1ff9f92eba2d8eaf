"""Models with relative positions on a CPU: the compiled encoder beside the plain one and beside their own libraries.

    python -m benchmarks.relative --data DATA [--model FOLDER] [--threads 2] [--repeats 3]

DeBERTa-v3-small's shape with random weights reads 64 texts of random tokens, beside transformers; with --model a folder
such as all-mpnet-base-v2's reads 96 real ones, beside sentence-transformers. The peers get batches of 1, 4 and 16 texts
sorted by length, in fp32. Rounds are interleaved; texts a second by the median, and cosines to the peer's vectors.
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

Read = Callable[[], np.ndarray]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")
SIZES = (1, 4, 16)


def deberta() -> tuple[int, dict[str, Read]]:
    """A vector a text is the mean of its states."""
    from transformers import DebertaV2Config, DebertaV2Model

    torch.manual_seed(0)
    shape = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
    relative = {"relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    own = {"share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0}
    peer = DebertaV2Model(
        DebertaV2Config(vocab_size=5000, max_position_embeddings=512, **shape, **relative, **own)
    ).eval()
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(87), 0.75, size=64).astype(int), 4, 512)
    ids = [draw.integers(10, 5000, n).tolist() for n in lengths]

    def ours(folder: str, precision: Precision) -> Read:
        model = Checkpoint.load(folder, precision=precision, head="none").model

        def read() -> np.ndarray:
            out = np.empty((len(ids), 768), np.float32)
            with torch.inference_mode():
                for group in pack([len(one) for one in ids], 4096):
                    batch = Batch.from_ids([ids[i] for i in group])
                    states = torch.split(model.hidden(batch).float(), batch.lengths)
                    out[group] = np.stack([one.mean(0).numpy() for one in states])
            return out

        return read

    def theirs(size: int) -> Read:
        def read() -> np.ndarray:
            out, order = np.empty((len(ids), 768), np.float32), np.argsort(-lengths)
            with torch.inference_mode():
                for at in range(0, len(ids), size):
                    some = order[at : at + size]
                    numbers, mask = (torch.from_numpy(x) for x in padded([ids[i] for i in some]))
                    states = peer(input_ids=numbers, attention_mask=mask).last_hidden_state
                    out[some] = np.stack([row[: lengths[i]].mean(0) for row, i in zip(states, some, strict=True)])
            return out

        return read

    with tempfile.TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ways = {name: ours(folder, name) for name in PRECISIONS}
    return len(ids), ways | {f"transformers, {size}": theirs(size) for size in SIZES}


def sentences(model: Path, data: Path) -> tuple[int, dict[str, Read]]:
    from sentence_transformers import SentenceTransformer

    texts, peer = mixed(data, 96), SentenceTransformer(str(model), device="cpu")

    def ours(precision: Precision) -> Read:
        embedder = Embedder.load(model, precision=precision, overflow="truncate")
        return lambda: embedder.embed(texts)

    def theirs(size: int) -> Read:
        return lambda: peer.encode(texts, batch_size=size, normalize_embeddings=True)

    ways = {name: ours(name) for name in PRECISIONS}
    return len(texts), ways | {f"sentence-transformers, {size}": theirs(size) for size in SIZES}


def plain(read: Read) -> Read:
    """The same without the compiled encoder."""

    def again() -> np.ndarray:
        with disable("native.encoder"):
            return read()

    return again


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.relative", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of the sets, for --model")
    parser.add_argument("--model", type=Path, help="a sentence encoder with relative positions")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.model is not None and options.data is None:
        parser.error("--model needs --data")
    torch.set_num_threads(options.threads)
    count, ways = deberta() if options.model is None else sentences(options.model, options.data)
    ways["plain, fp32"] = plain(ways["fp32"])
    took: dict[str, list[float]] = {name: [] for name in ways}
    vectors = {name: read() for name, read in ways.items()}  # which also packs weights
    for _ in range(options.repeats):
        for name, read in ways.items():
            began = time.perf_counter()
            read()
            took[name].append(time.perf_counter() - began)
    true = next(found for name, found in vectors.items() if name.endswith(", 1"))
    print("| | texts/s | cosine to the peer, mean (least) |\n|---|---|---|")
    for name, found in vectors.items():
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(true, axis=1)
        cosine = (found * true).sum(1) / lengths
        print(f"| {name} | {count / statistics.median(took[name]):.1f} | {cosine.mean():.5f} ({cosine.min():.4f}) |")


if __name__ == "__main__":
    main()
