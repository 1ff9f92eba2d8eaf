"""What windows are worth: the same trained models on long texts, read whole in windows or cut at the model's max_length.

    python -m benchmarks.windows_worth --imdb MODEL --squad MODEL --data FOLDER [--json OUT.json]

IMDb: the reviews of the test set that are longer than the model reads at once (512 tokens), and the same cut at 256.
SQuAD: the questions of the dev set whose paragraph is longer than 384 tokens with the question; and questions about
whole articles, all paragraphs of one title joined, of which a cut reads the beginning.
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
    """The examples that do not fit."""
    encoded = task.tokenizer.encode_batch([e.texts if len(e.texts) == 2 else e.texts[0] for e in data.examples])  # type: ignore[misc]
    kept = [e for e, encoding in zip(data.examples, encoded, strict=True) if len(encoding) > max_length]
    return replace(data, examples=kept)


def scores(
    task: Trainable[Any, Any, Any], data: LabelledDataset, long: str, max_length: int
) -> tuple[dict[str, Score], float]:
    """Metrics, and the share of tokens that was read."""
    task.overflow = long  # type: ignore[assignment]
    task.checkpoint.limit = max_length
    training = training_for(task)
    predictions = training.predict_labelled(data)
    return training.scores(predictions), float(predictions.read.sum() / predictions.lengths.sum())


def articles(data: LabelledDataset, titles: list[str], most: int) -> LabelledDataset:
    """Each question with all paragraphs of its article; a sample."""
    paragraphs: dict[str, dict[str, int]] = defaultdict(dict)  # the place of each in its article
    ends: dict[str, int] = defaultdict(int)
    for example, title in zip(data.examples, titles, strict=True):
        context = example.texts[1]
        if context not in paragraphs[title]:
            paragraphs[title][context] = ends[title]
            ends[title] += len(context) + 2
    whole = {title: "\n\n".join(parts) for title, parts in paragraphs.items()}
    chosen = np.random.default_rng(0).permutation(len(data.examples))[:most]
    found: list[Example] = []
    for i in sorted(chosen.tolist()):
        example, title = data.examples[i], titles[i]
        at = paragraphs[title][example.texts[1]]
        target = tuple((start + at, end + at) for start, end in example.target)
        found.append(replace(example, texts=(example.texts[0], whole[title]), target=target))
    return replace(data, examples=found)


def row(what: str, texts: int, metric: str, how: str, found: tuple[dict[str, Score], float]) -> dict[str, Any]:
    """One line of the table."""
    score = found[0][metric]
    print(
        f"| {what} | {texts:,} | {how} | {found[1]:.0%} | {metric} {score.value:.4f} "
        f"[{score.low:.4f}, {score.high:.4f}] |",
        flush=True,
    )
    return {"what": what, "texts": texts, "how": how, "read": found[1], metric: score.as_dict()}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--imdb", help="a classifier trained by recipes/imdb.toml")
    parser.add_argument("--squad", help="a reader trained by recipes/squad.toml")
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--articles", type=int, default=1000, help="questions about whole articles")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    print("| texts | how many | read | of the tokens | score |\n|---|---|---|---|---|")
    if options.imdb:
        task = Classifier.load(options.imdb, device=device)
        data = read_dataset("classify", options.data / "imdb/test.jsonl.xz", training=False)
        for name, some in (("IMDb reviews over 512 tokens", longer(task, data, 512)), ("IMDb test, all", data)):
            for long, max_length in (("window", 512), ("truncate", 512), ("window", 256), ("truncate", 256)):
                how = f"{'in windows of' if long == 'window' else 'cut at'} {max_length}"
                rows.append(row(name, len(some.examples), "accuracy", how, scores(task, some, long, max_length)))
    if options.squad:
        reader = Reader.load(options.squad, device=device)
        file = options.data / "squad_v1/dev.jsonl.gz"
        data = read_dataset("answer", file, training=False)
        from benchmarks.finetune_peer import read

        titles = [one["title"] for one in read([file], None)]
        sets = (
            ("SQuAD dev, over 384 tokens", longer(reader, data, 384)),
            ("SQuAD dev, whole articles", articles(data, titles, options.articles)),
        )
        for name, some in sets:
            for long in ("window", "truncate"):
                how = f"{'in windows of' if long == 'window' else 'cut at'} 384"
                rows.append(row(name, len(some.examples), "f1", how, scores(reader, some, long, 384)))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
