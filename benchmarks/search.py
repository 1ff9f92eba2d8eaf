"""Search by words, by vectors, by both and reranked; and the same models through sentence-transformers.

    python -m benchmarks.search ways MODEL --reranker MODEL --data FOLDER [--sets Cranfield,NPL] [--weight-tokens]
        [--json FILE]
    python -m benchmarks.search parity MODEL … --data FOLDER [--sets Cranfield,STS-B] [--json FILE]

`ways` compares BM25, dense, hybrid (reciprocal ranks, k = 60) and hybrid + rerank (its first 100 documents in the
reranker's order) on each collection, by a paired bootstrap over queries; and both by scores in place of ranks (`bertie
search --weights`), with weights that were best on the other sets of a kind, never on the set itself. A reranker is a
cross-encoder; a MODEL without such a head reranks by its vectors. WikiQA is searched as a collection: all sentences of
its test part, for the questions that one of them answers.

`parity` runs Bertie and sentence-transformers through mteb's own evaluators, offline. Both cut texts at the model's
reach there: sentence-transformers knows nothing else.

Vectors and scores are kept in the folder of --kept, by text: a run that was stopped goes on where it was. And what
reads texts can be done on another machine, which needs nothing but Bertie:

    python -m benchmarks.search vectors MODEL … --data FOLDER --kept FOLDER --device cuda
    python -m benchmarks.search ways MODEL --data FOLDER --kept FOLDER --candidates FILE     # without a reranker
    python -m benchmarks.search scores --candidates FILE --reranker MODEL --data FOLDER --kept FOLDER --device cuda
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.builtin import rows
from bertie.errors import BertieError
from bertie.evaluation import retrieval
from bertie.evaluation.intervals import Difference, Score
from bertie.evaluation.retrieval import Qrels, Run
from bertie.search import beir
from bertie.search.beir import RetrievalDataset
from bertie.tasks import Embedder, Reranker
from bertie.tasks.mteb import MTEBEmbedder
from bertie.tasks.results import EmbeddingResult, RelevanceResult

FOLDERS = {"Cranfield": "cranfield", "CACM": "cacm", "NPL": "npl_vaswani", "CoSQA": "cosqa", "WikiQA": "wikiqa"}
KINDS = (("Cranfield", "CACM", "NPL"), ("CoSQA", "WikiQA"))  # abstracts; what people ask the web
STS = "STS-B"
PARITY = ("Cranfield", "CACM", "CoSQA", STS)
BASES = ("BM25", "dense")
PART = 4096  # texts that are read between two writings
METRICS = {"Retrieval": ("ndcg_at_10", "map_at_1000", "recall_at_100", "mrr_at_10"), "STS": ("spearman", "pearson")}


# --- data ---


def collection(data: Path, name: str) -> RetrievalDataset:
    """One of the sets, by its name in the tables."""
    folder = data / FOLDERS[name]
    return wikiqa(folder) if name == "WikiQA" else beir.read_beir(folder)


def wikiqa(folder: Path) -> RetrievalDataset:
    """All sentences of the test part, for the questions that one of them answers."""
    read = rows(folder / "test.jsonl.gz")
    names = {text: f"s{i}" for i, text in enumerate(dict.fromkeys(row["passage"] for row in read))}
    qrels: dict[str, dict[str, int]] = {}
    queries: dict[str, str] = {}
    for row in read:
        if row["label"]:
            query = f"q{row['qid']}"
            queries[query] = row["query"]
            qrels.setdefault(query, {})[names[row["passage"]]] = 1
    return RetrievalDataset({name: text for text, name in names.items()}, queries, qrels)


# --- vectors that are kept ---


class Kept:
    """Vectors by text, in a file that is written again every few thousand."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[bytes, np.ndarray] = {}
        if file.exists():
            with np.load(file) as held:
                self._known = dict(zip(map(bytes, held["keys"]), held["vectors"], strict=True))

    def __call__(self, texts: Sequence[str], embed: Callable[[list[str]], np.ndarray]) -> np.ndarray:
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}.items())
        for low in range(0, len(missing), PART):
            part = missing[low : low + PART]
            vectors = embed([text for _, text in part])
            self._known.update(zip((key for key, _ in part), vectors, strict=True))
            self._save()
            print(f"{self._file.stem}: {low + len(part):,} of {len(missing):,}", file=sys.stderr, flush=True)
        return np.stack([self._known[key] for key in keys])

    def _save(self) -> None:
        keys = np.frombuffer(b"".join(self._known), dtype=np.uint8).reshape(-1, 32)
        beside = self._file.with_suffix(".part.npz")
        np.savez(beside, keys=keys, vectors=np.stack(list(self._known.values())).astype(np.float32))
        os.replace(beside, self._file)


class KeptEmbedder(Embedder):
    """Reads no text twice, from one run to the next."""

    kept: Kept | None = None

    def embed(self, texts: Iterable[str], *, prompt: str | None = None) -> np.ndarray:
        read = super().embed
        return read(texts, prompt=prompt) if self.kept is None or prompt is not None else self.kept(list(texts), read)

    def embed_each(self, texts: Iterable[str], *, prompt: str | None = None) -> Iterator[EmbeddingResult]:
        if self.kept is None or prompt is not None:
            return super().embed_each(texts, prompt=prompt)
        return (EmbeddingResult(vector, 0, 0, 0) for vector in self.embed(texts))


class KeptReranker(Reranker):
    """Reads no pair twice, from one run to the next."""

    kept: Kept | None = None

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[RelevanceResult]:
        if self.kept is None:
            return super().predict_each(X)
        read = super().predict_each

        def score(some: list[str]) -> np.ndarray:  # (n, 1)
            return np.array([[one.score] for one in read([tuple(two.split("\0")) for two in some])])

        return (RelevanceResult(float(one), 0, 0, 0) for (one,) in self.kept(["\0".join(pair) for pair in X], score))


def embedder(name: str, folder: Path | None, device: str, overflow: Any) -> KeptEmbedder:
    found = KeptEmbedder.load(name, overflow=overflow, device=device)
    if folder is not None:
        kind = {"window": "window", "truncate": "bertie"}[overflow]
        found.kept = Kept(folder / f"{kind}-{Path(name).name}.npz")
    return found


# --- the ways ---


def ways(options: argparse.Namespace) -> dict[str, Any]:
    """Every way on every set, and by how much it is above BM25 alone and dense alone."""
    dense = embedder(options.models[0], options.kept, options.device, options.overflow)
    again = (
        None if options.reranker is None else reranker(options.reranker, options.kept, options.device, options.overflow)
    )
    runs: dict[str, dict[str, Run]] = {}
    sets, candidates = {}, {}
    for name in options.sets or FOLDERS:
        began = time.perf_counter()
        one = sets[name] = collection(options.data, name)
        if options.weight_tokens:
            dense.weight_tokens(one.corpus.values())
        if dense.kept is not None:  # all at once, to be written seldom
            dense.embed(texts_of(options.data, name))
        mine = runs[name] = {"lexical": beir.bm25_run(one), "dense": beir.dense_run(one, dense)}
        both = beir.fuse_by_rank(*mine.values())
        candidates[name] = {query: list(some)[: beir.RERANK_DEPTH] for query, some in both.items()}
        if again is not None:
            mine["rerank"] = again(one, both)
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        save(options.candidates, candidates)
    found: dict[str, Any] = {}
    for name, mine in runs.items():
        lexical, vectors = mine["lexical"], mine["dense"]
        made = {"BM25": lexical, "dense": vectors, "hybrid": beir.fuse_by_rank(lexical, vectors)}
        weights = {}
        if "rerank" in mine:
            made["hybrid + rerank"] = mine["rerank"]
        for way, stages in (("weighted", ("lexical", "dense")), ("weighted + rerank", ("lexical", "dense", "rerank"))):
            others = [other for kind in KINDS if name in kind for other in kind if other != name and other in runs]
            if others and stages[-1] in mine:
                weights[way] = best_on([(sets[other].qrels, runs[other]) for other in others], stages)
                made[way] = beir.fuse_by_score({stage: mine[stage] for stage in stages}, weights[way])
        units = {way: retrieval.per_query_metrics(sets[name].qrels, run) for way, run in made.items()}
        found[name] = {
            "queries": len(sets[name].queries),
            "weights": weights,
            "scores": {way: plain(retrieval.mean_scores(mine)) for way, mine in units.items()},
            "above": {
                way: {base: plain(retrieval.paired_mean_differences(mine, units[base])) for base in BASES}
                for way, mine in units.items()
                if way not in BASES
            },
        }
        save(options.json, found)
    return found


def best_on(sets: Sequence[tuple[Qrels, Mapping[str, Run]]], stages: Sequence[str]) -> dict[str, float]:
    """The weights with the best mean over sets, each of which counts the same."""
    tried = [
        {tuple(weights.items()): value for weights, value in beir.grid_search(qrels, {name: runs[name] for name in stages})}
        for qrels, runs in sets
    ]
    return dict(max(tried[0], key=lambda weights: sum(one[weights] for one in tried)))


def plain(scores: Mapping[str, Score] | Mapping[str, Difference]) -> dict[str, Any]:
    return {metric: asdict(one) for metric, one in scores.items()}


def reranker(name: str, folder: Path | None, device: str, overflow: Any) -> Callable[[RetrievalDataset, Run], Run]:
    """A cross-encoder, or a second embedder where the model has no such head."""
    try:
        cross = KeptReranker.load(name, overflow=overflow, device=device)
    except BertieError:
        return by_vectors(embedder(name, folder, device, overflow))
    if folder is not None:
        cross.kept = Kept(folder / f"scores-{Path(name).name}.npz")

    def again(one: RetrievalDataset, run: Run) -> Run:
        if cross.kept is not None:  # all at once, to be written seldom
            first = [(query, document) for query, some in run.items() for document in list(some)[: beir.RERANK_DEPTH]]
            cross.predict([(one.queries[query], one.corpus[document]) for query, document in first])
        return beir.rerank_run(one, cross, run)

    return again


def by_vectors(second: Embedder) -> Callable[[RetrievalDataset, Run], Run]:
    """The first documents in the order of other vectors, the others behind them."""

    def again(one: RetrievalDataset, run: Run) -> Run:
        first = {query: list(found)[: beir.RERANK_DEPTH] for query, found in run.items()}
        names = list(dict.fromkeys(document for found in first.values() for document in found))
        place = {document: i for i, document in enumerate(names)}
        documents = second.embed([one.corpus[document] for document in names])
        asked = dict(zip(one.queries, second.embed(one.queries.values()), strict=True))
        found = {}
        for query, documents_of in first.items():
            points = second.compare(asked[query][None], documents[[place[d] for d in documents_of]])[0]
            behind = list(run[query])[beir.RERANK_DEPTH :]
            scores = dict(zip(documents_of, map(float, points), strict=True))
            found[query] = scores | {d: float(points.min()) - 1 - i for i, d in enumerate(behind)}
        return found

    return again


def ways_table(found: Mapping[str, Any]) -> str:
    """NDCG@10 of each way, and by how much each is above BM25 alone and dense alone."""
    first = next(iter(found.values()))
    lines = [f"| set (queries) | {' | '.join(first['scores'])} |", "|" + "---|" * (1 + len(first["scores"]))]
    for name, one in found.items():
        values = [str(Score(**scores["ndcg_10"])) for scores in one["scores"].values()]
        lines.append(f"| {name} ({one['queries']}) | {' | '.join(values)} |")
    for base in BASES:
        lines += ["", f"| above {base} | {' | '.join(first['above'])} |", "|" + "---|" * (1 + len(first["above"]))]
        for name, one in found.items():
            gaps = [gap_text(Difference(**above[base]["ndcg_10"])) for above in one["above"].values()]
            lines.append(f"| {name} | {' | '.join(gaps)} |")
    return "\n".join(lines)


def gap_text(gap: Difference) -> str:
    return f"{gap} (p {'≤' if gap.p <= 0.002 else '='} {max(gap.p, 0.002):.3f})"


# --- for another machine ---


def vectors(options: argparse.Namespace) -> None:
    """Keep the vectors of all texts: read in windows, cut, and by sentence-transformers if it is there."""
    for name in options.models:
        ways = {way: embedder(name, options.kept, options.device, way).embed for way in ("window", "truncate")}
        if find_spec("sentence_transformers"):
            ways["theirs"] = sentence_transformer(name, options.kept, options.device).encode
        for embed in ways.values():
            for label in options.sets or (*FOLDERS, STS):
                embed(texts_of(options.data, label))


def texts_of(data: Path, label: str) -> list[str]:
    if label == STS:
        return [row[side] for row in rows(data / "stsb" / "test.jsonl.gz") for side in ("text_a", "text_b")]
    one = collection(data, label)
    return [*one.queries.values(), *one.corpus.values()]


def scores(options: argparse.Namespace) -> None:
    """Keep what a reranker says of candidates."""
    again = reranker(options.reranker, options.kept, options.device, options.overflow)
    for label, candidates in json.loads(options.candidates.read_text(encoding="utf-8")).items():
        again(collection(options.data, label), {q: dict.fromkeys(some, 0.0) for q, some in candidates.items()})


# --- the same through mteb ---


def metadata(name: str, kind: str) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name, description=name, type=kind, dataset={"path": name, "revision": "1"}, category="t2t",
        eval_splits=["test"], eval_langs=["eng-Latn"], main_score=METRICS.get(kind, METRICS["Retrieval"])[0],
    )  # fmt: skip


def retrieval_task(name: str, one: RetrievalDataset, candidates: Mapping[str, Sequence[str]] | None = None) -> Any:
    """A collection as mteb's task; with candidates of each query, one that reranks them."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    class Task(AbsTaskRetrieval):  # type: ignore[misc]
        def load_data(self, *args: Any, **options: Any) -> None:
            asked = [{"id": query, "text": text} for query, text in one.queries.items()]
            held = [{"id": document, "title": "", "text": text} for document, text in one.corpus.items()]
            told = {query: dict(documents) for query, documents in one.qrels.items()}
            parts = {"queries": Dataset.from_list(asked), "corpus": Dataset.from_list(held), "relevant_docs": told}
            ranked = None if candidates is None else {query: list(some) for query, some in candidates.items()}
            self.dataset = {"default": {"test": {**parts, "top_ranked": ranked}}}
            self.data_loaded = True

    Task.metadata = metadata(name, "Retrieval" if candidates is None else "Reranking")
    return Task()


def sts_task(name: str, pairs: Sequence[Mapping[str, Any]]) -> Any:
    """Pairs with a score from 0 to 5 as mteb's task."""
    from datasets import Dataset
    from mteb.abstasks.sts import AbsTaskSTS

    class Task(AbsTaskSTS):  # type: ignore[misc]
        def load_data(self, *args: Any, **options: Any) -> None:
            columns = {"sentence1": "text_a", "sentence2": "text_b", "score": "score"}
            read = Dataset.from_dict({new: [row[old] for row in pairs] for new, old in columns.items()})
            self.dataset = {"default": {"test": read}}
            self.data_loaded = True

    Task.metadata = metadata(name, "STS")
    return Task()


def through_mteb(model: Any, task: Any) -> dict[str, float]:
    """The scores that mteb's evaluator gives."""
    import mteb

    found = mteb.evaluate(model, task, cache=None, co2_tracker=False, encode_kwargs={"show_progress_bar": False})
    (scores,) = found.task_results[0].scores["test"]
    return {name: float(scores[name]) for name in METRICS.get(task.metadata.type, METRICS["Retrieval"])}


def sentence_transformer(name: str, folder: Path | None, device: str) -> Any:
    from sentence_transformers import SentenceTransformer

    kept = None if folder is None else Kept(folder / f"st-{Path(name).name}.npz")

    class KeptSentenceTransformer(SentenceTransformer):
        def encode(self, inputs: list[str], **options: Any) -> Any:
            read = super().encode
            if kept is None:
                return read(inputs, **options)
            return kept(inputs, lambda some: read(some, batch_size=32, show_progress_bar=False))

    return KeptSentenceTransformer(name, device=device)


def parity(options: argparse.Namespace) -> dict[str, Any]:
    """Both libraries on each set, and the largest difference."""
    found: dict[str, Any] = {}
    for name in options.models:
        ours = MTEBEmbedder(embedder(name, options.kept, options.device, "truncate"))
        theirs = sentence_transformer(name, options.kept, options.device)
        one = found.setdefault(Path(name).name, {})
        for label in options.sets or PARITY:
            if label == STS:
                task = sts_task(label, rows(options.data / "stsb" / "test.jsonl.gz"))
            else:
                task = retrieval_task(label, collection(options.data, label))
            both = {"bertie": through_mteb(ours, task), "sentence-transformers": through_mteb(theirs, task)}
            one[label] = both
            save(options.json, found)
    return found


def parity_table(found: Mapping[str, Any]) -> str:
    lines = ["| model | set | metric | Bertie | sentence-transformers |", "|---|---|---|---|---|"]
    for model, sets in found.items():
        for name, both in sets.items():
            theirs = both["sentence-transformers"]
            lines += [
                f"| {model} | {name} | {metric} | {value:.4f} | {theirs[metric]:.4f} |"
                for metric, value in both["bertie"].items()
            ]
    return "\n".join(lines)


# --- the command ---


def save(file: Path | None, found: Mapping[str, Any]) -> None:
    """After each set: a long run that is cut off has left something."""
    if file is not None:
        file.write_text(json.dumps(found) + "\n", encoding="utf-8")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ways", "parity", "vectors", "scores"))
    parser.add_argument("models", nargs="*", help="embedders: folders, built-in names or hub ids; of `ways` one")
    parser.add_argument("--reranker", help="a cross-encoder, or another embedder")
    parser.add_argument("--data", required=True, type=Path, help="the folder of the sets")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="some of them, by the names of the tables")
    parser.add_argument("--kept", type=Path, help="a folder for vectors and scores")
    parser.add_argument("--candidates", type=Path, help="a file for the documents that are to be reranked")
    parser.add_argument("--overflow", choices=("window", "truncate"), default="window", help="of `ways`: long texts")
    parser.add_argument("--weight-tokens", action="store_true", help="of `ways`: SIF token weights of each corpus")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "scores" and None in (options.candidates, options.reranker, options.kept):
        parser.error("`scores` takes --candidates, --reranker and --kept")
    if options.what == "vectors" and options.kept is None:
        parser.error("`vectors` takes --kept")
    if options.weight_tokens and (options.what != "ways" or options.kept):
        parser.error("--weight-tokens is of `ways`, and what --kept holds is from before it")
    if options.what != "scores" and not options.models:
        parser.error(f"`{options.what}` takes the name of an embedder")
    if options.kept:
        options.kept.mkdir(parents=True, exist_ok=True)
    if options.what == "ways":
        print(ways_table(ways(options)))
    elif options.what == "parity":
        print(parity_table(parity(options)))
    else:
        {"vectors": vectors, "scores": scores}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
