"""The built-in model beside others, out of the box: masked words, similarity, search, its heads, long texts, speed.

    python -m benchmarks.builtin MODEL [MODEL …] --data FOLDER [--only sts,retrieval] [--json FILE] [--plots FOLDER]

A MODEL is a folder, a built-in name or a hub id, or the JSON of an earlier run, whose columns are shown again and
compared with. Figures have a 95% bootstrap interval; speeds the lowest and highest of their repeats. Speeds compare
within one run only: those of an earlier run are left out beside others. BM25 is bm25s with Lucene's formula, its k1 of
1.2 and its b of 0.75, on lower-cased words without its English stop words, stemmed.

Masked words are those of BERT's policy (15%, of which 80% masked, 10% random, 10% as they are), the same for each model
of one tokenizer. Between tokenizers neither accuracy nor loss compares: a word of one piece is harder than a piece.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import resolve
from bertie.config import HeadInfo
from bertie.errors import BertieError
from bertie.evaluation import metrics, retrieval
from bertie.evaluation.intervals import Difference, FloatArray, Score, bootstrap, from_sums
from bertie.tasks import Classifier, Embedder, Reader, Reranker, Tagger

PARTS = ("facts", "masked words", "similarity", "search", "heads", "long texts", "speed")
SHORT = dict(zip(("facts", "mlm", "sts", "retrieval", "heads", "long", "speed"), PARTS, strict=True))  # for --only
SEARCHES = {
    "Cranfield": ("cranfield", ""),
    "CACM": ("cacm", ""),
    "NPL": ("npl_vaswani", ""),
    "CoSQA": ("cosqa", ".test"),
}
SIMILAR = {"STS-B test": "stsb/test", "STS-B dev": "stsb/dev"} | {f"STS{y}": f"sts12_16/sts{y}" for y in (12, 13, 15)}
YEARS = ("STS12", "STS13", "STS15")
DEPTH, RERANKED = 1000, 50  # documents of a run, and those that a rerank head reads
QUICK = 2000  # rows of a large set
PIECE = 512  # tokens that masked words are scored in
# WNUT-17's types, as WikiANN and the head for names have them.
TYPES = {"person": "PER", "location": "LOC", "corporation": "ORG", "group": "ORG"}
REPEATS, THREADS = 5, (1, 2)
BM25 = "BM25"


@dataclass
class Figure:
    """A number, its interval, and over how many of what; `units` are kept where models are compared by them."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    units: list[float] | None = None

    @classmethod
    def of(cls, score: Score, n: int, units: FloatArray | None = None) -> Figure:
        return cls(
            score.value, score.low, score.high, n, None if units is None else [round(float(x), 8) for x in units]
        )

    def __str__(self) -> str:
        if self.low is None:
            return f"{self.value:,.6g}" if self.value < 1e6 else f"{self.value:,.0f}"
        digits = 4 if self.value < 10 else 1 if self.value < 1000 else 0
        return f"{self.value:,.{digits}f} [{self.low:,.{digits}f}, {self.high:,.{digits}f}]"


Figures = dict[str, Figure]


@dataclass
class Column:
    """One model's figures, by part and row."""

    name: str
    parts: dict[str, Figures]


# --- data ---


def rows(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """JSON lines, gzipped; a random `most` of them, always the same."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    return found if most is None or len(found) <= most else random.Random(0).sample(found, most)


def document(row: Mapping[str, str]) -> str:
    """Title and text; once, where the text begins with the title."""
    title, text = row.get("title", ""), row["text"]
    return text if text.startswith(title) else f"{title}. {text}".strip()


@dataclass
class Collection:
    """What is searched, for what, and what should be found."""

    ids: list[str]
    texts: list[str]
    queries: dict[str, str]  # those that are scored
    qrels: dict[str, dict[str, int]]

    @classmethod
    def read(cls, data: Path, name: str, split: str) -> Collection:
        qrels: dict[str, dict[str, int]] = {}
        with gzip.open(data / name / f"qrels{split}.tsv.gz", "rt", encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                qrels.setdefault(row["query_id"], {})[row["doc_id"]] = int(row["score"])
        corpus = rows(data / name / "corpus.jsonl.gz")
        asked = {row["id"]: row["text"] for row in rows(data / name / f"queries{split}.jsonl.gz") if row["id"] in qrels}
        return cls([row["id"] for row in corpus], [document(row) for row in corpus], asked, qrels)

    def run(self, points: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
        """From each query's scores of all documents to its best."""
        found = {}
        for query, one in zip(self.queries, points, strict=True):
            best = np.argsort(-one, kind="stable")[:DEPTH]
            found[query] = {self.ids[i]: float(one[i]) for i in best}
        return found


def articles(data: Path) -> list[str]:
    """WikiText-103's held-out articles, without those whose titles are also in the text for pretraining.

    Its spellings @-@, @,@ and @.@ are undone, and the equals signs of headings left out.
    """
    folder = data / "wikitext103_heldout"
    with (folder / "titles_also_in_pretrain.tsv").open(encoding="utf-8") as file:
        barred = {(row["split"], row["title"]) for row in csv.DictReader(file, delimiter="\t")}
    found: list[tuple[tuple[str, str], list[str]]] = []
    for split in ("valid", "test"):
        with gzip.open(folder / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
            for line in map(str.strip, file):
                inner = line.strip("= ")
                if line.startswith("= ") and line.endswith(" =") and not line.startswith("= ="):
                    found.append(((split, inner), [inner]))
                elif line and found:
                    found[-1][1].append(inner if line.startswith("= =") else line)
    texts = ["\n".join(lines) for key, lines in found if key not in barred]
    for spelled, meant in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        texts = [text.replace(spelled, meant) for text in texts]
    return texts


def similar(data: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The sets of sentence pairs."""
    for label, name in SIMILAR.items():
        yield label, rows(data / f"{name}.jsonl.gz")


# --- a model and what it can do ---


class Subject:
    """A checkpoint, with the tasks that its heads are for."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        self.name, self.device = name, device
        self.checkpoint = Checkpoint.load(name, device=device)

    @cached_property
    def embedder(self) -> Embedder:
        return Embedder(self.checkpoint)

    def vectors(self, texts: Sequence[str], prompt: str | None = None) -> np.ndarray:
        """(n, D), of length 1; with the prompt of that name if the checkpoint has one. No text is read twice."""
        prompt = prompt if prompt in self.embedder.modules.prompts else None
        place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        found = self.embedder.embed(list(place), prompt=prompt).astype(np.float64)
        found /= np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)
        return found[[place[text] for text in texts]]

    def head(self, fits: Callable[[HeadInfo], bool]) -> str | None:
        """The first head that fits."""
        return next((name for name, info in self.checkpoint.heads.items() if fits(info)), None)

    def classifier(self, labels: set[str]) -> Classifier | None:
        """By what its labels are."""
        name = self.head(lambda info: info.kind == "classify" and labels <= set(info.labels.values()))
        return None if name is None else Classifier(self.checkpoint, head=name)

    @cached_property
    def reranker(self) -> Reranker | None:
        name = self.head(lambda info: info.task == "rerank")
        if name is None and self.checkpoint.cross_encoder is not None and len(self.checkpoint.labels) == 1:
            name = "classify"
        return None if name is None else Reranker(self.checkpoint, head=name)

    @cached_property
    def tagger(self) -> Tagger | None:
        name = self.head(lambda info: info.kind == "tag" and any("PER" in tag for tag in info.labels.values()))
        return None if name is None else Tagger(self.checkpoint, head=name)

    @cached_property
    def reader(self) -> Reader | None:
        name = self.head(lambda info: info.kind == "answer")
        return None if name is None else Reader(self.checkpoint, head=name)

    @cached_property
    def masked(self) -> tuple[Checkpoint, str] | None:
        """With a head for masked words: a folder of sentence vectors does not say that it has one."""
        name = self.head(lambda info: info.kind == "mlm")
        if name is not None:
            return self.checkpoint, name
        try:
            return Checkpoint.load(self.name, head="mlm", device=self.device), "mlm"
        except BertieError:
            return None


# --- the parts ---


def facts(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """What it takes on disk, and how large it is."""
    model, folder = subject.checkpoint.model, resolve(subject.name)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    counts = {"parameters": sum(p.numel() for p in model.parameters()), "folder, bytes": size}
    counts |= {"vector, numbers": subject.embedder.dimension, "tokens at once": subject.checkpoint.max_length}
    return {name: Figure(count) for name, count in counts.items()}


def masked_words(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Accuracy and loss at hidden places of held-out text, drawn by article."""
    if subject.masked is None:
        return {}
    texts = articles(data)
    checkpoint, head = subject.masked
    sums = np.array(list(_judged(checkpoint, head, texts[:: 4 if options.quick else 1])))
    found = bootstrap(from_sums(sums, lambda s: {"accuracy": s[:, 0] / s[:, 2], "loss": s[:, 1] / s[:, 2]}), len(sums))
    return {f"WikiText-103 held-out, {name}": Figure.of(one, int(sums[:, 2].sum())) for name, one in found.items()}


def _judged(checkpoint: Checkpoint, head: str, texts: Sequence[str]) -> Iterator[tuple[float, float, float]]:
    """Of each article: how many are right, the sum of the losses, how many were asked."""
    import torch

    from bertie.text.batch import Batch, pack
    from bertie.training.pretrain.masking import Masking, seeded

    model, tokenizer, masking = checkpoint.model, checkpoint.tokenizer, Masking()
    assert tokenizer is not None
    assert tokenizer.mask_id is not None
    roles = [tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id, tokenizer.unk_id, tokenizer.mask_id]
    never = [one for one in roles if one is not None]
    unknown = "" if tokenizer.unk_id is None else tokenizer.token(tokenizer.unk_id)
    room = min(PIECE, checkpoint.max_length) - 2
    for number, text in enumerate(texts):
        whole = tokenizer.encode(text.replace("<unk>", unknown), special=False).ids
        inner = [whole[low : low + room] for low in range(0, len(whole), room)]
        pieces = [np.concatenate([[tokenizer.cls_id], one, [tokenizer.sep_id]]) for one in inner]
        right = loss = asked = 0.0
        rng = seeded(0, None, number)
        for group in pack([len(one) for one in pieces], 16 * PIECE):
            ids, cu = np.concatenate([pieces[i] for i in group]), np.cumsum([0, *(len(pieces[i]) for i in group)])
            special = np.isin(ids, never)
            places = masking.choose(special, ~special, cu, rng)
            read, wanted = masking.apply(ids, places, rng, tokenizer.vocab_size, tokenizer.mask_id, never)
            with torch.inference_mode():
                batch = Batch.from_ids(np.split(read, cu[1:-1])).to(model.device)
                hidden = model.hidden(batch, head)[torch.from_numpy(places).to(model.device)]  # (M, D)
                logits = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight).float()  # (M, V)
                truth = torch.from_numpy(wanted).to(model.device)
                right += float((logits.argmax(-1) == truth).sum())
                loss += float(torch.nn.functional.cross_entropy(logits, truth, reduction="sum"))
            asked += len(places)
        yield right, loss, asked


def similarity(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Spearman's correlation of cosines with what people say."""
    found = {}
    for label, pairs in similar(data):
        a, b = np.split(subject.vectors([row[side] for side in ("text_a", "text_b") for row in pairs]), 2)
        cosines = (a * b).sum(axis=1)
        score = metrics.regression([row["score"] for row in pairs], cosines)["spearman"]
        found[label] = Figure.of(score, len(pairs), cosines)
    return found | {f"mean of {', '.join(YEARS)}": mean([found[year] for year in YEARS])}


def mean(figures: Sequence[Figure]) -> Figure:
    """Of figures over different texts. The interval follows from theirs: distances to the ends add up as squares
    (Zou and Donner, 2008).
    """
    value = statistics.fmean(one.value for one in figures)
    below, above = (
        math.sqrt(sum((getattr(one, end) - one.value) ** 2 for one in figures)) / len(figures)
        for end in ("low", "high")
    )
    return Figure(value, value - below, value + above, sum(one.n or 0 for one in figures))


def search(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """Each collection by vectors; then its first 50 in the order of the rerank head, if there is one and time."""
    vectors, again = {}, {}
    for label, (name, split) in SEARCHES.items():
        collection = Collection.read(data, name, split)
        asked = subject.vectors(list(collection.queries.values()), "query")
        run = collection.run(asked @ subject.vectors(collection.texts, "document").T)
        vectors[label] = retrieval.per_query_metrics(collection.qrels, run)
        if subject.reranker is not None and not options.quick:
            again[label] = retrieval.per_query_metrics(collection.qrels, reranked(subject.reranker, collection, run))
    return searched(vectors) | (searched(again, ", first 50 reranked") if again else {})


def reranked(
    reranker: Reranker, collection: Collection, run: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """The first documents of each query in the reranker's order, the others behind them in their own."""
    text = dict(zip(collection.ids, collection.texts, strict=True))
    best = {query: list(one)[:RERANKED] for query, one in run.items()}
    said = iter(reranker.predict([(collection.queries[query], text[d]) for query, one in best.items() for d in one]))
    found = {}
    for query, one in best.items():
        points = {d: float(next(said)) for d in one}
        least = min(points.values())
        found[query] = points | {d: least - 1 - i for i, d in enumerate(list(run[query])[RERANKED:])}
    return found


def bm25(data: Path) -> Figures:
    """The same collections by words."""
    package, stemmer = import_module("bm25s"), import_module("Stemmer").Stemmer("english")
    found = {}
    for label, (name, split) in SEARCHES.items():
        collection = Collection.read(data, name, split)
        settings = {"stopwords": "en", "stemmer": stemmer, "show_progress": False}
        index = package.BM25(method="lucene", k1=1.2, b=0.75)
        index.index(package.tokenize(collection.texts, **settings), show_progress=False)
        words = package.tokenize(list(collection.queries.values()), return_ids=False, **settings)
        run = collection.run([index.get_scores(one) for one in words])
        # What shares no word with the query is not found.
        run = {query: {d: point for d, point in one.items() if point > 0} for query, one in run.items()}
        found[label] = retrieval.per_query_metrics(collection.qrels, run)
    return searched(found)


def searched(found: Mapping[str, Mapping[str, FloatArray]], how: str = "") -> Figures:
    """The figures of several collections, nDCG@10 first."""
    main, others = {}, {}
    for label, values in found.items():
        for metric, score in retrieval.mean_scores(values).items():
            n = len(values[metric])
            if metric == "ndcg_10":
                main[f"{label}, nDCG@10{how}"] = Figure.of(score, n, values[metric])
            else:
                others[f"{label}, {metric}{how}"] = Figure.of(score, n)
    return main | {f"mean nDCG@10{how}": mean(list(main.values()))} | others


def heads(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """What the heads say, untrained on these sets' test parts."""
    most = QUICK if options.quick else None
    found: Figures = {}
    for label, file, texts in (
        ("sentiment (GoEmotions)", options.sentiment, ("text",)),
        ("entailment (SNLI)", data / "snli" / "test.jsonl.gz", ("text_a", "text_b")),
    ):
        if file is None:
            continue
        read = rows(file, most)
        classifier = subject.classifier({row["label"] for row in read})
        if classifier is not None:
            said = classifier.classify(
                [tuple(row[t] for t in texts) if len(texts) > 1 else row["text"] for row in read]
            )
            names = list(classifier.info.labels.values())
            table = [[one.scores[name] for name in names] for one in said]
            predictions = metrics.classification([row["label"] for row in read], table, names)
            found |= {
                f"{label}, {metric}": Figure.of(predictions[metric], len(read)) for metric in ("accuracy", "macro_f1")
            }
    if subject.tagger is not None:
        for label, name in (("names (WikiANN)", "wikiann/test.en"), ("names (WNUT-17)", "wnut17/test")):
            read = rows(data / f"{name}.jsonl.gz", most)
            tagged = subject.tagger.predict([row["tokens"] for row in read])
            gold, tags = (
                [[as_type(tag) for tag in one] for one in many] for many in ([r["tags"] for r in read], tagged)
            )
            found[f"{label}, F1"] = Figure.of(metrics.tagging(gold, tags)["f1"], len(read))
    if subject.reader is not None:
        read = rows(data / "squad_v1" / "dev.jsonl.gz", most)
        answers = subject.reader.predict([(row["question"], row["context"]) for row in read])
        predictions = metrics.answering([[one["text"] for one in row["answers"]] for row in read], answers)
        found |= {f"answers (SQuAD dev), {name}": Figure.of(one, len(read)) for name, one in predictions.items()}
    read = rows(data / "wikiqa" / "test.jsonl.gz")
    told = {row["qid"] for row in read if float(row["label"])}
    read = [row for row in read if row["qid"] in told]  # a question without a right passage says nothing
    asked, relevant = [row["qid"] for row in read], [float(row["label"]) for row in read]
    a, b = subject.vectors([row["query"] for row in read], "query"), subject.vectors([r["passage"] for r in read])
    ways = {"vectors": (a * b).sum(axis=1)}
    if subject.reranker is not None:
        ways["rerank head"] = subject.reranker.predict([(row["query"], row["passage"]) for row in read])
    for way, points in ways.items():
        found[f"passages (WikiQA) by {way}, MAP"] = Figure.of(
            metrics.ranking(asked, relevant, points)["map"], len(told)
        )
    return found


def as_type(tag: str) -> str:
    """A tag of persons, organisations and places, spelled as WikiANN spells it; O for any other."""
    part, _, kind = tag.partition("-")
    kind = TYPES.get(kind, kind)
    return f"{part}-{kind}" if kind in ("PER", "ORG", "LOC") else "O"


NEEDLE, ASKED, ANSWER = (
    "The harbour master keeps 7351 lanterns .",
    "How many lanterns does the harbour master keep?",
    "7351",
)


def long_texts(subject: Subject, data: Path, options: argparse.Namespace) -> Figures:
    """A real article of 2,000 tokens: how much of it is read, and is a sentence in it noticed wherever it stands?"""
    tokenizer = subject.embedder.tokenizer
    text = max(articles(data), key=len)
    text = text[: int(tokenizer.encode(text, special=False).offsets[1999][1])]
    (said,) = subject.embedder.embed_each([text])
    found = {"tokens": said.tokens_total, "tokens read": said.tokens_read, "windows": said.windows}
    words = text.split(" ")
    cuts = [round(len(words) * place / 10) for place in range(11)]
    hays = [" ".join([*words[:cut], NEEDLE, *words[cut:]]) for cut in cuts]
    before, *after = (subject.vectors([ASKED]) @ subject.vectors([text, *hays]).T)[0]
    found["places of 11 where a sentence moves the vector towards it"] = sum(bool(one > before) for one in after)
    if subject.reader is not None:
        answers = subject.reader.predict([(ASKED, hay) for hay in hays])
        found["places of 11 where an answer is found"] = sum(ANSWER in one for one in answers)
    return {name: Figure(value) for name, value in found.items()}


MEASURED: dict[str, Callable[[Subject, Path, argparse.Namespace], Figures]] = dict(
    zip(PARTS, (facts, masked_words, similarity, search, heads, long_texts), strict=False)
)


# --- speed ---


def speed(names: Sequence[str], data: Path, repeats: int) -> dict[str, Figures]:
    """Vectors from texts on the CPU: every model, in fresh processes, in turn. Median, lowest and highest."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    for _ in range(repeats):
        for threads in THREADS:
            for name in names:
                limits = {"OMP_NUM_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)}
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.builtin",
                    name,
                    "--data",
                    str(data),
                    "--timed",
                    str(threads),
                ]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | limits)
                for label, value in json.loads(done.stdout).items():
                    found[name].setdefault(label, []).append(value)
    return {
        name: {
            label: Figure(statistics.median(values), min(values), max(values), len(values))
            for label, values in sorted(one.items())
        }
        for name, one in found.items()
    }


def timed(name: str, data: Path, threads: int) -> dict[str, float]:
    """One process's times."""
    import torch

    torch.set_num_threads(threads)
    sentences = list(dict.fromkeys(row["text_a"] for row in rows(data / "stsb" / "test.jsonl.gz")))[:1000]
    paragraphs = list(dict.fromkeys(row["context"] for row in rows(data / "squad_v1" / "dev.jsonl.gz")))[:1000:5]
    began, imports = time.perf_counter(), peak()
    embedder = Embedder.load(name)
    embedder.embed(sentences[:1])
    found = {"load, s": time.perf_counter() - began, "memory of the imports, MiB": imports}
    for label, texts in (("sentences", sentences), ("paragraphs", paragraphs)):
        embedder.embed(texts[:16])
        began = time.perf_counter()
        embedder.embed(texts)
        found[f"{label} a second, {threads} thread{'s' * (threads > 1)}"] = len(texts) / (time.perf_counter() - began)
    return found | {"peak memory, MiB": peak(), "load of the machine": os.getloadavg()[0]}


def peak() -> float:
    """What the process has held at most, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


# --- what is shown ---


def compared(columns: Sequence[Column], data: Path) -> list[tuple[str, str, str, Difference]]:
    """Row, model, other, difference: each model against BM25 and against those after it, on the same units."""
    gold = {label: [row["score"] for row in read] for label, read in similar(data)} if len(columns) > 1 else {}
    found = []
    for i, one in enumerate(columns):
        for other in columns[i + 1 :]:
            for label, mine in one.parts.get("similarity", {}).items():
                theirs = other.parts.get("similarity", {}).get(label)
                if theirs is not None and mine.units and theirs.units:
                    gap = metrics.paired("regress", (gold[label], mine.units), (gold[label], theirs.units))["spearman"]
                    found.append((label, one.name, other.name, gap))
            for label, mine in one.parts.get("search", {}).items():
                theirs = other.parts.get("search", {}).get(
                    label.partition(", first")[0] if other.name == BM25 else label
                )
                if theirs is not None and mine.units and theirs.units:
                    gap = retrieval.paired_mean_differences({"": np.array(mine.units)}, {"": np.array(theirs.units)})[
                        ""
                    ]
                    found.append((label, one.name, other.name, gap))
    return found


def table(columns: Sequence[Column]) -> str:
    """Markdown: a row a figure, a column a model."""
    lines = [f"| | {' | '.join(column.name for column in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for part in PARTS:
        labels = dict.fromkeys(label for column in columns for label in column.parts.get(part, {}))
        for label in labels:
            cells = (str(column.parts.get(part, {}).get(label, "–")) for column in columns)
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(found: Sequence[tuple[str, str, str, Difference]]) -> str:
    """Markdown: a row a comparison."""
    lines = ["| | model | against | difference | p |", "|---|---|---|---|---|"]
    lines += [f"| {label} | {one} | {other} | {gap} | {gap.p:.3f} |" for label, one, other, gap in found]
    return "\n".join(lines)


_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.end{text-anchor:end}.small{font-size:11px}line{stroke:#222}"
    ".grid{stroke:#ddd}.a{fill:#2a6fbb}.b{fill:#e08a3c}.c{fill:#8a8f98}.d{fill:#57a773}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#ddd}.grid{stroke:#444}}"
)


def bars(title: str, columns: Sequence[Column], part: str, labels: Sequence[str]) -> str:
    """An SVG: a group of bars a row, a bar a model, a line over each for its interval."""
    thick, gap, left, wide, top = 16, 14, 290, 460, 54
    shown = []  # (column, figure) of each row
    for label in labels:
        cells = [column.parts[part].get(label) for column in columns]
        shown.append([(c, figure) for c, figure in enumerate(cells) if figure is not None])
    most = max(figure.high or figure.value for group in shown for _, figure in group)
    most = most if most > 0 else 1.0  # nothing to be seen, of a model that knows nothing
    unit = 10.0 ** math.floor(math.log10(most / 5))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times * 5 >= most)
    end = math.ceil(most / step) * step
    foot = top + sum(len(group) * thick + gap for group in shown)
    shapes = [f'<text x="{left}" y="18">{escape(title)}</text>']
    for i in range(round(end / step) + 1):
        x = left + wide * i * step / end
        shapes.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{foot}"/>')
        shapes.append(f'<text class="small" x="{x:.1f}" y="{foot + 14}" text-anchor="middle">{i * step:.6g}</text>')
    for c, column in enumerate(columns):
        x = left + c * wide / len(columns)
        shapes.append(f'<rect class="{"abcd"[c % 4]}" x="{x:.0f}" y="28" width="11" height="11"/>')
        shapes.append(f'<text class="small" x="{x + 16:.0f}" y="38">{escape(column.name)}</text>')
    y = float(top)
    for label, group in zip(labels, shown, strict=True):
        shapes.append(
            f'<text class="end" x="{left - 8}" y="{y + len(group) * thick / 2 + 4:.1f}">{escape(label)}</text>'
        )
        for c, figure in group:
            long, middle = wide * figure.value / end, y + (thick - 2) / 2
            what = escape(f"{columns[c].name}, {label}: {figure}")
            place = f'x="{left}" y="{y:.1f}" width="{max(0.0, long):.1f}" height="{thick - 2}"'
            shapes.append(f'<rect class="{"abcd"[c % 4]}" {place}><title>{what}</title></rect>')
            low, high = (
                left + wide * (figure.value if one is None else one) / end for one in (figure.low, figure.high)
            )
            shapes.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>')
            said = f"{figure.value:.3f}" if abs(figure.value) < 10 else f"{figure.value:,.0f}"
            shapes.append(f'<text class="small" x="{high + 5:.1f}" y="{middle + 4:.1f}">{said}</text>')
            y += thick
        y += gap
    size = f'viewBox="0 0 {left + wide + 60} {foot + 22:.0f}" width="{left + wide + 60}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" {size}>'
    return f"{head}<title>{escape(title)}</title><style>{_STYLE}</style>{''.join(shapes)}</svg>\n"


def plots(columns: Sequence[Column]) -> dict[str, str]:
    """The figures with intervals, as SVG files by name."""
    found = {}
    for name, part, title, wanted in (
        ("similarity", "similarity", "Similarity of sentences: Spearman", ""),
        ("search", "search", "Search: nDCG@10", "nDCG@10"),
        ("heads", "heads", "Heads, out of the box", ""),
        ("speed", "speed", "Vectors a second on the CPU", "a second"),
    ):
        labels = dict.fromkeys(label for column in columns for label in column.parts.get(part, {}) if wanted in label)
        if labels:
            there = [column for column in columns if labels.keys() & column.parts.get(part, {}).keys()]
            found[f"builtin-{name}.svg"] = bars(title, there, part, list(labels))
    return found


# --- the command ---


def earlier(file: Path) -> list[Column]:
    """The columns of an earlier run."""
    return [
        Column(one["name"], {part: {k: Figure(**v) for k, v in found.items()} for part, found in one["parts"].items()})
        for one in json.loads(file.read_text(encoding="utf-8"))["columns"]
    ]


def begun(models: Sequence[str], wanted: Sequence[str]) -> tuple[dict[str, Column], dict[str, Column]]:
    """All columns by their names, with what earlier runs found; and those to be measured now, by model.

    Columns of one name are one. Speeds are left out unless all are of one run.
    """
    columns: dict[str, Column] = {}
    fresh, timings = {}, 0
    for model in models:
        if not model.endswith(".json"):
            fresh[model] = columns.setdefault(Path(model).name, Column(Path(model).name, {}))
            continue
        found = earlier(Path(model))
        timings += any("speed" in one.parts for one in found)
        for one in found:
            column = columns.setdefault(one.name, Column(one.name, {}))
            for part, figures in one.parts.items():
                column.parts.setdefault(part, {}).update(figures)
    if timings + bool(fresh and "speed" in wanted) > 1:
        for column in columns.values():
            column.parts.pop("speed", None)
    return columns, fresh


def measure(options: argparse.Namespace) -> Iterator[list[Column]]:
    """The columns so far, after each part of each model."""
    wanted = [SHORT[one] for one in options.only.split(",")]
    columns, fresh = begun(options.models, wanted)
    if "search" in wanted and BM25 not in columns:
        columns[BM25] = Column(BM25, {"search": bm25(options.data)})
    shown = sorted(columns.values(), key=lambda column: column.name == BM25)
    for name, column in fresh.items():
        subject = Subject(name, options.device)
        for part, figured in MEASURED.items():
            if part not in wanted:
                continue
            began = time.perf_counter()
            if figures := figured(subject, options.data, options):
                column.parts[part] = figures
            print(f"{column.name}: {part}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
            yield shown
    if "speed" in wanted and fresh:
        for name, figures in speed(list(fresh), options.data, options.repeats).items():
            fresh[name].parts["speed"] = figures
    yield shown


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders, built-in names, hub ids or JSON files of earlier runs")
    parser.add_argument("--data", required=True, type=Path, help="the folder of the sets")
    parser.add_argument("--only", default=",".join(SHORT), help="parts, of: %(default)s")
    parser.add_argument(
        "--sentiment", type=Path, help="rows of text and label (negative, neutral, positive), .jsonl.gz"
    )
    quick = f"a random {QUICK} rows of large sets, a quarter of the articles, no reranking of searches"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of the speeds")
    parser.add_argument("--device", default="cpu", help="for all but the speeds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path, help="a folder for SVG files")
    parser.add_argument("--timed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(SHORT):
        parser.error(f"--only {','.join(sorted(unknown))}: there are {', '.join(SHORT)}")
    if options.timed:
        print(json.dumps(timed(options.models[0], options.data, options.timed)))
        return 0
    columns: list[Column] = []
    for columns in measure(options):
        if options.json:  # after each part: a long run that is cut off has left something
            options.json.write_text(json.dumps({"columns": [asdict(one) for one in columns]}) + "\n", encoding="utf-8")
    print(table(columns))
    if gaps := compared(columns, options.data):
        print(f"\n{differences(gaps)}")
    if options.plots:
        options.plots.mkdir(parents=True, exist_ok=True)
        for name, svg in plots(columns).items():
            (options.plots / name).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
