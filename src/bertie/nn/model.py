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
from bertie.nn.snapshot import ModuleSnapshot
from bertie.nn.span_head import build_head
from bertie.ops.cuda_graphs import ForwardGraphs, Run
from bertie.text.batch import Batch

M = TypeVar("M", bound=nn.Module)

# Weights of a layer times tokens up to which an H200 computes faster than Python launches; and limits of the tokens.
LAUNCH_BOUND, MIN_TOKENS, MAX_TOKENS = 80_000_000_000, 512, 16384


class Model(nn.Module):
    """One encoder and any number of heads over it.

    `auxiliary` holds modules that are trained with the model but are no part of it: a generator, a projection for a
    teacher. It is empty except while an objective needs it, and is never saved. Forward passes over small batches on
    a GPU are replayed from CUDA graphs (ops/cuda_graphs.py) unless `replay` is False.
    """

    replay = True

    def __init__(self, encoder: EncoderConfig, heads: Mapping[HeadName, HeadConfig] | Mapping[str, HeadConfig]) -> None:
        super().__init__()
        self.encoder = Encoder(encoder)
        self.graphs = forward_graphs(encoder)
        self._snapshot: ModuleSnapshot | None = None
        words = self.encoder.embeddings.words.weight
        self.heads = nn.ModuleDict({name: build_head(cfg, encoder, words) for name, cfg in heads.items()})
        self.auxiliary = nn.ModuleDict()
        self.encoder.initialize(self.heads)

    @classmethod
    def from_parts(cls, encoder: Encoder, heads: Mapping[str, Head]) -> Model:
        """A model of an existing encoder and heads, which are not copied."""
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        model.encoder, model.heads, model.auxiliary = encoder, nn.ModuleDict(heads), nn.ModuleDict()
        model.graphs, model._snapshot = forward_graphs(encoder.cfg), None
        return model

    @property
    def config(self) -> EncoderConfig:
        """The encoder's config."""
        return self.encoder.cfg

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.encoder.embeddings.words.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.encoder.embeddings.words.weight.dtype

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.graphs.clear()  # weights are about to move
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
        """The head's outputs: one row per token or per text."""
        last = self.head(head)

        def run(batch: Batch) -> Tensor:
            out: Tensor = last(self._hidden(batch, head), batch, self.encoder.embeddings.words.weight)
            return out

        if not self._replays(head):
            return run(batch)
        return self._replayed(f"head {head}", run, batch, "text" if last.cfg.kind == "text" else "token")

    def hidden(self, batch: Batch, head: str | None = None) -> Tensor:
        """(T, D) the last hidden state, with the global tokens and segments of `head`."""
        if not self._replays(head):
            return self._hidden(batch, head)
        return self._replayed("hidden", self.encoder, batch, "token")

    def dispatch_report(self) -> list[dict[str, str]]:
        """The backends resolved for inference, as plain data (ops/dispatch.py): operation, backend, condition."""
        with torch.no_grad():
            return self.encoder.dispatch().report()

    def _replays(self, head: str | None) -> bool:
        return (
            self.encoder.dispatch().replays
            and self.replay
            and not torch.is_grad_enabled()
            and not self.training
            # Other segments are derived from ids on the device, which a recording with spare tokens cannot do.
            and (head is None or self.head(head).cfg.segments == "given")
        )

    def _replayed(self, name: str, run: Run, batch: Batch, rows: Literal["token", "text"]) -> Tensor:
        self.encoder.embeddings.check(batch)  # a recording checks nothing
        if self._snapshot is None or not self._snapshot.is_current():
            self.graphs.clear()
            self._snapshot = ModuleSnapshot(self.modules())
            if not self._snapshot.is_current():  # there are hooks, which a recording would not call
                return run(batch)
        return self.graphs(name, run, batch, max_length=self.config.max_length, rows=rows)

    def _hidden(self, batch: Batch, head: str | None) -> Tensor:
        if head is not None:
            batch = self.head(head).add_segments(batch)
        if self.config.global_tokens and head is not None and batch.global_tokens is None:
            batch = batch.with_globals(self.head(head).global_tokens(batch))
        out: Tensor = self.encoder(batch)
        return out


def forward_graphs(cfg: EncoderConfig) -> ForwardGraphs:
    """Graphs for batches that are so small that launching kernels takes longer than running them."""
    gates = 2 if cfg.gated else 1
    layer = cfg.width * (2 * (cfg.heads + cfg.kv_heads) * cfg.head_width + (1 + gates) * cfg.ff_width)
    return ForwardGraphs(max_tokens=max(MIN_TOKENS, min(MAX_TOKENS, LAUNCH_BOUND // layer)))


class SkipInit(TorchFunctionMode):
    """Skips weight initialization: on the meta device there is nothing to fill, and torch would import its compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_", "zeros_", "ones_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def allocate(module: M, device: torch.device | str) -> M:
    """Give a module on the meta device uninitialized memory. (torch's `to_empty` imports its compiler: 0.9 s.)"""
    module._apply(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))  # type: ignore[no-untyped-call]
    return module
