"""SetFit (PyPI) at its defaults on the draws of `benchmarks.few_shot`, in an environment of its own.

    python -m benchmarks.few_shot_peer --data FOLDER --model NAME=FOLDER … --sets cr,scicite --shots 8,16 --draws 3
        --json OUT.jsonl

The folders are those of sentence-transformers models. One line of JSON per run is appended to the output; runs that it
already has are left out. It needs torch and setfit, not bertie.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from benchmarks.few_shot_data import FITTED, JUDGED, draw


def run(model: str, data: Path, name: str, shots: int, seed: int) -> dict[str, Any]:
    """Train and score once."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    train, test = draw(data, name, shots, seed)
    labels = sorted({label for _, label in train})
    began = time.perf_counter()
    classifier = SetFitModel.from_pretrained(model, labels=labels)
    rows = Dataset.from_dict(
        {"text": [text for text, _ in train], "label": [labels.index(label) for _, label in train]}
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            seed=seed, output_dir=folder, save_strategy="no", report_to="none", show_progress_bar=False
        )
        Trainer(model=classifier, args=arguments, train_dataset=rows).train()
    seconds = time.perf_counter() - began
    predicted = classifier.predict([text for text, _ in test], show_progress_bar=False)
    correct = sum(str(label) == expected for label, (_, expected) in zip(predicted, test, strict=True))
    return {"accuracy": correct / len(test), "seconds": round(seconds, 1)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--sets", default=",".join((*FITTED, *JUDGED)))
    parser.add_argument("--shots", default="8,16")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    lines = args.json.read_text().splitlines() if args.json.exists() else []
    keys = ("model", "set", "shots", "seed")
    done = {tuple(json.loads(line)[key] for key in keys) for line in lines}
    models = dict(item.split("=", 1) for item in args.model)
    for shots in map(int, args.shots.split(",")):
        for seed in range(args.draws):
            for name in args.sets.split(","):
                for model, folder in models.items():
                    key = (model, name, shots, seed)
                    if key in done:
                        continue
                    result = {"method": "SetFit", **dict(zip(keys, key, strict=True))}
                    result |= run(folder, args.data, name, shots, seed)
                    print(json.dumps(result), flush=True)
                    with args.json.open("a") as file:
                        file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
