"""spaCy: components for named-entity recognition, text classification and embeddings.

The factories are registered as entry points, so no import is needed:

>>> import spacy
>>> nlp = spacy.blank("en")
>>> component = nlp.add_pipe("bertie_ner")
>>> [(entity.text, entity.label_) for entity in nlp("Ada Lovelace was born in London.").ents]
[('Ada Lovelace', 'PER'), ('London', 'LOC')]
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from bertie.errors import BertieWarning, MissingPackageError
from bertie.integrations.models import load_task
from bertie.tasks.classify import Classifier
from bertie.tasks.embed import Embedder
from bertie.tasks.tag import Tagger

try:
    from spacy.language import Language
    from spacy.tokens import Doc
    from spacy.util import filter_spans
except ModuleNotFoundError as error:
    raise MissingPackageError("bertie.integrations.spacy needs spaCy: pip install 'bertie[spacy]'") from error


class _Component(ABC):
    """A component that processes documents in batches."""

    @abstractmethod
    def annotate(self, docs: list[Doc]) -> None:
        """Annotate documents in place."""

    def __call__(self, doc: Doc) -> Doc:
        self.annotate([doc])
        return doc

    def pipe(self, stream: Iterable[Doc], batch_size: int = 128) -> Iterator[Doc]:
        """Annotate a stream of documents."""
        docs = iter(stream)
        while batch := list(islice(docs, batch_size)):
            self.annotate(batch)
            yield from batch


class NamedEntities(_Component):
    """Sets `doc.ents`. Spans that begin or end inside one of spaCy's tokens are extended to whole tokens."""

    def __init__(self, tagger: Tagger, overwrite: bool) -> None:
        self.tagger, self.overwrite = tagger, overwrite

    def annotate(self, docs: list[Doc]) -> None:
        """Tag documents."""
        for doc, result in zip(docs, self.tagger.tag([doc.text for doc in docs], progress=False), strict=True):
            spans = [doc.char_span(span.start, span.end, span.label, alignment_mode="expand") for span in result.spans]
            found = [span for span in spans if span is not None]
            if len(found) < len(spans):
                warnings.warn(f"{len(spans) - len(found)} spans have no tokens in spaCy", BertieWarning, stacklevel=2)
            doc.ents = filter_spans(found if self.overwrite else [*doc.ents, *found])


class Categories(_Component):
    """Sets `doc.cats`: the probability of each label."""

    def __init__(self, classifier: Classifier) -> None:
        self.classifier = classifier

    def annotate(self, docs: list[Doc]) -> None:
        """Classify documents."""
        for doc, result in zip(docs, self.classifier.classify([doc.text for doc in docs], progress=False), strict=True):
            doc.cats.update(result.scores)


class Vectors(_Component):
    """Sets `doc.vector`, and with it `doc.similarity`, to the embedding of the whole document."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def annotate(self, docs: list[Doc]) -> None:
        """Embed documents."""
        for doc, vector in zip(docs, self.embedder.embed([doc.text for doc in docs], progress=False), strict=True):
            doc.user_hooks["vector"] = lambda _, vector=vector: vector
            doc.user_hooks["has_vector"] = lambda _: True
            doc.user_hooks["similarity"] = cosine


def cosine(doc: Doc, other: Any) -> float:
    """Cosine similarity of a document's vector with that of another document, span or token."""
    a, b = np.asarray(doc.vector), np.asarray(other.vector)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


@Language.factory("bertie_ner", assigns=["doc.ents"], default_config={"model": None, "overwrite": False})
def make_ner(nlp: Language, name: str, model: str | None, overwrite: bool) -> NamedEntities:
    """Named-entity recognition with a token classifier. `overwrite`: replace existing entities."""
    return NamedEntities(load_task(Tagger, model), overwrite)


@Language.factory("bertie_classify", assigns=["doc.cats"], default_config={"model": None, "head": None})
def make_classify(nlp: Language, name: str, model: str | None, head: str | None) -> Categories:
    """Text classification. `head` selects one of several heads of a model."""
    options: dict[str, Any] = {} if head is None else {"head": head}
    return Categories(load_task(Classifier, model, **options))


@Language.factory("bertie_embed", default_config={"model": None})
def make_embed(nlp: Language, name: str, model: str | None) -> Vectors:
    """Embeddings as document vectors."""
    return Vectors(load_task(Embedder, model))
