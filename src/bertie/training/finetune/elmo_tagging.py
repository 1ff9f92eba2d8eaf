"""Training and evaluation of a tagger over ELMo: the mix of its layers and the tagging layer.

ELMo's vectors do not change in training. They are computed once and kept, in memory or, where they are larger than
MEMORY_BYTES, in a temporary file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from bertie.data.progress import Progress
from bertie.errors import TrainingError
from bertie.evaluation import metrics
from bertie.evaluation.metrics import Score
from bertie.nn.elmo import LayerMixTagger
from bertie.pipeline.reporting import show_progress
from bertie.recipe import Recipe
from bertie.tasks.elmo import CHUNK_WORDS, Elmo
from bertie.tasks.elmo_tag import ElmoHead, ElmoTagger
from bertie.training.callbacks import TrainingHistory
from bertie.training.finetune.data import LabelledDataset, read_dataset
from bertie.training.schedule import Schedule

MEMORY_BYTES = 2**31
WARMUP = 0.1  # of the steps
MAX_GRAD_NORM = 1.0


def fit(tagger: ElmoTagger, X: Any, y: Any, *, dev: Any, columns: Mapping[str, str] | None, progress: bool) -> None:
    """Train a tagger, as `ElmoTagger.fit` documents."""
    data = read_dataset("tag", X, y, columns=columns)
    held_out = None
    if dev is not None:
        dev_X, dev_y = dev if isinstance(dev, tuple) and len(dev) == 2 else (dev, None)
        held_out = read_dataset(
            "tag", dev_X, dev_y, columns=columns, name="the dev data", known=data.labels, training=False
        )
        _check_metrics(held_out)
    started = time.monotonic()
    with show_progress("read", len(data.examples) + len(held_out.examples if held_out else ()), progress, "sentences"):
        train = Features.compute(tagger.elmo, data)
        rest = None if held_out is None else Features.compute(tagger.elmo, held_out)
    run = _Run(tagger, data, train, held_out, rest)
    head = run.train(progress)
    run.history.seconds = time.monotonic() - started
    tagger.head_, tagger.history_ = ElmoHead(data.labels, head), run.history


def score(tagger: ElmoTagger, X: Any, y: Any, *, columns: Mapping[str, str] | None) -> float:
    """The main metric on labelled data."""
    data, predicted = _predict(tagger, X, y, columns)
    gold = [list(example.target) for example in data.examples]
    return metrics.tagging(gold, predicted, resamples=0)[_main_metric(data)].value


def evaluate(tagger: ElmoTagger, X: Any, y: Any, *, columns: Mapping[str, str] | None) -> dict[str, Score]:
    """Every metric on labelled data, with its interval."""
    data, predicted = _predict(tagger, X, y, columns)
    return metrics.tagging([list(example.target) for example in data.examples], predicted)


def _predict(
    tagger: ElmoTagger, X: Any, y: Any, columns: Mapping[str, str] | None
) -> tuple[LabelledDataset, list[list[str]]]:
    data = read_dataset("tag", X, y, columns=columns, name="the data", known=tagger.labels, training=False)
    _check_metrics(data)
    return data, tagger.predict(_words(data))


def _words(data: LabelledDataset) -> list[list[str]]:
    return [[example.texts[0][start:end] for start, end in example.words] for example in data.examples]


def _main_metric(data: LabelledDataset) -> str:
    return "f1" if metrics.is_span_scheme([data.labels]) else "accuracy"


def _check_metrics(data: LabelledDataset) -> None:
    """Entities are counted by seqeval: raise now if it is missing."""
    if metrics.is_span_scheme([data.labels]):
        metrics.entities([])


@dataclass(frozen=True, slots=True)
class Features:
    """ELMo's layers of all words of a dataset."""

    rows: NDArray[np.float32]  # (words, layers, D)
    starts: NDArray[np.int64]  # (sentences + 1,)

    @classmethod
    def compute(cls, elmo: Elmo, data: LabelledDataset) -> Features:
        """Read all sentences once."""
        sentences = _words(data)
        starts = np.cumsum([0, *map(len, sentences)])
        rows = _allocate((int(starts[-1]), elmo.config.layers + 1, elmo.dimension))
        first = 0
        while first < len(sentences):
            last = max(first + 1, int(np.searchsorted(starts, starts[first] + CHUNK_WORDS, side="right")) - 1)
            for i, layers in enumerate(elmo.layers(sentences[first:last]), first):
                rows[starts[i] : starts[i + 1]] = layers.transpose(1, 0, 2)
            first = last
        return cls(rows, starts)

    def batch(self, sentences: Sequence[int], device: torch.device) -> tuple[torch.Tensor, list[int]]:
        """(layers, T, D) of some sentences, and their lengths."""
        parts = [self.rows[self.starts[i] : self.starts[i + 1]] for i in sentences]
        rows = torch.from_numpy(np.concatenate(parts)).to(device)
        return rows.transpose(0, 1), [len(part) for part in parts]


def _allocate(shape: tuple[int, int, int]) -> NDArray[np.float32]:
    if np.prod(shape) * 4 <= MEMORY_BYTES:
        return np.empty(shape, np.float32)
    file = tempfile.TemporaryFile()  # noqa: SIM115 (deleted together with the array)
    return np.memmap(file, np.float32, "w+", shape=shape)


class _Run:
    """One `fit`."""

    def __init__(
        self,
        tagger: ElmoTagger,
        data: LabelledDataset,
        train: Features,
        dev: LabelledDataset | None,
        dev_features: Features | None,
    ) -> None:
        self.tagger, self.data, self.features, self.dev, self.dev_features = tagger, data, train, dev, dev_features
        self.settings, self.device = tagger.get_params(), tagger.elmo.device
        self.history = TrainingHistory()
        index = {label: i for i, label in enumerate(data.labels)}
        self.targets = [torch.tensor([index[tag] for tag in example.target]) for example in data.examples]

    def train(self, progress: bool) -> LayerMixTagger:
        """The trained layers: the best on the dev data, or the last."""
        count, size, epochs = len(self.targets), int(self.settings["batch_size"]), int(self.settings["epochs"])
        seed, self._steps = int(self.settings["seed"]), epochs * -(-count // size)
        schedule = Schedule(Recipe(warmup=WARMUP, schedule="linear"), self._steps)
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            Progress("train", self._done, unit="sentences", show=progress) as bar,
        ):
            torch.manual_seed(seed)
            head = self.tagger.new_head(len(self.data.labels)).to(self.device)
            optimizer = torch.optim.AdamW(_groups(head), lr=float(self.settings["lr"]))
            best = None
            for epoch in range(epochs):
                order = np.random.default_rng((seed, epoch)).permutation(count)
                for first in range(0, count, size):
                    sentences = order[first : first + size].tolist()
                    loss = self._step(head, optimizer, schedule, sentences)
                    bar.update(len(sentences), f"loss {loss:.3f}")
                if self.dev is not None and self._is_best(head, epoch):
                    best = deepcopy(head.state_dict())
                if self._out_of_patience():
                    self.history.stopped_early = True
                    break
        if best is not None:
            head.load_state_dict(best)
        return head.eval().requires_grad_(False)

    def _done(self) -> float | None:
        return self.history.steps / self._steps

    def _step(
        self, head: LayerMixTagger, optimizer: torch.optim.Optimizer, schedule: Schedule, sentences: Sequence[int]
    ) -> float:
        head.train()
        layers, lengths = self.features.batch(sentences, self.device)
        targets = torch.cat([self.targets[i] for i in sentences]).to(self.device)
        for group in optimizer.param_groups:
            group["lr"] = float(self.settings["lr"]) * schedule.factor(self.history.steps)
        loss = F.cross_entropy(head(layers, lengths), targets)
        value = float(loss.detach())
        if not np.isfinite(value):
            raise TrainingError(f"the loss is {value} at step {self.history.steps + 1}; pass a smaller lr=")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        self.history.steps += 1
        self.history.tokens += len(targets)
        self.history.curve.append({"step": self.history.steps, "loss": value, "lr": optimizer.param_groups[0]["lr"]})
        return value

    @torch.inference_mode()
    def _is_best(self, head: LayerMixTagger, epoch: int) -> bool:
        """Evaluate, and say whether the score is the best so far."""
        assert self.dev is not None
        assert self.dev_features is not None
        head.eval()
        predicted: list[list[str]] = []
        for sentence in range(len(self.dev.examples)):
            layers, lengths = self.dev_features.batch([sentence], self.device)
            predicted.append([self.data.labels[i] for i in head(layers, lengths).argmax(1).tolist()])
        gold = [list(example.target) for example in self.dev.examples]
        scores = {name: s.value for name, s in metrics.tagging(gold, predicted, resamples=0).items()}
        metric = _main_metric(self.data)
        earlier = [row[metric] for row in self.history.evaluations]
        self.history.evaluations.append({"step": self.history.steps, "epoch": epoch + 1, **scores})
        if earlier and scores[metric] <= max(earlier):
            return False
        self.history.best_step = self.history.steps
        return True

    def _out_of_patience(self) -> bool:
        patience: int | None = self.settings["patience"]
        since = [row for row in self.history.evaluations if row["step"] > self.history.best_step]
        return patience is not None and bool(since) and len(since) >= patience


def _groups(head: LayerMixTagger) -> list[dict[str, Any]]:
    """No weight decay for the mix, which would pull its factor to zero."""
    mix = {id(parameter) for parameter in head.mix.parameters()}
    rest = [parameter for parameter in head.parameters() if id(parameter) not in mix]
    return [{"params": list(head.mix.parameters()), "weight_decay": 0.0}, {"params": rest}]
