"""Compare an exported graph with the model it was made from, on the same texts in ragged, padded batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.compress.export_report import OutputComparison
from bertie.compress.graph_formats import Arrays, GraphRunner
from bertie.compress.padded_model import PaddedModel
from bertie.text.batch import Batch
from bertie.text.encoding import Encoding
from bertie.text.windows import windows

BATCH = 8  # texts
MAX_TEXTS = 256  # of those given, the first are compared
LONGEST = 1024  # tokens of the one long text, if the model reads as many
LONGEST_VOCABULARY = 256  # the same for a head over the vocabulary, whose logits take much memory
MASK_EVERY = 7  # for such a head, every n-th token is masked
ROUNDS, SECONDS = 20, 2.0  # the most of a measurement of speed


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What is exported: a model with one of its heads, or with pooling, and its padded form."""

    checkpoint: Checkpoint
    padded: PaddedModel
    head: str | None
    paired: bool  # whether it reads pairs of texts

    @torch.inference_mode()
    def run(self, batch: Batch) -> Arrays:
        """Bertie's own outputs, by the graph's names: one row per token or per text."""
        model, padded = self.checkpoint.model, self.padded
        if self.head is None:
            hidden = model.hidden(batch)
            outputs = {"last_hidden_state": hidden}
            if padded.pools and padded.sentence is not None:
                outputs["sentence_embedding"] = padded.sentence(hidden, batch)
        else:
            logits = model(batch, self.head) / padded.temperature
            names = padded.output_names
            outputs = dict(zip(names, logits.unbind(-1) if len(names) > 1 else (logits,), strict=True))
        return {name: output.float().numpy() for name, output in outputs.items()}


@dataclass
class _Totals:
    """Sums over batches of one output."""

    error: float = 0.0
    norm: float = 0.0
    largest: float = 0.0
    difference: float = 0.0
    cosines: list[NDArray[np.float64]] = field(default_factory=list)
    equal: list[NDArray[np.bool_]] = field(default_factory=list)
    pairs: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=list)

    def add(self, source: NDArray[np.float64], exported: NDArray[np.float64]) -> None:
        """Add rows (N, n)."""
        difference = np.abs(exported - source)
        self.error += float((difference**2).sum())
        self.norm += float((source**2).sum())
        self.largest = max(self.largest, float(np.abs(source).max()))
        self.difference = max(self.difference, float(difference.max()))
        lengths = np.linalg.norm(source, axis=1) * np.linalg.norm(exported, axis=1)
        self.cosines.append((source * exported).sum(1) / np.maximum(lengths, 1e-30))

    def result(self) -> OutputComparison:
        """All batches together."""
        cosines = np.concatenate(self.cosines)
        equal = self.equal
        if self.pairs:
            source, exported = (np.concatenate(rows) for rows in zip(*self.pairs, strict=True))
            equal = [_nearest(source) == _nearest(exported)] if len(source) > 2 else []
        return OutputComparison(
            max_difference=self.difference,
            largest=self.largest,
            relative_error=(self.error / max(self.norm, 1e-30)) ** 0.5,
            min_cosine=float(cosines.min()),
            mean_cosine=float(cosines.mean()),
            rows=len(cosines),
            agreement=float(np.concatenate(equal).mean()) if equal else None,
        )


def _nearest(rows: NDArray[np.float64]) -> NDArray[np.int64]:
    """(N, E) -> (N,) the nearest other row of each, by cosine."""
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    similarities = unit @ unit.T
    np.fill_diagonal(similarities, -np.inf)
    nearest: NDArray[np.int64] = similarities.argmax(1)
    return nearest


class ExportCheck:
    """Texts, and the source's outputs for them, to which exported graphs are compared."""

    def __init__(self, source: ExportSource, texts: Sequence[str]) -> None:
        self.source = source
        encodings, long = _encode(source, texts[:MAX_TEXTS])
        self.texts, self.tokens = len(encodings) + 1, sum(map(len, encodings)) + len(long)
        # In the given order, not by length: padding is a part of what is checked.
        groups = [encodings[i : i + BATCH] for i in range(0, len(encodings), BATCH)]
        self._timed = len(groups)  # all but the batch of the long text
        self._timed_texts = len(encodings)
        groups.append([encodings[0], long])
        self.batches = [Batch.from_encodings(group) for group in groups]
        self.feeds = [self._feed(group) for group in groups]
        self.references = [source.run(batch) for batch in self.batches]

    def _feed(self, encodings: Sequence[Encoding]) -> Arrays:
        """Padded inputs of the graph."""
        length = max(map(len, encodings))
        pad = self.source.checkpoint.model.config.pad_id or 0

        def padded(rows: Sequence[NDArray[np.int64]], value: int) -> NDArray[np.int64]:
            filled = [np.pad(row, (0, length - len(row)), constant_values=value) for row in rows]
            return np.stack(filled).astype(np.int64)

        values = {
            "input_ids": padded([encoding.ids for encoding in encodings], pad),
            "attention_mask": padded([np.ones(len(encoding), np.int64) for encoding in encodings], 0),
            "token_type_ids": padded([encoding.segments for encoding in encodings], 0),
        }
        return {name: values[name] for name in self.source.padded.input_names}

    def compare(self, run: GraphRunner) -> dict[str, OutputComparison]:
        """Compare each output."""
        totals = {name: _Totals() for name in self.source.padded.output_names}
        for number, (batch, feed) in enumerate(zip(self.batches, self.feeds, strict=True)):
            outputs, reference = run(feed), self.references[number]
            real = feed["attention_mask"] > 0
            for name, total in totals.items():
                source, exported = reference[name], outputs[name]
                per_token = len(source) == len(batch.ids) and exported.shape[:2] == real.shape
                exported = exported[real] if per_token else exported
                rows = [x.astype(np.float64).reshape(len(source), -1) for x in (source, exported)]
                self._add(total, name, batch, rows[0], rows[1])
                if name == "sentence_embedding" and number < self._timed:  # a text must not be its own neighbour
                    total.pairs.append((rows[0], rows[1]))
        return {name: total.result() for name, total in totals.items()}

    def _add(
        self, total: _Totals, name: str, batch: Batch, source: NDArray[np.float64], exported: NDArray[np.float64]
    ) -> None:
        if name in ("start_logits", "end_logits"):  # a row per text, for the cosine too
            starts = np.cumsum([0, *batch.lengths])
            for start, end in pairwise(starts):
                a, b = source[start:end].T, exported[start:end].T
                total.add(a, b)
                total.equal.append(a.argmax(1) == b.argmax(1))
            return
        total.add(source, exported)
        if name == "logits" and source.shape[1] > 1:
            total.equal.append(source.argmax(1) == exported.argmax(1))

    def speed(self, run: GraphRunner) -> tuple[float, float]:
        """Texts per second of a graph and of the source: the best of several alternating rounds.

        The rounds alternate, so that other work on the machine affects both. The first round of each is
        not counted.
        """
        turns: tuple[Callable[[int], object], ...] = (
            lambda i: run(self.feeds[i]),
            lambda i: self.source.run(self.batches[i]),
        )
        best, started = [float("inf")] * len(turns), time.perf_counter()
        for number in range(ROUNDS + 1):
            for turn, work in enumerate(turns):
                before = time.perf_counter()
                for i in range(self._timed):
                    work(i)
                if number:
                    best[turn] = min(best[turn], time.perf_counter() - before)
            if number > 1 and time.perf_counter() - started > SECONDS:
                break
        graph, source = (self._timed_texts / seconds for seconds in best)
        return graph, source


def _encode(source: ExportSource, texts: Sequence[str]) -> tuple[list[Encoding], Encoding]:
    """The windows of the texts, or of pairs of neighbours; and one that is as long as the model reads."""
    checkpoint = source.checkpoint
    assert checkpoint.tokenizer is not None
    tokenizer, mask = checkpoint.tokenizer, None
    if source.head is not None and checkpoint.model.head(source.head).cfg.kind == "vocabulary":
        mask = tokenizer.mask_id
    limit = min(checkpoint.max_length, LONGEST if mask is None else LONGEST_VOCABULARY)
    inputs: list[tuple[str, ...]] = [(text,) for text in texts]
    long: tuple[str, ...] = (" ".join(list(texts[:64]) * 4),)
    if source.paired:
        inputs = list(zip(texts, [*texts[1:], texts[0]], strict=True))
        long = (texts[0], *long)
    encoded = tokenizer.encode_batch([(t[0], t[1]) if len(t) > 1 else t[0] for t in [*inputs, long]])
    parts = [windows(e, t, checkpoint.max_length) for e, t in zip(encoded[:-1], inputs, strict=True)]
    out = [window.encoding for windowed in parts for window in windowed]
    longest = windows(encoded[-1], long, limit)[0].encoding
    return [_masked(encoding, mask) for encoding in out], _masked(longest, mask)


def _masked(encoding: Encoding, mask: int | None) -> Encoding:
    if mask is None:
        return encoding
    ids = encoding.ids.copy()
    ids[np.flatnonzero(encoding.sequence_ids >= 0)[::MASK_EVERY]] = mask
    rest = (encoding.offsets, encoding.word_ids, encoding.special, encoding.sequence_ids)
    return Encoding(ids, encoding.segments, *rest)
