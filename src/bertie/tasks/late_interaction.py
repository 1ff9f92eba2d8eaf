"""Late interaction (ColBERT): one embedding per token, and MaxSim between a query's and a document's.

The score of a document is the sum over the query's tokens of the largest dot product with a token of the document. A
long document is read in windows, each token's embedding is that of the window that owns it, and all are compared: the
score is over the whole document. A query is expanded with mask tokens up to the checkpoint's query length; a longer one
is read whole, without expansion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.late_interaction import DIMENSION, LateInteractionModules, LateInteractionSettings
from bertie.config import Disentangled, Sliding
from bertie.errors import CheckpointError, ConfigError, InputError, NotFoundError
from bertie.nn.model import Model
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_list, check_pair, check_positive, text_inputs
from bertie.pipeline.language_warnings import no_warning, one_warning
from bertie.pipeline.outputs import FloatArray, PendingCopy
from bertie.pipeline.pipeline import Overflow, Pipeline
from bertie.pipeline.read_counts import READ_COUNTS
from bertie.recipe import Recipe
from bertie.tasks.base import Task
from bertie.tasks.results import RankedDocument, RelevanceResult, TokenVectorsResult
from bertie.tasks.trainable import Hyperparameters, Trainable
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings, IntArray
from bertie.text.prefix_token import PrefixTokenizer, token_ids
from bertie.text.tokenizer import Tokenizer, checked_text

NUMBERS_PER_TOKEN = 2048  # numbers that take roughly as long to return as a token takes to encode


def maxsim(query: FloatArray, document: FloatArray) -> float:
    """The best dot product of each query token with a document token, summed over the query's tokens.

    >>> maxsim(np.eye(2, dtype=np.float32), np.array([[1, 0], [0.6, 0.8]], np.float32))
    1.7999999523162842
    """
    return float((query @ document.T).max(axis=1).sum()) if len(document) else 0.0


class TokenVectorEncoder(Task[None, FloatArray, TokenVectorsResult]):
    """Token embeddings of one side: queries or documents."""

    is_query: bool = False

    def _set_checkpoint(self, checkpoint: Checkpoint, head: str | None) -> None:
        super()._set_checkpoint(checkpoint, None)
        if checkpoint.late_interaction is None:
            raise NotFoundError(
                f"{checkpoint.source} is not a late-interaction (ColBERT) model: it has no token projection"
            )
        self._replicas: dict[torch.device, tuple[LateInteractionModules, LateInteractionModules]] = {}
        self.pipeline = Pipeline(
            checkpoint,
            _marked(self.tokenizer, self.settings.query_prefix if self.is_query else self.settings.document_prefix),
            self,
            overflow=self.overflow,
            deterministic=self.deterministic,
            max_length=self._query_limit() if self.is_query else None,
        )
        if self.is_query and self.settings.query_expansion:
            _check_expansion(checkpoint, self.settings)

    def _query_limit(self) -> int:
        """The maximum length of queries: the query length only if longer queries are refused or truncated."""
        most, length = self.model.config.max_length, self.settings.query_length
        return most if self.overflow == "window" or length is None else min(most, length)

    @property
    def modules(self) -> LateInteractionModules:
        """The projection of hidden states."""
        modules = self.checkpoint.late_interaction
        assert modules is not None  # `_set_checkpoint` requires it
        return modules

    @property
    def settings(self) -> LateInteractionSettings:
        """How queries and documents are read."""
        return self.modules.settings

    @property
    def dimension(self) -> int:
        """The dimension of a token embedding."""
        return self.modules.dimension

    def inputs(self, texts: Iterable[str], caller: str = "embed") -> Iterator[TaskInput[None]]:
        """Create inputs with the checkpoint's prompt and casing."""
        settings = self.settings
        prompt = settings.query_prompt if self.is_query else settings.document_prompt
        for task_input in text_inputs(texts, caller, None):
            text = prompt + task_input.texts[0]
            yield task_input._replace(texts=(text.lower() if settings.lower_case else text,))

    # --- stages of the pipeline ---

    def output_costs(self, windows: Encodings, parameters: Sequence[None] | None) -> Sequence[int]:
        """All numbers of all tokens are returned."""
        return [int(n) * self.modules.dimension // NUMBERS_PER_TOKEN for n in windows.lengths]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[FloatArray]:
        """(n, dimension) of each window; of a query with its expansion."""
        if self.is_query and self.settings.query_expansion:
            hidden, batch = self._expanded(model, hidden, batch)
        modules = self._modules_on(hidden.device)
        rows = [modules(part.float()) for part in torch.split(hidden, list(batch.lengths))]
        return PendingCopy.per_token(torch.cat(rows), batch)

    def _expanded(self, model: Model, hidden: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
        """The hidden states of queries and of the mask tokens after them.

        No token attends to the mask tokens, unless the checkpoint enables it; they attend to the query.
        """
        longer = expand(batch, self.expansion_id, int(self.settings.query_length or 0))
        if longer.lengths == batch.lengths:
            return hidden, batch
        if self.settings.attend_to_expansion:
            return model.hidden(longer), longer
        longer = longer.with_key_lengths(batch.lengths)
        # One query at a time, so that results do not depend on the batch. Queries without expansion keep their states.
        parts = []
        for b, own in enumerate(torch.split(hidden, list(batch.lengths))):
            query = longer.slice(b, b + 1)
            more = model.hidden(query)[len(own) :] if len(query.ids) > len(own) else own[:0]
            parts += [own, more]
        return torch.cat(parts), longer

    @property
    def expansion_id(self) -> int:
        """The token that queries are expanded with."""
        id = self.tokenizer.mask_id
        if id is None:
            raise CheckpointError(f"{self.checkpoint.source} expands queries, but its tokenizer has no mask token")
        return id

    def _modules_on(self, device: torch.device) -> LateInteractionModules:
        """The projection on a device: a copy for each replica of the model."""
        modules = self.modules
        if all(parameter.device == device for parameter in modules.parameters()):
            return modules
        with torch.inference_mode(False):  # parameters created in inference mode could not be trained later
            if device == self.model.device:
                return modules.to(device)
            if device not in self._replicas or self._replicas[device][0] is not modules:
                self._replicas[device] = (modules, deepcopy(modules).to(device))
            return self._replicas[device][1]

    def decode(self, text: WindowedText[None], outputs: Sequence[FloatArray]) -> TokenVectorsResult:
        """The tokens of all windows in order, without those that are not compared."""
        windows, encoding = text.windows, text.encoding
        at = np.concatenate([window.indices[window.owned] for window in windows])
        rows = np.concatenate([output[: len(w)][w.owned] for w, output in zip(windows, outputs, strict=True)])
        order = np.argsort(at, kind="stable")
        ids, rows = encoding.ids[at[order]], rows[order]
        if self.is_query:
            added = outputs[-1][len(windows[-1]) :]
            rows = np.concatenate([rows, added])
            ids = np.concatenate([ids, np.full(len(added), self.tokenizer.mask_id or 0)])
        else:
            kept = ~np.isin(ids, self.skiplist_ids)
            ids, rows = ids[kept], rows[kept]
        tokens = tuple(self._tokens.get(id) or self._tokens.setdefault(id, self.tokenizer.token(id)) for id in ids)
        return TokenVectorsResult(np.ascontiguousarray(rows), tokens, **text.counts())

    @cached_property
    def skiplist_ids(self) -> IntArray:
        """Tokens of documents that are not compared."""
        return token_ids(self.tokenizer, self.settings.skiplist_words)

    @cached_property
    def _tokens(self) -> dict[int, str]:
        """Tokens by id, filled as they occur."""
        return {}


class QueryEncoder(TokenVectorEncoder):
    """Token embeddings of queries."""

    is_query = True


def _marked(tokenizer: Tokenizer, prefix: str) -> Tokenizer:
    """The tokenizer that marks texts with a prefix, if there is one."""
    if not prefix:
        return tokenizer
    id = tokenizer.id(prefix)
    if id is None:
        raise CheckpointError(f"the prefix {prefix!r} is not a token of the vocabulary")
    return PrefixTokenizer.create(tokenizer, id)


def _check_expansion(checkpoint: Checkpoint, settings: LateInteractionSettings) -> None:
    """Refuse encoders that cannot mask the expansion tokens in attention as PyLate does."""
    config, length = checkpoint.model.config, settings.query_length or 0
    if settings.attend_to_expansion:
        return
    windows = [pattern.window for pattern in config.patterns if isinstance(pattern, Sliding)]
    if not _can_ignore_tokens(checkpoint) or min(windows, default=length) < length - 1:
        raise ConfigError(
            f"{checkpoint.source} expands queries to {length} tokens with masked attention, which this encoder "
            "(by its convolution, disentangled attention, global tokens or short windows) does not support"
        )


def expand(batch: Batch, id: int, length: int) -> Batch:
    """Append a token to each text until it has `length` tokens.

    >>> expand(Batch.from_ids([[5, 6], [7, 8, 9, 4]]), 3, length=3).ids.tolist()
    [5, 6, 3, 7, 8, 9, 4]
    """
    ids, segments = batch.ids.cpu().numpy(), batch.segments.cpu().numpy()
    bounds = list(pairwise(np.cumsum([0, *batch.lengths]).tolist()))
    added = [max(0, length - (end - start)) for start, end in bounds]
    rows = [np.concatenate([ids[a:b], np.full(n, id)]) for (a, b), n in zip(bounds, added, strict=True)]
    kinds = [np.concatenate([segments[a:b], np.zeros(n, np.int64)]) for (a, b), n in zip(bounds, added, strict=True)]
    return Batch.from_ids(rows, kinds).to(batch.ids.device)


class LateInteraction(TokenVectorEncoder, Trainable[None, FloatArray, TokenVectorsResult]):
    """Scores documents against queries by MaxSim over token embeddings (ColBERT).

    Loads the formats of PyLate, sentence-transformers' MultiVectorEncoder and Stanford's ColBERT.

    >>> model = LateInteraction.load("lightonai/GTE-ModernColBERT-v1")                                 # doctest: +SKIP
    >>> model.rerank("What do cats eat?", ["Bread is baked.", "Cats eat meat."])[0].text               # doctest: +SKIP
    'Cats eat meat.'

    `fit` takes the same data as `Embedder.fit`. If the model is a plain encoder, a projection to `dimension` is
    added, queries are expanded to `query_length` tokens, and documents are read in windows of `document_length`.

    >>> model = LateInteraction("path/to/any/encoder", epochs=1)                                       # doctest: +SKIP
    >>> model.fit([("What do cats eat?", "Cats eat meat."), …]).save("my-colbert")                     # doctest: +SKIP
    """

    def __init__(
        self,
        model: Checkpoint | str | Path | None = None,
        *,
        overflow: Overflow = "window",
        deterministic: bool = False,
        loss: Any = None,
        dimension: int | None = None,
        query_length: int | None = None,
        document_length: int | None = None,
        device: str | torch.device | None = None,
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        check_positive(dimension=dimension, query_length=query_length, document_length=document_length)
        self.loss = loss  # a name, or a `bertie.training.embedding.losses.EmbeddingLoss`
        self.new_dimension, self.new_query_length, self.new_document_length = dimension, query_length, document_length
        super().__init__(model, overflow=overflow, deterministic=deterministic, device=device, **hyperparameters)
        self.recipe = self.recipe.replace(loss=loss if isinstance(loss, str) else None)

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        """Set the checkpoint. One without a projection waits for `fit`."""
        if checkpoint.late_interaction is None:
            self._without_head = checkpoint
            return
        Task._use(self, checkpoint, None)

    @classmethod
    def from_recipe(cls, model: Checkpoint | str | Path | None, recipe: Recipe, **options: Any) -> Self:
        """A model with the hyperparameters of a recipe; `options` are the other arguments of the constructor."""
        values = recipe.as_dict()
        for name in ("matryoshka", "pooling"):
            if (value := values.pop(name)) is not None:
                raise InputError(f"{name}={value!r} is for one embedding per text; leave it out")
        return cls(model, **options, **values)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        params = {key: value for key, value in super().get_params(deep).items() if key != "head"}
        own = {name: getattr(self, f"new_{name}") for name in ("dimension", "query_length", "document_length")}
        return params | own | {"loss": self.loss}

    def modules_for(self, checkpoint: Checkpoint) -> LateInteractionModules:
        """The checkpoint's projection with the requested lengths, or a new one."""
        lengths = {"query_length": self.new_query_length, "document_length": self.new_document_length}
        given = {name: value for name, value in lengths.items() if value is not None}
        modules, tokenizer = checkpoint.late_interaction, checkpoint.tokenizer
        if modules is not None:
            if self.new_dimension not in (None, modules.dimension):
                raise ConfigError(f"dimension={self.new_dimension} must be {modules.dimension}, that of the checkpoint")
            return modules.with_settings(**given) if given else modules
        assert tokenizer is not None
        marks = ("[unused0]", "[unused1]")  # BERT's vocabulary has them for such uses
        prefixes = marks if all(tokenizer.id(mark) is not None for mark in marks) else ("", "")
        settings = LateInteractionSettings(
            query_prefix=prefixes[0],
            document_prefix=prefixes[1],
            query_length=self.new_query_length or min(32, checkpoint.max_length),
            document_length=min(self.new_document_length or 180, checkpoint.max_length),
            query_expansion=tokenizer.mask_id is not None,
            attend_to_expansion=not _can_ignore_tokens(checkpoint),
        )
        config = checkpoint.model.config
        dimension = self.new_dimension or DIMENSION
        return LateInteractionModules.create(
            config.width, dimension, settings, init_std=config.init_std, seed=self.recipe.seed
        )

    @property
    def queries(self) -> QueryEncoder:
        """The encoder of queries, over the same checkpoint."""
        encoder: QueryEncoder | None = self.__dict__.get("_queries")
        if encoder is None or encoder.checkpoint is not self.checkpoint:
            encoder = QueryEncoder(self.checkpoint, overflow=self.overflow, deterministic=self.deterministic)
            self.__dict__["_queries"] = encoder
        encoder.pipeline.executor = self.pipeline.executor
        return encoder

    # --- embeddings ---

    @explain_arguments
    def embed_queries(self, texts: str | Iterable[str], *, progress: bool | None = None) -> Any:
        """Embed queries into a list of arrays (n, dimension), one row per token; a single query into one array."""
        results = self.queries.collect(texts, self.embed_queries_each, "embed", progress, unit="queries")
        return results.vectors if isinstance(texts, str) else [result.vectors for result in results]

    @explain_arguments
    def embed_documents(self, texts: str | Iterable[str], *, progress: bool | None = None) -> Any:
        """Embed documents into a list of arrays (n, dimension), one row per token; a single document into one array."""
        results = self.collect(texts, self.embed_documents_each, "embed", progress, unit="documents")
        return results.vectors if isinstance(texts, str) else [result.vectors for result in results]

    encode_query, encode_document = embed_queries, embed_documents

    def embed_queries_each(self, texts: Iterable[str]) -> Iterator[TokenVectorsResult]:
        """Like `embed_queries`, but yield results one by one, with tokens and how much of each was read."""
        encoder = self.queries
        return encoder.run(encoder.inputs(texts, "embed_queries"), texts)

    def embed_documents_each(self, texts: Iterable[str]) -> Iterator[TokenVectorsResult]:
        """Like `embed_documents`, but yield results one by one, with tokens and how much of each was read."""
        return self.run(self.inputs(texts, "embed_documents"), texts)

    # --- scores ---

    @overload
    def rerank(  # type: ignore[overload-overlap]
        self, query: str, documents: str, *, top_k: int | None = None, progress: bool | None = None
    ) -> RankedDocument: ...
    @overload
    def rerank(
        self, query: str, documents: Iterable[str], *, top_k: int | None = None, progress: bool | None = None
    ) -> list[RankedDocument]: ...
    @explain_arguments
    def rerank(self, query: str, documents: Any, *, top_k: int | None = None, progress: bool | None = None) -> Any:
        """Rank documents by relevance to the query, best first; the first `top_k` if given.

        A single document returns a single result. `rank` is an alias.
        """
        check_positive(top_k=top_k)
        if isinstance(documents, str):
            return self.rerank(query, [documents], progress=progress)[0]
        checked_text(query, "the query")
        listed = check_list(documents, "rerank", "documents")
        texts = [checked_text(text, f"document {i}") for i, text in enumerate(listed)]
        embedding = self.embed_queries(query, progress=False)
        results = self.collect(texts, self.embed_documents_each, "rerank", progress, unit="documents")
        ranked = [
            RankedDocument(i, maxsim(embedding, result.vectors), texts[i], *read_counts(result))
            for i, result in enumerate(results)
        ]
        return sorted(ranked, key=lambda document: (-document.score, document.index))[:top_k]

    rank = rerank

    @overload
    def predict(self, X: tuple[str, str], *, progress: bool | None = None) -> float: ...
    @overload
    def predict(self, X: Iterable[tuple[str, str]], *, progress: bool | None = None) -> NDArray[np.float32]: ...
    @explain_arguments
    def predict(self, X: Any, *, progress: bool | None = None) -> Any:
        """(n,) scores of (query, document) pairs; for a single pair, a float."""
        if isinstance(X, tuple) and len(X) == 2 and all(isinstance(text, str) for text in X):
            return float(self.predict([X], progress=progress)[0])
        pairs = list(check_list(X, "predict", "pairs"))
        results = self.collect(pairs, self.predict_each, "predict", progress, unit="pairs")
        return np.array([result.score for result in results], dtype=np.float32)

    def predict_each(self, X: Iterable[tuple[str, str]]) -> Iterator[RelevanceResult]:
        """Like `predict`, but yield results one by one, with how much was read. Each query is embedded once."""
        listed = enumerate(check_list(X, "predict", "pairs"))
        pairs = [check_pair(texts, f"pair {i}", "a query and a document") for i, texts in listed]
        queries = list(dict.fromkeys(query for query, _ in pairs))
        with no_warning():
            embeddings = dict(zip(queries, self.embed_queries(queries, progress=False), strict=True))
        for (query, _), result in zip(pairs, self.embed_documents_each([text for _, text in pairs]), strict=True):
            yield RelevanceResult(maxsim(embeddings[query], result.vectors), *read_counts(result))

    @explain_arguments
    @one_warning()
    def similarity(
        self, queries: str | Iterable[str], documents: str | Iterable[str], *, progress: bool | None = None
    ) -> Any:
        """(N, M) the MaxSim score of each query and each document; a single text adds no axis."""
        firsts = self.embed_queries([queries] if isinstance(queries, str) else queries, progress=progress)
        seconds = self.embed_documents([documents] if isinstance(documents, str) else documents, progress=progress)
        rows = np.array([[maxsim(a, b) for b in seconds] for a in firsts], np.float32).reshape(-1, len(seconds))
        if isinstance(queries, str):
            return float(rows[0, 0]) if isinstance(documents, str) else rows[0]
        return rows[:, 0] if isinstance(documents, str) else rows


def read_counts(result: TokenVectorsResult) -> tuple[int, ...]:
    """How much of a text was read."""
    return tuple(getattr(result, name) for name in READ_COUNTS)


def _can_ignore_tokens(checkpoint: Checkpoint) -> bool:
    """Whether the encoder supports tokens that are masked in attention."""
    config = checkpoint.model.config
    relative = any(isinstance(scheme, Disentangled) for scheme in config.positions)
    return config.conv is None and not config.global_tokens and not relative
