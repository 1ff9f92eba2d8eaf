"""The encoder: a flat batch in, one hidden state per token out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bertie import switches
from bertie.config import Bucketed, Convolution, Disentangled, EncoderConfig, Rotary
from bertie.nn import packed
from bertie.nn.attention import QKV, PassContext
from bertie.nn.blocks import Block
from bertie.nn.embeddings import InputEmbeddings
from bertie.nn.norms import build_norm
from bertie.nn.positions import RelativeTable, relative_rows
from bertie.ops.contracts import compute_dtype, has_autocast
from bertie.ops.dispatch import DispatchTable
from bertie.ops.site import Site
from bertie.ops.torch.eager import activation_function, rotary_tables
from bertie.text.batch import Batch


class TokenConvolution(nn.Module):
    """A convolution over neighbouring tokens of a text, added to a residual and normalized."""

    def __init__(self, cfg: EncoderConfig, conv: Convolution) -> None:
        super().__init__()
        self.cfg, self.dropout = conv, cfg.dropout
        self.weight = nn.Parameter(torch.empty(cfg.width, cfg.width // conv.groups, conv.kernel))
        self.bias = nn.Parameter(torch.empty(cfg.width))
        self.norm = build_norm(cfg.norm, cfg.width)
        self.activation = activation_function(conv.activation)

    def forward(self, x: Tensor, residual: Tensor, batch: Batch) -> Tensor:
        """(T, D), (T, D) -> (T, D)."""
        half = self.cfg.kernel // 2
        offsets = torch.arange(-half, half + 1, device=x.device)
        at = torch.arange(len(x), device=x.device)[:, None] + offsets  # (T, K)
        owner = batch.text_of_token()
        inside = (at >= 0) & (at < len(x))
        at = at.clamp(0, len(x) - 1)
        inside &= owner[at] == owner[:, None]
        # Not a multiplication by 0: a NaN of one text would reach the next.
        neighbours = torch.where(inside[..., None], x[at], 0.0)  # (T, K, D); zero past a text's ends
        y = F.conv1d(neighbours.transpose(1, 2), self.weight, self.bias, groups=self.cfg.groups)  # (T, D, 1)
        y = self.activation(F.dropout(y.squeeze(-1), self.dropout, self.training))
        out: Tensor = self.norm(residual + y)
        return out


class Encoder(nn.Module):
    """Embeddings, then `depth` layers of `blocks` distinct blocks.

    With `gradient_checkpointing`, training stores only each block's input and recomputes the rest in the backward
    pass: a third more computation for much less memory, and the same gradients.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0, 1), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(), Full()), max_length=32)
    >>> Encoder(cfg)(Batch.from_ids([[1, 2, 3], [4]])).shape
    torch.Size([4, 8])
    """

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embeddings = InputEmbeddings(cfg)
        self.blocks = nn.ModuleList(Block(cfg, number) for number in range(cfg.blocks))
        self.norm = build_norm(cfg.norm, cfg.width) if cfg.pre_norm else None
        self.conv = TokenConvolution(cfg, cfg.conv) if cfg.conv else None
        scheme = next((p for p in cfg.positions if isinstance(p, Bucketed | Disentangled)), None)
        self.relative = RelativeTable(cfg, scheme) if scheme else None
        self.rotary = next((p for p in cfg.positions if isinstance(p, Rotary)), None)
        self.gradient_checkpointing = False
        self.frozen_layers = 0  # see `freeze`
        self._tables: dict[Any, DispatchTable] = {}
        self.initialize(self)

    def forward(self, batch: Batch) -> Tensor:
        """-> (T, D), the last hidden state."""
        if self.dispatch().native and (hidden := packed.run(self, batch)) is not None:
            return hidden
        frozen = self._run_frozen(batch)
        *_, last = self.hidden_states(batch) if frozen is None else self._upper_states(frozen, batch)
        return last

    def freeze(self, layers: int) -> None:
        """Run the embeddings and this many lower layers, which are not trained, without dropout.

        On a CPU they go through the compiled encoder while the layers above are trained. They are
        deterministic, so their outputs are cached for the next epoch, up to a limit.
        """
        tops = [self.cfg.depth - self.cfg.layer_map[::-1].index(block) for block in self.cfg.layer_map[:layers]]
        layers = layers if all(top <= layers for top in tops) else 0  # no block is shared with a layer above
        if layers != self.frozen_layers:
            self.frozen_layers = layers
            packed.forget_frozen(self)
            self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """As in `nn.Module`; frozen layers stay in evaluation mode."""
        super().train(mode)
        if self.frozen_layers:
            for part in (self.embeddings, *(self.blocks[number] for number in self._frozen_blocks())):
                part.train(False)
        return self

    def _frozen_blocks(self) -> set[int]:
        return set(self.cfg.layer_map[: self.frozen_layers])

    def _run_frozen(self, batch: Batch) -> Tensor | None:
        """(T, D) the output of the frozen layers from the compiled encoder; None where it cannot run them."""
        if batch.key_lengths is not None or not self.frozen_layers or not self.training:
            return None
        if not self.dispatch(training=False).native:
            return None
        return packed.run_frozen(self, batch, self.frozen_layers)

    def _upper_states(self, x: Tensor, batch: Batch) -> Iterator[Tensor]:
        """The output of the frozen layers, and of each layer above them."""
        yield x
        yield from self._layer_states(x, x, batch, self.pass_context(batch), self.frozen_layers)

    def hidden_states(self, batch: Batch) -> Iterator[Tensor]:
        """Yield the embeddings, then each layer's output; the last one is what `forward` returns."""
        self.embeddings.check(batch)
        context = self.pass_context(batch)
        x = self.embeddings(batch, context.ops)
        yield x
        yield from self._layer_states(x, x, batch, context, 0)

    def _layer_states(
        self, x: Tensor, embedded: Tensor, batch: Batch, context: PassContext, first: int
    ) -> Iterator[Tensor]:
        """Yield the outputs of the layers from `first` on, of which x is the input."""
        for layer in range(first, self.cfg.depth):
            block = self.blocks[self.cfg.layer_map[layer]]
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, batch, context, layer, use_reentrant=False)
            else:
                x = block(x, batch, context, layer)
            if layer == 0 and self.conv is not None:
                x = self.conv(embedded, x, batch)
            if layer == self.cfg.depth - 1 and self.norm is not None:
                x = self.norm(x)
            yield x

    def pass_context(self, batch: Batch) -> PassContext:
        """The values that the layers of one forward pass share."""
        rotations = rotary_tables(self.rotary, batch.positions, self.cfg.head_width) if self.rotary else {}
        if self.relative is None:
            return PassContext(self.dispatch(), rotations)
        rows = relative_rows(self.relative.scheme, batch.max_len, batch.ids.device)
        return PassContext(self.dispatch(), rotations, rows, self.relative())

    def dispatch(self, training: bool | None = None) -> DispatchTable:
        """The dispatch table for the present device, precision and mode, resolved once for each."""
        # Called in every pass: without nn.Module's attribute lookup, which takes longer than all the rest.
        words = self._modules["embeddings"]._modules["words"]._parameters.get("weight")  # type: ignore[union-attr]
        if words is None:  # parametrized, as with gradient-disentangled embedding sharing
            words = self.embeddings.words.weight
        dtype = compute_dtype(words)
        training = self.needs_gradients() if training is None else training
        key = (words.device, words.dtype, dtype, training, self.gradient_checkpointing, switches.disabled())
        table = self._tables.get(key)
        if table is None:
            site = Site.of(
                self.cfg,
                words.device,
                dtype,
                training=training,
                autocast=has_autocast(words),
                weights=frozenset(weight.dtype for weight in self.parameters()),
                checkpointing=self.gradient_checkpointing and training,
            )
            table = self._tables[key] = DispatchTable.resolve(site)
        return table

    def reset_dispatch(self) -> None:
        """Resolve the dispatch table anew: after layers were replaced."""
        self._tables = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tables": {}}  # another machine may have other backends

    def needs_gradients(self) -> bool:
        """Whether this is a training pass: gradients are recorded, or it must agree with one where they are.

        A frozen encoder under a head in training is at inference.
        """
        if not self.training and not torch.is_grad_enabled():
            return False
        if self.training and (self.cfg.dropout or self.cfg.attention_dropout):
            return True
        # Also without gradient recording: gradient caching compares such a pass with one that records them.
        return any(weight.requires_grad for weight in self.parameters())

    def initialize(self, module: nn.Module) -> None:
        """Initialize weights: normal with the config's standard deviation, zero biases, unit norms."""
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Embedding | QKV | TokenConvolution):
                nn.init.normal_(part.weight, std=self.cfg.init_std)
            if isinstance(part, nn.Linear | QKV | TokenConvolution) and part.bias is not None:
                nn.init.zeros_(part.bias)
