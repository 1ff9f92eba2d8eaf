"""Text in other languages in Latin script is told from English by the tokens of common English vocabularies."""

from __future__ import annotations

import numpy as np
import pytest

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.text import english
from bertie.text.tokenizer import Tokenizer

OTHER = {
    "German": "Der Zug nach München fährt heute eine Stunde später ab, weil es auf der Strecke geschneit hat.",
    "French": "Je ne sais pas pourquoi il est parti sans dire au revoir, mais nous allons le revoir demain.",
    "Spanish": "No sé por qué se fue sin despedirse, pero mañana lo veremos otra vez en la casa de mi hermana.",
    "Italian": "Non so perché sia andato via senza salutare, ma domani lo vedremo di nuovo nella casa di mia sorella.",
    "Portuguese": "Não sei por que ele foi embora sem se despedir, mas amanhã vamos vê-lo de novo na nossa casa.",
    "Dutch": "Ik weet niet waarom hij zonder afscheid is vertrokken, maar morgen zien we hem weer bij ons thuis.",
    "Swedish": "Jag vet inte varför han gick utan att säga adjö, men i morgon ska vi träffa honom igen hos min syster.",
    "Polish": "Nie wiem, dlaczego wyszedł bez pożegnania, ale jutro znowu się z nim zobaczymy w domu mojej siostry.",
    "Turkish": "Neden vedalaşmadan gittiğini bilmiyorum ama yarın onu kız kardeşimin evinde tekrar göreceğiz.",
}
ENGLISH = (
    "The train to Munich leaves an hour late today, because there was snow on the line.",
    "Angela Merkel met Emmanuel Macron in Rio de Janeiro before the Tour de France.",
    "def tokenize(text: str) -> list[str]:\n    return re.findall(r'\\w+', text.lower())",
    "Phosphorylation of the p53 protein was observed in vitro (Smith et al., 2004).",
    "Los Angeles",
    "Elon Musk",
    "hotels in Buenos Aires",
    "hi",
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Checkpoint.inspect("bertie-small").tokenizer
    assert tokenizer is not None
    return tokenizer


def share(tokenizer: Tokenizer, text: str) -> float:
    encodings = tokenizer.encode_flat([text])
    counts = tokenizer.coverage.count_non_english(encodings)
    return 0.0 if counts is None else counts[0] / (encodings.lengths[0] - tokenizer.special_count)


@pytest.mark.parametrize("language", OTHER)
def test_other_languages_are_detected(tokenizer: Tokenizer, language: str) -> None:
    assert share(tokenizer, OTHER[language]) == 1


@pytest.mark.parametrize("text", ENGLISH)
def test_english_is_not_reported(tokenizer: Tokenizer, text: str) -> None:
    assert share(tokenizer, text) == 0


def test_part_of_a_text(tokenizer: Tokenizer) -> None:
    german, english_text = OTHER["German"], ENGLISH[0]
    assert 0.4 < share(tokenizer, f"{german} {german} {english_text} {english_text} {english_text}") < 0.8


def test_texts_are_counted_separately_and_alike(tokenizer: Tokenizer) -> None:
    texts = [ENGLISH[0], OTHER["French"], ENGLISH[4], " ".join(OTHER.values()), ENGLISH[8]]
    together = tokenizer.encode_flat(texts)
    counts = tokenizer.coverage.count_non_english(together)
    assert counts is not None
    totals = together.lengths - tokenizer.special_count
    assert counts.tolist() == [0, totals[1], 0, totals[3], 0]
    for text, count in zip(texts, counts, strict=True):
        alone = tokenizer.coverage.count_non_english(tokenizer.encode_flat([text]))
        assert (0 if alone is None else alone[0]) == count


def test_other_vocabularies_have_no_detector(tokenizer: Tokenizer) -> None:
    vocabulary = {token: id for id, token in tokenizer.vocabulary.items()}
    detector = english.EnglishDetector.for_vocabulary
    assert detector(vocabulary) is not None
    assert detector(vocabulary | {"<s>": len(vocabulary), "[NEW]": len(vocabulary) + 1}) is not None  # special tokens
    assert detector(vocabulary | {"katze": len(vocabulary)}) is None
    assert detector({}) is None


def test_a_word_that_is_split_is_no_evidence(tokenizer: Tokenizer) -> None:
    detector = tokenizer.coverage._english
    assert detector is not None
    el, on, the = (tokenizer.id(token) for token in ("el", "##on", "the"))
    assert el is not None
    assert on is not None
    assert the is not None
    whole, split = (int(detector.score(np.array(ids))[0]) for ids in ([el, the], [el, on]))
    assert whole == 3 * english.SCALE
    assert split == int(english.SPLIT * english.SCALE)
