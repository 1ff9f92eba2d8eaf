"""Training and evaluation of a `SparseEmbedder`: contrastive learning with SPLADE's FLOPS regularizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.splade import Splade
from bertie.errors import NotFoundError
from bertie.pipeline.inputs import TaskInput
from bertie.text.windows import Window
from bertie.training.embedding.embedder import Comparison, EmbeddingTraining
from bertie.training.embedding.losses import SpladeLoss
from bertie.training.embedding.objective import EmbeddingObjective, make_row
from bertie.training.embedding.similarity_functions import DotProduct
from bertie.training.finetune.base import pieces
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import TrainingExample
from bertie.training.sampling import BatchSampler


class SparseTraining(EmbeddingTraining):
    """The encoder and its masked-language-modelling head, trained together."""

    def prepare(self, checkpoint: Checkpoint, data: LabelledDataset) -> Checkpoint:
        """The encoder with the masked-language-modelling head, and no other."""
        if "mlm" not in checkpoint.spec.heads:
            raise NotFoundError(
                f"{checkpoint.source} has no masked-language-modelling head, which sparse embeddings come from"
            )
        splade = checkpoint.splade or Splade.create(checkpoint.max_length)
        return replace(checkpoint.with_head("mlm"), splade=splade)

    def plan(self, data: LabelledDataset) -> BatchSampler:
        """Sample rows of texts; with in-batch negatives, no text occurs twice in a step."""
        objective = self.objective(data)
        objective.attach(self.task.model, None)
        return self.sample(objective, data, head="mlm")

    def objective(self, data: LabelledDataset) -> EmbeddingObjective:
        """The requested loss, or the default for this kind of data, over dot products, plus the regularizer.

        A `SpladeLoss` is used unchanged.
        """
        loss = self.loss(data, DotProduct())
        if not isinstance(loss, SpladeLoss):
            loss = SpladeLoss(loss, self.task.query_regularizer, self.task.document_regularizer)
        return EmbeddingObjective(loss, "sparse")

    def items(self, data: LabelledDataset) -> Iterator[TrainingExample]:
        """Tokenize rows of texts as `embed` does."""
        task = self.task
        prompt = task.prompt_text()
        inputs = (
            TaskInput(f"{data.name}, row {example.row}", (task.prepare_text(prompt + text),), None)
            for example in data.examples
            for text in example.texts
        )
        texts = task.pipeline.read(inputs)
        for example in data.examples:
            windows = [text.windows for text in islice(texts, len(example.texts))]
            yield make_row([pieces(group) for group in windows], self.target(example))

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """A row of one text."""
        return make_row([pieces(windows)], self.target(example))

    def comparison(self, texts: list[str], rows: Sequence[Sequence[int]]) -> tuple[Sequence[Any], Comparison]:
        """Dot products."""
        results = list(self.task.embed_each(texts))

        def compare(a: Sequence[int], b: Sequence[int]) -> Any:
            first, second = (self.task.matrix([results[i] for i in index]) for index in (a, b))
            return first.dot(second)

        return results, compare
