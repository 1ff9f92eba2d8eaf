"""A tokenizer that inserts a token after the first one of every text, as ColBERT marks queries and documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from bertie.errors import InputError
from bertie.text.encoding import Encoding, Encodings, IntArray
from bertie.text.tokenizer import Tokenizer

PLACE = 1  # after [CLS]


class PrefixTokenizer(Tokenizer):
    """A tokenizer that inserts a marker token into every text; it counts as a special token, so each window has it."""

    _prefix_id: int

    @classmethod
    def create(cls, tokenizer: Tokenizer, prefix_id: int) -> PrefixTokenizer:
        """Wrap a tokenizer: `prefix_id` is inserted after the first token of each text."""
        marked = cls.__new__(cls)
        marked.__dict__.update(tokenizer.__dict__)
        marked._prefix_id = prefix_id
        return marked

    def encode_flat(self, items: Sequence[str | tuple[str, str]], *, offsets: bool = False) -> Encodings:
        """Like `Tokenizer.encode_flat`, with the marker token in every text."""
        plain = super().encode_flat(items, offsets=offsets)
        if plain.paired is not None and plain.paired.any():
            raise InputError("a pair of texts cannot be marked as a query or a document")
        at = plain.starts + PLACE
        load, template = plain.load, plain.template
        return replace(
            plain,
            ids=np.insert(plain.ids, at, self._prefix_id),
            segments=np.insert(plain.segments, at, 0),
            lengths=plain.lengths + 1,
            special_counts=plain.special_counts + 1,
            load=None if load is None else lambda i: _MarkedDetails(load(i)),  # type: ignore[arg-type,return-value]
            template=None if template is None else (template[0] + 1, template[1]),
        )

    def encode(self, text: str, pair: str | None = None, special: bool = True) -> Encoding:
        """Encode one text with the marker token."""
        if pair is not None or not special:
            return super().encode(text, pair, special)
        return self.encode_flat([text])[0]


@dataclass(frozen=True)
class _MarkedDetails:
    """The library's encoding of a text, with the marker token inserted."""

    plain: tokenizers.Encoding

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        return _insert(self.plain.offsets, (0, 0))

    @cached_property
    def word_ids(self) -> list[int | None]:
        return _insert(self.plain.word_ids, None)

    @cached_property
    def sequence_ids(self) -> list[int | None]:
        return _insert(self.plain.sequence_ids, None)

    @cached_property
    def special_tokens_mask(self) -> list[int]:
        return _insert(self.plain.special_tokens_mask, 1)


def _insert(values: list[Any], value: Any) -> list[Any]:
    return [*values[:PLACE], value, *values[PLACE:]]


def token_ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> IntArray:
    """The ids of those tokens that are in the vocabulary."""
    ids = [id for token in tokens if (id := tokenizer.id(token)) is not None]
    return np.array(ids, np.int64)
