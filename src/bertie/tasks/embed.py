"""Texts to vectors.

Over several windows, the pooled vectors are averaged with the tokens that each window answers for as weights, before
whatever follows the pooling (a dense layer, the scaling to length 1). Training reads long texts in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import default_model
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import InputError
from bertie.nn.sentence_layers import Normalize, normalize, normalize_array
from bertie.recipe import POOLINGS, Recipe
from bertie.tasks import base
from bertie.tasks.base import (
    FloatArray,
    Overflow,
    PendingCopy,
    Task,
    TaskInput,
    ahead,
    chunked,
    listed,
    pooled,
    reading,
)
from bertie.tasks.trainable import Hyperparameters, Trainable
from bertie.text.batch import Batch, pack
from bertie.text.encoding import Encodings
from bertie.text.tokenizer import checked_text
from bertie.text.windows import Window

POOLING = {"cls": "cls", "mean": "mean", "max": "max", "last": "lasttoken", "weighted-mean": "weightedmean"}
FEW = 4  # texts that are read at once, without looking for those of like length
THREADS = 2  # that tokenize: one calls the library, which uses all cores, while the other makes arrays of what it said


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """A text's vector."""

    vector: NDArray[np.float32]
    tokens_total: int
    tokens_read: int
    windows: int


@dataclass(frozen=True, slots=True)
class _Options:
    prompt_tokens: int  # that pooling may be told to leave out, with the special one before them
    prompt: str = ""


_Chunk = list[tuple[int, str]]  # texts with their numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The results of some texts."""

    vectors: NDArray[np.float32]  # (N, dimension)
    counts: NDArray[np.int64]  # (N, 3) tokens in all, tokens read, windows

    def __iter__(self) -> Iterator[Embedding]:
        for vector, counts in zip(self.vectors, self.counts.tolist(), strict=True):
            yield Embedding(vector, *counts)


class Embedder(Trainable[_Options, FloatArray, Embedding]):
    """Turns each text into one vector, as the checkpoint's sentence-transformers modules say.

    A checkpoint without such modules is pooled by the mean over tokens, unless `pooling` says otherwise: cls, mean,
    max, last or weighted-mean. `normalize` scales vectors to length 1; `dimensions` keeps their first numbers, as
    models trained for it allow, before the scaling.

    >>> embedder = Embedder.load("sentence-transformers/all-MiniLM-L6-v2")       # doctest: +SKIP
    >>> embedder.embed(["A cat sat on the mat.", "The feline rested."]).shape    # doctest: +SKIP
    (2, 384)

    Or trains one, with the hyperparameters of `bertie.Recipe`:

    >>> embedder = Embedder("path/to/any/encoder", batch_size=256)                              # doctest: +SKIP
    >>> embedder.fit([("What do cats eat?", "Cats eat meat."), …], dev=pairs).save("my-model")  # doctest: +SKIP

    The data says what is learnt. Pairs that belong together, with texts that do not if there are any: each text is to
    find its own among all of its step (`InfoNCELoss`), and no step has a text twice. Pairs with scores: their order
    (`CoSENTLoss`). Pairs with classes: Sentence-BERT's `SoftmaxLoss`. Queries with passages and a teacher's scores: their
    distribution (`KL`). `loss` names another (infonce, triplet, softmax, cosine, cosent, contrastive, margin-mse, kl,
    with settings as in "triplet:margin=0.2,distance=cosine"), or is one of `bertie.training.embedding.losses`; `matryoshka` lists
    shorter lengths that vectors shall serve at, too.
    """

    def __init__(
        self,
        model: Checkpoint | str | Path | None = None,
        *,
        overflow: Overflow = "window",
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        loss: Any = None,
        matryoshka: Sequence[int] | None = None,
        device: str | torch.device | None = None,
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
        self.pooling, self.normalize, self.dimensions = pooling, normalize, dimensions
        self.loss = loss  # a name, or a `bertie.training.embedding.losses.EmbeddingLoss`
        self.matryoshka = matryoshka
        super().__init__(model, overflow=overflow, device=device, **hyperparameters)
        named = loss if loss is None or isinstance(loss, str) else None
        self.recipe = self.recipe.replace(pooling=pooling, loss=named, matryoshka=matryoshka)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        Task._use(self, checkpoint, None)
        self.modules = self.modules_for(checkpoint, normalize=False)  # which `_finish` does
        if self.dimensions is not None and not 1 <= self.dimensions <= self.modules.dimension:
            raise InputError(f"dimensions={self.dimensions} must lie between 1 and {self.modules.dimension}")

    def modules_for(self, checkpoint: Checkpoint, *, normalize: bool) -> SentenceModules:
        """What follows the encoder."""
        width, pooling, given = checkpoint.model.config.width, self.pooling, checkpoint.sentence
        if pooling is None:
            return given or SentenceModules.create(width, normalize=normalize)
        modules = SentenceModules.create(width, pooling=POOLING[pooling], normalize=normalize)
        if given is not None:
            modules.prompts, modules.default_prompt = given.prompts, given.default_prompt
            modules.lower_case = given.lower_case
        return modules

    def __getattr__(self, name: str) -> Any:
        """A checkpoint given by name is loaded when it is first needed."""
        lazy = ("checkpoint", "model", "tokenizer", "head", "modules")
        if name not in lazy or "_model_argument" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._use(self._load_model(), None)
        return self.__dict__[name]

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        overflow: Overflow = "window",
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        **options: Any,
    ) -> Self:
        """Load a model, the built-in one if no name is given; `options` are those of `Checkpoint.load`."""
        checkpoint = Checkpoint.load(default_model() if name is None else name, **options)
        return cls(checkpoint, overflow=overflow, pooling=pooling, normalize=normalize, dimensions=dimensions)

    @classmethod
    def from_recipe(cls, model: Checkpoint | str | Path | None, recipe: Recipe, **options: Any) -> Self:
        """An embedder with the hyperparameters of a recipe; `options` are the other arguments of the constructor."""
        return cls(model, **options, **recipe.as_dict())

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        own = ("pooling", "normalize", "dimensions", "loss", "matryoshka")
        params = {key: value for key, value in super().get_params(deep).items() if key != "head"}
        return params | {name: getattr(self, name) for name in own}

    @property
    def dimension(self) -> int:
        """The length of a vector."""
        return self.dimensions or self.modules.dimension

    def embed(self, texts: Iterable[str], *, prompt: str | None = None) -> NDArray[np.float32]:
        """(N, dimension) one vector a text, in order. `prompt` names one of the checkpoint's prompts."""
        at_once = self._at_once(texts, prompt)
        if at_once is not None:
            return at_once
        found = [block.vectors for block in self._blocks(texts, prompt)]
        return np.concatenate(found) if found else np.empty((0, self.dimension), dtype=np.float32)

    def embed_each(self, texts: Iterable[str], *, prompt: str | None = None) -> Iterator[Embedding]:
        """As `embed`, one by one, each with how much of its text was read."""
        return chain.from_iterable(self._blocks(texts, prompt))

    def _at_once(self, texts: Iterable[str], prompt: str | None) -> NDArray[np.float32] | None:
        """A few short texts on a CPU in one pass, without what many need. A query waits for Python, too."""
        if type(texts) is not list or not 0 < len(texts) <= FEW or not all(type(text) is str for text in texts):
            return None
        model, modules = self.model, self.modules
        if self.deterministic or self.compute is not None or self.dimensions is not None or not modules.plain:
            return None
        if model.device.type != "cpu" or model.dtype != torch.float32:
            return None
        before = self._prompt(prompt)
        if before and not modules.pooling.include_prompt:
            return None
        flat = self._tokenized(list(enumerate(texts)), _Options(0, before))
        if flat.lengths.max() > self.checkpoint.max_length or len(flat.ids) > self.budget:
            return None
        batch = Batch.select(flat, None)
        with torch.inference_mode():
            rows: NDArray[np.float32] = modules.pooling.means(model.hidden(batch), batch)
        return normalize_array(rows) if self.normalize or len(modules.layers) else rows

    def _blocks(self, texts: Iterable[str], prompt: str | None) -> Iterator[_Block]:
        """Results by many at a time, so that there is little to do for each text by itself.

        On a GPU, vectors of texts in memory come back while the next block runs. Where tokenizing takes long, threads
        do it ahead; where it does not, they would only keep the interpreter from launching what the GPU waits for.
        """
        options = self.options(prompt)
        numbered = enumerate(listed(texts, "embed"))
        checked = ((i, text if type(text) is str else checked_text(text, f"text {i}")) for i, text in numbered)
        chunks = chunked(checked, lambda one: len(one[1]))
        if self.compute is not None:  # whoever computes packs the batches, too
            return (self._apart(chunk, options) for chunk in chunks)
        late = self.model.device.type != "cpu" and isinstance(texts, Sized) and len(texts) > base.ITEMS_AT_ONCE
        some = list(islice(texts, base.ITEMS_AT_ONCE)) if late and isinstance(texts, Sequence) else []
        threads = 0 if not late or self.tokenizer.is_compiled(some) else THREADS
        return self._in_flight(chunks, options, threads, late)

    def _in_flight(
        self, chunks: Iterable[_Chunk], options: _Options, threads: int, late: bool = False
    ) -> Iterator[_Block]:
        """The blocks in order; with threads, or if that may be `late`, each is fetched when the next is on its way."""
        flying: deque[Callable[[], _Block]] = deque()
        for chunk, flat in ahead(lambda chunk: self._tokenized(chunk, options), chunks, threads):
            flying.append(self._launched(chunk, flat, options))
            if len(flying) > (1 if threads or late else 0):
                yield flying.popleft()()
        for land in flying:
            yield land()

    def _tokenized(self, chunk: _Chunk, options: _Options) -> Encodings:
        try:
            return self.tokenizer.encode_flat([self.prepare_text(options.prompt + text) for _, text in chunk])
        except InputError:
            for i, text in chunk:
                checked_text(text, f"text {i}")
            raise

    @torch.inference_mode()
    def _launched(self, chunk: _Chunk, flat: Encodings, options: _Options) -> Callable[[], _Block]:
        """Start the texts that fit into the model's max_length. What is returned waits for them, and sees to the others."""
        fit = flat.lengths <= self.checkpoint.max_length
        fits, far = np.flatnonzero(fit), np.flatnonzero(~fit)
        said: list[tuple[NDArray[np.int64], PendingCopy]] = []
        for group in pack(flat.lengths[fits].tolist(), self.budget):
            mine = fits[group]
            batch = Batch.select(flat, mine).to(self.model.device)
            skips = None
            if options.prompt_tokens:
                skips = np.where(flat.lengths[mine] > options.prompt_tokens, options.prompt_tokens, 0).tolist()
            rows = self._pooled(self.model.hidden(batch), batch, skips)
            said.append((mine, self._finish(rows)))

        def land() -> _Block:
            vectors = np.empty((len(chunk), self.dimension), dtype=np.float32)
            counts = np.ones((len(chunk), 3), np.int64)
            counts[:, :2] = (flat.lengths - self.tokenizer.special_count)[:, None]
            for mine, rows in said:
                vectors[mine] = rows.host
            if len(far):
                block = self._apart([chunk[i] for i in far], options)
                vectors[far], counts[far] = block.vectors, block.counts
            return _Block(vectors, counts)

        return land

    def _apart(self, chunk: _Chunk, options: _Options) -> _Block:
        """As all tasks run."""
        texts = ((f"text {i}", checked_text(text, f"text {i}")) for i, text in chunk)
        asks = (TaskInput(name, (self.prepare_text(options.prompt + text),), options) for name, text in texts)
        found = list(self.run(asks))
        counts = np.array([(one.tokens_total, one.tokens_read, one.windows) for one in found])
        return _Block(np.stack([one.vector for one in found]), counts)

    def options(self, prompt: str | None = None) -> _Options:
        """The prompt of that name, or the default one, with its length in tokens."""
        text = self._prompt(prompt)
        return _Options(self._tokens(text), text)

    def _prompt(self, name: str | None) -> str:
        """What goes before each text."""
        name = name if name is not None else self.modules.default_prompt
        if name is not None and name not in self.modules.prompts:
            known = ", ".join(self.modules.prompts) or "none"
            raise InputError(f"prompt={name!r} is not one of the checkpoint's prompts: {known}")
        return self.modules.prompts[name] if name is not None else ""

    def prepare_text(self, text: str) -> str:
        """Lower-case a text if the checkpoint says so."""
        return text.lower() if self.modules.lower_case else text

    def _tokens(self, prompt: str) -> int:
        """How many tokens a prompt has, with the special one before it and without the one after it."""
        if not prompt:
            return 0
        encoding = self.tokenizer.encode(self.prepare_text(prompt))
        return len(encoding) - int(encoding.special[-1])

    def similarity(self, a: Iterable[str], b: Iterable[str] | None = None) -> NDArray[np.float32]:
        """(N, M) how alike each of `a` is to each of `b`, or of `a` itself: by cosine, or as the checkpoint says."""
        one = self.embed(a)
        return self.compare(one, one if b is None else self.embed(b))

    def compare(self, one: NDArray[np.float32], two: NDArray[np.float32]) -> NDArray[np.float32]:
        """(N, D), (M, D) -> (N, M) as `similarity`, of vectors that are there already."""
        name = self.modules.similarity or "cosine"
        if name in ("euclidean", "manhattan"):
            distance = torch.cdist(torch.from_numpy(one), torch.from_numpy(two), p=2.0 if name == "euclidean" else 1.0)
            found: NDArray[np.float32] = -distance.numpy()
            return found
        if name == "cosine":
            one, two = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12) for x in (one, two))
        return one @ two.T

    def outputs(
        self, hidden: Tensor, batch: Batch, asks: Sequence[TaskInput[_Options]], group: Sequence[Window]
    ) -> Sequence[FloatArray]:
        """(width,) the pooled state of each window."""
        skips = [prompt_tokens_in(window, ask.options.prompt_tokens) for ask, window in zip(asks, group, strict=True)]
        return self.by_text(self._pooled(hidden, batch, skips))

    def _pooled(self, hidden: Tensor, batch: Batch, skips: Sequence[int] | None) -> Tensor:
        """(T, D) -> (B, pooled width)."""
        rows: Tensor = self._placed(hidden).pooling(hidden, batch, skips)
        return rows.float()

    def _placed(self, states: Tensor) -> SentenceModules:
        """What follows the encoder, where these are."""
        if any(one.device != states.device for one in self.modules.parameters()):
            with torch.inference_mode(False):  # weights that were made under it could not be trained later
                self.modules.to(states.device)
        return self.modules

    def decode(self, ask: TaskInput[_Options], found: Sequence[Window], outputs: Sequence[FloatArray]) -> Embedding:
        """Average the windows; what follows the pooling is done for many at once, in `run`."""
        return Embedding(pooled(found, outputs), **reading(found))

    def run(self, asks: Iterable[TaskInput[_Options]]) -> Iterator[Embedding]:
        """As all tasks run, with what follows the pooling at the end."""
        found = super().run(asks)
        while some := list(islice(found, 1 if self.deterministic else 256)):
            rows = torch.from_numpy(np.stack([one.vector for one in some])).to(self.model.device)
            for one, vector in zip(some, self._finish(rows), strict=True):
                yield replace(one, vector=vector)

    @torch.inference_mode()
    def _finish(self, rows: Tensor) -> PendingCopy:
        rows = self._placed(rows).project(rows)
        rows = rows if self.dimensions is None else rows[:, : self.dimensions]
        whole = self.dimensions is None and self.modules.truncate_dim is None
        done = whole and len(self.modules.layers) > 0 and isinstance(self.modules.layers[-1], Normalize)
        return self.by_text(normalize(rows) if self.normalize and not done else rows)

    # --- token weights ---

    def weight_tokens(self, texts: Iterable[str], *, smoothing: float = 0.1) -> Self:
        """Weight tokens by their inverse frequency in `texts` before mean pooling (SIF), without training.

        A token that occurs in the fraction p of the texts gets the weight smoothing / (smoothing + p). Use many texts
        from the domain that will be searched, and re-embed what was embedded before.

        >>> embedder = Embedder.load("bertie-small").weight_tokens(["The cat sat.", "The dog ran.", "The end."])
        >>> weights = embedder.modules.pooling.token_weights
        >>> bool(weights[embedder.tokenizer.id("the")] < weights[embedder.tokenizer.id("cat")])
        True
        """
        if not isinstance(smoothing, Real) or isinstance(smoothing, bool) or not 0 < smoothing < inf:
            raise InputError(f"smoothing={smoothing!r} must be a number above 0")
        modes = self.modules.pooling.modes
        if not all(mode in ("mean", "mean_sqrt_len_tokens", "weightedmean") for mode in modes):
            raise InputError(f"token weights need mean pooling; this model's is {' + '.join(modes)}")
        size, count = self.model.config.vocab, 0
        frequencies = np.zeros(size, np.int64)  # number of texts with each token
        numbered = ((i, checked_text(text, f"text {i}")) for i, text in enumerate(listed(texts, "weight_tokens")))
        for chunk in chunked(numbered, lambda pair: len(pair[1])):
            flat = self._tokenized(chunk, _Options(0))
            number = np.repeat(np.arange(len(chunk)), flat.lengths)
            frequencies += np.bincount(np.unique(number * size + flat.ids) % size, minlength=size)
            count += len(chunk)
        if not count:
            raise InputError("weight_tokens needs at least one text")
        vocabulary = self.tokenizer.vocabulary
        weights = torch.from_numpy((smoothing / (smoothing + frequencies / count)).round(4)).float()
        self.modules = self.modules.with_token_weights(weights, [vocabulary.get(id, "") for id in range(size)])
        self.checkpoint = replace(self.checkpoint, sentence=self.modules)
        return self


def prompt_tokens_in(window: Window, prompt: int) -> int:
    """How many of a window's tokens are the prompt's: of several windows only the first begins with it."""
    return prompt if 0 < prompt < len(window) and window.places[prompt - 1] == prompt - 1 else 0
