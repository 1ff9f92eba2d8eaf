"""Label words with a fine-tuned token classifier: python label.py IN OUT --model FOLDER

IN is prepare.py's ner.unlabelled.jsonl.gz, FOLDER a model with a head for named entities.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from preparation.files import read, write_rows

from bertie.tasks import Tagger


def main(arguments: Sequence[str] | None = None) -> None:
    """Label all rows."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, metavar="IN")
    parser.add_argument("output", type=Path, metavar="OUT")
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--head", default="ner")
    parser.add_argument("--device")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args(arguments)
    rows = list(read(options.rows))
    model = Tagger.load(options.model, head=options.head, device=options.device, precision=options.precision)
    labels = model.predict([row["tokens"] for row in rows])
    write_rows(options.output, (row | {"tags": tags} for row, tags in zip(rows, labels, strict=True)))


if __name__ == "__main__":
    main()
