"""Prepare the data of bertie-small besides its corpora: python prepare.py DATA OUT [TEXT…]

DATA holds one folder per dataset (listed in README.md next to this file). TEXT are files or folders
of pretraining text, one paragraph per line and a blank line between documents (default:
DATA/pretrain). Only datasets whose licence allows distributing a trained model are used for
training, and only their training splits. Texts that also occur in a dev or test split of any dataset
in DATA are excluded from training, and the titles of exclude.tsv from the pretraining text. The same
files give the same bytes.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from pathlib import Path

from preparation.emotions import sentiment
from preparation.entities import entities
from preparation.everyday import everyday
from preparation.files import SEED, Row, evaluation_keys, write, write_rows
from preparation.functions import functions
from preparation.inference import inference
from preparation.questions import answers
from preparation.ranking import ranking
from preparation.sentences import sentences
from preparation.silver import NamedEntityModel
from preparation.wikipedia import sample_documents, sample_wikipedia

KINDS = ("sentiment", "ner", "qa", "rerank", "nli", "sentences", "everyday", "sample")

# Rows that training evaluates on, sampled; other files are used whole.
CUT = {"ner.dev": 1_200, "sentiment.dev": 1_200, "nli.dev": 1_200}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write everything."""
    options = parse(arguments)
    data, out = options.data, options.out
    out.mkdir(parents=True, exist_ok=True)
    seen = evaluation_keys(data)
    wiki = sample_wikipedia(options.text)
    code = functions(options.packages, seen)
    model = NamedEntityModel(options.ner_model) if options.ner_model else None
    for kind, make in (
        ("sentiment", lambda: sentiment(data, seen)),
        ("ner", lambda: entities(data, wiki.passages, model)),
        ("qa", lambda: answers(data)),
        ("rerank", lambda: ranking(data, wiki.passages, code, seen)),
        ("nli", lambda: inference(data, wiki.passages, seen)),
        ("sentences", lambda: [("sentences", sentences(data, wiki, code, seen))]),
        ("everyday", lambda: [("everyday", everyday(data, wiki, seen, options.wordnet))]),
    ):
        if kind in options.only:
            files = dict(make())
            for name, rows in (files | cut(files)).items():
                write_rows(out / f"{name}.jsonl.gz", rows)
    if "sample" in options.only:
        write(out / "sample.txt.gz", (f"{document}\n" for document in sample_documents(options.text)))


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, metavar="DATA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("text", nargs="*", metavar="TEXT")
    parser.add_argument(
        "--packages",
        nargs="+",
        default=[],
        metavar="FOLDER",
        help="folders of installed Python packages, such as site-packages, whose functions are used if their licence "
        "is permissive; or Python's own library (default: no code)",
    )
    parser.add_argument(
        "--ner-model",
        type=Path,
        metavar="FOLDER",
        help="model.onnx and tokenizer.json of a token classifier with CoNLL's labels, which labels running text "
        "(needs onnxruntime; default: no such text)",
    )
    parser.add_argument(
        "--wordnet",
        type=Path,
        metavar="FOLDER",
        help="WordNet's data files, such as /usr/share/wordnet, whose definitions and examples are everyday sentences "
        "(default: none)",
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="what to write (default: everything)")
    options = parser.parse_args(arguments)
    options.text = options.text or [str(options.data / "pretrain")]
    return options


def cut(files: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """A sample of the rows of the files in `CUT`, in their original order."""
    samples = {}
    for name, size in CUT.items():
        if name in files:
            rows = files[name]
            chosen = random.Random(SEED).sample(range(len(rows)), min(size, len(rows)))
            samples[name] = [rows[place] for place in sorted(chosen)]
    return samples


if __name__ == "__main__":
    main()
