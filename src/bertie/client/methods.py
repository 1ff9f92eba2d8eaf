"""The methods of both clients, each written once: the requests it sends, and how their results are combined."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar, overload

import numpy as np

from bertie.client import requests, responses
from bertie.client.requests import Call, Items, Request, Text
from bertie.client.responses import Vectors
from bertie.errors import InputError
from bertie.text.tokenizer import checked_text

if TYPE_CHECKING:
    from bertie.client.clients import AsyncClient, Client
    from bertie.search.index import SearchResults
    from bertie.tasks.results import (
        AnswerResult,
        ClassificationResult,
        FillMaskResult,
        RankedDocument,
        TaggingResult,
        ZeroShotResult,
    )

MAX_PAIRS = 1024  # of a text and a label per request, the server's default limit

AggregationStrategy = Literal["average", "first", "max", "simple", "none"]
Mode = Literal["hybrid", "dense", "lexical"]
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
ListCall: TypeAlias = Call[T, list[T]]


class ClientMethod(Generic[P, R]):
    """Turn a method that returns a `Call` into one that sends it: a coroutine in an `AsyncClient`."""

    def __init__(self, build: Callable[Concatenate[Any, P], Call[Any, R]]) -> None:
        self._build = build

    @overload
    def __get__(self, client: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Client, kind: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, client: AsyncClient, kind: type) -> Callable[P, Coroutine[Any, Any, R]]: ...
    def __get__(self, client: Client | AsyncClient | None, kind: Any) -> Any:
        """Bind the method, as functions in a class are bound."""
        method = kind._method(self._build)
        return method if client is None else method.__get__(client)


class ClientMethods:
    """The methods of both clients."""

    model: str | None

    @ClientMethod
    def embed(
        self, texts: Iterable[str], *, prompt: str | None = None, dimension: int | None = None
    ) -> Call[Vectors, Vectors]:
        """(N, dimension) embeddings, one row per text, as `Embedder.embed`; `dimension` keeps the first components."""
        items = requests.check_texts(texts, "embed")
        first = next(items, None)
        # An empty list has embeddings of some dimension, too: embed one text to learn it.
        items, end = chain([first or ("", 0)], items), None if first else 0
        sent = self._embed_requests(items, responses.parse_vectors, prompt=prompt, dimension=dimension)
        return Call(sent, lambda vectors: np.stack(vectors)[:end])

    def _embed_requests(
        self, items: Items, parse: Callable[[Any], list[T]], *, prompt: str | None, dimension: int | None
    ) -> Iterator[Request[T]]:
        # normalize=False: as the model computes them, like the local object; OpenAI's API normalizes.
        options: dict[str, Any] = {"prompt": prompt, "dimensions": dimension, "model": self.model}
        options |= {"encoding_format": "base64", "normalize": False}
        return requests.split_requests("/v1/embeddings", "input", items, parse, **options)

    @ClientMethod
    def similarity(self, a: Iterable[str], b: Iterable[str] | None = None) -> Call[Vectors, Vectors]:
        """(N, M) similarities of each text of `a` to each of `b`, or to `a` itself, as `Embedder.similarity`.

        This is a single request. For more texts than one request takes, use `embed` and compare
        locally.
        """
        rows = [text for text, _ in requests.check_texts(a, "similarity")]
        columns = None if b is None else [text for text, _ in requests.check_texts(b, "similarity")]
        body = requests.encode_body({"texts": rows + (columns or []), "model": self.model})
        count = None if columns is None else len(rows)
        parse = partial(responses.parse_similarity, rows=count)
        return Call([Request("/compare", lambda response: [parse(response)], body)], itemgetter(0))

    @ClientMethod
    def classify(self, texts: Iterable[Text], *, head: str | None = None) -> ListCall[ClassificationResult]:
        """Classify texts or pairs, as `Classifier.classify`."""
        items = requests.check_texts_or_pairs(texts, "classify")
        return self._list_call("/classify", "texts", items, responses.parse_classifications, head=head)

    @ClientMethod
    def zero_shot(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        template: str | None = None,
        multi_label: bool = False,
        method: Literal["auto", "entailment", "embedding", "combined"] = "auto",
        head: str | None = None,
    ) -> ListCall[ZeroShotResult]:
        """Zero-shot classification with the given labels, as `ZeroShot.classify`."""
        names = [text for text, _ in requests.check_texts(labels, "labels=", "label")]
        if not names:
            raise InputError("labels=[] must have at least one label")
        options: dict[str, Any] = {"head": head, "labels": names, "template": template, "multi_label": multi_label}
        options["method"] = method
        options["max_items"] = max(1, min(requests.MAX_ITEMS, MAX_PAIRS // len(names)))
        items = requests.check_texts(texts, "zero_shot")
        return self._list_call("/classify", "texts", items, responses.parse_zero_shot, **options)

    @ClientMethod
    def tag(
        self,
        texts: Iterable[str],
        *,
        aggregation_strategy: AggregationStrategy = "average",
        ignore_labels: Iterable[str] = ("O",),
        head: str | None = None,
    ) -> ListCall[TaggingResult]:
        """Find the labelled spans of each text, as `Tagger.tag`."""
        items = requests.check_texts(texts, "tag")
        labels = list(requests.check_list(ignore_labels, "ignore_labels=", "labels"))
        options = {"head": head, "aggregation_strategy": aggregation_strategy, "ignore_labels": labels}
        return self._list_call("/tag", "texts", items, responses.parse_tags, **options)

    @ClientMethod
    def answer(
        self,
        questions: Iterable[tuple[str, str | Sequence[str]]],
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        threshold: float | None = None,
        head: str | None = None,
    ) -> ListCall[AnswerResult]:
        """Answer each question from its document or documents, as `Reader.answer`."""
        items = requests.check_questions(questions)
        options = {"top_k": top_k, "max_answer_length": max_answer_length, "threshold": threshold}
        return self._list_call("/answer", "questions", items, responses.parse_answers, head=head, **options)

    @ClientMethod
    def rerank(
        self, query: str, documents: Iterable[str], *, top_k: int | None = None, head: str | None = None
    ) -> Call[tuple[float, dict[str, int]], list[RankedDocument]]:
        """Rank documents by relevance to a query, as `Reranker.rerank`; only the best `top_k` if given."""
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        items = list(requests.check_texts(documents, "rerank", "document"))
        query = checked_text(query, "the query")
        options: dict[str, Any] = {"head": head, "query": query, "model_scores": True}
        sent = self._list_call("/v1/rerank", "documents", items, responses.parse_scores, **options)
        return Call(sent.requests, partial(responses.rank_documents, texts=[text for text, _ in items], top_k=top_k))

    @ClientMethod
    def fill(
        self,
        texts: Iterable[str],
        *,
        top_k: int = 5,
        candidates: Sequence[str] | None = None,
        head: str | None = None,
    ) -> ListCall[FillMaskResult]:
        """Predict tokens for each mask of each text, as `MaskedLM.fill`."""
        words = None if candidates is None else list(requests.check_list(candidates, "candidates=", "words"))
        items = requests.check_texts(texts, "fill")
        return self._list_call("/fill", "texts", items, responses.parse_masks, head=head, top_k=top_k, candidates=words)

    @ClientMethod
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
        """Find the k best passages of the server's index for a query, as `Index.search`."""
        options = {"mode": mode, "rerank": rerank, "where": where, "depth": depth, "weights": weights}
        return Call(_search([query], k=k, **options), itemgetter(0))

    @ClientMethod
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
    ) -> ListCall[SearchResults]:
        """Search for several queries, as `Index.search_each`."""
        options = {"mode": mode, "rerank": rerank, "where": where, "depth": depth, "weights": weights}
        return Call(_search(queries, k=k, **options), list)

    @ClientMethod
    def models(self) -> ListCall[str]:
        """The names of the served models."""
        return Call([Request("/v1/models", lambda response: [model["id"] for model in response["data"]])], list)

    @ClientMethod
    def info(self) -> Call[dict[str, Any], dict[str, Any]]:
        """Describe the server, its models and limits."""
        return Call([Request("/info", lambda response: [dict(response)])], itemgetter(0))

    def _list_call(
        self, path: str, name: str, items: Iterable[tuple[Any, int]], read: Callable[[Any], list[T]], **options: Any
    ) -> ListCall[T]:
        return Call(requests.split_requests(path, name, items, read, model=self.model, **options), list)


def _search(queries: Iterable[str], **options: Any) -> Iterator[Request[SearchResults]]:
    items = requests.check_texts(queries, "search_each", "query")
    return requests.split_requests("/search", "queries", items, responses.parse_search, **options)
