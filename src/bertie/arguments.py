"""Error messages that translate arguments and names of other libraries into Bertie's. A leaf module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PROGRESS = "progress=True or False shows or hides the progress bar"
_LENGTH = "texts are never padded, and long ones are read in windows: see overflow= of load()"
_TEXTS = "the texts are the first argument"
_ACTIVATION = "the checkpoint determines the activation function; leave it out"
_BACKEND = "on a CPU the compiled encoder is the default; `bertie export` writes ONNX and OpenVINO files"
_CACHE = "set the environment variable HF_HOME; leave it out"
_DEVICE = "pass device= to load(), or call .to(device)"
_EPOCHS, _SEED, _PRECISION = "use epochs=", "use seed=", "pass precision= to load(): fp32, bf16, fp16, int8 or fp8"

# Arguments of other libraries without a similarly named equivalent here.
HINTS = {
    "activation_fct": _ACTIVATION,
    "activation_fn": _ACTIVATION,
    "backend": _BACKEND,
    "batch_size": "batches are sized by a token budget; leave it out",
    "cache_dir": _CACHE,
    "cache_folder": _CACHE,
    "candidate_labels": "pass labels=",
    "chunk_size": "batches are sized by a token budget; leave it out",
    "context": 'pass pairs: answer([("question", "document")]), or answer("question", "document")',
    "convert_to_numpy": "all arrays are numpy arrays; leave it out",
    "convert_to_tensor": "all arrays are numpy arrays: torch.from_numpy(embedder.embed(texts))",
    "device": _DEVICE,
    "device_map": _DEVICE,
    "dtype": _PRECISION,
    "function_to_apply": _ACTIVATION,
    "grouped_entities": "use aggregation_strategy=; spans are grouped by default",
    "inputs": _TEXTS,
    "is_split_into_words": "predict() takes lists of words",
    "hypothesis_template": "use template=",
    "labels": "for labels chosen at inference, use zero-shot: bertie.ZeroShot().classify(texts, labels)",
    "learning_rate": "use lr=",
    "max_epochs": _EPOCHS,
    "max_length": _LENGTH,
    "max_seq_length": _LENGTH,
    "max_steps": _EPOCHS,
    "model_kwargs": _PRECISION,
    "model_name": "the model is the first argument",
    "model_name_or_path": "the model is the first argument",
    "n_jobs": "set it with torch.set_num_threads(); leave it out",
    "normalize": "pass normalize=True to Embedder() or Embedder.load()",
    "normalize_embeddings": "pass normalize=True to Embedder() or Embedder.load()",
    "num_epochs": _EPOCHS,
    "num_labels": "fit() takes the labels from the data",
    "num_train_epochs": _EPOCHS,
    "num_workers": "tokenization is multi-threaded already; leave it out",
    "output_value": "embed() returns sentence embeddings, token_embeddings() token embeddings",
    "padding": _LENGTH,
    "per_device_train_batch_size": "use batch_size=",
    "pooling_mode": "use pooling=",
    "precision": f"{_PRECISION}; for int8 or binary embeddings, see Index.create(embedding_precision=)",
    "question": 'pass pairs: answer([("question", "document")]), or answer("question", "document")',
    "random_state": _SEED,
    "return_tensors": "all arrays are numpy arrays; leave it out",
    "return_all_scores": "result.scores has the scores of all labels",
    "return_documents": "RankedDocument.text is the document",
    "sentences": _TEXTS,
    "show_progress": _PROGRESS,
    "show_progress_bar": _PROGRESS,
    "targets": "use candidates=",
    "threads": "set it with torch.set_num_threads(); leave it out",
    "token": "run `hf auth login`, or set the environment variable HF_TOKEN",
    "tokenizer": "the checkpoint's tokenizer is used; leave it out",
    "top_k": "result.scores has the scores of all labels",
    "torch_dtype": _PRECISION,
    "truncate_dim": "use dimension=",
    "truncation": _LENGTH,
    "trust_remote_code": "code in checkpoints is never run; leave it out",
    "verbose": _PROGRESS,
    "warmup_ratio": "use warmup=, a fraction of the steps",
    "warmup_steps": "use warmup=, a fraction of the steps",
}


# For `fit`, whose hyperparameters are arguments of the constructor.
FIT_HINTS = (
    dict.fromkeys(("eval_dataset", "eval_set", "validation_data", "X_val", "val"), "use dev=")
    | dict.fromkeys(("labels", "label", "targets"), "they are the second argument: fit(texts, labels)")
    | dict.fromkeys(
        ("epochs", "lr", "batch_size", "learning_rate", "num_train_epochs", "seed"),
        "hyperparameters are arguments of the constructor, as in Classifier(epochs=3, lr=1e-4, batch_size=32)",
    )
)

# Attributes and methods of other libraries.
_MAX_LENGTH = 'use .checkpoint.max_length; longer texts are read in windows, or cut by load(name, overflow="truncate")'
ATTRIBUTE_HINTS = {
    "cpu": 'use .to("cpu")',
    "cuda": 'use .to("cuda")',
    "config": "use .checkpoint.config",
    "encode_document": 'use embed(texts, prompt_name="document"), or embed(texts) if the checkpoint has no prompts',
    "encode_multi_process": "use `bertie embed FILE -o OUTPUT --ray local`",
    "encode_query": 'use embed(texts, prompt_name="query"), or embed(texts) if the checkpoint has no prompts',
    "eval": "models are in evaluation mode unless fit() trains them",
    "evaluate": "use score(texts, labels), or `bertie eval` for all metrics with confidence intervals",
    "from_pretrained": "use load()",
    "generate": "Bertie runs encoders, and decoders for embeddings only; it does not generate text",
    "get_embedding_dimension": "use .dimension",
    "get_sentence_embedding_dimension": "use .dimension",
    "half": 'use load(name, precision="fp16")',
    "id2label": "use .info.labels",
    "labels": "use .info.labels",
    "max_length": _MAX_LENGTH,
    "max_seq_length": _MAX_LENGTH,
    "precision": "use .checkpoint.precision",
    "rank": "use rerank(query, documents)",
    "save_pretrained": "use save(folder)",
    "semantic_search": "use bertie.Index, or similarity(query, corpus).argsort()",
    "similarity_pairwise": "use similarity(a, b).diagonal(), or compare(a, b).diagonal() for embeddings",
    "start_multi_process_pool": "use `bertie embed FILE -o OUTPUT --ray local`",
    "state_dict": "use .model.state_dict()",
    "tokenize": "use .tokenizer.encode(text)",
    "train": "use fit(texts, labels)",
}
# Names of other libraries that are looked up in `bertie`.
NAME_HINTS = {
    "AutoModel": "use bertie.Checkpoint.load(name), or bertie.load(name) for the task of a model",
    "AutoModelForMaskedLM": "use bertie.MaskedLM",
    "AutoModelForQuestionAnswering": "use bertie.Reader",
    "AutoModelForSequenceClassification": "use bertie.Classifier",
    "AutoModelForTokenClassification": "use bertie.Tagger",
    "AutoTokenizer": "use bertie.Checkpoint.load(name).tokenizer",
    "CrossEncoder": "use bertie.Reranker",
    "ColBERT": "use bertie.LateInteraction",
    "EmbeddingTransformer": "use bertie.integrations.sklearn.EmbeddingTransformer",
    "MultiVectorEncoder": "use bertie.LateInteraction",
    "SentenceTransformer": "use bertie.Embedder",
    "SentenceTransformerTrainer": "use bertie.Embedder(...).fit(pairs)",
    "SetFitModel": 'use bertie.Classifier(method="few-shot")',
    "SparseEncoder": "use bertie.SparseEmbedder",
    "Trainer": "use fit() of a task, such as bertie.Classifier(...).fit(texts, labels)",
    "community_detection": "use bertie.cluster_texts",
    "cos_sim": "use Embedder.similarity(texts, texts), or Embedder.compare(a, b) for embeddings",
    "embed": "use bertie.Embedder().embed(texts)",
    "from_pretrained": "use bertie.load(name)",
    "paraphrase_mining": "use bertie.paraphrase_pairs",
    "pipeline": "use bertie.load(name), or the class of the task, such as bertie.Classifier",
    "semantic_search": "use bertie.Index, or Embedder.similarity(query, corpus).argsort()",
    "util": "use Embedder.similarity, bertie.Index, bertie.paraphrase_pairs or bertie.cluster_texts",
    "version": "use bertie.__version__",
}


def missing_attribute(owner: str, name: str, known: Iterable[str] = ()) -> AttributeError:
    """An AttributeError that suggests what to use instead, if that is known.

    >>> print(missing_attribute("'Embedder' object", "half"))
    'Embedder' object has no attribute 'half'; use load(name, precision="fp16")
    """
    hints = NAME_HINTS if owner == "module 'bertie'" else ATTRIBUTE_HINTS
    close = get_close_matches(name, list(known), 1, cutoff=0.75)
    advice = hints.get(name) or (f"did you mean {close[0]}?" if close else "")
    return AttributeError(f"{owner} has no attribute {name!r}" + (f"; {advice}" if advice else ""))


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function: an unknown keyword argument raises a `TypeError` that suggests the right one.

    >>> @explain_arguments
    ... def embed(texts, *, prompt=None, progress=None): ...
    >>> embed(["a text"], promt="query: ")
    Traceback (most recent call last):
    TypeError: embed() has no argument 'promt': did you mean prompt=?
    >>> embed(["a text"], batch_size=32)
    Traceback (most recent call last):
    TypeError: embed() has no argument 'batch_size': batches are sized by a token budget; leave it out
    """
    return _explain(function, _names(function))


def explain_options(target: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Like `explain_arguments`, for a function that passes its other keyword arguments to `target`.

    >>> def read(name, *, revision=None): ...
    >>> @explain_options(read)
    ... def load(name, *, normalize=None, **options): ...
    >>> load("a", normalise=True)
    Traceback (most recent call last):
    TypeError: load() has no argument 'normalise': did you mean normalize=?
    """
    return lambda function: _explain(function, list(dict.fromkeys([*_names(function), *_names(target)])))


def _names(function: Callable[..., Any]) -> list[str]:
    parameters = signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]


def _explain(function: Callable[P, R], allowed: list[str]) -> Callable[P, R]:
    known = frozenset(allowed)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                own = FIT_HINTS.get(name) if function.__name__ == "fit" else None
                raise TypeError(f"{owner}() has no argument {name!r}: {own or hint(name, allowed)}")
        return function(*args, **kwargs)

    return call


def hint(name: str, allowed: Iterable[Any]) -> str:
    """What to use instead of an unknown argument."""
    names = [other for other in allowed if other not in ("self", "cls")]
    count = next((other for other in ("top_k", "k") if other in names), None)
    if count and name in ("k", "limit", "top_k", "top_n"):
        return f"use {count}="
    if name in HINTS:
        return HINTS[name]
    close = get_close_matches(name, names, 1, cutoff=0.75)
    if close:
        return f"did you mean {close[0]}=?"
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return f"it takes {listed}"
