"""Builds the batch sampler of each [[objective]] in a recipe: one function per kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import is_built_in
from bertie.data.progress import Progress
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.tasks import registry
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.finetune.base import TaskTraining, training_for
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.objectives import (
    Objective,
    SingleLabelObjective,
    TokenClassificationObjective,
    TrainingExample,
)
from bertie.training.pretrain.corpus import Corpus
from bertie.training.pretrain.embedding_distillation import (
    EmbeddingDistillation,
    EmbeddingDistillationSampler,
    Passages,
    TeacherEnsemble,
    assign_clusters,
    check_teachers,
    embedding_targets,
)
from bertie.training.pretrain.initialization import new_model
from bertie.training.pretrain.logit_distillation import LogitDistillation, TokenLogitDistillation
from bertie.training.pretrain.masked_lm import EnhancedMaskObjective
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.mlm_distillation import DistilBertLoss, MaskedLMDistillation, copy_layers
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.pretrain_recipe import EMBEDDING_TERMS, MASKING_KEYS, SENTENCE_TERMS, PretrainRecipe
from bertie.training.pretrain.relation_distillation import Relation, RelationDistillation, RelationLoss
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection, ReplacedTokenObjective
from bertie.training.pretrain.samplers import BatchSizeWarmup, MaskedLMSampler, MixtureSampler
from bertie.training.pretrain.sentence_distillation import (
    AlignedCorpora,
    EmbeddingTerms,
    PrincipalComponents,
    SentenceDistillation,
    SentenceDistillationSampler,
    segment_mean,
)
from bertie.training.pretrain.sentence_pairs import NextSentence, SentenceOrder, SentencePairSampler
from bertie.training.sampling import BatchSampler, ExampleSampler, TrainingTask
from bertie.training.step import autocast_dtype

WARMUP_PARTS = 8  # small steps of a full step, with batch-size warmup
COMPONENT_TEXTS = 8_192  # sample that the principal components of a teacher's embeddings are fitted to
PAIR_TASKS: dict[str, type[NextSentence] | type[SentenceOrder]] = {"nsp": NextSentence, "sop": SentenceOrder}


@dataclass(slots=True)
class RunContext:
    """The model, data and teachers that the objectives of a run share."""

    recipe: PretrainRecipe
    data: Path  # folders and files in the recipe are relative to it
    device: torch.device
    checkpoint: Checkpoint
    teachers: dict[str, Checkpoint] = field(default_factory=dict)
    tasks: dict[str, tuple[TaskTraining[Any], LabelledDataset | None]] = field(
        default_factory=dict
    )  # with their dev data
    after_training: list[Callable[[], None]] = field(default_factory=list)
    detection: ReplacedTokenDetection | None = None  # both models of an objective of kind rtd
    progress: bool = True  # whether to show progress bars

    @property
    def hyperparameters(self) -> Recipe:
        """The recipe's hyperparameters."""
        return self.recipe.recipe

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self.checkpoint.tokenizer is None:
            raise InputError(f"{self.checkpoint.source} has no tokenizer")
        return self.checkpoint.tokenizer

    def path(self, name: str) -> Path:
        """A file or folder of the recipe."""
        return self.data / Path(name).expanduser()

    def corpus(self, names: str | Sequence[str] | None, tokenizer: Tokenizer | None) -> Corpus:
        """Open one or several corpora as one."""
        if not names:
            raise ConfigError("the recipe names no corpus; build one with bertie corpus")
        folders = [names] if isinstance(names, str) else names
        return Corpus.concatenate([Corpus.open(self.path(name), tokenizer) for name in folders])

    def teacher(self, name: str) -> Checkpoint:
        """Load a teacher once, in the compute dtype."""
        if name not in self.teachers:
            dtype = autocast_dtype(self.hyperparameters.mixed_precision, self.device)
            teacher = Checkpoint.load(model_name(self.data, name), device=self.device)
            teacher.model.to(dtype).eval().requires_grad_(False)
            if teacher.sentence is not None:
                teacher.sentence.to(self.device)
            self.teachers[name] = teacher
        return self.teachers[name]


def model_name(data: Path, name: str) -> str:
    """A folder below `data` if there is one, else any name that `Checkpoint.load` takes."""
    folder = data / Path(name).expanduser()
    # Absolute, as ./bertie-small becomes bertie-small in a path, which is the built-in model's name.
    return str(folder.absolute()) if folder.is_dir() and not is_built_in(name) else name


def build_sampler(context: RunContext) -> BatchSampler:
    """Build the sampler of a run: that of its objective, or a mixture of several."""
    recipe = context.recipe
    samplers = [_build(context, options) for options in recipe.objectives]
    if len(samplers) == 1 and recipe.objectives[0]["kind"] in CORPUS_OBJECTIVES:
        return samplers[0]  # one of a labelled task has whole epochs, not the recipe's number of steps
    shares = [float(options.get("share", 1.0)) for options in recipe.objectives]
    return MixtureSampler(samplers, shares, recipe.steps, context.hyperparameters.seed)


def _build(context: RunContext, options: Mapping[str, Any]) -> BatchSampler:
    builder = CORPUS_OBJECTIVES.get(options["kind"])
    if builder is None:
        return build_task(context, options)
    recipe, warmup = context.recipe, context.recipe.batch_warmup
    steps, budget = recipe.steps, options.get("batch_tokens", context.hyperparameters.batch_tokens)
    if warmup:
        steps, budget = steps * WARMUP_PARTS, budget // WARMUP_PARTS
    limit = context.checkpoint.max_length
    max_length = options.get("max_length", context.hyperparameters.max_length) or limit
    if max_length > limit:
        raise ConfigError(f"max_length={max_length} must be at most {limit}, the model's")
    corpus = context.corpus(options.get("corpus", recipe.corpus), context.tokenizer)
    sampler = builder(CorpusObjective(context, options, corpus, steps, budget, max_length))
    return BatchSizeWarmup(sampler, WARMUP_PARTS, warmup) if warmup else sampler


# --- objectives over a corpus ---


@dataclass(frozen=True, slots=True)
class CorpusObjective:
    """The arguments of a builder: one [[objective]] table, with its corpus and the sizes of its steps."""

    context: RunContext
    options: Mapping[str, Any]
    corpus: Corpus
    steps: int
    budget: int  # tokens per step
    max_length: int

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.context.hyperparameters.seed

    def masking(self) -> Masking:
        """The masking of the table."""
        return Masking(**{name: self.options[name] for name in MASKING_KEYS if name in self.options})

    def masked_lm_sampler(self, objective: Objective | None, heads: Sequence[str] = ("mlm",)) -> MaskedLMSampler:
        """Sample packed sequences with masked tokens."""
        return MaskedLMSampler(
            PackedCorpus(self.corpus, self.budget, self.max_length, self.seed),
            self.context.tokenizer,
            self.steps,
            masking=self.masking(),
            static=bool(self.options.get("static", False)),
            objective=objective,
            heads=heads,
        )


def build_mlm(args: CorpusObjective) -> BatchSampler:
    """Masked-language modelling, with or without sentence pairs."""
    pairs = args.options.get("pairs")
    if pairs is None:
        enhanced = args.options.get("enhanced_mask_decoder")
        model = args.context.checkpoint.model
        return args.masked_lm_sampler(EnhancedMaskObjective(model, args.seed) if enhanced else None)
    if pairs not in PAIR_TASKS:
        raise ConfigError(f"pairs={pairs!r} must be one of {', '.join(PAIR_TASKS)}")
    return SentencePairSampler(
        args.corpus,
        args.context.tokenizer,
        args.steps,
        pairs=PAIR_TASKS[pairs](),
        budget=args.budget,
        max_length=args.max_length,
        seed=args.seed,
        masking=args.masking(),
        static=bool(args.options.get("static", False)),
    )


def build_rtd(args: CorpusObjective) -> BatchSampler:
    """Replaced-token detection."""
    context, options, config = args.context, args.options, args.context.recipe.model
    if isinstance(config, str):
        raise ConfigError("kind='rtd' is for new models: give config.json's keys as [model]")
    generator_config = {**config, **options.get("generator", {})}
    generator = new_model(generator_config, context.tokenizer, head="mlm", seed=args.seed + 1).model.to(context.device)
    sharing, weight = options.get("sharing", "tied"), float(options.get("weight", 50.0))
    detection = ReplacedTokenDetection(generator, context.checkpoint.model, sharing, weight)

    context.detection = detection

    def keep_discriminator() -> None:
        context.checkpoint.model = detection.trained()

    context.after_training.append(keep_discriminator)
    return args.masked_lm_sampler(ReplacedTokenObjective(detection), heads=("rtd",))


def build_mlm_distillation(args: CorpusObjective) -> BatchSampler:
    """DistilBERT's distillation."""
    context, options = args.context, args.options
    teacher = context.teacher(options["teacher"])
    terms = {name: float(options[name]) for name in ("temperature", "soft", "mlm", "cosine") if name in options}
    if options.get("copy_layers", not isinstance(context.recipe.model, str)):
        copy_layers(teacher.model, context.checkpoint.model)
    return args.masked_lm_sampler(MaskedLMDistillation(DistilBertLoss(teacher.model, **terms)))


def build_relation_distillation(args: CorpusObjective) -> BatchSampler:
    """MiniLM's distillation."""
    context, options = args.context, args.options
    relations: Sequence[Relation] = options.get("relations", ("qq", "kk", "vv"))
    layers = {name: options[name] for name in ("heads", "layer", "student_layer") if name in options}
    loss = RelationLoss(context.teacher(options["teacher"]).model, relations=relations, **layers)
    return MaskedLMSampler(
        PackedCorpus(args.corpus, args.budget, args.max_length, args.seed),
        context.tokenizer,
        args.steps,
        # The loss needs no masked tokens: one per text is chosen, and left unchanged.
        masking=Masking(rate=1e-6, mask=0.0, random=0.0),
        objective=RelationDistillation(loss),
        heads=(),
    )


def build_sentence_distillation(args: CorpusObjective) -> BatchSampler:
    """Distillation of a sentence encoder."""
    context, options, model = args.context, args.options, args.context.checkpoint.model
    teacher = context.teacher(options["teacher"])
    if args.max_length > teacher.max_length:
        raise ConfigError(f"max_length={args.max_length} must be at most {teacher.max_length}, the teacher's")
    teacher_corpus = context.corpus(options["teacher_corpus"], teacher.tokenizer)
    corpora = AlignedCorpora(args.corpus, teacher_corpus, args.max_length)
    components = None
    wide = teacher.sentence is not None and teacher.sentence.dimension != model.config.width
    if wide and "components" not in model.auxiliary:
        theirs, ours = _sample_embeddings(teacher, model, corpora, context.hyperparameters)
        components = PrincipalComponents.fit(theirs, model.config.width).align(theirs, ours)
    terms = {name: float(options[name]) for name in SENTENCE_TERMS if name in options}
    layers = int(options.get("layers", 1))
    objective = SentenceDistillation(model, teacher, layers=layers, components=components, **terms)
    masking = args.masking() if options.get("rate") else None
    return SentenceDistillationSampler(
        corpora, context.tokenizer, args.steps, objective, budget=args.budget, seed=args.seed, masking=masking
    )


def build_embedding_distillation(args: CorpusObjective) -> BatchSampler:
    """Distillation of the embeddings of one or several teachers, computed before training."""
    context, options, model = args.context, args.options, args.context.checkpoint.model
    names = options["teacher"]
    names = [names] if isinstance(names, str) else list(names)
    teachers = [context.teacher(name) for name in names]
    check_teachers(teachers, context.tokenizer)
    ensemble = TeacherEnsemble(teachers, options.get("prompts", ()), float(options.get("center", 0.0)))
    if args.max_length > ensemble.max_length:
        raise ConfigError(f"max_length={args.max_length} must be at most {ensemble.max_length}, the teachers'")
    passages = Passages(args.corpus, args.max_length)
    terms = {name: float(options[name]) for name in EMBEDDING_TERMS if name in options}
    targets, projection = embedding_targets(ensemble, model, passages, args.seed, context.progress)
    clusters = options.get("clusters")
    return EmbeddingDistillationSampler(
        passages,
        targets,
        args.steps,
        EmbeddingDistillation(EmbeddingTerms(**terms), projection, clusters is not None),
        budget=args.budget,
        seed=args.seed,
        teachers=names,
        clusters=None if clusters is None else assign_clusters(targets, clusters, args.seed, model.device),
    )


@torch.no_grad()
def _sample_embeddings(
    teacher: Checkpoint, student: Model, corpora: AlignedCorpora, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """(N, D) the teacher's embeddings of a sample of passages, and (N, width) the student's."""
    assert teacher.sentence is not None
    passages = np.sort(np.random.default_rng([recipe.seed, 0x62617369]).permutation(len(corpora))[:COMPONENT_TEXTS])
    device, dtype = student.device, autocast_dtype(recipe.mixed_precision, student.device)
    training = student.training
    student.eval()
    theirs: list[Tensor] = []
    ours: list[Tensor] = []
    for chunk in np.array_split(passages, max(1, len(passages) // 256)):
        batch, teacher_batch = (
            Batch.from_ids(np.split(ids, cu[1:-1])).to(device) for ids, cu, _, _ in corpora.read(chunk)
        )
        embeddings = teacher.sentence(teacher.model.hidden(teacher_batch), teacher_batch)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            hidden = student.hidden(batch)
        theirs.append(embeddings.float().cpu())
        ours.append(segment_mean(hidden, batch.text_of_token(), len(batch)).cpu())
    student.train(training)
    return torch.cat(theirs), torch.cat(ours)


CORPUS_OBJECTIVES: dict[str, Callable[[CorpusObjective], BatchSampler]] = {
    "mlm": build_mlm,
    "rtd": build_rtd,
    "mlm_distillation": build_mlm_distillation,
    "relation_distillation": build_relation_distillation,
    "sentence_distillation": build_sentence_distillation,
    "embedding_distillation": build_embedding_distillation,
}


# --- labelled tasks ---


def build_task(context: RunContext, options: Mapping[str, Any]) -> BatchSampler:
    """A head trained on labelled texts, or on the soft labels of a teacher."""
    name, columns, checkpoint = options["name"], options.get("columns"), context.checkpoint
    row: Any = registry.get(options["kind"])
    train = read_dataset(
        row.data_kind, str(context.path(options["train"])), columns=columns, name=f"the data of {name}"
    )
    dev = None
    if "dev" in options:
        dev = read_dataset(
            row.data_kind,
            str(context.path(options["dev"])),
            columns=columns,
            name=f"the dev data of {name}",
            known=train.labels or None,
            training=False,
        )
    if name not in checkpoint.heads:
        info = training_for(row.trainable_class(checkpoint)).head_for(train)
        checkpoint.add_head(name, info, seed=context.hyperparameters.seed)
        checkpoint.model.heads[name].to(context.device)
    recipe = context.hyperparameters.replace(pooling=None)  # `pooling` is for sentence embeddings
    task = training_for(row.trainable_class.from_recipe(checkpoint, recipe, head=name))
    if dev is not None:
        task.check_metrics(dev)
    context.tasks[name] = (task, dev)
    training_task = TrainingTask(name, task.objective(train), _tokenize(task, train, name, context.progress))
    if "teacher" in options:
        training_task = _soften(context, options, row, task, training_task)
    size = int(options.get("batch_size", 32))
    shares = sum(float(other.get("share", 1.0)) for other in context.recipe.objectives)
    steps = context.recipe.steps * float(options.get("share", 1.0)) / shares
    epochs = max(1, math.ceil(1.1 * steps * size / len(training_task.examples)))
    return ExampleSampler([training_task], recipe.replace(batch_size=size, batch_tokens=None, epochs=epochs))


def _tokenize(task: TaskTraining[Any], train: LabelledDataset, name: str, progress: bool) -> list[TrainingExample]:
    items: list[TrainingExample] = []
    with Progress(f"tokenize {name}", lambda: len(items) / len(train.examples), show=progress) as bar:
        for item in task.items(train):
            items.append(item)
            bar.update(1)
    return items


def _soften(
    context: RunContext, options: Mapping[str, Any], row: Any, task: TaskTraining[Any], hard: TrainingTask
) -> TrainingTask:
    """Replace the hard labels of a task by the logits of a fine-tuned teacher with the same tokenizer and labels."""
    teacher = context.teacher(options["teacher"])
    if teacher.tokenizer is None or teacher.tokenizer.vocabulary != context.tokenizer.vocabulary:
        raise ConfigError(f"teacher={options['teacher']!r} must have the model's tokenizer")
    teacher_task = training_for(row.trainable_class(teacher))
    if teacher_task.labels != task.labels:
        raise ConfigError(f"the teacher's labels {teacher_task.labels} must be those of the data, {task.labels}")
    if not isinstance(hard.objective, SingleLabelObjective | TokenClassificationObjective):
        raise ConfigError(f"objective {options['name']!r}: a teacher is for single-label classification and tagging")
    terms = {name: float(options[name]) for name in ("temperature", "hard") if name in options}
    objective = (TokenLogitDistillation if row.name == "tag" else LogitDistillation)(**terms)
    examples = objective.add_soft_labels(teacher.model, str(teacher_task.task.head), hard.examples)
    return TrainingTask(hard.head, objective, examples)
