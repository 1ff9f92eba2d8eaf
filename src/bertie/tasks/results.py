"""The results of tasks: small frozen dataclasses.

Each records how much of its text was read: `tokens_read` of `tokens_total` tokens, without special tokens, in a number
of `windows`. `tokens_unknown` tokens are not covered by the model's vocabulary: [UNK], or letters of a script in which
it has no words. `tokens_non_english` tokens are in parts of the text that do not seem to be English, counted for models
with an English vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertie.tasks.display import Displayed


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EmbeddingResult(Displayed):
    """The embedding of a text."""

    vector: NDArray[np.float32]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SparseEmbeddingResult(Displayed):
    """The terms of a text, highest weight first: vocabulary entries and their weights, which are above 0."""

    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    tokens: tuple[str, ...]  # as in the vocabulary
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def _facts(self) -> dict[str, object]:
        terms = dict(zip(self.tokens, self.weights.tolist(), strict=True))
        facts = {name: value for name, value in Displayed._facts(self).items() if name not in self.__slots__[:3]}
        return {"terms": terms, **facts}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TokenVectorsResult(Displayed):
    """The token embeddings of a query or a document, for late interaction."""

    vectors: NDArray[np.float32]  # (n, dimension), each of unit length
    tokens: tuple[str, ...]  # as in the vocabulary
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0

    def __len__(self) -> int:
        return len(self.vectors)


@dataclass(frozen=True, slots=True, repr=False)
class ClassificationResult(Displayed):
    """The label of a text. `scores` are probabilities, or the raw value of a regression head."""

    label: str  # the most probable one
    score: float  # its probability
    scores: dict[str, float]
    confident: bool | None  # whether the score reaches the threshold that `fit` chose for `abstain`; None: no threshold
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class RegressionResult(Displayed):
    """The predicted value of a text."""

    value: float
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class ZeroShotResult(Displayed):
    """The most probable of the given labels; `scores` has all of them, most probable first."""

    label: str
    score: float
    scores: dict[str, float]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class TaggedSpan(Displayed):
    """A labelled span of a text: `text[start:end]`."""

    label: str
    start: int
    end: int
    text: str
    score: float  # mean probability of its words' labels


@dataclass(frozen=True, slots=True, repr=False)
class TaggingResult(Displayed):
    """The labelled spans of a text, in order."""

    spans: tuple[TaggedSpan, ...]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class AnswerSpan(Displayed):
    """A span of a document: `documents[document][start:end]`. "No answer" has an empty text and no offsets."""

    text: str
    start: int | None
    end: int | None
    score: float  # its probability among the best spans and "no answer"
    logit: float  # start logit plus end logit
    document: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class AnswerResult(Displayed):
    """The best answers to a question, best first."""

    answers: tuple[AnswerSpan, ...]  # the first one is empty if there is no answer
    no_answer_score: float  # the probability of "no answer"
    no_answer_logit: float  # comparable to the logits of the answers
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0

    @property
    def best(self) -> AnswerSpan:
        """The best answer; if there is none, a span with an empty text and no offsets."""
        return self.answers[0]

    @property
    def has_answer(self) -> bool:
        """Whether the best answer is a span: "no answer" is not more probable than the threshold."""
        return self.best.start is not None


@dataclass(frozen=True, slots=True, repr=False)
class RelevanceResult(Displayed):
    """The relevance of a document to a query."""

    score: float
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class RankedDocument(Displayed):
    """A document and its score; `index` is its position in the input."""

    index: int
    score: float
    text: str
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class TokenCandidate(Displayed):
    """A candidate token for a mask; or a candidate of several tokens."""

    token: str  # as in the vocabulary; several are separated by spaces
    id: int | None  # None: several tokens
    score: float  # its probability among all tokens; of several tokens, the product of their conditional ones
    text: str  # decoded: some vocabularies write a space as another character


@dataclass(frozen=True, slots=True, repr=False)
class MaskPrediction(Displayed):
    """The mask at `text[start:end]` with its most probable tokens."""

    start: int
    end: int
    candidates: tuple[TokenCandidate, ...]


@dataclass(frozen=True, slots=True, repr=False)
class FillMaskResult(Displayed):
    """The predictions for all masks of a text."""

    masks: tuple[MaskPrediction, ...]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class PseudoLikelihood(Displayed):
    """The pseudo-log-likelihood of a text: the sum of its tokens' log-probabilities, each with that token masked."""

    log_likelihood: float
    token_log_likelihoods: tuple[float, ...]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class TokenPrediction(Displayed):
    """The token at `text[start:end]`, and what is predicted in its place from all other tokens."""

    text: str
    start: int
    end: int
    log_likelihood: float  # the log-probability of the token itself
    rank: int  # of the token itself among all tokens; 1: it is the most probable one
    candidates: tuple[TokenCandidate, ...]  # the most probable tokens


@dataclass(frozen=True, slots=True, repr=False)
class TokenPredictionResult(Displayed):
    """The predictions for every token of a text, each with that token masked."""

    tokens: tuple[TokenPrediction, ...]
    log_likelihood: float  # the pseudo-log-likelihood of the text: the sum over its tokens
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class ReplacedToken(Displayed):
    """A token or a word, `text[start:end]`, and the probability that it replaced another one."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True, repr=False)
class ReplacedTokenResult(Displayed):
    """The words and the tokens of a text, in order, each with the probability that it was replaced."""

    words: tuple[ReplacedToken, ...]  # the score of a word is the highest one of its tokens
    tokens: tuple[ReplacedToken, ...]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0

    @property
    def replaced(self) -> tuple[ReplacedToken, ...]:
        """The words with a probability of at least 0.5."""
        return tuple(word for word in self.words if word.score >= 0.5)


@dataclass(frozen=True, slots=True, repr=False)
class ChoiceResult(Displayed):
    """The most probable of several choices, and the probabilities of all, which sum to 1."""

    index: int  # of the choice in the input
    choice: str
    score: float  # its probability
    scores: tuple[float, ...]  # of all choices, in the order of the input
    tokens_total: int  # over all choices, each with its context
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class AttributedPiece(Displayed):
    """A word of a text, or some neighbouring words: `text[start:end]`."""

    text: str
    start: int
    end: int
    weight: float  # the decrease of the label's probability without it
    sequence: int = 0  # 1: of the second text of a pair


@dataclass(frozen=True, slots=True, repr=False)
class AttributionResult(Displayed):
    """The weights of a text's words for a label: positive weights support it, negative ones oppose it."""

    label: str
    score: float  # its probability
    pieces: tuple[AttributedPiece, ...]
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = 0
    tokens_non_english: int = 0
