"""Training and evaluation of a `LateInteraction` model: contrastive learning and distillation over MaxSim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError
from bertie.tasks.late_interaction import TokenVectorEncoder, maxsim
from bertie.text.windows import Window
from bertie.training.embedding.embedder import Comparison, EmbeddingTraining, bare_encoder
from bertie.training.embedding.losses import EmbeddingLoss
from bertie.training.embedding.objective import EmbeddingObjective, make_row
from bertie.training.embedding.similarity_functions import MaxSim
from bertie.training.finetune.base import pieces
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.objectives import MicroBatch, TrainingExample, TrainingWindow
from bertie.training.sampling import BatchSampler

if TYPE_CHECKING:
    from bertie.checkpoints.late_interaction import LateInteractionModules
    from bertie.nn.model import Model

# Roles of the tokens of a training window: read only, also compared, or appended to a query.
READ, COMPARED, APPENDED = 0, 1, 2


class LateInteractionObjective(EmbeddingObjective):
    """A loss over the token embeddings of queries, which may be expanded, and of documents."""

    def __init__(self, loss: EmbeddingLoss, *, attend_to_expansion: bool = False) -> None:
        super().__init__(loss, "tokens")
        self.attend_to_expansion = attend_to_expansion

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate the texts row by row; `values` of a window hold the role of each token."""
        windows = [window for item in items for window in item.windows]
        roles = [cast("np.ndarray[Any, Any]", window.values) for window in windows]
        bare = [replace(item, windows=tuple(replace(w, values=None) for w in item.windows)) for item in items]
        mini = super().collate(bare)
        lengths = [int((role != APPENDED).sum()) for role in roles]
        batch = mini.batch
        if not self.attend_to_expansion and tuple(lengths) != batch.lengths:
            batch = batch.with_key_lengths(lengths)
        kept = torch.from_numpy(np.concatenate(roles) != READ)
        return replace(mini, batch=batch, extras={"kept": kept})

    def embed(self, model: Model, mini: MicroBatch, head: str) -> Tensor:
        """(R, dimension) embeddings of the tokens that are compared."""
        modules = cast("LateInteractionModules", model.auxiliary["sentence"])
        hidden = model.hidden(mini.batch)
        with torch.autocast(hidden.device.type, enabled=False):
            out: Tensor = modules(hidden.float()[cast(Tensor, mini.extras["kept"])])
            return out

    def token_counts(self, mini: MicroBatch) -> Tensor:
        """(N,) number of tokens of each text that are compared."""
        kept = torch.split(cast(Tensor, mini.extras["kept"]).cpu(), list(mini.batch.lengths))
        counts = torch.tensor([int(part.sum()) for part in kept])
        sizes = torch.zeros(mini.targets.weights.numel(), dtype=torch.int64)
        return sizes.index_add(0, mini.targets.owner.cpu(), counts)


class LateInteractionTraining(EmbeddingTraining):
    """The encoder and the projection of its token embeddings. The first text of a row is the query."""

    def check_data(
        self, train: LabelledDataset, dev: LabelledDataset | None, test: LabelledDataset | None = None
    ) -> None:
        """MaxSim orders documents; its values are not comparable to scores or classes of pairs."""
        if train.inputs not in ("pairs", "lists"):
            raise InputError(
                f"{train.name} has {train.inputs}; late interaction is trained on matching texts, with or without "
                "negatives (query, positive, negative), or on passages with a teacher's scores"
            )
        super().check_data(train, dev, test)

    def prepare(self, checkpoint: Checkpoint, data: LabelledDataset) -> Checkpoint:
        """The encoder with its projection, or a new one."""
        return replace(bare_encoder(checkpoint), late_interaction=self.task.modules_for(checkpoint))

    def plan(self, data: LabelledDataset) -> BatchSampler:
        """Sample rows of texts; with in-batch negatives, no text occurs twice in a step."""
        objective = self.objective(data)
        objective.attach(self.task.model, self.task.checkpoint.late_interaction)
        return self.sample(objective, data)

    def objective(self, data: LabelledDataset) -> EmbeddingObjective:
        """The requested loss, or the default for this kind of data, over MaxSim."""
        loss = self.loss(data, MaxSim())
        attend = self.task.settings.attend_to_expansion
        return LateInteractionObjective(loss, attend_to_expansion=attend)

    def items(self, data: LabelledDataset) -> Iterator[TrainingExample]:
        """Tokenize rows of texts: the first as a query, the others as documents."""
        task = self.task
        queries = task.queries
        firsts = queries.pipeline.read(_inputs(queries, data, slice(0, 1)))
        others = task.pipeline.read(_inputs(task, data, slice(1, None)))
        for example in data.examples:
            query = self._query_pieces(next(firsts).windows)
            documents = [text.windows for text in islice(others, len(example.texts) - 1)]
            yield make_row([query, *map(self._document_pieces, documents)], self.target(example))

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """A row of one document."""
        return make_row([self._document_pieces(windows)], self.target(example))

    def _document_pieces(self, windows: Sequence[Window]) -> list[TrainingWindow]:
        skipped = self.task.skiplist_ids
        roles = [(window.owned & ~np.isin(window.encoding.ids, skipped)).astype(np.int8) for window in windows]
        return [replace(piece, values=role) for piece, role in zip(pieces(windows), roles, strict=True)]

    def _query_pieces(self, windows: Sequence[Window]) -> list[TrainingWindow]:
        task, found = self.task, list[TrainingWindow]()
        length = task.settings.query_length if task.settings.query_expansion else 0
        for window, piece in zip(windows, pieces(windows), strict=True):
            added = max(0, length - len(window))
            role = np.concatenate([np.where(window.owned, COMPARED, READ), np.full(added, APPENDED)]).astype(np.int8)
            ids = np.concatenate([piece.ids, np.full(added, task.queries.expansion_id if added else 0)])
            segments = np.concatenate([piece.segments, np.zeros(added, np.int64)])
            found.append(replace(piece, ids=ids, segments=segments, values=role))
        return found

    def comparison(self, texts: list[str], rows: Sequence[Sequence[int]]) -> tuple[Sequence[Any], Comparison]:
        """MaxSim of queries and documents."""
        firsts = sorted({row[0] for row in rows})
        others = sorted({i for row in rows for i in row[1:]})
        queries = dict(zip(firsts, self.task.embed_queries_each([texts[i] for i in firsts]), strict=True))
        documents = dict(zip(others, self.task.embed_documents_each([texts[i] for i in others]), strict=True))
        results = [documents[i] if i in documents else queries[i] for i in range(len(texts))]

        def compare(a: Sequence[int], b: Sequence[int]) -> Any:
            table = [[maxsim(queries[i].vectors, documents[j].vectors) for j in b] for i in a]
            return np.array(table, dtype=np.float32)

        return results, compare


def _inputs(encoder: TokenVectorEncoder, data: LabelledDataset, part: slice) -> Iterator[Any]:
    """The texts of the rows as an encoder reads them, named for error messages."""
    named = [(example.row, text) for example in data.examples for text in example.texts[part]]
    inputs = encoder.inputs([text for _, text in named])
    return (i._replace(name=f"{data.name}, row {row}") for i, (row, _) in zip(inputs, named, strict=True))
