"""Training and evaluation of an `Embedder`; base class of the adapters for sparse and token embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.model_spec import bare_architecture, model_spec
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.config import HeadInfo
from bertie.errors import ConfigError, InputError
from bertie.evaluation import metrics
from bertie.evaluation.metrics import Score
from bertie.nn.heads import Head
from bertie.nn.model import Model
from bertie.pipeline.inputs import TaskInput
from bertie.tasks.prompts import prompt_tokens_in
from bertie.text.windows import Window
from bertie.training.embedding.losses import EmbeddingLoss, KLDivergenceLoss, MatryoshkaLoss
from bertie.training.embedding.objective import EmbeddingObjective, make_row, named_loss
from bertie.training.embedding.row_sampler import RowSampler
from bertie.training.embedding.similarity_functions import Cosine, DotProduct, Similarity
from bertie.training.finetune.base import Predictions, TaskTraining, pieces
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import TrainingExample, TrainingWindow
from bertie.training.sampling import BatchSampler, TrainingTask

DEFAULT_LOSSES = {"pairs": "infonce", "scores": "cosent", "classes": "softmax", "lists": "kl"}  # by kind of data
Table = NDArray[np.float32]
Comparison = Callable[[Sequence[int], Sequence[int]], Table]  # similarities of some texts, by index, to others
_HEAD_KEYS = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type")  # of config.json


class EmbeddingTraining(TaskTraining[Any]):
    """Contrastive learning, regression on similarities, and distillation of rankings."""

    data_kind = "embed"

    def check_data(
        self, train: LabelledDataset, dev: LabelledDataset | None, test: LabelledDataset | None = None
    ) -> None:
        """Embeddings are evaluated by similarities or by ranks, the same way on dev and test data."""
        if dev is not None and dev.inputs == "classes" and not _numeric(dev):
            raise InputError(
                f"{dev.name} has classes, which embeddings cannot be evaluated on; use data with scores, or pairs of "
                "matching texts"
            )
        if dev is not None and test is not None and (dev.inputs == "pairs") != (test.inputs == "pairs"):
            raise InputError(
                f"{dev.name} has {dev.inputs} and {test.name} has {test.inputs}; use scores in both, or pairs in both"
            )

    def finish(self) -> None:
        """Remove what only training needs from the model."""
        if "model" in self.task.__dict__:
            self.task.model.auxiliary.clear()

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """An embedder has no head."""
        name = type(self.task).__name__
        raise ConfigError(f"{name} has no head; train it separately, not in bertie.MultiTask")

    def prepare(self, checkpoint: Checkpoint, data: LabelledDataset) -> Checkpoint:
        """The encoder with its sentence modules; heads, which would not match the trained encoder, are dropped."""
        return replace(
            bare_encoder(checkpoint),
            sentence=self.task.modules_for(checkpoint, normalize=bool(self.task.normalize)),
        )

    @property
    def modules(self) -> SentenceModules:
        """Pooling and the modules after it, which are trained with the encoder."""
        modules: SentenceModules | None = self.task.checkpoint.sentence
        assert modules is not None
        return modules

    def plan(self, data: LabelledDataset) -> BatchSampler:
        """Sample rows of texts; with in-batch negatives, no text occurs twice in a step."""
        self.task.modules = self.modules
        objective = self.objective(data)
        objective.attach(self.task.model, self.modules)
        return self.sample(objective, data)

    def sample(self, objective: EmbeddingObjective, data: LabelledDataset, head: str = "") -> BatchSampler:
        """Build the row sampler of an objective over embeddings."""
        in_batch_negatives = objective.loss.inputs == "pairs"
        texts = [example.texts for example in data.examples] if in_batch_negatives else None
        return RowSampler(TrainingTask(head, objective, list(self.items(data))), self.recipe, texts)

    def objective(self, data: LabelledDataset) -> EmbeddingObjective:
        """The requested loss, or the default for this kind of data."""
        loss = self.loss(data)
        if self.recipe.matryoshka is not None:
            loss = MatryoshkaLoss(loss, tuple(dict.fromkeys((self.modules.dimension, *self.recipe.matryoshka))))
        elif isinstance(getattr(loss, "score", None), DotProduct) and self.modules.similarity is None:
            self.modules.similarity = "dot"  # inference compares as training did
        return EmbeddingObjective(loss)

    def loss(self, data: LabelledDataset, score: Similarity | None = None) -> EmbeddingLoss:
        """The requested or default loss; `score` is the similarity function of losses given by name."""
        requested = self.task.loss
        if isinstance(requested, EmbeddingLoss):
            loss = requested
        elif requested is None and data.inputs == "lists":
            loss = KLDivergenceLoss(scale=20.0, score=Cosine()) if score is None else KLDivergenceLoss(score=score)
        else:
            name = requested or DEFAULT_LOSSES[data.inputs]
            loss = named_loss(name, classes=len(data.labels))
            if score is not None and hasattr(loss, "score"):
                scale = {} if "scale=" in name or not hasattr(loss, "scale") else {"scale": 1.0}
                loss = replace(loss, score=score, **scale)  # type: ignore[type-var]
        _check_inputs(loss, data)
        self._inputs = loss.inputs
        self._index = {label: i for i, label in enumerate(data.labels)}
        return loss

    def items(self, data: LabelledDataset) -> Iterator[TrainingExample]:
        """Tokenize rows of texts as `embed` does."""
        task = self.task
        options = task.options()
        inputs = (
            TaskInput(f"{data.name}, row {example.row}", (task.prepare_text(options.prompt + text),), options)
            for example in data.examples
            for text in example.texts
        )
        texts = task.pipeline.read(inputs)
        for example in data.examples:
            windows = [text.windows for text in islice(texts, len(example.texts))]
            yield make_row([self._pieces(group, options.prompt_tokens) for group in windows], self.target(example))

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """A row of one text."""
        return make_row([self._pieces(windows, self.task.options().prompt_tokens)], self.target(example))

    def _pieces(self, windows: Sequence[Window], prompt: int) -> Sequence[TrainingWindow]:
        if not prompt or self.modules.pooling.include_prompt:
            return pieces(windows)
        skips = [np.array(prompt_tokens_in(window, prompt)) for window in windows]
        return [replace(piece, values=skip) for piece, skip in zip(pieces(windows), skips, strict=True)]

    def target(self, example: Example) -> Any:
        """The label of a row, as the loss reads it."""
        if self._inputs == "classes":
            return np.int64(self._index[example.target])
        return None if example.target is None else np.array(example.target, dtype=np.float32)

    def fingerprint(self, data: Sequence[LabelledDataset]) -> str:
        """A hash of all that a run depends on, including the loss."""
        loss = re.sub(r" at 0x\w+", "", repr(self.task.loss))  # a function's address differs between processes
        return f"{super().fingerprint(data)} {loss}"

    def main_metric(self, data: LabelledDataset) -> str:
        """The metric that selects the best epoch and seed: recall_1 for matching pairs."""
        return "recall_1" if data.inputs == "pairs" else super().main_metric(data)

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Predict the similarity of each row's texts, or for matching pairs the rank of the positive."""
        index = {text: i for i, text in enumerate(dict.fromkeys(t for example in data.examples for t in example.texts))}
        rows = [[index[text] for text in example.texts] for example in data.examples]
        results, compare = self.comparison(list(index), rows)
        counts = [
            np.array([sum(getattr(results[i], name) for i in row) for row in rows])
            for name in ("tokens_total", "tokens_read", "windows")
        ]
        if data.inputs == "pairs":
            ranks = _ranks(rows, compare)
            return Predictions("retrieval", data, [1] * len(rows), ranks, None, None, counts[0], counts[1], counts[2])
        similarities = [compare(row[:1], row[1:])[0] for row in rows]
        if data.inputs == "lists":  # one row per passage
            sizes = [len(row) for row in similarities]
            examples = [
                replace(example, texts=(example.texts[0], text), target=target)
                for example in data.examples
                for text, target in zip(example.texts[1:], example.target, strict=True)
            ]
            data, counts = replace(data, examples=examples, inputs="scores"), [np.repeat(c, sizes) for c in counts]
        gold = [float(example.target) for example in data.examples]
        predicted = np.concatenate(similarities).tolist()
        return Predictions("similarity", data, gold, predicted, None, None, counts[0], counts[1], counts[2])

    def comparison(self, texts: list[str], rows: Sequence[Sequence[int]]) -> tuple[Sequence[Any], Comparison]:
        """Results for the texts, and a function that compares them: the first of each of `rows` with the others."""
        results = list(self.task.embed_each(texts))
        embeddings = np.stack([result.vector for result in results])
        return results, lambda a, b: self.task.compare(embeddings[list(a)], embeddings[list(b)])

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Correlations with the scores, or recall and MRR of the matching text."""
        metric = metrics.retrieval_from_ranks if predictions.kind == "retrieval" else metrics.sts
        return metric(predictions.gold, predictions.predicted, resamples=resamples)


def bare_encoder(checkpoint: Checkpoint) -> Checkpoint:
    """The encoder without heads, sentence modules and other settings."""
    spec, config = checkpoint.spec, checkpoint.config
    if not set(spec.heads) <= {"pooler"}:
        dropped = (*CrossEncoderConfig.CONFIG_KEYS, *_HEAD_KEYS)
        config = {key: value for key, value in config.items() if key not in dropped}
        config["architectures"] = bare_architecture(config)
        spec = model_spec(config, None, head="none", ignore=spec.ignored)
    kept: dict[str, Head] = {name: checkpoint.model.head(name) for name in spec.heads}
    model = Model.from_parts(checkpoint.model.encoder, kept).eval()
    others: dict[str, Any] = dict.fromkeys(("sentence", "cross_encoder", "splade", "late_interaction"))
    return replace(checkpoint, model=model, config=config, spec=spec, heads={}, **others)


def _ranks(rows: Sequence[Sequence[int]], compare: Comparison) -> list[tuple[float, ...]]:
    """The rank of each row's second text for its first, among all second and later texts; ties count against it.

    Other texts that match the first are left out, and so is the first itself. With negatives: also whether it ranks
    above all negatives of its own row.
    """
    matches: dict[int, set[int]] = {}
    for first, second, *_ in rows:
        matches.setdefault(first, {first}).add(second)
    candidates = sorted({i for row in rows for i in row[1:]})
    column = {i: n for n, i in enumerate(candidates)}
    ranks: list[tuple[float, ...]] = []
    for start in range(0, len(rows), 256):
        block = rows[start : start + 256]
        table = compare([row[0] for row in block], candidates)  # (256, candidates)
        for (first, second, *negatives), similarities in zip(block, table, strict=True):
            own = similarities[column[second]]
            above = [own > similarities[column[i]] for i in negatives]
            similarities[[column[i] for i in matches[first] if i in column]] = -np.inf
            rank = 1.0 + float((similarities >= own).sum())
            ranks.append((rank, float(all(above))) if negatives else (rank,))
    return ranks


def _numeric(data: LabelledDataset) -> bool:
    """Whether all classes are integers, and so may be scores."""
    return all(label.removeprefix("-").isdigit() for label in data.labels)


def _check_inputs(loss: EmbeddingLoss, data: LabelledDataset) -> None:
    """Refuse data that a loss cannot be computed on."""
    wanted, name = loss.inputs, type(loss).__name__
    texts = len(data.examples[0].texts)
    if wanted == "triplets" and data.inputs == "pairs":
        if texts != 3:
            raise InputError(
                f"{name} takes three texts per row (anchor, positive, negative), and {data.name} has {texts}"
            )
        return
    if wanted == "scores" and data.inputs == "classes" and _numeric(data):
        return
    if wanted != data.inputs:
        needs = {
            "pairs": "matching texts (anchor, positive), without labels",
            "triplets": "three texts per row (anchor, positive, negative)",
            "scores": "two texts and a score per row (text_a, text_b, score)",
            "classes": "two texts and a label per row (text_a, text_b, label)",
            "lists": "a query, passages and a score for each",
        }.get(wanted, "a teacher's embeddings, and is trained by bertie.Trainer")
        raise InputError(f"{name} takes {needs}; {data.name} has {data.inputs}")
