"""The table of tasks: one row per task, used by the command line, the server, `load`, `MultiTask` and the reports.

Classes are given by dotted path and imported on use, so that reading the table does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bertie.config import HeadName
from bertie.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from bertie.config import HeadInfo
    from bertie.tasks.base import Task
    from bertie.tasks.trainable import Trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """All that the rest of the library needs to know about a task."""

    name: str  # in recipes, reports and metrics
    path: str  # of its class, as "module:name"
    head_kind: HeadName | None  # None: the task needs no head
    data_kind: str | None = None  # format of labelled data (`bertie.training.finetune.data`); None: not trainable
    metric: str | None = None  # the main metric, which is maximized: it selects the best epoch
    endpoint: str | None = None  # of the server
    verb: str | None = None  # of the command line
    training: str | None = None  # path of the `TaskTraining` that trains and evaluates it
    single_text: bool = False  # whether it reads single texts, and so can share a forward pass with other heads
    own_folder: bool = False  # whether its head has a special folder layout, and cannot be one of several

    @property
    def task_class(self) -> type[Task[Any, Any, Any]]:
        """The task's class."""
        task: type[Task[Any, Any, Any]] = resolve(self.path)
        return task

    @property
    def trainable_class(self) -> type[Trainable[Any, Any, Any]]:
        """The class of a task that can be trained."""
        from bertie.tasks.trainable import Trainable

        task = self.task_class
        if not issubclass(task, Trainable):
            raise ConfigError(f"task={self.name!r} must be one of {', '.join(trainable())}")
        return task


TASKS: dict[str, TaskRow] = {}


def register(row: TaskRow) -> None:
    """Add a task."""
    if row.name in TASKS:
        raise ConfigError(f"name={row.name!r}: a task with this name already exists")
    TASKS[row.name] = row


for _row in (
    TaskRow(
        name="classify",
        path="bertie.tasks.classify:Classifier",
        head_kind="classify",
        data_kind="classify",
        metric="accuracy",
        endpoint="/classify",
        verb="classify",
        training="bertie.training.finetune.classification:ClassificationTraining",
        single_text=True,
    ),
    TaskRow(
        name="regress",
        path="bertie.tasks.classify:Regressor",
        head_kind="classify",
        data_kind="regress",
        metric="spearman",
        training="bertie.training.finetune.classification:RegressionTraining",
        single_text=True,
    ),
    TaskRow(
        name="tag",
        path="bertie.tasks.tag:Tagger",
        head_kind="tag",
        data_kind="tag",
        metric="f1",
        endpoint="/tag",
        verb="tag",
        training="bertie.training.finetune.tagging:TaggingTraining",
        single_text=True,
    ),
    TaskRow(
        name="answer",
        path="bertie.tasks.answer:Reader",
        head_kind="answer",
        data_kind="answer",
        metric="f1",
        endpoint="/answer",
        verb="answer",
        training="bertie.training.finetune.question_answering:QuestionAnsweringTraining",
    ),
    TaskRow(
        name="rerank",
        path="bertie.tasks.rerank:Reranker",
        head_kind="classify",
        data_kind="rerank",
        metric="map",
        endpoint="/rerank",
        verb="rerank",
        training="bertie.training.finetune.reranking:RerankingTraining",
    ),
    TaskRow(
        name="embed",
        path="bertie.tasks.embed:Embedder",
        head_kind=None,
        data_kind="embed",
        metric="spearman",
        endpoint="/embed",
        verb="embed",
        training="bertie.training.embedding.embedder:EmbeddingTraining",
    ),
    TaskRow(
        name="zero-shot-tag",
        path="bertie.tasks.zero_shot_tag:ZeroShotTagger",
        head_kind="span",
        data_kind="tag",
        metric="f1",
        training="bertie.training.finetune.zero_shot_tagging:ZeroShotTaggingTraining",
        own_folder=True,
    ),
    TaskRow(
        name="sparse",
        path="bertie.tasks.sparse:SparseEmbedder",
        head_kind=None,  # it uses the masked-language-modelling head
        data_kind="embed",
        metric="spearman",
        endpoint="/embed_sparse",
        verb="embed",
        training="bertie.training.embedding.sparse:SparseTraining",
    ),
    TaskRow(
        name="late-interaction",
        path="bertie.tasks.late_interaction:LateInteraction",
        head_kind=None,
        data_kind="embed",
        metric="spearman",
        verb="rerank",
        training="bertie.training.embedding.late_interaction:LateInteractionTraining",
    ),
    TaskRow(
        name="fill",
        path="bertie.tasks.fill_mask:MaskedLM",
        head_kind="mlm",
        endpoint="/fill",
        verb="fill",
    ),
    TaskRow(
        name="choose",
        path="bertie.tasks.choose:Chooser",
        head_kind="choice",
        data_kind="choose",
        metric="accuracy",
        endpoint="/choose",
        verb="choose",
        training="bertie.training.finetune.multiple_choice:MultipleChoiceTraining",
    ),
    TaskRow(
        name="detect_replaced",
        path="bertie.tasks.replaced_tokens:ReplacedTokenDetector",
        head_kind="rtd",
        endpoint="/detect_replaced",
        verb="detect-replaced",
    ),
):
    register(_row)


def resolve(path: str) -> Any:
    """The object behind "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def get(name: str | None) -> TaskRow:
    """The row of a task that can be trained."""
    row = TASKS.get(name or "")
    if row is None or row.training is None:
        raise ConfigError(f"task={name!r} must be one of {', '.join(trainable())}")
    return row


def trainable(*, with_head: bool = False) -> tuple[str, ...]:
    """The names of all tasks that can be trained, or of those among them whose head can be one of several."""
    return tuple(
        row.name
        for row in TASKS.values()
        if row.training is not None and not (with_head and (row.head_kind is None or row.own_folder))
    )


def row_of(task: Task[Any, Any, Any]) -> TaskRow:
    """The row of a task object."""
    return row_of_class(type(task))


def row_of_class(task: type) -> TaskRow:
    """The row of a task's class, or of a class it derives from."""
    paths = {row.path: row for row in TASKS.values()}
    for kind in task.__mro__:
        if (row := paths.get(f"{kind.__module__}:{kind.__qualname__}")) is not None:
            return row
    raise NotFoundError(f"{task.__name__} is not in the table of tasks (bertie.tasks.registry)")


def row_for_head(info: HeadInfo) -> TaskRow | None:
    """The task that a head was trained for; None: not one that can be trained.

    >>> from bertie.config import HeadInfo
    >>> row_for_head(HeadInfo("tag")).name
    'tag'
    """
    name = info.task
    if name is None:
        name = "regress" if info.kind == "classify" and info.problem == "regression" else info.kind
    row = TASKS.get(name)
    if row is None and info.task is None:
        row = next((row for row in TASKS.values() if row.head_kind == info.kind), None)
    return row if row is not None and row.training is not None and row.head_kind is not None else None
