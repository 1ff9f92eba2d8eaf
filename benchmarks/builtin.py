"""Compare the built-in model with others: masked-language modelling, STS, retrieval, task heads, long texts, speed.

    python -m benchmarks.builtin MODEL [MODEL …] --data FOLDER [--only sts,retrieval] [--json FILE] [--plots FOLDER]

A MODEL is a folder, a built-in name or a hub id, or the JSON of an earlier run, whose columns are shown again and
compared with. Figures have a 95% bootstrap confidence interval; speeds the minimum and maximum of their repeats.
Speeds are comparable within one run only: those of an earlier run are left out. BM25 is bm25s with Lucene's formula,
k1 = 1.2 and b = 0.75, on lower-cased, stemmed words without its English stop words.

Masking is BERT's (15%, of which 80% masked, 10% random, 10% unchanged), the same for all models of one tokenizer.
Between tokenizers neither accuracy nor loss is comparable: a whole word is harder to predict than a subword.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import numpy as np

from benchmarks.builtin_data import SEARCHES, SearchCollection, articles, rows, sentence_pairs
from benchmarks.builtin_prompts import cloze_figures, no_answer_figures
from benchmarks.builtin_report import (
    BM25,
    PARTS,
    Column,
    Figure,
    Figures,
    compare_models,
    differences,
    mean,
    plots,
    table,
)
from benchmarks.builtin_subject import Subject
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import resolve
from bertie.evaluation import metrics, retrieval
from bertie.evaluation.intervals import FloatArray, bootstrap, from_sums
from bertie.tasks import Embedder, Reranker

SHORT = dict(zip(("size", "mlm", "sts", "retrieval", "heads", "long", "speed"), PARTS, strict=True))  # for --only
YEARS = ("STS12", "STS13", "STS15")
RERANK_DEPTH = 50  # documents per query
QUICK = 2000  # rows of a large set
PIECE = 512  # tokens per piece in masked-language modelling
# WNUT-17's entity types, mapped to those of WikiANN and of the NER head.
TYPES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
REPEATS, THREADS = 5, (1, 2)

# --- quality ---


def facts(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Size on disk, parameters, dimension and maximum length."""
    model, folder = subject.checkpoint.model, resolve(subject.name)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    counts = {"parameters": sum(p.numel() for p in model.parameters()), "folder, bytes": size}
    counts |= {"vector, numbers": subject.embedder.dimension, "tokens at once": subject.checkpoint.max_length}
    return {name: Figure(count) for name, count in counts.items()}


def masked_words(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Accuracy and loss of masked-language modelling on held-out text; articles are resampled."""
    if subject.masked_lm is None:
        return {}
    checkpoint, head = subject.masked_lm
    sums = np.array(list(_score_articles(checkpoint, head, articles(data)[:: 4 if options.quick else 1])))
    scores = bootstrap(from_sums(sums, lambda s: {"accuracy": s[:, 0] / s[:, 2], "loss": s[:, 1] / s[:, 2]}), len(sums))
    figures = {
        f"WikiText-103 held-out, {key}": Figure.of(score, int(sums[:, 2].sum())) for key, score in scores.items()
    }
    return figures | cloze_figures(checkpoint, head)


def _score_articles(checkpoint: Checkpoint, head: str, texts: Sequence[str]) -> Iterator[tuple[float, float, float]]:
    """Yield correct predictions, summed loss and masked tokens of each article."""
    import torch

    from bertie.text.batch import Batch, pack
    from bertie.training.pretrain.masking import Masking, masking_rng

    model, tokenizer, masking = checkpoint.model, checkpoint.tokenizer, Masking()
    assert tokenizer is not None
    assert tokenizer.mask_id is not None
    roles = [tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id]
    never = [id for id in roles if id is not None]
    unknown = "" if tokenizer.unk_id is None else tokenizer.token(tokenizer.unk_id)
    room = min(PIECE, checkpoint.max_length) - 2
    for number, text in enumerate(texts):
        whole = tokenizer.encode(text.replace("<unk>", unknown), special=False).ids
        inner = [whole[low : low + room] for low in range(0, len(whole), room)]
        pieces = [np.concatenate([[tokenizer.cls_id], ids, [tokenizer.sep_id]]) for ids in inner]
        correct = loss = total = 0.0
        rng = masking_rng(0, None, number)
        for group in pack([len(piece) for piece in pieces], 16 * PIECE):
            ids, cu = np.concatenate([pieces[i] for i in group]), np.cumsum([0, *(len(pieces[i]) for i in group)])
            special = np.isin(ids, never)
            positions = masking.choose(special, ~special, cu, rng)
            masked, targets = masking.apply(ids, positions, rng, tokenizer.vocab_size, tokenizer.mask_id, never)
            with torch.inference_mode():
                batch = Batch.from_ids(np.split(masked, cu[1:-1])).to(model.device)
                hidden = model.hidden(batch, head)[torch.from_numpy(positions).to(model.device)]  # (M, D)
                logits = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight).float()  # (M, V)
                truth = torch.from_numpy(targets).to(model.device)
                correct += float((logits.argmax(-1) == truth).sum())
                loss += float(torch.nn.functional.cross_entropy(logits, truth, reduction="sum"))
            total += len(positions)
        yield correct, loss, total


def similarity(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Spearman correlation of cosine similarities with human judgments."""
    figures = {}
    for label, pairs in sentence_pairs(data):
        a, b = np.split(subject.vectors([row[side] for side in ("text_a", "text_b") for row in pairs]), 2)
        cosines = (a * b).sum(axis=1)
        score = metrics.regression([row["score"] for row in pairs], cosines)["spearman"]
        figures[label] = Figure.of(score, len(pairs), cosines)
    return figures | {f"mean of {', '.join(YEARS)}": mean([figures[year] for year in YEARS])}


def search(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Dense retrieval on each collection; then with the top 50 reranked, if there is a reranking head."""
    dense, reranked = {}, {}
    for label, (name, split) in SEARCHES.items():
        collection = SearchCollection.read(data, name, split)
        queries = subject.vectors(list(collection.queries.values()), "query")
        run = collection.run(queries @ subject.vectors(collection.texts, "document").T)
        dense[label] = retrieval.per_query_metrics(collection.qrels, run)
        if subject.reranker is not None and not options.quick:
            run = rerank(subject.reranker, collection, run)
            reranked[label] = retrieval.per_query_metrics(collection.qrels, run)
    return search_figures(dense) | (search_figures(reranked, ", first 50 reranked") if reranked else {})


def rerank(
    reranker: Reranker, collection: SearchCollection, run: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Rerank the top documents of each query; the others follow in their old order."""
    text = dict(zip(collection.ids, collection.texts, strict=True))
    top = {query: list(ranking)[:RERANK_DEPTH] for query, ranking in run.items()}
    pairs = [(collection.queries[query], text[d]) for query, documents in top.items() for d in documents]
    scores = iter(reranker.predict(pairs))
    reranked = {}
    for query, documents in top.items():
        points = {d: float(next(scores)) for d in documents}
        lowest = min(points.values())
        reranked[query] = points | {d: lowest - 1 - i for i, d in enumerate(list(run[query])[RERANK_DEPTH:])}
    return reranked


def bm25(data: Path) -> Figures:
    """BM25 on the same collections."""
    package, stemmer = import_module("bm25s"), import_module("Stemmer").Stemmer("english")
    values = {}
    for label, (name, split) in SEARCHES.items():
        collection = SearchCollection.read(data, name, split)
        settings = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
        index = package.BM25(method="lucene", k1=1.2, b=0.75)
        index.index(package.tokenize(collection.texts, **settings), show_progress=False)
        words = package.tokenize(list(collection.queries.values()), return_ids=False, **settings)
        run = collection.run([index.get_scores(query) for query in words])
        # Documents that share no word with the query are not retrieved.
        run = {query: {d: score for d, score in scores.items() if score > 0} for query, scores in run.items()}
        values[label] = retrieval.per_query_metrics(collection.qrels, run)
    return search_figures(values)


def search_figures(collections: Mapping[str, Mapping[str, FloatArray]], suffix: str = "") -> Figures:
    """The figures of all collections, nDCG@10 first."""
    main, others = {}, {}
    for label, values in collections.items():
        for metric, score in retrieval.mean_scores(values).items():
            n = len(values[metric])
            if metric == "ndcg_10":
                main[f"{label}, nDCG@10{suffix}"] = Figure.of(score, n, values[metric])
            else:
                others[f"{label}, {metric}{suffix}"] = Figure.of(score, n)
    return main | {f"mean nDCG@10{suffix}": mean(list(main.values()))} | others


def heads(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """The model's task heads on test sets that it was not trained on."""
    most = QUICK if options.quick else None
    return (
        classification_figures(subject, data, options, most)
        | tagging_figures(subject, data, most)
        | answer_figures(subject, data, most)
        | no_answer_figures(subject.reader, data)
        | passage_figures(subject, data)
    )


def classification_figures(subject: Subject, data: Path, options: argparse.Namespace, most: int | None) -> Figures:
    """Sentiment and natural language inference."""
    figures: Figures = {}
    for label, file, columns in (
        ("sentiment (GoEmotions)", options.sentiment, ("text",)),
        ("NLI (SNLI)", data / "snli" / "test.jsonl.gz", ("text_a", "text_b")),
    ):
        if file is None:
            continue
        examples = rows(file, most)
        classifier = subject.classifier({row["label"] for row in examples})
        if classifier is not None:
            texts = [tuple(row[c] for c in columns) if len(columns) > 1 else row["text"] for row in examples]
            names = list(classifier.info.labels.values())
            table = [[result.scores[name] for name in names] for result in classifier.classify(texts)]
            scores = metrics.classification([row["label"] for row in examples], table, names)
            for metric in ("accuracy", "macro_f1"):
                figures[f"{label}, {metric}"] = Figure.of(scores[metric], len(examples))
    return figures


def tagging_figures(subject: Subject, data: Path, most: int | None) -> Figures:
    """Named-entity recognition."""
    figures: Figures = {}
    if subject.tagger is not None:
        for label, name in (("NER (WikiANN)", "wikiann/test.en"), ("NER (WNUT-17)", "wnut17/test")):
            examples = rows(data / f"{name}.jsonl.gz", most)
            predicted = subject.tagger.predict([row["tokens"] for row in examples])
            gold = [[as_type(tag) for tag in row["tags"]] for row in examples]
            tags = [[as_type(tag) for tag in sentence] for sentence in predicted]
            figures[f"{label}, F1"] = Figure.of(metrics.tagging(gold, tags)["f1"], len(examples))
    return figures


def answer_figures(subject: Subject, data: Path, most: int | None) -> Figures:
    """Extractive question answering."""
    if subject.reader is None:
        return {}
    examples = rows(data / "squad_v1" / "dev.jsonl.gz", most)
    answers = subject.reader.predict([(row["question"], row["context"]) for row in examples])
    scores = metrics.answering([[answer["text"] for answer in row["answers"]] for row in examples], answers)
    return {f"QA (SQuAD dev), {name}": Figure.of(score, len(examples)) for name, score in scores.items()}


def passage_figures(subject: Subject, data: Path) -> Figures:
    """Passage ranking by embeddings and by the reranking head."""
    examples = rows(data / "wikiqa" / "test.jsonl.gz")
    answered = {row["qid"] for row in examples if float(row["label"])}
    examples = [row for row in examples if row["qid"] in answered]  # MAP is undefined without a relevant passage
    queries, relevant = [row["qid"] for row in examples], [float(row["label"]) for row in examples]
    a = subject.vectors([row["query"] for row in examples], "query")
    b = subject.vectors([row["passage"] for row in examples])
    ways = {"embeddings": (a * b).sum(axis=1)}
    if subject.reranker is not None:
        ways["rerank head"] = subject.reranker.predict([(row["query"], row["passage"]) for row in examples])
    return {
        f"reranking (WikiQA) by {way}, MAP": Figure.of(metrics.ranking(queries, relevant, scores)["map"], len(answered))
        for way, scores in ways.items()
    }


def as_type(tag: str) -> str:
    """Map a tag to WikiANN's PER, ORG and LOC; O for other types."""
    part, _, kind = tag.partition("-")
    kind = TYPES.get(kind, kind)
    return f"{part}-{kind}" if kind in ("PER", "ORG", "LOC") else "O"


NEEDLE, QUESTION, ANSWER = (
    "The harbour master keeps 7351 lanterns .",
    "How many lanterns does the harbour master keep?",
    "7351",
)


def long_texts(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """An article of 2,000 tokens: how much is read, and is an inserted sentence found at every position?"""
    tokenizer = subject.embedder.tokenizer
    text = max(articles(data), key=len)
    text = text[: int(tokenizer.encode(text, special=False).offsets[1999][1])]
    (result,) = subject.embedder.embed_each([text])
    counts = {"tokens": result.tokens_total, "tokens read": result.tokens_read, "windows": result.windows}
    words = text.split(" ")
    cuts = [round(len(words) * place / 10) for place in range(11)]
    haystacks = [" ".join([*words[:cut], NEEDLE, *words[cut:]]) for cut in cuts]
    before, *after = (subject.vectors([QUESTION]) @ subject.vectors([text, *haystacks]).T)[0]
    counts["places of 11 where a sentence moves the vector towards it"] = sum(
        bool(similarity > before) for similarity in after
    )
    if subject.reader is not None:
        answers = subject.reader.predict([(QUESTION, haystack) for haystack in haystacks])
        counts["places of 11 where an answer is found"] = sum(ANSWER in answer for answer in answers)
    return {name: Figure(value) for name, value in counts.items()}


MEASURED: dict[str, Callable[[Subject, Path, argparse.Namespace], Figures]] = dict(
    zip(PARTS, (facts, masked_words, similarity, search, heads, long_texts), strict=False)
)


# --- speed ---


def speed(names: Sequence[str], data: Path, repeats: int) -> dict[str, Figures]:
    """Embedding speed on the CPU: models interleaved, each in a fresh process. Median, minimum and maximum."""
    measured: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for _ in range(repeats):
        for threads in THREADS:
            for name in names:
                limits = {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
                arguments = [name, "--data", str(data), "--time", str(threads)]
                command = [sys.executable, "-m", "benchmarks.builtin", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | limits)
                for label, value in json.loads(done.stdout).items():
                    measured[name].setdefault(label, []).append(value)
    return {
        name: {
            label: Figure(statistics.median(values), min(values), max(values), len(values))
            for label, values in sorted(samples.items())
        }
        for name, samples in measured.items()
    }


def time_process(name: str, data: Path, threads: int) -> dict[str, float]:
    """Measure in this process."""
    import torch

    torch.set_num_threads(threads)
    sentences = list(dict.fromkeys(row["text_a"] for row in rows(data / "stsb" / "test.jsonl.gz")))[:1000]
    paragraphs = list(dict.fromkeys(row["context"] for row in rows(data / "squad_v1" / "dev.jsonl.gz")))[:1000:5]
    start, imports = time.perf_counter(), peak_memory()
    embedder = Embedder.load(name)
    embedder.embed(sentences[:1])
    measured = {"load, s": time.perf_counter() - start, "memory of the imports, MiB": imports}
    for label, texts in (("sentences", sentences), ("paragraphs", paragraphs)):
        embedder.embed(texts[:16])
        start = time.perf_counter()
        embedder.embed(texts)
        rate = len(texts) / (time.perf_counter() - start)
        measured[f"{label} per second, {threads} thread{'s' * (threads > 1)}"] = rate
    return measured | {"peak memory, MiB": peak_memory(), "load of the machine": os.getloadavg()[0]}


def peak_memory() -> float:
    """Peak memory of the process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


# --- command line ---


def read_columns(file: Path) -> list[Column]:
    """Read the columns of an earlier run."""
    columns = []
    for column in json.loads(file.read_text(encoding="utf-8"))["columns"]:
        parts = {part: {k: Figure(**v) for k, v in rows.items()} for part, rows in column["parts"].items()}
        columns.append(Column(column["name"], parts))
    return columns


def start_columns(models: Sequence[str], chosen: Sequence[str]) -> tuple[dict[str, Column], dict[str, Column]]:
    """All columns by name, with the figures of earlier runs; and the columns to measure now, by model.

    Columns of the same name are merged. Speeds are dropped unless all are of one run.
    """
    columns: dict[str, Column] = {}
    fresh, timings = {}, 0
    for model in models:
        if not model.endswith(".json"):
            fresh[model] = columns.setdefault(Path(model).name, Column(Path(model).name, {}))
            continue
        earlier = read_columns(Path(model))
        timings += any("speed" in column.parts for column in earlier)
        for before in earlier:
            column = columns.setdefault(before.name, Column(before.name, {}))
            for part, figures in before.parts.items():
                column.parts.setdefault(part, {}).update(figures)
    if timings + bool(fresh and "speed" in chosen) > 1:
        for column in columns.values():
            column.parts.pop("speed", None)
    return columns, fresh


def measure(options: argparse.Namespace) -> Iterator[list[Column]]:
    """Yield the columns so far, after each part of each model."""
    chosen = [SHORT[name] for name in options.only.split(",")]
    columns, fresh = start_columns(options.models, chosen)
    if "search" in chosen and BM25 not in columns:
        columns[BM25] = Column(BM25, {"search": bm25(options.data)})
    shown = sorted(columns.values(), key=lambda column: column.name == BM25)
    for name, column in fresh.items():
        subject = Subject(name, options.device)
        for part, measure_part in MEASURED.items():
            if part not in chosen:
                continue
            start = time.perf_counter()
            if figures := measure_part(subject, options.data, options):
                column.parts[part] = figures
            print(f"{column.name}: {part}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
            yield shown
    if "speed" in chosen and fresh:
        for name, figures in speed(list(fresh), options.data, options.repeats).items():
            fresh[name].parts["speed"] = figures
    yield shown


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders, built-in names, hub ids or JSON files of earlier runs")
    parser.add_argument("--data", required=True, type=Path, help="folder of the data sets")
    parser.add_argument("--only", default=",".join(SHORT), help="comma-separated parts (default: %(default)s)")
    parser.add_argument("--sentiment", type=Path, help=".jsonl.gz with text and label (negative, neutral, positive)")
    quick = f"a random {QUICK} rows of large sets, a quarter of the articles, no reranking"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of speed measurements")
    parser.add_argument("--device", default="cpu", help="for everything but speed")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path, help="folder for SVG files")
    parser.add_argument("--time", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(SHORT):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(SHORT)}")
    if options.time:
        print(json.dumps(time_process(options.models[0], options.data, options.time)))
        return 0
    columns: list[Column] = []
    for columns in measure(options):
        if options.json:  # after each part, so that an interrupted run leaves results
            options.json.write_text(
                json.dumps({"columns": [asdict(column) for column in columns]}) + "\n", encoding="utf-8"
            )
    print(table(columns))
    if gaps := compare_models(columns, options.data):
        print(f"\n{differences(gaps)}")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, svg in plots(columns).items():
            (options.plots / name).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
