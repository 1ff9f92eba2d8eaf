"""Distillation of a sentence encoder into a student with another vocabulary: word states and text
embeddings.

The two tokenizers may split words differently, but must agree on word boundaries, as WordPiece
vocabularies with the same normalization do. Each model reads the same documents from its own
corpus, built by `bertie corpus` from the same sources with its own tokenizer; word k of a document
is then the same word in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import ConfigError, InputError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.embedding.losses import similarity_distillation
from bertie.training.objectives import MicroBatch, ModelObjective, TrainingExample
from bertie.training.pretrain.corpus import Corpus, IntArray
from bertie.training.pretrain.masking import Masking, masking_rng
from bertie.training.pretrain.packing import SPECIAL_TOKENS, PackingPlan, flatten_pieces
from bertie.training.pretrain.samplers import masked_examples
from bertie.training.sampling import TrainingTask


class AlignedCorpora:
    """Two corpora of the same documents, split into passages of the same words, of at most
    `max_length` tokens in both.

    Documents with different word counts in the two corpora are left out, and so are words longer
    than max_length. Memory: eight bytes per word and corpus.
    """

    def __init__(self, student: Corpus, teacher: Corpus, max_length: int) -> None:
        if max_length <= SPECIAL_TOKENS:
            raise InputError(f"max_length={max_length} must be above {SPECIAL_TOKENS}, the special tokens of a passage")
        if len(student) != len(teacher):
            raise InputError(
                f"{student.folder} has {len(student):,} documents and {teacher.folder} has {len(teacher):,}; make both "
                "with `bertie corpus` from the same sources with the same settings"
            )
        self.student, self.teacher, self.max_length = student, teacher, max_length
        corpora = (student, teacher)
        boundaries = [_word_boundaries(corpus) for corpus in corpora]  # (words + 1,) over all documents
        firsts = [np.searchsorted(b, c.starts) for b, c in zip(boundaries, corpora, strict=True)]  # (documents + 1,)
        counts = np.diff(firsts[0])
        same = counts == np.diff(firsts[1])
        self.left_out = int((~same).sum())
        self.documents, first_word, end_word = _split_passages(
            boundaries, firsts, np.where(same, counts, 0), max_length - SPECIAL_TOKENS
        )
        if not len(self.documents):
            raise InputError(f"{student.folder} and {teacher.folder} have no document with the same words")
        self.spans = []  # per corpus: the first token of each passage in its document, and its number of tokens
        for corpus, boundary, first in zip(corpora, boundaries, firsts, strict=True):
            start, stop = (boundary[first[self.documents] + word] for word in (first_word, end_word))
            self.spans.append((start - corpus.starts[self.documents], (stop - start).astype(np.int32)))

    def __len__(self) -> int:
        """Number of passages."""
        return len(self.documents)

    def read(self, passages: IntArray) -> list[tuple[Any, Any, Any, Any]]:
        """Read passages, flat as in `PackedCorpus.batch`: the student's, then the teacher's."""
        return [
            flatten_pieces(corpus, self.documents[passages], start[passages], sizes[passages])
            for corpus, (start, sizes) in zip((self.student, self.teacher), self.spans, strict=True)
        ]


def _word_boundaries(corpus: Corpus) -> IntArray:
    """(words + 1,) the first token of each word over all documents, and the total number of tokens."""
    starts = [np.flatnonzero(bits) + base for bits, base in corpus.word_bits()]
    return np.concatenate([*starts, np.array([corpus.tokens])])


def _split_passages(
    boundaries: Sequence[IntArray], firsts: Sequence[IntArray], counts: IntArray, room: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Passages of as many words as fit in both corpora: document, first word, end. Splits all documents in parallel."""
    documents = np.flatnonzero(counts)
    at = np.zeros_like(documents)
    rounds = []
    while len(documents):
        end = counts[documents]
        for boundary, first in zip(boundaries, firsts, strict=True):
            begin = first[documents]
            end = np.minimum(end, np.searchsorted(boundary, boundary[begin + at] + room, "right") - 1 - begin)
        fits = end > at  # else the first word is too long, and is left out
        rounds.append(np.stack([documents, at, end])[:, fits])
        at = np.where(fits, end, at + 1)
        more = at < counts[documents]
        documents, at = documents[more], at[more]
    passages = np.concatenate([np.zeros((3, 0), np.int64), *rounds], axis=1)
    return passages[0], passages[1], passages[2]


class SentenceDistillationSampler:
    """Samples aligned passages: the student's tokens, masked if there is a `masking`, and the teacher's tokens."""

    single_head = False

    def __init__(
        self,
        corpora: AlignedCorpora,
        tokenizer: Tokenizer,
        steps: int,
        objective: SentenceDistillation,
        *,
        budget: int,
        seed: int,
        masking: Masking | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps={steps} must be at least 1")
        if tokenizer.mask_id is None and masking is not None:
            raise InputError("the tokenizer has no mask token, and masking needs one")
        self.corpora, self.total_steps, self.masking, self.seed = corpora, steps, masking, seed
        self._mask_id, self._vocab = tokenizer.mask_id or 0, tokenizer.vocab_size
        self._special_ids = corpora.student.manifest["tokenizer"]["special"]
        self._task = TrainingTask("mlm", objective, ())
        self._packing = PackingPlan(corpora.spans[0][1] + SPECIAL_TOKENS, budget, seed)
        self.heads, self.epoch_starts = ["mlm"] if masking is not None else [], [0, steps]

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
        """The passages and the masking."""
        masking = None if self.masking is None else [self.masking.rate, self.masking.mask, self.masking.unit]
        max_length = self.corpora.max_length
        return [self.total_steps, len(self.corpora), max_length, self._packing.budget, self.seed, masking]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """Read the passages of a step."""
        (ids, cu, special, words), (ids_t, cu_t, _, words_t) = self.corpora.read(self._packing.items(step))
        positions: Any = np.zeros(0, np.int64)
        masked, targets = ids, positions
        if self.masking is not None:
            rng = masking_rng(self.seed, epoch=0, index=step)
            positions = self.masking.choose(special, words, cu, rng)
            masked, targets = self.masking.apply(
                ids, positions, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._special_ids
            )
        word_ids, counts = _number_words(words, cu)
        word_ids_t, counts_t = _number_words(words_t, cu_t)
        examples = []
        for b, example in enumerate(masked_examples(masked, cu, positions, targets, {"words": word_ids})):
            low, high = int(cu_t[b]), int(cu_t[b + 1])
            extras = {
                "words": example.extras["words"],
                "teacher": ids_t[low:high],
                "teacher_words": word_ids_t[low:high],
                # The corpora may disagree where a text contains special tokens: then only
                # embeddings are compared.
                "count": counts[b] if counts[b] == counts_t[b] else np.int64(0),
            }
            examples.append(replace(example, extras=extras))
        return self._task, examples


def _number_words(words: NDArray[np.bool_], cu: NDArray[np.int32]) -> tuple[IntArray, IntArray]:
    """(T,) the index of each token's word in its passage, −1 for the special tokens around it; (B,) word counts."""
    inner = np.ones(len(words), np.bool_)
    inner[cu[:-1]] = inner[cu[1:] - 1] = False
    total = np.cumsum(words & inner)
    before = total[cu[:-1]]  # the first token of a passage is special
    word_ids = np.where(inner, total - np.repeat(before, np.diff(cu)) - 1, -1)
    return word_ids, total[cu[1:] - 1] - before


class PrincipalComponents(nn.Module):
    """Projects a teacher's embeddings to the student's dimension, onto their uncentred principal components."""

    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis)

    @classmethod
    def fit(cls, embeddings: Tensor, dimension: int) -> PrincipalComponents:
        """Fit to (N, D) embeddings; uncentred, as inner products are to be preserved."""
        wide = embeddings.double()
        _, directions = torch.linalg.eigh(wide.T @ wide)
        return cls(directions[:, -dimension:].flip(1).float().contiguous())

    def align(self, embeddings: Tensor, targets: Tensor) -> PrincipalComponents:
        """Rotate the components so that (N, D) embeddings come as close as possible to (N,
        dimension) targets.

        Inner products do not change. A student that was distilled before has embeddings in
        its own basis; the components of another sample differ from it even for the same teacher,
        and the student would have to relearn everything.
        """
        wide = self.basis.double()
        product = F.normalize(embeddings.double() @ wide, dim=-1).T @ F.normalize(targets.double(), dim=-1)
        left, _, right = torch.linalg.svd(product, full_matrices=False)  # orthogonal Procrustes (Schönemann, 1966)
        return PrincipalComponents((wide @ left @ right).float().contiguous())

    def forward(self, embeddings: Tensor) -> Tensor:
        """(B, D) -> (B, dimension), normalized."""
        return F.normalize(embeddings.float() @ self.basis, dim=-1)


@dataclass(frozen=True, slots=True)
class EmbeddingTerms:
    """The weights of the terms that compare the embeddings of a micro-batch with a teacher's, in
    `SentenceDistillation`.
    """

    embeddings: float = 1.0
    similarities: float = 0.0
    neighbours: float = 0.0

    def loss(self, student: Tensor, teacher: Tensor, projection: PrincipalComponents | None = None) -> Tensor:
        """(B, D) embeddings of both -> () the sum over texts.

        A teacher's embeddings in another space need a projection to the student's, for the first term alone:
        similarities are those of the embeddings themselves.
        """
        s, t = F.normalize(student, dim=-1), F.normalize(teacher.float(), dim=-1)
        total = self.embeddings * (1 - (s * (projection(t) if projection else t)).sum(-1)).sum()
        if self.similarities:
            total = total + self.similarities * ((s @ s.T - t @ t.T) ** 2).mean() * len(s)
        if self.neighbours and len(s) > 1:
            total = total + self.neighbours * similarity_distillation(s, t) * len(s)
        return total


class SentenceDistillation(ModelObjective):
    """A weighted sum of means over the student's and a sentence encoder's states:

        words           over words    1 − cos(P h, g)    h the student's state of a word, g the teacher's, P learned
        embeddings      over texts    1 − cos(s, t)      s the mean of the student's states, t the teacher's embedding
        similarities    over pairs    (cos(sᵢ, sⱼ) − cos(tᵢ, tⱼ))², within a micro-batch
        neighbours      over texts    KL divergence of the softmax over similarities, within a micro-batch
        mlm             over masked tokens, the cross-entropy, if the sampler masks any

    A word's state is the mean over its tokens; the teacher's is the mean of its upper `layers`,
    each normalized. If the teacher's embeddings have another dimension, `components` projects them
    to the student's.
    """

    def __init__(
        self,
        model: Model,
        teacher: Checkpoint,
        *,
        words: float = 1.0,
        embeddings: float = 1.0,
        similarities: float = 0.0,
        neighbours: float = 0.0,
        mlm: float = 1.0,
        layers: int = 1,
        components: PrincipalComponents | None = None,
    ) -> None:
        super().__init__()
        text_weights = {"embeddings": embeddings, "similarities": similarities, "neighbours": neighbours}
        for name, value in {"words": words, **text_weights, "mlm": mlm}.items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value} must be 0 or greater")
        if not 1 <= layers <= teacher.model.config.depth:
            raise ConfigError(f"layers={layers} must be from 1 to {teacher.model.config.depth}, the teacher's depth")
        compares_texts = any(text_weights.values())
        if compares_texts and teacher.sentence is None:
            raise ConfigError(f"{teacher.source} is not a sentence encoder: set {', '.join(text_weights)} to 0")
        self.teacher, self.layers, self.compares_texts = teacher, layers, compares_texts
        self.words, self.mlm = words, mlm
        self.terms = EmbeddingTerms(embeddings, similarities, neighbours)
        width, teacher_width = model.config.width, teacher.model.config.width
        if words and "words" not in model.auxiliary:
            project = nn.Linear(width, teacher_width, device=model.device)
            nn.init.normal_(project.weight, std=0.02, generator=torch.Generator(model.device).manual_seed(0))
            nn.init.zeros_(project.bias)
            model.auxiliary["words"] = project
        if components is not None:
            model.auxiliary["components"] = components.to(model.device)
        dimension = width if teacher.sentence is None else teacher.sentence.dimension
        if compares_texts and dimension != width and "components" not in model.auxiliary:
            raise ConfigError(f"the teacher's embeddings have dimension {dimension}, the student's {width}")

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        batch, targets, extras = micro_batch.batch, micro_batch.targets, micro_batch.extras
        teacher_batch = extras["teacher"]
        assert isinstance(teacher_batch, Batch)
        states, embeddings = self._run_teacher(teacher_batch)
        hidden = model.hidden(batch)
        total = hidden.new_zeros((), dtype=torch.float32)
        if self.mlm and targets.rows is not None and len(targets.rows):
            table = model.encoder.embeddings.words.weight
            masked = model.head("mlm").fused_linear_cross_entropy(
                hidden[targets.rows], table, targets.values, targets.weights
            )
            total = total + self.mlm * self.mean(masked, "masked")
        word_total = extras["word_total"]
        assert isinstance(word_total, Tensor)
        count = word_total.shape[0]  # its size is the count: reading a value would synchronize the device
        if self.words and count:
            word_ids, teacher_word_ids = extras["words"], extras["teacher_words"]
            assert isinstance(word_ids, Tensor)
            assert isinstance(teacher_word_ids, Tensor)
            ours = model.auxiliary["words"](segment_mean(hidden, word_ids, count)).float()
            distance = 1 - F.cosine_similarity(ours, segment_mean(states, teacher_word_ids, count), dim=-1)
            total = total + self.words * self.mean(distance.sum(), "words")
        if embeddings is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                pooled = segment_mean(hidden, batch.text_of_token(), len(batch))
                if "components" in model.auxiliary:
                    embeddings = model.auxiliary["components"](embeddings)
                total = total + self.mean(self.terms.loss(pooled, embeddings), "texts")
        return total

    @torch.no_grad()
    def _run_teacher(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The teacher's hidden states (T, Dt), and its embeddings (B, Dt) if they are compared."""
        model = self.teacher.model.eval()
        depth = model.config.depth
        summed: Tensor | None = None
        last = None
        for layer, hidden in enumerate(model.encoder.hidden_states(batch)):
            last = hidden
            if self.words and layer > depth - self.layers:
                normalized = F.layer_norm(hidden.float(), hidden.shape[-1:])
                summed = normalized if summed is None else summed + normalized
        assert last is not None
        embeddings = None
        if self.compares_texts and self.teacher.sentence is not None:
            embeddings = self.teacher.sentence(last, batch)
        return last if summed is None else summed, embeddings

    def count(self, example: TrainingExample) -> dict[str, float]:
        """Count words too."""
        return {**super().count(example), "words": float(example.extras["count"])}

    def collate(self, examples: Sequence[TrainingExample]) -> MicroBatch:
        """Concatenate examples for student and teacher, and number words over the micro-batch."""
        micro_batch = super().collate(examples)
        counts = np.array([int(example.extras["count"]) for example in examples])
        offsets = np.cumsum(counts) - counts
        total = int(counts.sum())
        numbered: dict[str, Tensor | Batch] = {}
        for name in ("words", "teacher_words"):
            own = [example.extras[name].astype(np.int64) for example in examples]
            lengths = [len(word_ids) for word_ids in own]
            counted = np.repeat(counts, lengths) > 0  # (T,)
            word_ids = np.concatenate(own)
            shifted = word_ids + np.repeat(offsets, lengths)
            numbered[name] = torch.from_numpy(np.where(counted & (word_ids >= 0), shifted, total))
        teacher = Batch.from_ids([example.extras["teacher"] for example in examples])
        extras = {**numbered, "teacher": teacher, "word_total": torch.zeros(total, dtype=torch.bool)}
        return replace(micro_batch, extras=extras)


def segment_mean(values: Tensor, index: Tensor, count: int) -> Tensor:
    """(T, D) -> (count, D) the mean over the rows of each index; rows with index `count` are ignored."""
    sums = torch.zeros(count + 1, values.shape[1], dtype=torch.float32, device=values.device)
    sums = sums.index_add(0, index, values.float())
    ones = torch.zeros(count + 1, dtype=torch.float32, device=values.device)
    ones = ones.index_add(0, index, torch.ones_like(index, dtype=torch.float32))
    return (sums / ones.clamp(min=1.0)[:, None])[:count]
