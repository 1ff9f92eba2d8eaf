"""A sentence encoder as teacher of a student with words of its own: states word by word, and a vector a text.

The two may cut words into other pieces, but must agree on what a word is (WordPieces of one normalization do). Each
reads the same documents from a corpus of its own, made by `bertie corpus` with its tokenizer from the same sources;
word k of a document is then the same word in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
from bertie.training.pretrain.corpus import Corpus, Numbers
from bertie.training.pretrain.masking import Masking, seeded
from bertie.training.pretrain.mlm import items_of
from bertie.training.pretrain.packing import SPECIAL, Packing, flat
from bertie.training.sampling import TrainingTask


class Aligned:
    """Two corpora of the same documents, cut into pieces of the same words, none longer than `max_length` in either.

    Documents in which the two do not count as many words are left out, as are words that are longer than the max_length.
    Memory: eight bytes a word, for each of the two.
    """

    def __init__(self, ours: Corpus, theirs: Corpus, max_length: int) -> None:
        if max_length <= SPECIAL:
            raise InputError(
                f"max_length={max_length} must be above {SPECIAL}: that many special tokens stand around each piece"
            )
        if len(ours) != len(theirs):
            raise InputError(
                f"{ours.folder} has {len(ours):,} documents and {theirs.folder} has {len(theirs):,}; make both with "
                "`bertie corpus` from the same sources with the same settings"
            )
        self.ours, self.theirs, self.max_length = ours, theirs, max_length
        both = (ours, theirs)
        borders = [_word_borders(corpus) for corpus in both]  # (words + 1,) counted through all documents
        firsts = [np.searchsorted(b, c.starts) for b, c in zip(borders, both, strict=True)]  # (documents + 1,)
        counts = np.diff(firsts[0])
        same = counts == np.diff(firsts[1])
        self.left_out = int((~same).sum())
        self.documents, word, end = _cut(borders, firsts, np.where(same, counts, 0), max_length - SPECIAL)
        if not len(self.documents):
            raise InputError(f"{ours.folder} and {theirs.folder} have no document with the same words")
        self.spans = []  # of each corpus: the first token of each piece in its document, and how many there are
        for corpus, border, first in zip(both, borders, firsts, strict=True):
            start, stop = (border[first[self.documents] + one] for one in (word, end))
            self.spans.append((start - corpus.starts[self.documents], (stop - start).astype(np.int32)))

    def __len__(self) -> int:
        """How many pieces there are."""
        return len(self.documents)

    def read(self, pieces: Numbers) -> list[tuple[Any, Any, Any, Any]]:
        """Pieces, flat as in `Packed.batch`: ours, then theirs."""
        return [
            flat(corpus, self.documents[pieces], start[pieces], sizes[pieces])
            for corpus, (start, sizes) in zip((self.ours, self.theirs), self.spans, strict=True)
        ]


def _word_borders(corpus: Corpus) -> Numbers:
    """(words + 1,) where words begin, counted through all documents, and the end."""
    found = [np.flatnonzero(bits) + base for bits, base in corpus.word_bits()]
    return np.concatenate([*found, np.array([corpus.tokens])])


def _cut(
    borders: Sequence[Numbers], firsts: Sequence[Numbers], counts: Numbers, room: int
) -> tuple[Numbers, Numbers, Numbers]:
    """Pieces of as many words as fit in both: document, first word in it, end. All documents are cut side by side."""
    documents = np.flatnonzero(counts)
    at = np.zeros_like(documents)
    found = []
    while len(documents):
        end = counts[documents]
        for border, first in zip(borders, firsts, strict=True):
            begin = first[documents]
            end = np.minimum(end, np.searchsorted(border, border[begin + at] + room, "right") - 1 - begin)
        fits = end > at  # else its first word is too long, and is left out
        found.append(np.stack([documents, at, end])[:, fits])
        at = np.where(fits, end, at + 1)
        more = at < counts[documents]
        documents, at = documents[more], at[more]
    pieces = np.concatenate([np.zeros((3, 0), np.int64), *found], axis=1)
    return pieces[0], pieces[1], pieces[2]


class SentenceDistillationSampler:
    """Steps over aligned pieces: what the student reads, some of it hidden if asked, and what its teacher reads."""

    single_head = False

    def __init__(
        self,
        aligned: Aligned,
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
            raise InputError("the tokenizer has no mask token, and hiding needs one")
        self.aligned, self.total_steps, self.masking, self.seed = aligned, steps, masking, seed
        self._mask_id, self._vocab = tokenizer.mask_id or 0, tokenizer.vocab_size
        self._never = aligned.ours.about["tokenizer"]["special"]
        self._source = TrainingTask("mlm", objective, ())
        self._packing = Packing(aligned.spans[0][1] + SPECIAL, budget, seed)
        self.heads, self.epoch_starts = ["mlm"] if masking is not None else [], [0, steps]

    def epoch_of(self, step: int) -> int:
        """Nothing depends on it."""
        return 0

    def epochs_done(self, step: int) -> float:
        """How many epochs are done after a number of steps."""
        return self._packing.part(step)

    def schedule_position(self, step: int) -> float:
        """Steps are alike."""
        return step

    def fingerprint(self) -> Any:
        """Which pieces, and what is hidden of them."""
        masking = None if self.masking is None else [self.masking.rate, self.masking.mask, self.masking.unit]
        return [self.total_steps, len(self.aligned), self.aligned.max_length, self._packing.budget, self.seed, masking]

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        """The pieces of a step."""
        (ids, cu, special, words), (ids_t, cu_t, _, words_t) = self.aligned.read(self._packing.pieces(step))
        places: Any = np.zeros(0, np.int64)
        masked, targets = ids, places
        if self.masking is not None:
            rng = seeded(self.seed, epoch=0, index=step)
            places = self.masking.choose(special, words, cu, rng)
            masked, targets = self.masking.apply(
                ids, places, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._never
            )
        ours, counts = _numbered(words, cu)
        theirs, counts_t = _numbered(words_t, cu_t)
        items = items_of(masked, cu, places, targets, {"words": ours})
        out = []
        for b, item in enumerate(items):
            low, high = int(cu_t[b]), int(cu_t[b + 1])
            own = item.extras["words"]
            more = {
                "words": own,
                "teacher": ids_t[low:high],
                "teacher_words": theirs[low:high],
                # Two corpora may disagree where a text spells out special tokens: then only its vector is compared.
                "count": counts[b] if counts[b] == counts_t[b] else np.int64(0),
            }
            out.append(replace(item, extras=more))
        return self._source, out


def _numbered(words: NDArray[np.bool_], cu: NDArray[np.int32]) -> tuple[Numbers, Numbers]:
    """(T,) the number of each token's word in its piece, −1 for the special ones around it; (B,) how many there are."""
    inner = np.ones(len(words), np.bool_)
    inner[cu[:-1]] = inner[cu[1:] - 1] = False
    total = np.cumsum(words & inner)
    before = total[cu[:-1]]  # the first token of a piece is no word
    number = np.where(inner, total - np.repeat(before, np.diff(cu)) - 1, -1)
    return number, total[cu[1:] - 1] - before


class Basis(nn.Module):
    """The directions in which a teacher's vectors vary most, as many as the student's vectors have."""

    basis: Tensor

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis)

    @classmethod
    def of(cls, vectors: Tensor, width: int) -> Basis:
        """From (N, D) vectors, uncentred: inner products are what is to be kept."""
        wide = vectors.double()
        _, directions = torch.linalg.eigh(wide.T @ wide)
        return cls(directions[:, -width:].flip(1).float().contiguous())

    def turned(self, vectors: Tensor, towards: Tensor) -> Basis:
        """The same directions, turned so that (N, D) vectors come to lie as near as may be to (N, width) others.

        Inner products stay as they are. A student that has been taught before has its vectors in directions of its own:
        those of a basis found anew are others, even if of the same teacher, and it would have to turn all of them.
        """
        wide = self.basis.double()
        product = F.normalize(vectors.double() @ wide, dim=-1).T @ F.normalize(towards.double(), dim=-1)
        left, _, right = torch.linalg.svd(product, full_matrices=False)  # orthogonal Procrustes (Schönemann, 1966)
        return Basis((wide @ left @ right).float().contiguous())

    def forward(self, vectors: Tensor) -> Tensor:
        """(B, D) -> (B, width), of length 1."""
        return F.normalize(vectors.float() @ self.basis, dim=-1)


class SentenceDistillation(ModelObjective):
    """What a sentence encoder makes of a text, to be made by the student; a weighted sum of means:

        words           over words    1 − cos(P h, g)    h the student's state of a word, g the teacher's, P learned
        vectors         over texts    1 − cos(s, t)      s the mean of the student's states, t the teacher's vector
        similarities    over pairs    (cos(sᵢ, sⱼ) − cos(tᵢ, tⱼ))², of a micro-batch
        neighbours      over texts    `losses.neighbours`: who is near to whom, of a micro-batch
        mlm             over hidden tokens, the cross-entropy, where the plan hides any

    A word's state is the mean over its tokens; the teacher's is the mean of its upper `layers`, each normalized. Where
    the teacher's vectors are wider than the student's they are turned to the directions in which they vary most, and of
    these to where the student's vectors are.
    """

    def __init__(
        self,
        model: Model,
        teacher: Checkpoint,
        *,
        words: float = 1.0,
        vectors: float = 1.0,
        similarities: float = 0.0,
        neighbours: float = 0.0,
        mlm: float = 1.0,
        layers: int = 1,
        basis: Basis | None = None,
    ) -> None:
        super().__init__()
        of_texts = {"vectors": vectors, "similarities": similarities, "neighbours": neighbours}
        for name, value in {"words": words, **of_texts, "mlm": mlm}.items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"{name}={value} must be 0 or greater")
        if not 1 <= layers <= teacher.model.config.depth:
            raise ConfigError(f"layers={layers} must be from 1 to {teacher.model.config.depth}, the teacher's depth")
        asks_texts = any(of_texts.values())
        if asks_texts and teacher.sentence is None:
            raise ConfigError(f"{teacher.source} is no sentence encoder: set {', '.join(of_texts)} to 0")
        self.teacher, self.layers, self.asks_texts = teacher, layers, asks_texts
        self.words, self.mlm = words, mlm
        self.vectors, self.similarities, self.neighbours = vectors, similarities, neighbours
        ours, theirs = model.config.width, teacher.model.config.width
        if words and "words" not in model.auxiliary:
            project = nn.Linear(ours, theirs, device=model.device)
            nn.init.normal_(project.weight, std=0.02, generator=torch.Generator(model.device).manual_seed(0))
            nn.init.zeros_(project.bias)
            model.auxiliary["words"] = project
        if basis is not None:
            model.auxiliary["basis"] = basis.to(model.device)
        has = ours if teacher.sentence is None else teacher.sentence.dimension
        if asks_texts and has != ours and "basis" not in model.auxiliary:
            raise ConfigError(f"the teacher's vectors have {has} numbers, the student's {ours}")

    def loss(self, model: Model, mini: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        batch, theirs = mini.batch, mini.extras["teacher"]
        numbers, numbers_t = mini.extras["words"], mini.extras["teacher_words"]
        assert isinstance(theirs, Batch)
        assert isinstance(numbers, Tensor)
        assert isinstance(numbers_t, Tensor)
        states, vectors = self._asked(theirs)
        hidden = model.hidden(batch)
        total = hidden.new_zeros((), dtype=torch.float32)
        rows = mini.targets.rows
        if self.mlm and rows is not None and len(rows):
            words = model.encoder.embeddings.words.weight
            lost = model.head("mlm").fused_linear_cross_entropy(
                hidden[rows], words, mini.targets.values, mini.targets.weights
            )
            total = total + self.mlm * self.mean(lost, "masked")
        count = self._words_of(mini)
        if self.words and count:
            project = model.auxiliary["words"]
            ours = project(means(hidden, numbers, count)).float()
            apart = 1 - F.cosine_similarity(ours, means(states, numbers_t, count), dim=-1)
            total = total + self.words * self.mean(apart.sum(), "words")
        if vectors is not None:
            with torch.autocast(hidden.device.type, enabled=False):
                owner = batch.text_of_token()
                s = F.normalize(means(hidden, owner, len(batch)), dim=-1)
                t = (
                    model.auxiliary["basis"](vectors)
                    if "basis" in model.auxiliary
                    else F.normalize(vectors.float(), dim=-1)
                )
                total = total + self.vectors * self.mean((1 - (s * t).sum(-1)).sum(), "texts")
                if self.similarities:
                    apart = ((s @ s.T - t @ t.T) ** 2).mean() * len(batch)
                    total = total + self.similarities * self.mean(apart, "texts")
                if self.neighbours and len(batch) > 1:
                    total = total + self.neighbours * self.mean(similarity_distillation(s, t) * len(batch), "texts")
        return total

    @torch.no_grad()
    def _asked(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The teacher's states (T, Dt), and its vectors (B, Dt) if they are wanted."""
        model = self.teacher.model.eval()
        depth = model.config.depth
        kept: Tensor | None = None
        last = None
        for layer, hidden in enumerate(model.encoder.hidden_states(batch)):
            last = hidden
            if self.words and layer > depth - self.layers:
                one = F.layer_norm(hidden.float(), hidden.shape[-1:])
                kept = one if kept is None else kept + one
        assert last is not None
        vectors = None
        if self.asks_texts and self.teacher.sentence is not None:
            vectors = self.teacher.sentence(last, batch)
        return last if kept is None else kept, vectors

    @staticmethod
    def _words_of(mini: MicroBatch) -> int:
        total = mini.extras["word_total"]
        assert isinstance(total, Tensor)
        return total.shape[0]  # its size is the number: the device is not asked

    def count(self, item: TrainingExample) -> dict[str, float]:
        """Words too."""
        return {**super().count(item), "words": float(item.extras["count"])}

    def collate(self, items: Sequence[TrainingExample]) -> MicroBatch:
        """Lay items end to end, for both."""
        mini = super().collate(items)
        counts = np.array([int(item.extras["count"]) for item in items])
        offsets = np.cumsum(counts) - counts
        total = int(counts.sum())
        numbers: dict[str, Tensor | Batch] = {}
        for name in ("words", "teacher_words"):
            own = [item.extras[name].astype(np.int64) for item in items]
            counted = np.repeat(counts, [len(one) for one in own]) > 0  # (T,)
            number = np.concatenate(own)
            moved = number + np.repeat(offsets, [len(one) for one in own])
            numbers[name] = torch.from_numpy(np.where(counted & (number >= 0), moved, total))
        teacher = Batch.from_ids([item.extras["teacher"] for item in items])
        return replace(mini, extras={**numbers, "teacher": teacher, "word_total": torch.zeros(total, dtype=torch.bool)})


def means(values: Tensor, index: Tensor, count: int) -> Tensor:
    """(T, D) -> (count, D), the mean over the rows of each index; those of `count` itself belong to none."""
    sums = torch.zeros(count + 1, values.shape[1], dtype=torch.float32, device=values.device)
    sums = sums.index_add(0, index, values.float())
    ones = torch.zeros(count + 1, dtype=torch.float32, device=values.device)
    ones = ones.index_add(0, index, torch.ones_like(index, dtype=torch.float32))
    return (sums / ones.clamp(min=1.0)[:, None])[:count]
