"""Score a trained model on labelled texts: every metric with its 95% interval.

The task is that of the model's head. Labels are the model's own; where those are names, whole numbers in the file count
them from 0, as in the data sets of the Hugging Face hub. A model of vectors without such a head is scored on pairs of
texts: by how far its similarities agree with those in the column score.

Or, with --beir, score a search: a folder as BEIR ships it, with corpus.jsonl, queries.jsonl and qrels/test.tsv.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bertie.cli.common import UsageError, add_model, add_weights, device_of, model_name, verb
from bertie.cli.train import add_columns, add_draws, pairs, read, short_name, summary, table
from bertie.config import HeadName
from bertie.data.progress import Progress
from bertie.data.writers import TableWriter
from bertie.errors import ExistsError, InputError, NotFoundError
from bertie.tasks import registry

if TYPE_CHECKING:
    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.cli.common import Verbs
    from bertie.config import HeadInfo
    from bertie.evaluation.intervals import Difference, Score
    from bertie.evaluation.retrieval import Run
    from bertie.search.beir import Collection
    from bertie.training.finetune.base import AnyTrainable, Predictions
    from bertie.training.finetune.data import Labelled

EMBED = "embed"  # the task of models without a head, whose vectors are compared
MODES = ("dense", "lexical", "hybrid")

EXAMPLE = """  bertie eval test.jsonl -m ./my-model
  bertie eval test.csv --columns text=review label=stars -m ./my-model --json | jq .accuracy.value
  bertie eval test.jsonl -m ./my-model --baseline ./the-old-one --train train.jsonl -o report
  bertie eval --beir ./scifact -m ./my-embedder --mode hybrid --rerank ./my-reranker --tune train
"""


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "eval", "score a model on labelled texts, with intervals", __doc__, EXAMPLE)
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="labelled texts: .csv, .tsv, .jsonl, .parquet, .gz, .zst"
    )
    add_columns(parser)
    add_model(parser)
    tasks = registry.trainable()
    parser.add_argument("--task", choices=tasks, help="what the model is for, where its head does not tell")
    parser.add_argument("--head", metavar="NAME", help="one of several heads of the model")
    parser.add_argument("--baseline", metavar="MODEL", help="another model, to compare with on the same texts")
    parser.add_argument("--train", metavar="FILE", help="what the model was trained on, to find texts that leaked")
    add_draws(parser)
    parser.add_argument("-o", "--output", metavar="DIR", help="write a report there: report.md, .html and .json")
    parser.add_argument("--overwrite", action="store_true", help="replace the report if there is one")
    parser.add_argument("--json", action="store_true", help="print the scores as one JSON object")
    search = parser.add_argument_group("to score a search")
    search.add_argument("--beir", metavar="FOLDER", help="documents, queries and judgements, instead of FILE")
    search.add_argument("--split", metavar="NAME", help="of the judgements (test)")
    search.add_argument("--mode", choices=MODES, help="by vectors (the default), by words (BM25), or by both")
    search.add_argument("--rerank", metavar="MODEL", help="a cross-encoder, for the first 100 documents of a query")
    add_weights(search)
    search.add_argument("--tune", metavar="SPLIT", help="find the weights by the judgements of this split")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    if (args.file is None) == (args.beir is None):
        raise UsageError("name a FILE of labelled texts, or a folder with --beir: one of them")
    if args.beir is not None:
        _refuse(args, "--beir scores a search", "columns", "task", "head", "train", "output")
        _search(args)
        return
    _refuse(args, "without --beir there is no search", "split", "mode", "rerank", "weights", "tune")
    model = model_name(args)
    if args.task == EMBED or (args.task is None and _compares(model, args)):
        _refuse(args, f"{model} is scored by its vectors", "head", "train", "output")
        _similar(args, model)
    else:
        _labelled(args, model)


def _refuse(args: argparse.Namespace, why: str, *flags: str) -> None:
    for flag in flags:
        if getattr(args, flag):
            raise UsageError(f"{why}: leave off --{flag}")


def _labelled(args: argparse.Namespace, model: str) -> None:
    """By the model's head."""
    from bertie.training.finetune.reports import in_words_of, study

    columns = pairs(args.columns, "--columns", "NAME=COLUMN")
    if args.output is not None:
        _claim(Path(args.output), args.overwrite)
    plain, task = _outline(model, args.task, args.head, args.revision)
    given = read(task, [args.file], columns)
    train = None if args.train is None else read(task, [args.train], columns)
    asked = [(model, args.head, args.revision, in_words_of(plain, given))]
    if args.baseline is not None:
        other, _ = _outline(args.baseline, task)
        asked.append((args.baseline, None, None, in_words_of(other, given)))
    options = {"overflow": args.overflow, "device": device_of(args.device), "precision": args.precision}
    (_, learner, predictions), *others = (_judged(task, *one, options) for one in asked)
    made = study(
        learner,
        {"test": predictions},
        title=f"{short_name(model)} on {Path(args.file).name}",
        model=model,
        train=train,
        baseline=others[0] if others else None,
        files={"train": [args.train or ""], "test": [args.file]},
        resamples=args.resamples,
    )
    if args.output is not None:
        from bertie.evaluation.report import write_report

        write_report(args.output, made)
    if args.json:
        found = summary(made)
        print(json.dumps(found.pop("test") | found))
    else:
        sys.stdout.write(table(made))


# --- by vectors ---


def _compares(model: str, args: argparse.Namespace) -> bool:
    """Whether a model has vectors, and no head that says anything of labelled texts."""
    from bertie.checkpoints.checkpoint import Checkpoint

    if args.head is not None:
        return False
    checkpoint = Checkpoint.inspect(model, revision=args.revision)
    return checkpoint.sentence is not None and not any(
        registry.row_for_head(info) is not None for info in checkpoint.heads.values()
    )


def _similar(args: argparse.Namespace, model: str) -> None:
    """How far similarities agree with the scores of pairs."""
    from bertie.evaluation import metrics
    from bertie.tasks import Embedder
    from bertie.tasks.pairwise import similarity_pairwise

    data = read("regress", [args.file], pairs(args.columns, "--columns", "NAME=COLUMN"))
    texts = [(one.texts[0], one.texts[-1]) for one in data.examples if len(one.texts) == 2]
    if len(texts) < len(data.examples):
        raise InputError(f"{data.name} has single texts; vectors are compared in pairs, of columns text_a and text_b")
    gold = [float(one.target) for one in data.examples]
    device = device_of(args.device)

    def said(name: str, revision: str | None) -> Any:
        embedder = Embedder.load(
            name, overflow=args.overflow, revision=revision, device=device, precision=args.precision
        )
        return similarity_pairwise(embedder, texts)

    found = said(model, args.revision)
    measured = metrics.sts(gold, found, resamples=args.resamples)
    if args.baseline is None:
        _say(args, measured)
        return
    other = said(args.baseline, None)
    gaps = metrics.paired("regress", (gold, found), (gold, other), resamples=args.resamples)
    _say(args, measured, metrics.sts(gold, other, resamples=args.resamples), {name: gaps[name] for name in measured})


def _search(args: argparse.Namespace) -> None:
    """How well a search finds what it should."""
    from bertie.evaluation import retrieval
    from bertie.search import beir
    from bertie.search.fusion import check_weights

    mode = args.mode or MODES[0]
    if mode == "lexical" and args.baseline is not None:
        raise UsageError("--mode lexical reads no vectors, so that there is nothing to compare: leave off --baseline")
    if args.weights is not None and args.tune is not None:
        raise UsageError("--tune finds the weights: leave off --weights")
    weights = args.weights
    if weights is not None:
        stages = ["dense", "lexical"] if mode == "hybrid" else [mode]
        check_weights(weights, [*stages, *(["rerank"] if args.rerank is not None else [])])
    collection = _collection(args.beir, args.split or "test")
    model = None if mode == "lexical" else model_name(args)
    asked, qrels = collection, {}
    if args.tune is not None:
        if args.tune == (args.split or "test"):
            raise UsageError(f"--tune {args.tune} must be another split than the one that is scored")
        other = _collection(args.beir, args.tune)
        qrels = {f"{args.tune}:{query}": one for query, one in other.qrels.items()}  # ids may be those of the test
        more = {f"{args.tune}:{query}": text for query, text in other.queries.items()}
        asked = replace(collection, queries={**collection.queries, **more})
    words = None if mode == "dense" else beir.lexical(asked)
    runs = _runs(args, asked, model, args.revision, words)
    if qrels:
        weights = beir.tuned(qrels, runs)
        print(f"bertie: --weights {','.join(f'{name}={one:g}' for name, one in weights.items())}", file=sys.stderr)
    found = retrieval.per_query_metrics(collection.qrels, _joined(runs, weights))
    measured = retrieval.mean_scores(found, resamples=args.resamples)
    if args.baseline is None:
        _say(args, measured)
        return
    base = retrieval.per_query_metrics(
        collection.qrels, _joined(_runs(args, collection, args.baseline, None, words), weights)
    )
    gaps = retrieval.paired_mean_differences(found, base, resamples=args.resamples)
    _say(args, measured, retrieval.mean_scores(base, resamples=args.resamples), gaps)


def _collection(folder: str, split: str) -> Collection:
    from bertie.search import beir

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        collection = beir.read(folder, split)
    for one in caught:
        print(f"bertie: {one.message}", file=sys.stderr)
    return collection


def _runs(
    args: argparse.Namespace, collection: Collection, model: str | None, revision: str | None, words: Run | None
) -> dict[str, Run]:
    """What is found by a model, by words, and by a reranker that reads the best of both, if it was asked for."""
    from bertie.search import beir
    from bertie.tasks import Embedder, Reranker

    device, runs = device_of(args.device), {}
    if model is not None:
        embedder = Embedder.load(
            model, overflow=args.overflow, revision=revision, device=device, precision=args.precision
        )
        with _progress("embed", len(collection.corpus)) as advance:
            runs["dense"] = beir.dense(collection, embedder, advance=advance)
    if words is not None:
        runs["lexical"] = words
    if args.rerank is not None:
        first = _joined(runs, None)
        reranker = Reranker.load(args.rerank, overflow=args.overflow, device=device, precision=args.precision)
        pairs = sum(min(len(one), beir.RERANKED) for one in first.values())
        with _progress("rerank", pairs) as advance:
            runs["rerank"] = beir.reranked(collection, reranker, first, advance=advance)
    return runs


def _joined(runs: Mapping[str, Run], weights: Mapping[str, float] | None) -> Run:
    """As a search does it: by weights; or the reranker has the last word, or ranks are put together."""
    from bertie.search import beir

    if weights is not None:
        return beir.fused(runs, weights)
    if "rerank" in runs:
        return runs["rerank"]
    return beir.hybrid(*runs.values()) if len(runs) > 1 else next(iter(runs.values()))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    done = 0
    with Progress(what, lambda: done / max(total, 1)) as progress:

        def advance(rows: int) -> None:
            nonlocal done
            done += rows
            progress.update(rows)

        yield advance


def _say(
    args: argparse.Namespace,
    measured: Mapping[str, Score],
    other: Mapping[str, Score] | None = None,
    gaps: Mapping[str, Difference] | None = None,
) -> None:
    """Scores, beside those of the baseline if there is one."""
    found: dict[str, Any] = {metric: score.as_dict() for metric, score in measured.items()}
    titles = ["metric", "test", "95%"]
    rows = [[metric, one.value, f"{one.low:.4f}–{one.high:.4f}"] for metric, one in measured.items()]
    if other is not None and gaps is not None:
        scores, differences = ({metric: one.as_dict() for metric, one in many.items()} for many in (other, gaps))
        found["baseline"] = {"name": short_name(args.baseline), "scores": scores, "difference": differences}
        titles += [short_name(args.baseline), "difference", "p"]
        for row, metric in zip(rows, measured, strict=True):
            gap = gaps[metric]
            row += [other[metric].value, f"{gap.value:+.4f} ({gap.low:+.4f}–{gap.high:+.4f})", gap.p]
    sys.stdout.write(f"{json.dumps(found)}\n" if args.json else TableWriter(titles).text(rows))


# --- by heads ---


def _judged(
    task: str, model: str, head: str | None, revision: str | None, data: Labelled, options: dict[str, Any]
) -> tuple[str, AnyTrainable, Predictions]:
    """What a model says of the data."""
    from bertie.training.finetune.base import training_for

    learner = registry.get(task).trainable_class.load(model, head=head, revision=revision, **options)
    return short_name(model), learner, training_for(learner).predict_labelled(data)


def _outline(
    model: str, task: str | None, head: str | None = None, revision: str | None = None
) -> tuple[AnyTrainable, str]:
    """A model without its weights, put to its task, and the task."""
    from bertie.checkpoints.checkpoint import Checkpoint

    kind: Any = head if head in get_args(HeadName) else None
    name = None if kind else head
    checkpoint = Checkpoint.inspect(model, revision=revision, head=kind)
    task = task or task_of(checkpoint, name)
    learner = registry.get(task).trainable_class(checkpoint, head=name)
    _ = learner.head  # one that is missing is an error now
    return learner, task


def task_of(checkpoint: Checkpoint, head: str | None = None) -> str:
    """What a checkpoint was trained for, by its heads or the one that is named."""
    if head is not None:
        checkpoint.model.head(head)  # refuses one that is not there
    found = {
        name: task
        for name, info in checkpoint.heads.items()
        if head in (None, name) and (task := _task_of_head(checkpoint, name, info)) is not None
    }
    if len(found) > 1:
        raise InputError(f"{checkpoint.source} has several heads; choose with --head: {', '.join(found)}")
    if not found:
        have = ", ".join(checkpoint.heads) or "none"
        raise NotFoundError(
            f"{checkpoint.source} has no head that says anything of labelled texts (its heads: {have}); bertie train "
            f"makes one, for {', '.join(registry.trainable(with_head=True))}; --task {EMBED} scores its vectors, on pairs of texts"
        )
    return next(iter(found.values()))


def _task_of_head(checkpoint: Checkpoint, name: str, info: HeadInfo) -> str | None:
    if info.task is not None or info.kind != "classify":
        task = info.task or info.kind
        return task if task in registry.trainable(with_head=True) else None
    if info.problem == "regression":
        return "regress"
    if len(info.labels) > 1 or info.problem is not None:
        return "classify"
    if checkpoint.cross_encoder is not None and name in checkpoint.spec.heads:
        return "rerank"
    raise InputError(
        f"the head {name!r} of {checkpoint.source} gives one number; say what it is for with --task rerank or regress"
    )


def _claim(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExistsError(f"{folder} is a file; a report is written into a folder")
    if (folder / "report.json").exists() and not overwrite:
        raise ExistsError(f"{folder} holds a report already; pass --overwrite, or another name")
