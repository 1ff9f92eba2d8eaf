"""Fill-mask, and the pseudo-log-likelihood of texts, with a masked language model.

Each mask is predicted in the window where it has the most context on both sides. Several masks are predicted
independently, with the others still masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import check_list, check_positive, text_inputs
from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.pipeline import CPU_BATCH_TOKENS
from bertie.tasks.base import Task
from bertie.tasks.decoding import owned_rows, read_counts
from bertie.tasks.results import FillMaskResult, MaskPrediction, PseudoLikelihood, TokenCandidate
from bertie.text.batch import Batch
from bertie.text.encoding import IntArray
from bertie.text.windows import Window


@dataclass(frozen=True, slots=True)
class _Options:
    top_k: int = 5
    allowed: IntArray | None = None  # ids of candidates


class _MaskQuery(NamedTuple):
    """The masks of a window, and what is asked about them."""

    positions: IntArray
    top_k: int
    allowed: IntArray | None


class _TopTokens(NamedTuple):
    """(masks, k) the most probable tokens for each mask of a window."""

    ids: IntArray
    scores: FloatArray


class MaskedLM(Task[_Options, _TopTokens, FillMaskResult]):
    """Predicts masked tokens.

    >>> model = MaskedLM.load("google-bert/bert-base-uncased")                               # doctest: +SKIP
    >>> model.fill(["Paris is the [MASK] of France."])[0].masks[0].candidates[0].token       # doctest: +SKIP
    'capital'
    """

    kind = "mlm"

    def fill(
        self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None
    ) -> list[FillMaskResult]:
        """Predict the `top_k` most probable tokens for each mask; only among `candidates`, if given."""
        return list(self.fill_each(texts, top_k=top_k, candidates=candidates))

    def fill_each(
        self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None
    ) -> Iterator[FillMaskResult]:
        """As `fill`, one by one."""
        check_positive(top_k=top_k)
        self._mask_id()
        return self.run(text_inputs(texts, "fill", _Options(top_k, self._candidate_ids(candidates))), texts)

    def _candidate_ids(self, candidates: Sequence[str] | None) -> IntArray | None:
        if candidates is None:
            return None
        ids = []
        for word in check_list(candidates, "candidates=", "words"):
            token_id = self.tokenizer.id(word)
            if token_id is None:
                tokens = self.tokenizer.encode(word, special=False).ids
                if len(tokens) != 1:
                    raise InputError(f"candidate {word!r} is {len(tokens)} tokens; a mask is filled by exactly one")
                token_id = int(tokens[0])
                if token_id == self.tokenizer.unk_id:
                    raise InputError(f"candidate {word!r} is not in the vocabulary")
            ids.append(token_id)
        if not ids:
            raise InputError("candidates=[] leaves nothing to choose from")
        return np.array(sorted(set(ids)), dtype=np.int64)

    def parameters(self, chunk: Chunk[_Options]) -> Sequence[_MaskQuery]:
        """The positions of the masks that each window owns."""
        mask = self._mask_id()
        return [
            _MaskQuery(
                np.flatnonzero((window.encoding.ids == mask) & window.owned),
                text.input.options.top_k,
                text.input.options.allowed,
            )
            for text in chunk
            for window in text.windows
        ]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[_MaskQuery] | None
    ) -> Sequence[_TopTokens]:
        """The most probable tokens for the masks of each window; all logits (masks, V) would be too many to keep."""
        assert parameters is not None
        starts = np.cumsum([0, *batch.lengths[:-1]])
        rows = np.concatenate([start + query.positions for start, query in zip(starts, parameters, strict=True)])
        masked = hidden[torch.from_numpy(rows).to(hidden.device)]  # (masks, D)
        # Some at a time, for texts full of masks.
        scores = (row for block in torch.split(masked, 256) for row in self._probabilities(model, block))
        return [self._top_tokens(query, list(islice(scores, len(query.positions)))) for query in parameters]

    def _probabilities(self, model: Model, masked: Tensor) -> FloatArray:
        """(masks, D) -> (masks, V)."""
        assert self.head is not None
        logits = model.head(self.head).vocabulary_logits(masked, model.encoder.embeddings.words.weight)
        probabilities: FloatArray = logits.float().softmax(-1).cpu().numpy()
        return probabilities

    def _top_tokens(self, query: _MaskQuery, rows: Sequence[FloatArray]) -> _TopTokens:
        ids, scores = [], []
        for row in rows:
            # Embedding tables are often padded: ids beyond the vocabulary have no token.
            allowed = np.arange(min(len(row), self.tokenizer.vocab_size)) if query.allowed is None else query.allowed
            values = row[allowed]
            if len(values) > query.top_k:  # sorting a whole vocabulary would take longer than the model
                kept = values >= np.partition(values, -query.top_k)[-query.top_k]
                allowed, values = allowed[kept], values[kept]
            best = np.argsort(-values, kind="stable")[: query.top_k]
            ids.append(allowed[best])
            scores.append(values[best])
        return _TopTokens(np.array(ids), np.array(scores))

    def decode(self, text: WindowedText[_Options], outputs: Sequence[_TopTokens]) -> FillMaskResult:
        """The predictions of all windows, in the order of the masks."""
        masks: list[tuple[int, MaskPrediction]] = []
        for window, output in zip(text.windows, outputs, strict=True):
            positions = np.flatnonzero((window.encoding.ids == self._mask_id()) & window.owned).tolist()
            for position, ids, scores in zip(positions, output.ids.tolist(), output.scores.tolist(), strict=True):
                start, end = window.encoding.offsets[position].tolist()
                candidates = tuple(self._candidate(i, score) for i, score in zip(ids, scores, strict=True))
                masks.append((int(window.indices[position]), MaskPrediction(start, end, candidates)))
        if not masks:
            where = "text" if self.overflow != "truncate" else "beginning of the text, which is all that was read"
            content = text.input.texts[0]
            raise InputError(f"{text.input.name}: no {self.tokenizer.mask_token} in the {where}: {content[:60]!r}")
        masks.sort(key=lambda pair: pair[0])
        return FillMaskResult(tuple(mask for _, mask in masks), **text.counts())

    def _candidate(self, id: int, score: float) -> TokenCandidate:
        return TokenCandidate(self.tokenizer.token(id), id, score, self.tokenizer.decode([id], skip_special=False))

    # --- pseudo-log-likelihood ---

    def pseudo_log_likelihood(self, texts: Iterable[str]) -> list[PseudoLikelihood]:
        """Score texts by masking every token in turn, in the window that owns it (Salazar et al. 2020)."""
        self._mask_id()
        inputs = text_inputs(texts, "pseudo_log_likelihood", _Options())
        return [self._likelihood(text) for text in self.pipeline.read(inputs)]

    @torch.inference_mode()
    def _likelihood(self, text: WindowedText[_Options]) -> PseudoLikelihood:
        windows = text.windows
        _, scores = owned_rows(windows, [self._token_scores(window) for window in windows])
        return PseudoLikelihood(float(scores.sum(dtype=np.float64)), tuple(scores.tolist()), **read_counts(windows))

    def _token_scores(self, window: Window) -> FloatArray:
        """(n,) the log-probability of each token that the window owns, with that token masked."""
        scores = np.zeros(len(window), dtype=np.float32)
        encoding, device = window.encoding, self.model.device
        positions = iter(np.flatnonzero(window.owned & (encoding.sequence_ids >= 0)).tolist())
        while chunk := list(islice(positions, max(1, CPU_BATCH_TOKENS // len(window)))):
            ids = np.repeat(encoding.ids[None], len(chunk), axis=0)
            ids[np.arange(len(chunk)), chunk] = self._mask_id()
            batch = Batch.from_ids(list(ids), [encoding.segments] * len(chunk)).to(device)
            rows = torch.tensor([i * len(window) + position for i, position in enumerate(chunk)], device=device)
            logits = self.head_outputs(self.model, self.model.hidden(batch, self.head)[rows], batch)  # (chunk, V)
            targets = torch.from_numpy(encoding.ids[chunk]).to(device)
            scores[chunk] = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu().numpy()
        return scores

    def _mask_id(self) -> int:
        if self.tokenizer.mask_id is None:
            raise InputError(f"{self.checkpoint.source}'s tokenizer has no mask token")
        return self.tokenizer.mask_id
