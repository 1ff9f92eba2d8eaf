"""A toy task, added by the list in CONTRIBUTING.md: a class, its training adapter, and a row in the registry."""

from __future__ import annotations

from collections.abc import Iterable

from bertie.config import HeadInfo
from bertie.tasks.classify import Regressor, Text  # type: ignore[attr-defined]
from bertie.tasks.registry import TaskRow
from bertie.training.finetune.classification import RegressionTraining
from bertie.training.finetune.data import LabelledDataset


class Rater(Regressor):
    """Rates texts with whole stars."""

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        return info.kind == "classify" and len(info.labels) == 1 and info.task in (None, "rate")

    def rate(self, texts: Iterable[Text]) -> list[int]:
        """The stars of each text."""
        return [round(float(value)) for value in self.predict(texts)]


class RatingTraining(RegressionTraining):
    """Trains a `Rater` as a regression."""

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        return HeadInfo("classify", {0: "stars"}, "regression", task="rate")


ROW = TaskRow(
    name="rate",
    path="tests.tasks.toy_task:Rater",
    head_kind="classify",
    data_kind="regress",
    metric="pearson",
    endpoint="/rate",
    verb="rate",
    training="tests.tasks.toy_task:RatingTraining",
    single_text=True,
)
