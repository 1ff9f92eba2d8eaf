"""Multiple choice: which of several texts fits a context best, such as the right ending or answer.

The model reads the context with each choice, as a pair, and gives each pair one logit; the softmax over the choices
gives their probabilities. The logits of a long pair's windows are averaged, weighted by the tokens that each owns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.tasks.decoding import average_windows, softmax
from bertie.tasks.results import ChoiceResult
from bertie.tasks.trainable import Trainable
from bertie.text.batch import Batch
from bertie.text.tokenizer import checked_text

Question = tuple[str, Sequence[str]]  # a context and its choices


@dataclass(frozen=True, slots=True)
class _ScoredChoice:
    """The logit of one choice, and how much of the pair was read."""

    text: str
    logit: float
    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int
    tokens_non_english: int


class Chooser(Trainable[None, FloatArray, _ScoredChoice]):
    """Chooses the text that fits a context best.

    >>> chooser = Chooser.load("path/to/a/multiple-choice/model")                                     # doctest: +SKIP
    >>> chooser.choose("He put the kettle on the stove.", ["It began to sing.", "It flew away."])     # doctest: +SKIP

    To train one, pass contexts with their choices, and the index of the right one, or a file with the columns
    context, choices and label:

    >>> chooser = Chooser("path/to/any/encoder").fit([("Two plus two is", ["four", "five"])], [0])   # doctest: +SKIP
    """

    kind = "choice"
    needs = "a multiple-choice head"

    @overload
    def choose(self, contexts: str, choices: Sequence[str], *, progress: bool | None = None) -> ChoiceResult: ...
    @overload
    def choose(self, contexts: Iterable[Question], *, progress: bool | None = None) -> list[ChoiceResult]: ...
    @explain_arguments
    def choose(self, contexts: Any, choices: Any = None, *, progress: bool | None = None) -> Any:
        """Choose the most probable text, with the probabilities of all choices.

        Pass a context and its choices, for one result; or a list of (context, choices) pairs. `progress`:
        whether to show a progress bar; None: on a terminal or in a notebook.
        """
        if isinstance(contexts, str):
            if choices is None:
                raise InputError('choose takes a context and its choices: choose("context", ["one", "another"])')
            return self.choose([(contexts, choices)], progress=progress)[0]
        if choices is not None:
            raise InputError("pass pairs of a context and its choices: choose(list(zip(contexts, choices)))")
        return self.collect(contexts, self.choose_each, "choose", progress, unit="choices")

    def choose_each(self, contexts: Iterable[Question]) -> Iterator[ChoiceResult]:
        """Like `choose`, but yield results one by one."""
        check_list(contexts, "choose", "pairs of a context and its choices")
        return self._choose_each(contexts)

    def _choose_each(self, contexts: Iterable[Question]) -> Iterator[ChoiceResult]:
        counts: deque[int] = deque()  # choices of each context in progress

        def inputs() -> Iterator[TaskInput[None]]:
            for i, item in enumerate(contexts):
                context, choices = check_choices(item, f"context {i}")
                counts.append(len(choices))
                for c, choice in enumerate(choices):
                    yield TaskInput(f"context {i}, choice {c}", (context, choice), None, repeated=c > 0)

        group: list[_ScoredChoice] = []
        for scored in self.run(inputs(), contexts):
            group.append(scored)
            if len(group) == counts[0]:
                counts.popleft()
                yield self._result(group)
                group = []

    def _result(self, group: Sequence[_ScoredChoice]) -> ChoiceResult:
        """Combine the choices of one context."""
        logits = np.array([scored.logit for scored in group], dtype=np.float32)
        scores = [float(score) for score in softmax(logits / self.info.calibration.temperature)]
        best = int(np.argmax(logits))
        read = {name: sum(getattr(scored, name) for scored in group) for name in READ_COUNTS}
        return ChoiceResult(best, group[best].text, scores[best], tuple(scores), **read)

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(1,) logit of each window."""
        return PendingCopy.per_text(self.head_outputs(model, hidden, batch))

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> _ScoredChoice:
        """Average the windows."""
        logit = float(average_windows(text.windows, outputs)[0])
        return _ScoredChoice(text.input.texts[1], logit, **text.counts())

    @explain_arguments
    def predict(self, X: Iterable[Question], *, progress: bool | None = None) -> NDArray[np.int64]:
        """(n,) the index of the most probable choice for each context."""
        results = self.choose(check_list(X, "predict", "pairs of a context and its choices"), progress=progress)
        return np.array([result.index for result in results], dtype=np.int64)


def check_choices(item: object, name: str) -> tuple[str, list[str]]:
    """A context and its choices, of which there must be two or more."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(f"{name} must be a pair of a context and its choices")
    context, choices = checked_text(item[0], name), item[1]
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Iterable):
        raise InputError(f"{name}: its choices must be a list of texts, not {type(choices).__name__}")
    texts = [checked_text(choice, f"{name}, choice {c}") for c, choice in enumerate(choices)]
    if len(texts) < 2:
        raise InputError(f"{name} has {len(texts)} choice{'' if len(texts) == 1 else 's'}; give two or more")
    return context, texts
