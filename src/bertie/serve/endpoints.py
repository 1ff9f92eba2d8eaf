"""What each endpoint does: the ordinary verb of the ordinary task object, whose windows go through the engine.

All of this runs in threads, a request in each, off the event loop: reading JSON, tokenizing, decoding, writing JSON.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bertie._version import __version__
from bertie.serve import schemas, views
from bertie.serve.limits import Limits
from bertie.serve.problems import Problem, Style
from bertie.serve.queue import Ticket
from bertie.serve.tasks import RawClassifier, RawReranker, Sparse, States
from bertie.tasks.answer import Reader
from bertie.tasks.base import FloatArray, Task, TaskInput, reading, sigmoid
from bertie.tasks.classify import Classifier, ZeroShot, entailing
from bertie.tasks.embed import POOLING, Embedder
from bertie.tasks.fill_mask import MaskedLM
from bertie.tasks.rerank import Reranker
from bertie.tasks.tag import Tagger
from bertie.text.windows import Window

if TYPE_CHECKING:
    from pydantic import BaseModel

    from bertie.checkpoints.checkpoint import Checkpoint
    from bertie.search.index import Index
    from bertie.serve.engine import Engine
    from bertie.serve.registry import Registry, Served
    from bertie.text.tokenizer import Tokenizer

T = TypeVar("T", bound=Task[Any, Any, Any])
AnyTask = TypeVar("AnyTask", bound=Task[Any, Any, Any] | ZeroShot)
READ = ("tokens_total", "tokens_read", "windows")


@dataclass(slots=True)
class Job:
    """One request: its ticket, the models that it holds, and what is known of it at the end."""

    ticket: Ticket
    limits: Limits
    model: str = ""
    tokens: int = 0  # that were put into the queue
    read: dict[str, int] = field(default_factory=lambda: dict.fromkeys(READ, 0))
    held: dict[str, Served] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)  # which lets go of them

    def saw(self, results: Iterable[Any]) -> None:
        """Add up what was read."""
        for one in results:
            for name in READ:
                self.read[name] += getattr(one, name)


current_job: ContextVar[Job] = ContextVar("current_job")


class Through:
    """A task's `compute` that goes through its model's engine, as a part of the current request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, task: Any, items: Sequence[tuple[TaskInput[Any], Window]]) -> Sequence[Any]:
        """Count the tokens, then ask."""
        job = current_job.get()
        job.tokens += sum(len(window) for _, window in items)
        if job.tokens > job.limits.tokens:
            raise Problem("large", f"a request may have at most {job.limits.tokens:,} tokens, in all windows together")
        return self.engine.compute(task, items, ticket=job.ticket)


class Desk:
    """The models that are served, as the endpoints see them."""

    def __init__(self, registry: Registry, limits: Limits, index: tuple[Index, str] | None = None) -> None:
        """`index`: one to be searched, and the name of the served model that it was made with."""
        self.registry, self.limits = registry, limits
        self.started = int(time.time())
        self._index = None if index is None else (index[0].store, index[1])
        self._searched: Index | None = None
        if index is not None:
            self.index(registry[index[1]])

    def search(self, job: Job) -> Index:
        """The index, for one request."""
        if self._index is None:
            raise Problem("unable", "there is no index here; start the server with --index")
        job.model = self._index[1]
        return self.index(self.served(job.model, job))

    def index(self, served: Served) -> Index:
        """The index over its model as it is now: a reload may have changed it."""
        from bertie.search.index import Index

        assert self._index is not None
        store, embedder = self._index[0], through(served, Embedder)
        found = self._searched
        if found is None or found.embedder is not embedder:
            found = self._searched = Index(store, embedder)  # which refuses one that gives other vectors
        return found

    @property
    def passages(self) -> int | None:
        """How many there are in the index, if there is one."""
        return None if self._index is None else len(self._index[0])

    @property
    def names(self) -> list[str]:
        """In the order in which they were named at the start."""
        return list(self.registry)

    def served(self, name: str, job: Job) -> Served:
        """A model by name, held until the request is done: it may be reloaded meanwhile."""
        if name not in job.held:
            job.held[name] = job.stack.enter_context(self.registry.use(name))
        return job.held[name]

    def candidates(self, name: str | None) -> list[str]:
        """The models to try in turn."""
        if name is None:
            return self.names
        self.check(name)
        return [name]

    def check(self, name: str) -> None:
        """Refuse a model that is not served."""
        if name not in self.registry:
            known = ", ".join(self.names)
            raise Problem("model", f"there is no model {name[:100]!r} here; served are: {known}", field="model")

    def task(
        self, kind: type[T], model: str | None, job: Job, *, head: str | None = None, truncate: bool = False, **how: Any
    ) -> T:
        """A task over the first model that can do it."""
        names = self.candidates(model)
        if issubclass(kind, Embedder):  # every encoder gives vectors, but some were made for it
            names = sorted(names, key=lambda name: self.registry[name].checkpoint.sentence is None)
        for name in names:
            served = self.served(name, job)
            if kind.kind is None or any(kind._fits(info) for info in served.checkpoint.heads.values()):
                job.model = name
                if head is not None:
                    how["head"] = head
                return through(served, kind, overflow="truncate" if truncate else "window", **how)
        having = f"the model {names[0]!r} has not" if len(names) == 1 else "none of the served models has"
        raise Problem("unable", f"this needs {_NEEDS.get(kind, kind.needs)}, which {having}")

    def zero_shot(self, model: str | None, job: Job, *, head: str | None, truncate: bool) -> ZeroShot:
        """As `task`, for labels that no head was trained on."""
        for name in self.candidates(model):
            served = self.served(name, job)
            if any(entailing(info) is not None for info in served.checkpoint.heads.values()):
                job.model = name
                return through(served, ZeroShot, overflow="truncate" if truncate else "window", head=head)
        raise Problem("unable", "labels of one's own need a head for natural language inference, and none is served")

    def tokenizer(self, model: str | None, job: Job) -> Tokenizer:
        """Of a model, or of the first one."""
        job.model = self.candidates(model)[0]
        found = self.served(job.model, job).checkpoint.tokenizer
        assert found is not None  # or it would not be served
        return found

    def count(self, things: Sequence[Any], name: str) -> None:
        """Refuse none, and too many."""
        if not things:
            raise Problem("empty", f"`{name}` cannot be empty", field=name)
        if len(things) > self.limits.items:
            raise Problem(
                "large", f"batch size {len(things)} > maximum allowed batch size {self.limits.items}", field=name
            )

    def listed(self, texts: Any, name: str) -> list[Any]:
        """One or several, as several."""
        found = texts if isinstance(texts, list) else [texts]
        self.count(found, name)
        return found

    def texts(self, inputs: Any, tokenizer: Tokenizer, name: str) -> list[str]:
        """Texts, or the texts that ids stand for."""
        several = inputs if isinstance(inputs, list) and not (inputs and isinstance(inputs[0], int)) else [inputs]
        self.count(several, name)
        return [
            one if isinstance(one, str) else _spelt(one, tokenizer, f"{name}[{i}]") for i, one in enumerate(several)
        ]


def through(served: Served, kind: type[AnyTask], **how: Any) -> AnyTask:
    """A task whose windows count for the current request."""
    made = served.task(kind, **how)
    inner = made._logits if isinstance(made, ZeroShot) else made
    if not isinstance(inner.compute, Through):
        inner.compute = Through(served.engine)
    return made


_NEEDS: dict[type, str] = {
    Classifier: "a head for classes",
    RawClassifier: "a head for classes",
    RawReranker: "a re-ranker: a head with one score",
    Reranker: "a re-ranker: a head with one score",
    Tagger: "a head for tags",
    Reader: "a head for answers",
    MaskedLM: "a head for masked words",
}


def _spelt(ids: list[int], tokenizer: Tokenizer, name: str) -> str:
    """The text of ids. It must read back as the same ids, or the model would read something else."""
    size = tokenizer.vocab_size
    if any(id >= size for id in ids):
        raise Problem(
            "input", f"{name}: ids must be below {size}, as they are of the served model's own tokenizer", field=name
        )
    special = {tokenizer.cls_id, tokenizer.sep_id}
    while ids and ids[0] in special:
        ids = ids[1:]
    while ids and ids[-1] in special:
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special=False)
    if tokenizer.encode(text, special=False).ids.tolist() != ids:
        raise Problem("input", f"{name}: no text has just these ids; send the text instead", field=name)
    return text


def _direction(truncate: bool | None, direction: str) -> bool:
    if truncate and direction.lower() == "left":
        raise Problem(
            "input", "truncation_direction=left is not supported: leave `truncate` out, and all is read in windows"
        )
    return bool(truncate)


def _finite(rows: Iterable[FloatArray]) -> None:
    if not all(np.isfinite(row).all() for row in rows):
        raise Problem("backend", "the model gave no finite numbers for this")


def _unit(vector: FloatArray) -> FloatArray:
    out: FloatArray = vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))
    return out


def _cut(vector: FloatArray, dimensions: int | None) -> FloatArray:
    if dimensions is not None and dimensions > len(vector):
        raise Problem("input", f"dimensions={dimensions} must be at most {len(vector)}", field="dimensions")
    return vector[:dimensions]


# --- OpenAI ---


def v1_embeddings(desk: Desk, ask: schemas.EmbeddingsRequest, job: Job) -> Any:
    """Vectors of length 1, if not asked otherwise."""
    how: dict[str, Any] = {} if ask.pooling is None else {"pooling": ask.pooling}
    if ask.dimensions is not None and not ask.normalize:
        how["dimensions"] = ask.dimensions
    task = desk.task(Embedder, ask.model, job, **how)
    texts = desk.texts(ask.input, task.tokenizer, "input")
    found = list(task.embed_each(texts, prompt=ask.prompt))
    _finite(one.vector for one in found)
    job.saw(found)
    data = []
    for index, one in enumerate(found):
        vector = _unit(_cut(one.vector, ask.dimensions)) if ask.normalize else one.vector
        packed: Any = vector
        if ask.encoding_format == "base64":
            packed = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": packed, **_reading(one)})
    total = job.read["tokens_total"]
    usage = {"prompt_tokens": total, "total_tokens": total}
    return {"object": "list", "data": data, "model": job.model, "usage": usage}


def _reading(one: Any) -> dict[str, int]:
    return {name: getattr(one, name) for name in READ}


def v1_models(desk: Desk, ask: None, job: Job) -> Any:
    """Those that are served."""
    return {"object": "list", "data": [model_item(desk, name) for name in desk.names]}


def model_item(desk: Desk, name: str) -> dict[str, Any]:
    """One of them."""
    desk.check(name)
    return {"id": name, "object": "model", "created": desk.started, "owned_by": "bertie"}


# --- text-embeddings-inference ---


def embed(desk: Desk, ask: schemas.EmbedRequest, job: Job) -> Any:
    """Vectors."""
    task = desk.task(Embedder, ask.model, job, truncate=_direction(ask.truncate, ask.truncation_direction))
    found = list(task.embed_each(desk.texts(ask.inputs, task.tokenizer, "inputs"), prompt=ask.prompt_name))
    _finite(one.vector for one in found)
    job.saw(found)
    vectors = [_cut(one.vector, ask.dimensions) for one in found]
    return [_unit(one) for one in vectors] if ask.normalize else [np.ascontiguousarray(one) for one in vectors]


def embed_all(desk: Desk, ask: schemas.EmbedAllRequest, job: Job) -> Any:
    """A vector a token."""
    cut = _direction(ask.truncate, ask.truncation_direction)
    embedder = desk.task(Embedder, ask.model, job, truncate=cut)
    texts = desk.texts(ask.inputs, embedder.tokenizer, "inputs")
    before = embedder._prompt(ask.prompt_name)
    asks = [TaskInput(f"text {i}", (embedder._prepared(before + text),), None) for i, text in enumerate(texts)]
    found = list(desk.task(States, job.model, job, truncate=cut).run(asks))
    _finite(one.vectors for one in found)
    job.saw(found)
    return [np.ascontiguousarray(one.vectors) for one in found]


def embed_sparse(desk: Desk, ask: schemas.EmbedAllRequest, job: Job) -> Any:
    """The words of the vocabulary that a text stands for, with their weights."""
    for name in desk.candidates(ask.model):
        splade = desk.registry[name].checkpoint.splade
        if splade is not None:
            break
    else:
        raise Problem("unable", "Model is not an embedding model with Splade pooling")
    task = desk.task(Sparse, name, job, truncate=_direction(ask.truncate, ask.truncation_direction))
    prompt = ask.prompt_name or splade.default_prompt
    if prompt is not None and prompt not in splade.prompts:
        raise Problem("input", f"prompt_name={prompt[:100]!r} is none of the model's prompts", field="prompt_name")
    before = "" if prompt is None else splade.prompts[prompt]
    texts = [before + one for one in desk.texts(ask.inputs, task.tokenizer, "inputs")]
    texts = [one.lower() for one in texts] if splade.lower_case else texts
    found = list(task.run(TaskInput(f"text {i}", (text,), None) for i, text in enumerate(texts)))
    _finite(one.weights for one in found)
    job.saw(found)
    return [
        [{"index": i, "value": float(one.weights[i])} for i in np.flatnonzero(one.weights).tolist()] for one in found
    ]


def predict(desk: Desk, ask: schemas.PredictRequest, job: Job) -> Any:
    """Labels with their scores, best first."""
    cut = _direction(ask.truncate, ask.truncation_direction)
    batch = isinstance(ask.inputs, list) and not (ask.inputs and isinstance(ask.inputs[0], str))
    inputs: Any = ask.inputs if batch else [ask.inputs]
    several: list[tuple[str, ...]] = [(one,) if isinstance(one, str) else tuple(one) for one in inputs]
    desk.count(several, "inputs")
    kind = RawClassifier if ask.raw_scores else Classifier
    names = desk.candidates(ask.model)
    if any(kind._fits(info) for name in names for info in desk.registry[name].checkpoint.heads.values()):
        task = desk.task(kind, ask.model, job, head=ask.head, truncate=cut)
        texts = [one[0] if len(one) == 1 else (one[0], one[1]) for one in several]
        found = task.classify(texts)
        job.saw(found)
        rows = [one.scores for one in found]
    else:
        ranker = desk.task(RawReranker, ask.model, job, head=ask.head, truncate=cut)
        scored = list(ranker.predict_each([_pair(one, i) for i, one in enumerate(several)]))
        job.saw(scored)
        label = next(iter(ranker.info.labels.values()))
        rows = [{label: one.score if ask.raw_scores else _probability(one.score)} for one in scored]
    _finite(np.array(list(row.values()), dtype=np.float32) for row in rows)
    ranked = [
        [{"score": score, "label": label} for label, score in sorted(row.items(), key=lambda one: -one[1])]
        for row in rows
    ]
    return ranked if batch else ranked[0]


def _pair(texts: tuple[str, ...], index: int) -> tuple[str, str]:
    if len(texts) != 2:
        raise Problem("input", f"inputs[{index}] must be a query and a text, as the model compares two", field="inputs")
    return texts[0], texts[1]


def _probability(logit: float) -> float:
    return float(sigmoid(np.array(logit, dtype=np.float32)))


def rerank(desk: Desk, ask: schemas.RerankRequest, job: Job) -> Any:
    """Texts with their scores, best first."""
    desk.count(ask.texts, "texts")
    cut = _direction(ask.truncate, ask.truncation_direction)
    found = desk.task(RawReranker, ask.model, job, truncate=cut).rerank(ask.query, ask.texts)
    job.saw(found)
    _finite([np.array([one.score for one in found], dtype=np.float32)])
    return [
        {"index": one.index, "score": one.score if ask.raw_scores else _probability(one.score)}
        | ({"text": one.text} if ask.return_text else {})
        for one in found
    ]


def similarity(desk: Desk, ask: schemas.SimilarityRequest, job: Job) -> Any:
    """How alike each sentence is to the first text."""
    how = ask.parameters or schemas.SimilarityParameters()
    desk.count(ask.inputs.sentences, "sentences")
    task = desk.task(Embedder, ask.model, job, truncate=_direction(how.truncate, how.truncation_direction))
    found = list(task.embed_each([ask.inputs.source_sentence, *ask.inputs.sentences], prompt=how.prompt_name))
    _finite(one.vector for one in found)
    job.saw(found)
    source, *others = [_unit(one.vector) for one in found]
    return [float(source @ other) for other in others]


def tokenize(desk: Desk, ask: schemas.TokenizeRequest, job: Job) -> Any:
    """Tokens with their places."""
    texts = desk.listed(ask.inputs, "inputs")
    tokenizer = desk.tokenizer(ask.model, job)
    if ask.prompt_name is not None:
        before = desk.task(Embedder, job.model, job)._prompt(ask.prompt_name)
        texts = [before + text for text in texts]
    found = []
    for one in tokenizer.encode_batch(texts, special=ask.add_special_tokens):
        rows = zip(one.ids.tolist(), one.offsets.tolist(), one.special.tolist(), strict=True)
        found.append(
            [
                {
                    "id": id,
                    "text": tokenizer.token(id),
                    "special": special,
                    "start": None if special else start,
                    "stop": None if special else stop,
                }
                for id, (start, stop), special in rows
            ]
        )
    job.read["tokens_total"] = sum(map(len, found))
    return found


def decode(desk: Desk, ask: schemas.DecodeRequest, job: Job) -> Any:
    """The texts of ids."""
    several: list[Any] = [ask.ids] if not ask.ids or isinstance(ask.ids[0], int) else ask.ids
    if not ask.ids:
        raise Problem("empty", "`ids` cannot be empty", field="ids")
    desk.count(several, "ids")
    tokenizer = desk.tokenizer(ask.model, job)
    if any(id >= tokenizer.vocab_size for ids in several for id in ids):
        raise Problem("input", f"ids must be below {tokenizer.vocab_size}", field="ids")
    return [tokenizer.decode(ids, skip_special=ask.skip_special_tokens) for ids in several]


def info(desk: Desk, ask: None, job: Job) -> Any:
    """What is served, and within which limits."""
    first = desk.names[0]
    served = desk.registry[first]
    checkpoint = served.checkpoint
    return {
        "model_id": first,
        "model_sha": None,
        "model_dtype": str(checkpoint.model.dtype).removeprefix("torch."),
        "model_type": _model_type(checkpoint),
        "max_concurrent_requests": desk.limits.requests,
        "max_input_length": checkpoint.max_length,
        "max_batch_tokens": served.engine.budget,
        "max_batch_requests": None,
        "max_client_batch_size": desk.limits.items,
        "auto_truncate": False,
        "tokenization_workers": desk.limits.requests,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "max_request_tokens": desk.limits.tokens,
        "max_body_bytes": desk.limits.body,
        "models": desk.names,
    }


def _model_type(checkpoint: Checkpoint) -> dict[str, Any]:
    heads = checkpoint.heads.get("classify")
    if heads is None or checkpoint.sentence is not None:
        pooling = "mean" if checkpoint.sentence is None else checkpoint.sentence.pooling.modes[0]
        return {"embedding": {"pooling": {theirs: ours for ours, theirs in POOLING.items()}.get(pooling, pooling)}}
    id2label = {str(i): label for i, label in heads.labels.items()}
    kind = "reranker" if Reranker._fits(heads) else "classifier"
    return {kind: {"id2label": id2label, "label2id": {label: int(i) for i, label in id2label.items()}}}


# --- Cohere, Jina ---


def v1_rerank(desk: Desk, ask: schemas.RankRequest, job: Job) -> Any:
    """Documents, best first."""
    desk.count(ask.documents, "documents")
    texts = [one if isinstance(one, str) else one.text for one in ask.documents]
    found = desk.task(Reranker if ask.own_scores else RawReranker, ask.model, job, head=ask.head).rerank(
        ask.query, texts
    )
    job.saw(found)
    _finite([np.array([one.score for one in found], dtype=np.float32)])
    score = float if ask.own_scores else _probability
    results = [
        {"index": one.index, "relevance_score": score(one.score), **_reading(one)}
        | ({"document": {"text": one.text}} if ask.return_documents else {})
        for one in found[: ask.top_n]
    ]
    return {
        "id": job.ticket.id,
        "object": "list",
        "model": job.model,
        "results": results,
        "usage": {"total_tokens": job.read["tokens_total"]},
        "meta": {"api_version": {"version": "1"}},
    }


# --- Bertie ---


def fill(desk: Desk, ask: schemas.FillRequest, job: Job) -> Any:
    """Words for masks."""
    texts = desk.listed(ask.texts, "texts")
    task = desk.task(MaskedLM, ask.model, job, head=ask.head, truncate=ask.truncate)
    found = task.fill(texts, top_k=ask.top_k, candidates=ask.candidates)
    job.saw(found)
    return {"model": job.model, "mask_token": task.tokenizer.mask_token, "results": found}


def classify(desk: Desk, ask: schemas.ClassifyRequest, job: Job) -> Any:
    """Labels."""
    texts = desk.listed(ask.texts, "texts")
    if ask.labels is None:
        if ask.template is not None or ask.multi:
            raise Problem("invalid", "`template` and `multi` go with `labels`", field="labels")
        task = desk.task(Classifier, ask.model, job, head=ask.head, truncate=ask.truncate)
        found: Sequence[Any] = task.classify([one if isinstance(one, str) else (one[0], one[1]) for one in texts])
        head = task.head
    else:
        if not all(isinstance(one, str) for one in texts):
            raise Problem("invalid", "`labels` are for single texts, and there are pairs", field="texts")
        desk.count(range(len(texts) * len(ask.labels)), "labels")
        how = {} if ask.template is None else {"template": ask.template}
        zero = desk.zero_shot(ask.model, job, head=ask.head, truncate=ask.truncate)
        found = zero.classify(texts, ask.labels, multi=ask.multi, **how)
        head = zero._logits.head
    job.saw(found)
    return {"model": job.model, "head": head, "results": found}


def tag(desk: Desk, ask: schemas.TagRequest, job: Job) -> Any:
    """Spans."""
    texts = desk.listed(ask.texts, "texts")
    task = desk.task(Tagger, ask.model, job, head=ask.head, truncate=ask.truncate)
    found = task.tag(texts, words=ask.words, outside=ask.outside)
    job.saw(found)
    return {"model": job.model, "head": task.head, "results": found}


def answer(desk: Desk, ask: schemas.AnswerRequest, job: Job) -> Any:
    """Answers to questions."""
    several = desk.listed(ask.questions, "questions")
    pairs: list[tuple[str, str | Sequence[str]]] = [(one.question, one.documents) for one in several]
    for _, documents in pairs:
        if not isinstance(documents, str):
            desk.count(documents, "documents")
    task = desk.task(Reader, ask.model, job, head=ask.head, truncate=ask.truncate)
    found = task.answer(pairs, top_k=ask.top_k, longest=ask.longest, threshold=ask.threshold)
    job.saw(found)
    return {"model": job.model, "head": task.head, "results": found}


def search(desk: Desk, ask: schemas.SearchRequest, job: Job) -> Any:
    """Passages of the index."""
    queries = desk.listed(ask.queries, "queries")
    ranker = desk.task(Reranker, None, job) if ask.rerank else None
    index = desk.search(job)
    how: dict[str, Any] = {"mode": ask.mode, "where": ask.where, "depth": ask.depth, "weights": ask.weights}
    found = index.search_each(queries, ask.k, rerank=ranker, **how)
    embedder = index.embedder
    encoded = embedder.tokenizer.encode_batch(queries)
    results = []
    for one, encoding in zip(found, encoded, strict=True):
        ask_of = TaskInput("query", (one.query,), None)
        read = reading(embedder.windows(ask_of, encoding))  # type: ignore[arg-type]
        for name in READ:
            job.read[name] += read[name]
        hits = [{name: getattr(hit, name) for name in schemas.SearchHit.model_fields} for hit in one]
        results.append({"query": one.query, "hits": hits, "timings": one.timings, **read})
    return {"model": job.model, "passages": len(index), "results": results}


def compare(desk: Desk, ask: schemas.CompareRequest, job: Job) -> Any:
    """How alike each text is to each other one."""
    desk.count(ask.texts, "texts")
    how: dict[str, Any] = {} if ask.pooling is None else {"pooling": ask.pooling}
    task = desk.task(Embedder, ask.model, job, truncate=ask.truncate, **how)
    found = list(task.embed_each(ask.texts))
    _finite(one.vector for one in found)
    job.saw(found)
    rows = np.stack([one.vector for one in found])
    return {"model": job.model, "similarity": task.compare(rows, rows), "results": [_reading(one) for one in found]}


def attention(desk: Desk, ask: schemas.AttentionRequest, job: Job) -> Any:
    """Who looks at whom."""
    from bertie.serve.attention import attention as look

    job.model = desk.candidates(ask.model)[0]
    return look(desk.served(job.model, job).checkpoint, ask.text, layer=ask.layer, head=ask.head)


def windows(desk: Desk, ask: schemas.WindowsRequest, job: Job) -> Any:
    """Where windows lie."""
    job.model = desk.candidates(ask.model)[0]
    texts = (ask.text,) if ask.pair is None else (ask.text, ask.pair)
    return views.window_map(desk.served(job.model, job).checkpoint, texts)


def about(desk: Desk, ask: None, job: Job) -> Any:
    """What the page shows of the models."""
    models = [views.about(name, desk.registry[name].checkpoint) for name in desk.names]
    index = None if desk.passages is None else {"passages": desk.passages}
    return {"models": models, "default": desk.names[0], "index": index}


# --- all of them ---


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint."""

    method: str
    path: str
    work: Callable[[Desk, Any, Job], Any]
    takes: type[BaseModel] | None
    gives: Any  # a type
    summary: str
    style: Style = "tei"
    tag: str = "Bertie"

    @property
    def task(self) -> str:
        """What metrics call it."""
        return self.path.strip("/").replace("/", "_")


TEI, OPENAI, RANK, OURS = "text-embeddings-inference", "OpenAI", "Cohere and Jina", "Bertie"
_s = schemas
ROUTES = (
    Route("POST", "/v1/embeddings", v1_embeddings, _s.EmbeddingsRequest, _s.Embeddings, "Vectors", "openai", OPENAI),
    Route("GET", "/v1/models", v1_models, None, _s.Models, "The served models", "openai", OPENAI),
    Route("POST", "/embed", embed, _s.EmbedRequest, list[list[float]], "Vectors", tag=TEI),
    Route("POST", "/embed_all", embed_all, _s.EmbedAllRequest, list[list[list[float]]], "A vector a token", tag=TEI),
    Route(
        "POST",
        "/embed_sparse",
        embed_sparse,
        _s.EmbedAllRequest,
        list[list[_s.SparseValue]],
        "Sparse vectors, of a SPLADE model",
        tag=TEI,
    ),
    Route(
        "POST",
        "/predict",
        predict,
        _s.PredictRequest,
        list[_s.Prediction] | list[list[_s.Prediction]],
        "Labels of a text, or of a batch of texts",
        tag=TEI,
    ),
    Route("POST", "/rerank", rerank, _s.RerankRequest, list[_s.Rank], "Texts by relevance to a query", tag=TEI),
    Route("POST", "/similarity", similarity, _s.SimilarityRequest, list[float], "Sentences by likeness", tag=TEI),
    Route("POST", "/tokenize", tokenize, _s.TokenizeRequest, list[list[_s.Token]], "Tokens of texts", tag=TEI),
    Route("POST", "/decode", decode, _s.DecodeRequest, list[str], "Texts of tokens", tag=TEI),
    Route("GET", "/info", info, None, dict[str, Any], "The served models and the limits", tag=TEI),
    Route("POST", "/v1/rerank", v1_rerank, _s.RankRequest, _s.RankReply, "Documents by relevance", "rank", RANK),
    Route("POST", "/v2/rerank", v1_rerank, _s.RankRequest, _s.RankReply, "Documents by relevance", "rank", RANK),
    Route("POST", "/fill", fill, _s.FillRequest, _s.FillReply, "Words for masks"),
    Route("POST", "/classify", classify, _s.ClassifyRequest, _s.ClassifyReply, "Labels of texts"),
    Route("POST", "/tag", tag, _s.TagRequest, _s.TagReply, "Labelled spans of texts"),
    Route("POST", "/answer", answer, _s.AnswerRequest, _s.AnswerReply, "Answers to questions"),
    Route("POST", "/search", search, _s.SearchRequest, _s.SearchReply, "Passages of the index"),
    Route("POST", "/compare", compare, _s.CompareRequest, _s.CompareReply, "How alike texts are"),
    Route("POST", "/attention", attention, _s.AttentionRequest, dict[str, Any], "Attention of a short text"),
    Route("POST", "/windows", windows, _s.WindowsRequest, _s.WindowsReply, "Where the windows of a text lie"),
    Route("GET", "/about", about, None, dict[str, Any], "What the models are and can do"),
)
