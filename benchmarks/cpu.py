"""Sentence vectors on a CPU, from text, in fp32, bf16 and int8: Bertie beside other engines, each at its best settings.

    python -m benchmarks.cpu --data DATA [--model FOLDER] [--precision int8|bf16] [--threads 2] [--json FILE]
    python -m benchmarks.cpu --growth FOLDER [--model FOLDER]      pictures of how Bertie's time grows with the tokens

Wants packages that are no part of the test set: onnx, onnxscript, onnxruntime, openvino, nncf, ctranslate2. Every
engine lives in a process of its own. First each tries its settings; then all take turns, and the medians count.
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

REACH = 256  # tokens, of all-MiniLM-L6-v2
BATCHES = (1, 4, 8, 16, 32)
QUERIES = 200  # one at a time, for the latency
Embed = Callable[[Sequence[str]], np.ndarray]


# --- texts ---


def rows(file: Path) -> Iterator[dict[str, Any]]:
    with (lzma.open if file.suffix == ".xz" else gzip.open)(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def mixed(data: Path, count: int) -> list[str]:
    """News, sentences and film reviews, a third each, shuffled."""
    draw = random.Random(0)
    sources = (
        [row["text"] for row in rows(data / "ag_news/test.jsonl.gz")],
        sorted({row["text_a"] for row in rows(data / "stsb/test.jsonl.gz")}),
        [row["text"] for row in rows(data / "imdb/test.jsonl.xz")],
    )
    texts = [text for n, some in enumerate(sources) for text in draw.sample(some, count // 3 + (n < count % 3))]
    draw.shuffle(texts)
    return texts


def queries(data: Path) -> list[str]:
    return random.Random(1).sample([row["text"] for row in rows(data / "cosqa/queries.test.jsonl.gz")], QUERIES)


# --- engines: each makes a function from texts to vectors of length 1, for each of its settings ---


class Ids:
    """Token ids of texts, as the `tokenizers` library gives them."""

    def __init__(self, model: Path) -> None:
        import tokenizers

        self.tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(REACH)

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch_fast(list(texts))]


def in_batches(ids: list[list[int]], size: int, run: Callable[[list[list[int]]], np.ndarray]) -> np.ndarray:
    """Longest first, so that a batch holds texts of like length; the order is restored."""
    order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
    found = np.concatenate([run([ids[i] for i in order[at : at + size]]) for at in range(0, len(ids), size)])
    out = np.empty_like(found)
    out[order] = found
    return out


def padded(ids: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(B, L) ids and mask."""
    longest = max(map(len, ids))
    out, mask = np.zeros((len(ids), longest), np.int64), np.zeros((len(ids), longest), np.int64)
    for row, one in enumerate(ids):
        out[row, : len(one)], mask[row, : len(one)] = one, 1
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
    kinds = {"model_kwargs": {"dtype": torch.bfloat16}} if precision == "bf16" else {}
    peer = SentenceTransformer(str(model), device="cpu", **kinds)
    assert peer.max_seq_length == REACH

    def embed(size: int) -> Embed:
        return lambda texts: peer.encode(list(texts), batch_size=size, normalize_embeddings=True)

    return {f"batches of {size}": embed(size) for size in BATCHES}


def graph(model: Path, scratch: Path) -> Path:
    """The model with its pooling as an ONNX file."""
    import torch
    from transformers import AutoModel

    file = scratch / "model.onnx"
    if file.exists():
        return file

    class Vectors(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask[..., None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    example = tuple(torch.from_numpy(x) for x in padded([[101, 7592, 2088, 102], [101, 7592, 102]]))
    axes = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("length", min=2, max=REACH)}
    program = torch.onnx.export(
        Vectors(), example, dynamo=True, dynamic_shapes=(axes, axes), input_names=["input_ids", "attention_mask"]
    )
    program.save(str(file))
    return file


def onnxruntime(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import onnxruntime as ort

    file, ids = graph(model, scratch), Ids(model)
    if precision == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process

        ready, file = scratch / "ready.onnx", scratch / "int8.onnx"
        quant_pre_process(scratch / "model.onnx", ready, skip_symbolic_shape=True)
        quantize_dynamic(ready, file, per_channel=True, weight_type=QuantType.QInt8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(some: list[list[int]]) -> np.ndarray:
        one, mask = padded(some)
        return session.run(None, {"input_ids": one, "attention_mask": mask})[0]

    return {f"batches of {size}": lambda texts, size=size: in_batches(ids(texts), size, run) for size in BATCHES}


def openvino(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import openvino as ov

    core, ids = ov.Core(), Ids(model)
    network = core.read_model(graph(model, scratch))
    if precision == "int8":
        import nncf

        some = json.loads((scratch / "texts.json").read_text())
        data = nncf.Dataset([dict(enumerate(padded([one]))) for one in ids(some)])
        network = nncf.quantize(network, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(some))
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
            every = ids(texts)
            order = sorted(range(len(every)), key=lambda i: -len(every[i]))
            found: np.ndarray = np.empty((len(every), compiled.output(0).partial_shape[1].get_length()), np.float32)

            def keep(request: Any, places: list[int]) -> None:
                found[places] = request.get_output_tensor(0).data

            queue = ov.AsyncInferQueue(compiled, streams)
            queue.set_callback(keep)
            for at in range(0, len(order), size):
                places = order[at : at + size]
                queue.start_async(dict(enumerate(padded([every[i] for i in places]))), places)
            queue.wait_all()
            return found

        for size in BATCHES:
            name = f"{hint.lower()}, batches of {size}"
            out[name] = lambda texts, size=size, embed=embed: embed(texts, size)
    return out


def ctranslate2(model: Path, threads: int, scratch: Path, precision: str) -> dict[str, Embed]:
    import ctranslate2 as ct2

    folder, ids = scratch / "ctranslate2", Ids(model)
    if not folder.exists():
        ct2.converters.TransformersConverter(str(model)).convert(str(folder))
    out: dict[str, Embed] = {}
    kind = {"fp32": "float32", "int8": "int8", "bf16": "bfloat16"}[precision]
    for inter in (1, threads):
        peer = ct2.Encoder(str(folder), compute_type=kind, inter_threads=inter, intra_threads=threads // inter)

        def run(some: list[list[int]], peer: Any = peer) -> np.ndarray:
            hidden = np.array(peer.forward_batch(some).last_hidden_state)  # (B, L, D)
            return pooled(hidden, some)

        def several(texts: Sequence[str], size: int, run: Any = run, inter: int = inter) -> np.ndarray:
            if inter == 1 or len(texts) <= size:
                return in_batches(ids(texts), size, run)
            from concurrent.futures import ThreadPoolExecutor

            every = ids(texts)
            order = sorted(range(len(every)), key=lambda i: -len(every[i]))
            parts = [order[at : at + size] for at in range(0, len(order), size)]
            with ThreadPoolExecutor(inter) as pool:
                found = np.concatenate(list(pool.map(lambda part: run([every[i] for i in part]), parts)))
            vectors = np.empty_like(found)
            vectors[order] = found
            return vectors

        for size in BATCHES:
            out[f"{inter} at a time, batches of {size}"] = lambda texts, size=size, several=several: several(
                texts, size
            )
        if threads == 1:
            break
    return out


def pooled(hidden: np.ndarray, ids: list[list[int]]) -> np.ndarray:
    sums = np.stack([row[: len(one)].mean(0) for row, one in zip(hidden, ids, strict=True)])
    return sums / np.linalg.norm(sums, axis=1, keepdims=True)


ENGINES = (bertie, sentence_transformers, onnxruntime, openvino, ctranslate2)


# --- a process an engine ---


def serve(pipe: Any, engine: Callable[..., dict[str, Embed]], *given: Any) -> None:
    """Answers (setting, texts, one at a time or not) with vectors and seconds."""
    try:
        settings = engine(*given)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return
    pipe.send(list(settings))
    while (asked := pipe.recv()) is not None:
        name, texts, alone = asked
        embed, times = settings[name], []
        for some in [[text] for text in texts] if alone else [texts]:
            begin = time.perf_counter()
            vectors = embed(some)
            times.append(time.perf_counter() - begin)
        pipe.send((vectors, times))


class Engine:
    """The other end of `serve`."""

    def __init__(self, engine: Callable[..., Any], *given: Any) -> None:
        self.name = engine.__name__
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, engine, *given), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.settings: list[str] | str = self.pipe.recv()
        except EOFError:
            self.settings = "the process died"

    def ask(self, setting: str, texts: Sequence[str], alone: bool = False) -> tuple[np.ndarray, list[float]]:
        self.pipe.send((setting, list(texts), alone))
        answer: tuple[np.ndarray, list[float]] = self.pipe.recv()
        return answer

    def best(self, texts: Sequence[str], alone: bool) -> str:
        """Its fastest setting on some of the texts."""
        assert isinstance(self.settings, list)
        if len(self.settings) == 1:
            self.ask(self.settings[0], texts, alone)
            return self.settings[0]
        # For one text at a time the size of a batch says nothing.
        tried = [one for one in self.settings if not alone or one.endswith(f"of {BATCHES[0]}")]
        self.ask(tried[0], texts, alone)
        took = {one: statistics.median(self.ask(one, texts, alone)[1]) for one in tried}
        for name, seconds in took.items():
            print(f"{self.name}, {name}: {seconds:.4f} s", file=sys.stderr)
        return min(took, key=lambda one: took[one])


def spearman(engine: Engine, setting: str, pairs: Sequence[dict[str, Any]]) -> float:
    """How well the cosines of STS-B's pairs follow people's scores."""
    from scipy.stats import spearmanr

    one, two = (engine.ask(setting, [pair[side] for pair in pairs])[0] for side in ("text_a", "text_b"))
    return float(spearmanr((one * two).sum(1), [pair["score"] for pair in pairs]).statistic)


# --- how time grows ---


def growth(model: Path, threads: int) -> dict[str, dict[str, dict[int, float]]]:
    """Seconds by tokens in all (texts of 128), and by tokens a text (8,192 in all), in both precisions."""
    import torch

    from bertie import Embedder
    from bertie.bench import flat_batches, forward_all

    torch.set_num_threads(threads)
    draw = np.random.default_rng(0)
    found: dict[str, dict[str, dict[int, float]]] = {}
    for name in ("fp32", "int8"):
        embedder = Embedder.load(model, precision=name)
        totals = [(1 << power, 128) for power in range(9, 17)]
        lengths = [(8192, 1 << power) for power in range(4, 10)]
        out: dict[str, dict[int, float]] = {"total": {}, "length": {}}
        with torch.inference_mode():
            for part, cases in (("total", totals), ("length", lengths)):
                for total, length in cases:
                    ids = [draw.integers(1000, 20000, length).tolist() for _ in range(total // length)]
                    run = forward_all(embedder.model, flat_batches(ids, embedder.budget, torch.device("cpu")))
                    run()
                    times = []
                    for _ in range(3 if total < 1 << 15 else 1):
                        begin = time.perf_counter()
                        run()
                        times.append(time.perf_counter() - begin)
                    out[part][total if part == "total" else length] = statistics.median(times)
        found[name] = out
    return found


def drawn(found: dict[str, dict[str, dict[int, float]]], folder: Path) -> None:
    from benchmarks.serve import _STYLE
    from bertie.evaluation.plots import Line, lines

    for part, x in (("total", "tokens in all"), ("length", "tokens a text, 8,192 in all")):
        series = [
            Line(name, [(math.log2(n), math.log2(1e3 * spent)) for n, spent in out[part].items()], style, True)
            for (name, out), style in zip(found.items(), ("a", "b"), strict=True)
        ]
        svg = lines(f"Time on a CPU by {x}", series, f"{x}, as a power of two", "milliseconds, as a power of two")
        svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        (folder / f"cpu-{part}.svg").write_text(svg.replace("</title>", "</title>" + _STYLE, 1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser("benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of the sets")
    parser.add_argument("--growth", type=Path, help="a folder for pictures; nothing else is measured")
    parser.add_argument("--model", type=Path, default=Path(__file__).parent.parent / ".models/all-MiniLM-L6-v2")
    parser.add_argument("--engines", type=lambda text: text.split(","), help="some of them")
    parser.add_argument("--precision", choices=("fp32", "int8", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.growth is not None:
        found_growth = growth(options.model.resolve(), options.threads)
        print(json.dumps(found_growth, indent=1))
        drawn(found_growth, options.growth)
        return
    if options.data is None:
        parser.error("--data is needed")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    texts, short = mixed(options.data, options.texts), queries(options.data)
    found = []
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        graph(options.model.resolve(), scratch)
        others = mixed(options.data, options.texts + 300)  # to calibrate on: none of those that are measured
        (scratch / "texts.json").write_text(json.dumps([text for text in others if text not in set(texts)][:300]))
        given = (options.model.resolve(), options.threads, scratch)
        engines = [
            Engine(engine, *given, options.precision)
            for engine in ENGINES
            if (options.engines is None or engine.__name__ in options.engines)
            and engine not in {"int8": [sentence_transformers], "bf16": [onnxruntime]}.get(options.precision, [])
        ]
        for one in [one for one in engines if isinstance(one.settings, str)]:
            print(f"{one.name} left out: {one.settings}")
            engines.remove(one)
        chosen = {one: (one.best(texts[:64], False), one.best(short[:50], True)) for one in engines}
        took: dict[Engine, list[float]] = {one: [] for one in engines}
        waited: dict[Engine, list[float]] = {one: [] for one in engines}
        vectors: dict[Engine, np.ndarray] = {}
        predict_labelled = next((one for one in engines if one.name == "sentence_transformers"), None)
        if predict_labelled is None or options.precision != "fp32":
            predict_labelled = Engine(sentence_transformers, *given, "fp32")
        true, _ = predict_labelled.ask(predict_labelled.settings[0], texts)
        pairs = [*rows(options.data / "stsb/test.jsonl.gz")]
        agreed = {one: spearman(one, chosen[one][0], pairs) for one in engines}
        exact = spearman(predict_labelled, predict_labelled.settings[0], pairs)
        for repeat in range(options.repeats):
            for one in engines[repeat % len(engines) :] + engines[: repeat % len(engines)]:
                vectors[one], times = one.ask(chosen[one][0], texts)
                took[one] += times
                waited[one] += one.ask(chosen[one][1], short, True)[1]
        for one in {*engines, predict_labelled}:
            one.pipe.send(None)
    for one in engines:
        cosine = (vectors[one] * true).sum(1)
        found.append(
            {
                "engine": one.name,
                "texts_per_second": len(texts) / statistics.median(took[one]),
                "slowest_fastest": [len(texts) / max(took[one]), len(texts) / min(took[one])],
                "setting": chosen[one][0],
                "query_ms": 1e3 * statistics.median(waited[one]),
                "query_setting": chosen[one][1],
                "cosine_mean": float(cosine.mean()),
                "cosine_least": float(cosine.min()),
                "stsb": agreed[one],
            }
        )
    print("| engine | texts/s (slowest, fastest) | one query, ms | cosine, mean (least) | setting |")
    print("|---|---|---|---|---|")
    for row in found:
        spread = ", ".join(f"{x:.0f}" for x in row["slowest_fastest"])
        alike = f"{row['cosine_mean']:.5f} ({row['cosine_least']:.4f})"
        alike += f", STS-B {row['stsb']:.4f} (fp32 {exact:.4f})"
        print(
            f"| {row['engine']} | {row['texts_per_second']:.0f} ({spread}) | "
            f"{row['query_ms']:.2f} | {alike} | {row['setting']} |"
        )
    mine, others = [r for r in found if r["engine"] == "bertie"], [r for r in found if r["engine"] != "bertie"]
    if mine and others:
        speed = mine[0]["texts_per_second"] / max(r["texts_per_second"] for r in others)
        wait = min(r["query_ms"] for r in others) / mine[0]["query_ms"]
        print(f"{speed:.2f} times the best peer's texts/s; its latency is {wait:.2f} times ours")
    if options.json:
        packages = ("torch", "sentence-transformers", "onnxruntime", "openvino", "nncf", "ctranslate2")
        facts = {"machine": platform.machine(), "threads": options.threads, "texts": len(texts)}
        facts["precision"] = options.precision
        facts["versions"] = {name: version(name) for name in packages if find_spec(name.replace("-", "_"))}
        options.json.write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
