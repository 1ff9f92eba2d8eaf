"""The tasks of Hugging Face's `InferenceClient`: /pipeline/TASK, and POST / for all of them.

A request is `{"inputs": …, "parameters": {…}}`, and does not name its task. POST / infers it from the inputs, the
parameters and the heads of the model; where they leave it open, the path names it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.serve.api import native, tagging, tei
from bertie.serve.api.base import HEAD, SENTENCES, Array, CompatibleRequest, Label, Name, Response, Texts
from bertie.serve.api_errors import ApiError
from bertie.serve.context import RequestContext
from bertie.serve.parsing import validate
from bertie.serve.service import Service
from bertie.tasks.answer import Reader
from bertie.tasks.classify import Classifier
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.tag import Tagger

Aggregation = Literal["none", "simple", "first", "average", "max"]
TAGGING = ("aggregation_strategy", "ignore_labels", "stride")  # parameters that only one task has
EMBEDDING = ("normalize", "truncate", "truncation_direction", "prompt_name", "dimensions", "encoding_format")


class Parameters(BaseModel):
    """Parameters of a task; those that Bertie has no use for are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class PipelineRequest(CompatibleRequest):
    """A request for a task."""

    head: Name | None = Field(None, description=f"Extension. {HEAD}")


class InvocationRequest(CompatibleRequest):
    """POST / and /invocations: a request of /pipeline/…, /embed, /embed_sparse, /predict or /rerank."""

    model_config = ConfigDict(strict=True, extra="allow")
    EXAMPLE: ClassVar[dict[str, Any]] = {"inputs": SENTENCES[0]}


def invoke(service: Service, request: InvocationRequest, context: RequestContext) -> Any:
    """Answer POST / and /invocations: by the inputs and parameters, otherwise by the type of the model."""
    body = request.model_dump()
    task = infer_task(service, body)
    if task is not None:
        kind, handler = PIPELINES[task]
        if task == "feature-extraction":  # whose parameters are fields of the body
            body |= body.pop("parameters")
        return handler(service, validate(kind, body), context)
    body["model"] = name = service.candidates(request.model)[0]
    checkpoint = service.registry[name].checkpoint
    (model_type,) = tei.model_type_of(checkpoint)
    if model_type == "classifier":
        return tei.predict(service, validate(tei.PredictRequest, body), context)
    if model_type == "reranker":
        return tei.rerank(service, validate(tei.RerankRequest, body), context)
    if checkpoint.splade is not None:
        return tei.embed_sparse(service, validate(tei.EmbedAllRequest, body), context)
    return tei.embed(service, validate(tei.EmbedRequest, body), context)


def infer_task(service: Service, body: dict[str, Any]) -> str | None:
    """The task of a request by its inputs and parameters; None: one of text-embeddings-inference."""
    inputs, parameters = body.get("inputs"), body.get("parameters")
    first = inputs[0] if isinstance(inputs, list) and inputs else inputs
    if isinstance(first, dict):
        if "source_sentence" in first:
            return "sentence-similarity"
        return "question-answering" if "question" in first else "text-classification"
    if not isinstance(parameters, dict):
        return None
    for task, names in (
        ("zero-shot-classification", ("candidate_labels",)),
        ("fill-mask", ("targets",)),
        ("token-classification", TAGGING),
        ("text-classification", ("function_to_apply",)),
        ("feature-extraction", EMBEDDING),
    ):
        if any(name in parameters for name in names):
            return task
    models = [service.registry[name].checkpoint for name in service.candidates(body.get("model"))]
    if any(_has_mask(first, model) and _has_head(MaskedLM, model) for model in models):
        return "fill-mask"
    for task, kind in (("text-classification", Classifier), ("token-classification", Tagger)):
        if any(_has_head(kind, model) for model in models):
            return task
    return "feature-extraction"


def _has_head(kind: Any, checkpoint: Checkpoint) -> bool:
    return any(kind._fits(info) for info in checkpoint.heads.values())


def _has_mask(text: Any, checkpoint: Checkpoint) -> bool:
    mask = None if checkpoint.tokenizer is None else checkpoint.tokenizer.mask_token
    return mask is not None and isinstance(text, str) and mask in text


# --- fill-mask ---


class FillMaskParameters(Parameters):
    """Parameters of fill-mask."""

    top_k: int = Field(default=5, ge=1, le=1000)
    targets: Array[Label] | None = Field(default=None, description="Score only these words.")


class FillMaskRequest(PipelineRequest):
    """POST /pipeline/fill-mask."""

    inputs: Texts = Field(examples=["Paris is the [MASK] of France."])
    parameters: FillMaskParameters = FillMaskParameters()


class FilledMask(Response):
    """A token for a mask, and the text with it."""

    score: float
    token: int | None = Field(description="null: a target of several tokens")
    token_str: str
    sequence: str


FillMaskResponse = list[FilledMask] | list[list[FilledMask]] | list[list[list[FilledMask]]]


def fill_mask(service: Service, request: FillMaskRequest, context: RequestContext) -> Any:
    """Predict tokens for masks: a list for each mask if a text has several, and for each text of a list."""
    texts, parameters = service.as_list(request.inputs, "inputs"), request.parameters
    task = service.task(MaskedLM, request.model, context, head=request.head)
    count = parameters.top_k if parameters.targets is None else min(parameters.top_k, len(parameters.targets))
    mask = task.tokenizer.mask_token or "\0"
    service.check_reply(sum(text.count(mask) * (native.CANDIDATE_BYTES + len(text)) for text in texts) * count)
    options: dict[str, Any] = {"top_k": parameters.top_k, "candidates": parameters.targets, "head": request.head}
    filled = native.fill(service, native.FillRequest(texts=texts, model=context.model, **options), context)
    rows = []
    for text, result in zip(texts, filled["results"], strict=True):
        context.ticket.check()
        masks = [
            [
                {
                    "score": candidate.score,
                    "token": candidate.id,
                    "token_str": candidate.text,
                    "sequence": text[: mask.start] + candidate.text + text[mask.end :],
                }
                for candidate in mask.candidates
            ]
            for mask in result.masks
        ]
        rows.append(masks[0] if len(masks) == 1 else masks)
    return rows if isinstance(request.inputs, list) else rows[0]


# --- text classification ---


class TextClassificationParameters(Parameters):
    """Parameters of text classification."""

    top_k: int | None = Field(default=None, ge=1)
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        default=None, description="By default the head's own, with its calibration."
    )


class TextPair(BaseModel):
    """A text, or a pair of texts."""

    model_config = ConfigDict(strict=True)
    text: str
    text_pair: str | None = None


class TextClassificationRequest(PipelineRequest):
    """POST /pipeline/text-classification."""

    inputs: str | Array[str] | TextPair | Array[TextPair | str] = Field(examples=["A delight from start to finish."])
    parameters: TextClassificationParameters = TextClassificationParameters()


def classify_texts(service: Service, request: TextClassificationRequest, context: RequestContext) -> Any:
    """Classify texts or pairs: for each a list of labels with their scores, best first."""
    texts, parameters = service.as_list(request.inputs, "inputs"), request.parameters
    function = parameters.function_to_apply
    items = []
    for text in texts:
        if isinstance(text, str):
            items.append([text])
        else:
            items.append([text.text] if text.text_pair is None else [text.text, text.text_pair])
    raw_scores = function in ("sigmoid", "none")
    options: dict[str, Any] = {"model": request.model, "head": request.head, "raw_scores": raw_scores}
    rows = tei.predict(service, tei.PredictRequest(inputs=items, **options), context)
    if function == "sigmoid":
        rows = [[item | {"score": tei.probability(item["score"])} for item in row] for row in rows]
    return [row[: parameters.top_k] for row in rows]


# --- token classification ---


class TokenClassificationParameters(Parameters):
    """Parameters of token classification; `stride` is ignored, since long texts are read in overlapping windows."""

    aggregation_strategy: Aggregation = "average"
    ignore_labels: Array[Name] = Field(default=["O"])


class TokenClassificationRequest(PipelineRequest):
    """POST /pipeline/token-classification."""

    inputs: Texts = Field(examples=["Ada Lovelace was born in London."])
    parameters: TokenClassificationParameters = TokenClassificationParameters()


class TokenClassificationItem(Response):
    """A labelled span: text[start:end]. `entity` instead of `entity_group` with aggregation_strategy=none."""

    entity_group: str | None = None
    entity: str | None = None
    score: float
    word: str
    start: int
    end: int


TokenClassificationResponse = list[TokenClassificationItem] | list[list[TokenClassificationItem]]


def classify_tokens(service: Service, request: TokenClassificationRequest, context: RequestContext) -> Any:
    """Find labelled spans, such as named entities."""
    texts, parameters = service.as_list(request.inputs, "inputs"), request.parameters
    strategy = parameters.aggregation_strategy
    options: dict[str, Any] = {"aggregation_strategy": strategy, "ignore_labels": parameters.ignore_labels}
    options |= {"model": request.model, "head": request.head}
    tagged = tagging.tag(service, tagging.TagRequest(texts=texts, **options), context)
    label = "entity" if strategy == "none" else "entity_group"
    rows = [
        [
            {label: span.label, "score": span.score, "word": span.text, "start": span.start, "end": span.end}
            for span in result.spans
        ]
        for result in tagged["results"]
    ]
    return rows if isinstance(request.inputs, list) else rows[0]


# --- question answering ---


class QuestionAnsweringParameters(Parameters):
    """Parameters of question answering; those on lengths and strides are ignored."""

    top_k: int = Field(default=1, ge=1, le=100)
    max_answer_len: int = Field(default=30, ge=1, le=1000)
    handle_impossible_answer: bool = Field(default=False, description="true: an empty answer is possible.")


class QuestionInput(BaseModel):
    """A question, and the text with the answer."""

    model_config = ConfigDict(strict=True)
    question: str = Field(examples=["Who wrote Emma?"])
    context: str = Field(examples=["Emma is a novel by Jane Austen."])


class QuestionAnsweringRequest(PipelineRequest):
    """POST /pipeline/question-answering."""

    inputs: QuestionInput | Array[QuestionInput]
    parameters: QuestionAnsweringParameters = QuestionAnsweringParameters()


class QuestionAnsweringItem(Response):
    """An answer: context[start:end]; empty if there is none."""

    answer: str
    score: float
    start: int
    end: int


QuestionAnsweringResponse = (
    QuestionAnsweringItem | list[QuestionAnsweringItem] | list[QuestionAnsweringItem | list[QuestionAnsweringItem]]
)


def answer_questions(service: Service, request: QuestionAnsweringRequest, context: RequestContext) -> Any:
    """Answer questions: an answer, or with `top_k` a list of them, for each question of a list."""
    questions, parameters = service.as_list(request.inputs, "inputs"), request.parameters
    pairs = [native.Question(question=item.question, documents=item.context) for item in questions]
    options: dict[str, Any] = {"top_k": parameters.top_k, "max_answer_length": parameters.max_answer_len}
    options |= {"model": request.model, "head": request.head, "no_answer_threshold": 1.0}  # a span is always returned
    if parameters.handle_impossible_answer:
        fitted = service.task(Reader, request.model, context, head=request.head).info.calibration.no_answer_threshold
        options["no_answer_threshold"] = 0.5 if fitted is None else fitted
    answered = native.answer(service, native.AnswerRequest(questions=pairs, **options), context)
    rows: list[Any] = []
    for result in answered["results"]:
        answers = [
            {"answer": answer.text, "score": answer.score, "start": answer.start or 0, "end": answer.end or 0}
            for answer in result.answers
        ]
        rows.append(answers[0] if parameters.top_k == 1 else answers)
    return rows if isinstance(request.inputs, list) else rows[0]


# --- zero-shot classification ---


class ZeroShotParameters(Parameters):
    """Parameters of zero-shot classification."""

    candidate_labels: str | Array[Label] = Field(
        examples=[["sports", "politics"]], description="A string is split at commas."
    )
    hypothesis_template: str | None = Field(default=None, max_length=1000)
    multi_label: bool = False


class ZeroShotRequest(PipelineRequest):
    """POST /pipeline/zero-shot-classification."""

    inputs: Texts = Field(examples=["The match ended in a draw."])
    parameters: ZeroShotParameters


def classify_zero_shot(service: Service, request: ZeroShotRequest, context: RequestContext) -> Any:
    """Zero-shot classification: the labels with their scores, best first."""
    texts, parameters = service.as_list(request.inputs, "inputs"), request.parameters
    labels = parameters.candidate_labels
    if isinstance(labels, str):
        labels = [label.strip() for label in labels[:10_000].split(",") if label.strip()]
    if not labels:
        raise ApiError("empty", "`candidate_labels` cannot be empty", field="parameters")
    options: dict[str, Any] = {"template": parameters.hypothesis_template, "multi_label": parameters.multi_label}
    body = {"texts": texts, "labels": labels, "model": request.model, "head": request.head, **options}
    classified = native.classify(service, validate(native.ClassifyRequest, body), context)
    rows = [
        [{"label": label, "score": score} for label, score in sorted(result.scores.items(), key=lambda item: -item[1])]
        for result in classified["results"]
    ]
    return rows if isinstance(request.inputs, list) else rows[0]


PIPELINES: dict[str, tuple[type[BaseModel], Any]] = {  # the request and the handler of each task
    "feature-extraction": (tei.EmbedRequest, tei.embed),
    "sentence-similarity": (tei.SimilarityRequest, tei.similarity),
    "fill-mask": (FillMaskRequest, fill_mask),
    "text-classification": (TextClassificationRequest, classify_texts),
    "token-classification": (TokenClassificationRequest, classify_tokens),
    "question-answering": (QuestionAnsweringRequest, answer_questions),
    "zero-shot-classification": (ZeroShotRequest, classify_zero_shot),
}
RESPONSES: dict[str, Any] = {
    "feature-extraction": list[list[float]],
    "sentence-similarity": list[float],
    "fill-mask": FillMaskResponse,
    "text-classification": list[list[tei.Prediction]],
    "token-classification": TokenClassificationResponse,
    "question-answering": QuestionAnsweringResponse,
    "zero-shot-classification": list[tei.Prediction] | list[list[tei.Prediction]],
}
