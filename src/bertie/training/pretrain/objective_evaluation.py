"""Held-out scores of the objectives besides masked-language modelling: pairs of sentences and replaced tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bertie.evaluation.intervals import FloatArray, Score, bootstrap, from_sums, wilson_interval
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.objectives import TrainingExample
from bertie.training.pretrain.monitoring import HeldOutEvaluation
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection
from bertie.training.pretrain.sentence_pairs import SentencePairSampler

LIMIT = 500_000  # tokens of held-out text that are read
BINS = 200  # of logits, by their quantiles, that areas under the curve are computed from
RESAMPLES = 200  # of documents, for the standard errors of a curve
Z = 1.959964  # of a 95% interval


class PairEvaluation:
    """The accuracy of next-sentence or sentence-order prediction on held-out pairs, with their masked tokens.

    Each label has about half of the pairs. The interval assumes that pairs are independent.
    """

    def __init__(self, sampler: SentencePairSampler, head: str, *, limit: int = LIMIT, dtype: torch.dtype) -> None:
        self.head, self._dtype = head, dtype
        self._groups: list[list[TrainingExample]] = []
        used = 0
        for step in range(sampler.total_steps):
            _, examples = sampler.read(step)
            used += sum(map(len, examples))
            if self._groups and used > limit:
                break
            self._groups.append(examples)

    def __call__(self, model: Model) -> dict[str, float]:
        """The accuracy and its standard error."""
        right = self.correct(model)
        value = float(right.mean())
        error = float(np.sqrt(max(value * (1 - value), 1e-9) / len(right)))
        return {f"{self.head}_accuracy": value, f"{self.head}_accuracy_se": error}

    def scores(self, model: Model) -> dict[str, Score]:
        """The accuracy with its 95% interval."""
        right = self.correct(model)
        interval = wilson_interval(float(right.sum()), len(right))
        return {f"{self.head}_accuracy": Score(float(right.mean()), *interval)}

    @torch.no_grad()
    def correct(self, model: Model) -> NDArray[np.bool_]:
        """(pairs,) whether the predicted label is right."""
        parts = []
        with _evaluating(model), _autocast(model, self._dtype):
            for examples in self._groups:
                windows = [example.windows[0] for example in examples]
                batch = Batch.from_ids([w.ids for w in windows], [w.segments for w in windows]).to(model.device)
                predicted = model(batch, self.head).float().argmax(-1).cpu().numpy()
                parts.append(predicted == np.array([int(example.extras["label"]) for example in examples]))
        return np.concatenate(parts)


class ReplacedTokenEvaluation:
    """Precision and recall, at a probability of 0.5, and the area under the ROC curve of replaced-token detection.

    The passages and their masked tokens are those of `held_out`; the replacements are drawn by the generator as it is
    then. `generator_accuracy` and `generator_perplexity` are the generator's own scores on the masked tokens.
    """

    def __init__(self, held_out: HeldOutEvaluation, detection: ReplacedTokenDetection) -> None:
        self._held_out, self._detection = held_out, detection

    def __call__(self, model: Model) -> dict[str, float]:
        """The scores and their standard errors."""
        logged: dict[str, float] = {}
        for name, score in self.scores(model, resamples=RESAMPLES).items():
            logged[name] = score.value
            if np.isfinite(score.low):
                logged[f"{name}_se"] = (score.high - score.low) / (2 * Z)
        return logged

    def scores(self, model: Model, *, resamples: int = 1000) -> dict[str, Score]:
        """The scores with their 95% intervals; documents are resampled, as their tokens correlate."""
        columns, positive = self.histograms()
        statistic = from_sums(columns, partial(_detection_scores, positive=positive))
        scores = bootstrap(statistic, len(columns), resamples=resamples)
        sums = self._held_out.sums(self._detection.generator)
        generator = bootstrap(from_sums(sums, _generator_scores), len(sums), resamples=resamples)
        return scores | {f"generator_{name}": score for name, score in generator.items()}

    def histograms(self) -> tuple[FloatArray, int]:
        """(documents, 2 · bins) original and replaced tokens by the bin of their logits; the first bin above 0."""
        predictions = list(self._predict())
        logits = np.concatenate([own for _, own, _ in predictions])
        edges = np.unique(np.append(np.quantile(logits, np.linspace(0, 1, BINS)), 0.0))
        by_document: dict[int, FloatArray] = {}
        for document, own, replaced in predictions:
            bins = np.searchsorted(edges, own, side="right")
            counts = [np.bincount(bins[which], minlength=len(edges) + 1) for which in (~replaced, replaced)]
            by_document[document] = by_document.get(document, 0) + np.concatenate(counts).astype(np.float64)
        return np.stack(list(by_document.values())), int(np.searchsorted(edges, 0.0, side="right"))

    @torch.no_grad()
    def _predict(self) -> Iterator[tuple[int, FloatArray, NDArray[np.bool_]]]:
        """For each passage: its document, the logits of its tokens without special ones, and which are replaced."""
        detection, held_out = self._detection, self._held_out
        model = detection.discriminator
        with _evaluating(detection), _autocast(model, held_out.dtype):
            for number, passages in enumerate(held_out.groups()):
                batch = Batch.from_ids([passage.ids for passage in passages]).to(model.device)
                starts = np.cumsum([0, *batch.lengths[:-1]])
                rows = np.concatenate([p.rows + start for p, start in zip(passages, starts, strict=True)])
                special = np.concatenate([held_out.special(passage) for passage in passages])
                tensors = [
                    torch.from_numpy(array).to(model.device)
                    for array in (rows, np.concatenate([p.targets for p in passages]), special)
                ]
                noise = torch.Generator(model.device).manual_seed(number)
                losses = detection(batch, *tensors, generator=noise)
                logits, replaced = losses.logits.cpu().numpy(), losses.replaced.cpu().numpy().astype(bool)
                for passage, start in zip(passages, starts.tolist(), strict=True):
                    part = slice(start, start + len(passage.ids))
                    kept = ~special[part]
                    yield passage.document, logits[part][kept], replaced[part][kept]


def _detection_scores(sums: FloatArray, positive: int) -> dict[str, FloatArray]:
    """(n, 2 · bins) -> (n,) of each metric, with the first bin of a positive prediction; undefined ones are NaN."""
    original, replaced = np.split(sums, 2, axis=1)
    found, wrong = replaced[:, positive:].sum(1), original[:, positive:].sum(1)
    below = np.cumsum(original, axis=1) - original / 2  # ties count half
    with np.errstate(invalid="ignore", divide="ignore"):
        return {
            "rtd_precision": found / (found + wrong),
            "rtd_recall": found / replaced.sum(1),
            "rtd_auroc": (replaced * below).sum(1) / (replaced.sum(1) * original.sum(1)),
        }


def _generator_scores(sums: FloatArray) -> dict[str, FloatArray]:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return {"accuracy": sums[:, 1] / sums[:, 2], "perplexity": np.exp(sums[:, 0] / sums[:, 2])}


@contextmanager
def _evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, then restore the previous mode."""
    before = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def _autocast(model: Model, dtype: torch.dtype) -> Any:
    return nullcontext() if dtype == torch.float32 else torch.autocast(model.device.type, dtype)
