"""The served models as the endpoints use them: find a model for a task, check inputs against the limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.pipeline import Overflow
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext
from bertie.serve.costs import Item, check_tokens, count_tokens
from bertie.serve.limits import Limits
from bertie.serve.tickets import Ticket, TokenLimitExceeded
from bertie.tasks.base import Task
from bertie.tasks.embed import Embedder
from bertie.tasks.late_interaction import LateInteraction
from bertie.tasks.rerank import Reranker
from bertie.tasks.zero_shot import Method, ZeroShot, entailment_label

if TYPE_CHECKING:
    from bertie.search.index import Index
    from bertie.serve.registry import Registry, ServedModel
    from bertie.text.tokenizer import Tokenizer

T = TypeVar("T", bound=Task[Any, Any, Any])
R = TypeVar("R", bound=Reranker)
FLOAT_BYTES = 12  # of a float32 in a reply, with its comma
LARGE_WORK = 1 << 15  # bytes of a body, characters of texts or values of a reply
MIN_CHARACTERS = 1 << 20  # that the texts of a request may have together at any --max-body-bytes
SAMPLED_PASSAGES, SAMPLE_QUERIES = 200, 5  # passages of an index that are read for queries to try, and those queries
_NOTHING = nullcontext()
HEADS = {  # by the kind of the head that a task needs
    "classify": "a text-classification head",
    "tag": "a token-classification head",
    "span": "a span head, as GLiNER models have",
    "answer": "a question-answering head",
    "mlm": "a masked-language-modelling head",
    "choice": "a multiple-choice head",
    "rtd": "a head for replaced-token detection",
}


class Service:
    """The served models, the index and the limits."""

    def __init__(self, registry: Registry, limits: Limits, index: tuple[Index, str] | None = None) -> None:
        """`index`: an index to search, and the name of the served model that embeds its queries."""
        self.registry, self.limits = registry, limits
        self.started = int(time.time())
        self._large_work = Lock()
        self._index = None if index is None else (index[0].store, index[1])
        self._opened: Index | None = None
        if index is not None:
            self._open_index(registry[index[1]])

    def one_at_a_time(self, size: int, ticket: Ticket) -> AbstractContextManager[None]:
        """A context for work in Python on so many bytes, characters or values. If they are many, one at a time.

        The threads of a few such requests would share the interpreter with each short request.
        """
        return _NOTHING if size <= LARGE_WORK else self._large(ticket)

    @contextmanager
    def _large(self, ticket: Ticket) -> Iterator[None]:
        while not self._large_work.acquire(timeout=0.1):
            ticket.check()
        try:
            yield
        finally:
            self._large_work.release()

    # --- models ---

    @property
    def names(self) -> list[str]:
        """The names of the models, in the order given at startup."""
        return list(self.registry)

    def use_model(self, name: str, context: RequestContext) -> ServedModel:
        """A model by name, kept until the request ends even if it is reloaded meanwhile."""
        if name not in context.models:
            context.models[name] = self.registry.acquire(name)
        return context.models[name]

    def candidates(self, name: str | None) -> list[str]:
        """The models that may answer: the named one, or all."""
        if name is None:
            return self.names
        self.check_model(name)
        return [name]

    def check_model(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name not in self.registry:
            served = ", ".join(self.names)
            raise ApiError(
                "model_not_found", f"there is no model {name[:100]!r} here; served are: {served}", field="model"
            )

    def task(
        self,
        kind: type[T],
        model: str | None,
        context: RequestContext,
        *,
        head: str | None = None,
        overflow: Overflow = "window",
        **options: Any,
    ) -> T:
        """A task over the first model that has a head for it."""
        names = self.candidates(model)
        if issubclass(kind, Embedder):  # any encoder can embed; prefer those trained for it
            names = sorted(self._dense(names), key=lambda name: self.registry[name].checkpoint.sentence is None)
        for name in names:
            if kind.kind is None or any(kind._fits(info) for info in self.registry[name].checkpoint.heads.values()):
                context.model = name
                if head is not None:
                    options["head"] = head
                return self.use_model(name, context).task(kind, overflow=overflow, **options)
        needed = "a reranking head, one with a single score" if issubclass(kind, Reranker) else HEADS[str(kind.kind)]
        subject = f"the model {names[0]!r} lacks" if len(names) == 1 else "none of the served models has"
        raise ApiError("unsupported_by_model", f"this needs {needed}, which {subject}")

    def _dense(self, names: list[str]) -> list[str]:
        """The models without sparse or token embeddings of their own."""
        checkpoints = {name: self.registry[name].checkpoint for name in names}
        others = {name: c.splade is not None for name, c in checkpoints.items() if c.splade or c.late_interaction}
        if len(others) == len(names):
            kind, use = ("SPLADE", "/embed_sparse") if others[names[0]] else ("late-interaction", "/rerank")
            raise ApiError("unsupported_by_model", f"the model {names[0]!r} is a {kind} model: use {use}")
        return [name for name in names if name not in others]

    def reranker(
        self,
        kind: type[R],
        model: str | None,
        context: RequestContext,
        *,
        head: str | None = None,
        overflow: Overflow = "window",
    ) -> R | LateInteraction:
        """A task over the first model that has a reranking head or is a late-interaction model."""
        for name in self.candidates(model):
            checkpoint = self.registry[name].checkpoint
            if any(kind._fits(info) for info in checkpoint.heads.values()):
                break
            if checkpoint.late_interaction is not None and head is None:
                return self.task(LateInteraction, name, context, overflow=overflow)
        return self.task(kind, model, context, head=head, overflow=overflow)

    def embedder(
        self, model: str | None, context: RequestContext, *, dimensions: int | None = None, **options: Any
    ) -> Embedder:
        """An embedder whose embeddings have their first `dimensions` components; all if None."""
        task = self.task(Embedder, model, context, **options)
        if dimensions is None:
            return task
        if dimensions > task.dimension:
            message = f"dimensions={dimensions} must be at most {task.dimension}"
            raise ApiError("invalid_input", message, field="dimensions")
        return self.task(Embedder, context.model, context, dimension=dimensions, **options)

    def zero_shot(
        self, model: str | None, context: RequestContext, *, head: str | None, overflow: Overflow, method: Method
    ) -> ZeroShot:
        """A zero-shot classifier over the first model with sentence embeddings or a head for NLI."""
        for name in self.candidates(model):
            checkpoint = self.registry[name].checkpoint
            entails = any(entailment_label(info) is not None for info in checkpoint.heads.values())
            if entails or (checkpoint.sentence is not None and head is None and method in ("auto", "embedding")):
                context.model = name
                return self.use_model(name, context).task(ZeroShot, overflow=overflow, head=head)
        raise ApiError(
            "unsupported_by_model",
            "zero-shot classification needs sentence embeddings or a head for natural language inference, and no "
            "served model has one of these",
        )

    def tokenizer(self, model: str | None, context: RequestContext) -> Tokenizer:
        """The tokenizer of a model, by default the first."""
        context.model = self.candidates(model)[0]
        tokenizer = self.use_model(context.model, context).checkpoint.tokenizer
        assert tokenizer is not None  # the registry refuses models without one
        return tokenizer

    # --- the index ---

    def index(self, context: RequestContext) -> Index:
        """The index, for one request."""
        if self._index is None:
            raise ApiError("unsupported_by_model", "no index is loaded; start the server with --index")
        context.model = self._index[1]
        return self._open_index(self.use_model(context.model, context))

    def _open_index(self, served: ServedModel) -> Index:
        """The index over its model as it is now: a reload may have replaced it."""
        from bertie.search.index import Index

        assert self._index is not None
        store, embedder = self._index[0], served.task(Embedder)
        if self._opened is None or self._opened.embedder is not embedder:
            self._opened = Index(store, embedder)  # which refuses a model whose embeddings differ
        return self._opened

    @property
    def passages(self) -> int | None:
        """The number of passages in the index, if one is loaded."""
        return None if self._index is None else len(self._index[0])

    @cached_property
    def index_name(self) -> str | None:
        """The name of the index's folder, without its path; of another store, its kind."""
        if self._index is None:
            return None
        folder = getattr(self._index[0], "folder", None)
        return type(self._index[0]).__name__ if folder is None else str(folder.resolve().name)

    @cached_property
    def sample_queries(self) -> list[str]:
        """Queries that the index can answer: headings or beginnings of some of its passages."""
        if self._index is None:
            return []
        store = self._index[0]
        keys = [key for key, _ in islice(store.passage_texts(), SAMPLED_PASSAGES)]
        queries: dict[str, None] = {}
        for stored in store.fetch(keys):
            passage = stored.passage
            text = passage.headings[-1] if passage.headings else " ".join(passage.text.split()[:6])
            if 2 <= len(text.split()) <= 12:
                queries[text.strip(" .,;:#*")] = None
        step = max(1, len(queries) // SAMPLE_QUERIES)
        return list(queries)[::step][:SAMPLE_QUERIES]

    # --- inputs ---

    def check_count(self, items: Sequence[Any], field: str) -> None:
        """Refuse an empty list, and one with too many items."""
        if not items:
            raise ApiError("empty", f"`{field}` cannot be empty", field=field)
        if len(items) > self.limits.items:
            raise ApiError(
                "too_large", f"batch size {len(items)} > maximum allowed batch size {self.limits.items}", field=field
            )

    def as_list(self, value: Any, field: str) -> list[Any]:
        """One item or several, as a list."""
        items = value if isinstance(value, list) else [value]
        self.check_count(items, field)
        return items

    def texts(self, inputs: Any, task: Task[Any, Any, Any], field: str, context: RequestContext) -> list[str]:
        """Texts for a task, checked against the limits; token ids are decoded, and objects have a `text`."""
        several = isinstance(inputs, list) and not (inputs and isinstance(inputs[0], int))
        items = inputs if several else [inputs]
        self.check_count(items, field)
        texts = []
        for i, item in enumerate(items):
            if not isinstance(item, str):
                context.ticket.check()
                item = item.text if hasattr(item, "text") else _decode(item, task.tokenizer, f"{field}[{i}]")
            texts.append(item)
        self.check_tokens([(text,) for text in texts], task, context)
        return texts

    # --- the cost of a request ---

    def check_tokens(self, items: Sequence[Item], task: Task[Any, Any, Any], context: RequestContext) -> None:
        """Refuse texts or pairs with too many tokens before they are tokenized as a whole."""
        # A query is tokenized with each of its documents.
        characters, most = sum(len(text) for item in items for text in item), max(self.limits.body, MIN_CHARACTERS)
        if characters > most:
            message = f"{len(items):,} pairs of {characters:,} characters together > maximum of {most:,}"
            raise ApiError("too_large", message)
        max_length = task.checkpoint.max_length
        check_tokens(items, task.tokenizer, context.ticket, max_length, windows=task.overflow == "window")

    def check_token_count(self, tokens: int) -> None:
        """Refuse more tokens than a request may have, where the queue does not count them."""
        if tokens > self.limits.tokens:
            raise TokenLimitExceeded(f"a request may have at most {self.limits.tokens:,} tokens")

    def check_reply(self, size: int) -> None:
        """Refuse a request whose reply has, or by an estimate would have, so many bytes."""
        if size > self.limits.reply:
            message = f"a reply of about {size:,} bytes > maximum of {self.limits.reply:,}; ask for less at a time"
            raise ApiError("too_large", message)

    def check_reply_per_token(
        self, texts: Sequence[str], tokenizer: Tokenizer, size: int, context: RequestContext, most: int = sys.maxsize
    ) -> None:
        """Refuse texts whose reply would have `size` bytes for each token, of up to `most` tokens of each text."""
        if size * sum(map(len, texts)) > self.limits.reply:  # otherwise they need not be counted
            counts = count_tokens(texts, tokenizer, context.ticket)
            self.check_reply(size * sum(min(counts[text], most) for text in texts))


def _decode(ids: list[int], tokenizer: Tokenizer, field: str) -> str:
    """Decode token ids. They must encode to the same ids again, or the model would read something else."""
    size = tokenizer.vocab_size
    if any(id >= size for id in ids):
        raise ApiError(
            "invalid_input", f"{field}: ids must be below {size}, the size of the model's vocabulary", field=field
        )
    special = {tokenizer.cls_id, tokenizer.sep_id}
    first, last = 0, len(ids)
    while first < last and ids[first] in special:
        first += 1
    while first < last and ids[last - 1] in special:
        last -= 1
    ids = ids[first:last]
    text = tokenizer.decode(ids, skip_special=False)
    encoding = tokenizer.encode_flat([text])[0]
    if encoding.ids[~encoding.special].tolist() != ids:
        raise ApiError("invalid_input", f"{field}: no text encodes to these ids; send the text instead", field=field)
    return text


def check_finite(arrays: Iterable[FloatArray]) -> None:
    """Refuse to answer with NaN or infinity, which JSON does not have."""
    if not all(np.isfinite(array).all() for array in arrays):
        raise ApiError("inference_failed", "the model returned values that are not finite")
