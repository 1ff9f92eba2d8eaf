"""Distillation of self-attention relations: MiniLM and MiniLMv2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bertie.config import Full, Learned, Rotary
from bertie.errors import ConfigError
from bertie.nn.attention import SelfAttention
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.text.batch import Batch, send
from bertie.training.objectives import MicroBatch, ModelObjective

Relation = Literal["qk", "qq", "kk", "vv"]

MAX_SCORES = 1 << 24  # in memory at a time: 64 MB for each of a few copies
MASKED_SCORE = -1e30  # infinity would give 0 · (∞ − ∞)


class RelationLoss:
    """MiniLM's loss: the relations between the tokens of a text, in one layer of the teacher and of
    the student.

    With a and b two of the layer's queries, keys and values, in R heads of width d, the relation of
    token i to the tokens of its text is a distribution,

        A[r, i] = softmaxⱼ(a[r, i] · b[r, j] / √d)
        loss    = Σ over relations ab, Σ over tokens i, 1/R · Σ over r    KL(teacher's A[r, i] ‖ student's A[r, i])

    and the loss has weight 1 per token.

    - MiniLM: `("qk", "vv")` with `heads=None`: the attention probabilities and the relations of the
      values, by attention head; both models need the same number of heads.
    - MiniLMv2: `("qq", "kk", "vv")`, with any number of relation `heads` that divides the widths of
      both. Attention heads are concatenated and split again, so the models may differ in heads and
      width.

    Layers are counted from 0, or from −1 backwards; layers above are not computed. "qk" is
    supported for layers with full attention and learned or rotary positions.

    >>> from dataclasses import replace
    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, Learned
    >>> small = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> large = replace(small, width=12, heads=3, kv_heads=3, embeddings=EmbeddingConfig(width=12))
    >>> relations = RelationLoss(Model(large, {}), heads=4)
    >>> relations.loss(Model(small, {}), Batch.from_ids([[1, 2, 3], [4]])).backward()
    """

    def __init__(
        self,
        teacher: Model,
        *,
        relations: Sequence[Relation] = ("qq", "kk", "vv"),
        heads: int | None = None,
        layer: int = -1,
        student_layer: int = -1,
    ) -> None:
        if not relations or not set(relations) <= set(get_args(Relation)):
            raise ConfigError(f"relations={relations!r} must be one or more of {', '.join(get_args(Relation))}")
        if heads is not None and heads < 1:
            raise ConfigError(f"heads={heads} must be at least 1, or None for attention heads")
        self.teacher, self.relations, self.heads = teacher, tuple(relations), heads
        self.layer, self.student_layer = layer, student_layer

    def loss(self, student: Model, batch: Batch) -> Tensor:
        """-> () the sum over the batch's tokens."""
        with torch.no_grad():
            theirs = self._sides(self.teacher.eval(), batch, self.layer, "teacher")
        ours = self._sides(student, batch, self.student_layer, "student")
        device = batch.ids.device
        total = torch.zeros((), device=device)
        with torch.autocast(device.type, enabled=False):
            for relation, s, t in zip(self.relations, ours, theirs, strict=True):
                heads = s[0].shape[1]
                if t[0].shape[1] != heads:
                    raise ConfigError(
                        f"{relation!r} has {t[0].shape[1]} heads in the teacher and {heads} in the student; "
                        "relations of attention heads need the same number: use relations qq, kk, vv and set heads"
                    )
                for tokens, valid, rows in _chunks(batch, heads):
                    # Scores are recomputed in the backward pass: those of all texts would fill the
                    # memory.
                    total = total + checkpoint(
                        _relation_divergence, s, t, tokens, valid, rows, use_reentrant=False, preserve_rng_state=False
                    )
        return total

    def _sides(self, model: Model, batch: Batch, layer: int, role: str) -> list[tuple[Tensor, Tensor]]:
        """The two sides of each relation, (T, R, d) each; the first is scaled."""
        cfg = model.config
        if not -cfg.depth <= layer < cfg.depth:
            raise ConfigError(f"layer={layer} of the {role} must lie between {-cfg.depth} and {cfg.depth - 1}")
        layer %= cfg.depth
        q, k, v = (x.float() for x in _project_qkv(model.encoder, batch, layer))
        sides = []
        for relation in self.relations:
            if relation == "qk":
                a, b = _attention_sides(model, batch, layer, role, q, k)
            else:
                a = b = self._split_heads({"q": q, "k": k, "v": v}[relation[0]], relation, role)
            sides.append((a * a.shape[-1] ** -0.5, b))
        return sides

    def _split_heads(self, x: Tensor, relation: str, role: str) -> Tensor:
        """(T, H, d) -> (T, R, d)."""
        if self.heads is None:
            return x
        joined = x.flatten(1)
        if joined.shape[1] % self.heads:
            raise ConfigError(
                f"heads={self.heads} must divide the width {joined.shape[1]} of {relation!r} in the {role}"
            )
        return joined.view(len(joined), self.heads, -1)


def _attention_sides(model: Model, batch: Batch, layer: int, role: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with rotary embeddings applied, (T, H, d) each."""
    encoder, cfg = model.encoder, model.config
    if not isinstance(cfg.patterns[layer], Full) or not all(
        isinstance(position, Learned | Rotary) for position in cfg.positions
    ):
        raise ConfigError(
            f"'qk' needs full attention with learned or rotary positions; layer {layer} of the {role} has "
            f"{cfg.patterns[layer]} with {cfg.positions}: use relations qq, kk, vv"
        )
    if cfg.qk_norm:
        raise ConfigError(f"'qk' cannot be used with the {role}, which normalizes its queries and keys (qk_norm)")
    if encoder.rotary is not None:
        angles = rotary_tables(encoder.rotary, batch.positions, cfg.head_width)
        q, k = (rotate(x, *angles[encoder.rotary.key(layer)]) for x in (q, k))
    return q, k.repeat_interleave(cfg.heads // cfg.kv_heads, dim=1)  # (T, G, d) -> (T, H, d)


class RelationDistillation(ModelObjective):
    """`RelationLoss` as a training objective; no tokens are masked."""

    def __init__(self, relations: RelationLoss) -> None:
        super().__init__()
        self.relations = relations

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        return self.mean(self.relations.loss(model, micro_batch.batch), "tokens")


def _project_qkv(encoder: Encoder, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's queries (T, H, d), and its keys and values (T, G, d), before rotary embeddings are applied."""
    attention = encoder.blocks[encoder.cfg.layer_map[layer]].attention
    assert isinstance(attention, SelfAttention)
    projections: list[tuple[Tensor, Tensor, Tensor]] = []
    active = False

    # A block may serve several layers, and DeBERTa's also projects positions: the first projection
    # of this layer counts.
    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal active
        active = args[3] == layer

    def leave(_: nn.Module, __: tuple[Any, ...], out: tuple[Tensor, Tensor, Tensor]) -> None:
        if active and not projections:
            q, k, v = (x.clone() for x in out)  # without gradients, rotary embeddings may be applied in place
            projections.append((q, k, v))

    hooks = [attention.register_forward_pre_hook(enter), attention.qkv.register_forward_hook(leave)]
    try:
        next(islice(encoder.hidden_states(batch), layer + 1, None))  # the first state is the embedding
    finally:
        for hook in hooks:
            hook.remove()
    return projections[0]


def _chunks(batch: Batch, heads: int) -> list[tuple[Tensor, Tensor, slice]]:
    """Group texts of similar length: their token indices (b, n), which are valid (b, n), and the
    rows to compute.

    Each chunk has at most MAX_SCORES scores, or those of one row of one text.
    """
    lengths, device = np.array(batch.lengths), batch.ids.device
    starts = np.cumsum(lengths) - lengths
    order, chunks = np.argsort(-lengths, kind="stable"), []
    while len(order):
        n = int(lengths[order[0]])
        group, order = np.split(order, [max(1, MAX_SCORES // (heads * n * n))])
        positions, ends = np.arange(n), lengths[group, None]
        tokens = starts[group, None] + np.minimum(positions, ends - 1)  # (b, n); past its end a text's last token
        step = max(1, MAX_SCORES // (heads * n * len(group)))
        pair = send(torch.from_numpy(tokens), device), send(torch.from_numpy(positions < ends), device)
        chunks += [(*pair, slice(first, first + step)) for first in range(0, n, step)]
    return chunks


def _relation_divergence(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], tokens: Tensor, valid: Tensor, rows: slice
) -> Tensor:
    """() the summed KL divergence of some rows of some texts."""

    def log_probabilities(a: Tensor, b: Tensor) -> Tensor:
        scores = torch.einsum("bird,bjrd->brij", a[tokens[:, rows]], b[tokens])
        return torch.log_softmax(scores.masked_fill(~valid[:, None, None, :], MASKED_SCORE), -1)

    ours, theirs = log_probabilities(*student), log_probabilities(*teacher)
    kl = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)  # (b, R, rows)
    return (kl.mean(1) * valid[:, rows]).sum()
