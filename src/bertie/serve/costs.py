"""The cost of a request before it is paid: tokens that a model would read, counted in slices of bounded time.

The queue counts the tokens of a request exactly, but only once all of it is tokenized and split
into windows. That takes seconds for megabytes of text, and pairs of two long texts have windows for
every span of one with every span of the other. Here the tokens are bounded by the number of
characters, which is free, and counted only where that bound is above the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from bertie.serve.tickets import Ticket, TokenLimitExceeded

if TYPE_CHECKING:
    from bertie.text.tokenizer import Tokenizer

SLICE = 1 << 16  # characters that are tokenized between two looks at the deadline

Item = tuple[str, ...]  # a text, or the two texts of a pair


def check_tokens(
    items: Sequence[Item], tokenizer: Tokenizer, ticket: Ticket, max_length: int = sys.maxsize, *, windows: bool = True
) -> None:
    """Refuse texts or pairs with more tokens, over all windows, than the request may have.

    Never refuses what the queue would accept. `max_length` is that of the model; `windows`: whether longer texts are
    read in windows, and not truncated.
    """
    if ticket.max_tokens is None:
        return
    if _tokens(items, len, max_length, windows) <= ticket.max_tokens:  # few tokens have less than a character
        return
    counts = count_tokens(list({text for item in items for text in item}), tokenizer, ticket)
    if _tokens(items, counts.__getitem__, max_length, windows) > ticket.max_tokens:
        raise TokenLimitExceeded(f"a request may have at most {ticket.max_tokens:,} tokens in all its windows")


def count_tokens(texts: Sequence[str], tokenizer: Tokenizer, ticket: Ticket) -> dict[str, int]:
    """The tokens of each text without special tokens. No text is counted far beyond the ticket's maximum.

    Texts beyond `SLICE` characters are cut at spaces, where there are any: their counts are exact for tokenizers that
    never cross a space, and otherwise too high by a few.
    """
    counts: dict[str, int] = {}
    for group in text_groups(texts, ticket):
        if len(group[0]) > SLICE:
            counts[group[0]] = _count_long(group[0], tokenizer, ticket)
        else:
            lengths = tokenizer.encode_flat(group).lengths - tokenizer.special_count
            counts |= zip(group, lengths.tolist(), strict=True)
    return counts


def text_groups(texts: Sequence[str], ticket: Ticket) -> Iterator[list[str]]:
    """Lists of texts with at most `SLICE` characters, or of one longer text; each after a look at the deadline."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > SLICE:
            ticket.check()
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        ticket.check()
        yield group


def _count_long(text: str, tokenizer: Tokenizer, ticket: Ticket) -> int:
    start = tokens = 0
    slices = 0
    while start < len(text) and (ticket.max_tokens is None or tokens <= ticket.max_tokens):
        end = min(start + SLICE, len(text))
        if end < len(text):
            space = text.rfind(" ", start + SLICE // 2, end)
            end = end if space < 0 else space
        ticket.check()
        tokens += int(tokenizer.encode_flat([text[start:end]]).lengths[0]) - tokenizer.special_count
        slices += 1
        start = end
    return max(0, tokens - 4 * slices)  # the ends of slices may have cut tokens


def _tokens(items: Sequence[Item], length: Callable[[str], int], max_length: int, windows: bool) -> int:
    """A lower bound of the tokens that a model reads, by the lengths of the texts."""
    total = 0
    for item in items:
        first = length(item[0])
        second = length(item[1]) if len(item) == 2 else 0
        if first + second <= max_length:
            total += first + second
        elif not windows:
            total += max_length
        else:  # each span of one text is read with each span of the other; see `bertie.text.windows`
            short = min(first, second, max_length // 2)
            spans = -(-max(first, second) // (max_length - short))
            short_spans = 1 if short == min(first, second) else -(-min(first, second) // short)
            total += max(first, second) * short_spans + min(first, second) * spans
    return total
