"""An encoder with its heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bertie.config import EncoderConfig, HeadConfig, HeadName
from bertie.errors import NotFoundError
from bertie.nn.encoder import Encoder
from bertie.nn.heads import Head
from bertie.ops.cuda_graphs import Graphs, Run
from bertie.ops.cuda_graphs import can as can_record
from bertie.text.batch import Batch

M = TypeVar("M", bound=nn.Module)


class Model(nn.Module):
    """One encoder and any number of heads that share its pass.

    `auxiliary` holds what is trained together with it and is no part of it: a generator, a projection for a teacher. It
    is empty but while an objective needs it, and is never saved with a checkpoint. With `graphs` set, passes over small
    batches on a GPU are recorded and played back (ops/cuda_graphs.py).
    """

    graphs: Graphs | None = None

    def __init__(self, encoder: EncoderConfig, heads: Mapping[HeadName, HeadConfig] | Mapping[str, HeadConfig]) -> None:
        super().__init__()
        self.encoder = Encoder(encoder)
        words = self.encoder.embeddings.words.weight
        self.heads = nn.ModuleDict({name: Head(cfg, encoder, words) for name, cfg in heads.items()})
        self.auxiliary = nn.ModuleDict()
        self.encoder.initialize(self.heads)

    @classmethod
    def over(cls, encoder: Encoder, heads: Mapping[str, Head]) -> Model:
        """A model of parts that are there already: nothing is copied."""
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        model.encoder, model.heads, model.auxiliary = encoder, nn.ModuleDict(heads), nn.ModuleDict()
        return model

    @property
    def config(self) -> EncoderConfig:
        """The encoder's config."""
        return self.encoder.cfg

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.encoder.embeddings.words.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' precision."""
        return self.encoder.embeddings.words.weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        if self.graphs is not None:  # weights are about to lie elsewhere
            self.graphs.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def head(self, name: str) -> Head:
        """A head by name."""
        if name not in self.heads:
            have = ", ".join(self.heads) or "none"
            raise NotFoundError(f"this checkpoint has no head {name!r}; it has: {have}")
        head = self.heads[name]
        assert isinstance(head, Head)
        return head

    def forward(self, batch: Batch, head: str) -> Tensor:
        """The head's outputs: a row a token or a row a text."""
        last = self.head(head)

        def run(batch: Batch) -> Tensor:
            out: Tensor = last(self._hidden(batch, head), batch, self.encoder.embeddings.words.weight)
            return out

        if not self._records(head):
            return run(batch)
        return self._played(f"head {head}", run, batch, "text" if last.cfg.kind == "text" else "token")

    def hidden(self, batch: Batch, head: str | None = None) -> Tensor:
        """(T, D) the last hidden state; as `head` wants it, where heads differ in global tokens or in segments."""
        if not self._records(head):
            return self._hidden(batch, head)
        return self._played("hidden", self.encoder, batch, "token")

    def _records(self, head: str | None) -> bool:
        given = head is None or self.head(head).cfg.segments == "given"  # others are made of what the device knows
        return self.graphs is not None and given and can_record(self.encoder)

    def _played(self, name: str, run: Run, batch: Batch, rows: Literal["token", "text"]) -> Tensor:
        assert self.graphs is not None
        self.encoder.embeddings.check(batch)  # a recording asks nothing
        return self.graphs(name, run, batch, max_length=self.config.max_length, rows=rows)

    def _hidden(self, batch: Batch, head: str | None) -> Tensor:
        if head is not None:
            batch = self.head(head).segmented(batch)
        if self.config.global_tokens and head is not None and batch.global_tokens is None:
            batch = batch.with_globals(self.head(head).global_tokens(batch))
        out: Tensor = self.encoder(batch)
        return out


class Unfilled(TorchFunctionMode):
    """Leaves out the first filling of weights: there is no memory to fill, and torch would load its compiler for it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "zeros_", "ones_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def with_memory(module: M, device: torch.device | str) -> M:
    """A module of shapes gets memory, not filled: torch's `to_empty` would load its compiler for it (0.9 s)."""
    module._apply(lambda one: torch.empty(one.shape, dtype=one.dtype, device=device))  # type: ignore[no-untyped-call]
    return module
