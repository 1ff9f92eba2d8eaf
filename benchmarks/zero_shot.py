"""Zero-shot classification by entailment, by embeddings and by both, on labelled datasets.

    python -m benchmarks.zero_shot --data FOLDER [--model MODEL] [--rows 200] [--sets ag_news,cr] [--json OUT.json]

The method that "auto" stands for, the templates, the temperature and the weight of the combination were chosen on the
datasets of FITTED and are judged on those of JUDGED. Labels are named as a user would name them; of banking77 and
clinc150, ten and twenty intents are drawn at random.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bertie import ZeroShot
from bertie.data.readers import open_table
from bertie.evaluation.intervals import Score, wilson_interval

Rows = list[tuple[str, str]]
SENTIMENT = {"0": "negative", "1": "positive"}
DOMAINS = {
    "travel": "travel_alert flight_status international_visa book_hotel lost_luggage plug_type vaccines book_flight",
    "cooking and food": "nutrition_info cook_time recipe calories food_last ingredients_list meal_suggestion",
    "banking": "balance freeze_account transfer transactions pay_bill routing min_payment order_checks bill_due",
    "credit cards": "credit_score credit_limit new_card apr rewards_balance damaged_card card_declined",
    "cars and driving": "mpg tire_pressure oil_change_how oil_change_when tire_change gas gas_type jump_start traffic",
    "work": "pto_request payday pto_balance pto_used w2 direct_deposit income rollover_401k schedule_meeting",
    "home": "shopping_list todo_list play_music smart_home update_playlist calendar next_song reminder",
}
EMOTIONS = "admiration amusement anger curiosity gratitude sadness love fear confusion optimism"


def named(file: str, names: dict[str, str]) -> Callable[[Path], Rows]:
    """The rows whose label has a name."""
    return lambda data: [(text, names[label]) for text, label in read(data / file) if label in names]


def intents(file: str, count: int) -> Callable[[Path], Rows]:
    """The rows of intents drawn at random."""

    def rows(data: Path) -> Rows:
        table = [(text, label) for text, label in read(data / file) if label != "oos"]
        chosen = set(random.Random(1).sample(sorted({label for _, label in table}), count))
        return [(text, label.replace("_", " ").lower()) for text, label in table if label in chosen]

    return rows


NEWS = {"World": "world politics", "Sports": "sports", "Business": "business", "Sci/Tech": "science and technology"}
CITATIONS = {
    "background": "background information",
    "result": "a comparison of results",
    "method": "the use of a method",
}
FITTED = {
    "ag_news": named("ag_news/test.jsonl.gz", NEWS),
    "emotion": named("emotion/test.jsonl.gz", {e: e for e in "sadness joy fear anger love surprise".split()}),
    "sst2": named("sst2/test.jsonl.gz", SENTIMENT),
    "banking77": intents("banking77/test.jsonl.gz", 10),
    "scicite": named("scicite/test.jsonl.gz", CITATIONS),
}
JUDGED = {
    "cr": named("cr/all.jsonl.gz", SENTIMENT),
    "mr": named("mr/all.jsonl.gz", SENTIMENT),
    "imdb": named("imdb/test.jsonl.xz", SENTIMENT),
    "clinc150": intents("clinc150/test.jsonl.gz", 20),
    "clinc150 domains": named(
        "clinc150/test.jsonl.gz", {label: name for name, labels in DOMAINS.items() for label in labels.split()}
    ),
    "go_emotions": named("go_emotions/test.jsonl.gz", {e: e for e in EMOTIONS.split()}),
}


def read(file: Path) -> list[tuple[str, str]]:
    """Texts with their only label."""
    table = open_table(str(file))
    rows = []
    for row in table.rows(table.columns):
        labels = row.get("labels", [row.get("label")])
        if len(labels) == 1:
            rows.append((str(row["text"]), str(labels[0])))
    return rows


def measure(model: ZeroShot, rows: Rows, methods: list[str], limit: int) -> dict[str, Score]:
    """The accuracy of each method."""
    rows = random.Random(0).sample(rows, min(limit, len(rows)))
    texts, gold = [text for text, _ in rows], [label for _, label in rows]
    labels = sorted(set(gold))
    scores = {}
    for method in methods:
        results: Any = model.classify(texts, labels, method=method)  # type: ignore[call-overload]
        correct = sum(result.label == label for result, label in zip(results, gold, strict=True))
        scores[method] = Score(correct / len(rows), *wilson_interval(correct, len(rows)))
    return scores


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets")
    parser.add_argument("--model", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--rows", type=int, default=200, help="texts per dataset")
    parser.add_argument("--sets", help="names, separated by commas (default: all)")
    parser.add_argument("--precision", default="int8", help="precision of the model")
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    args = parser.parse_args()
    model = ZeroShot.load(args.model, precision=args.precision)
    methods = ["embedding"] if model.head is None else ["entailment", "embedding", "combined"]
    wanted = args.sets.split(",") if args.sets else [*FITTED, *JUDGED]
    print(f"{'':10}{'':18}" + "".join(f"{method:>26}" for method in methods))
    output = {}
    for part, sets in (("fitted on", FITTED), ("judged on", JUDGED)):
        means: dict[str, list[float]] = {method: [] for method in methods}
        for name in [name for name in sets if name in wanted]:
            scores = output[name] = measure(model, sets[name](args.data), methods, args.rows)
            print(f"{part:10}{name:18}" + "".join(f"{scores[method]!s:>26}" for method in methods), flush=True)
            for method in methods:
                means[method].append(scores[method].value)
        if means[methods[0]]:
            cells = "".join(f"{sum(means[method]) / len(means[method]):26.4f}" for method in methods)
            print(f"{part:10}{'mean':18}{cells}")
    if args.json is not None:
        table = {name: {method: score.as_dict() for method, score in row.items()} for name, row in output.items()}
        args.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
