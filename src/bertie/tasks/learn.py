"""What tasks that can be trained share: `fit` and what goes with it, after scikit-learn's fashion.

Hyperparameters (`bertie.training.recipe.Recipe`) go into the constructor, data into `fit`, which begins anew from the
checkpoint that was given and returns the fitted object. Long texts are trained on as they are read: in windows, with
the answer at the whole.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import ConfigError, InputError
from bertie.evaluation import scores
from bertie.evaluation.scores import Score
from bertie.nn.linear import precision_of
from bertie.tasks.base import ITEMS_AT_ONCE, OVERFLOW, Options, Output, Overflow, Result, Task, TaskInput
from bertie.text.windows import Window
from bertie.training.finetune.data import Example, Kind, Labelled, fingerprint, labelled, split
from bertie.training.recipe import Recipe

if TYPE_CHECKING:
    from bertie.training.distributed import Strategy
    from bertie.training.loop import TrainingHistory
    from bertie.training.objectives import Objective, TrainingExample, TrainingWindow
    from bertie.training.sampling import BatchSampler, TrainingTask


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says of labelled data, beside what is true."""

    kind: str  # a key of `bertie.evaluation.scores.MAIN`
    data: Labelled
    gold: Sequence[Any]
    predicted: Sequence[Any]
    probabilities: NDArray[np.float32] | None  # (n, labels) of a classifier
    confidence: NDArray[np.float32] | None  # (n,) how sure it is of what it predicted
    lengths: NDArray[np.int64]  # (n,) tokens of each text
    read: NDArray[np.int64]  # (n,) of them that were read
    windows: NDArray[np.int64]  # (n,)


class Learner(Task[Options, Output, Result]):
    """A task that can be trained."""

    data_kind: ClassVar[Kind]

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        *,
        overflow: Overflow = "window",
        head: str | None = None,
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        if overflow not in OVERFLOW:
            raise InputError(f"overflow={overflow!r} must be one of {', '.join(OVERFLOW)}")
        self.overflow = overflow
        self.recipe = Recipe.from_mapping(training)
        if self.data_kind != "embed":
            for name in ("loss", "matryoshka", "pooling"):
                if (value := getattr(self.recipe, name)) is not None:
                    raise ConfigError(f"{name}={value!r} is for training an Embedder; leave it out")
        self._given, self._asked, self._device, self._training = checkpoint, head, device, training
        if isinstance(checkpoint, Checkpoint):
            self._use(checkpoint, head)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        """Put a checkpoint to use. One without the head waits for `fit`."""
        if head is None and not any(self._fits(info) for info in checkpoint.heads.values()):
            self._bare = checkpoint
            return
        super()._use(checkpoint, head)

    def __getattr__(self, name: str) -> Any:
        """A checkpoint given by name is loaded when it is first needed."""
        if name not in ("checkpoint", "model", "tokenizer", "head"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        bare = self.__dict__.get("_bare")
        if bare is None:
            if "_given" not in self.__dict__:  # it is being copied or unpickled
                raise AttributeError(name)
            bare = self._start()
        Task._use(self, bare, self._asked)  # names the head that is missing
        return self.__dict__[name]

    @classmethod
    def load(
        cls, name: str | Path | None = None, *, overflow: Overflow = "window", head: str | None = None, **options: Any
    ) -> Self:
        """Load a trained checkpoint, the built-in model if none is named.

        `options` are those of `Checkpoint.load`, and hyperparameters for `fit`.
        """
        known = Recipe().as_dict()
        training = {key: options.pop(key) for key in list(options) if key in known}
        checkpoint, head = cls._loaded(name, head, options)
        task = cls(checkpoint, overflow=overflow, head=head, **training)
        _ = task.model  # a missing head is an error now, not at the first text
        return task

    # --- scikit-learn ---

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments, as scikit-learn wants them."""
        base = {"checkpoint": self._given, "overflow": self.overflow, "head": self._asked, "device": self._device}
        return base | Recipe().as_dict() | self._training

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; what was fitted is forgotten."""
        given = {**self.get_params(), **params}
        self.__dict__.clear()
        type(self).__init__(self, given.pop("checkpoint"), **given)
        return self

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks of an estimator."""
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        kind = {"classify": "classifier", "regress": "regressor"}.get(self.data_kind)
        return Tags(
            estimator_type=kind,
            target_tags=TargetTags(required=self.data_kind != "embed"),
            classifier_tags=ClassifierTags() if kind == "classifier" else None,
            regressor_tags=RegressorTags() if kind == "regressor" else None,
        )

    def __sklearn_is_fitted__(self) -> bool:
        return "model" in self.__dict__

    # --- what a task says of its training ---

    @abstractmethod
    def head_for(self, data: Labelled) -> HeadInfo:
        """The head that this data needs."""

    @abstractmethod
    def objective(self, data: Labelled) -> Objective:
        """What is made smaller."""

    @abstractmethod
    def item(self, example: Example, found: Sequence[Window]) -> TrainingExample:
        """What a step reads of an example, and what is wanted of it."""

    @abstractmethod
    def predict_labelled(self, data: Labelled) -> Predictions:
        """Predict labelled data."""

    @abstractmethod
    def scores(self, predictions: Predictions, draws: int = 1000) -> dict[str, Score]:
        """Every metric with its interval; `draws=0`: values alone."""

    def check_scorable(self, dev: Labelled) -> None:
        """Fail before a training, not after it, where the scores of its dev data need a package that is not there."""

    def calibrate(self, dev: Labelled) -> None:
        """Fit what is read into the scores, on data that the weights were not fitted to."""

    # --- fit ---

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        dev: Any = None,
        columns: Mapping[str, str] | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        save_steps: int | None = None,
        strategy: Strategy = "ddp",
        quiet: bool = False,
    ) -> Self:
        """Train from the checkpoint that was given, on texts and labels or on a table or file of both.

        `dev`: a table, a file or a pair (X, y), on which the best epoch is chosen and probabilities are calibrated.
        `columns`: the names of columns, where they are not the usual ones. `folder`: where the run keeps its state, so
        that a run that was stopped can go on with `resume`; every `save_steps` steps, or at each evaluation and every
        few minutes. `strategy`: how `torchrun` distributes a model, "ddp" or "fsdp".
        """
        data = labelled(self.data_kind, X, y, columns=columns)
        if dev is None and self.recipe.dev_share:
            data, held = split(data, self.recipe.dev_share, self.recipe.seed)
        elif dev is None:
            held = None
        else:
            on_dev = dev if isinstance(dev, tuple) and len(dev) == 2 else (dev, None)
            known = data.labels or None
            held = labelled(self.data_kind, *on_dev, columns=columns, name="the dev data", known=known, training=False)
        return self.fit_labelled(
            data, held, folder=folder, resume=resume, save_steps=save_steps, strategy=strategy, quiet=quiet
        )

    def fit_labelled(
        self,
        data: Labelled,
        dev: Labelled | None = None,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        save_steps: int | None = None,
        strategy: Strategy = "ddp",
        quiet: bool = False,
    ) -> Self:
        """As `fit`, on data that was read already."""
        from bertie.training.loop import Trainer

        if self._asked is not None:
            raise ConfigError(
                f"head={self._asked!r}: fit() makes a checkpoint with one head; several over one encoder are trained "
                "together by bertie.Heads"
            )
        for text in self.recipe.warnings():
            warnings.warn(text, stacklevel=3)
        if dev is not None:
            self.check_scorable(dev)
        base = self._start()
        if base.tokenizer is None:
            raise InputError(f"{base.source} has no tokenizer, and reading texts needs one")
        if (precision := precision_of(base.model.encoder)) in ("int8", "fp8"):
            raise InputError(
                f"{base.source} was loaded with precision={precision!r}, for inference; load it with precision='fp32' to "
                "train it"
            )
        checkpoint = self._ready(base, data)
        if self.recipe.max_length is not None:
            checkpoint = checkpoint.with_max_length(self.recipe.max_length)
        self._use(checkpoint, None)
        trainer = Trainer(
            self.model,
            self._plan(data),
            self.recipe,
            evaluate=None if dev is None else lambda: self.quick(dev),
            metric=self.recipe.metric or main_metric(data if dev is None else dev),
            folder=None if folder is None else Path(folder),
            resume=resume,
            save_steps=save_steps,
            fingerprint=self._fingerprint(data, dev),
            strategy=strategy,
            quiet=quiet,
        )
        self.history_: TrainingHistory = trainer.run()
        self.original_ = data.original
        if dev is not None:
            self.calibrate(dev)
        return self

    def _ready(self, checkpoint: Checkpoint, data: Labelled) -> Checkpoint:
        """The checkpoint as it begins to train."""
        return self._headed(checkpoint, self.head_for(data))

    def _plan(self, data: Labelled) -> Sequence[TrainingTask] | BatchSampler:
        """What the steps read."""
        from bertie.training.sampling import TrainingTask

        return [TrainingTask(str(self.head), self.objective(data), list(self.items(data)))]

    def _headed(self, checkpoint: Checkpoint, info: HeadInfo) -> Checkpoint:
        """The checkpoint under such a head, and no other."""
        labels = list(info.labels.values()) or None
        return checkpoint.with_head(info.kind, labels, problem=info.problem, seed=self.recipe.seed)

    def quick(self, data: Labelled) -> dict[str, float]:
        """The values of all metrics, without intervals."""
        return {name: score.value for name, score in self.scores(self.predict_labelled(data), draws=0).items()}

    def score(self, X: Any, y: Any = None, *, columns: Mapping[str, str] | None = None) -> float:
        """The main metric on labelled data, as scikit-learn calls it."""
        known = tuple(self.info.labels.values()) if self.data_kind in ("classify", "tag") else None
        data = labelled(self.data_kind, X, y, columns=columns, name="the data", known=known, training=False)
        return self.quick(data)[main_metric(data)]

    def _start(self) -> Checkpoint:
        """The checkpoint to begin from, untouched by any earlier `fit`."""
        return start(self._given, self._device)

    def _fingerprint(self, *data: Labelled | None) -> str:
        return run_fingerprint(self.checkpoint, self.recipe, self.overflow, [one for one in data if one is not None])

    def items(self, data: Labelled) -> Iterator[TrainingExample]:
        """Examples, tokenized."""
        for start in range(0, len(data.examples), ITEMS_AT_ONCE):
            chunk = data.examples[start : start + ITEMS_AT_ONCE]
            texts = [self._texts(example) for example in chunk]
            encoded = self.tokenizer.encode_batch([(t[0], t[1]) if len(t) == 2 else t[0] for t in texts])
            for example, its, encoding in zip(chunk, texts, encoded, strict=True):
                ask: TaskInput[Any] = TaskInput(f"{data.name}, row {example.row}", its, None)
                yield self.item(example, self.windows(ask, encoding))

    def _texts(self, example: Example) -> tuple[str, ...]:
        """The texts as the model reads them."""
        return example.texts


def start(given: Checkpoint | str | Path, device: str | torch.device | None) -> Checkpoint:
    """A checkpoint to train, of its own: a copy of one, or loaded; on the GPU of this process, if there is one."""
    from bertie.training.distributed import local_device

    place = local_device(torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    if not isinstance(given, Checkpoint):
        return Checkpoint.load(given, device=place)
    checkpoint = deepcopy(given)
    if device is not None:
        checkpoint.model.to(place)
    return checkpoint


def run_fingerprint(checkpoint: Checkpoint, recipe: Recipe, overflow: str, data: Sequence[Labelled]) -> str:
    """Of all that a run depends on."""
    found = hashlib.sha256()
    for name, parameter in checkpoint.model.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().sum(dtype=torch.float64).cpu().numpy().tobytes())
    for value in (recipe.as_dict(), checkpoint.config, overflow, [fingerprint(one) for one in data]):
        found.update(json.dumps(value, sort_keys=True, default=str).encode())
    return found.hexdigest()


def main_metric(data: Labelled) -> str:
    """The metric that stands for a task; for plain tags, which form no spans, their accuracy."""
    if data.kind == "embed":
        return scores.MAIN["find" if data.inputs == "pairs" else "alike"]
    if data.kind == "tag" and not scores.spans_in([data.labels]):
        return "accuracy"
    return scores.MAIN["multi" if data.multi else data.kind]


def pieces(found: Sequence[Window]) -> tuple[TrainingWindow, ...]:
    """Windows as training reads them, with their shares of the whole."""
    from bertie.training.objectives import TrainingWindow

    total = sum(window.weight for window in found)
    return tuple(TrainingWindow(w.encoding.ids, w.encoding.segments, w.weight / total) for w in found)


def class_weights(recipe: Recipe, data: Labelled, counts: Mapping[str, int]) -> dict[str, float]:
    """How much each label counts: alike, as the recipe says, or rare ones more so that all weigh the same."""
    wanted = recipe.class_weights
    if wanted is None:
        return dict.fromkeys(data.labels, 1.0)
    if wanted == "balanced":
        total = sum(counts.values())
        return {label: total / (len(data.labels) * max(1, counts.get(label, 0))) for label in data.labels}
    unknown = sorted(set(wanted) - set(data.labels))
    if unknown:
        raise ConfigError(f"class_weights names {', '.join(unknown)}; the labels are {', '.join(data.labels[:20])}")
    return {label: float(wanted.get(label, 1.0)) for label in data.labels}


def given_back(labels: Sequence[str], original: Mapping[str, Any]) -> NDArray[Any]:
    """Labels as they were given to `fit`: numbers for numbers."""
    back = [original.get(label, label) for label in labels]
    try:
        return np.array(back)
    except ValueError:  # of several types
        return np.array(back, dtype=object)


def counted(found: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """How much of each text was read: tokens in all, tokens read, windows."""
    total, read, windows = (
        np.array([getattr(one, name) for one in found], dtype=np.int64)
        for name in ("tokens_total", "tokens_read", "windows")
    )
    return total, read, windows
