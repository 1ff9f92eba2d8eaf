"""What the endpoints take and give: OpenAI's shapes, text-embeddings-inference's, Cohere's and Jina's, and our own.

What comes in is checked by these classes. What goes out is only described by them: it is made by our own code, and the
tests hold it against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = list[Id]
Words = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Texts = str | list[str]
Pooling = Literal["cls", "mean", "max", "last", "weighted-mean"]

SENTENCES = ["A cat sat on the mat.", "The feline rested on a rug."]
QUERY, PASSAGES = "What do cats eat?", ["Bread is baked in an oven.", "Cats eat meat."]


class _Theirs(BaseModel):
    """A request in another server's shape, which takes fields that it does not know, as that server does."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = Field(None, description="One of the served models; the first that can do it, if none is named.")


class _Ours(BaseModel):
    """A request in our own shape: a field that is not known is an error, as it may be one that is misspelt."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: str | None = Field(None, description="One of the served models; the first that can do it, if none is named.")
    head: str | None = Field(None, description="One of the model's heads, where several fit.")
    truncate: bool = Field(False, description="Read the beginning only of what is longer than the model reads at once.")


class _Said(BaseModel):
    """A reply. It is described, seldom checked: what checks it is not made at the start."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class Read(_Said):
    """How much of a text was read: its tokens, those that an answer rests on, and in how many windows."""

    tokens_total: int
    tokens_read: int
    windows: int


# --- OpenAI ---


class EmbeddingsRequest(_Theirs):
    """POST /v1/embeddings."""

    input: str | list[str] | Ids | list[Ids] = Field(examples=[SENTENCES])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="Keep the first numbers of each vector.")
    user: str | None = None
    prompt: str | None = Field(None, description="Ours: the name of one of the model's prompts.")
    pooling: Pooling | None = Field(None, description="Ours: another pooling than the model's own.")
    normalize: bool = Field(True, description="Ours: false gives vectors as the model makes them, of any length.")


class EmbeddingItem(Read):
    """One vector; base64 is of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(_Said):
    """Tokens, without special ones."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(_Said):
    """Vectors in the order of the texts."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: Usage


class ModelItem(_Said):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Said):
    """All served models."""

    object: Literal["list"]
    data: list[ModelItem]


class OpenAIErrorBody(_Said):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(_Said):
    """An error as OpenAI says it."""

    error: OpenAIErrorBody


# --- text-embeddings-inference ---

Direction = Literal["Left", "Right", "left", "right"]


class _Tei(_Theirs):
    truncate: bool | None = Field(None, description="True: read the beginning only. Else all is read, in windows.")
    truncation_direction: Direction = "right"


class EmbedRequest(_Tei):
    """POST /embed."""

    inputs: str | list[str] | Ids | list[Ids] = Field(examples=["What is Deep Learning?"])
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = Field(None, ge=1)


class EmbedAllRequest(_Tei):
    """POST /embed_all and /embed_sparse."""

    inputs: str | list[str] | Ids | list[Ids] = Field(examples=["What is Deep Learning?"])
    prompt_name: str | None = None


class SparseValue(_Said):
    """A word of the vocabulary, and its weight."""

    index: int
    value: float


class PredictRequest(_Tei):
    """POST /predict: a text, a pair of texts, or a batch of lists of one or two texts."""

    inputs: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=2)]
        | list[Annotated[list[str], Field(min_length=1, max_length=2)]]
    ) = Field(examples=["What is Deep Learning?"])
    raw_scores: bool = False
    head: str | None = Field(None, description="Ours: one of the model's heads, where several fit.")


class Prediction(_Said):
    """A label."""

    score: float
    label: str


class RerankRequest(_Tei):
    """POST /rerank."""

    query: str = Field(examples=[QUERY])
    texts: list[str] = Field(examples=[PASSAGES])
    raw_scores: bool = False
    return_text: bool = False


class Rank(_Said):
    """A text's place in the request, and its score."""

    index: int
    score: float
    text: str | None = None


class SimilarityInput(BaseModel):
    """A text, and those that it is compared to."""

    model_config = ConfigDict(strict=True)
    source_sentence: str = Field(examples=[SENTENCES[0]])
    sentences: list[str] = Field(examples=[SENTENCES[1:]])


class SimilarityParameters(BaseModel):
    """How they are read."""

    model_config = ConfigDict(strict=True)
    truncate: bool | None = None
    truncation_direction: Direction = "right"
    prompt_name: str | None = None


class SimilarityRequest(_Theirs):
    """POST /similarity."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(_Theirs):
    """POST /tokenize."""

    inputs: Texts = Field(examples=["What is Deep Learning?"])
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Token(_Said):
    """A token, with its place in the text, in characters; special ones have none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class DecodeRequest(_Theirs):
    """POST /decode."""

    ids: Ids | list[Ids] = Field(examples=[[2, 11, 12, 3]])
    skip_special_tokens: bool = True


class TeiError(_Said):
    """An error as text-embeddings-inference says it, and our own endpoints as well."""

    error: str
    error_type: str


# --- Cohere, Jina ---


class RankedText(BaseModel):
    """A document as an object."""

    model_config = ConfigDict(strict=True)
    text: str


class RankRequest(_Theirs):
    """POST /v1/rerank and /v2/rerank."""

    query: str = Field(examples=[QUERY])
    documents: list[str | RankedText] = Field(examples=[PASSAGES])
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    own_scores: bool = Field(False, description="Ours: scores as the model gives them, whatever their range.")
    head: str | None = Field(None, description="Ours: one of the model's heads, where several fit.")


class RankedResult(Read):
    """A document's place in the request, and how relevant it is: from 0 to 1, unless the model's own was asked for."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class RankUsage(_Said):
    """Tokens, without special ones."""

    total_tokens: int


class RankReply(_Said):
    """The documents, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedResult]
    usage: RankUsage
    meta: dict[str, Any]


class RankError(_Said):
    """An error as Cohere (message) and Jina (detail) say it."""

    message: str
    detail: str


# --- Bertie ---


class FillRequest(_Ours):
    """POST /fill."""

    texts: Texts = Field(examples=["Paris is the [MASK] of France."])
    top_k: int = Field(5, ge=1, le=1000)
    candidates: list[Words] | None = Field(None, description="Choose among these only.")


class FillCandidate(_Said):
    """A token for a mask."""

    token: str
    id: int
    score: float
    text: str


class FilledMask(_Said):
    """A mask, and its best candidates."""

    start: int
    end: int
    candidates: list[FillCandidate]


class FillResult(Read):
    """The masks of one text."""

    masks: list[FilledMask]


class FillReply(_Said):
    """One result a text."""

    model: str
    mask_token: str
    results: list[FillResult]


class ClassifyRequest(_Ours):
    """POST /classify: texts or pairs by a head's labels; with `labels`, texts by any labels."""

    texts: str | list[str | Annotated[list[str], Field(min_length=2, max_length=2)]] = Field(
        examples=[["A delight from start to finish."]]
    )
    labels: list[Words] | None = Field(None, description="Labels that the model need not have been trained on.")
    template: str | None = Field(None, max_length=1000, description="The sentence to be true, with {} for the label.")
    multi: bool = Field(False, description="With labels: predict_labelled each by itself.")


class ClassifyResult(Read):
    """A text's label. `sure`: false where a person had better decide; of a head's own labels alone."""

    label: str
    score: float
    scores: dict[str, float]
    sure: bool | None = None


class ClassifyReply(_Said):
    """One result a text."""

    model: str
    head: str | None
    results: list[ClassifyResult]


class TagRequest(_Ours):
    """POST /tag."""

    texts: Texts = Field(examples=["Ada Lovelace was born in London."])
    words: Literal["average", "first", "max", "simple", "none"] = "average"
    outside: list[str] = Field(["O"], description="Labels that mark no span.")


class TagSpan(_Said):
    """text[start:end], in characters."""

    label: str
    start: int
    end: int
    text: str
    score: float


class TagResult(Read):
    """The spans of one text."""

    spans: list[TagSpan]


class TagReply(_Said):
    """One result a text."""

    model: str
    head: str | None
    results: list[TagResult]


class Question(BaseModel):
    """A question, and the document or documents that may answer it."""

    model_config = ConfigDict(strict=True, extra="forbid")
    question: str = Field(examples=["Who wrote Emma?"])
    documents: Texts = Field(examples=["Emma is a novel by Jane Austen."])


class AnswerRequest(_Ours):
    """POST /answer."""

    questions: Question | list[Question]
    top_k: int = Field(1, ge=1, le=100)
    longest: int = Field(30, ge=1, le=1000, description="Tokens that an answer may have.")
    threshold: float | None = Field(None, description="By how much the best must beat the score of no answer.")


class AnswerSpan(_Said):
    """documents[document][start:end]; no answer has an empty text and no place."""

    text: str
    start: int | None
    end: int | None
    score: float
    document: int | None


class AnswerResult(Read):
    """The best answers to one question."""

    answers: list[AnswerSpan]
    no_answer: float


class AnswerReply(_Said):
    """One result a question."""

    model: str
    head: str | None
    results: list[AnswerResult]


class SearchRequest(BaseModel):
    """POST /search."""

    model_config = ConfigDict(strict=True, extra="forbid")
    queries: Texts = Field(examples=[QUERY])
    k: int = Field(10, ge=1, le=1000)
    mode: Literal["hybrid", "dense", "lexical"] = "hybrid"
    rerank: bool = False
    where: dict[str, str | int | float | bool | list[str | int | float | bool]] = Field(default_factory=dict)
    depth: int = Field(100, ge=1, le=1000)
    weights: dict[Literal["dense", "lexical", "rerank"], float] | None = None


class SearchHit(_Said):
    """A passage."""

    document: str
    text: str
    start: int
    end: int
    headings: list[str]
    score: float
    scores: dict[str, float]
    highlights: list[tuple[int, int]]
    metadata: dict[str, str | int | float | bool]


class SearchResult(Read):
    """What was found for one query; what was read is the query."""

    query: str
    hits: list[SearchHit]
    timings: dict[str, float]


class SearchReply(_Said):
    """One result a query."""

    model: str
    passages: int
    results: list[SearchResult]


class CompareRequest(_Ours):
    """POST /compare: how alike each of several texts is to each other one."""

    texts: list[str] = Field(examples=[SENTENCES])
    pooling: Pooling | None = Field(None, description="Another pooling than the model's own.")


class CompareReply(_Said):
    """(n, n) similarities, and what was read of each text."""

    model: str
    similarity: list[list[float]]
    results: list[Read]


class AttentionRequest(BaseModel):
    """POST /attention: who looks at whom in one layer of a short text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: str = Field(examples=[SENTENCES[0]])
    layer: int | None = Field(None, ge=0, description="Counted from 0; the last one, if none is named.")
    head: int | None = Field(None, ge=0, description="Counted from 0; the mean of all, if none is named.")
    model: str | None = None


class WindowsRequest(BaseModel):
    """POST /windows: where the windows of a text lie; with `pair`, those of that text beside the first."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: str = Field(examples=[QUERY])
    pair: str | None = Field(None, examples=[PASSAGES[1]])
    model: str | None = None


class WindowSpan(_Said):
    """What a window reads, from start to end in characters, and the stretch that it answers for."""

    start: int
    end: int
    owns: tuple[int, int]
    tokens: int


class WindowsReply(_Said):
    """All windows of a text."""

    windows: list[WindowSpan]
    tokens_total: int
    tokens_read: int
