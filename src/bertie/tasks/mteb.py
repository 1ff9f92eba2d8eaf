"""Bertie's embedders and rerankers as `mteb` takes models.

    import mteb
    from bertie.tasks.mteb import Encoder

    mteb.evaluate(Encoder("path/to/a/model"), mteb.get_tasks(["STSBenchmark"]))

Texts beyond the model's max_length are read in windows, as everywhere in Bertie. sentence-transformers cuts them: for its
scores to the last digit, pass `overflow="truncate"`.
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

Batches = Iterable[Mapping[str, Any]]  # mteb's, of which `text` holds the texts


class _Adapter:
    """What mteb asks of every model."""

    kind: ClassVar[str]  # as mteb calls it
    model: Embedder | Reranker

    @cached_property
    def mteb_model_meta(self) -> Any:
        """What mteb writes down of the model: its name, and how large it is."""
        checkpoint = self.model.checkpoint
        facts: dict[str, Any] = {
            "name": f"bertie/{Path(checkpoint.source).name}",
            "model_type": [self.kind],
            "n_parameters": sum(one.numel() for one in checkpoint.model.parameters()),
            "max_tokens": float(checkpoint.max_length),
            "framework": ["PyTorch"],
            "loader": type(self),
        }
        return _package("mteb.models.model_meta").ModelMeta.create_empty(overwrites=facts | self._facts())

    def _facts(self) -> dict[str, Any]:
        return {}


class Encoder(_Adapter):
    """An embedder for mteb: for retrieval, similarity, classification, clustering and what else it measures.

    `model` is an `Embedder`, or the name of one with the options of `Embedder.load`. Prompts are chosen by mteb's rule
    among those of the checkpoint: by the task's name, its type, or as query and document.

    >>> mteb.evaluate(Encoder("sentence-transformers/all-MiniLM-L6-v2", overflow="truncate"), tasks)  # doctest: +SKIP
    """

    kind = "dense"

    def __init__(
        self, model: Embedder | str, revision: str | None = None, *, device: str | None = None, **options: Any
    ) -> None:
        from bertie.tasks import Embedder

        self.model: Embedder = _loaded(Embedder, model, revision, device, options)

    def _facts(self) -> dict[str, Any]:
        return {"embed_dim": self.model.dimension}

    def encode(
        self, inputs: Batches, *, task_metadata: Any, prompt_type: Any = None, **options: Any
    ) -> NDArray[np.float32]:
        """(n, D) the vectors of the texts."""
        if options.get("precision") not in (None, "float32"):
            raise InputError(f"precision={options['precision']!r} must be 'float32': Bertie's vectors are no other")
        choose = _package("mteb.models.abs_encoder").get_prompt_name
        prompt = choose(self.model.modules.prompts, task_metadata, prompt_type)
        return self.model.embed(_texts(inputs), prompt=prompt)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> NDArray[np.float32]:
        """(n, D), (m, D) -> (n, m) by cosine, or as the checkpoint says."""
        return self.model.compare(_rows(embeddings1), _rows(embeddings2))

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> NDArray[np.float32]:
        """(n, D), (n, D) -> (n,) as `similarity`, of each row and its partner."""
        return compare_pairwise(self.model, _rows(embeddings1), _rows(embeddings2))


class CrossEncoder(_Adapter):
    """A reranker for mteb. `model` is a `Reranker`, or the name of one with the options of `Reranker.load`.

    >>> mteb.evaluate(CrossEncoder("cross-encoder/ms-marco-MiniLM-L6-v2"), reranking_tasks)  # doctest: +SKIP
    """

    kind = "cross-encoder"

    def __init__(
        self, model: Reranker | str, revision: str | None = None, device: str | None = None, **options: Any
    ) -> None:
        from bertie.tasks import Reranker

        self.model: Reranker = _loaded(Reranker, model, revision, device, options)

    def predict(self, inputs1: Batches, inputs2: Batches, **options: Any) -> NDArray[np.float32]:
        """(n,) how well each text of `inputs2` answers its query in `inputs1`."""
        return self.model.predict(list(zip(_texts(inputs1), _texts(inputs2), strict=True)))


def _loaded(task: Any, model: Any, revision: str | None, device: str | None, options: Mapping[str, Any]) -> Any:
    if isinstance(model, task):
        if revision is not None or device is not None or options:
            raise InputError("revision, device and options are for a model that is named; this one is loaded already")
        return model
    return task.load(model, revision=revision, device=device or "cpu", **options)


def _texts(inputs: Batches) -> list[str]:
    return [text for batch in inputs for text in batch["text"]]


def _rows(vectors: Any) -> NDArray[np.float32]:
    """(n, D), or (D,) for one vector, of numpy or torch."""
    return np.atleast_2d(np.asarray(vectors, dtype=np.float32))


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingPackageError("mteb's adapter needs the package mteb: pip install mteb") from None
