"""Training and evaluation of zero-shot entities: a span head over any encoder, on words with tags."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.gliner import HEAD, GlinerConfig
from bertie.checkpoints.model_spec import model_spec
from bertie.checkpoints.named_heads import empty
from bertie.config import HeadInfo, SpanHeadConfig
from bertie.errors import BertieWarning, InputError
from bertie.evaluation import metrics
from bertie.evaluation.metrics import Score
from bertie.nn.model import Model, allocate
from bertie.nn.span_head import SpanHead
from bertie.pipeline.inputs import TaskInput
from bertie.tasks.results import TaggedSpan
from bertie.tasks.tag import split_tag
from bertie.tasks.zero_shot_tag import ZeroShotTagger
from bertie.text.encoding import IntArray
from bertie.text.prompted_words import template_ids, text_ranges, word_starts
from bertie.text.windows import Window
from bertie.training.finetune.base import Predictions, TaskTraining
from bertie.training.finetune.data import Example, LabelledDataset
from bertie.training.finetune.data.dataset import OUTSIDE
from bertie.training.finetune.label_sampling import LabelTokens, PromptSampler
from bertie.training.objectives import Objective, TrainingExample, TrainingWindow
from bertie.training.pretrain.initialization import extend_vocabulary
from bertie.training.sampling import BatchSampler, TrainingTask
from bertie.training.span_objective import SpanObjective

WordSpan = tuple[int, int, str]  # first word, last word, label
DROPOUT = 0.1  # of a fresh head


class ZeroShotTaggingTraining(TaskTraining[ZeroShotTagger]):
    """Zero-shot entities: the tags' types are the labels of the prompts."""

    data_kind = "tag"

    def head_for(self, data: LabelledDataset) -> HeadInfo:
        """A span head, which has no fixed labels."""
        return HeadInfo("span")

    def prepare(self, checkpoint: Checkpoint, data: LabelledDataset) -> Checkpoint:
        """The checkpoint with its span head, or with a fresh one and tokens for prompts."""
        return checkpoint if checkpoint.gliner is not None else add_span_head(checkpoint, seed=self.recipe.seed)

    def objective(self, data: LabelledDataset) -> Objective:
        """Binary cross-entropy of each span and label."""
        if self.recipe.class_weights is not None:
            raise InputError("class_weights: the labels of a span head are those of the prompt; leave it out")
        return SpanObjective(self.task.settings.head.max_width, smoothing=self.recipe.label_smoothing)

    def plan(self, data: LabelledDataset) -> BatchSampler:
        """Prompts are drawn for each epoch."""
        self._labels = {label: i for i, label in enumerate(span_labels(data.labels))}
        if not self._labels:
            raise InputError(f"{data.name} has no tags but {OUTSIDE!r}; training needs spans")
        self._known = frozenset(data.labels)
        self._long = self._total = 0
        task, config = self.task, self.task.settings
        words = [task.tokenizer.encode_words([[config.ent_token, label]])[0][0] for label in self._labels]
        end = task.tokenizer.encode_words([[config.sep_token]])[0][0]
        tokens = LabelTokens(words, end, 0 if config.embed_ent_token else 1, template_ids(task.tokenizer))
        source = self.source(data)
        if self._long:
            warnings.warn(
                f"{self._long:,} of {self._total:,} spans in {data.name} have more than {config.head.max_width} words "
                "or cross the end of a window; the model cannot learn them",
                BertieWarning,
                stacklevel=5,
            )
        return PromptSampler([source], self.recipe, tokens, config.max_types)

    def items(self, data: LabelledDataset) -> Iterator[TrainingExample]:
        """Tokenize examples: texts without their prompts, in windows that leave room for the longest one."""
        longest = sorted(self._labels, key=lambda label: -len(self.task.tokenizer.encode_words([[label]])[0][0]))
        options = self.task.options(longest[: self.task.settings.max_types])
        inputs = (
            TaskInput(f"{data.name}, row {example.row}", self.texts(example), options) for example in data.examples
        )
        for example, text in zip(data.examples, self.task.pipeline.read(inputs), strict=True):
            yield self.item(example, text.windows)

    def item(self, example: Example, windows: Sequence[Window]) -> TrainingExample:
        """The text's tokens of each window, with the spans of the text that lie in it."""
        whole = windows[0].whole
        starts = word_starts(whole)  # (W,) tokens
        gold = [
            (first, last, self._labels[label])
            for a, b, label in tag_spans(example.target, self._known)
            for first, last in [words_between(whole.offsets[starts], example.words[a][0], example.words[b][1])]
            if first <= last
        ]
        total, width = sum(window.weight for window in windows), self.task.settings.head.max_width
        found: set[tuple[int, int, int]] = set()
        parts = []
        for window, (first_token, end) in zip(windows, text_ranges(windows), strict=True):
            text = window.encoding.sequence_ids == 0
            tokens = window.indices[text]
            words = np.arange(*np.searchsorted(starts, [first_token, end]))
            inside = [s for s in gold if len(words) and words[0] <= s[0] <= s[1] <= min(words[-1], s[0] + width - 1)]
            found.update(inside)
            values = np.array([(a - words[0], b - words[0], label) for a, b, label in inside], np.int64).reshape(-1, 3)
            rows = np.searchsorted(tokens, starts[words])
            ids = window.encoding.ids[text]
            weights = window.owned[text][rows].astype(np.float32)
            parts.append(TrainingWindow(ids, np.zeros_like(ids), window.weight / total, values, weights, rows))
        self._long += len(set(gold) - found)
        self._total += len(gold)
        return TrainingExample(tuple(parts))

    def source(self, data: LabelledDataset) -> TrainingTask:
        """The head with its objective and its texts; those without any word are left out."""
        items = [item for item in self.items(data) if any(len(window) for window in item.windows)]
        return TrainingTask(HEAD, self.objective(data), items)

    def check_metrics(self, data: LabelledDataset) -> None:
        """Entities are counted by seqeval."""
        metrics.entities([])

    def predict_labelled(self, data: LabelledDataset) -> Predictions:
        """Find the spans of labelled data, with the labels of its tags."""
        known = frozenset(data.labels)
        results = list(self.task.tag_each([example.texts[0] for example in data.examples], span_labels(data.labels)))
        gold = [to_tags(tag_spans(e.target, known), len(e.words)) for e in data.examples]
        rows = zip(data.examples, results, strict=True)
        predicted = [to_tags(given_words(result.spans, example), len(example.words)) for example, result in rows]
        counts = [np.array([getattr(r, name) for r in results]) for name in ("tokens_total", "tokens_read", "windows")]
        return Predictions("tag", data, gold, predicted, None, None, *counts)

    def scores(self, predictions: Predictions, resamples: int = 1000) -> dict[str, Score]:
        """Precision, recall and F1 of spans."""
        return metrics.tagging(predictions.gold, predictions.predicted, resamples=resamples)


def add_span_head(checkpoint: Checkpoint, *, seed: int = 0, config: GlinerConfig | None = None) -> Checkpoint:
    """The encoder of a checkpoint with tokens for prompts and a fresh span head, and nothing else."""
    config = config or GlinerConfig(SpanHeadConfig(width=checkpoint.model.config.width, dropout=DROPOUT))
    assert checkpoint.tokenizer is not None
    tokenizer = checkpoint.tokenizer.with_special_tokens([config.ent_token, config.sep_token])
    extended = extend_vocabulary(checkpoint, tokenizer)
    bare = {key: value for key, value in extended.config.items() if key not in ("architectures", "problem_type")}
    spec = config.add_head(model_spec(bare, None, head="none", ignore=checkpoint.spec.ignored))
    head = empty(config.head, extended.model)
    assert isinstance(head, SpanHead)
    head = allocate(head.to(extended.model.dtype), extended.model.device)
    head.initialize(seed)
    model = Model.from_parts(extended.model.encoder, {HEAD: head}).eval()
    return replace(
        extended,
        model=model,
        config=bare,
        spec=spec,
        heads={},
        gliner=config,
        sentence=None,
        cross_encoder=None,
        splade=None,
    )


# --- tags and spans of words ---


def span_labels(tags: Iterable[str]) -> list[str]:
    """The types of tags.

    >>> span_labels(["O", "B-person", "I-person", "B-place"])
    ['person', 'place']
    """
    tags = list(tags)
    return sorted({split_tag(tag, frozenset(tags))[1] for tag in tags if tag != OUTSIDE})


def tag_spans(tags: Sequence[str], known: frozenset[str]) -> list[WordSpan]:
    """The labelled spans of a sentence, by its tags.

    >>> tag_spans(["B-a", "I-a", "O", "B-a", "B-a"], frozenset(["O", "B-a", "I-a"]))
    [(0, 1, 'a'), (3, 3, 'a'), (4, 4, 'a')]
    """
    spans: list[WordSpan] = []
    previous = ("O", OUTSIDE)
    for i, tag in enumerate(tags):
        prefix, kind = ("O", OUTSIDE) if tag == OUTSIDE else split_tag(tag, known)
        if prefix != "O":
            joins = kind == previous[1] and prefix not in "BSU" and previous[0] not in "ESLU"
            spans.append((spans.pop()[0] if joins and previous[0] != "O" else i, i, kind))
        previous = (prefix, kind)
    return spans


def to_tags(spans: Iterable[WordSpan], words: int) -> list[str]:
    """Spans as BIO tags.

    >>> to_tags([(0, 1, "a"), (2, 2, "a")], 4)
    ['B-a', 'I-a', 'B-a', 'O']
    """
    tags = [OUTSIDE] * words
    for first, last, label in spans:
        tags[first : last + 1] = [f"B-{label}", *[f"I-{label}"] * (last - first)]
    return tags


def words_between(offsets: IntArray, start: int, end: int) -> tuple[int, int]:
    """The first and the last word within some characters; the last comes first if there is none."""
    first = int(np.searchsorted(offsets[:, 0], start))
    return first, int(np.searchsorted(offsets[:, 1], end, side="right")) - 1


def given_words(spans: Sequence[TaggedSpan], example: Example) -> list[WordSpan]:
    """Spans of characters as spans of the given words that they touch; the better one, if two touch the same word."""
    bounds = np.array(example.words, np.int64).reshape(-1, 2)
    taken = np.zeros(len(bounds), np.bool_)
    result: list[WordSpan] = []
    for span in sorted(spans, key=lambda span: -span.score):
        first = int(np.searchsorted(bounds[:, 1], span.start, side="right"))
        last = int(np.searchsorted(bounds[:, 0], span.end)) - 1
        if first <= last and not taken[first : last + 1].any():
            taken[first : last + 1] = True
            result.append((first, last, span.label))
    return sorted(result)
