"""Sentence embeddings.

The embedding of a text in several windows is the mean of their pooled embeddings, weighted by the tokens that each
window owns; the modules after the pooling (dense layers, normalization) are applied to that mean. Training
reads long texts in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Unpack, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bertie.arguments import explain_arguments, explain_options
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import default_model
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.nn.sentence_layers import Normalize, normalize, normalize_array
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import TaskInput, text_inputs
from bertie.pipeline.language_warnings import one_warning
from bertie.pipeline.outputs import FloatArray, Outputs, PendingCopy
from bertie.pipeline.pipeline import Overflow
from bertie.pipeline.reporting import length, show_progress
from bertie.recipe import POOLINGS, Recipe
from bertie.tasks.base import Task, refuse_other_embeddings
from bertie.tasks.decoding import average_windows, decoding_device
from bertie.tasks.pairwise import compare_embeddings
from bertie.tasks.prompts import choose_prompt, prompt_tokens_in
from bertie.tasks.results import EmbeddingResult
from bertie.tasks.table_output import TransformOutput, as_table, check_output, output_kind, single_column
from bertie.tasks.token_embeddings import TokenEmbedder, TokenEmbeddingsResult
from bertie.tasks.token_weights import token_weights
from bertie.tasks.trainable import Hyperparameters, Trainable
from bertie.text.batch import Batch

POOLING = {"cls": "cls", "mean": "mean", "max": "max", "last": "lasttoken", "weighted-mean": "weightedmean"}


@dataclass(frozen=True, slots=True)
class _Options:
    prompt_tokens: int  # number to exclude from pooling if required, including the special token before them
    prompt: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _EmbeddingBlock:
    """The embeddings of a chunk of texts."""

    vectors: NDArray[np.float32]  # (N, dimension)
    chunk: Chunk[_Options]

    def __iter__(self) -> Iterator[EmbeddingResult]:
        return (EmbeddingResult(row, *counts) for row, counts in zip(self.vectors, self.chunk.counts, strict=True))


class _WindowPooling(NamedTuple):
    """How a window is pooled."""

    skip: int = 0  # tokens of the prompt to leave out
    partial: bool = False  # one of several windows: the modules after the pooling are applied to their mean


class Embedder(Trainable[_Options, FloatArray, EmbeddingResult]):
    """Embeds texts with the checkpoint's sentence-transformers modules.

    Without such modules, embeddings are mean-pooled, or those of the last token if the model is causal, unless
    `pooling` is given: cls, mean, max, last or weighted-mean. `normalize` scales embeddings to unit length;
    `dimension` truncates them before that, for models trained with Matryoshka losses.

    >>> embedder = Embedder.load("sentence-transformers/all-MiniLM-L6-v2")       # doctest: +SKIP
    >>> embedder.embed(["A cat sat on the mat.", "The feline rested."]).shape    # doctest: +SKIP
    (2, 384)

    To train one, pass data; hyperparameters are those of `bertie.Recipe`:

    >>> embedder = Embedder("path/to/any/encoder", batch_size=256)                              # doctest: +SKIP
    >>> embedder.fit([("What do cats eat?", "Cats eat meat."), …], dev=pairs).save("my-model")  # doctest: +SKIP

    The default loss depends on the data: positive pairs, with or without hard negatives, use in-batch negatives
    (`InfoNCELoss`); pairs with scores `CoSENTLoss`; pairs with classes Sentence-BERT's `SoftmaxLoss`; queries with
    passages and a teacher's scores a KL divergence. `loss` selects another one (infonce, triplet, softmax, cosine,
    cosent, contrastive, margin-mse, kl, with settings as in "triplet:margin=0.2,distance=cosine"), or is an object of
    `bertie.training.embedding.losses`. `matryoshka` lists smaller dimensions to train for as well.
    """

    def __init__(
        self,
        model: Checkpoint | str | Path | None = None,
        *,
        overflow: Overflow = "window",
        deterministic: bool = False,
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimension: int | None = None,
        loss: Any = None,
        matryoshka: Sequence[int] | None = None,
        device: str | torch.device | None = None,
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
        self.pooling, self.normalize, self.truncate_dim = pooling, normalize, dimension
        self.loss = loss  # a name, or a `bertie.training.embedding.losses.EmbeddingLoss`
        self.matryoshka = matryoshka
        # See `_modules_on`: parameters of the modules, and copies of the modules on other devices.
        self._parameters: tuple[SentenceModules | None, tuple[Tensor, ...]] = (None, ())
        self._replicas: dict[torch.device, tuple[SentenceModules, SentenceModules]] = {}
        super().__init__(model, overflow=overflow, deterministic=deterministic, device=device, **hyperparameters)
        loss_name = loss if loss is None or isinstance(loss, str) else None
        self.recipe = self.recipe.replace(pooling=pooling, loss=loss_name, matryoshka=matryoshka)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        refuse_other_embeddings(checkpoint)
        Task._use(self, checkpoint, None)
        self.modules = self.modules_for(checkpoint, normalize=False)  # which `_finish` does
        if self.truncate_dim is not None and not 1 <= self.truncate_dim <= self.modules.dimension:
            raise InputError(f"dimension={self.truncate_dim} must lie between 1 and {self.modules.dimension}")

    def modules_for(self, checkpoint: Checkpoint, *, normalize: bool) -> SentenceModules:
        """The modules after the encoder."""
        width, pooling, saved = checkpoint.model.config.width, self.pooling, checkpoint.sentence
        if pooling is None:
            return saved or SentenceModules.default(checkpoint.model.config, normalize)
        modules = SentenceModules.create(width, pooling=POOLING[pooling], normalize=normalize)
        if saved is not None:
            modules.prompts, modules.default_prompt = saved.prompts, saved.default_prompt
            modules.lower_case = saved.lower_case
        return modules

    def __getattr__(self, name: str) -> Any:
        """Load a model given by name when it is first needed."""
        lazy = ("checkpoint", "model", "tokenizer", "head", "modules", "pipeline")
        if name not in lazy or "_model_argument" not in self.__dict__:
            return super().__getattr__(name)  # an error
        self._use(self._load_model(), None)
        return self.__dict__[name]

    @classmethod
    @explain_options(Checkpoint.load)
    def load(
        cls,
        name: str | Path | None = None,
        *,
        overflow: Overflow = "window",
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimension: int | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> Self:
        """Load a model, by default the built-in one; `options` are passed to `Checkpoint.load`."""
        checkpoint = Checkpoint.load(default_model() if name is None else name, **options)
        return cls(
            checkpoint,
            overflow=overflow,
            deterministic=deterministic,
            pooling=pooling,
            normalize=normalize,
            dimension=dimension,
        )

    @classmethod
    def from_recipe(cls, model: Checkpoint | str | Path | None, recipe: Recipe, **options: Any) -> Self:
        """An embedder with the hyperparameters of a recipe; `options` are the other arguments of the constructor."""
        return cls(model, **options, **recipe.as_dict())

    def _facts(self) -> dict[str, object]:
        facts = super()._facts()
        return facts | {"dimension": self.dimension, "normalize": self.normalize} if self._is_loaded else facts

    @property
    def dimension(self) -> int:
        """The number of components of an embedding."""
        return self.truncate_dim or self.modules.dimension

    @explain_arguments
    def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> NDArray[np.float32]:
        """Embed texts into an array (N, dimension), in order; a single text into (dimension,).

        `prompt`, such as "query: ", is prepended to each text; `prompt_name` selects one of the checkpoint's prompts
        instead. The default is the checkpoint's default prompt, if any. `progress`: whether to show a progress bar;
        None: on a terminal or in a notebook. `encode` is an alias.
        """
        if isinstance(texts, str):
            row: NDArray[np.float32] = self.embed([texts], prompt=prompt, prompt_name=prompt_name, progress=progress)[0]
            return row
        with show_progress("embed", length(texts), progress):
            chunks = self.pipeline.chunks(self.inputs(texts, self.options(prompt, prompt_name)), texts)
            vectors = [chunk.vectors for chunk in chunks if isinstance(chunk, _EmbeddingBlock)]
        if len(vectors) == 1:
            return vectors[0]
        return np.concatenate(vectors) if vectors else np.empty((0, self.dimension), dtype=np.float32)

    encode = embed

    def embed_each(
        self, texts: Iterable[str], *, prompt: str | None = None, prompt_name: str | None = None
    ) -> Iterator[EmbeddingResult]:
        """Like `embed`, but yield results one by one, with how much of each text was read."""
        return chain.from_iterable(self.pipeline.chunks(self.inputs(texts, self.options(prompt, prompt_name)), texts))

    @overload
    def token_embeddings(  # type: ignore[overload-overlap]
        self, texts: str, *, prompt: str | None = None, prompt_name: str | None = None, progress: bool | None = None
    ) -> TokenEmbeddingsResult: ...
    @overload
    def token_embeddings(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> list[TokenEmbeddingsResult]: ...
    @explain_arguments
    def token_embeddings(
        self, texts: Any, *, prompt: str | None = None, prompt_name: str | None = None, progress: bool | None = None
    ) -> Any:
        """The tokens of each text with their last hidden states, before pooling; a single text returns a single result.

        Offsets are relative to the text with its prompt, if any.
        """
        options = self.options(prompt, prompt_name)
        task = TokenEmbedder(self.checkpoint, overflow=self.overflow, deterministic=self.deterministic)

        def each(items: Iterable[str]) -> Iterator[TokenEmbeddingsResult]:
            return task.run((TaskInput(i.name, i.texts, None) for i in self.inputs(items, options)), items)

        return self.collect(texts, each, "embed", progress)

    def inputs(self, texts: Iterable[str], options: _Options) -> Iterator[TaskInput[_Options]]:
        """Create inputs: texts with the prepended prompt, lower-cased if the checkpoint requires it."""
        inputs = text_inputs(texts, "embed", options)
        if not options.prompt and not self.modules.lower_case:
            return inputs
        return (i._replace(texts=(self.prepare_text(options.prompt + i.texts[0]),)) for i in inputs)

    def options(self, prompt: str | None = None, prompt_name: str | None = None) -> _Options:
        """The prompt, as chosen by `prompt_text`, with its length in tokens."""
        text = self.prompt_text(prompt, prompt_name)
        return _Options(self._prompt_tokens(text), text)

    def prompt_text(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """The prompt to prepend: `prompt`, the checkpoint's prompt named `prompt_name`, or its default prompt."""
        modules = self.modules
        return choose_prompt(prompt, prompt_name, prompts=modules.prompts, default=modules.default_prompt)

    def prepare_text(self, text: str) -> str:
        """Lower-case a text if the checkpoint requires it."""
        return text.lower() if self.modules.lower_case else text

    def _prompt_tokens(self, prompt: str) -> int:
        """Number of tokens of a prompt, with the special token before it and without the one after it."""
        if not prompt:
            return 0
        encoding = self.tokenizer.encode(self.prepare_text(prompt))
        return len(encoding) - int(encoding.special[-1])

    @overload
    def similarity(self, a: str, b: str, *, progress: bool | None = None) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def similarity(
        self, a: str | Iterable[str], b: str | Iterable[str] | None = None, *, progress: bool | None = None
    ) -> NDArray[np.float32]: ...
    @explain_arguments
    @one_warning()
    def similarity(self, a: Any, b: Any = None, *, progress: bool | None = None) -> Any:
        """(N, M) similarities of the texts `a` to the texts `b`, or to each other; see `compare`.

        A single text adds no axis: (M,) for one text and several, a float for two texts.
        """
        if any(getattr(getattr(texts, "dtype", None), "kind", "") == "f" for texts in (a, b)):
            raise InputError("similarity takes texts; use compare(a, b) for embeddings")
        if isinstance(a, str) and b is None:
            raise InputError("similarity takes two texts, or a list of texts that are compared with each other")
        first = self.embed([a] if isinstance(a, str) else a, progress=progress)
        second = first if b is None else self.embed([b] if isinstance(b, str) else b, progress=progress)
        rows = self.compare(first, second)
        if isinstance(a, str):
            return float(rows[0, 0]) if isinstance(b, str) else rows[0]
        return rows[:, 0] if isinstance(b, str) else rows

    def compare(self, a: ArrayLike, b: ArrayLike) -> NDArray[np.float32]:
        """(N, D), (M, D) -> (N, M) similarities by the checkpoint's similarity function, cosine by default.

        A single embedding adds no axis: (D,), (M, D) -> (M,).
        """
        return compare_embeddings(self.modules.similarity or "cosine", a, b)

    # --- scikit-learn ---

    def _has_nothing_to_fit(self, X: Any, y: Any) -> bool:
        """Whether X are texts without pairs or labels: scikit-learn's pipelines call `fit` before `transform`."""
        if isinstance(X, str | Mapping) or not hasattr(X, "__len__") or not hasattr(X, "__iter__"):
            return False
        column = X if not hasattr(X, "columns") else X.iloc[:, 0] if hasattr(X, "iloc") and X.shape[1] == 1 else ()
        single = isinstance(next(iter(column), None), str)
        if single and y is not None:
            raise InputError(
                "an Embedder is trained on pairs of texts; for texts and labels use bertie.Classifier, or a pipeline "
                "of the embedder and a classifier of scikit-learn"
            )
        return single

    def transform(self, X: Any) -> Any:
        """Embed texts into an array (N, dimension), for scikit-learn's pipelines.

        A table or array must have one column. The result is an array; after `set_output`, a table.
        """
        kind = output_kind(self.__dict__.get("_sklearn_output_config", {}).get("transform"))
        return as_table(self.embed(single_column(X)), self.get_feature_names_out(), kind, X)

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """Same as `transform`: in a pipeline, the embedder is not trained."""
        return self.transform(X)

    def set_output(self, *, transform: TransformOutput | None = None) -> Self:
        """Set the output of `transform`: "pandas", "polars" or "default" (an array); None changes nothing."""
        check_output(transform)
        if transform is not None:
            self._sklearn_output_config = {"transform": transform}  # scikit-learn's name, which `clone` copies
        return self

    def get_feature_names_out(self, input_features: Any = None) -> NDArray[Any]:
        """(dimension,) the names of `transform`'s columns."""
        return np.array([f"embedding{i}" for i in range(self.dimension)], dtype=object)

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {name: getattr(self, name) for name in ("pooling", "normalize", "loss", "matryoshka")}
        params = {key: value for key, value in super().get_params(deep).items() if key != "head"}
        return params | own | {"dimension": self.truncate_dim}

    # --- stages of the pipeline ---

    def parameters(self, chunk: Chunk[_Options]) -> Sequence[_WindowPooling] | None:
        """How each window is pooled; None: all tokens of a whole text."""
        prompt = 0 if self.modules.pooling.include_prompt else chunk.inputs[0].options.prompt_tokens
        if not prompt and not chunk.has_long:
            return None
        return [
            _WindowPooling(prompt_tokens_in(window, prompt), len(windows) > 1)
            for windows in (text.windows for text in chunk)
            for window in windows
        ]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[_WindowPooling | None] | None
    ) -> Sequence[FloatArray]:
        """The embeddings of whole texts, and the pooled hidden states of windows that are parts of a text."""
        modules = self._modules_on(hidden.device)
        each = [window or _WindowPooling() for window in parameters or ()]
        skips = [window.skip for window in each] if any(window.skip for window in each) else None
        partial = [i for i, window in enumerate(each) if window.partial]
        if not each and hidden.device.type == "cpu" and hidden.dtype == torch.float32 and self._is_plain(modules):
            # The same computation without converting to and from tensors, which takes longer than pooling one text.
            means: FloatArray = modules.pooling.means(hidden, batch)
            return PendingCopy.per_text(normalize_array(means) if self.normalize or len(modules.layers) else means)
        rows: Tensor = modules.pooling(hidden, batch, skips).float()  # (B, pooled width)
        if not partial:
            return PendingCopy.per_text(self._finish(modules, rows))
        if len(partial) == len(rows):
            return PendingCopy.per_text(rows)
        whole = [i for i, window in enumerate(each) if not window.partial]
        parts = (PendingCopy.per_text(rows[partial]), PendingCopy.per_text(self._finish(modules, rows[whole])))
        by_index = dict(zip([*partial, *whole], chain(*parts), strict=True))
        return [by_index[i] for i in range(len(rows))]

    def _is_plain(self, modules: SentenceModules) -> bool:
        """Whether an embedding is the mean over all tokens, possibly normalized."""
        return self.truncate_dim is None and modules.pooling.include_prompt and modules.plain

    def _modules_on(self, device: torch.device) -> SentenceModules:
        """The modules after the encoder on a device: a copy for each replica of the model."""
        modules = self.modules
        if self._parameters[0] is not modules:
            self._parameters = (modules, tuple(modules.parameters()))
        if all(parameter.device == device for parameter in self._parameters[1]):
            return modules
        with torch.inference_mode(False):  # parameters created in inference mode could not be trained later
            if device == self.model.device:
                return modules.to(device)
            if device not in self._replicas or self._replicas[device][0] is not modules:
                self._replicas[device] = (modules, deepcopy(modules).to(device))
            return self._replicas[device][1]

    def _finish(self, modules: SentenceModules, rows: Tensor) -> Tensor:
        """(B, pooled width) -> (B, dimension): dense layers and normalization."""
        rows = modules.project(rows)[:, : self.truncate_dim]  # None: all dimensions
        whole = self.truncate_dim is None and modules.truncate_dim is None
        normalized = whole and len(modules.layers) > 0 and isinstance(modules.layers[-1], Normalize)
        return normalize(rows) if self.normalize and not normalized else rows

    def decode_chunk(self, chunk: Chunk[_Options], outputs: Outputs[FloatArray]) -> Iterable[EmbeddingResult]:
        """All embeddings in one array."""
        if not chunk.has_long:
            return _EmbeddingBlock(outputs.stack(), chunk)
        return _EmbeddingBlock(np.stack([result.vector for result in super().decode_chunk(chunk, outputs)]), chunk)

    @torch.inference_mode()
    def decode(self, text: WindowedText[_Options], outputs: Sequence[FloatArray]) -> EmbeddingResult:
        """Average the windows before the modules that follow the pooling."""
        vector = outputs[0]
        if len(outputs) > 1:
            pooled = torch.from_numpy(average_windows(text.windows, outputs)[None]).to(decoding_device(self.model))
            vector = self._finish(self._modules_on(pooled.device), pooled)[0].cpu().numpy()
        return EmbeddingResult(vector, **text.counts())

    # --- token weights ---

    def weight_tokens(self, texts: Iterable[str], *, smoothing: float = 0.1) -> Self:
        """Weight tokens by their inverse frequency in `texts` before mean pooling (SIF), without training.

        A token that occurs in the fraction p of the texts gets the weight smoothing / (smoothing + p). Use many texts
        from the target domain, and re-embed texts that were embedded before.

        >>> embedder = Embedder.load("bertie-small").weight_tokens(["The cat sat.", "The dog ran.", "The end."])
        >>> weights = embedder.modules.pooling.token_weights
        >>> bool(weights[embedder.tokenizer.id("the")] < weights[embedder.tokenizer.id("cat")])
        True
        """
        weights = token_weights(self, texts, smoothing)
        vocabulary = self.tokenizer.vocabulary
        self.modules = self.modules.with_token_weights(weights, [vocabulary.get(id, "") for id in range(len(weights))])
        self.checkpoint = replace(self.checkpoint, sentence=self.modules)
        return self
