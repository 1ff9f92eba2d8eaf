"""The benefit of windows: the same models on long texts, read in windows or truncated at the max_length.

    python -m benchmarks.windows_worth --imdb MODEL --squad MODEL --data FOLDER [--json OUT.json]

IMDb: test reviews longer than the model's 512 tokens, and the same with a limit of 256. SQuAD: dev questions whose
paragraph and question exceed 384 tokens; and questions about whole articles, all paragraphs of one title joined.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertie.evaluation.metrics import Score
from bertie.tasks import Classifier, Reader
from bertie.tasks.trainable import Trainable
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import Example, LabelledDataset, read_dataset


def longer(task: Trainable[Any, Any, Any], data: LabelledDataset, max_length: int) -> LabelledDataset:
    """The examples longer than max_length."""
    encoded = task.tokenizer.encode_batch([e.texts if len(e.texts) == 2 else e.texts[0] for e in data.examples])
    kept = [e for e, encoding in zip(data.examples, encoded, strict=True) if len(encoding) > max_length]
    return replace(data, examples=kept)


def scores(
    task: Trainable[Any, Any, Any], data: LabelledDataset, overflow: str, max_length: int
) -> tuple[dict[str, Score], float]:
    """Metrics, and the fraction of tokens that was read."""
    task.overflow = overflow
    task.checkpoint.limit = max_length
    training = training_for(task)
    predictions = training.predict_labelled(data)
    return training.scores(predictions), float(predictions.read.sum() / predictions.lengths.sum())


def articles(data: LabelledDataset, titles: list[str], most: int) -> LabelledDataset:
    """A sample of questions, each with all paragraphs of its article."""
    paragraphs: dict[str, dict[str, int]] = defaultdict(dict)  # offset of each in its article
    ends: dict[str, int] = defaultdict(int)
    for example, title in zip(data.examples, titles, strict=True):
        context = example.texts[1]
        if context not in paragraphs[title]:
            paragraphs[title][context] = ends[title]
            ends[title] += len(context) + 2
    whole = {title: "\n\n".join(parts) for title, parts in paragraphs.items()}
    chosen = np.random.default_rng(0).permutation(len(data.examples))[:most]
    examples: list[Example] = []
    for i in sorted(chosen.tolist()):
        example, title = data.examples[i], titles[i]
        at = paragraphs[title][example.texts[1]]
        target = tuple((start + at, end + at) for start, end in example.target)
        examples.append(replace(example, texts=(example.texts[0], whole[title]), target=target))
    return replace(data, examples=examples)


def row(name: str, texts: int, metric: str, how: str, result: tuple[dict[str, Score], float]) -> dict[str, Any]:
    """Print and return one row of the table."""
    score = result[0][metric]
    print(
        f"| {name} | {texts:,} | {how} | {result[1]:.0%} | {metric} {score.value:.4f} "
        f"[{score.low:.4f}, {score.high:.4f}] |",
        flush=True,
    )
    return {"name": name, "texts": texts, "how": how, "read": result[1], metric: score.as_dict()}


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imdb", help="a classifier trained by recipes/imdb.toml")
    parser.add_argument("--squad", help="a reader trained by recipes/squad.toml")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--articles", type=int, default=1000, help="questions about whole articles")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    print("| texts | count | read | tokens read | score |\n|---|---|---|---|---|")
    if options.imdb:
        task = Classifier.load(options.imdb, device=device)
        data = read_dataset("classify", options.data / "imdb/test.jsonl.xz", training=False)
        for name, subset in (("IMDb reviews over 512 tokens", longer(task, data, 512)), ("IMDb test, all", data)):
            for overflow, max_length in (("window", 512), ("truncate", 512), ("window", 256), ("truncate", 256)):
                how = f"{'in windows of' if overflow == 'window' else 'truncated at'} {max_length}"
                rows.append(
                    row(name, len(subset.examples), "accuracy", how, scores(task, subset, overflow, max_length))
                )
    if options.squad:
        reader = Reader.load(options.squad, device=device)
        file = options.data / "squad_v1/dev.jsonl.gz"
        data = read_dataset("answer", file, training=False)
        from benchmarks.finetune_peer import read

        titles = [line["title"] for line in read([file], None)]
        sets = (
            ("SQuAD dev, over 384 tokens", longer(reader, data, 384)),
            ("SQuAD dev, whole articles", articles(data, titles, options.articles)),
        )
        for name, subset in sets:
            for overflow in ("window", "truncate"):
                how = f"{'in windows of' if overflow == 'window' else 'truncated at'} 384"
                rows.append(row(name, len(subset.examples), "f1", how, scores(reader, subset, overflow, 384)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
