"""Fill-mask, and predictions for every token of a text, with a masked language model.

Each mask is predicted in the window where it has the most context on both sides. Several masks are predicted
independently, with the others still masked. For predictions of every token, each is masked in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, check_positive, text_inputs
from bertie.pipeline.language_warnings import no_warning
from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.reporting import report
from bertie.tasks.base import Task
from bertie.tasks.decoding import trim_span
from bertie.tasks.mask_candidates import MASKED_COPIES, log_likelihoods, place
from bertie.tasks.results import (
    FillMaskResult,
    MaskPrediction,
    PseudoLikelihood,
    TokenCandidate,
    TokenPrediction,
    TokenPredictionResult,
)
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings, IntArray
from bertie.text.tokenizer import checked_text

MASK_ROWS = 64  # masks that are predicted at a time
CANDIDATES_PER_TOKEN = 64  # candidates that take as long to return as a token takes to read, roughly


@dataclass(frozen=True, slots=True)
class _Options:
    top_k: int = 5
    allowed: IntArray | None = None  # ids of candidates


class _MaskQuery(NamedTuple):
    """The masks of a window, and what to predict for them."""

    positions: IntArray
    top_k: int
    allowed: IntArray | None
    targets: IntArray | None = None  # (masks,) the ids of the masked tokens, where they are known


class _TopTokens(NamedTuple):
    """The predictions for the masks of a window."""

    ids: IntArray  # (masks, k) the most probable tokens
    scores: FloatArray  # (masks, k) their probabilities
    targets: FloatArray  # (masks, 2) the log-probability and the rank of the masked token; no columns if unknown


_NONE = _TopTokens(np.empty((0, 1), np.int64), np.empty((0, 1), np.float32), np.empty((0, 2), np.float32))


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

        Candidates may be words or phrases of several tokens, such as ["New York", "Paris"]. Then each of them
        replaces the mask, and they are ranked by their pseudo-log-likelihood (`bertie.tasks.mask_candidates`). A score
        is its exponential, which for a single token is the token's probability.

        A single text returns a single result. `progress`: whether to show a progress bar; None: on a terminal or in a
        notebook.
        """
        each = partial(self.fill_each, top_k=top_k, candidates=candidates)
        return self.collect(texts, each, "fill", progress)

    def fill_each(
        self, texts: Iterable[str], *, top_k: int = 5, candidates: Sequence[str] | None = None
    ) -> Iterator[FillMaskResult]:
        """Like `fill`, but yield results one by one."""
        check_positive(top_k=top_k)
        self._mask_id()
        if candidates is None:
            return self.run(text_inputs(texts, "fill", _Options(top_k)), texts)
        words = list(dict.fromkeys(check_list(candidates, "candidates=", "words")))
        ids = [self.candidate_tokens(word) for word in words]
        if not ids:
            raise InputError("candidates=[] must not be empty")
        if any(len(tokens) > 1 for tokens in ids):
            return self._rank_phrases(text_inputs(texts, "fill", _Options(top_k)), words)
        return self.run(text_inputs(texts, "fill", _Options(top_k, np.unique(np.concatenate(ids)))), texts)

    def candidate_tokens(self, word: str) -> IntArray:
        """The token ids of a candidate; a single id if it is in the vocabulary."""
        token_id = self.tokenizer.id(checked_text(word, "a candidate"))
        if token_id is not None:
            return np.array([token_id], dtype=np.int64)
        tokens: IntArray = self.tokenizer.encode(word, special=False).ids
        if not len(tokens):
            raise InputError(f"candidate {word!r} has no tokens")
        if (tokens == self.tokenizer.unk_id).any():
            raise InputError(f"candidate {word!r} is not in the vocabulary")
        return tokens

    # --- candidates of several tokens ---

    def _rank_phrases(self, inputs: Iterator[TaskInput[_Options]], words: Sequence[str]) -> Iterator[FillMaskResult]:
        """Rank all candidates for each mask by their pseudo-log-likelihood."""
        for text in self.pipeline.read(inputs):
            masks = []
            for token in self._mask_tokens(text):
                start, end = text.encoding.offsets[token].tolist()
                masks.append(MaskPrediction(start, end, self._rank_in(text, start, words)))
            yield FillMaskResult(tuple(masks), **text.counts())
            report(1)

    def _rank_in(self, text: WindowedText[_Options], start: int, words: Sequence[str]) -> tuple[TokenCandidate, ...]:
        content, mask = text.input.texts[0], str(self.tokenizer.mask_token)
        start = content.index(mask, start)  # some tokenizers count the space before a mask as part of it
        with no_warning():  # about each variant of the text
            placed = place(content, start, start + len(mask), words, text.input.name, self._read_variants)
        sums = log_likelihoods(placed, self._mask_id(), self._score_masked)
        order = sorted(range(len(words)), key=lambda i: (-sums[i], i))[: text.input.options.top_k]
        return tuple(
            TokenCandidate(
                " ".join(self.tokenizer.token(token) for token in placed[i].ids.tolist()),
                int(placed[i].ids[0]) if len(placed[i].ids) == 1 else None,
                float(np.exp(sums[i])),
                words[i],
            )
            for i in order
        )

    def _read_variants(self, inputs: Sequence[TaskInput[Any]]) -> list[WindowedText[Any]]:
        return list(self.pipeline.read(inputs))

    def _score_masked(self, windows: Encodings, positions: IntArray, targets: IntArray) -> list[float]:
        """The log-probability of each window's target."""
        pairs = zip(positions[:, None], targets[:, None], strict=True)
        outputs = self.pipeline.compute(windows, [_MaskQuery(at, 1, None, target) for at, target in pairs])
        return [float(output.targets[0, 0]) for output in outputs.collect()]

    def _mask_tokens(self, text: WindowedText[_Options]) -> list[int]:
        """The indices of all masks that are read, in the whole text."""
        tokens = [
            window.indices[(window.encoding.ids == self._mask_id()) & window.owned].tolist() for window in text.windows
        ]
        if not any(tokens):
            where = "text" if self.overflow != "truncate" else "beginning of the text, to which it was truncated"
            content = text.input.texts[0]
            raise InputError(f"{text.input.name}: no {self.tokenizer.mask_token} in the {where}: {content[:60]!r}")
        return sorted(token for part in tokens for token in part)

    # --- tokens for masks ---

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
        for _, same in groupby(parameters, key=lambda query: (query.top_k, id(query.allowed), query.targets is None)):
            queries = list(same)
            ends = np.cumsum([len(query.positions) for query in queries])
            group = self._predict(model, masked[first : first + ends[-1]], queries)
            outputs += map(_TopTokens, *(np.split(part, ends[:-1]) for part in group))
            first += int(ends[-1])
        return outputs

    def _predict(self, model: Model, masked: Tensor, queries: Sequence[_MaskQuery]) -> _TopTokens:
        """Predictions for the masks of queries that differ in their positions and targets only."""
        targets = [query.targets for query in queries if query.targets is not None]
        ids = torch.from_numpy(np.concatenate(targets)).to(masked.device) if targets else None
        blocks = []
        for start in range(0, len(masked), MASK_ROWS):
            self.pipeline.check()
            logits = self._logits(model, masked[start : start + MASK_ROWS])
            true = None if ids is None else ids[start : start + MASK_ROWS, None]  # (masks, 1)
            # Embedding tables are often padded: ids beyond the vocabulary have no token.
            top = self._top_tokens(queries[0], logits.softmax(-1)[:, : self.tokenizer.vocab_size])
            blocks.append(_TopTokens(*top, _target_columns(logits, true)))
        return _TopTokens(*(np.concatenate(parts) for parts in zip(*blocks, strict=True))) if blocks else _NONE

    def _logits(self, model: Model, masked: Tensor) -> Tensor:
        """(masks, D) -> (masks, V)."""
        assert self.head is not None
        logits: Tensor = model.head(self.head).vocabulary_logits(masked, model.encoder.embeddings.words.weight)
        return logits.float()

    def _top_tokens(self, query: _MaskQuery, probabilities: Tensor) -> tuple[IntArray, FloatArray]:
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
        return ids if query.allowed is None else query.allowed[ids], scores

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
            self._mask_tokens(text)  # an error
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

    # --- predictions for every token ---

    @overload
    def predict_tokens(  # type: ignore[overload-overlap]
        self, texts: str, *, top_k: int = 5, progress: bool | None = None
    ) -> TokenPredictionResult: ...
    @overload
    def predict_tokens(
        self, texts: Iterable[str], *, top_k: int = 5, progress: bool | None = None
    ) -> list[TokenPredictionResult]: ...
    @explain_arguments
    def predict_tokens(self, texts: Any, *, top_k: int = 5, progress: bool | None = None) -> Any:
        """Predict every token of texts from all others: each is masked in turn, in the window that owns it.

        A text of n tokens takes n forward passes. A single text returns a single result.

        >>> result = MaskedLM.load().predict_tokens("Paris is the capital of France.")
        >>> len(result.tokens), result.tokens[3].text, result.tokens[3].rank
        (7, 'capital', 1)
        """
        check_positive(top_k=top_k)
        self._mask_id()
        return self.collect(texts, partial(self._predictions, top_k), "predict", progress)

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

    def _predictions(self, top_k: int, texts: Iterable[str]) -> Iterator[TokenPredictionResult]:
        for text in self.pipeline.read(text_inputs(texts, "predict_tokens", _Options(top_k))):
            indices, (ids, scores, targets) = self._masked_in_turn(text)
            whole, content = text.encoding, text.input.texts[0]
            tokens = []
            for at, row_ids, row_scores, (likelihood, rank) in zip(
                indices.tolist(), ids.tolist(), scores.tolist(), targets.tolist(), strict=True
            ):
                self.pipeline.check()
                start, end = trim_span(content, *whole.offsets[at].tolist())
                candidates = self._candidates(row_ids, row_scores)
                tokens.append(TokenPrediction(content[start:end], start, end, likelihood, int(rank), candidates))
            total = float(targets[:, 0].sum(dtype=np.float64))
            yield TokenPredictionResult(tuple(tokens), total, **text.counts())
            report(1)

    def _likelihoods(self, texts: Iterable[str]) -> Iterator[PseudoLikelihood]:
        for text in self.pipeline.read(text_inputs(texts, "pseudo_log_likelihood", _Options(top_k=1))):
            _, (_, _, targets) = self._masked_in_turn(text)
            scores = targets[:, 0]
            yield PseudoLikelihood(float(scores.sum(dtype=np.float64)), tuple(scores.tolist()), **text.counts())
            report(1)

    def _masked_in_turn(self, text: WindowedText[_Options]) -> tuple[IntArray, _TopTokens]:
        """The indices of all tokens that are read, and the predictions for each, with that token masked."""
        indices, outputs = [], list[_TopTokens]()
        for window in text.windows:
            encoding, n = window.encoding, len(window)
            positions = np.flatnonzero(window.owned & (encoding.sequence_ids >= 0))
            indices.append(window.indices[positions])
            for some in np.split(positions, range(0, len(positions), max(1, MASKED_COPIES // n))[1:]):
                ids = np.repeat(encoding.ids[None], len(some), axis=0)
                ids[np.arange(len(some)), some] = self._mask_id()
                copies = Encodings(ids.ravel(), np.tile(encoding.segments, len(some)), np.full(len(some), n))
                top_k = text.input.options.top_k
                queries = [_MaskQuery(at, top_k, None, encoding.ids[at]) for at in some[:, None]]
                outputs += self.pipeline.compute(copies, queries).collect() if len(some) else []
        if not outputs:  # an empty text
            return np.empty(0, np.int64), _NONE
        order = np.argsort(where := np.concatenate(indices), kind="stable")
        return where[order], _TopTokens(*(np.concatenate(parts)[order] for parts in zip(*outputs, strict=True)))

    def _mask_id(self) -> int:
        if self.tokenizer.mask_id is None:
            raise InputError(f"{self.checkpoint.source}'s tokenizer has no mask token")
        return self.tokenizer.mask_id


def _target_columns(logits: Tensor, targets: Tensor | None) -> FloatArray:
    """(masks, 2) the log-probability and the rank of the target (masks, 1) of each row; (masks, 0) without targets."""
    if targets is None:
        return np.empty((len(logits), 0), np.float32)
    rank = 1 + (logits > logits.gather(1, targets)).sum(1, keepdim=True)
    columns: FloatArray = torch.cat([logits.log_softmax(-1).gather(1, targets), rank.float()], dim=1).cpu().numpy()
    return columns
