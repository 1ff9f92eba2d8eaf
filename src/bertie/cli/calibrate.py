"""Fit the calibration of a model's head on held-out data: temperature and thresholds.

Classification: the temperature and, for multi-label models, the decision threshold. Question answering: the
temperature and, if some questions in the file are unanswerable, the probability of "no answer" and the threshold with
the best F1. The weights do not change. `bertie train` calibrates automatically; this verb calibrates an existing model.
Use data like that of production: the share of unanswerable questions, for example, is estimated from the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bertie.cli.common import UsageError, check_file_exists, check_output_folder, select_device, verb
from bertie.cli.eval import outline_of
from bertie.cli.labelled_input import add_columns, parse_pairs, read_labelled
from bertie.cli.report_output import print_scores
from bertie.errors import InputError
from bertie.tasks import registry

if TYPE_CHECKING:
    from bertie.cli.common import Verbs

EXAMPLE = """  bertie calibrate dev.jsonl -m ./my-reader --head qa -o my-reader-calibrated
  bertie calibrate dev.csv -m ./my-classifier --columns text=review -o my-classifier-calibrated
"""


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "calibrate", "fit a head's temperature and thresholds on held-out data", __doc__, EXAMPLE)
    parser.add_argument("file", metavar="FILE", help="labelled texts that the model was not trained on")
    parser.add_argument("-m", "--model", metavar="MODEL", help="folder or hub id (default: the built-in model)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--head", metavar="NAME", help="head to calibrate, if the model has several")
    parser.add_argument(
        "--task", choices=registry.trainable(), help="the task, if the model's head does not determine it"
    )
    add_columns(parser)
    parser.add_argument("-o", "--output", metavar="FOLDER", required=True, help="folder to create")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: a GPU if available)")
    parser.add_argument("--json", action="store_true", help="print the calibration and the scores as JSON")
    parser.set_defaults(run=run, model_from_settings=True)


def run(args: argparse.Namespace) -> None:
    """Calibrate, and print the calibration and the scores with it."""
    from bertie.cli.common import model_name

    check_file_exists(args.file)
    output = check_output_folder(args.output, overwrite=args.overwrite)
    model = model_name(args)
    outline, task = outline_of(model, args.task, args.head, args.revision)

    from bertie.checkpoints.calibration_files import copy_with_calibration
    from bertie.checkpoints.hub import resolve
    from bertie.training.finetune.base import TaskTraining, training_for
    from bertie.training.finetune.comparison import with_labels_of

    data = with_labels_of(
        outline, read_labelled(task, [args.file], parse_pairs(args.columns, "--columns", "NAME=COLUMN"))
    )
    if type(training_for(outline)).calibrate is TaskTraining.calibrate:
        raise UsageError(f"a head for the task {task} has no calibration; only those for classify and answer do")
    loaded = registry.get(task).trainable_class.load(
        model, head=args.head, revision=args.revision, device=select_device(args.device)
    )
    if loaded.head is None:
        raise InputError(f"{model} has no head to calibrate")
    training = training_for(loaded)
    training.calibrate(data)
    copy_with_calibration(resolve(model, args.revision), Path(output), loaded.head, loaded.info.calibration)
    values = {name: value for name, value in asdict(loaded.info.calibration).items() if value is not None}
    scores = training.scores(training.predict_labelled(data))
    if args.json:
        print(json.dumps({"calibration": values, "scores": {name: score.as_dict() for name, score in scores.items()}}))
        return
    fitted = [f"{name} {value:.4g}" for name, value in values.items() if value or name != "no_answer_length"]
    print(f"{args.output}: {', '.join(fitted)}", file=sys.stderr)
    print_scores(scores, None, as_json=False, split="dev")
