"""Part `text`: from text to normalized embeddings, against sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from benchmarks.gpu.harness import Run, profile
from benchmarks.gpu.models import DEVICE, DTYPE
from bertie import Embedder
from bertie.bench import flat_batches, forward_all, time_call, time_interleaved

COMPARED = 2000  # texts whose embeddings are compared


def text(run: Run) -> None:
    """Embed the lines of a file."""
    from sentence_transformers import SentenceTransformer

    options = run.options
    if options.folder is None or options.texts is None:
        run.skip("text", "needs --folder and --texts")
        return
    texts = [line for line in options.texts.read_text(encoding="utf-8").splitlines() if line][: options.max_texts]
    embedder = Embedder.load(options.folder, device=DEVICE, precision="bf16", normalize=True)
    peer = SentenceTransformer(str(options.folder), device=str(DEVICE), model_kwargs={"dtype": DTYPE})

    def peer_encode(size: int) -> Callable[[], Any]:
        return lambda: peer.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False)

    calls = _calls(embedder, texts)
    result: dict[str, Any] = {"texts": len(texts), "sizes": {}}
    run.results["text"] = result
    calls["bertie"]()
    peer.encode(texts[:512], batch_size=256, show_progress_bar=False)
    for size in options.encode_sizes:
        if run.has_time(12, f"text, sentence-transformers, batches of {size}"):
            result["sizes"][str(size)] = len(texts) / time_call(peer_encode(size), DEVICE)
            run.print(f"  sentence-transformers, batches of {size}: {result['sizes'][str(size)]:,.0f} texts/s")
    if result["sizes"]:
        calls["sentence-transformers"] = peer_encode(int(max(result["sizes"], key=result["sizes"].__getitem__)))
        with run.guard("text, cosine similarity"):
            result["cosine"] = _cosine(embedder, np.asarray(peer_encode(256)()[:COMPARED]), texts[:COMPARED])
    for side, times in time_interleaved(calls, DEVICE, options.repeats, run.until - 8).items():
        result[side] = {"texts_per_s": len(texts) / median(times), "seconds": times}
        run.print(f"  text, {side}: {result[side]['texts_per_s']:,.0f} texts/s")
    if "sentence-transformers" in result:
        result["ratio"] = result["bertie"]["texts_per_s"] / result["sentence-transformers"]["texts_per_s"]
        run.print(f"text: {result['ratio']:.2f}×, cosine {result.get('cosine')}")
    with run.guard("text, profile"):
        result["profile"] = profile(calls["bertie"], median(result["bertie"]["seconds"]))


def _calls(embedder: Embedder, texts: list[str]) -> dict[str, Callable[[], Any]]:
    """From text, and its parts: the encoder alone, the tokenizer alone."""
    max_length, backend = embedder.checkpoint.max_length, embedder.tokenizer._backend
    ids = [encoding.ids[:max_length] for encoding in embedder.tokenizer.encode_batch(texts)]
    return {
        "bertie": lambda: embedder.embed(texts),
        "bertie, from token ids": lambda: forward_all(embedder.model, flat_batches(ids, 65536, DEVICE))(),
        "bertie, tokenizer": lambda: embedder.tokenizer.encode_batch(texts),
        "tokenizers": lambda: backend.encode_batch(texts),
        "tokenizers, without offsets": lambda: backend.encode_batch_fast(texts),
    }


def _cosine(embedder: Embedder, expected: Any, texts: list[str]) -> dict[str, float]:
    """Cosine similarity of texts that sentence-transformers does not truncate."""
    actual = embedder.embed(texts)
    norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(expected.astype(np.float32), axis=1)
    cosine = (actual * expected).sum(1) / norms
    max_length = embedder.checkpoint.max_length
    whole = np.array([len(encoding) <= max_length for encoding in embedder.tokenizer.encode_batch(texts)])
    return {"mean": float(cosine[whole].mean()), "min": float(cosine[whole].min())}
