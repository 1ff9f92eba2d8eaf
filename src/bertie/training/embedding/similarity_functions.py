"""Embeddings of a batch column, similarity functions over them, and gathering across processes.

A column holds the embeddings of one text per row of the batch: (B, D), or `TokenEmbeddings` with one
vector per token for late interaction.
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
class TokenEmbeddings:
    """The token embeddings of B texts, concatenated. Every text has at least one token."""

    states: Tensor  # (T, D)
    cu_seqlens: Tensor  # (B + 1,)

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def texts(self) -> tuple[Tensor, ...]:
        """(n, D) of each text."""
        return torch.split(self.states, self.lengths())

    def lengths(self) -> list[int]:
        """Number of tokens of each text."""
        lengths: list[int] = self.cu_seqlens.diff().tolist()
        if min(lengths, default=1) < 1:
            raise InputError(f"text {lengths.index(min(lengths))} has no tokens; each needs at least one")
        return lengths


Embeddings = Tensor | TokenEmbeddings  # (B, D), or one vector per token
Gather = Callable[[Embeddings], tuple[Embeddings, int]]


# --- across processes


class _AllGather(torch.autograd.Function):
    """(n, …) of each process -> (Σ n, …) of all; the backward pass sums the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], rank: int) -> Tensor:
        ctx.start, ctx.count = sum(sizes[:rank]), sizes[rank]
        # All-reduce over zero-padded rows: processes may differ in rows, which not every backend can all-gather.
        out = x.new_zeros(sum(sizes), *x.shape[1:])
        out[ctx.start : ctx.start + ctx.count] = x
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.count], None, None


def gather_across_ranks(column: Embeddings) -> tuple[Embeddings, int]:
    """Gather the rows of all processes; return them and the index where this process's rows begin.

    A collective: every process must call it. Gradients flow back to all processes: the mean over processes
    of their gradients is that of the mean of their losses. Without a process group the column is returned.

    >>> gather_across_ranks(torch.ones(2, 3))[1]
    0
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return column, 0
    if isinstance(column, TokenEmbeddings):
        lengths, start = _all_gather(column.cu_seqlens.diff())
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(column.cu_seqlens.dtype)
        return TokenEmbeddings(_all_gather(column.states)[0], cu_seqlens), start
    return _all_gather(column)


def _all_gather(x: Tensor) -> tuple[Tensor, int]:
    rank, sizes = dist.get_rank(), torch.zeros(dist.get_world_size(), dtype=torch.int64, device=x.device)
    sizes[rank] = len(x)
    dist.all_reduce(sizes)
    counts: list[int] = sizes.tolist()
    gathered: Tensor = _AllGather.apply(x, counts, rank)  # type: ignore[no-untyped-call]
    return gathered, sum(counts[:rank])


def gather_rows(x: Tensor) -> Tensor:
    """The rows of all processes."""
    return as_tensor(gather_across_ranks(x)[0])


# --- similarity functions


class Similarity(ABC):
    """A similarity function of embeddings."""

    @abstractmethod
    def matrix(self, a: Embeddings, b: Embeddings) -> Tensor:
        """(B, C) similarities of each of B texts to each of C."""

    @abstractmethod
    def pairwise(self, a: Embeddings, b: Embeddings) -> Tensor:
        """(B,) similarities of each text to the one in the same row."""


@dataclass(frozen=True)
class DotProduct(Similarity):
    """The dot product.

    >>> DotProduct().matrix(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])).tolist()
    [[3.0, 3.0]]
    """

    def matrix(self, a: Embeddings, b: Embeddings) -> Tensor:
        """(B, D), (C, D) -> (B, C)."""
        return as_tensor(a) @ as_tensor(b).T

    def pairwise(self, a: Embeddings, b: Embeddings) -> Tensor:
        """(B, D), (B, D) -> (B,)."""
        return (as_tensor(a) * as_tensor(b)).sum(-1)


@dataclass(frozen=True)
class Cosine(Similarity):
    """Cosine similarity.

    >>> Cosine().pairwise(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 0.0]])).tolist()
    [1.0]
    """

    def matrix(self, a: Embeddings, b: Embeddings) -> Tensor:
        """(B, D), (C, D) -> (B, C)."""
        return F.normalize(as_tensor(a), dim=-1) @ F.normalize(as_tensor(b), dim=-1).T

    def pairwise(self, a: Embeddings, b: Embeddings) -> Tensor:
        """(B, D), (B, D) -> (B,)."""
        return F.cosine_similarity(as_tensor(a), as_tensor(b), dim=-1)


@dataclass(frozen=True)
class MaxSim(Similarity):
    """ColBERT's late interaction (`maxsim`) over `TokenEmbeddings`.

    >>> query = TokenEmbeddings(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 2]))
    >>> passages = TokenEmbeddings(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), torch.tensor([0, 2, 3]))
    >>> [round(score, 2) for score in MaxSim().matrix(query, passages)[0].tolist()]
    [2.0, 1.4]
    """

    def matrix(self, a: Embeddings, b: Embeddings) -> Tensor:
        """-> (B, C)."""
        return maxsim(as_tokens(a), as_tokens(b))

    def pairwise(self, a: Embeddings, b: Embeddings) -> Tensor:
        """-> (B,)."""
        texts = zip(as_tokens(a).texts(), as_tokens(b).texts(), strict=True)
        empty = as_tokens(a).states[:0].sum(1)  # (0,), part of the graph: a process may have no rows of a batch
        return torch.cat([empty, *((query @ passage.T).amax(1).sum()[None] for query, passage in texts)])


def maxsim(queries: TokenEmbeddings, passages: TokenEmbeddings) -> Tensor:
    """(B, C): the best dot product of each query token with a passage token, summed over the query's tokens.

    With normalized token embeddings it is a sum of cosines, as in ColBERT.
    """
    products = passages.states @ queries.states.T  # (T of passages, T of queries)
    # The empty slice keeps the graph for a process that has no rows of a batch.
    per_passage = torch.split(products, passages.lengths())
    best = torch.cat([products[:0], *(part.amax(0)[None] for part in per_passage)])  # (C, T of queries)
    per_query = torch.split(best.T, queries.lengths())
    return torch.cat([best.T[:0], *(part.sum(0)[None] for part in per_query)])  # (B, C)


# --- columns


def as_tensor(column: Embeddings) -> Tensor:
    """Return (B, D) embeddings, or raise if there is one vector per token."""
    if isinstance(column, TokenEmbeddings):
        raise InputError("this takes one vector per text (B, D), not TokenEmbeddings: those are for MaxSim()")
    return column


def as_tokens(column: Embeddings) -> TokenEmbeddings:
    """Return token embeddings, or raise if there is one vector per text."""
    if isinstance(column, Tensor):
        raise InputError("MaxSim takes TokenEmbeddings, one vector per token, not one vector per text")
    return column


def states_of(column: Embeddings) -> Tensor:
    """(B, D) or (T, D)."""
    return column.states if isinstance(column, TokenEmbeddings) else column


def with_states(column: Embeddings, states: Tensor) -> Embeddings:
    """The same texts with other vectors."""
    return TokenEmbeddings(states, column.cu_seqlens) if isinstance(column, TokenEmbeddings) else states


def slice_rows(column: Embeddings, start: int, end: int) -> Embeddings:
    """Rows `start` to `end` of a column."""
    if isinstance(column, Tensor):
        return column[start:end]
    cu = column.cu_seqlens[start : end + 1]
    return TokenEmbeddings(column.states[int(cu[0]) : int(cu[-1])], cu - cu[0])


def concatenate(columns: Sequence[Embeddings]) -> Embeddings:
    """Concatenate the rows of columns."""
    if not any(isinstance(column, TokenEmbeddings) for column in columns):
        return torch.cat([as_tensor(column) for column in columns])
    tokens = [as_tokens(column) for column in columns]
    lengths = torch.cat([column.cu_seqlens.diff() for column in tokens])
    ends = F.pad(lengths.cumsum(0), (1, 0)).to(lengths.dtype)
    return TokenEmbeddings(torch.cat([column.states for column in tokens]), ends)
