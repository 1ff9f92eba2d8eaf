"""Fill-mask, and the pseudo-log-likelihood of texts, with a masked language model.

Each mask is predicted in the window where it has the most context on both sides. Several masks are predicted
independently, with the others still masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby, islice
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import check_list, check_positive, text_inputs
from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.pipeline import CPU_BATCH_TOKENS
from bertie.pipeline.reporting import report
from bertie.tasks.base import Task
from bertie.tasks.decoding import owned_rows, read_counts
from bertie.tasks.results import FillMaskResult, MaskPrediction, PseudoLikelihood, TokenCandidate
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings, IntArray
from bertie.text.windows import Window

MASK_ROWS = 64  # masks that are predicted at a time
CANDIDATES_PER_TOKEN = 64  # candidates that take as long to return as a token takes to read, roughly


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

    @overload
    def fill(  # type: ignore[overload-overlap]
        self, texts: str, *, top_k: int = 5, candidates: Sequence[str] | None = None, progress: bool | None = None
    ) -> FillMaskResult: ...
    @overload
    def fill(
        self,
        texts: Iterable[str],
        *,
        top_k: int = 5,
        candidates: Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[FillMaskResult]: ...
    @explain_arguments
    def fill(
        self, texts: Any, *, top_k: int = 5, candidates: Sequence[str] | None = None, progress: bool | None = None
    ) -> Any:
        """Predict the `top_k` most probable tokens for each mask; only among `candidates`, if given.

        A single text has a single result. `progress`: whether to show a progress bar; None: on a terminal or in a
        notebook.
        """
        each = partial(self.fill_each, top_k=top_k, candidates=candidates)
        return self.collect(texts, each, "fill", progress)

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

    def output_costs(self, windows: Encodings, parameters: Sequence[_MaskQuery] | None) -> Sequence[int]:
        """A mask's logits over the vocabulary take about as long as a token, and its candidates add to that."""
        assert parameters is not None
        return [len(q.positions) * (1 + q.top_k // CANDIDATES_PER_TOKEN) for q in parameters]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[_MaskQuery] | None
    ) -> Sequence[_TopTokens]:
        """The most probable tokens for the masks of each window; all logits (masks, V) would be too many to keep."""
        assert parameters is not None
        starts = np.cumsum([0, *batch.lengths[:-1]])
        rows = np.concatenate([start + query.positions for start, query in zip(starts, parameters, strict=True)])
        masked = hidden[torch.from_numpy(rows).to(hidden.device)]  # (masks, D)
        outputs: list[_TopTokens] = []
        first = 0
        for _, same in groupby(parameters, key=lambda query: (query.top_k, id(query.allowed))):
            queries = list(same)
            ends = np.cumsum([len(query.positions) for query in queries])
            tops = [_TopTokens(np.empty((0, 0), np.int64), np.empty((0, 0), np.float32))][: int(not ends[-1])]
            for block in torch.split(masked[first : first + ends[-1]], MASK_ROWS) if ends[-1] else ():
                self.pipeline.check()
                tops.append(self._top_tokens(queries[0], self._probabilities(model, block)))
            ids, scores = (np.concatenate(parts) for parts in zip(*tops, strict=True))
            outputs += map(_TopTokens, np.split(ids, ends[:-1]), np.split(scores, ends[:-1]))
            first += int(ends[-1])
        return outputs

    def _probabilities(self, model: Model, masked: Tensor) -> Tensor:
        """(masks, D) -> (masks, V)."""
        assert self.head is not None
        logits = model.head(self.head).vocabulary_logits(masked, model.encoder.embeddings.words.weight)
        # Embedding tables are often padded: ids beyond the vocabulary have no token.
        return logits.float().softmax(-1)[:, : self.tokenizer.vocab_size]

    def _top_tokens(self, query: _MaskQuery, probabilities: Tensor) -> _TopTokens:
        """The most probable tokens of each row of (masks, V), equally probable ones by id."""
        if query.allowed is not None:
            probabilities = probabilities[:, torch.from_numpy(query.allowed).to(probabilities.device)]
        k = min(query.top_k, probabilities.shape[1])
        values, indices = probabilities.topk(k)
        tied = (probabilities >= values[:, -1:]).sum(1) > k  # other tokens are as probable as the last one
        scores, ids = values.cpu().numpy(), indices.cpu().numpy()
        for row in tied.nonzero()[:, 0].tolist():
            all_scores = probabilities[row].cpu().numpy()
            ids[row] = np.argsort(-all_scores, kind="stable")[:k]
            scores[row] = all_scores[ids[row]]
        order = np.lexsort((ids, -scores))
        ids, scores = np.take_along_axis(ids, order, 1), np.take_along_axis(scores, order, 1)
        return _TopTokens(ids if query.allowed is None else query.allowed[ids], scores)

    def decode(self, text: WindowedText[_Options], outputs: Sequence[_TopTokens]) -> FillMaskResult:
        """The predictions of all windows, in the order of the masks."""
        masks: list[tuple[int, MaskPrediction]] = []
        for window, output in zip(text.windows, outputs, strict=True):
            positions = np.flatnonzero((window.encoding.ids == self._mask_id()) & window.owned)
            spans, tokens = window.encoding.offsets[positions].tolist(), window.indices[positions].tolist()
            for (start, end), token, ids, scores in zip(spans, tokens, output.ids, output.scores, strict=True):
                self.pipeline.check()
                masks.append((token, MaskPrediction(start, end, self._candidates(ids.tolist(), scores.tolist()))))
        if not masks:
            where = "text" if self.overflow != "truncate" else "beginning of the text, which is all that was read"
            content = text.input.texts[0]
            raise InputError(f"{text.input.name}: no {self.tokenizer.mask_token} in the {where}: {content[:60]!r}")
        masks.sort(key=lambda pair: pair[0])
        return FillMaskResult(tuple(mask for _, mask in masks), **text.counts())

    def _candidates(self, ids: Sequence[int], scores: Sequence[float]) -> tuple[TokenCandidate, ...]:
        strings = self._strings
        for id in ids:
            if id not in strings:
                strings[id] = self.tokenizer.token(id), self.tokenizer.decode([id], skip_special=False)
        return tuple(
            TokenCandidate(token, id, score, text)
            for id, score, (token, text) in zip(ids, scores, map(strings.__getitem__, ids), strict=True)
        )

    @cached_property
    def _strings(self) -> dict[int, tuple[str, str]]:
        """Tokens by id, and the text that each decodes to; filled as they occur, at most with the vocabulary."""
        return {}

    # --- pseudo-log-likelihood ---

    @overload
    def pseudo_log_likelihood(self, texts: str, *, progress: bool | None = None) -> PseudoLikelihood: ...  # type: ignore[overload-overlap]
    @overload
    def pseudo_log_likelihood(
        self, texts: Iterable[str], *, progress: bool | None = None
    ) -> list[PseudoLikelihood]: ...
    @explain_arguments
    def pseudo_log_likelihood(self, texts: Any, *, progress: bool | None = None) -> Any:
        """Score texts by masking every token in turn, in the window that owns it (Salazar et al. 2020)."""
        self._mask_id()
        return self.collect(texts, self._likelihoods, "score", progress)

    def _likelihoods(self, texts: Iterable[str]) -> Iterator[PseudoLikelihood]:
        for text in self.pipeline.read(text_inputs(texts, "pseudo_log_likelihood", _Options())):
            yield self._likelihood(text)
            report(1)

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
