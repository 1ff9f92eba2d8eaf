"""The data sets of `benchmarks.builtin`."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SEARCHES = {
    "Cranfield": ("cranfield", ""),
    "CACM": ("cacm", ""),
    "NPL": ("npl_vaswani", ""),
    "CoSQA": ("cosqa", ".test"),
}
STS_SETS = {"STS-B test": "stsb/test", "STS-B dev": "stsb/dev"} | {f"STS{y}": f"sts12_16/sts{y}" for y in (12, 13, 15)}
DEPTH = 1000  # documents per query of a run


def rows(path: Path, most: int | None = None) -> list[dict[str, Any]]:
    """Read gzipped JSON lines; a fixed random sample if there are more than `most`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return lines if most is None or len(lines) <= most else random.Random(0).sample(lines, most)


def document(row: Mapping[str, str]) -> str:
    """Join title and text, unless the text begins with the title."""
    title, text = row.get("title", ""), row["text"]
    return text if text.startswith(title) else f"{title}. {text}".strip()


@dataclass
class SearchCollection:
    """A corpus, queries, and relevance judgments."""

    ids: list[str]
    texts: list[str]
    queries: dict[str, str]  # with relevance judgments
    qrels: dict[str, dict[str, int]]

    @classmethod
    def read(cls, data: Path, name: str, split: str) -> SearchCollection:
        qrels: dict[str, dict[str, int]] = {}
        with gzip.open(data / name / f"qrels{split}.tsv.gz", "rt", encoding="utf-8") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                qrels.setdefault(row["query_id"], {})[row["doc_id"]] = int(row["score"])
        corpus = rows(data / name / "corpus.jsonl.gz")
        queries = {
            row["id"]: row["text"] for row in rows(data / name / f"queries{split}.jsonl.gz") if row["id"] in qrels
        }
        return cls([row["id"] for row in corpus], [document(row) for row in corpus], queries, qrels)

    def run(self, points: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
        """Keep the top documents of each query, given its scores of all documents."""
        run = {}
        for query, scores in zip(self.queries, points, strict=True):
            top = np.argsort(-scores, kind="stable")[:DEPTH]
            run[query] = {self.ids[i]: float(scores[i]) for i in top}
        return run


def articles(data: Path) -> list[str]:
    """WikiText-103's held-out articles, without those whose titles are also in the pretraining corpus.

    Its escapes @-@, @,@ and @.@ are undone, and the equals signs of headings removed.
    """
    folder = data / "wikitext103_heldout"
    with (folder / "titles_also_in_pretrain.tsv").open(encoding="utf-8") as file:
        excluded = {(row["split"], row["title"]) for row in csv.DictReader(file, delimiter="\t")}
    parsed: list[tuple[tuple[str, str], list[str]]] = []
    for split in ("valid", "test"):
        with gzip.open(folder / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
            for line in map(str.strip, file):
                inner = line.strip("= ")
                if line.startswith("= ") and line.endswith(" =") and not line.startswith("= ="):
                    parsed.append(((split, inner), [inner]))
                elif line and parsed:
                    parsed[-1][1].append(inner if line.startswith("= =") else line)
    texts = ["\n".join(lines) for key, lines in parsed if key not in excluded]
    for escaped, plain in ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")):
        texts = [text.replace(escaped, plain) for text in texts]
    return texts


def sentence_pairs(data: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the STS data sets."""
    for label, name in STS_SETS.items():
        yield label, rows(data / f"{name}.jsonl.gz")
