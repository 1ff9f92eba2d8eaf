"""Words for masked places, and how likely a text is.

Each mask is answered by the window where it has most context on both sides. Several masks are filled each by itself,
with the others still masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.tasks.base import TOKENS_A_BATCH, FloatArray, Task, log_softmax, owned, reading, softmax
from bertie.text.batch import Batch
from bertie.text.tokenizer import Encoding
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token for a mask."""

    token: str
    id: int
    score: float  # the probability of this token here, among all tokens


@dataclass(frozen=True, slots=True)
class Mask:
    """One mask of a text, with its best candidates."""

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


class MaskedLM(Task[str, Filled]):
    """Fills masks.

    >>> model = MaskedLM.load("google-bert/bert-base-uncased")                               # doctest: +SKIP
    >>> model.fill(["Paris is the [MASK] of France."])[0].masks[0].candidates[0].token       # doctest: +SKIP
    'capital'
    """

    head = "mlm"
    _top_k = 5
    _allowed: np.ndarray | None = None

    def fill(self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None) -> list[Filled]:
        """The best tokens for each mask of each text; only among `candidates`, if given."""
        return list(self.fill_each(texts, top_k=top_k, candidates=candidates))

    def fill_each(
        self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None
    ) -> Iterator[Filled]:
        """As `fill`, one by one."""
        if isinstance(texts, str):
            raise InputError("fill takes a list of texts; put a single text into a list")
        if top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        self._mask_id()
        self._top_k, self._allowed = top_k, self._ids(candidates)
        return self.run(texts)

    def _ids(self, candidates: Sequence[str] | None) -> np.ndarray | None:
        if candidates is None:
            return None
        ids = []
        for word in candidates:
            found = self.tokenizer.id(word)
            if found is None:
                pieces = self.tokenizer.encode(word, special=False).ids
                if len(pieces) != 1:
                    raise InputError(f"candidate {word!r} is {len(pieces)} tokens; a mask is filled by exactly one")
                found = int(pieces[0])
            ids.append(found)
        if not ids:
            raise InputError("candidates=[] leaves nothing to choose from")
        return np.array(sorted(set(ids)))

    def texts(self, item: str) -> tuple[str, ...]:
        """A text is read as it is."""
        return (item,)

    def outputs(self, hidden: Tensor, batch: Batch, group: Sequence[Window]) -> Sequence[FloatArray]:
        """(masks, V) logits of each window, at its masks alone."""
        is_mask = batch.ids == self.tokenizer.mask_id
        logits = self.rows(hidden[is_mask], batch).cpu().numpy()
        counts = [int((window.encoding.ids == self.tokenizer.mask_id).sum()) for window in group]
        return np.split(logits, np.cumsum(counts)[:-1])

    def decode(self, item: str, found: Sequence[Window], outputs: Sequence[FloatArray]) -> Filled:
        """The best candidates of each mask, from the window that answers for it."""
        masks = []
        for window, logits in zip(found, outputs, strict=True):
            at = np.flatnonzero(window.encoding.ids == self.tokenizer.mask_id)
            for place, row in zip(at, logits, strict=True):
                if window.owned[place]:
                    start, end = window.encoding.offsets[place]
                    masks.append((int(window.places[place]), Mask(int(start), int(end), self._best(row))))
        if not masks:
            raise InputError(f"no {self.tokenizer.mask_token} in the text {item[:60]!r}")
        return Filled(tuple(mask for _, mask in sorted(masks, key=lambda one: one[0])), **reading(found))

    def _best(self, logits: FloatArray) -> tuple[Candidate, ...]:
        scores = softmax(logits)
        ids = np.arange(len(scores)) if self._allowed is None else self._allowed
        order = ids[np.argsort(-scores[ids], kind="stable")][: self._top_k]
        return tuple(Candidate(self.tokenizer.token(int(i)), int(i), float(scores[i])) for i in order)

    # --- how likely is a text? ---

    def score(self, texts: Iterable[str]) -> list[Likelihood]:
        """The pseudo-log-likelihood of each text: every token masked in turn, in the window that answers for it."""
        return [self._score(index, text) for index, text in enumerate(texts)]

    @torch.inference_mode()
    def _score(self, index: int, text: str) -> Likelihood:
        found = self.windows(index, self.tokenizer.encode(text), (text,))
        rows = []
        for window in found:
            row = np.zeros((len(window), 1), dtype=np.float32)
            places = iter(np.flatnonzero(window.owned & (window.encoding.sources >= 0)).tolist())
            at_once = max(1, TOKENS_A_BATCH // len(window))
            while chunk := list(islice(places, at_once)):
                batch = Batch.from_encodings([self._masked(window.encoding, at) for at in chunk])
                hidden = self.model.hidden(batch.to(self.model.device), self.head)
                picked = hidden[[i * len(window) + at for i, at in enumerate(chunk)]]
                logits = log_softmax(self.rows(picked, batch).cpu().numpy())
                row[chunk, 0] = logits[np.arange(len(chunk)), window.encoding.ids[chunk]]
            rows.append(row)
        whole = owned(found, rows)[found[0].whole.sources >= 0, 0]
        known = [float(x) for x in whole if not np.isnan(x)]
        return Likelihood(sum(known), tuple(known), **reading(found))

    def _masked(self, encoding: Encoding, at: int) -> Encoding:
        ids = encoding.ids.copy()
        ids[at] = self._mask_id()
        return replace(encoding, ids=ids)

    def _mask_id(self) -> int:
        if self.tokenizer.mask_id is None:
            raise InputError(f"{self.checkpoint.source}'s tokenizer has no mask token")
        return self.tokenizer.mask_id
