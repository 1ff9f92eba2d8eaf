"""Pretraining by a recipe: a new or existing model, a corpus and one or more objectives in; a model
folder out.

While the run trains, its state is in OUTPUT.training; OUTPUT appears when it is complete.
OUTPUT/training holds the recipe, the curves, fill-mask samples and a summary of the run (run.json).
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertie._version import __version__
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.config import HeadName
from bertie.data.atomic import atomic_write
from bertie.errors import ConfigError, InputError
from bertie.evaluation.intervals import Score
from bertie.text.tokenizer import Tokenizer
from bertie.training.callbacks import TrainingHistory
from bertie.training.distributed import Strategy, is_main_process
from bertie.training.loop import Trainer
from bertie.training.output_folder import check_output, lock_output, publish, state_folder
from bertie.training.pretrain.corpus import HELD_OUT, MANIFEST, Corpus
from bertie.training.pretrain.initialization import extend_vocabulary, new_model
from bertie.training.pretrain.monitoring import HeldOutEvaluation, evaluate_with_intervals
from bertie.training.pretrain.objective_builders import (
    CORPUS_OBJECTIVES,
    PAIR_TASKS,
    RunContext,
    build_sampler,
    model_name,
)
from bertie.training.pretrain.objective_evaluation import PairEvaluation, ReplacedTokenEvaluation
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
from bertie.training.pretrain.sentence_pairs import SentencePairSampler
from bertie.training.pretrain.training_report import TrainingReport
from bertie.training.stage import Stage
from bertie.training.step import autocast_dtype

PREFETCH_WORKERS = 3  # on a GPU; on a CPU they would compete with training
HELD_OUT_TOKENS = 16_384  # per batch
HELD_OUT_STEPS = 1 << 20  # more than an epoch
MEASURED_STEPS = (300, 2)  # at most and at least, before a run with a budget may be shortened


def pretrain(
    recipe: PretrainRecipe,
    output: str | Path,
    *,
    data: str | Path = ".",
    resume: bool = False,
    overwrite: bool = False,
    device: str | torch.device = "cpu",
    strategy: Strategy = "ddp",
    tensorboard: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Pretrain a model and save it to `output`; returns the summary in run.json.

    Files and folders in the recipe are relative to `data`.
    """
    output, data, device = Path(output).absolute(), Path(data), torch.device(device)
    if strategy == "fsdp" and any(objective["kind"] == "rtd" for objective in recipe.objectives):
        raise ConfigError("strategy='fsdp' cannot train kind='rtd', whose two models share weights; use 'ddp'")
    with ExitStack() as stack:
        if is_main_process():
            stack.callback(lock_output(output).release)
        check_output(output, resume=resume, overwrite=overwrite)
        return _pretrain(recipe, output, data, device, resume, overwrite, strategy, tensorboard, progress)


def _pretrain(
    recipe: PretrainRecipe,
    output: Path,
    data: Path,
    device: torch.device,
    resume: bool,
    overwrite: bool,
    strategy: Strategy,
    tensorboard: bool,
    progress: bool,
) -> dict[str, Any]:
    state = state_folder(output)
    checkpoint = initial_checkpoint(recipe, data)
    checkpoint.model.to(device)
    context = RunContext(recipe, data, device, checkpoint, progress=progress and is_main_process())
    sampler = build_sampler(context)
    dtype = autocast_dtype(recipe.recipe.mixed_precision, device)
    report = TrainingReport(state / "report", checkpoint, sampler, dtype, tensorboard)
    held_out = _held_out(context)
    trainer = Trainer(
        checkpoint.model,
        sampler,
        recipe.recipe,
        evaluate=_evaluation(context, held_out),
        evaluate_at=_evenly_spaced(sampler.total_steps, recipe.evals),
        keep="last",
        folder=state,
        resume=resume,
        restart=overwrite and not resume,
        save_steps=recipe.save_steps,
        fingerprint=json.dumps(recipe.as_dict()),
        strategy=strategy,
        rollback=True,
        prefetch_workers=PREFETCH_WORKERS if device.type == "cuda" else 0,
        progress=progress,
        callback=report,
        stage=_stage(recipe),
    )
    if trainer.world.is_main and overwrite and not resume:
        shutil.rmtree(report.folder, ignore_errors=True)  # of an interrupted run that is not resumed
    history = trainer.run()
    scores = _scores(context, held_out) if recipe.evals else {}
    _finish(context)
    summary = _summary(context, history, report) | {
        "held_out": {name: score.as_dict() for name, score in scores.items()},
        "rolled_back": [list(steps) for steps in trainer.state.skipped],
    }
    if trainer.world.is_main:
        report.close()
        _save(context, state, report.folder, summary)
        publish(state / "model", output, state)
    trainer.world.barrier()
    return summary


def initial_checkpoint(recipe: PretrainRecipe, data: Path) -> Checkpoint:
    """Create the recipe's model, or load the checkpoint to continue from."""
    seed, pooling = recipe.recipe.seed, recipe.recipe.pooling
    tokenizer = None if recipe.tokenizer is None else Tokenizer.from_folder(data / Path(recipe.tokenizer).expanduser())
    if isinstance(recipe.model, str):
        checkpoint = Checkpoint.load(model_name(data, recipe.model), device="cpu")
        own = checkpoint.tokenizer
        if tokenizer is not None and (own is None or tokenizer.vocab_size != own.vocab_size):
            checkpoint = extend_vocabulary(checkpoint, tokenizer)
        if _trains_mlm(recipe) and "mlm" not in checkpoint.model.heads:
            checkpoint = checkpoint.with_head("mlm", seed=seed)
    else:
        if tokenizer is None:
            raise ConfigError("a new model needs a tokenizer: train one with bertie tokenizer train")
        checkpoint = new_model(recipe.model, tokenizer, head=_main_head(recipe), seed=seed)
    if pooling is not None:
        config = checkpoint.model.config
        checkpoint.sentence = SentenceModules.create(config.width, pooling, max_seq_length=config.max_length)
    return checkpoint


def _trains_mlm(recipe: PretrainRecipe) -> bool:
    """Whether any objective predicts masked tokens with the model's own head."""
    return any(
        objective["kind"] in ("mlm", "mlm_distillation") or objective.get("rate") for objective in recipe.objectives
    )


def _main_head(recipe: PretrainRecipe) -> HeadName:
    kinds = [objective["kind"] for objective in recipe.objectives]
    pairs: list[HeadName] = [objective["pairs"] for objective in recipe.objectives if objective.get("pairs")]
    if "rtd" in kinds:
        if len(kinds) > 1:
            raise ConfigError("an objective of kind rtd must be the only one")
        return "rtd"
    return pairs[0] if pairs else "mlm"


def _stage(recipe: PretrainRecipe) -> Stage:
    """The deadline of a run with a budget. Steps of different objectives take different times: many are measured."""
    if recipe.recipe.budget is None:
        return Stage()
    most, least = MEASURED_STEPS
    return Stage(deadline=time.monotonic() + recipe.recipe.budget, warm_steps=max(least, min(most, recipe.steps // 30)))


# --- evaluation ---


Evaluation = HeldOutEvaluation | PairEvaluation | ReplacedTokenEvaluation


def _held_out(context: RunContext) -> list[Evaluation]:
    """The evaluations of all objectives on the held-out part of the first corpus, if there is one."""
    recipe, checkpoint = context.recipe, context.checkpoint
    corpus = _held_out_corpus(context)
    if corpus is None:
        return []
    max_length = min(recipe.recipe.max_length or checkpoint.max_length, checkpoint.max_length)
    budget = max(HELD_OUT_TOKENS, max_length)
    dtype = autocast_dtype(recipe.recipe.mixed_precision, context.device)

    def masked() -> HeldOutEvaluation:
        packed = PackedCorpus(corpus, budget, max_length, seed=0)
        return HeldOutEvaluation(packed, context.tokenizer, budget=budget, dtype=dtype)

    evaluations: list[Evaluation] = []
    if "mlm" in checkpoint.model.heads and _trains_mlm(recipe):
        evaluations.append(masked())
    if context.detection is not None:
        evaluations.append(ReplacedTokenEvaluation(masked(), context.detection))
    for name in {objective["pairs"]: None for objective in recipe.objectives if objective.get("pairs")}:
        options: dict[str, Any] = {"pairs": PAIR_TASKS[name](), "budget": budget, "max_length": max_length, "seed": 0}
        try:
            sampler = SentencePairSampler(corpus, context.tokenizer, HELD_OUT_STEPS, **options)
        except InputError:  # a single document has no pairs with another
            continue
        evaluations.append(PairEvaluation(sampler.first_epoch(), name, dtype=dtype))
    return evaluations


def _held_out_corpus(context: RunContext) -> Corpus | None:
    recipe = context.recipe
    corpora = [
        objective.get("corpus", recipe.corpus)
        for objective in recipe.objectives
        if objective["kind"] in CORPUS_OBJECTIVES
    ]
    if not corpora or not corpora[0]:
        return None
    names = [corpora[0]] if isinstance(corpora[0], str) else corpora[0]
    folders = [context.path(name) / HELD_OUT for name in names]
    folders = [folder for folder in folders if (folder / MANIFEST).is_file()]
    if not folders:
        return None
    corpus = Corpus.concatenate([Corpus.open(folder, context.tokenizer) for folder in folders])
    return corpus if corpus.tokens else None


def _evaluation(context: RunContext, held_out: Sequence[Evaluation]) -> Callable[[], dict[str, float]] | None:
    """Evaluate on held-out text, and each task on its dev data."""
    if not held_out and not any(dev for _, dev in context.tasks.values()):
        return None

    def evaluate() -> dict[str, float]:
        scores: dict[str, float] = {}
        for evaluation in held_out:
            scores |= evaluation(context.checkpoint.model)
        for name, (task, dev) in context.tasks.items():
            if dev is not None:
                scores[name] = task.metrics(dev)[task.main_metric(dev)]
        return scores

    return evaluate


def _scores(context: RunContext, held_out: Sequence[Evaluation]) -> dict[str, Score]:
    """The scores of the trained model on held-out text and on the dev data of tasks, with their 95% intervals."""
    model = context.checkpoint.model
    scores: dict[str, Score] = {}
    for evaluation in held_out:
        if isinstance(evaluation, HeldOutEvaluation):
            scores |= evaluate_with_intervals(model, evaluation)
        else:
            scores |= evaluation.scores(model)
    for name, (task, dev) in context.tasks.items():
        if dev is not None:
            scores[name] = task.scores(task.predict_labelled(dev))[task.main_metric(dev)]
    return scores


def _evenly_spaced(steps: int, times: int) -> frozenset[int]:
    return frozenset(round(steps * k / times) for k in range(1, times + 1)) if times else frozenset()


# --- the result ---


def _finish(context: RunContext) -> None:
    for action in context.after_training:
        action()
    context.checkpoint.model.auxiliary = nn.ModuleDict()
    for task, dev in context.tasks.values():
        if dev is not None:
            task.calibrate(dev)


def _summary(context: RunContext, history: TrainingHistory, report: TrainingReport) -> dict[str, Any]:
    device = context.device
    return {
        "bertie": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "parameters": sum(p.numel() for p in context.checkpoint.model.parameters()),
        "steps": history.steps,
        "tokens": history.tokens,
        "seconds": round(history.seconds, 1),
        "tokens_per_second": round(report.tokens / report.seconds, 1) if report.seconds else None,
        "mfu": report.mfu,
        "loss": history.curve[-1]["loss"] if history.curve else None,
        "evaluation": history.evaluations[-1] if history.evaluations else None,
    }


def _save(context: RunContext, state: Path, report: Path, summary: Mapping[str, Any]) -> None:
    model = state / "model"
    context.checkpoint.save(model, overwrite=True)
    folder = model / "training"
    if report.is_dir():
        shutil.copytree(report, folder)  # a copy: a run killed after this resumes with the original
    folder.mkdir(exist_ok=True)
    atomic_write(folder / "recipe.json", json.dumps(context.recipe.as_dict(), indent=1).encode())
    atomic_write(folder / "run.json", json.dumps(summary, indent=1).encode())
