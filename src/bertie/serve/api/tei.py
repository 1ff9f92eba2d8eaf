"""The API of Hugging Face's text-embeddings-inference."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bertie._version import __version__
from bertie.pipeline.inputs import TaskInput
from bertie.pipeline.pipeline import Overflow
from bertie.serve.api.base import HEAD, PASSAGES, QUERY, SENTENCES, Array, CompatibleRequest, Ids, Name, Response, Texts
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext
from bertie.serve.costs import check_tokens, text_groups
from bertie.serve.service import FLOAT_BYTES, Service, check_finite
from bertie.serve.tasks import RawClassifier, RawReranker
from bertie.tasks.classify import Classifier
from bertie.tasks.decoding import sigmoid
from bertie.tasks.embed import POOLING, Embedder
from bertie.tasks.late_interaction import LateInteraction
from bertie.tasks.rerank import Reranker
from bertie.tasks.sparse import SparseEmbedder
from bertie.tasks.token_embeddings import TokenEmbedder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.serve.tickets import Ticket
    from bertie.text.encoding import Encoding
    from bertie.text.tokenizer import Tokenizer

SPARSE_TEXTS = 64  # whose weights over the vocabulary are kept at a time
SPARSE_BYTES, SCORE_BYTES, TOKEN_BYTES = 32, 40, 70  # of a value, a label's score and a token in a reply
Direction = Literal["Left", "Right", "left", "right"]
EXAMPLE = "What is Deep Learning?"


class TeiRequest(CompatibleRequest):
    """What most requests have in common."""

    truncate: bool | None = Field(
        None, description="true reads only the beginning of long texts; otherwise they are read in windows."
    )
    truncation_direction: Direction = "right"

    @property
    def overflow(self) -> Overflow:
        """What to do with texts longer than the model's maximum length."""
        return _overflow(self.truncate, self.truncation_direction)


class EmbedAllRequest(TeiRequest):
    """POST /embed_all and /embed_sparse."""

    inputs: str | Array[str] | Ids | Array[Ids] = Field(examples=[EXAMPLE])
    prompt: Name | None = Field(None, description="Extension: prepended to each text, such as `query: `.")
    prompt_name: Name | None = Field(None, description="The name of one of the model's prompts.")


class EmbedRequest(EmbedAllRequest):
    """POST /embed."""

    normalize: bool = True
    dimensions: int | None = Field(None, ge=1)


class SparseValue(Response):
    """A token of the vocabulary and its weight."""

    index: int
    value: float


class PredictRequest(TeiRequest):
    """POST /predict: a text, a pair of texts, or a batch of lists of one or two texts."""

    inputs: (
        str
        | Annotated[Array[str], Field(min_length=1, max_length=2)]
        | Array[Annotated[list[str], Field(min_length=1, max_length=2)]]
    ) = Field(examples=[EXAMPLE])
    raw_scores: bool = False
    head: Name | None = Field(None, description=f"Extension. {HEAD}")


class Prediction(Response):
    """A label and its score."""

    score: float
    label: str


class RerankRequest(TeiRequest):
    """POST /rerank."""

    query: str = Field(examples=[QUERY])
    texts: Array[str] = Field(examples=[PASSAGES])
    raw_scores: bool = False
    return_text: bool = False


class Rank(Response):
    """A text's index in the request and its score."""

    index: int
    score: float
    text: str | None = None


class SimilarityInput(BaseModel):
    """A text and the sentences to compare it with."""

    model_config = ConfigDict(strict=True)
    source_sentence: str = Field(examples=[SENTENCES[0]])
    sentences: Array[str] = Field(examples=[SENTENCES[1:]])


class SimilarityParameters(BaseModel):
    """Options of /similarity."""

    model_config = ConfigDict(strict=True)
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt: Name | None = None  # an extension
    prompt_name: Name | None = None


class SimilarityRequest(CompatibleRequest):
    """POST /similarity."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(CompatibleRequest):
    """POST /tokenize."""

    inputs: Texts = Field(examples=[EXAMPLE])
    add_special_tokens: bool = True
    prompt: Name | None = Field(None, description="Extension: prepended to each text, such as `query: `.")
    prompt_name: Name | None = Field(None, description="The name of one of the model's prompts.")


class TokenData(Response):
    """A token and its character offsets; special tokens have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(CompatibleRequest):
    """POST /decode."""

    ids: Ids | Array[Ids] = Field(examples=[[2, 11, 12, 3]])
    skip_special_tokens: bool = True


class TeiError(Response):
    """An error in the format of text-embeddings-inference, which Bertie's own endpoints use as well."""

    error: str
    error_type: str


def _overflow(truncate: bool | None, direction: str) -> Overflow:
    if truncate and direction.lower() == "left":
        raise ApiError(
            "invalid_input",
            "truncation_direction=left is not supported: omit `truncate` to read the whole text in windows",
        )
    return "truncate" if truncate else "window"


def embed(service: Service, request: EmbedRequest, context: RequestContext) -> Any:
    """Embed texts."""
    options: dict[str, Any] = {"overflow": request.overflow} | ({"normalize": True} if request.normalize else {})
    task = service.embedder(request.model, context, dimensions=request.dimensions, **options)
    texts = service.texts(request.inputs, task, "inputs", context)
    service.check_reply(len(texts) * task.dimension * FLOAT_BYTES)
    results = list(task.embed_each(texts, prompt=request.prompt, prompt_name=request.prompt_name))
    check_finite(result.vector for result in results)
    context.add_read(results)
    return [np.ascontiguousarray(result.vector) for result in results]


def embed_all(service: Service, request: EmbedAllRequest, context: RequestContext) -> Any:
    """Return the hidden state of every token."""
    embedder = service.task(Embedder, request.model, context, overflow=request.overflow)
    texts = service.texts(request.inputs, embedder, "inputs", context)
    most = embedder.checkpoint.max_length if embedder.overflow == "truncate" else sys.maxsize
    service.check_reply_per_token(texts, embedder.tokenizer, embedder.model.config.width * FLOAT_BYTES, context, most)
    prompt = embedder.prompt_text(request.prompt, request.prompt_name)
    inputs = [TaskInput(f"text {i}", (embedder.prepare_text(prompt + text),), None) for i, text in enumerate(texts)]
    results = list(service.task(TokenEmbedder, context.model, context, overflow=request.overflow).run(inputs))
    check_finite(result.vectors for result in results)
    context.add_read(results)
    return [np.ascontiguousarray(result.vectors) for result in results]


def embed_sparse(service: Service, request: EmbedAllRequest, context: RequestContext) -> Any:
    """Return SPLADE embeddings: the non-zero weights over the vocabulary."""
    for name in service.candidates(request.model):
        if service.registry[name].checkpoint.splade is not None:
            break
    else:
        raise ApiError("unsupported_by_model", "Model is not an embedding model with Splade pooling")
    task = service.task(SparseEmbedder, name, context, overflow=request.overflow)
    texts = service.texts(request.inputs, task, "inputs", context)
    rows: list[Any] = []
    values = 0
    for first in range(0, len(texts), SPARSE_TEXTS):  # stop early if the reply would be too large
        batch = texts[first : first + SPARSE_TEXTS]
        results = list(task.embed_each(batch, prompt=request.prompt, prompt_name=request.prompt_name))
        check_finite(result.weights for result in results)
        context.add_read(results)
        values += sum(map(len, results))
        service.check_reply(values * SPARSE_BYTES)
        for result in results:
            order = np.argsort(result.ids)
            pairs = zip(result.ids[order].tolist(), result.weights[order].tolist(), strict=True)
            rows.append([{"index": index, "value": value} for index, value in pairs])
    return rows


def predict(service: Service, request: PredictRequest, context: RequestContext) -> Any:
    """Classify texts or pairs: labels with their scores, best first."""
    is_batch = isinstance(request.inputs, list) and not (request.inputs and isinstance(request.inputs[0], str))
    inputs: Any = request.inputs if is_batch else [request.inputs]
    items: list[tuple[str, ...]] = [(item,) if isinstance(item, str) else tuple(item) for item in inputs]
    service.check_count(items, "inputs")
    kind = RawClassifier if request.raw_scores else Classifier
    names = service.candidates(request.model)
    if any(kind._fits(info) for name in names for info in service.registry[name].checkpoint.heads.values()):
        task = service.task(kind, request.model, context, head=request.head, overflow=request.overflow)
        service.check_tokens(items, task, context)
        service.check_reply(len(items) * sum(SCORE_BYTES + len(label) for label in task.info.labels.values()))
        results = task.classify([item[0] if len(item) == 1 else (item[0], item[1]) for item in items])
        context.add_read(results)
        rows = [result.scores for result in results]
    else:
        reranker = service.task(RawReranker, request.model, context, head=request.head, overflow=request.overflow)
        service.check_tokens(items, reranker, context)
        scored = list(reranker.predict_each([_pair(item, i) for i, item in enumerate(items)]))
        context.add_read(scored)
        label = next(iter(reranker.info.labels.values()))
        rows = [{label: pair.score if request.raw_scores else probability(pair.score)} for pair in scored]
    check_finite(np.array(list(row.values()), dtype=np.float32) for row in rows)
    ranked = [
        [{"score": score, "label": label} for label, score in sorted(row.items(), key=lambda item: -item[1])]
        for row in rows
    ]
    return ranked if is_batch else ranked[0]


def _pair(texts: tuple[str, ...], index: int) -> tuple[str, str]:
    if len(texts) != 2:
        message = f"inputs[{index}] must be a query and a text: the model is a cross-encoder"
        raise ApiError("invalid_input", message, field="inputs")
    return texts[0], texts[1]


def probability(logit: float) -> float:
    """The sigmoid of a logit."""
    return float(sigmoid(np.array(logit, dtype=np.float32)))


def rerank(service: Service, request: RerankRequest, context: RequestContext) -> Any:
    """Rank texts by their relevance to a query."""
    service.check_count(request.texts, "texts")
    task = service.reranker(RawReranker, request.model, context, overflow=request.overflow)
    raw = request.raw_scores or isinstance(task, LateInteraction)  # sums of cosines are no logits
    service.check_tokens([(request.query, text) for text in request.texts], task, context)
    service.check_reply(sum(SCORE_BYTES + len(text) * request.return_text for text in request.texts))
    ranked = task.rerank(request.query, request.texts)
    context.add_read(ranked)
    check_finite([np.array([document.score for document in ranked], dtype=np.float32)])
    return [
        {
            "index": document.index,
            "score": document.score if raw else probability(document.score),
            **({"text": document.text} if request.return_text else {}),
        }
        for document in ranked
    ]


def similarity(service: Service, request: SimilarityRequest, context: RequestContext) -> Any:
    """Return the cosine similarity of each sentence to the source sentence."""
    parameters = request.parameters or SimilarityParameters()
    service.check_count(request.inputs.sentences, "sentences")
    overflow = _overflow(parameters.truncate, parameters.truncation_direction)
    task = service.task(Embedder, request.model, context, overflow=overflow, normalize=True)
    texts = [request.inputs.source_sentence, *request.inputs.sentences]
    service.check_tokens([(text,) for text in texts], task, context)
    results = list(task.embed_each(texts, prompt=parameters.prompt, prompt_name=parameters.prompt_name))
    check_finite(result.vector for result in results)
    context.add_read(results)
    source, *others = [result.vector for result in results]
    return [float(source @ other) for other in others]


def tokenize(service: Service, request: TokenizeRequest, context: RequestContext) -> Any:
    """Tokenize texts."""
    texts = service.as_list(request.inputs, "inputs")
    tokenizer = service.tokenizer(request.model, context)
    if request.prompt is not None or request.prompt_name is not None:
        embedder = service.task(Embedder, context.model, context)
        prompt = embedder.prompt_text(request.prompt, request.prompt_name)
        texts = [prompt + text for text in texts]
    check_tokens([(text,) for text in texts], tokenizer, context.ticket)
    service.check_reply_per_token(texts, tokenizer, TOKEN_BYTES, context)
    tokens: list[list[dict[str, Any]]] = []
    with service.one_at_a_time(sum(map(len, texts)), context.ticket):
        for group in text_groups(texts, context.ticket):
            for encoding in tokenizer.encode_batch(group, special=request.add_special_tokens):
                context.ticket.check()
                context.read["tokens_total"] += len(encoding)
                service.check_token_count(context.read["tokens_total"])
                tokens.append(list(_describe_tokens(encoding, tokenizer, context.ticket)))
    return tokens


def _describe_tokens(encoding: Encoding, tokenizer: Tokenizer, ticket: Ticket) -> Iterator[dict[str, Any]]:
    names = {id: tokenizer.token(id) for id in np.unique(encoding.ids).tolist()}
    columns = zip(encoding.ids.tolist(), encoding.offsets.tolist(), encoding.special.tolist(), strict=True)
    for number, (id, (start, stop), special) in enumerate(columns):
        if not number % 10_000:
            ticket.check()
        place = {"start": None, "stop": None} if special else {"start": start, "stop": stop}
        yield {"id": id, "text": names[id], "special": special, **place}


def decode(service: Service, request: DecodeRequest, context: RequestContext) -> Any:
    """Decode token ids to texts."""
    if not request.ids:
        raise ApiError("empty", "`ids` cannot be empty", field="ids")
    batch: list[Any] = [request.ids] if isinstance(request.ids[0], int) else request.ids
    service.check_count(batch, "ids")
    tokenizer = service.tokenizer(request.model, context)
    service.check_token_count(sum(map(len, batch)))
    size, texts = tokenizer.vocab_size, []
    for ids in batch:
        context.ticket.check()
        if max(ids, default=0) >= size:
            raise ApiError("invalid_input", f"ids must be below {size}", field="ids")
        texts.append(tokenizer.decode(ids, skip_special=request.skip_special_tokens))
    return texts


def info(service: Service, request: None, context: RequestContext) -> Any:
    """Describe the served models and the limits."""
    first = service.names[0]
    checkpoint = service.registry[first].checkpoint
    described = {name: service.registry[name].describe() for name in service.names}
    return {
        "model_id": first,
        "model_sha": None,
        "model_dtype": described[first]["dtype"],
        "model_type": model_type_of(checkpoint),
        "max_concurrent_requests": service.limits.requests,
        "max_input_length": checkpoint.max_length,
        "max_batch_tokens": described[first]["budget"],
        "max_batch_requests": None,
        "max_client_batch_size": service.limits.items,
        "auto_truncate": False,
        "tokenization_workers": service.limits.requests,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "max_request_tokens": service.limits.tokens,
        "max_body_bytes": service.limits.body,
        "max_reply_bytes": service.limits.reply,
        "models": service.names,
        **{
            key: {name: row[key] for name, row in described.items()} for key in ("precision", "cuda_graphs", "dispatch")
        },
    }


def model_type_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The type of a model as /info reports it: embedding, classifier or reranker, with its details."""
    head = checkpoint.heads.get("classify")
    if checkpoint.splade is not None:
        return {"embedding": {"pooling": "splade"}}
    if checkpoint.late_interaction is not None:
        return {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    if head is None or checkpoint.sentence is not None:
        mode = "mean" if checkpoint.sentence is None else checkpoint.sentence.pooling.modes[0]
        names = {stored: name for name, stored in POOLING.items()}
        return {"embedding": {"pooling": names.get(mode, mode)}}
    id2label = {str(i): label for i, label in head.labels.items()}
    kind = "reranker" if Reranker._fits(head) else "classifier"
    return {kind: {"id2label": id2label, "label2id": {label: int(i) for i, label in id2label.items()}}}
