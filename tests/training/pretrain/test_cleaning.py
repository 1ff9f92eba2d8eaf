"""Cleaners of raw text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertie.errors import InputError
from bertie.training.pretrain import cleaning
from bertie.training.pretrain.cleaning import clean_text


def test_cleaning() -> None:
    raw = "  Cafe\u0301\u00a0 is \x00open \r\n\n * * * \nLine\x0btwo\ufeff"
    assert clean_text(raw, ()) == "  Cafe\u0301\u00a0 is \x00open \r\n * * * \nLine\x0btwo\ufeff"
    assert clean_text(raw, ("spaces", "controls", "nfc")) == "Café is open\n* * *\nLine two"
    assert clean_text(raw, cleaning.CLEANERS) == "Café is open\nLine two"
    with pytest.raises(InputError, match=r"clean=.'html'."):
        clean_text("", ["html"])


@given(st.text())
def test_cleaning_twice_is_cleaning_once(text: str) -> None:
    once = clean_text(text, cleaning.CLEANERS)
    assert clean_text(once, cleaning.CLEANERS) == once
