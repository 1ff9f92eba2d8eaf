"""The methods of both clients, each written once: the requests it sends, and how their results are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from bertie.client import requests, responses
from bertie.client.method_types import (
    AnswerMethod,
    ClientMethod,
    RerankMethod,
    SimilarityMethod,
    TextsMethod,
    first_of,
)
from bertie.client.requests import Call, Items, Request, Text
from bertie.client.responses import Vectors
from bertie.errors import InputError
from bertie.pipeline.inputs import check_list
from bertie.text.tokenizer import checked_text

if TYPE_CHECKING:
    from bertie.search.ask import AskResult
    from bertie.search.index import SearchResults
    from bertie.tasks.results import (
        AnswerResult,
        AttributionResult,
        ClassificationResult,
        FillMaskResult,
        TaggingResult,
        TokenPredictionResult,
        ZeroShotResult,
    )

MAX_PAIRS = 1024  # of a text and a label per request, the server's default limit

AggregationStrategy = Literal["average", "first", "max", "simple", "none"]
Mode = Literal["hybrid", "dense", "lexical", "sparse"]
T = TypeVar("T")
ListCall: TypeAlias = Call[T, list[T]]


class ClientMethods:
    """The methods of both clients."""

    model: str | None

    @ClientMethod
    def embed(
        self,
        texts: str | Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimension: int | None = None,
    ) -> Call[Vectors, Vectors]:
        """(N, dimension) embeddings, one row per text, as `Embedder.embed`; of a single text, (dimension,).

        `prompt` is prepended to each text; `prompt_name` selects one of the model's prompts. `dimension` keeps the
        first components.
        """
        prompts = {"prompt": prompt, "prompt_name": prompt_name}
        if isinstance(texts, str):
            items = requests.check_texts([texts], "embed")
            sent = self._embed_requests(items, responses.parse_vectors, prompts, dimension)
            return Call(sent, itemgetter(0))
        items = requests.check_texts(texts, "embed")
        first = next(items, None)
        # An empty list has embeddings of some dimension, too: embed one text to learn it.
        items, end = chain([first or ("", 0)], items), None if first else 0
        sent = self._embed_requests(items, responses.parse_vectors, prompts, dimension)
        return Call(sent, lambda vectors: np.stack(vectors)[:end])

    def _embed_requests(
        self, items: Items, parse: Callable[[Any], list[T]], prompts: Mapping[str, str | None], dimension: int | None
    ) -> Iterator[Request[T]]:
        # normalize=False: as the model computes them, like the local object; OpenAI's API normalizes.
        options: dict[str, Any] = {**prompts, "dimensions": dimension, "model": self.model}
        options |= {"encoding_format": "base64", "normalize": False}
        return requests.split_requests("/v1/embeddings", "input", items, parse, **options)

    @SimilarityMethod
    def similarity(self, a: str | Iterable[str], b: str | Iterable[str] | None = None) -> Call[Any, Any]:
        """(N, M) similarities of each text of `a` to each of `b`, or to `a` itself, as `Embedder.similarity`.

        A single text has no axis: (M,) similarities of one text to several, and a float for two
        texts. This is a single request. For more texts than one request takes, use `embed` and
        compare locally.
        """
        if isinstance(a, str) and b is None:
            raise InputError("similarity takes two texts, or a list of texts that are compared with each other")
        rows = [text for text, _ in requests.check_texts([a] if isinstance(a, str) else a, "similarity")]
        columns = None
        if b is not None:
            columns = [text for text, _ in requests.check_texts([b] if isinstance(b, str) else b, "similarity")]
        body = requests.encode_body({"texts": rows + (columns or []), "model": self.model})
        count = None if columns is None else len(rows)
        parse = partial(responses.parse_similarity, rows=count, single=(isinstance(a, str), isinstance(b, str)))
        return Call([Request("/compare", lambda response: [parse(response)], body)], itemgetter(0))

    @TextsMethod
    def classify(
        self,
        texts: Iterable[Text],
        *,
        window_size: int | Literal["sentence"] | None = None,
        window_pooling: Literal["mean", "confidence", "max"] | None = None,
        head: str | None = None,
    ) -> ListCall[ClassificationResult]:
        """Classify texts or pairs, as `Classifier.classify`."""
        items = requests.check_texts_or_pairs(texts, "classify")
        options = {"head": head, "window_size": window_size, "window_pooling": window_pooling}
        return self._list_call("/classify", "texts", items, responses.parse_classifications, **options)

    @TextsMethod
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

    @TextsMethod
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
        labels = list(check_list(ignore_labels, "ignore_labels=", "labels"))
        options = {"head": head, "aggregation_strategy": aggregation_strategy, "ignore_labels": labels}
        return self._list_call("/tag", "texts", items, responses.parse_tags, **options)

    @TextsMethod
    def zero_shot_tag(
        self,
        texts: Iterable[str],
        labels: Sequence[str],
        *,
        threshold: float = 0.5,
        flat: bool = True,
        multi_label: bool = False,
        head: str | None = None,
    ) -> ListCall[TaggingResult]:
        """Find spans with the given labels in each text, as `ZeroShotTagger.tag`."""
        names = [text for text, _ in requests.check_texts(labels, "labels=", "label")]
        if not names:
            raise InputError("labels=[] must have at least one label")
        options: dict[str, Any] = {"head": head, "labels": names, "threshold": threshold, "flat": flat}
        options["multi_label"] = multi_label
        items = requests.check_texts(texts, "zero_shot_tag")
        return self._list_call("/tag", "texts", items, responses.parse_tags, **options)

    @AnswerMethod
    def answer(
        self,
        questions: Any,
        documents: Any = None,
        *,
        top_k: int = 1,
        max_answer_length: int = 30,
        no_answer_threshold: float | None = None,
        head: str | None = None,
    ) -> Call[AnswerResult, Any]:
        """Answer each question from its document or documents, as `Reader.answer`."""
        options: dict[str, Any] = {"top_k": top_k, "max_answer_length": max_answer_length, "head": head}
        options["no_answer_threshold"] = no_answer_threshold
        single = isinstance(questions, str)
        if single and documents is None:
            raise InputError('answer takes a question and its document: answer("question", "document")')
        if not single and documents is not None:
            raise InputError("pass pairs of a question and its document: answer(list(zip(questions, documents)))")
        items = requests.check_questions([(questions, documents)] if single else questions)
        call = self._list_call("/answer", "questions", items, responses.parse_answers, **options)
        return first_of(call) if single else call

    @RerankMethod
    def rerank(
        self, query: Any, documents: Any, *, top_k: int | None = None, head: str | None = None
    ) -> Call[Any, Any]:
        """Rank documents by relevance to a query, as `Reranker.rerank`; only the best `top_k` if given."""
        if top_k is not None and top_k < 1:
            raise InputError(f"top_k={top_k} must be at least 1")
        single = isinstance(documents, str)
        items = list(requests.check_texts([documents] if single else documents, "rerank", "document"))
        query = checked_text(query, "the query")
        options: dict[str, Any] = {"head": head, "query": query, "model_scores": True}
        sent = self._list_call("/v1/rerank", "documents", items, responses.parse_scores, **options)
        rank = partial(responses.rank_documents, texts=[text for text, _ in items], top_k=top_k)
        call: Call[Any, Any] = Call(sent.requests, rank)
        return first_of(call) if single else call

    @TextsMethod
    def fill(
        self,
        texts: Iterable[str],
        *,
        top_k: int = 5,
        candidates: Sequence[str] | None = None,
        head: str | None = None,
    ) -> ListCall[FillMaskResult]:
        """Predict tokens for each mask of each text, as `MaskedLM.fill`."""
        words = None if candidates is None else list(check_list(candidates, "candidates=", "words"))
        items = requests.check_texts(texts, "fill")
        return self._list_call("/fill", "texts", items, responses.parse_masks, head=head, top_k=top_k, candidates=words)

    @TextsMethod
    def attribute(
        self, texts: Iterable[Text], *, label: str | None = None, max_pieces: int | None = None, head: str | None = None
    ) -> ListCall[AttributionResult]:
        """Which words decided the label of each text or pair, as `Classifier.attribute`."""
        items = requests.check_texts_or_pairs(texts, "attribute")
        options = {"label": label, "max_pieces": max_pieces, "head": head}
        return self._each_call("/attribute", items, responses.parse_attribution, **options)

    @TextsMethod
    def predict_tokens(
        self, texts: Iterable[str], *, top_k: int = 5, head: str | None = None
    ) -> ListCall[TokenPredictionResult]:
        """Predict every token of short texts from all others, as `MaskedLM.predict_tokens`."""
        items = requests.check_texts(texts, "predict_tokens")
        return self._each_call("/predict_tokens", items, responses.parse_token_predictions, top_k=top_k, head=head)

    @ClientMethod
    def ask(
        self,
        question: str,
        k: int = 5,
        *,
        top_k: int = 1,
        no_answer_threshold: float | None = None,
        mode: Mode = "hybrid",
        rerank: bool = False,
        where: Mapping[str, Any] | None = None,
    ) -> Call[AskResult, AskResult]:
        """Answer a question from the k best passages of the server's index, as `Index.ask`.

        The result's `passages` are those of its answers; the server does not send the others.
        """
        options: dict[str, Any] = {"passages": k, "top_k": top_k, "no_answer_threshold": no_answer_threshold}
        options |= {"mode": mode, "rerank": rerank, "where": where, "questions": checked_text(question, "the question")}
        return Call([Request("/ask", responses.parse_asked, requests.encode_body(options))], itemgetter(0))

    @ClientMethod
    def search(
        self,
        query: str,
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        rerank_weight: float | None = None,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
        weights: Mapping[str, float] | None = None,
        prompt: str | None = None,
    ) -> Call[SearchResults, SearchResults]:
        """Find the k best passages of the server's index for a query, as `Index.search`."""
        options: dict[str, Any] = {"mode": mode, "rerank": rerank, "rerank_weight": rerank_weight}
        options |= {"where": where, "depth": depth, "weights": weights, "prompt": prompt}
        return Call(_search([query], k=k, **options), itemgetter(0))

    @ClientMethod
    def search_each(
        self,
        queries: Iterable[str],
        k: int = 10,
        *,
        mode: Mode = "hybrid",
        rerank: bool = False,
        rerank_weight: float | None = None,
        where: Mapping[str, Any] | None = None,
        depth: int = 100,
        weights: Mapping[str, float] | None = None,
        prompt: str | None = None,
    ) -> ListCall[SearchResults]:
        """Search for several queries, as `Index.search_each`."""
        options: dict[str, Any] = {"mode": mode, "rerank": rerank, "rerank_weight": rerank_weight}
        options |= {"where": where, "depth": depth, "weights": weights, "prompt": prompt}
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

    def _each_call(self, path: str, items: Items, read: Callable[[Any], list[T]], **options: Any) -> ListCall[T]:
        """A request per text."""
        fields = options | {"model": self.model}
        bodies = (requests.encode_body(fields | {"text": text}) for text, _ in items)
        return Call((Request(path, read, body, i) for i, body in enumerate(bodies)), list)


def _search(queries: Iterable[str], **options: Any) -> Iterator[Request[SearchResults]]:
    items = requests.check_texts(queries, "search_each", "query")
    return requests.split_requests("/search", "queries", items, responses.parse_search, **options)
