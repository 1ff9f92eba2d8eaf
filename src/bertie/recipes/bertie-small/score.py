"""Score query-passage pairs with a cross-encoder: python score.py IN OUT --model FOLDER

IN is prepare.py's rerank.train.jsonl.gz. In OUT, the label of each row is the mean of its label and the cross-encoder's
score, from 0 to 1: negatives found by BM25 may be relevant, and the cross-encoder has not been trained on code.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from preparation.files import read, write_rows

from bertie.tasks import Reranker


def main(arguments: Sequence[str] | None = None) -> None:
    """Score all rows."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, metavar="IN")
    parser.add_argument("output", type=Path, metavar="OUT")
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--device")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args(arguments)
    rows = list(read(options.rows))
    model = Reranker.load(options.model, device=options.device, precision=options.precision)
    results = model.predict_each([(row["query"], row["passage"]) for row in rows])
    scored = [
        row | {"label": round((row["label"] + result.score) / 2, 4)} for row, result in zip(rows, results, strict=True)
    ]
    write_rows(options.output, scored)


if __name__ == "__main__":
    main()
