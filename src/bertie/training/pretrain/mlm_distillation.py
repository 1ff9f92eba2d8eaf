"""Distillation of a masked language model: DistilBERT's initialization and loss.

The teacher runs in evaluation mode without gradients. Losses are weighted sums, computed in
float32, so that a step split into micro-batches has the same gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.errors import ConfigError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from bertie.training.objectives import MicroBatch, ModelObjective

# Config fields that two models must share for their blocks to be interchangeable.
BLOCK_FIELDS = (
    *("width", "heads", "head_width", "kv_heads", "ff_width", "activation", "gated", "qkv_bias", "out_bias", "ff_bias"),
    *("norm", "pre_norm", "global_tokens"),
)


def kl_divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """(N, k), (N, k) logits -> (N,): KL(p ‖ q) = Σ p · (log p − log q), p the teacher's softmax and
    q the student's.

    >>> kl_divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 100.0]]))     # log 2
    tensor([0.6931])
    """
    q, p = torch.log_softmax(student / temperature, -1), torch.log_softmax(teacher / temperature, -1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


def check_weights(temperature: float, **weights: float) -> None:
    """Raise unless the temperature is above 0 and the weights of a loss are at least 0."""
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} must be a number greater than 0")
    for name, value in weights.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{name}={value} must be a number 0 or greater")


def copy_layers(teacher: Model, student: Model, layers: Sequence[int] | None = None) -> list[str]:
    """Initialize a student with layers of its teacher, as DistilBERT does; returns the weights that
    were not copied.

    `layers` are the teacher's, one per block of the student. `None` spaces them evenly from the
    first to the last: 0, 2, 4, 7, 9, 11 for six of twelve, as in DistilBERT. Blocks must have the
    same shape. Embeddings, norms and the `mlm` head are copied where both models have them in the
    same shape.

    >>> from dataclasses import replace
    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0, 1, 2), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),) * 3, max_length=32)
    >>> teacher, student = Model(cfg, {}), Model(replace(cfg, layer_map=(0, 1), patterns=(Full(),) * 2), {})
    >>> copy_layers(teacher, student)
    []
    >>> bool((student.encoder.blocks[1].ff.up.weight == teacher.encoder.blocks[2].ff.up.weight).all())
    True
    """
    for field in BLOCK_FIELDS:
        theirs, ours = getattr(teacher.config, field), getattr(student.config, field)
        if theirs != ours:
            raise ConfigError(
                f"{field} of the teacher is {theirs!r}, of the student {ours!r}; to copy layers they must agree"
            )
    depth, blocks = teacher.config.depth, student.config.blocks
    if layers is None:
        layers = [round(i * (depth - 1) / max(1, blocks - 1)) for i in range(blocks)]
    if len(layers) != blocks or not all(0 <= layer < depth for layer in layers):
        raise ConfigError(
            f"layers={list(layers)} must be {blocks} numbers, one per block of the student, from 0 to {depth - 1}"
        )
    teacher_weights, skipped = dict(teacher.named_parameters()), []
    with torch.no_grad():
        for name, weight in student.named_parameters():
            source = name
            block = name.removeprefix("encoder.blocks.")
            if block != name:
                number, _, part = block.partition(".")
                layer = layers[int(number)]
                source = f"encoder.blocks.{teacher.config.layer_map[layer]}.{part}"
                if source not in teacher_weights or teacher_weights[source].shape != weight.shape:
                    raise ConfigError(
                        f"{part} of the student's block {number}, {tuple(weight.shape)}, cannot be copied from the "
                        f"teacher's layer {layer}; choose other layers"
                    )
            copied = name.startswith(("encoder.", "heads.mlm.")) and source in teacher_weights
            if copied and teacher_weights[source].shape == weight.shape:
                weight.copy_(teacher_weights[source])
            else:
                skipped.append(name)
    return skipped


class DistilBertLoss:
    """DistilBERT's triple loss, over the M masked of T tokens:

        Σ over masked tokens    soft · τ² · KL(softmax(t / τ) ‖ softmax(s / τ)) + mlm · −log softmax(s)[target]
        + M / T · Σ over all tokens    cosine · (1 − cos(h, g))

    with s and t the logits of student and teacher, and h and g their last hidden states. Its weight
    is M: divided by M it is DistilBERT's sum of three means (with `restrict_ce_to_mask`). Logits
    are computed for masked tokens only. The vocabularies must agree, and the widths unless `cosine`
    is 0.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> heads = {"mlm": HeadConfig(kind="vocabulary", outputs=100, tied=True)}
    >>> teacher, student = Model(cfg, heads), Model(cfg, heads)
    >>> batch = Batch.from_ids([[1, 4, 3], [4]])
    >>> loss = DistilBertLoss(teacher).loss(student, batch, rows=torch.tensor([1, 3]), targets=torch.tensor([2, 9]))
    >>> loss.backward()
    """

    def __init__(
        self,
        teacher: Model,
        *,
        temperature: float = 2.0,
        soft: float = 5.0,
        mlm: float = 2.0,
        cosine: float = 1.0,
    ) -> None:
        check_weights(temperature, soft=soft, mlm=mlm, cosine=cosine)
        self.teacher = teacher
        self.temperature, self.soft, self.mlm, self.cosine = temperature, soft, mlm, cosine

    def loss(self, student: Model, batch: Batch, rows: Tensor, targets: Tensor, *, rate: float | None = None) -> Tensor:
        """-> () for the tokens `rows` (M,) of the batch, with the original tokens `targets` (M,).

        `rate` is M / T of the whole step, if it is split into micro-batches; `None`: of this batch.
        """
        theirs, ours = self.teacher.config, student.config
        if theirs.vocab != ours.vocab:
            raise ConfigError(f"vocab of the teacher is {theirs.vocab}, of the student {ours.vocab}; they must agree")
        if self.cosine and theirs.width != ours.width:
            raise ConfigError(
                f"width of the teacher is {theirs.width}, of the student {ours.width}; "
                "they must agree, or cosine must be 0"
            )
        with torch.no_grad():
            g, t = _hidden_and_logits(self.teacher.eval(), batch, rows)
        h, s = _hidden_and_logits(student, batch, rows)
        with torch.autocast(h.device.type, enabled=False):
            h, g, s, t = h.float(), g.float(), s.float(), t.float()
            total = self.mlm * F.cross_entropy(s, targets, reduction="sum")
            if self.soft:
                total = total + self.soft * self.temperature**2 * kl_divergence(s, t, self.temperature).sum()
            if self.cosine:
                rate = len(rows) / len(h) if rate is None else rate
                total = total + self.cosine * rate * (1 - F.cosine_similarity(h, g, dim=-1)).sum()
            return total


def _hidden_and_logits(model: Model, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(T, D) hidden states, and (M, V) logits of the masked tokens."""
    hidden = model.hidden(batch, "mlm")
    return hidden, model.head("mlm")(hidden[rows], batch, model.encoder.embeddings.words.weight)


class MaskedLMDistillation(ModelObjective):
    """`DistilBertLoss` as a training objective."""

    def __init__(self, distillation: DistilBertLoss) -> None:
        super().__init__()
        self.distillation = distillation

    def loss(self, model: Model, micro_batch: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        targets, rate = micro_batch.targets, self.counts["masked"] / self.counts["tokens"]
        assert targets.rows is not None
        total = self.distillation.loss(model, micro_batch.batch, targets.rows, targets.values, rate=rate)
        return self.mean(total, "masked")
