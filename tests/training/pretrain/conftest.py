"""Fixtures of tests of corpora and packing."""

from __future__ import annotations

import pytest

from bertie.text.tokenizer import Tokenizer
from tests.training.pretrain.corpus_texts import PIECES, SPECIALS, tokenizer_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([*SPECIALS, ".", ",", *PIECES, *(f"##{piece}" for piece in PIECES)])
