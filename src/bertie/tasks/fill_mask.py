"""Words for masked places, and how likely a text is.

Each mask is answered by the window where it has most context on both sides. Several masks are filled each by itself,
with the others still masked. To score a text, each token is masked in turn in the window that answers for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.tasks.base import TOKENS_A_BATCH, FloatArray, Task, TaskInput, at_least_one, listed, owned, reading, singles
from bertie.text.batch import Batch
from bertie.text.encoding import Encoding, IntArray
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a mask."""

    token: str  # as the vocabulary spells it
    id: int
    score: float  # the probability of this token here, among all tokens
    text: str  # as it reads: some vocabularies spell a space as another letter


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask of a text, at `text[start:end]`, with its best candidates."""

    start: int
    end: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A text's masks."""

    masks: tuple[Mask, ...]
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The pseudo-log-likelihood of a text: each token's log-probability with that token masked, added up."""

    log_likelihood: float
    token_log_likelihoods: tuple[float, ...]
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class _Options:
    top_k: int = 5
    allowed: IntArray | None = None  # ids to choose from


class MaskedLM(Task[_Options, Sequence[tuple[int, Mask]], Filled]):
    """Fills masks.

    >>> model = MaskedLM.load("google-bert/bert-base-uncased")                               # doctest: +SKIP
    >>> model.fill(["Paris is the [MASK] of France."])[0].masks[0].candidates[0].token       # doctest: +SKIP
    'capital'
    """

    kind = "mlm"

    def fill(self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None) -> list[Filled]:
        """The best tokens for each mask of each text; only among `candidates`, if given."""
        return list(self.fill_each(texts, top_k=top_k, candidates=candidates))

    def fill_each(
        self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None
    ) -> Iterator[Filled]:
        """As `fill`, one by one."""
        at_least_one(top_k=top_k)
        self._mask_id()
        return self.run(singles(texts, "fill", _Options(top_k, self._ids(candidates))))

    def _ids(self, candidates: Sequence[str] | None) -> IntArray | None:
        if candidates is None:
            return None
        ids = []
        for word in listed(candidates, "candidates=", "words"):
            found = self.tokenizer.id(word)
            if found is None:
                pieces = self.tokenizer.encode(word, special=False).ids
                if len(pieces) != 1:
                    raise InputError(f"candidate {word!r} is {len(pieces)} tokens; a mask is filled by exactly one")
                found = int(pieces[0])
                if found == self.tokenizer.unk_id:
                    raise InputError(f"candidate {word!r} is not in the vocabulary")
            ids.append(found)
        if not ids:
            raise InputError("candidates=[] leaves nothing to choose from")
        return np.array(sorted(set(ids)), dtype=np.int64)

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[_Options]], group: Sequence[Window]
    ) -> Sequence[Sequence[tuple[int, Mask]]]:
        """The masks that each window answers for, with their places: the (V,) logits of all would be too many."""
        at = [np.flatnonzero((window.encoding.ids == self._mask_id()) & window.owned) for window in group]
        starts = np.cumsum([0, *batch.lengths[:-1]])
        places = np.concatenate([start + own for start, own in zip(starts, at, strict=True)])
        rows = torch.from_numpy(places).to(hidden.device)
        # (masks, V), some at a time: of a text full of masks all would be too many.
        scores = (
            row for some in torch.split(rows, 256) for row in self.rows(hidden[some], batch).softmax(-1).cpu().numpy()
        )
        found: list[list[tuple[int, Mask]]] = []
        for ask, window, own in zip(asks, group, at, strict=True):
            found.append([])
            for place in own.tolist():
                start, end = window.encoding.offsets[place].tolist()
                mask = Mask(start, end, self._best(next(scores), ask.options))
                found[-1].append((int(window.places[place]), mask))
        return found

    def decode(
        self, ask: TaskInput[_Options], found: Sequence[Window], outputs: Sequence[Sequence[tuple[int, Mask]]]
    ) -> Filled:
        """All windows' masks, in order."""
        masks = sorted((one for output in outputs for one in output), key=lambda one: one[0])
        if not masks:
            where = "text" if self.overflow != "truncate" else "beginning of the text, which is all that was read"
            raise InputError(f"{ask.name}: no {self.tokenizer.mask_token} in the {where}: {ask.texts[0][:60]!r}")
        return Filled(tuple(mask for _, mask in masks), **reading(found))

    def _best(self, scores: FloatArray, options: _Options) -> tuple[Candidate, ...]:
        # Tables of embeddings are often rounded up: past the vocabulary there are ids without a token.
        ids = np.arange(min(len(scores), self.tokenizer.vocab_size)) if options.allowed is None else options.allowed
        found = scores[ids]
        if len(found) > options.top_k:  # to sort a whole vocabulary takes longer than the model does
            kept = found >= np.partition(found, -options.top_k)[-options.top_k]
            ids, found = ids[kept], found[kept]
        order = ids[np.argsort(-found, kind="stable")][: options.top_k].tolist()
        decode, token = self.tokenizer.decode, self.tokenizer.token
        return tuple(Candidate(token(i), i, float(scores[i]), decode([i], skip_special=False)) for i in order)

    # --- how likely is a text? ---

    def score(self, texts: Iterable[str]) -> list[Likelihood]:
        """The pseudo-log-likelihood of each text: every token masked in turn, in the window that answers for it."""
        self._mask_id()
        return [self._score(ask) for ask in singles(texts, "score", _Options())]

    @torch.inference_mode()
    def _score(self, ask: TaskInput[_Options]) -> Likelihood:
        found = self.windows(ask, self.tokenizer.encode(ask.texts[0]))
        _, scores = owned(found, [self._token_scores(window) for window in found])
        return Likelihood(float(scores.sum(dtype=np.float64)), tuple(scores.tolist()), **reading(found))

    def _token_scores(self, window: Window) -> FloatArray:
        """(n,) the log-probability of each token that the window answers for, with that token masked."""
        scores = np.zeros(len(window), dtype=np.float32)
        places = iter(np.flatnonzero(window.owned & (window.encoding.sequence_ids >= 0)).tolist())
        while chunk := list(islice(places, max(1, TOKENS_A_BATCH // len(window)))):
            batch = Batch.from_encodings([self._masked(window.encoding, at) for at in chunk]).to(self.model.device)
            rows = torch.tensor([i * len(window) + at for i, at in enumerate(chunk)], device=self.model.device)
            logits = self.rows(self.model.hidden(batch, self.head)[rows], batch)  # (chunk, V)
            truth = torch.from_numpy(window.encoding.ids[chunk]).to(logits.device)
            scores[chunk] = logits.log_softmax(-1).gather(1, truth[:, None])[:, 0].cpu().numpy()
        return scores

    def _masked(self, encoding: Encoding, at: int) -> Encoding:
        ids = encoding.ids.copy()
        ids[at] = self._mask_id()
        return replace(encoding, ids=ids)

    def _mask_id(self) -> int:
        if self.tokenizer.mask_id is None:
            raise InputError(f"{self.checkpoint.source}'s tokenizer has no mask token")
        return self.tokenizer.mask_id
