"""Pretraining by a recipe: a fresh or a finished model, a corpus, one objective or several in turn; a model folder out.

While it runs, all there is lies in OUT.training; OUT is renamed to its place when all is done. Beside the weights lies
OUT/training with the recipe, the curves, samples of predictions and what the run says of itself (run.json).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertie._version import __version__
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.config import HeadInfo, HeadName
from bertie.data.atomic import atomic_write
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.callbacks import LogRow, TrainingHistory
from bertie.training.distributed import Strategy
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.loop import Trainer
from bertie.training.mfu import ceiling, flops_per_token
from bertie.training.pretrain import initialization as begin
from bertie.training.pretrain import monitoring as watch
from bertie.training.pretrain.corpus import HELD_OUT, MANIFEST, Corpus
from bertie.training.pretrain.curves import Curves
from bertie.training.pretrain.distillation import Pair as RelationPair
from bertie.training.pretrain.distillation import Related, Relations, Triple, TripleLoss, copy_layers
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.mlm import MaskedLMSampler
from bertie.training.pretrain.packing import Packed
from bertie.training.pretrain.plans import BatchSizeWarmup, MixtureSampler, SentencePairSampler
from bertie.training.pretrain.pretrain_recipe import MASKING, TAUGHT, PretrainRecipe
from bertie.training.pretrain.pretraining_objectives import (
    EnhancedMasked,
    NextSentence,
    ReplacedTokens,
    Replacement,
    SentenceOrder,
)
from bertie.training.pretrain.sentence_distillation import (
    Aligned,
    Basis,
    SentenceDistillation,
    SentenceDistillationSampler,
    means,
)
from bertie.training.sampling import BatchSampler, ExampleSampler, TrainingTask
from bertie.training.step import autocast_dtype

PARTS = 8  # steps of a batch that grows
BASIS_TEXTS = 8_192  # of a teacher's vectors, to find their directions
READERS = 3  # processes that read the next steps while a GPU works


def pretrain(
    asked: PretrainRecipe,
    out: str | Path,
    *,
    data: str | Path = ".",
    resume: bool = False,
    overwrite: bool = False,
    device: str | torch.device = "cpu",
    strategy: Strategy = "ddp",
    tensorboard: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Train, and write the model to `out`; the answer is what run.json holds.

    Names of files and folders in the recipe are looked up from `data`.
    """
    return _Run(asked, Path(out), Path(data), torch.device(device), progress).go(
        resume=resume, overwrite=overwrite, strategy=strategy, tensorboard=tensorboard
    )


class _Run:
    """One run."""

    def __init__(self, asked: PretrainRecipe, out: Path, data: Path, device: torch.device, progress: bool) -> None:
        self.asked, self.out, self.data, self.device, self.progress = asked, out.absolute(), data, device, progress
        self.recipe = asked.recipe
        self.finish: list[Callable[[], None]] = []  # what is to be done to the model when it is trained
        self.tasks: dict[str, tuple[Any, LabelledDataset | None]] = {}  # of heads, with dev data
        self.teachers: dict[str, Checkpoint] = {}

    def go(self, *, resume: bool, overwrite: bool, strategy: Strategy, tensorboard: bool) -> dict[str, Any]:
        """Do it."""
        from bertie.training.output_folder import check_output, publish, state_folder

        state = state_folder(self.out)
        check_output(self.out, resume=resume, overwrite=overwrite)
        self.checkpoint = self._begin()
        self.checkpoint.model.to(self.device)
        plan = self._plan()
        held = self._held_out(plan)
        self.folder = state / "report"
        if strategy == "fsdp" and any(one["kind"] == "rtd" for one in self.asked.objectives):
            raise ConfigError("strategy='fsdp' cannot train kind='rtd', whose two models share weights; use 'ddp'")
        half = autocast_dtype(self.recipe.mixed_precision, self.device)
        watcher = _Watcher(self, plan, half, tensorboard)
        trainer = Trainer(
            self.checkpoint.model,
            plan,
            self.recipe,
            evaluate=self._evaluation(held) if held or any(dev for _, dev in self.tasks.values()) else None,
            evaluate_at=_evenly(plan.total_steps, self.asked.evals),
            keep="last",
            folder=state,
            resume=resume,
            restart=overwrite and not resume,
            save_steps=self.asked.save_steps,
            fingerprint=json.dumps(self.asked.as_dict()),
            strategy=strategy,
            rollback=True,
            prefetch_workers=READERS if self.device.type == "cuda" else 0,  # on a CPU they would compete with training
            progress=self.progress,
            callback=watcher,
        )
        if trainer.world.is_main:
            if overwrite and not resume:
                shutil.rmtree(self.folder, ignore_errors=True)  # of a run that nobody goes on with
        history = trainer.run()
        for one in self.finish:
            one()
        self.checkpoint.model.auxiliary = nn.ModuleDict()
        for task, dev in self.tasks.values():
            if dev is not None:
                task.calibrate(dev)
        run = self._about(history, watcher, trainer.state.skipped)
        if trainer.world.is_main:
            watcher.close()
            self._save(state, run)
            publish(state / "model", self.out, state)
        trainer.world.barrier()
        return run

    # --- the model ---

    def _begin(self) -> Checkpoint:
        """A fresh model, or one to go on with."""
        asked = self.asked
        if isinstance(asked.model, str):
            checkpoint = Checkpoint.load(self._named(asked.model))
            if asked.tokenizer is not None:
                wanted = Tokenizer.from_folder(self._path(asked.tokenizer))
                if checkpoint.tokenizer is None or wanted.vocab_size != checkpoint.tokenizer.vocab_size:
                    checkpoint = begin.extend_vocabulary(checkpoint, wanted)
            if self._masks() and "mlm" not in checkpoint.model.heads:
                checkpoint = checkpoint.with_head("mlm", seed=self.recipe.seed)
        else:
            if asked.tokenizer is None:
                raise ConfigError("a fresh model needs a tokenizer: make one with bertie tokenizer train")
            tokenizer = Tokenizer.from_folder(self._path(asked.tokenizer))
            checkpoint = begin.fresh(asked.model, tokenizer, head=self._first_head(), seed=self.recipe.seed)
        if asked.sentence is not None:
            checkpoint.sentence = SentenceModules.create(
                checkpoint.model.config.width, asked.sentence, max_seq_length=checkpoint.model.config.max_length
            )
        return checkpoint

    def _masks(self) -> bool:
        """Whether any objective finds hidden tokens with the model's own head."""
        return any(one["kind"] in ("mlm", "triple") or one.get("rate") for one in self.asked.objectives)

    def _first_head(self) -> HeadName:
        kinds = [one["kind"] for one in self.asked.objectives]
        pairs = [one["pairs"] for one in self.asked.objectives if one.get("pairs")]
        if "rtd" in kinds:
            if len(kinds) > 1:
                raise ConfigError("an objective of kind rtd must be the only one")
            return "rtd"
        found: HeadName = pairs[0] if pairs else "mlm"
        return found

    def _tokenizer(self) -> Tokenizer:
        tokenizer = self.checkpoint.tokenizer
        if tokenizer is None:
            raise InputError(f"{self.checkpoint.source} has no tokenizer")
        return tokenizer

    def _path(self, name: str) -> Path:
        return self.data / Path(name).expanduser()

    def _named(self, name: str) -> str:
        """A model's name: a folder below the data, or anything that `Checkpoint.load` knows."""
        return str(self._path(name)) if self._path(name).is_dir() else name

    def _teacher(self, name: str) -> Checkpoint:
        if name not in self.teachers:
            half = autocast_dtype(self.recipe.mixed_precision, self.device)
            teacher = Checkpoint.load(self._named(name), device=self.device)
            teacher.model.to(half).eval().requires_grad_(False)
            if teacher.sentence is not None:
                teacher.sentence.to(self.device)
            self.teachers[name] = teacher
        return self.teachers[name]

    # --- what is read ---

    def _corpus(self, names: str | Sequence[str] | None, tokenizer: Tokenizer | None) -> Corpus:
        if not names:
            raise ConfigError("the recipe names no corpus; make one with bertie corpus")
        several = [names] if isinstance(names, str) else names
        return Corpus.joined([Corpus.open(self._path(name), tokenizer) for name in several])

    def _plan(self) -> BatchSampler:
        plans = [self._one(objective) for objective in self.asked.objectives]
        if len(plans) == 1:
            return plans[0]
        shares = [float(one.get("share", 1.0)) for one in self.asked.objectives]
        return MixtureSampler(plans, shares, self.asked.steps, self.recipe.seed)

    def _one(self, given: Mapping[str, Any]) -> BatchSampler:
        """The plan of an objective."""
        kind = given["kind"]
        if kind in registry.trainable(with_head=True):
            return self._head(given)
        steps, budget = self.asked.steps, given.get("batch_tokens", self.recipe.batch_tokens)
        grows = bool(self.asked.batch_warmup)
        if grows:
            steps, budget = steps * PARTS, budget // PARTS
        corpus = self._corpus(given.get("corpus", self.asked.corpus), self._tokenizer())
        max_length = given.get("max_length", self.recipe.max_length) or self.checkpoint.max_length
        if max_length > self.checkpoint.max_length:
            raise ConfigError(
                f"max_length={max_length} must be at most {self.checkpoint.max_length}, which is the model's"
            )
        plan = getattr(self, f"_{kind}")(given, corpus, steps, budget, max_length)
        return BatchSizeWarmup(plan, PARTS, self.asked.batch_warmup) if grows else plan

    def _masking(self, given: Mapping[str, Any]) -> Masking:
        return Masking(**{name: given[name] for name in MASKING if name in given})

    def _mlm(self, given: Mapping[str, Any], corpus: Corpus, steps: int, budget: int, max_length: int) -> BatchSampler:
        pairs: dict[str, Any] = {"nsp": NextSentence, "sop": SentenceOrder}
        masking, static, seed = self._masking(given), bool(given.get("static", False)), self.recipe.seed
        if given.get("pairs") is not None:
            if given["pairs"] not in pairs:
                raise ConfigError(f"pairs={given['pairs']!r} must be one of {', '.join(pairs)}")
            kind = pairs[given["pairs"]]()
            options: dict[str, Any] = {"budget": budget, "max_length": max_length, "seed": seed}
            return SentencePairSampler(
                corpus, self._tokenizer(), steps, pairs=kind, masking=masking, static=static, **options
            )
        objective = EnhancedMasked(self.checkpoint.model, seed) if given.get("enhanced") else None
        packed = Packed(corpus, budget, max_length, seed)
        return MaskedLMSampler(packed, self._tokenizer(), steps, masking=masking, static=static, objective=objective)

    def _rtd(self, given: Mapping[str, Any], corpus: Corpus, steps: int, budget: int, max_length: int) -> BatchSampler:
        if isinstance(self.asked.model, str):
            raise ConfigError("kind='rtd' is for fresh models: give config.json's keys as [model]")
        config = {**self.asked.model, **given.get("generator", {})}
        generator = begin.fresh(config, self._tokenizer(), head="mlm", seed=self.recipe.seed + 1).model.to(self.device)
        both = ReplacedTokens(
            generator, self.checkpoint.model, given.get("sharing", "tied"), float(given.get("weight", 50.0))
        )

        def trained() -> None:
            self.checkpoint.model = both.trained()

        self.finish.append(trained)
        return MaskedLMSampler(
            Packed(corpus, budget, max_length, self.recipe.seed),
            self._tokenizer(),
            steps,
            masking=self._masking(given),
            static=bool(given.get("static", False)),
            objective=Replacement(both),
            heads=("rtd",),
        )

    def _triple(
        self, given: Mapping[str, Any], corpus: Corpus, steps: int, budget: int, max_length: int
    ) -> BatchSampler:
        teacher = self._teacher(given["teacher"])
        terms = {name: float(given[name]) for name in ("temperature", "soft", "mlm", "cosine") if name in given}
        if given.get("copy_layers", not isinstance(self.asked.model, str)):
            copy_layers(teacher.model, self.checkpoint.model)
        return MaskedLMSampler(
            Packed(corpus, budget, max_length, self.recipe.seed),
            self._tokenizer(),
            steps,
            masking=self._masking(given),
            static=bool(given.get("static", False)),
            objective=Triple(TripleLoss(teacher.model, **terms)),
        )

    def _relations(
        self, given: Mapping[str, Any], corpus: Corpus, steps: int, budget: int, max_length: int
    ) -> BatchSampler:
        pairs: Sequence[RelationPair] = given.get("relations", ("qq", "kk", "vv"))
        options = {name: given[name] for name in ("heads", "layer", "student_layer") if name in given}
        relations = Relations(self._teacher(given["teacher"]).model, pairs=pairs, **options)
        # Nothing is asked of hidden tokens, so that as few as may be are hidden, and these are read as they are.
        unseen = Masking(rate=1e-6, mask=0.0, random=0.0)
        packed = Packed(corpus, budget, max_length, self.recipe.seed)
        return MaskedLMSampler(packed, self._tokenizer(), steps, masking=unseen, objective=Related(relations), heads=())

    def _taught(
        self, given: Mapping[str, Any], corpus: Corpus, steps: int, budget: int, max_length: int
    ) -> BatchSampler:
        teacher = self._teacher(given["teacher"])
        if max_length > teacher.max_length:
            raise ConfigError(f"max_length={max_length} must be at most {teacher.max_length}, which is the teacher's")
        aligned = Aligned(corpus, self._corpus(given["teacher_corpus"], teacher.tokenizer), max_length)
        terms = {name: float(given[name]) for name in TAUGHT if name in given}
        model, basis = self.checkpoint.model, None
        wide = teacher.sentence is not None and teacher.sentence.dimension != model.config.width
        if wide and "basis" not in model.auxiliary:
            theirs, ours = _vectors(teacher, model, aligned, self.recipe)
            basis = Basis.of(theirs, model.config.width).turned(theirs, ours)
        objective = SentenceDistillation(model, teacher, layers=int(given.get("layers", 1)), basis=basis, **terms)
        masking = self._masking(given) if given.get("rate") else None
        return SentenceDistillationSampler(
            aligned, self._tokenizer(), steps, objective, budget=budget, seed=self.recipe.seed, masking=masking
        )

    def _head(self, given: Mapping[str, Any]) -> BatchSampler:
        """A task of its own, on labelled texts."""
        from bertie.training.finetune.base import training_for

        kind, name, columns = given["kind"], given["name"], given.get("columns")
        row: Any = registry.get(kind)
        files = {"train": str(self._path(given["train"]))}
        if "dev" in given:
            files["dev"] = str(self._path(given["dev"]))
        train = read_dataset(row.data_kind, files["train"], columns=columns, name=f"the data of {name}")
        dev = None
        if "dev" in files:
            known = train.labels or None
            told = f"the dev data of {name}"
            dev = read_dataset(row.data_kind, files["dev"], columns=columns, name=told, known=known, training=False)
        if name not in self.checkpoint.heads:
            info: HeadInfo = training_for(row.trainable_class(self.checkpoint)).head_for(train)
            self.checkpoint.add_head(name, info, seed=self.recipe.seed)
            self.checkpoint.model.heads[name].to(self.device)
        task = training_for(row.trainable_class.from_recipe(self.checkpoint, self.recipe, head=name))
        if dev is not None:
            task.check_metrics(dev)
        self.tasks[name] = (task, dev)
        source = TrainingTask(name, task.objective(train), list(task.items(train)))
        size = int(given.get("batch_size", 32))
        shares = sum(float(one.get("share", 1.0)) for one in self.asked.objectives)
        wanted = self.asked.steps * float(given.get("share", 1.0)) / shares
        epochs = max(1, math.ceil(1.1 * wanted * size / len(source.examples)))
        return ExampleSampler([source], self.recipe.replace(batch_size=size, batch_tokens=None, epochs=epochs))

    # --- what it says of itself ---

    def _held_out(self, plan: BatchSampler) -> watch.HeldOutEvaluation | None:
        """The held-out part of the first corpus, if it has one and tokens are hidden."""
        heads = registry.trainable(with_head=True)
        names = [one.get("corpus", self.asked.corpus) for one in self.asked.objectives if one["kind"] not in heads]
        if not names or not names[0] or "mlm" not in self.checkpoint.model.heads or not self._masks():
            return None
        several = [names[0]] if isinstance(names[0], str) else names[0]
        folders = [self._path(name) / HELD_OUT for name in several]
        folders = [folder for folder in folders if (folder / MANIFEST).is_file()]
        if not folders:
            return None
        corpus = Corpus.joined([Corpus.open(folder, self._tokenizer()) for folder in folders])
        if not corpus.tokens:
            return None
        max_length = min(self.recipe.max_length or self.checkpoint.max_length, self.checkpoint.max_length)
        packed = Packed(corpus, max(16_384, max_length), max_length, seed=0)
        dtype = autocast_dtype(self.recipe.mixed_precision, self.device)
        return watch.HeldOutEvaluation(packed, self._tokenizer(), budget=max(16_384, max_length), dtype=dtype)

    def _evaluation(self, held: watch.HeldOutEvaluation | None) -> Callable[[], dict[str, float]]:
        def evaluate() -> dict[str, float]:
            found = {} if held is None else held(self.checkpoint.model)
            for name, (task, dev) in self.tasks.items():
                if dev is not None:
                    found[name] = task.metrics(dev)[task.main_metric(dev)]
            return found

        return evaluate

    def _about(self, history: TrainingHistory, speed: _Watcher, skipped: Sequence[Sequence[int]]) -> dict[str, Any]:
        return {
            "bertie": __version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else str(self.device),
            "parameters": sum(p.numel() for p in self.checkpoint.model.parameters()),
            "steps": history.steps,
            "tokens": history.tokens,
            "seconds": round(history.seconds, 1),
            "tokens_per_second": round(speed.tokens / speed.seconds, 1) if speed.seconds else None,
            "share_of_ceiling": speed.share,
            "loss": history.curve[-1]["loss"] if history.curve else None,
            "evaluation": history.evaluations[-1] if history.evaluations else None,
            "rolled_back": [list(one) for one in skipped],
        }

    def _save(self, state: Path, run: Mapping[str, Any]) -> None:
        model = state / "model"
        self.checkpoint.save(model, overwrite=True)
        report = model / "training"
        if self.folder.is_dir():
            shutil.copytree(self.folder, report)  # a kill after this finds all of it once more
        report.mkdir(exist_ok=True)
        atomic_write(report / "recipe.json", json.dumps(self.asked.as_dict(), indent=1).encode())
        atomic_write(report / "run.json", json.dumps(run, indent=1).encode())


class _Watcher:
    """Writes a run's curves and samples, with how fast it goes and how much that is of what the chip can do."""

    def __init__(self, run: _Run, plan: BatchSampler, dtype: torch.dtype, tensorboard: bool) -> None:
        self._run, self._plan, self._dtype, self._tensorboard = run, plan, dtype, tensorboard
        self._curves: Curves | None = None
        self._last: tuple[float, float] | None = None  # time and tokens of the last row
        self._flops: float | None = None
        self.tokens = self.seconds = 0.0
        self.share: float | None = None

    def on_start(self, rows: Sequence[LogRow], evaluations: Sequence[LogRow]) -> None:
        """As `TrainingCallback`."""
        if self._curves is not None:
            self._curves.close()
        self._curves = Curves(self._run.folder, rows, evaluations, tensorboard=self._tensorboard)
        self._last = None

    def on_log(self, row: LogRow) -> None:
        """As `TrainingCallback`, with the speed since the last one; the first of a process has none."""
        assert self._curves is not None
        now, tokens = time.monotonic(), row["tokens"]
        more = {}
        if self._last is not None:
            seconds, read = max(1e-9, now - self._last[0]), tokens - self._last[1]
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + read
            more["tokens_per_second"] = round(read / seconds, 1)
            if self._run.device.type == "cuda" and self._plan.single_head:
                most = ceiling(self._run.device, self._dtype)
                if self._flops is None:
                    self._flops = self._per_token()
                more["share_of_ceiling"] = round(self._flops * read / seconds / most, 4)
                self.share = round(self._flops * self.tokens / self.seconds / most, 4)
        self._last = (time.monotonic(), tokens)
        self._curves.log({**row, **more})

    def on_evaluation(self, row: LogRow) -> None:
        """As `TrainingCallback`, with samples of what the model would fill in."""
        assert self._curves is not None
        self._curves.evaluated(row)
        model, tokenizer = self._run.checkpoint.model, self._run.checkpoint.tokenizer
        if "mlm" in model.heads and tokenizer is not None and tokenizer.mask_token is not None:
            watch.write_samples(self._run.folder, int(row["step"]), watch.samples(model, tokenizer))
        self._last = None  # evaluating takes time, too

    def on_save(self) -> None:
        """As `TrainingCallback`."""
        assert self._curves is not None
        self._curves.write()
        self._last = None

    def close(self) -> None:
        """The run is over."""
        if self._curves is not None:
            self._curves.close()

    def _per_token(self) -> float:
        """Of a step in the middle of the run."""
        _, items = self._plan.read(self._plan.total_steps // 2)
        lengths = [len(item) for item in items]
        rows = sum(len(p.rows) for item in items for p in item.windows if p.rows is not None)
        return flops_per_token(self._run.checkpoint.model, lengths, rows / sum(lengths))


def _evenly(steps: int, times: int) -> frozenset[int]:
    return frozenset(round(steps * k / times) for k in range(1, times + 1)) if times else frozenset()


@torch.no_grad()
def _vectors(teacher: Checkpoint, student: Model, aligned: Aligned, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """(N, D) the teacher's vectors of some pieces, and (N, width) the student's."""
    assert teacher.sentence is not None
    chosen = np.sort(np.random.default_rng([recipe.seed, 0x62617369]).permutation(len(aligned))[:BASIS_TEXTS])
    device, half = student.device, autocast_dtype(recipe.mixed_precision, student.device)
    training = student.training
    student.eval()
    found: list[tuple[Tensor, Tensor]] = []
    for some in np.array_split(chosen, max(1, len(chosen) // 256)):
        ours, theirs = (Batch.from_ids(np.split(ids, cu[1:-1])).to(device) for ids, cu, _, _ in aligned.read(some))
        vectors = teacher.sentence(teacher.model.hidden(theirs), theirs)
        with torch.autocast(device.type, half, enabled=half != torch.float32):
            hidden = student.hidden(ours)
        found.append((vectors.float().cpu(), means(hidden, ours.text_of_token(), len(ours)).cpu()))
    student.train(training)
    return torch.cat([one for one, _ in found]), torch.cat([one for _, one in found])
