"""Texts to vectors.

Over several windows, the pooled vectors are averaged with the tokens that each window answers for as weights, before
whatever follows the pooling (a dense layer, the scaling to length 1). Training reads long texts in the same way.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from math import inf
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint, default_model
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.model_spec import model_spec
from bertie.config import HeadInfo
from bertie.errors import ConfigError, InputError
from bertie.nn.heads import Head
from bertie.nn.model import Model
from bertie.nn.sentence_modules import Normalize, SentenceModules, normalized, scaled
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
from bertie.tasks.learn import Learner, Predictions, pieces
from bertie.text.batch import Batch, pack
from bertie.text.tokenizer import Flat, checked_text
from bertie.text.windows import Window
from bertie.training.recipe import POOLINGS, Recipe

if TYPE_CHECKING:
    from bertie.evaluation.scores import Score
    from bertie.training.embedding.losses import VectorLoss
    from bertie.training.embedding.objective import EmbeddingObjective
    from bertie.training.finetune.data import Example, Labelled
    from bertie.training.objectives import TrainingExample, TrainingWindow
    from bertie.training.sampling import BatchSampler

POOLING = {"cls": "cls", "mean": "mean", "max": "max", "last": "lasttoken", "weighted-mean": "weightedmean"}
# The loss for each kind of data, where none is named.
USUAL = {"pairs": "infonce", "scores": "cosent", "classes": "softmax", "lists": "kl"}
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
    before: str = ""  # the prompt


_Chunk = list[tuple[int, str]]  # texts with their numbers


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """The results of some texts."""

    vectors: NDArray[np.float32]  # (N, dimension)
    counts: NDArray[np.int64]  # (N, 3) tokens in all, tokens read, windows

    def __iter__(self) -> Iterator[Embedding]:
        for vector, counts in zip(self.vectors, self.counts.tolist(), strict=True):
            yield Embedding(vector, *counts)


class Embedder(Learner[_Options, FloatArray, Embedding]):
    """Turns each text into one vector, as the checkpoint's sentence-transformers modules say.

    A checkpoint without such modules is pooled by the mean over tokens, unless `pooling` says otherwise: cls, mean,
    max, last or weighted-mean. `normalize` scales vectors to length 1; `dimensions` keeps their first numbers, as
    models trained for it allow, before the scaling.

    >>> embedder = Embedder.load("sentence-transformers/all-MiniLM-L6-v2")       # doctest: +SKIP
    >>> embedder.embed(["A cat sat on the mat.", "The feline rested."]).shape    # doctest: +SKIP
    (2, 384)

    Or trains one, with the hyperparameters of `bertie.training.recipe.Recipe`:

    >>> embedder = Embedder("path/to/any/encoder", batch_size=256)                              # doctest: +SKIP
    >>> embedder.fit([("What do cats eat?", "Cats eat meat."), …], dev=pairs).save("my-model")  # doctest: +SKIP

    The data says what is learnt. Pairs that belong together, with texts that do not if there are any: each text is to
    find its own among all of its step (`InfoNCE`), and no step has a text twice. Pairs with scores: their order
    (`CoSENT`). Pairs with classes: Sentence-BERT's `Softmax`. Queries with passages and a teacher's scores: their
    distribution (`KL`). `loss` names another (infonce, triplet, softmax, cosine, cosent, contrastive, margin-mse, kl,
    with settings as in "triplet:margin=0.2,distance=cosine"), or is one of `bertie.training.embedding.losses`; `matryoshka` lists
    shorter lengths that vectors shall serve at, too.
    """

    data_kind = "embed"

    def __init__(
        self,
        checkpoint: Checkpoint | str | Path,
        *,
        overflow: Overflow = "window",
        pooling: Literal["cls", "mean", "max", "last", "weighted-mean"] | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        loss: str | VectorLoss | None = None,
        device: str | torch.device | None = None,
        **training: Any,
    ) -> None:
        if pooling is not None and pooling not in POOLINGS:
            raise InputError(f"pooling={pooling!r} must be one of {', '.join(POOLINGS)}")
        self.normalize, self.dimensions = normalize, dimensions
        self._loss = loss  # by name it is one of the recipe
        named = loss if loss is None or isinstance(loss, str) else None
        super().__init__(checkpoint, overflow=overflow, device=device, pooling=pooling, loss=named, **training)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        Task._use(self, checkpoint, None)
        self.modules = self._behind(checkpoint, normalize=False)  # which `_finish` does
        if self.dimensions is not None and not 1 <= self.dimensions <= self.modules.dimension:
            raise InputError(f"dimensions={self.dimensions} must lie between 1 and {self.modules.dimension}")

    def _behind(self, checkpoint: Checkpoint, *, normalize: bool) -> SentenceModules:
        """What follows the encoder."""
        width, pooling, given = checkpoint.model.config.width, self.recipe.pooling, checkpoint.sentence
        if pooling is None:
            return given or SentenceModules.fresh(width, normalize=normalize)
        modules = SentenceModules.fresh(width, pooling=POOLING[pooling], normalize=normalize)
        if given is not None:
            modules.prompts, modules.default_prompt = given.prompts, given.default_prompt
            modules.lower_case = given.lower_case
        return modules

    def __getattr__(self, name: str) -> Any:
        """A checkpoint given by name is loaded when it is first needed."""
        if name not in ("checkpoint", "model", "tokenizer", "head", "modules") or "_given" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._use(self._start(), None)
        return self.__dict__[name]

    @classmethod
    def load(cls, name: str | Path | None = None, *, overflow: Overflow = "window", **options: Any) -> Self:
        """Load a checkpoint, the built-in model if none is named.

        `options` are `pooling`, `normalize`, `dimensions`, hyperparameters for `fit`, and those of `Checkpoint.load`.
        """
        known = ("normalize", "dimensions", *(one.name for one in fields(Recipe)))
        mine = {key: options.pop(key) for key in known if key in options}
        return cls(Checkpoint.load(default_model() if name is None else name, **options), overflow=overflow, **mine)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments, as scikit-learn wants them."""
        mine = {"normalize": self.normalize, "dimensions": self.dimensions, "loss": self._loss}
        return {key: value for key, value in super().get_params(deep).items() if key != "head"} | mine

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
        batch = Batch.chosen(flat, None)
        with torch.inference_mode():
            rows: NDArray[np.float32] = modules.pooling.means(model.hidden(batch), batch)
        return scaled(rows) if self.normalize or len(modules.layers) else rows

    def _blocks(self, texts: Iterable[str], prompt: str | None) -> Iterator[_Block]:
        """Results by many at a time, so that there is little to do for each text by itself.

        On a GPU, vectors of texts in memory come back while the next block runs. Where tokenizing takes long, threads
        do it ahead; where it does not, they would only keep the interpreter from launching what the GPU waits for.
        """
        before = self._prompt(prompt)
        options = _Options(self._tokens(before), before)
        numbered = enumerate(listed(texts, "embed"))
        checked = ((i, text if type(text) is str else checked_text(text, f"text {i}")) for i, text in numbered)
        chunks = chunked(checked, lambda one: len(one[1]))
        if self.compute is not None:  # whoever computes packs the batches, too
            return (self._apart(chunk, options) for chunk in chunks)
        late = self.model.device.type != "cpu" and isinstance(texts, Sized) and len(texts) > base.ITEMS_AT_ONCE
        some = list(islice(texts, base.ITEMS_AT_ONCE)) if late and isinstance(texts, Sequence) else []
        threads = 0 if not late or self.tokenizer.is_quick(some) else THREADS
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

    def _tokenized(self, chunk: _Chunk, options: _Options) -> Flat:
        try:
            return self.tokenizer.encode_flat([self._prepared(options.before + text) for _, text in chunk])
        except InputError:
            for i, text in chunk:
                checked_text(text, f"text {i}")
            raise

    @torch.inference_mode()
    def _launched(self, chunk: _Chunk, flat: Flat, options: _Options) -> Callable[[], _Block]:
        """Start the texts that fit into the model's max_length. What is returned waits for them, and sees to the others."""
        fit = flat.lengths <= self.checkpoint.max_length
        fits, far = np.flatnonzero(fit), np.flatnonzero(~fit)
        said: list[tuple[NDArray[np.int64], PendingCopy]] = []
        for group in pack(flat.lengths[fits].tolist(), self.budget):
            mine = fits[group]
            batch = Batch.chosen(flat, mine).to(self.model.device)
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
        asks = (TaskInput(name, (self._prepared(options.before + text),), options) for name, text in texts)
        found = list(self.run(asks))
        counts = np.array([(one.tokens_total, one.tokens_read, one.windows) for one in found])
        return _Block(np.stack([one.vector for one in found]), counts)

    def _prompt(self, name: str | None) -> str:
        """What goes before each text."""
        name = name if name is not None else self.modules.default_prompt
        if name is not None and name not in self.modules.prompts:
            known = ", ".join(self.modules.prompts) or "none"
            raise InputError(f"prompt={name!r} is not one of the checkpoint's prompts: {known}")
        return self.modules.prompts[name] if name is not None else ""

    def _prepared(self, text: str) -> str:
        return text.lower() if self.modules.lower_case else text

    def _tokens(self, prompt: str) -> int:
        """How many tokens a prompt has, with the special one before it and without the one after it."""
        if not prompt:
            return 0
        encoding = self.tokenizer.encode(self._prepared(prompt))
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
        skips = [_skip(window, ask.options.prompt_tokens) for ask, window in zip(asks, group, strict=True)]
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
        return self.by_text(normalized(rows) if self.normalize and not done else rows)

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

    # --- training ---

    def fit_labelled(self, data: Labelled, dev: Labelled | None = None, **options: Any) -> Self:
        """As `fit`, on data that was read already."""
        if dev is not None and dev.inputs == "classes" and not _numbers(dev):
            raise InputError(
                f"{dev.name} has classes, by which vectors cannot be predictions; give data with scores, or pairs that "
                "belong together"
            )
        try:
            return super().fit_labelled(data, dev, **options)
        finally:
            if "model" in self.__dict__:
                self.model.auxiliary.clear()

    def head_for(self, data: Labelled) -> HeadInfo:
        """There is none."""
        raise ConfigError("an Embedder has no head; train it by itself, not among bertie.Heads")

    def _ready(self, checkpoint: Checkpoint, data: Labelled) -> Checkpoint:
        """The encoder with what follows it, and no heads: they were trained for another encoder than will come out."""
        spec, config = checkpoint.spec, checkpoint.config
        if not set(spec.heads) <= {"pooler"}:
            config = {
                key: value for key, value in config.items() if key not in (*CrossEncoderConfig.CONFIG_KEYS, *_GONE)
            }
            config["architectures"] = [name for name, heads in spec.family.architectures.items() if not heads][:1]
            spec = model_spec(config, None, head="none", ignore=spec.ignored)
        kept: dict[str, Head] = {name: checkpoint.model.head(name) for name in spec.heads}
        return replace(
            checkpoint,
            model=Model.over(checkpoint.model.encoder, kept).eval(),
            config=config,
            spec=spec,
            heads={},
            sentence=self._behind(checkpoint, normalize=bool(self.normalize)),
            cross_encoder=None,
        )

    def _plan(self, data: Labelled) -> BatchSampler:
        from bertie.training.embedding.rows import Rows
        from bertie.training.sampling import TrainingTask

        assert self.checkpoint.sentence is not None
        self.modules = self.checkpoint.sentence
        objective = self.objective(data)
        objective.begin(self.model, self.modules)
        apart = objective.loss.inputs == "pairs"  # other rows' texts are taken for wrong ones
        texts = [example.texts for example in data.examples] if apart else None
        return Rows(TrainingTask("", objective, list(self.items(data))), self.recipe, texts)

    def objective(self, data: Labelled) -> EmbeddingObjective:
        """A loss over all vectors of a step."""
        from bertie.training.embedding.losses import KL, Matryoshka, VectorLoss
        from bertie.training.embedding.objective import EmbeddingObjective, named_loss
        from bertie.training.embedding.similarity import Cosine, Dot

        if isinstance(self._loss, VectorLoss):
            loss = self._loss
        elif self.recipe.loss is None and data.inputs == "lists":
            loss = KL(scale=20.0, score=Cosine())
        else:
            loss = named_loss(self.recipe.loss or USUAL[data.inputs], classes=len(data.labels))
        _fitting(loss, data)
        self._values = loss.inputs
        self._number = {label: i for i, label in enumerate(data.labels)}
        if self.recipe.matryoshka is not None:
            whole = self.modules.dimension
            loss = Matryoshka(loss, tuple(dict.fromkeys((whole, *self.recipe.matryoshka))))
        elif isinstance(getattr(loss, "score", None), Dot) and self.modules.similarity is None:
            self.modules.similarity = "dot"  # as it was trained to be compared
        return EmbeddingObjective(loss)

    def items(self, data: Labelled) -> Iterator[TrainingExample]:
        """Rows of texts, tokenized; each text is read as `embed` reads it."""
        from bertie.training.embedding.objective import row

        before = self._prompt(None)
        options = _Options(self._tokens(before))
        for start in range(0, len(data.examples), base.ITEMS_AT_ONCE):
            chunk = data.examples[start : start + base.ITEMS_AT_ONCE]
            texts = [self._prepared(before + text) for example in chunk for text in example.texts]
            encoded = iter(zip(texts, self.tokenizer.encode_batch(texts), strict=True))
            for example in chunk:
                name = f"{data.name}, row {example.row}"
                some = [self.windows(TaskInput(name, (t,), options), e) for t, e in islice(encoded, len(example.texts))]
                yield row([self._pieces(found, options.prompt_tokens) for found in some], self._value(example))

    def item(self, example: Example, found: Sequence[Window]) -> TrainingExample:
        """One text by itself."""
        from bertie.training.embedding.objective import row

        return row([self._pieces(found, self._tokens(self._prompt(None)))], self._value(example))

    def _pieces(self, found: Sequence[Window], prompt: int) -> Sequence[TrainingWindow]:
        if not prompt or self.modules.pooling.include_prompt:
            return pieces(found)
        skips = [np.array(_skip(window, prompt)) for window in found]
        return [replace(piece, values=skip) for piece, skip in zip(pieces(found), skips, strict=True)]

    def _value(self, example: Example) -> Any:
        if self._values == "classes":
            return np.int64(self._number[example.target])
        return None if example.target is None else np.array(example.target, dtype=np.float32)

    def _fingerprint(self, *data: Labelled | None) -> str:
        loss = re.sub(r" at 0x\w+", "", repr(self._loss))  # a function's place is another in each process
        return f"{super()._fingerprint(*data)} {loss}"

    def predict_labelled(self, data: Labelled) -> Predictions:
        """How alike the texts of each row are; of pairs that belong together, at which rank the right one is found."""
        places = {text: i for i, text in enumerate(dict.fromkeys(t for one in data.examples for t in one.texts))}
        found = list(self.embed_each(list(places)))
        vectors = np.stack([one.vector for one in found])
        rows = [[places[text] for text in example.texts] for example in data.examples]
        counts = [
            np.array([sum(getattr(found[i], name) for i in row) for row in rows])
            for name in ("tokens_total", "tokens_read", "windows")
        ]
        if data.inputs == "pairs":
            ranks = self._ranks(rows, vectors)
            return Predictions("find", data, [1] * len(rows), ranks, None, None, counts[0], counts[1], counts[2])
        alike = [self.compare(vectors[row[:1]], vectors[row[1:]])[0] for row in rows]
        if data.inputs == "lists":  # each passage is a row
            several = [len(one) for one in alike]
            examples = [
                replace(one, texts=(one.texts[0], text), target=target)
                for one in data.examples
                for text, target in zip(one.texts[1:], one.target, strict=True)
            ]
            data, counts = replace(data, examples=examples, inputs="scores"), [np.repeat(c, several) for c in counts]
        gold = [float(example.target) for example in data.examples]
        said = np.concatenate(alike).tolist()
        return Predictions("alike", data, gold, said, None, None, counts[0], counts[1], counts[2])

    def _ranks(self, rows: Sequence[Sequence[int]], vectors: NDArray[np.float32]) -> list[tuple[float, ...]]:
        """The rank of each row's second text for its first, among all second and later ones; ties count against it.

        Other texts that belong to the first are not in its way, nor is it itself. With negatives: whether it is above
        all those of its own row, too.
        """
        right: dict[int, set[int]] = {}
        for first, second, *_ in rows:
            right.setdefault(first, {first}).add(second)
        others = sorted({i for row in rows for i in row[1:]})
        column = {i: n for n, i in enumerate(others)}
        ranks: list[tuple[float, ...]] = []
        for start in range(0, len(rows), 256):
            block = rows[start : start + 256]
            table = self.compare(vectors[[row[0] for row in block]], vectors[others])  # (256, candidates)
            for (first, second, *wrong), alike in zip(block, table, strict=True):
                own = alike[column[second]]
                beaten = [own > alike[column[i]] for i in wrong]
                alike[[column[i] for i in right[first] if i in column]] = -np.inf
                rank = 1.0 + float((alike >= own).sum())
                ranks.append((rank, float(all(beaten))) if wrong else (rank,))
        return ranks

    def scores(self, predictions: Predictions, draws: int = 1000) -> dict[str, Score]:
        """Correlations with the scores; or how often the right text is found."""
        from bertie.evaluation import scores

        return (scores.finding if predictions.kind == "find" else scores.alikeness)(
            predictions.gold, predictions.predicted, draws=draws
        )


_GONE = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type")  # of a config.json: what a head says


def _skip(window: Window, prompt: int) -> int:
    """How many of a window's tokens are the prompt's: of several windows only the first begins with it."""
    return prompt if 0 < prompt < len(window) and window.places[prompt - 1] == prompt - 1 else 0


def _numbers(data: Labelled) -> bool:
    """Whether all classes are numbers, and so may be scores."""
    return all(label.removeprefix("-").isdigit() for label in data.labels)


def _fitting(loss: VectorLoss, data: Labelled) -> None:
    """Refuse data that a loss cannot learn from."""
    wanted, name = loss.inputs, type(loss).__name__
    texts = len(data.examples[0].texts)
    if wanted == "triplets" and data.inputs == "pairs":
        if texts != 3:
            raise InputError(f"{name} takes three texts a row, and {data.name} has {texts}: anchor, positive, negative")
        return
    if wanted == "scores" and data.inputs == "classes" and _numbers(data):
        return
    if wanted != data.inputs:
        needs = {
            "pairs": "texts that belong together (anchor, positive), without labels",
            "triplets": "three texts a row (anchor, positive, negative)",
            "scores": "two texts and a score a row (text_a, text_b, score)",
            "classes": "two texts and a label a row (text_a, text_b, label)",
            "lists": "a query, passages and a score for each",
        }.get(wanted, "vectors of a teacher, and is trained by bertie.Trainer")
        raise InputError(f"{name} learns from {needs}; {data.name} has {data.inputs}")
