"""Checks of texts and pairs before tokenization."""

from __future__ import annotations

from typing import Any

from bertie.errors import InputError

# For values that tables and files contain instead of texts; NaN is a float.
_ADVICE = dict.fromkeys(("NoneType", "NAType", "float"), "; leave out missing texts") | {
    "bytes": "; decode it",
    "list": "; join words with spaces, or pass lists of words to Tagger.predict",
    "ndarray": "; pass one column of a two-dimensional array, as array[:, 0]",
}


def checked_item(item: Any, index: int) -> str | tuple[str, str]:
    """Check that an item is a text or a pair of texts."""
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise InputError(f"item {index} holds {len(item)} texts; a text or a pair of two texts is allowed")
        return checked_text(item[0], f"item {index}, first text"), checked_text(item[1], f"item {index}, second text")
    return checked_text(item, f"item {index}")


def checked_text(text: Any, where: str) -> str:
    """Check that a text is a str that can be encoded in UTF-8; errors refer to it as `where`."""
    if not isinstance(text, str):
        raise InputError(f"{where} must be a str, not {(kind := type(text).__name__)}{_ADVICE.get(kind, '')}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which is not "
            "valid text; read the file with its actual encoding, or replace it: "
            "text.encode('utf-8', 'replace').decode()"
        ) from None
    return text
