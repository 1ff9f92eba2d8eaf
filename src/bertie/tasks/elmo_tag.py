"""Token classification over ELMo: a learned scalar mix of its layers, with a tagging layer on top.

ELMo itself is frozen, as is usual: its embeddings are computed once, and the mix and the tagging layer are trained on
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bertie._version import __version__
from bertie.arguments import explain_arguments, missing_attribute
from bertie.checkpoints import elmo, storage
from bertie.checkpoints.config_keys import MOST_LABELS, ConfigKeys
from bertie.checkpoints.elmo_folder import is_elmo_folder
from bertie.errors import CheckpointError, ConfigError, InputError, NotFoundError
from bertie.evaluation.metrics import Score
from bertie.nn.elmo import LayerMixTagger
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.reporting import length, show_progress
from bertie.tasks.decoding import softmax
from bertie.tasks.display import shorten
from bertie.tasks.elmo import Elmo, Sentence, read_sentences
from bertie.tasks.results import TaggedSpan, TaggingResult
from bertie.tasks.tag import _join, _Unit, split_tag

SETTINGS, WEIGHTS = "tagger.json", "tagger.safetensors"
MOST_WIDTH = 2**16
PARAMETERS = (
    *("model", "lstm_width", "layer_norm", "dropout", "epochs", "lr", "batch_size", "patience", "seed", "device"),
)


@dataclass(frozen=True, slots=True)
class ElmoHead:
    """The result of `fit`: labels, and the trained layers over ELMo."""

    labels: tuple[str, ...]
    model: LayerMixTagger


class ElmoTagger:
    """Tags words (named entities, parts of speech, …) with a learned scalar mix of ELMo's layers.

    >>> tagger = ElmoTagger("folder with options.json and weights.hdf5")                      # doctest: +SKIP
    >>> tagger.fit([["Ada", "lives", "in", "London"]], [["B-PER", "O", "O", "B-LOC"]])        # doctest: +SKIP
    >>> tagger.predict([["Grace", "lives", "in", "Paris"]])                                   # doctest: +SKIP
    [['B-PER', 'O', 'O', 'B-LOC']]

    Args:
        model: an `Elmo`, or its folder.
        lstm_width: width per direction of a bidirectional LSTM over the mix; 0: only a linear layer.
        layer_norm: normalize each layer of each word before mixing.
        dropout: dropout rate on the mix and on the LSTM's outputs.
        epochs: passes over the data; the learning rate decays linearly to zero.
        lr: the peak learning rate of AdamW.
        batch_size: sentences per step.
        patience: evaluations on the dev data without improvement after which training stops; None: never.
        seed: random seed of the initial weights, dropout and the order of sentences.
        device: where ELMo and the tagging layer run; by default a GPU, if there is one.
    """

    elmo: Elmo
    head_: ElmoHead  # set by `fit` and `load`
    history_: Any  # the `bertie.training.callbacks.TrainingHistory` of the last `fit`

    @explain_arguments
    def __init__(
        self,
        model: Elmo | str | Path,
        *,
        lstm_width: int = 256,
        layer_norm: bool = False,
        dropout: float = 0.5,
        epochs: int = 20,
        lr: float = 1e-3,
        batch_size: int = 32,
        patience: int | None = 5,
        seed: int = 0,
        device: str | torch.device | None = None,
    ) -> None:
        # As they were passed: scikit-learn's clone checks that it gets the same objects back.
        self._parameters = {name: value for name, value in locals().items() if name in PARAMETERS}
        for name, least in (("lstm_width", 0), ("epochs", 1), ("batch_size", 1), ("patience", 1), ("seed", 0)):
            value = self._parameters[name]
            if not (name == "patience" and value is None) and not _is_whole(value, least):
                raise ConfigError(f"{name}={value!r:.40} must be a whole number of at least {least}")
        if not _is_number(dropout) or not 0 <= dropout < 1:
            raise ConfigError(f"dropout={dropout!r:.40} must be a number of at least 0 and below 1")
        if not _is_number(lr) or not 0 < lr < math.inf:
            raise ConfigError(f"lr={lr!r:.40} must be a number above 0")

    def __getattr__(self, name: str) -> Any:
        """Load ELMo when it is first needed."""
        if name == "elmo" and "_parameters" in self.__dict__:
            model, device = self._parameters["model"], self._parameters["device"]
            self.elmo = model if isinstance(model, Elmo) else Elmo.load(model, device=device)
            if device is not None:
                self.elmo.to(device)
            return self.elmo
        if name == "head_":
            raise NotFoundError("this ElmoTagger is not trained: call fit(), or load one with ElmoTagger.load()")
        known = [attribute for attribute in dir(type(self)) if attribute[0] != "_"]
        raise missing_attribute(f"{type(self).__name__!r} object", name, known)

    def __repr__(self) -> str:
        facts = {"model": self._source}
        if "head_" in self.__dict__:
            facts |= {"labels": list(self.labels), "layer_weights": self.layer_weights.tolist(), "gamma": self.gamma}
        return f"{type(self).__name__}({', '.join(f'{name}={shorten(value)}' for name, value in facts.items())})"

    @property
    def _source(self) -> Any:
        model = self._parameters["model"]
        return model.source if isinstance(model, Elmo) else str(model)

    @property
    def labels(self) -> tuple[str, ...]:
        """The tags, in the order of the outputs."""
        return self.head_.labels

    @property
    def layer_weights(self) -> FloatArray:
        """(layers,) the learned weights of ELMo's layers, which sum to 1; the first is the character CNN."""
        weights: FloatArray = self.head_.model.mix.weights.detach().softmax(0).cpu().numpy()
        return weights

    @property
    def gamma(self) -> float:
        """The learned scale of the mix."""
        return float(self.head_.model.mix.gamma)

    # --- training ---

    @explain_arguments
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        dev: Any = None,
        columns: Mapping[str, str] | None = None,
        progress: bool = True,
    ) -> Self:
        """Train on lists of words and tags, or on a table or file with the columns tokens and tags.

        `dev`: a table, a file or a pair (X, y): the epoch with the best score on it is kept, by default the last.
        `columns`: column names that differ from the usual ones, such as {"tokens": "words"}.
        """
        from bertie.training.finetune.elmo_tagging import fit

        fit(self, X, y, dev=dev, columns=columns, progress=progress)
        return self

    @explain_arguments
    def score(self, X: Any, y: Any = None, *, columns: Mapping[str, str] | None = None) -> float:
        """Span F1, or accuracy for plain tags."""
        from bertie.training.finetune.elmo_tagging import score

        return score(self, X, y, columns=columns)

    @explain_arguments
    def evaluate(self, X: Any, y: Any = None, *, columns: Mapping[str, str] | None = None) -> dict[str, Score]:
        """Every metric on labelled data, with its 95% confidence interval."""
        from bertie.training.finetune.elmo_tagging import evaluate

        return evaluate(self, X, y, columns=columns)

    # --- inference ---

    @explain_arguments
    def predict(self, X: Iterable[Sequence[str]], *, progress: bool | None = None) -> list[list[str]]:
        """Predict the tag of each word of each list."""
        labels = self.labels
        with show_progress("predict", length(X), progress, "sentences"):
            rows = self._logits(map(_word_list, check_list(X, "predict", "lists of words")), "predict")
            return [[labels[i] for i in logits.argmax(1)] for _, logits in rows]

    @overload
    def tag(  # type: ignore[overload-overlap]
        self, texts: str, *, ignore_labels: Iterable[str] = ("O",), progress: bool | None = None
    ) -> TaggingResult: ...
    @overload
    def tag(
        self,
        texts: Iterable[str | Sequence[str]],
        *,
        ignore_labels: Iterable[str] = ("O",),
        progress: bool | None = None,
    ) -> list[TaggingResult]: ...
    @explain_arguments
    def tag(self, texts: Any, *, ignore_labels: Iterable[str] = ("O",), progress: bool | None = None) -> Any:
        """Find the labelled spans of each text; a single text returns a single result.

        Texts are split into words by `bertie.text.characters.split_words`; lists of words are taken as they are, with
        offsets in the words joined by spaces. `ignore_labels`: labels that are not reported as spans.
        """
        single = isinstance(texts, str)
        items = [texts] if single else texts
        with show_progress("tag", length(items), progress):
            results = list(self.tag_each(items, ignore_labels=ignore_labels))
        return results[0] if single else results

    def tag_each(
        self, texts: Iterable[str | Sequence[str]], *, ignore_labels: Iterable[str] = ("O",)
    ) -> Iterator[TaggingResult]:
        """Like `tag`, but yield results one by one."""
        ignored = frozenset(check_list(ignore_labels, "ignore_labels=", "labels"))
        for sentence, logits in self._logits(texts, "tag"):
            count = len(sentence.words)
            yield TaggingResult(tuple(self._spans(sentence, logits, ignored)), count, count, 1)

    def _spans(self, sentence: Sentence, logits: FloatArray, ignored: frozenset[str]) -> Iterator[TaggedSpan]:
        known = frozenset(self.labels)
        best, scores = logits.argmax(1).tolist(), softmax(logits)
        units = (
            _Unit(self.labels[i], *split_tag(self.labels[i], known), float(row[i]), start, end)
            for i, row, (start, end) in zip(best, scores, sentence.offsets, strict=True)
        )
        for group in _join(units):
            start, end = group[0].start, group[-1].end
            if ignored.isdisjoint((group[0].label, group[0].type)):
                score = float(np.mean([unit.score for unit in group]))
                yield TaggedSpan(group[0].type, start, end, sentence.text[start:end], score)

    def _logits(self, items: Any, caller: str) -> Iterator[tuple[Sentence, FloatArray]]:
        """Each sentence with the (n, labels) logits of its words."""
        head = self.head_.model
        for chunk in read_sentences(items, caller):
            for sentence, layers in zip(chunk, self.elmo.layers([s.words for s in chunk]), strict=True):
                if not sentence.words:
                    yield sentence, np.zeros((0, len(self.labels)), np.float32)
                    continue
                with torch.inference_mode():
                    x = torch.from_numpy(layers).to(self.elmo.device)
                    yield sentence, head(x, [x.shape[1]]).float().cpu().numpy()

    # --- files ---

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder with ELMo's files, the trained layers (tagger.safetensors) and tagger.json."""
        trained = {name: value for name, value in self._parameters.items() if name not in ("model", "device")}
        settings = {"bertie": __version__, "labels": list(self.labels), "hyperparameters": trained}
        files = elmo.files_of(self.elmo.model) | {SETTINGS: storage.to_json(settings)}
        storage.save_folder(Path(folder), files, self.head_.model.state_dict(), weights=WEIGHTS, overwrite=overwrite)

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device | None = None) -> Self:
        """Load a folder that `save` has written."""
        path = Path(folder).expanduser()
        if not storage.is_file(path / SETTINGS):
            raise NotFoundError(f"{folder} has no {SETTINGS}; ElmoTagger.save() writes such folders")
        labels, parameters = read_tagger_settings(path)
        tagger = cls(Elmo.load(path, device=device), **parameters)
        tagger.head_ = ElmoHead(labels, _read_head(tagger, len(labels), path / WEIGHTS))
        return tagger

    def to(self, device: str | torch.device) -> Self:
        """Move ELMo and the tagging layer to a device, in place."""
        self.elmo.to(device)
        if "head_" in self.__dict__:
            self.head_.model.to(self.elmo.device)
        return self

    def new_head(self, labels: int) -> LayerMixTagger:
        """The untrained layers over ELMo, with newly drawn weights."""
        p = self._parameters
        return LayerMixTagger(
            self.elmo.config,
            labels,
            lstm_width=p["lstm_width"],
            layer_norm=p["layer_norm"],
            dropout=p["dropout"],
        )

    # --- scikit-learn ---

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self._parameters)

    def set_params(self, **params: Any) -> Self:
        """Change arguments of the constructor; trained layers are discarded."""
        arguments = {**self._parameters, **params}
        self.__dict__.clear()
        type(self).__init__(self, **arguments)
        return self

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import Tags, TargetTags

        return Tags(estimator_type=None, target_tags=TargetTags(required=True))

    def __sklearn_is_fitted__(self) -> bool:
        return "head_" in self.__dict__


def is_tagger_folder(folder: str | Path) -> bool:
    """Whether a folder was written by `ElmoTagger.save`."""
    return is_elmo_folder(folder) and storage.is_file(Path(folder).expanduser() / SETTINGS)


def read_tagger_settings(folder: str | Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The labels and hyperparameters of tagger.json."""
    keys = ConfigKeys(storage.read_json(Path(folder).expanduser() / SETTINGS), ("bertie",), file=SETTINGS, common=())
    labels = keys.array("labels")
    if not 0 < len(labels) <= MOST_LABELS or not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{SETTINGS}: labels={labels!r:.80} must be a list of names")
    parameters = keys.mapping("hyperparameters")
    keys.finish()
    values = ConfigKeys(parameters, file=f"{SETTINGS}: hyperparameters", common=())
    values.integer("lstm_width", least=0, most=MOST_WIDTH)
    values.boolean("layer_norm")
    values.ignore("dropout", "epochs", "lr", "batch_size", "patience", "seed")  # checked by the constructor
    values.finish()
    return tuple(labels), parameters


def _word_list(item: Any) -> Any:
    if isinstance(item, str):
        raise InputError(f"{item!r:.60} is a text, but predict() takes lists of words; use tag() for texts")
    return item


def _is_whole(value: Any, least: int, most: int = 2**31) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(least <= value <= most)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _read_head(tagger: ElmoTagger, labels: int, path: Path) -> LayerMixTagger:
    head = tagger.new_head(labels)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from None
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in tensors.items()}
    if different := sorted(name for name in expected | found if expected.get(name) != found.get(name)):
        listed = ", ".join(f"{name} {found.get(name)} instead of {expected.get(name)}" for name in different[:4])
        raise CheckpointError(f"{path.name} does not fit {SETTINGS}: {listed}")
    head.load_state_dict(tensors)
    return head.to(tagger.elmo.device).eval().requires_grad_(False)
