"""Rows of multiple choice: a context, its choices, and which of them is right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertie.errors import InputError
from bertie.training.finetune.data.cells import FIX, as_list, as_scalar, describe, from_json, is_missing, parse_text
from bertie.training.finetune.data.tables import RowSource


def parse_choices(source: RowSource, inputs: Any, target: Any, where: str) -> tuple[tuple[str, ...], int]:
    """The context with its choices, and the index of the right one; errors say what is wrong.

    Choices are a list, its JSON, or the {"text": […], "label": […]} of ARC and CommonsenseQA; or the columns of SWAG,
    where each choice continues `sent2`. The right one is an index from 0, a text or a label.
    """
    if source.columns:
        places = [f"column {column!r}" for column in source.columns]
    else:
        inputs = as_list(inputs)
        if inputs is None or len(inputs) != 2:
            raise InputError("X must be pairs of a context and its choices")
        places = ["the context", "the choices"]
    if len(inputs) > 2:  # SWAG
        context, start = (parse_text(text, place) for text, place in zip(inputs[:2], places, strict=False))
        endings = [parse_text(text, place) for text, place in zip(inputs[2:], places[2:], strict=True)]
        texts, names = [f"{start} {ending}" for ending in endings], None
    else:
        context = parse_text(inputs[0], places[0])
        texts, names = _choices(inputs[1], places[1])
    return (context, *texts), _index(target, texts, names, where)


def _choices(value: Any, place: str) -> tuple[list[str], list[str] | None]:
    """The texts, and their labels if they have some."""
    if isinstance(value, str):
        value = from_json(value, (list, dict))
        if value is None:
            raise InputError(f"{place} must hold a list of choices, or its JSON")
    names = None
    if isinstance(value, Mapping):
        names = as_list(value.get("label"))
        value = value.get("text")
    items = as_list(value)
    if items is None:
        raise InputError(f"{'no choices' if is_missing(value) else describe(value)} in {place}; give a list of texts")
    texts = [parse_text(text, f"{place}, choice {i}") for i, text in enumerate(items)]
    if len(texts) < 2:
        raise InputError(f"{len(texts)} choices in {place}; give two or more")
    if names is not None and len(names) != len(texts):
        raise InputError(f"{len(texts)} texts and {len(names)} labels in {place}; give one label for each text")
    return texts, None if names is None else [str(name) for name in names]


def _index(target: Any, texts: list[str], names: list[str] | None, where: str) -> int:
    value = as_scalar(target)
    if is_missing(value) or (isinstance(value, str) and not value.strip()):
        raise InputError(f"no right choice in {where}; {FIX}")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        for listed in (names or [], texts):
            if value in listed:
                return listed.index(value)
        value = int(value) if value.strip().isdecimal() else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(texts):
        raise InputError(
            f"{describe(target)} in {where} is none of the {len(texts)} choices; give an index from 0 to "
            f"{len(texts) - 1}, or the text of the right one"
        )
    return value
