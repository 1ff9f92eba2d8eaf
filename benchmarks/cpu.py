"""Sentence embeddings on a CPU, from text, in fp32, bf16 and int8: Bertie and other engines, each at its best settings.

    python -m benchmarks.cpu --data DATA [--model FOLDER] [--precision int8|bf16] [--threads 2] [--json FILE]
    python -m benchmarks.cpu --growth FOLDER [--model FOLDER]      plots of Bertie's time by number of tokens

Needs packages beyond the test dependencies: onnx, onnxscript, onnxruntime, openvino, nncf, ctranslate2. Each engine
runs in its own process. Each first tries its settings; then the engines run in turn, and medians are reported.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

MAX_LENGTH = 256  # tokens, of all-MiniLM-L6-v2
BATCHES = (1, 4, 8, 16, 32)
QUERIES = 200  # one at a time, for the latency
Embed = Callable[[Sequence[str]], np.ndarray]


# --- texts ---


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    with (lzma.open if file.suffix == ".xz" else gzip.open)(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def mixed(data: Path, count: int) -> list[str]:
    """News, sentences and film reviews, a third each, shuffled."""
    generator = random.Random(0)
    sources = (
        [row["text"] for row in read_rows(data / "ag_news/test.jsonl.gz")],
        sorted({row["text_a"] for row in read_rows(data / "stsb/test.jsonl.gz")}),
        [row["text"] for row in read_rows(data / "imdb/test.jsonl.xz")],
    )
    texts = [
        text for n, source in enumerate(sources) for text in generator.sample(source, count // 3 + (n < count % 3))
    ]
    generator.shuffle(texts)
    return texts


def queries(data: Path) -> list[str]:
    return random.Random(1).sample([row["text"] for row in read_rows(data / "cosqa/queries.test.jsonl.gz")], QUERIES)


# --- engines: each returns, by the name of its settings, functions from texts to normalized embeddings ---


class TokenIds:
    """Token ids of texts, by the `tokenizers` library."""

    def __init__(self, model: Path) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_LENGTH)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(list(texts))]


def in_batches(ids: list[list[int]], size: int, run: Callable[[list[list[int]]], np.ndarray]) -> np.ndarray:
    """Run in batches of texts of similar length, longest first, and restore the order."""
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    sorted_rows = np.concatenate([run([ids[i] for i in order[at : at + size]]) for at in range(0, len(ids), size)])
    out = np.empty_like(sorted_rows)
    out[order] = sorted_rows
    return out


def padded(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(B, L) ids and mask."""
    longest = max(map(len, ids))
    out, mask = np.zeros((len(ids), longest), np.int64), np.zeros((len(ids), longest), np.int64)
    for row, text in enumerate(ids):
        out[row, : len(text)], mask[row, : len(text)] = text, 1
    return out, mask


def bertie(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import torch

    from bertie import Embedder

    torch.set_num_threads(threads)
    return {"": Embedder.load(model, overflow="truncate", precision=precision).embed}


def sentence_transformers(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    options = {"model_kwargs": {"dtype": torch.bfloat16}} if precision == "bf16" else {}
    peer = SentenceTransformer(str(model), device="cpu", **options)
    assert peer.max_seq_length == MAX_LENGTH

    def embed(size: int) -> Embed:
        return lambda texts: peer.encode(list(texts), batch_size=size, normalize_embeddings=True)

    return {f"batches of {size}": embed(size) for size in BATCHES}


def export_onnx(model: Path, scratch: Path) -> Path:
    """Export the model with its pooling to an ONNX file."""
    import torch
    from transformers import AutoModel

    file = scratch / "model.onnx"
    if file.exists():
        return file

    class SentenceEmbedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask[..., None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    example = tuple(torch.from_numpy(x) for x in padded([[101, 7592, 2088, 102], [101, 7592, 102]]))
    axes = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("length", min=2, max=MAX_LENGTH)}
    program = torch.onnx.export(
        SentenceEmbedder(),
        example,
        dynamo=True,
        dynamic_shapes=(axes, axes),
        input_names=["input_ids", "attention_mask"],
    )
    program.save(str(file))
    return file


def onnxruntime(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import onnxruntime as ort

    file, ids = export_onnx(model, scratch), TokenIds(model)
    if precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process

        prepared, file = scratch / "prepared.onnx", scratch / "int8.onnx"
        quant_pre_process(scratch / "model.onnx", prepared, skip_symbolic_shape=True)
        quantize_dynamic(prepared, file, per_channel=True, weight_type=QuantType.QInt8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(batch: list[list[int]]) -> np.ndarray:
        ids, mask = padded(batch)
        return session.run(None, {"input_ids": ids, "attention_mask": mask})[0]

    return {f"batches of {size}": lambda texts, size=size: in_batches(ids(texts), size, run) for size in BATCHES}


def openvino(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import openvino as ov

    core, ids = ov.Core(), TokenIds(model)
    network = core.read_model(export_onnx(model, scratch))
    if precision == "int8":
        import nncf

        texts = json.loads((scratch / "texts.json").read_text())
        data = nncf.Dataset([dict(enumerate(padded([text]))) for text in ids(texts)])
        network = nncf.quantize(network, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(texts))
    out: dict[str, Embed] = {}
    for hint, streams in (("LATENCY", 1), ("THROUGHPUT", threads)):
        settings = {
            "PERFORMANCE_HINT": hint,
            "NUM_STREAMS": str(streams),
            "INFERENCE_NUM_THREADS": str(threads),
            "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
        }
        compiled = core.compile_model(network, "CPU", settings)

        def embed(texts: Sequence[str], size: int, compiled: Any = compiled, streams: int = streams) -> np.ndarray:
            encoded = ids(texts)
            order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
            embeddings: np.ndarray = np.empty(
                (len(encoded), compiled.output(0).partial_shape[1].get_length()), np.float32
            )

            def store(request: Any, indices: list[int]) -> None:
                embeddings[indices] = request.get_output_tensor(0).data

            queue = ov.AsyncInferQueue(compiled, streams)
            queue.set_callback(store)
            for at in range(0, len(order), size):
                indices = order[at : at + size]
                queue.start_async(dict(enumerate(padded([encoded[i] for i in indices]))), indices)
            queue.wait_all()
            return embeddings

        for size in BATCHES:
            name = f"{hint.lower()}, batches of {size}"
            out[name] = lambda texts, size=size, embed=embed: embed(texts, size)
    return out


def ctranslate2(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import ctranslate2 as ct2

    folder, ids = scratch / "ctranslate2", TokenIds(model)
    if not folder.exists():
        ct2.converters.TransformersConverter(str(model)).convert(str(folder))
    out: dict[str, Embed] = {}
    kind = {"fp32": "float32", "int8": "int8", "bf16": "bfloat16"}[precision]
    for inter in (1, threads):
        peer = ct2.Encoder(str(folder), compute_type=kind, inter_threads=inter, intra_threads=threads // inter)

        def run(batch: list[list[int]], peer: Any = peer) -> np.ndarray:
            hidden = np.array(peer.forward_batch(batch).last_hidden_state)  # (B, L, D)
            return pool(hidden, batch)

        def embed(texts: Sequence[str], size: int, run: Any = run, inter: int = inter) -> np.ndarray:
            if inter == 1 or len(texts) <= size:
                return in_batches(ids(texts), size, run)
            from concurrent.futures import ThreadPoolExecutor

            encoded = ids(texts)
            order = sorted(range(len(encoded)), key=lambda i: -len(encoded[i]))
            parts = [order[at : at + size] for at in range(0, len(order), size)]
            with ThreadPoolExecutor(inter) as executor:
                sorted_rows = np.concatenate(list(executor.map(lambda part: run([encoded[i] for i in part]), parts)))
            embeddings = np.empty_like(sorted_rows)
            embeddings[order] = sorted_rows
            return embeddings

        for size in BATCHES:
            out[f"{inter} at a time, batches of {size}"] = lambda texts, size=size, embed=embed: embed(texts, size)
        if threads == 1:
            break
    return out


def pool(hidden: np.ndarray, ids: list[list[int]]) -> np.ndarray:
    sums = np.stack([row[: len(text)].mean(0) for row, text in zip(hidden, ids, strict=True)])
    return sums / np.linalg.norm(sums, axis=1, keepdims=True)


ENGINES = (bertie, sentence_transformers, onnxruntime, openvino, ctranslate2)


# --- one process per engine ---


def serve(pipe: Any, engine: Callable[..., dict[str, Embed]], *arguments: Any) -> None:
    """Answer (setting, texts, one at a time or not) with embeddings and seconds."""
    try:
        settings = engine(*arguments)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return
    pipe.send(list(settings))
    while (request := pipe.recv()) is not None:
        name, texts, alone = request
        embed, times = settings[name], []
        for batch in [[text] for text in texts] if alone else [texts]:
            begin = time.perf_counter()
            embeddings = embed(batch)
            times.append(time.perf_counter() - begin)
        pipe.send((embeddings, times))


class Engine:
    """The client of `serve`."""

    def __init__(self, engine: Callable[..., Any], *arguments: Any) -> None:
        self.name = engine.__name__
        context = multiprocessing.get_context("spawn")
        self.pipe, remote = context.Pipe()
        self.process = context.Process(target=serve, args=(remote, engine, *arguments), daemon=True)
        self.process.start()
        remote.close()
        try:
            self.settings: list[str] | str = self.pipe.recv()
        except EOFError:
            self.settings = "the process died"

    def run(self, setting: str, texts: Sequence[str], alone: bool = False) -> tuple[np.ndarray, list[float]]:
        self.pipe.send((setting, list(texts), alone))
        reply: tuple[np.ndarray, list[float]] = self.pipe.recv()
        return reply

    def best(self, texts: Sequence[str], alone: bool) -> str:
        """The fastest setting on some of the texts."""
        assert isinstance(self.settings, list)
        if len(self.settings) == 1:
            self.run(self.settings[0], texts, alone)
            return self.settings[0]
        # For one text at a time the batch size does not matter.
        tried = [name for name in self.settings if not alone or name.endswith(f"of {BATCHES[0]}")]
        self.run(tried[0], texts, alone)
        took = {name: statistics.median(self.run(name, texts, alone)[1]) for name in tried}
        for name, seconds in took.items():
            print(f"{self.name}, {name}: {seconds:.4f} s", file=sys.stderr)
        return min(took, key=lambda name: took[name])


def spearman(engine: Engine, setting: str, pairs: Sequence[dict[str, Any]]) -> float:
    """Spearman correlation of the cosine similarities of STS-B's pairs with the human scores."""
    from scipy.stats import spearmanr

    a, b = (engine.run(setting, [pair[side] for pair in pairs])[0] for side in ("text_a", "text_b"))
    return float(spearmanr((a * b).sum(1), [pair["score"] for pair in pairs]).statistic)


# --- time by number of tokens ---


def growth(model: Path, threads: int) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds by total tokens (texts of 128), and by tokens per text (8,192 in total), in both precisions."""
    import torch

    from bertie import Embedder
    from bertie.bench import flat_batches, forward_all

    torch.set_num_threads(threads)
    generator = np.random.default_rng(0)
    results: dict[str, dict[str, dict[int, float]]] = {}
    for name in ("fp32", "int8"):
        embedder = Embedder.load(model, precision=name)
        totals = [(1 << power, 128) for power in range(9, 17)]
        lengths = [(8192, 1 << power) for power in range(4, 10)]
        out: dict[str, dict[int, float]] = {"total": {}, "length": {}}
        with torch.inference_mode():
            for part, cases in (("total", totals), ("length", lengths)):
                for total, length in cases:
                    ids = [generator.integers(1000, 20000, length).tolist() for _ in range(total // length)]
                    run = forward_all(embedder.model, flat_batches(ids, embedder.budget, torch.device("cpu")))
                    run()
                    times = []
                    for _ in range(3 if total < 1 << 15 else 1):
                        begin = time.perf_counter()
                        run()
                        times.append(time.perf_counter() - begin)
                    out[part][total if part == "total" else length] = statistics.median(times)
        results[name] = out
    return results


def plot(results: dict[str, dict[str, dict[int, float]]], folder: Path) -> None:
    """Write the two plots."""
    from benchmarks.serve_plot import STYLE
    from bertie.evaluation.plots import Line, lines

    for part, x in (("total", "total tokens"), ("length", "tokens per text, 8,192 in total")):
        series = [
            Line(name, [(math.log2(n), math.log2(1e3 * spent)) for n, spent in out[part].items()], style, True)
            for (name, out), style in zip(results.items(), ("a", "b"), strict=True)
        ]
        svg = lines(f"Time on a CPU by {x}", series, f"{x}, as a power of two", "milliseconds, as a power of two")
        svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        (folder / f"cpu-{part}.svg").write_text(svg.replace("</title>", "</title>" + STYLE, 1) + "\n")


def reference_engine(engines: Sequence[Engine], arguments: tuple[Any, ...], precision: str) -> Engine:
    """sentence-transformers in fp32, which the embeddings are compared with."""
    running = next((engine for engine in engines if engine.name == "sentence_transformers"), None)
    return running if running is not None and precision == "fp32" else Engine(sentence_transformers, *arguments, "fp32")


def compare(options: argparse.Namespace) -> tuple[list[dict[str, Any]], float]:
    """One row per engine, and the reference's Spearman correlation on STS-B."""
    texts, short = mixed(options.data, options.texts), queries(options.data)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        export_onnx(options.model.resolve(), scratch)
        others = mixed(options.data, options.texts + 300)  # for calibration: none of the measured texts
        (scratch / "texts.json").write_text(json.dumps([text for text in others if text not in set(texts)][:300]))
        arguments = (options.model.resolve(), options.threads, scratch)
        unsupported = {"int8": [sentence_transformers], "bf16": [onnxruntime]}.get(options.precision, [])
        engines = [
            Engine(engine, *arguments, options.precision)
            for engine in ENGINES
            if (options.engines is None or engine.__name__ in options.engines) and engine not in unsupported
        ]
        for engine in [engine for engine in engines if isinstance(engine.settings, str)]:
            print(f"{engine.name} left out: {engine.settings}")
            engines.remove(engine)
        chosen = {engine: (engine.best(texts[:64], False), engine.best(short[:50], True)) for engine in engines}
        reference = reference_engine(engines, arguments, options.precision)
        expected, _ = reference.run(reference.settings[0], texts)
        pairs = [*read_rows(options.data / "stsb/test.jsonl.gz")]
        correlations = {engine: spearman(engine, chosen[engine][0], pairs) for engine in engines}
        exact = spearman(reference, reference.settings[0], pairs)
        times: dict[Engine, list[float]] = {engine: [] for engine in engines}
        latencies: dict[Engine, list[float]] = {engine: [] for engine in engines}
        embeddings: dict[Engine, np.ndarray] = {}
        for repeat in range(options.repeats):
            for engine in engines[repeat % len(engines) :] + engines[: repeat % len(engines)]:
                embeddings[engine], seconds = engine.run(chosen[engine][0], texts)
                times[engine] += seconds
                latencies[engine] += engine.run(chosen[engine][1], short, True)[1]
        for engine in {*engines, reference}:
            engine.pipe.send(None)
    results = []
    for engine in engines:
        cosine = (embeddings[engine] * expected).sum(1)
        results.append(
            {
                "engine": engine.name,
                "texts_per_second": len(texts) / statistics.median(times[engine]),
                "slowest_fastest": [len(texts) / max(times[engine]), len(texts) / min(times[engine])],
                "setting": chosen[engine][0],
                "query_ms": 1e3 * statistics.median(latencies[engine]),
                "query_setting": chosen[engine][1],
                "cosine_mean": float(cosine.mean()),
                "cosine_least": float(cosine.min()),
                "stsb": correlations[engine],
            }
        )
    return results, exact


def print_table(results: Sequence[dict[str, Any]], exact: float) -> None:
    """The results as a Markdown table, and Bertie's ratio to the best peer."""
    print("| engine | texts/s (slowest, fastest) | one query, ms | cosine, mean (least) | setting |")
    print("|---|---|---|---|---|")
    for row in results:
        spread = ", ".join(f"{x:.0f}" for x in row["slowest_fastest"])
        cosine = f"{row['cosine_mean']:.5f} ({row['cosine_least']:.4f})"
        cosine += f", STS-B {row['stsb']:.4f} (fp32 {exact:.4f})"
        print(
            f"| {row['engine']} | {row['texts_per_second']:.0f} ({spread}) | "
            f"{row['query_ms']:.2f} | {cosine} | {row['setting']} |"
        )
    own = [row for row in results if row["engine"] == "bertie"]
    peers = [row for row in results if row["engine"] != "bertie"]
    if own and peers:
        speed = own[0]["texts_per_second"] / max(row["texts_per_second"] for row in peers)
        latency = min(row["query_ms"] for row in peers) / own[0]["query_ms"]
        print(f"{speed:.2f} times the texts/s of the best peer, whose latency is {latency:.2f} times Bertie's")


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--growth", type=Path, help="folder for plots of the time by tokens; nothing else is measured")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / ".models/all-MiniLM-L6-v2")
    parser.add_argument("--engines", type=lambda text: text.split(","), help="names of engines, comma-separated")
    parser.add_argument("--precision", choices=("fp32", "int8", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.growth is not None:
        results = growth(options.model.resolve(), options.threads)
        print(json.dumps(results, indent=1))
        plot(results, options.growth)
        return
    if options.data is None:
        parser.error("--data is needed")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    rows, exact = compare(options)
    print_table(rows, exact)
    if options.json:
        packages = ("torch", "sentence-transformers", "onnxruntime", "openvino", "nncf", "ctranslate2")
        facts = {"machine": platform.machine(), "threads": options.threads, "texts": options.texts}
        facts["precision"] = options.precision
        facts["versions"] = {name: version(name) for name in packages if find_spec(name.replace("-", "_"))}
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
