"""spaCy's own pipelines with Bertie's components."""

from __future__ import annotations

import numpy as np
import pytest

from bertie import Classifier, Embedder, Tagger

spacy = pytest.importorskip("spacy")
from bertie.integrations import spacy as adapters  # noqa: E402,F401  # registers the factories

TEXTS = ["Ada Lovelace was born in London.", "Nothing is named here.", ""]


def test_entities() -> None:
    nlp = spacy.blank("en")
    nlp.add_pipe("bertie_ner")
    expected = [[(span.text, span.label) for span in result.spans] for result in Tagger.load().tag(TEXTS)]
    docs = list(nlp.pipe(TEXTS, batch_size=2))
    assert [[(entity.text, entity.label_) for entity in doc.ents] for doc in docs] == expected
    assert expected[0] == [("Ada Lovelace", "PER"), ("London", "LOC")]
    assert nlp(TEXTS[0]).ents[1].start_char == 25


def test_entities_that_were_there_before_are_kept() -> None:
    nlp = spacy.blank("en")
    nlp.add_pipe("entity_ruler").add_patterns([{"label": "VERB", "pattern": "born"}])
    nlp.add_pipe("bertie_ner")
    assert [entity.label_ for entity in nlp(TEXTS[0]).ents] == ["PER", "VERB", "LOC"]
    nlp.replace_pipe("bertie_ner", "bertie_ner", config={"overwrite": True})
    assert [entity.label_ for entity in nlp(TEXTS[0]).ents] == ["PER", "LOC"]


def test_categories_and_vectors() -> None:
    nlp = spacy.blank("en")
    nlp.add_pipe("bertie_classify", config={"head": "sentiment"})
    nlp.add_pipe("bertie_embed")
    first, second = nlp.pipe(["A delight from start to finish.", "A joy to watch."])
    assert first.cats == dict(Classifier.load(head="sentiment").classify(first.text).scores)
    vectors = Embedder.load().embed([first.text, second.text])
    np.testing.assert_array_equal(first.vector, vectors[0])
    assert first.similarity(second) == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-5)
