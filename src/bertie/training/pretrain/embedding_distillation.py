"""Distillation of the embeddings of one or several sentence encoders, computed once before training.

A step then costs a forward and backward pass of the student alone, so passages can be read many
times. The teachers must have the student's tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.data.progress import Progress
from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.objectives import MicroBatch, ModelObjective, TrainingExample
from bertie.training.pretrain.corpus import Corpus, IntArray
from bertie.training.pretrain.packing import SPECIAL_TOKENS, PackingPlan
from bertie.training.pretrain.samplers import masked_examples
from bertie.training.pretrain.sentence_distillation import (
    AlignedCorpora,
    EmbeddingTerms,
    PrincipalComponents,
    segment_mean,
)
from bertie.training.sampling import TrainingTask

SAMPLE = 8_192  # passages that the teachers' means and the principal components are fitted to
BATCH_TOKENS = 65_536  # of a forward pass of the teachers
CLUSTER_SAMPLE = 64  # passages per cluster that k-means is fitted to
K_MEANS_STEPS = 10
CHUNK = 65_536  # embeddings that are compared with all centres at once

Half = NDArray[np.float16]


class Passages:
    """The documents of a corpus, split at word boundaries into passages of at most `max_length` tokens."""

    def __init__(self, corpus: Corpus, max_length: int) -> None:
        self._aligned = AlignedCorpora(corpus, corpus, max_length)
        self.max_length = max_length
        self.sizes = self._aligned.spans[0][1] + SPECIAL_TOKENS  # (N,) tokens

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._aligned)

    def read(self, passages: IntArray) -> tuple[Any, Any]:
        """Flat token ids (T,) and cu_seqlens (B + 1,)."""
        ids, cu, _, _ = self._aligned.read(passages)[0]
        return ids, cu


class TeacherEnsemble:
    """Several sentence encoders as one, whose cosine similarity is the mean of theirs.

    Its embeddings are their normalized embeddings, concatenated and normalized again. `prompts` are prepended
    to each text, one per teacher. `center` times a teacher's mean embedding is subtracted first (`fit`), since
    teachers with high similarities between all texts would otherwise count for less.
    """

    def __init__(self, teachers: Sequence[Checkpoint], prompts: Sequence[str] = (), center: float = 0.0) -> None:
        prompts = prompts or [""] * len(teachers)
        if len(prompts) != len(teachers):
            raise ConfigError(f"prompts has {len(prompts)} texts; it must have one per teacher, {len(teachers)}")
        if not 0 <= center <= 1:
            raise ConfigError(f"center={center} must be from 0 to 1")
        for teacher in teachers:
            if teacher.sentence is None:
                raise ConfigError(f"{teacher.source} is not a sentence encoder")
        self.teachers, self.center = teachers, center
        self._prompts = [_prompt_ids(teacher, prompt) for teacher, prompt in zip(teachers, prompts, strict=True)]
        self._means: list[Tensor] | None = None

    @property
    def max_length(self) -> int:
        """The maximum tokens of a text that all teachers can read with their prompts."""
        return min(teacher.max_length - len(ids) for teacher, ids in zip(self.teachers, self._prompts, strict=True))

    def fit(self, ids: Any, cu: Any) -> None:
        """Estimate the teachers' mean embeddings from a sample of texts."""
        self._means = [self._run(number, ids, cu).mean(0) for number in range(len(self.teachers))]

    @torch.no_grad()
    def embed(self, ids: Any, cu: Any) -> Tensor:
        """Texts as flat token ids (T,) and cu_seqlens (B + 1,) -> (B, ΣD)."""
        embeddings = []
        for number in range(len(self.teachers)):
            own = self._run(number, ids, cu)
            if self.center and self._means is not None:
                own = F.normalize(own - self.center * self._means[number], dim=-1)
            embeddings.append(own)
        return F.normalize(torch.cat(embeddings, dim=-1), dim=-1)

    @torch.no_grad()
    def _run(self, number: int, ids: Any, cu: Any) -> Tensor:
        """(B, D) a teacher's normalized embeddings, in batches of similar length."""
        teacher, prompt = self.teachers[number], self._prompts[number]
        assert teacher.sentence is not None
        texts = np.split(ids, cu[1:-1])
        if len(prompt):
            texts = [np.concatenate([text[:1], prompt, text[1:]]) for text in texts]
        sizes = np.array([len(text) for text in texts])
        order = np.argsort(sizes, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(np.cumsum(sizes[order]) // BATCH_TOKENS)) + 1)
        out = torch.empty(len(texts), teacher.sentence.dimension, device=teacher.model.device)
        for part in parts:
            batch = Batch.from_ids([texts[place] for place in part]).to(teacher.model.device)
            embeddings = teacher.sentence(teacher.model.hidden(batch), batch)
            out[torch.from_numpy(part).to(out.device)] = F.normalize(embeddings.float(), dim=-1)
        return out


def _prompt_ids(teacher: Checkpoint, prompt: str) -> IntArray:
    if not prompt:
        return np.zeros(0, np.int64)
    assert teacher.tokenizer is not None
    return np.asarray(teacher.tokenizer.encode(prompt).ids[1:-1], np.int64)


def check_teachers(teachers: Sequence[Checkpoint], tokenizer: Tokenizer) -> None:
    """Raise unless all teachers have the student's tokenizer."""
    for teacher in teachers:
        if teacher.tokenizer is None or teacher.tokenizer.vocabulary != tokenizer.vocabulary:
            raise ConfigError(
                f"teacher {teacher.source} must have the model's tokenizer; sentence_distillation takes others"
            )


@torch.no_grad()
def embedding_targets(
    ensemble: TeacherEnsemble, student: Model, passages: Passages, seed: int, progress: bool = True
) -> tuple[Half, PrincipalComponents]:
    """(N, ΣD) the teachers' embeddings of all passages, and their projection to the student's width.

    The projection preserves similarities as well as possible, and is rotated towards the student's own embeddings.
    """
    sample = np.sort(np.random.default_rng([seed, 0x74617267]).permutation(len(passages))[:SAMPLE])
    ids, cu = passages.read(sample)
    ensemble.fit(ids, cu)
    wide, own = ensemble.embed(ids, cu).cpu(), _embed(student, ids, cu).cpu()
    if len(sample) < wide.shape[1] and wide.shape[1] > own.shape[1]:
        raise ConfigError(f"the corpus has {len(passages)} passages; the projection needs at least {wide.shape[1]}")
    projection = PrincipalComponents.fit(wide, own.shape[1]).align(wide, own).to(student.device)
    targets = np.empty((len(passages), wide.shape[1]), np.float16)
    order = np.argsort(passages.sizes, kind="stable")
    ends = np.flatnonzero(np.diff(np.cumsum(passages.sizes[order]) // (8 * BATCH_TOKENS))) + 1
    done = 0
    with Progress("teacher embeddings", lambda: done / len(passages), unit="passages", show=progress) as bar:
        for part in np.split(order, ends):
            targets[part] = ensemble.embed(*passages.read(part)).half().cpu().numpy()
            done += len(part)
            bar.update(len(part))
    return targets, projection


@torch.no_grad()
def assign_clusters(targets: Half, clusters: int, seed: int, device: torch.device) -> IntArray:
    """(N,) the cluster of each embedding (N, D), by spherical k-means on a sample."""
    if clusters > len(targets):
        raise ConfigError(f"clusters={clusters} must be at most {len(targets)}, the number of passages")
    order = np.random.default_rng([seed, 0x636C7573]).permutation(len(targets))[: clusters * CLUSTER_SAMPLE]
    sample = torch.from_numpy(targets[order]).to(device).float()
    centres = sample[:clusters].clone()
    for _ in range(K_MEANS_STEPS):
        nearest = _nearest(sample, centres)
        sums = torch.zeros_like(centres).index_add_(0, nearest, sample)
        used = torch.bincount(nearest, minlength=clusters) > 0
        centres[used] = F.normalize(sums[used], dim=-1)
    parts = torch.split(torch.from_numpy(targets), CHUNK)
    return torch.cat([_nearest(part.to(device).float(), centres).cpu() for part in parts]).numpy()


def _nearest(embeddings: Tensor, centres: Tensor) -> Tensor:
    return torch.cat([(part @ centres.T).argmax(1) for part in torch.split(embeddings, CHUNK)])


def _embed(student: Model, ids: Any, cu: Any) -> Tensor:
    """(B, D) the mean of the student's states."""
    training = student.training
    student.eval()
    pooled = []
    for texts in np.array_split(np.arange(len(cu) - 1), max(1, len(ids) // BATCH_TOKENS)):
        batch = Batch.from_ids([ids[cu[text] : cu[text + 1]] for text in texts]).to(student.device)
        pooled.append(segment_mean(student.hidden(batch), batch.text_of_token(), len(batch)))
    student.train(training)
    return torch.cat(pooled)


class EmbeddingDistillationSampler:
    """Samples passages with the teachers' embeddings (N, ΣD).

    With `clusters`, (N,), several passages of one cluster are in a step together (topic-aware sampling, Hofstätter
    et al., 2021): the student learns to tell similar texts apart.
    """

    single_head = False

    def __init__(
        self,
        passages: Passages,
        targets: Half,
        steps: int,
        objective: EmbeddingDistillation,
        *,
        budget: int,
        seed: int,
        teachers: Sequence[str] = (),
        clusters: IntArray | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps={steps} must be at least 1")
        self.passages, self.targets, self.total_steps, self.teachers = passages, targets, steps, list(teachers)
        self._packing = PackingPlan(passages.sizes, budget, seed, clusters)
        self._task = TrainingTask("mlm", objective, ())
        self.heads: list[str] = []
        self.epoch_starts = [0, steps]

    def epoch_of(self, step: int) -> int:
        """0: nothing depends on the epoch."""
        return 0

    def epochs_done(self, step: int) -> float:
        """The number of epochs completed after so many steps."""
        return self._packing.epochs_at(step)

    def schedule_position(self, step: int) -> float:
        """All steps have the same size."""
        return step

    def fingerprint(self) -> Any:
        """The passages and the teachers; the number of clusters is the recipe's."""
        clustered = self._packing.groups is not None
        sizes = [self.total_steps, len(self.passages), self.passages.max_length, self._packing.budget, clustered]
        return [*sizes, *self.teachers]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read the passages of a step."""
        items = self._packing.items(step)
        ids, cu = self.passages.read(items)
        none: Any = np.zeros(0, np.int64)
        examples = masked_examples(ids, cu, none, none)
        with_targets = [
            replace(example, extras={"target": target})
            for example, target in zip(examples, self.targets[items], strict=True)
        ]
        return self._task, with_targets


class EmbeddingDistillation(ModelObjective):
    """The `EmbeddingTerms` of `SentenceDistillation`, with embeddings computed before instead of a teacher.

    With `clusters`, the loss of a step depends on its clusters, and is not checked for spikes.
    """

    def __init__(self, terms: EmbeddingTerms, projection: PrincipalComponents, clusters: bool = False) -> None:
        super().__init__()
        self.terms, self.projection = terms, projection
        self.detect_spikes = not clusters

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        batch, target = micro_batch.batch, micro_batch.extras["target"]
        assert isinstance(target, Tensor)
        hidden = model.hidden(batch)
        with torch.autocast(hidden.device.type, enabled=False):
            pooled = segment_mean(hidden, batch.text_of_token(), len(batch))
            return self.mean(self.terms.loss(pooled, target, self.projection), "texts")

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Stack the target embeddings too."""
        target = torch.from_numpy(np.stack([example.extras["target"] for example in examples]))
        return replace(super().collate(examples), extras={"target": target})
