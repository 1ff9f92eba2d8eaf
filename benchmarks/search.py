"""Compare BM25, dense, hybrid and reranked search; and the same models through sentence-transformers.

    python -m benchmarks.search ways MODEL --reranker MODEL --data FOLDER [--sets Cranfield,NPL] [--weight-tokens]
        [--json FILE]
    python -m benchmarks.search parity MODEL … --data FOLDER [--sets Cranfield,STS-B] [--json FILE]

`ways` compares BM25, dense, hybrid (reciprocal rank fusion, k = 60) and hybrid + rerank (its top 100 documents) on each
collection, by a paired bootstrap over queries; and both with weighted score fusion instead of ranks (`bertie search
--weights`), with weights tuned on the other sets of the same kind, never on the set itself. A reranker is a
cross-encoder; a MODEL without such a head reranks by its embeddings. WikiQA is searched as a collection: all sentences
of its test split, for the questions that one of them answers.

`parity` runs Bertie and sentence-transformers through mteb's own evaluators, offline. Both truncate texts at the
model's max_length there, since sentence-transformers has no windows.

Embeddings and scores are cached in the folder of --cache, by text: an interrupted run continues where it was. The parts
that run the models can be done on another machine, which needs nothing but Bertie:

    python -m benchmarks.search vectors MODEL … --data FOLDER --cache FOLDER --device cuda
    python -m benchmarks.search ways MODEL --data FOLDER --cache FOLDER --candidates FILE     # without a reranker
    python -m benchmarks.search scores --candidates FILE --reranker MODEL --data FOLDER --cache FOLDER --device cuda
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

from benchmarks.builtin_data import rows
from benchmarks.mteb_tasks import retrieval_task, sts_task, through_mteb
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
KINDS = (("Cranfield", "CACM", "NPL"), ("CoSQA", "WikiQA"))  # abstracts; web questions
STS = "STS-B"
PARITY = ("Cranfield", "CACM", "CoSQA", STS)
BASES = ("BM25", "dense")
SAVE_EVERY = 4096  # texts


# --- data ---


def collection(data: Path, name: str) -> RetrievalDataset:
    """Read a data set by its name in the tables."""
    folder = data / FOLDERS[name]
    return wikiqa(folder) if name == "WikiQA" else beir.read_beir(folder)


def wikiqa(folder: Path) -> RetrievalDataset:
    """All sentences of the test split, and the questions that one of them answers."""
    examples = rows(folder / "test.jsonl.gz")
    names = {text: f"s{i}" for i, text in enumerate(dict.fromkeys(row["passage"] for row in examples))}
    qrels: dict[str, dict[str, int]] = {}
    queries: dict[str, str] = {}
    for row in examples:
        if row["label"]:
            query = f"q{row['qid']}"
            queries[query] = row["query"]
            qrels.setdefault(query, {})[names[row["passage"]]] = 1
    return RetrievalDataset({name: text for text, name in names.items()}, queries, qrels)


# --- cached embeddings and scores ---


class VectorCache:
    """Vectors by text, in a file that is saved every few thousand texts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[bytes, np.ndarray] = {}
        if file.exists():
            with np.load(file) as saved:
                self._known = dict(zip(map(bytes, saved["keys"]), saved["vectors"], strict=True))

    def __call__(self, texts: Sequence[str], embed: Callable[[list[str]], np.ndarray]) -> np.ndarray:
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}.items())
        for start in range(0, len(missing), SAVE_EVERY):
            part = missing[start : start + SAVE_EVERY]
            vectors = embed([text for _, text in part])
            self._known.update(zip((key for key, _ in part), vectors, strict=True))
            self._save()
            print(f"{self._file.stem}: {start + len(part):,} of {len(missing):,}", file=sys.stderr, flush=True)
        return np.stack([self._known[key] for key in keys])

    def _save(self) -> None:
        keys = np.frombuffer(b"".join(self._known), dtype=np.uint8).reshape(-1, 32)
        draft = self._file.with_suffix(".part.npz")
        np.savez(draft, keys=keys, vectors=np.stack(list(self._known.values())).astype(np.float32))
        os.replace(draft, self._file)


class CachedEmbedder(Embedder):
    """Embeds each text once, across runs."""

    cache: VectorCache | None = None

    def embed(self, texts: Iterable[str], **options: Any) -> np.ndarray:
        embed = super().embed
        prompted = any(options.get(name) for name in ("prompt", "prompt_name"))
        return embed(texts, **options) if self.cache is None or prompted else self.cache(list(texts), embed)

    def embed_each(self, texts: Iterable[str], **options: Any) -> Iterator[EmbeddingResult]:
        if self.cache is None or any(options.values()):
            return super().embed_each(texts, **options)
        return (EmbeddingResult(vector, 0, 0, 0) for vector in self.embed(texts))


class CachedReranker(Reranker):
    """Scores each pair once, across runs."""

    cache: VectorCache | None = None

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[RelevanceResult]:
        if self.cache is None:
            return super().predict_each(X)
        predict = super().predict_each

        def score(joined: list[str]) -> np.ndarray:  # (n, 1)
            return np.array([[result.score] for result in predict([tuple(pair.split("\0")) for pair in joined])])

        return (
            RelevanceResult(float(value), 0, 0, 0) for (value,) in self.cache(["\0".join(pair) for pair in X], score)
        )


def embedder(name: str, folder: Path | None, device: str, overflow: Any) -> CachedEmbedder:
    loaded = CachedEmbedder.load(name, overflow=overflow, device=device)
    if folder is not None:
        kind = {"window": "window", "truncate": "bertie"}[overflow]
        loaded.cache = VectorCache(folder / f"{kind}-{Path(name).name}.npz")
    return loaded


# --- comparison of methods ---


def ways(options: argparse.Namespace) -> dict[str, Any]:
    """Score every method on every set, and its difference to BM25 and dense."""
    dense = embedder(options.models[0], options.cache, options.device, options.overflow)
    rerank = (
        None
        if options.reranker is None
        else reranker(options.reranker, options.cache, options.device, options.overflow)
    )
    runs: dict[str, dict[str, Run]] = {}
    sets, candidates = {}, {}
    for name in options.sets or FOLDERS:
        start = time.perf_counter()
        dataset = sets[name] = collection(options.data, name)
        if options.weight_tokens:
            dense.weight_tokens(dataset.corpus.values())
        if dense.cache is not None:  # all at once, to save the cache rarely
            dense.embed(texts_of(options.data, name))
        own = runs[name] = {"lexical": beir.bm25_run(dataset), "dense": beir.dense_run(dataset, dense)}
        hybrid = beir.fuse_by_rank(*own.values())
        candidates[name] = {query: list(ranking)[: beir.RERANK_DEPTH] for query, ranking in hybrid.items()}
        if rerank is not None:
            own["rerank"] = rerank(dataset, hybrid)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        save(options.candidates, candidates)
    results: dict[str, Any] = {}
    for name, own in runs.items():
        lexical, vectors = own["lexical"], own["dense"]
        methods = {"BM25": lexical, "dense": vectors, "hybrid": beir.fuse_by_rank(lexical, vectors)}
        weights = {}
        if "rerank" in own:
            methods["hybrid + rerank"] = own["rerank"]
        for way, stages in (("weighted", ("lexical", "dense")), ("weighted + rerank", ("lexical", "dense", "rerank"))):
            others = [other for kind in KINDS if name in kind for other in kind if other != name and other in runs]
            if others and stages[-1] in own:
                weights[way] = best_on([(sets[other].qrels, runs[other]) for other in others], stages)
                methods[way] = beir.fuse_by_score({stage: own[stage] for stage in stages}, weights[way])
        units = {way: retrieval.per_query_metrics(sets[name].qrels, run) for way, run in methods.items()}
        results[name] = {
            "queries": len(sets[name].queries),
            "weights": weights,
            "scores": {way: as_dicts(retrieval.mean_scores(values)) for way, values in units.items()},
            "above": {
                way: {base: as_dicts(retrieval.paired_mean_differences(values, units[base])) for base in BASES}
                for way, values in units.items()
                if way not in BASES
            },
        }
        save(options.json, results)
    return results


def best_on(sets: Sequence[tuple[Qrels, Mapping[str, Run]]], stages: Sequence[str]) -> dict[str, float]:
    """The weights with the best mean nDCG@10 over sets, each weighted equally."""
    tried = [
        {
            tuple(weights.items()): value
            for weights, value in beir.grid_search(qrels, {name: runs[name] for name in stages})
        }
        for qrels, runs in sets
    ]
    return dict(max(tried[0], key=lambda weights: sum(values[weights] for values in tried)))  # type: ignore[index]


def as_dicts(scores: Mapping[str, Score] | Mapping[str, Difference]) -> dict[str, Any]:
    return {metric: asdict(score) for metric, score in scores.items()}


def reranker(name: str, folder: Path | None, device: str, overflow: Any) -> Callable[[RetrievalDataset, Run], Run]:
    """Rerank with a cross-encoder, or with a second embedder if the model has no such head."""
    try:
        cross = CachedReranker.load(name, overflow=overflow, device=device)
    except BertieError:
        return rerank_by_embeddings(embedder(name, folder, device, overflow))
    if folder is not None:
        cross.cache = VectorCache(folder / f"scores-{Path(name).name}.npz")

    def rerank(dataset: RetrievalDataset, run: Run) -> Run:
        if cross.cache is not None:  # all at once, to save the cache rarely
            first = [
                (query, document) for query, ranking in run.items() for document in list(ranking)[: beir.RERANK_DEPTH]
            ]
            cross.predict([(dataset.queries[query], dataset.corpus[document]) for query, document in first])
        return beir.rerank_run(dataset, cross, run)

    return rerank


def rerank_by_embeddings(second: Embedder) -> Callable[[RetrievalDataset, Run], Run]:
    """Rerank the top documents by the similarities of another embedder."""

    def rerank(dataset: RetrievalDataset, run: Run) -> Run:
        top = {query: list(ranking)[: beir.RERANK_DEPTH] for query, ranking in run.items()}
        names = list(dict.fromkeys(document for ranking in top.values() for document in ranking))
        index = {document: i for i, document in enumerate(names)}
        documents = second.embed([dataset.corpus[document] for document in names])
        queries = dict(zip(dataset.queries, second.embed(dataset.queries.values()), strict=True))
        reranked = {}
        for query, ranking in top.items():
            points = second.compare(queries[query][None], documents[[index[d] for d in ranking]])[0]
            rest = list(run[query])[beir.RERANK_DEPTH :]
            scores = dict(zip(ranking, map(float, points), strict=True))
            reranked[query] = scores | {d: float(points.min()) - 1 - i for i, d in enumerate(rest)}
        return reranked

    return rerank


def ways_table(results: Mapping[str, Any]) -> str:
    """Table of nDCG@10 of each method, and of its difference to BM25 and dense."""
    first = next(iter(results.values()))
    lines = [f"| set (queries) | {' | '.join(first['scores'])} |", "|" + "---|" * (1 + len(first["scores"]))]
    for name, result in results.items():
        values = [str(Score(**scores["ndcg_10"])) for scores in result["scores"].values()]
        lines.append(f"| {name} ({result['queries']}) | {' | '.join(values)} |")
    for base in BASES:
        lines += ["", f"| above {base} | {' | '.join(first['above'])} |", "|" + "---|" * (1 + len(first["above"]))]
        for name, result in results.items():
            gaps = [gap_text(Difference(**above[base]["ndcg_10"])) for above in result["above"].values()]
            lines.append(f"| {name} | {' | '.join(gaps)} |")
    return "\n".join(lines)


def gap_text(gap: Difference) -> str:
    return f"{gap} (p {'≤' if gap.p <= 0.002 else '='} {max(gap.p, 0.002):.3f})"


# --- on another machine ---


def vectors(options: argparse.Namespace) -> None:
    """Cache the embeddings of all texts: in windows, truncated, and by sentence-transformers if installed."""
    for name in options.models:
        ways = {way: embedder(name, options.cache, options.device, way).embed for way in ("window", "truncate")}
        if find_spec("sentence_transformers"):
            ways["theirs"] = sentence_transformer(name, options.cache, options.device).encode
        for embed in ways.values():
            for label in options.sets or (*FOLDERS, STS):
                embed(texts_of(options.data, label))


def texts_of(data: Path, label: str) -> list[str]:
    if label == STS:
        return [row[side] for row in rows(data / "stsb" / "test.jsonl.gz") for side in ("text_a", "text_b")]
    dataset = collection(data, label)
    return [*dataset.queries.values(), *dataset.corpus.values()]


def scores(options: argparse.Namespace) -> None:
    """Cache a reranker's scores of candidates."""
    rerank = reranker(options.reranker, options.cache, options.device, options.overflow)
    for label, candidates in json.loads(options.candidates.read_text(encoding="utf-8")).items():
        rerank(collection(options.data, label), {q: dict.fromkeys(ids, 0.0) for q, ids in candidates.items()})


# --- mteb ---


def sentence_transformer(name: str, folder: Path | None, device: str) -> Any:
    from sentence_transformers import SentenceTransformer

    cache = None if folder is None else VectorCache(folder / f"st-{Path(name).name}.npz")

    class CachedSentenceTransformer(SentenceTransformer):
        def encode(self, inputs: list[str], **options: Any) -> Any:
            encode = super().encode
            if cache is None:
                return encode(inputs, **options)
            return cache(inputs, lambda texts: encode(texts, batch_size=32, show_progress_bar=False))

    return CachedSentenceTransformer(name, device=device)


def parity(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate both libraries on each set."""
    results: dict[str, Any] = {}
    for name in options.models:
        ours = MTEBEmbedder(embedder(name, options.cache, options.device, "truncate"))
        theirs = sentence_transformer(name, options.cache, options.device)
        scores_by_set = results.setdefault(Path(name).name, {})
        for label in options.sets or PARITY:
            if label == STS:
                task = sts_task(label, rows(options.data / "stsb" / "test.jsonl.gz"))
            else:
                task = retrieval_task(label, collection(options.data, label))
            both = {"bertie": through_mteb(ours, task), "sentence-transformers": through_mteb(theirs, task)}
            scores_by_set[label] = both
            save(options.json, results)
    return results


def parity_table(results: Mapping[str, Any]) -> str:
    lines = ["| model | set | metric | Bertie | sentence-transformers |", "|---|---|---|---|---|"]
    for model, sets in results.items():
        for name, both in sets.items():
            theirs = both["sentence-transformers"]
            lines += [
                f"| {model} | {name} | {metric} | {value:.4f} | {theirs[metric]:.4f} |"
                for metric, value in both["bertie"].items()
            ]
    return "\n".join(lines)


# --- command line ---


def save(file: Path | None, results: Mapping[str, Any]) -> None:
    """Save after each set, so that an interrupted run leaves results."""
    if file is not None:
        file.write_text(json.dumps(results) + "\n", encoding="utf-8")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ways", "parity", "vectors", "scores"))
    parser.add_argument("models", nargs="*", help="embedders: folders, built-in names or hub ids; one for `ways`")
    parser.add_argument("--reranker", help="a cross-encoder, or another embedder")
    parser.add_argument("--data", required=True, type=Path, help="folder of the data sets")
    parser.add_argument("--sets", type=lambda text: text.split(","), help="a subset, by the names in the tables")
    parser.add_argument("--cache", type=Path, help="folder for embeddings and scores")
    parser.add_argument("--candidates", type=Path, help="file of the documents to rerank")
    parser.add_argument("--overflow", choices=("window", "truncate"), default="window", help="for `ways`")
    parser.add_argument("--weight-tokens", action="store_true", help="for `ways`: SIF token weights of each corpus")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "scores" and None in (options.candidates, options.reranker, options.cache):
        parser.error("`scores` needs --candidates, --reranker and --cache")
    if options.what == "vectors" and options.cache is None:
        parser.error("`vectors` needs --cache")
    if options.weight_tokens and (options.what != "ways" or options.cache):
        parser.error("--weight-tokens is for `ways` without --cache, which holds unweighted embeddings")
    if options.what != "scores" and not options.models:
        parser.error(f"`{options.what}` needs an embedder")
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    if options.what == "ways":
        print(ways_table(ways(options)))
    elif options.what == "parity":
        print(parity_table(parity(options)))
    else:
        {"vectors": vectors, "scores": scores}[options.what](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
