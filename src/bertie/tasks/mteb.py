"""Adapters that run embedders and rerankers in the benchmark package `mteb`.

    import mteb
    from bertie.tasks.mteb import MTEBEmbedder

    mteb.evaluate(MTEBEmbedder("path/to/a/model"), mteb.get_tasks(["STSBenchmark"]))

Texts beyond the model's max_length are read in windows, as everywhere in Bertie. sentence-transformers truncates
them: to reproduce its scores exactly, pass `overflow="truncate"`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bertie.errors import InputError, MissingPackageError
from bertie.tasks.pairwise import compare_pairwise

if TYPE_CHECKING:
    from bertie.tasks import Embedder, Reranker

Batches = Iterable[Mapping[str, Any]]  # mteb's batches; `text` holds the texts


class _Adapter:
    """The metadata that mteb requires of every model."""

    kind: ClassVar[str]  # mteb's model_type
    model: Embedder | Reranker

    @cached_property
    def mteb_model_meta(self) -> Any:
        """The model's name, size and maximum length."""
        checkpoint = self.model.checkpoint
        metadata: dict[str, Any] = {
            "name": f"bertie/{Path(checkpoint.source).name}",
            "model_type": [self.kind],
            "n_parameters": sum(parameter.numel() for parameter in checkpoint.model.parameters()),
            "max_tokens": float(checkpoint.max_length),
            "framework": ["PyTorch"],
            "loader": type(self),
        }
        return _import("mteb.models.model_meta").ModelMeta.create_empty(overwrites=metadata | self._metadata())

    def _metadata(self) -> dict[str, Any]:
        return {}


class MTEBEmbedder(_Adapter):
    """An embedder for mteb's retrieval, similarity, classification, clustering and other tasks.

    `model` is an `Embedder`, or a checkpoint name with the options of `Embedder.load`. Prompts of the checkpoint
    are chosen by mteb's rule: by task name, task type, or query and document.

    >>> model = MTEBEmbedder("sentence-transformers/all-MiniLM-L6-v2", overflow="truncate")  # doctest: +SKIP
    >>> mteb.evaluate(model, tasks)  # doctest: +SKIP
    """

    kind = "dense"

    def __init__(
        self, model: Embedder | str, revision: str | None = None, *, device: str | None = None, **options: Any
    ) -> None:
        from bertie.tasks import Embedder

        self.model: Embedder = _load(Embedder, model, revision, device, options)

    def _metadata(self) -> dict[str, Any]:
        return {"embed_dim": self.model.dimension}

    def encode(
        self, inputs: Batches, *, task_metadata: Any, prompt_type: Any = None, **options: Any
    ) -> NDArray[np.float32]:
        """(n, D) embeddings of the texts."""
        if options.get("precision") not in (None, "float32"):
            raise InputError(
                f"precision={options['precision']!r} must be 'float32', the only precision of Bertie's embeddings"
            )
        choose = _import("mteb.models.abs_encoder").get_prompt_name
        prompt = choose(self.model.modules.prompts, task_metadata, prompt_type)
        return self.model.embed(_texts(inputs), prompt_name=prompt)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> NDArray[np.float32]:
        """(n, D), (m, D) -> (n, m) by the checkpoint's similarity function."""
        return self.model.compare(_as_matrix(embeddings1), _as_matrix(embeddings2))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> NDArray[np.float32]:
        """(n, D), (n, D) -> (n,) similarities of rows with the same index."""
        return compare_pairwise(self.model, _as_matrix(embeddings1), _as_matrix(embeddings2))


class MTEBReranker(_Adapter):
    """A reranker for mteb. `model` is a `Reranker`, or a checkpoint name with the options of `Reranker.load`.

    >>> mteb.evaluate(MTEBReranker("cross-encoder/ms-marco-MiniLM-L6-v2"), reranking_tasks)  # doctest: +SKIP
    """

    kind = "cross-encoder"

    def __init__(
        self, model: Reranker | str, revision: str | None = None, device: str | None = None, **options: Any
    ) -> None:
        from bertie.tasks import Reranker

        self.model: Reranker = _load(Reranker, model, revision, device, options)

    def predict(self, inputs1: Batches, inputs2: Batches, **options: Any) -> NDArray[np.float32]:
        """(n,) relevance of each text of `inputs2` to its query in `inputs1`."""
        return self.model.predict(list(zip(_texts(inputs1), _texts(inputs2), strict=True)))


def _load(task: Any, model: Any, revision: str | None, device: str | None, options: Mapping[str, Any]) -> Any:
    if isinstance(model, task):
        if revision is not None or device is not None or options:
            raise InputError("revision, device and options apply to a model given by name; this one is already loaded")
        return model
    return task.load(model, revision=revision, device=device, **options)


def _texts(inputs: Batches) -> list[str]:
    return [text for batch in inputs for text in batch["text"]]


def _as_matrix(vectors: Any) -> NDArray[np.float32]:
    """Convert numpy or torch (n, D) or (D,) to (n, D) float32."""
    return np.atleast_2d(np.asarray(vectors, dtype=np.float32))


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingPackageError("the mteb adapter needs the package mteb: pip install mteb") from None
