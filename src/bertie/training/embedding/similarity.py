"""Columns of vectors, and how alike two texts are by them.

A column is a vector for each text of a batch, or one for each of its tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from bertie.errors import InputError


@dataclass(frozen=True, slots=True)
class Tokens:
    """A vector for each token of B texts, end to end: what late interaction compares. No text is without tokens."""

    states: Tensor  # (T, D)
    cu_seqlens: Tensor  # (B + 1,)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def texts(self) -> tuple[Tensor, ...]:
        """(n, D) of each text."""
        return torch.split(self.states, self.lengths())

    def lengths(self) -> list[int]:
        """How many tokens each text has."""
        found: list[int] = self.cu_seqlens.diff().tolist()
        if min(found, default=1) < 1:
            raise InputError(f"text {found.index(min(found))} has no tokens; each needs at least one")
        return found


Vectors = Tensor | Tokens  # (B, D), or one for each token
Gather = Callable[[Vectors], tuple[Vectors, int]]


# --- across processes


class _Joined(torch.autograd.Function):
    """(n, …) of each process -> (Σ n, …) of all; backward, the gradients that all processes have for ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], rank: int) -> Tensor:
        ctx.start, ctx.count = sum(sizes[:rank]), sizes[rank]
        # A sum with zeros, for processes may have different numbers of rows and not every backend gathers these.
        out = x.new_zeros(sum(sizes), *x.shape[1:])
        out[ctx.start : ctx.start + ctx.count] = x
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.count], None, None


def across_ranks(column: Vectors) -> tuple[Vectors, int]:
    """A column with the rows of all processes, and the place where this one's begin. Every process must ask.

    Gradients come back from all of them: the mean over processes of each one's gradient is that of the mean of their
    losses. A process alone gets its own column back.

    >>> across_ranks(torch.ones(2, 3))[1]
    0
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return column, 0
    if isinstance(column, Tokens):
        lengths, start = _joined(column.cu_seqlens.diff())
        return Tokens(_joined(column.states)[0], F.pad(lengths.cumsum(0), (1, 0)).to(column.cu_seqlens.dtype)), start
    return _joined(column)


def _joined(x: Tensor) -> tuple[Tensor, int]:
    rank, sizes = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device)
    sizes[rank] = len(x)
    dist.all_reduce(sizes)
    counts: list[int] = sizes.tolist()
    joined: Tensor = _Joined.apply(x, counts, rank)  # type: ignore[no-untyped-call]
    return joined, sum(counts[:rank])


# --- how alike two texts are


class Similarity(ABC):
    """How alike texts are, by their vectors."""

    @abstractmethod
    def table(self, a: Vectors, b: Vectors) -> Tensor:
        """(B, C) of each of B texts to each of C."""

    @abstractmethod
    def pairs(self, a: Vectors, b: Vectors) -> Tensor:
        """(B,) of each text to the one in the same row."""


@dataclass(frozen=True)
class Dot(Similarity):
    """The dot product.

    >>> Dot().table(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])).tolist()
    [[3.0, 3.0]]
    """

    def table(self, a: Vectors, b: Vectors) -> Tensor:
        """(B, D), (C, D) -> (B, C)."""
        return plain(a) @ plain(b).T

    def pairs(self, a: Vectors, b: Vectors) -> Tensor:
        """(B, D), (B, D) -> (B,)."""
        return (plain(a) * plain(b)).sum(-1)


@dataclass(frozen=True)
class Cosine(Similarity):
    """The cosine of the angle between two vectors, −1 to 1.

    >>> Cosine().pairs(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0]])).tolist()
    [1.0]
    """

    def table(self, a: Vectors, b: Vectors) -> Tensor:
        """(B, D), (C, D) -> (B, C)."""
        return F.normalize(plain(a), dim=-1) @ F.normalize(plain(b), dim=-1).T

    def pairs(self, a: Vectors, b: Vectors) -> Tensor:
        """(B, D), (B, D) -> (B,)."""
        return F.cosine_similarity(plain(a), plain(b), dim=-1)


@dataclass(frozen=True)
class MaxSim(Similarity):
    """Late interaction, ColBERT's: `maxsim`. Its columns are `Tokens`.

    >>> query = Tokens(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 2]))
    >>> passages = Tokens(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), torch.tensor([0, 2, 3]))
    >>> [round(score, 2) for score in MaxSim().table(query, passages)[0].tolist()]
    [2.0, 1.4]
    """

    def table(self, a: Vectors, b: Vectors) -> Tensor:
        """-> (B, C)."""
        return maxsim(tokens_of(a), tokens_of(b))

    def pairs(self, a: Vectors, b: Vectors) -> Tensor:
        """-> (B,)."""
        texts = zip(tokens_of(a).texts(), tokens_of(b).texts(), strict=True)
        none = tokens_of(a).states[:0].sum(1)  # (0,) in its graph: a process may have no rows of a batch
        return torch.cat([none, *((ours @ theirs.T).amax(1).sum()[None] for ours, theirs in texts)])


def maxsim(queries: Tokens, passages: Tokens) -> Tensor:
    """(B, C) for each query's token the best dot product with a token of the passage, summed over the query's tokens.

    Token vectors of length 1 make it a sum of cosines, as ColBERT has it.
    """
    products = passages.states @ queries.states.T  # (T of passages, T of queries)
    # (C, T of queries). What is empty comes first: a process may have no rows of a batch.
    best = torch.cat([products[:0], *(one.amax(0)[None] for one in torch.split(products, passages.lengths()))])
    parts = torch.split(best.T, queries.lengths())
    return torch.cat([best.T[:0], *(one.sum(0)[None] for one in parts)])  # (B, C)


# --- parts of columns


def of_all(x: Tensor) -> Tensor:
    """The rows of all processes."""
    return plain(across_ranks(x)[0])


def plain(column: Vectors) -> Tensor:
    """(B, D) of one vector a text, which it must be."""
    if isinstance(column, Tokens):
        raise InputError("this takes one vector a text (B, D), not Tokens: those are for MaxSim()")
    return column


def tokens_of(column: Vectors) -> Tokens:
    """Of one vector a token, which it must be."""
    if isinstance(column, Tensor):
        raise InputError("MaxSim takes Tokens, a vector for each token, not one vector a text")
    return column


def states_of(column: Vectors) -> Tensor:
    """(B, D) or (T, D)."""
    return column.states if isinstance(column, Tokens) else column


def with_states(column: Vectors, states: Tensor) -> Vectors:
    """The same texts with other vectors."""
    return Tokens(states, column.cu_seqlens) if isinstance(column, Tokens) else states


def rows_of(column: Vectors, start: int, end: int) -> Vectors:
    """Some rows of a column."""
    if isinstance(column, Tensor):
        return column[start:end]
    cu = column.cu_seqlens[start : end + 1]
    return Tokens(column.states[int(cu[0]) : int(cu[-1])], cu - cu[0])


def joined(columns: Sequence[Vectors]) -> Vectors:
    """Columns one after the other."""
    if not any(isinstance(column, Tokens) for column in columns):
        return torch.cat([plain(column) for column in columns])
    tokens = [tokens_of(column) for column in columns]
    lengths = torch.cat([column.cu_seqlens.diff() for column in tokens])
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(lengths.dtype)
    return Tokens(torch.cat([column.states for column in tokens]), ends)
