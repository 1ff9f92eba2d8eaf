"""What an index derives from its passages besides dense embeddings: BM25, sparse and token embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bertie.errors import InputError, NotFoundError
from bertie.search.analyzer import Analyzer
from bertie.search.bm25 import BM25Index, refresh_bm25, verify_bm25
from bertie.search.model_identity import task_fingerprint
from bertie.search.records import Keys
from bertie.search.vector_store import VectorStore

if TYPE_CHECKING:
    from bertie.search.passage_embeddings import PassageEmbeddings, SparseSegment, TokenSegment
    from bertie.tasks.late_interaction import LateInteraction
    from bertie.tasks.results import SparseEmbeddingResult
    from bertie.tasks.sparse import SparseEmbedder

T = TypeVar("T", bound="SparseEmbedder | LateInteraction")


class PassageIndexes:
    """BM25, sparse and token embeddings of the passages of a store, each brought up to date when it is used."""

    store: VectorStore
    progress: bool | None = None

    def __init__(self) -> None:
        self._bm25: tuple[int, BM25Index] | None = None
        self._analyzer: Analyzer | None = None
        self._sparse: SparseEmbedder | None = None
        self._late: LateInteraction | None = None
        self._sparse_embeddings: PassageEmbeddings[SparseSegment] | None = None
        self._token_embeddings: PassageEmbeddings[TokenSegment] | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """How the index was built: models, precisions, chunk size, language, prompts."""
        return self.store.config

    @property
    def analyzer(self) -> Analyzer:
        """The text analyzer of lexical search."""
        if self._analyzer is None:
            self._analyzer = Analyzer(self.config["language"])
        return self._analyzer

    def _folder(self, name: str) -> Path | None:
        folder = getattr(self.store, "folder", None)  # for a database, the BM25 index is kept in memory
        return None if folder is None else folder / name

    def load_lexical(self, *, save: bool = True) -> BM25Index:
        """Return the BM25 index, updated after changes: the first step of a lexical search. `save`: also on disk."""
        folder, progress = self._folder("lexical"), bool(self.progress)
        self._bm25 = refresh_bm25(self.store, self.analyzer, folder, self._bm25, progress=progress, save=save)
        return self._bm25[1]

    # --- sparse embeddings ---

    @property
    def has_sparse(self) -> bool:
        """Whether the index has a model for sparse embeddings."""
        return self.config.get("sparse") is not None

    @property
    def sparse_embedder(self) -> SparseEmbedder:
        """The model of the sparse embeddings, loaded when first used."""
        if self._sparse is None:
            from bertie.tasks.sparse import SparseEmbedder

            self._sparse = self._load_model("sparse", SparseEmbedder)
        return self._sparse

    def load_sparse(self) -> PassageEmbeddings[SparseSegment]:
        """Return the sparse embeddings of all passages, updated after changes: the first step of a sparse search."""
        from bertie.search.passage_embeddings import PassageEmbeddings, SparseSegment

        embedder = self.sparse_embedder
        if self._sparse_embeddings is None:

            def build(keys: Keys, texts: Sequence[str]) -> SparseSegment:
                results = list(embedder.embed_each(texts, prompt=self.config["sparse"]["passage_prompt"]))
                return SparseSegment.build(keys, results, embedder.vocabulary_size)

            folder, owner = self._derived("sparse")
            self._sparse_embeddings = PassageEmbeddings(folder, owner, SparseSegment, build, "sparse index")
        self._sparse_embeddings.refresh(self.store, progress=bool(self.progress))
        return self._sparse_embeddings

    def embed_sparse(self, queries: Sequence[str]) -> list[SparseEmbeddingResult]:
        """The sparse embeddings of queries."""
        return list(self.sparse_embedder.embed_each(queries, prompt=self.config["sparse"]["query_prompt"]))

    # --- token embeddings ---

    @property
    def has_token_embeddings(self) -> bool:
        """Whether the index stores token embeddings of a late-interaction model."""
        return self.config.get("late_interaction") is not None

    @property
    def late_interaction(self) -> LateInteraction:
        """The model of the token embeddings, loaded when first used."""
        if self._late is None:
            from bertie.tasks.late_interaction import LateInteraction

            self._late = self._load_model("late_interaction", LateInteraction)
        return self._late

    def load_token_embeddings(self) -> PassageEmbeddings[TokenSegment]:
        """Return the token embeddings of all passages, updated after changes."""
        from bertie.search.passage_embeddings import PassageEmbeddings, TokenSegment

        model = self.late_interaction
        if self._token_embeddings is None:

            def build(keys: Keys, texts: Sequence[str]) -> TokenSegment:
                return TokenSegment.build(keys, [result.vectors for result in model.embed_documents_each(texts)])

            folder, owner = self._derived("late_interaction")
            self._token_embeddings = PassageEmbeddings(folder, owner, TokenSegment, build, "token embeddings")
        self._token_embeddings.refresh(self.store, progress=bool(self.progress))
        return self._token_embeddings

    def stores_tokens_of(self, model: LateInteraction) -> bool:
        """Whether the index stores the token embeddings of this model."""
        stored = self.config.get("late_interaction")
        return stored is not None and (model is self._late or stored["fingerprint"] == task_fingerprint(model))

    # --- what they share ---

    def refresh_derived(self) -> None:
        """Bring BM25, sparse and token embeddings up to date now, rather than at the first search that uses them."""
        if self._folder("") is not None:
            self.load_lexical()
        if self.has_sparse:
            self.load_sparse()
        if self.has_token_embeddings:
            self.load_token_embeddings()

    def _verify_derived(self) -> None:
        from bertie.search.passage_embeddings import verify_embeddings

        if (folder := self._folder("lexical")) is not None:
            verify_bm25(folder, self.store.id)
        for name in ("sparse", "late_interaction"):
            if self.config.get(name) is not None:
                verify_embeddings(*self._derived(name))

    def _derived(self, name: str) -> tuple[Path, str]:
        """The folder of derived embeddings, and whose they are."""
        folder = self._folder({"sparse": "sparse", "late_interaction": "tokens"}[name])
        assert folder is not None  # `Index.create` refuses other stores
        return folder, f"{self.store.id} {self.config[name]['fingerprint']}"

    def _load_model(self, name: str, kind: type[T]) -> T:
        settings = self.config.get(name)
        if settings is None:
            raise InputError(f"the index has no {name} model; pass {name}= to Index.create")
        try:
            model: T = kind.load(settings["model"])  # type: ignore[assignment]
        except NotFoundError as error:
            raise NotFoundError(
                f"the {name} model of the index, {settings['model']}, was not found ({error})"
            ) from None
        if task_fingerprint(model) != settings["fingerprint"]:
            raise InputError(
                f"{settings['model']} is another model than the {name} model that the index was built with, or was "
                "trained further since; build another index"
            )
        return model


def derived_config(
    location: str | Path, sparse: SparseEmbedder | str | Path | None, late: LateInteraction | str | Path | None
) -> tuple[dict[str, Any], SparseEmbedder | None, LateInteraction | None]:
    """The configuration of sparse and token embeddings, and the models."""
    from bertie.search.locations import parse_location

    config: dict[str, Any] = {}
    if (sparse is not None or late is not None) and parse_location(location)[0] != "folder":
        raise InputError(f"{location}: sparse and token embeddings are stored in the folder of an index only")
    if sparse is not None:
        from bertie.tasks.sparse import SparseEmbedder

        sparse = sparse if isinstance(sparse, SparseEmbedder) else SparseEmbedder.load(sparse)
        config["sparse"] = _model_config(sparse) | {
            "query_prompt": _prompt(sparse, ("query",)),
            "passage_prompt": _prompt(sparse, ("document", "passage")),
        }
    if late is not None:
        from bertie.tasks.late_interaction import LateInteraction

        late = late if isinstance(late, LateInteraction) else LateInteraction.load(late)
        config["late_interaction"] = _model_config(late)
    return config, sparse, late


def _model_config(model: SparseEmbedder | LateInteraction) -> dict[str, Any]:
    from bertie.checkpoints.hub import absolute_name

    return {"model": absolute_name(model.checkpoint.source), "fingerprint": task_fingerprint(model)}


def _prompt(model: SparseEmbedder, names: Sequence[str]) -> str:
    name = next((name for name in names if name in model.settings.prompts), None)
    return model.prompt_text(prompt_name=name)
