"""The verbs of both clients, each written once: as what to send, and what to make of what comes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, overload

import numpy as np

from bertie.client import calls, replies
from bertie.client.calls import Call, Request, Text
from bertie.client.replies import Vectors
from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

if TYPE_CHECKING:
    from bertie.client.clients import AsyncClient, Client
    from bertie.search.index import SearchResults
    from bertie.tasks.answer import Answers
    from bertie.tasks.classify import Classification, ZeroShotClassification
    from bertie.tasks.fill_mask import Filled
    from bertie.tasks.rerank import Ranked
    from bertie.tasks.tag import Tagged

PAIRS = 1024  # of texts and labels that a server takes at once

Words = Literal["average", "first", "max", "simple", "none"]
Mode = Literal["hybrid", "dense", "lexical"]
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Listed: TypeAlias = Call[T, list[T]]


class Verb(Generic[P, R]):
    """Makes of a method that says what to ask one that asks: in a `Client` now, in an `AsyncClient` when awaited."""

    def __init__(self, plan: Callable[Concatenate[Any, P], Call[Any, R]]) -> None:
        self._plan = plan

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Client, kind: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, client: Client | AsyncClient | None, kind: Any) -> Any:
        """As any function that is found in a class."""
        method = kind._asking(self._plan)
        return method if client is None else method.__get__(client)


class Verbs:
    """What can be asked of a server."""

    model: str | None

    @Verb
    def embed(
        self, texts: Iterable[str], *, prompt: str | None = None, dimensions: int | None = None
    ) -> Call[Vectors, Vectors]:
        """(N, dimension) one vector a text, in order, as `Embedder.embed`; of each vector its first `dimensions`."""
        things = calls.texts(texts, "embed")
        first = next(things, None)
        # An empty list has vectors of a length, too: that of an empty text's.
        things, end = chain([first or ("", 0)], things), None if first else 0
        requests = self._vectors(things, replies.vectors, prompt=prompt, dimensions=dimensions)
        return Call(requests, lambda found: np.stack(found)[:end])

    def _vectors(
        self, things: Iterable[tuple[str, int]], read: Callable[[Any], list[T]], **options: Any
    ) -> Iterator[Request[T]]:
        # As the model says, which is what it does here, too; OpenAI's API makes the length 1.
        options |= {"model": self.model, "encoding_format": "base64", "normalize": False}
        return calls.split("/v1/embeddings", "input", things, read, **options)

    @Verb
    def similarity(self, a: Iterable[str], b: Iterable[str] | None = None) -> Call[Vectors, Vectors]:
        """(N, M) how alike each of `a` is to each of `b`, or of `a` itself, as `Embedder.similarity`.

        In one request: what is too much for one is better embedded, and compared here.
        """
        one = [text for text, _ in calls.texts(a, "similarity")]
        two = None if b is None else [text for text, _ in calls.texts(b, "similarity")]
        body = calls.body({"texts": one + (two or []), "model": self.model})
        rows = None if two is None else len(one)
        return Call([Request("/compare", lambda reply: [replies.block(reply, rows)], body)], itemgetter(0))

    @Verb
    def classify(self, texts: Iterable[Text], *, head: str | None = None) -> Listed[Classification]:
        """One classification a text or pair, in order, as `Classifier.classify`."""
        things = calls.texts_or_pairs(texts, "classify")
        return self._listed("/classify", "texts", things, replies.classifications, head=head)

    @Verb
    def zero_shot(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi: bool = False,
        head: str | None = None,
    ) -> Listed[ZeroShotClassification]:
        """The scores of any labels for each text, as `ZeroShot.classify`."""
        names = [text for text, _ in calls.texts(labels, "labels=", "label")]
        if not names:
            raise InputError("labels=[] must be at least one")
        options: dict[str, Any] = {"head": head, "labels": names, "template": template, "multi": multi}
        options["items"] = max(1, min(calls.ITEMS, PAIRS // len(names)))
        return self._listed("/classify", "texts", calls.texts(texts, "zero_shot"), replies.zero_shot, **options)

    @Verb
    def tag(
        self,
        texts: Iterable[str],
        *,
        words: Words = "average",
        outside: Iterable[str] = ("O",),
        head: str | None = None,
    ) -> Listed[Tagged]:
        """The labelled spans of each text, as `Tagger.tag`."""
        things, labels = calls.texts(texts, "tag"), list(calls.listed(outside, "outside=", "labels"))
        return self._listed("/tag", "texts", things, replies.tagged, head=head, words=words, outside=labels)

    @Verb
    def answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        longest: int = 30,
        threshold: float | None = None,
        head: str | None = None,
    ) -> Listed[Answers]:
        """The best answers to each question from its document or documents, as `Reader.answer`."""
        things, options = calls.questions(questions), {"top_k": top_k, "longest": longest, "threshold": threshold}
        return self._listed("/answer", "questions", things, replies.answers, head=head, **options)

    @Verb
    def rerank(
        self, query: str, documents: Iterable[str], *, top_k: int | None = None, head: str | None = None
    ) -> Call[tuple[float, dict[str, int]], list[Ranked]]:
        """The documents, best first, as `Reranker.rerank`; the first `top_k` of them if that is given."""
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        things = list(calls.texts(documents, "rerank", "document"))
        query = checked_text(query, "the query")
        options: dict[str, Any] = {"head": head, "query": query, "model_scores": True}
        sent = self._listed("/v1/rerank", "documents", things, replies.scored, **options)
        return Call(sent.requests, partial(replies.ranked, texts=[text for text, _ in things], top_k=top_k))

    @Verb
    def fill(
        self,
        texts: Iterable[str],
        *,
        top_k: int = 5,
        candidates: Sequence[str] | None = None,
        head: str | None = None,
    ) -> Listed[Filled]:
        """The best tokens for each mask of each text, as `MaskedLM.fill`."""
        words = None if candidates is None else list(calls.listed(candidates, "candidates=", "words"))
        things = calls.texts(texts, "fill")
        return self._listed("/fill", "texts", things, replies.filled, head=head, top_k=top_k, candidates=words)

    @Verb
    def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
        weights: Mapping[str, float] | None = None,
    ) -> Call[SearchResults, SearchResults]:
        """The k passages of the server's index that answer a query best, as `Index.search`."""
        how = {"mode": mode, "rerank": rerank, "where": where, "depth": depth, "weights": weights}
        return Call(_search([query], k=k, **how), itemgetter(0))

    @Verb
    def search_each(
        self,
        queries: Iterable[str],
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
        weights: Mapping[str, float] | None = None,
    ) -> Listed[SearchResults]:
        """As `search`, of several queries."""
        how = {"mode": mode, "rerank": rerank, "where": where, "depth": depth, "weights": weights}
        return Call(_search(queries, k=k, **how), list)

    @Verb
    def models(self) -> Listed[str]:
        """The names of the served models."""
        return Call([Request("/v1/models", lambda reply: [one["id"] for one in reply["data"]])], list)

    @Verb
    def info(self) -> Call[dict[str, Any], dict[str, Any]]:
        """What is served, with which heads and within which limits."""
        return Call([Request("/info", lambda reply: [dict(reply)])], itemgetter(0))

    def _listed(
        self, path: str, name: str, things: Iterable[tuple[Any, int]], read: Callable[[Any], list[T]], **options: Any
    ) -> Listed[T]:
        return Call(calls.split(path, name, things, read, model=self.model, **options), list)


def _search(queries: Iterable[str], **options: Any) -> Iterator[Request[SearchResults]]:
    return calls.split("/search", "queries", calls.texts(queries, "search_each", "query"), replies.results, **options)
