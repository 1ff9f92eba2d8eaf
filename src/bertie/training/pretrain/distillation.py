"""Distillation: a small model, the student, learns from what a large one, the teacher, makes of the same texts.

The teacher is only ever asked: in evaluation mode and without gradients. As in `objectives.py`, losses are sums, each
with a weight that its docstring names, so that a step cut into micro-batches adds up to the same gradient. Losses are
computed in float32 whatever the precision of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bertie.config import Full, Learned, Rotary
from bertie.errors import ConfigError, InputError
from bertie.nn.attention import SelfAttention
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.nn.pooling import Pooling
from bertie.ops.torch.eager import rotary_tables, rotate
from bertie.text.batch import Batch, pack, send
from bertie.training.objectives import (
    HeadObjective,
    Level,
    MicroBatch,
    ModelObjective,
    Targets,
    TrainingExample,
    pool_windows,
)

Pair = Literal["qk", "qq", "kk", "vv"]

# Of a block: what two models must share for the weights of one to mean the same in the other.
SHARED = (
    *("width", "heads", "head_width", "kv_heads", "ff_width", "activation", "gated", "qkv_bias", "out_bias", "ff_bias"),
    *("norm", "pre_norm", "global_tokens"),
)
AT_ONCE = 1 << 24  # scores of relations that are in memory at a time, 64 MB for each of the few copies
UNSEEN = -1e30  # a score of no weight; infinity would make 0 · (∞ − ∞) of it


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """(N, k), (N, k) logits -> (N,): KL(p ‖ q) = Σ p · (log p − log q), p the teacher's softmax and q the student's.

    >>> divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 100.0]]))     # log 2
    tensor([0.6931])
    """
    q, p = torch.log_softmax(student / temperature, -1), torch.log_softmax(teacher / temperature, -1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


# --- a student's first weights ---


def copy_layers(teacher: Model, student: Model, layers: Sequence[int] | None = None) -> list[str]:
    """Begin a student with layers of its teacher, as DistilBERT does; returns the names of weights left as they were.

    `layers` are the teacher's, one for each block of the student. `None` spreads them evenly from the first to the
    last: 0, 2, 4, 7, 9, 11 for six of twelve, which are those of DistilBERT. Blocks must be of one shape. Around them,
    embeddings, norms and the `mlm` head are copied where both models have them in one shape.

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
    for name in SHARED:
        theirs, ours = getattr(teacher.config, name), getattr(student.config, name)
        if theirs != ours:
            raise ConfigError(
                f"{name} of the teacher is {theirs!r}, of the student {ours!r}; to copy layers they must agree"
            )
    depth, wanted = teacher.config.depth, student.config.blocks
    if layers is None:
        layers = [round(i * (depth - 1) / max(1, wanted - 1)) for i in range(wanted)]
    if len(layers) != wanted or not all(0 <= layer < depth for layer in layers):
        raise ConfigError(
            f"layers={list(layers)} must be {wanted} numbers, one a block of the student, from 0 to {depth - 1}"
        )
    given, left = dict(teacher.named_parameters()), []
    with torch.no_grad():
        for name, weight in student.named_parameters():
            source = name
            block = name.removeprefix("encoder.blocks.")
            if block != name:
                number, _, part = block.partition(".")
                layer = layers[int(number)]
                source = f"encoder.blocks.{teacher.config.layer_map[layer]}.{part}"
                if source not in given or given[source].shape != weight.shape:
                    raise ConfigError(
                        f"{part} of the student's block {number}, {tuple(weight.shape)}, is not to be had from the "
                        f"teacher's layer {layer}; choose other layers"
                    )
            known = name.startswith(("encoder.", "heads.mlm.")) and source in given
            if known and given[source].shape == weight.shape:
                weight.copy_(given[source])
            else:
                left.append(name)
    return left


# --- masked language models ---


class TripleLoss:
    """DistilBERT's loss, over the M selected of T tokens:

        Σ over selected    soft · τ² · KL(softmax(t / τ) ‖ softmax(s / τ)) + mlm · −log softmax(s)[wanted]
        + M / T · Σ over all tokens    cosine · (1 − cos(h, g))

    with s and t the logits of student and teacher, and h and g their last hidden states. Its weight is M: divided by
    that it is DistilBERT's sum of three means (with `restrict_ce_to_mask`). Logits are computed only where tokens are
    selected. Vocabularies must agree, and widths unless `cosine` is 0.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> heads = {"mlm": HeadConfig(kind="vocabulary", outputs=100, tied=True)}
    >>> teacher, student = Model(cfg, heads), Model(cfg, heads)
    >>> batch = Batch.from_ids([[1, 4, 3], [4]])
    >>> loss = TripleLoss(teacher).loss(student, batch, rows=torch.tensor([1, 3]), targets=torch.tensor([2, 9]))
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
        _check(temperature=temperature, soft=soft, mlm=mlm, cosine=cosine)
        self.teacher = teacher
        self.temperature, self.soft, self.mlm, self.cosine = temperature, soft, mlm, cosine

    def loss(self, student: Model, batch: Batch, rows: Tensor, targets: Tensor, *, rate: float | None = None) -> Tensor:
        """-> () for the tokens `rows` (M,) of the batch, of which `targets` (M,) are wanted.

        `rate` is M / T of the whole step, for a step that is cut into micro-batches; `None` takes the batch's own.
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
            g, t = _masked(self.teacher.eval(), batch, rows)
        h, s = _masked(student, batch, rows)
        with torch.autocast(h.device.type, enabled=False):
            h, g, s, t = h.float(), g.float(), s.float(), t.float()
            total = self.mlm * F.cross_entropy(s, targets, reduction="sum")
            if self.soft:
                total = total + self.soft * self.temperature**2 * divergence(s, t, self.temperature).sum()
            if self.cosine:
                rate = len(rows) / len(h) if rate is None else rate
                total = total + self.cosine * rate * (1 - F.cosine_similarity(h, g, dim=-1)).sum()
            return total


def _masked(model: Model, batch: Batch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(T, D) hidden states, and (M, V) logits of some tokens."""
    hidden = model.hidden(batch, "mlm")
    return hidden, model.head("mlm")(hidden[rows], batch, model.encoder.embeddings.words.weight)


class Triple(ModelObjective):
    """`TripleLoss` as an objective of the loop."""

    def __init__(self, triple: TripleLoss) -> None:
        super().__init__()
        self.triple = triple

    def loss(self, model: Model, mini: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        rows, rate = mini.targets.rows, self.counts["masked"] / self.counts["tokens"]
        assert rows is not None
        return self.mean(self.triple.loss(model, mini.batch, rows, mini.targets.values, rate=rate), "masked")


# --- relations between tokens ---


class Relations:
    """MiniLM's loss: how the tokens of a text relate to each other in one layer of the teacher, and of the student.

    With a and b two of the layer's queries, keys and values in R heads of width d, the relation of token i to the
    tokens of its text is a distribution,

        A[r, i] = softmaxⱼ(a[r, i] · b[r, j] / √d)
        loss    = Σ over pairs ab, Σ over tokens i, 1/R · Σ over r    KL(teacher's A[r, i] ‖ student's A[r, i])

    and the loss has the weight of one a token. The pairs say whose loss it is:

    - MiniLM: `("qk", "vv")` with `heads=None`: attention itself and the values' relations, by attention heads, of
      which both models have the same number.
    - MiniLMv2: `("qq", "kk", "vv")`, with any number of relation `heads` that divides the widths of both. Attention
      heads are joined and cut anew, so that the two models may differ in heads and in width.

    Layers are counted from 0, or back from −1, the last; what lies above them is not computed. "qk" is the attention
    of layers that see whole texts, with learned or rotary positions; for others it is refused.

    >>> from dataclasses import replace
    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, Learned
    >>> small = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> large = replace(small, width=12, heads=3, kv_heads=3, embeddings=EmbeddingConfig(width=12))
    >>> relations = Relations(Model(large, {}), heads=4)
    >>> relations.loss(Model(small, {}), Batch.from_ids([[1, 2, 3], [4]])).backward()
    """

    def __init__(
        self,
        teacher: Model,
        *,
        pairs: Sequence[Pair] = ("qq", "kk", "vv"),
        heads: int | None = None,
        layer: int = -1,
        student_layer: int = -1,
    ) -> None:
        if not pairs or not set(pairs) <= set(get_args(Pair)):
            raise ConfigError(f"pairs={pairs!r} must be one or more of {', '.join(get_args(Pair))}")
        if heads is not None and heads < 1:
            raise ConfigError(f"heads={heads} must be at least 1, or None for attention heads")
        self.teacher, self.pairs, self.heads = teacher, tuple(pairs), heads
        self.layer, self.student_layer = layer, student_layer

    def loss(self, student: Model, batch: Batch) -> Tensor:
        """-> (), the sum over the batch's tokens."""
        with torch.no_grad():
            theirs = self._sides(self.teacher.eval(), batch, self.layer, "teacher")
        ours = self._sides(student, batch, self.student_layer, "student")
        device = batch.ids.device
        total = torch.zeros((), device=device)
        with torch.autocast(device.type, enabled=False):
            for pair, s, t in zip(self.pairs, ours, theirs, strict=True):
                heads = s[0].shape[1]
                if t[0].shape[1] != heads:
                    raise ConfigError(
                        f"{pair!r} has {t[0].shape[1]} heads in the teacher and {heads} in the student; relations by "
                        "attention heads need the same number: use pairs qq, kk, vv and set heads"
                    )
                for at, inside, rows in _chunks(batch, heads):
                    # Scores are computed again on the way back: to keep those of all texts would fill the memory.
                    part = checkpoint(_related, s, t, at, inside, rows, use_reentrant=False, preserve_rng_state=False)
                    total = total + part
        return total

    def _sides(self, model: Model, batch: Batch, layer: int, whose: str) -> list[tuple[Tensor, Tensor]]:
        """For each pair its two sides, (T, R, d) each; the first is scaled."""
        encoder, cfg = model.encoder, model.config
        if not -cfg.depth <= layer < cfg.depth:
            raise ConfigError(f"layer={layer} of the {whose} must lie between {-cfg.depth} and {cfg.depth - 1}")
        layer %= cfg.depth
        q, k, v = (x.float() for x in _projected(encoder, batch, layer))
        found = []
        for pair in self.pairs:
            if pair == "qk":
                if not isinstance(cfg.patterns[layer], Full) or not all(
                    isinstance(position, Learned | Rotary) for position in cfg.positions
                ):
                    raise ConfigError(
                        f"'qk' needs full attention with learned or rotary positions; layer {layer} of the {whose} has "
                        f"{cfg.patterns[layer]} with {cfg.positions}: use pairs qq, kk, vv"
                    )
                a, b = q, k
                if encoder.rotary is not None:
                    turned = rotary_tables(encoder.rotary, batch.positions, cfg.head_width)
                    a, b = (rotate(x, *turned[encoder.rotary.bases[layer]]) for x in (q, k))
                b = b.repeat_interleave(cfg.heads // cfg.kv_heads, dim=1)  # (T, G, d) -> (T, H, d)
            else:
                a = {"q": q, "k": k, "v": v}[pair[0]]
                if self.heads is not None:
                    joined = a.flatten(1)
                    if joined.shape[1] % self.heads:
                        raise ConfigError(
                            f"heads={self.heads} must divide the width {joined.shape[1]} of {pair!r} in the {whose}"
                        )
                    a = joined.view(len(joined), self.heads, -1)  # (T, H, d) -> (T, R, d)
                b = a
            found.append((a * a.shape[-1] ** -0.5, b))
        return found


class Related(ModelObjective):
    """`Relations` as an objective of the loop; the tokens are read as they are, none is hidden."""

    def __init__(self, relations: Relations) -> None:
        super().__init__()
        self.relations = relations

    def loss(self, model: Model, mini: MicroBatch) -> Tensor:
        """As `ModelObjective.loss`."""
        return self.mean(self.relations.loss(model, mini.batch), "tokens")


def _projected(encoder: Encoder, batch: Batch, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's queries (T, H, d), and its keys and values (T, G, d), before positions turn them."""
    attention = encoder.blocks[encoder.cfg.layer_map[layer]].attention
    assert isinstance(attention, SelfAttention)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    mine = False

    # A block may serve several layers, and DeBERTa's projects positions too: the first product of this layer is meant.
    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal mine
        mine = args[3] == layer

    def leave(_: nn.Module, __: tuple[Any, ...], out: tuple[Tensor, Tensor, Tensor]) -> None:
        if mine and not found:
            q, k, v = (x.clone() for x in out)  # without gradients, positions may turn them where they lie
            found.append((q, k, v))

    hooks = [attention.register_forward_pre_hook(enter), attention.qkv.register_forward_hook(leave)]
    try:
        next(islice(encoder.hidden_states(batch), layer + 1, None))  # the first state is the embedding
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]


def _chunks(batch: Batch, heads: int) -> list[tuple[Tensor, Tensor, slice]]:
    """Texts of like length side by side: where their tokens are (b, n), which are theirs (b, n), and which rows to do.

    Each has at most AT_ONCE scores, or those of one row of one text.
    """
    lengths, device = np.array(batch.lengths), batch.ids.device
    starts = np.cumsum(lengths) - lengths
    order, found = np.argsort(-lengths, kind="stable"), []
    while len(order):
        n = int(lengths[order[0]])
        group, order = np.split(order, [max(1, AT_ONCE // (heads * n * n))])
        places, ends = np.arange(n), lengths[group, None]
        at = starts[group, None] + np.minimum(places, ends - 1)  # (b, n); past its end a text's last token again
        step = max(1, AT_ONCE // (heads * n * len(group)))
        sides = send(torch.from_numpy(at), device), send(torch.from_numpy(places < ends), device)
        found += [(*sides, slice(first, first + step)) for first in range(0, n, step)]
    return found


def _related(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], at: Tensor, inside: Tensor, rows: slice
) -> Tensor:
    """() the divergence of the relations of some rows of some texts."""

    def logs(a: Tensor, b: Tensor) -> Tensor:
        scores = torch.einsum("bird,bjrd->brij", a[at[:, rows]], b[at])
        return torch.log_softmax(scores.masked_fill(~inside[:, None, None, :], UNSEEN), -1)

    kl = F.kl_div(logs(*student), logs(*teacher), reduction="none", log_target=True).sum(-1)  # (b, R, rows)
    return (kl.mean(1) * inside[:, rows]).sum()


# --- classes ---


class Logits(HeadObjective):
    """A fine-tuned teacher's soft labels of texts: its logits t against the student's s,

        (1 − hard) · τ² · KL(softmax(t / τ) ‖ softmax(s / τ)) + hard · −log softmax(s)[label]

    for each text, times the text's weight. Windows of one text are pooled by their log-probabilities before all else,
    as in `SingleLabelObjective`. The teacher is asked once, by `ask`, and training reads its answers from the items: any number
    of epochs costs one pass of it. Texts without a label have no hard part.

    >>> from bertie.config import EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned
    >>> cfg = EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32)
    >>> from bertie.training.objectives import TrainingWindow
    >>> teacher = Model(cfg, {"classify": HeadConfig(kind="text", outputs=3)})
    >>> items = [TrainingExample((TrainingWindow(np.array([1, 2]), np.array([0, 0])),), np.int64(1))]
    >>> objective = Logits(temperature=2.0, hard=0.1)
    >>> mini = objective.collate(objective.ask(teacher, "classify", items))
    >>> mini.targets.values.shape      # three logits and the label
    torch.Size([1, 4])
    >>> loss = objective.loss(torch.zeros(1, 3), mini.batch, mini.targets)
    """

    level: ClassVar[Level] = "text"

    def __init__(self, temperature: float = 2.0, hard: float = 0.0) -> None:
        _check(temperature=temperature, hard=hard)
        if hard > 1:
            raise ConfigError(f"hard={hard} must lie between 0 and 1: it is a share of the loss")
        self.temperature, self.hard = temperature, hard

    def losses(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        """outputs (W, k) or (T, k), values (N, k + 1): the teacher's logits, then the label or −1."""
        s, t = self._whole(outputs, targets), targets.values[:, :-1]
        if s.shape != t.shape:
            raise ConfigError(f"the teacher has {t.shape[1]} classes, the student {s.shape[1]}; they must be the same")
        loss = self.temperature**2 * divergence(s, t, self.temperature)
        if not self.hard:
            return loss
        labels = targets.values[:, -1].long()
        right = F.cross_entropy(s, labels, reduction="none", ignore_index=-1)
        return (1 - self.hard) * loss + self.hard * right

    def _whole(self, outputs: Tensor, targets: Targets) -> Tensor:
        return pool_windows(torch.log_softmax(outputs, -1), targets)

    def ask(
        self, teacher: Model, head: str, items: Sequence[TrainingExample], budget: int = 16384
    ) -> list[TrainingExample]:
        """Items with the teacher's logits in front of their labels, `budget` tokens at a time."""
        out = list(items)
        teacher.eval()
        for group in pack([len(item) for item in items], budget):
            chosen = [items[i] for i in group]
            pieces = [piece for item in chosen for piece in item.windows]
            batch = Batch.from_ids([p.ids for p in pieces], [p.segments for p in pieces])
            with torch.no_grad():
                logits = teacher(batch.to(teacher.device), head).float().cpu().numpy()  # (W, k) or (T, k)
            asked = len(batch.ids) if self.level == "token" else len(batch)
            if len(logits) != asked:
                raise ConfigError(
                    f"head {head!r} of the teacher gives {len(logits)} rows for {len(batch)} windows of "
                    f"{len(batch.ids)} tokens; {type(self).__name__} needs a row a {self.level}"
                )
            for i, item in zip(group, chosen, strict=True):
                rows = len(item) if self.level == "token" else len(item.windows)
                mine, logits = np.split(logits, [rows])
                out[i] = self._answered(item, mine)
        return out

    def _answered(self, item: TrainingExample, logits: np.ndarray) -> TrainingExample:
        logs = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
        shares = np.array([piece.share for piece in item.windows], dtype=np.float32)
        label = -1 if item.value is None else item.value
        return replace(item, value=np.append(shares @ logs, label).astype(np.float32))


class TokenLogits(Logits):
    """`Logits` of tokens, for tagging: tokens that no weight asks for count for nothing, as in `TokenClassificationObjective`.

    Pieces without labels and weights ask for each of their tokens, and have no hard part.

    >>> from bertie.training.objectives import TrainingWindow
    >>> items = [TrainingExample((TrainingWindow(np.array([1, 2]), np.array([0, 0]), 1.0, np.array([[4, 0, 0], [0, 0, 1]]), np.ones(2)),))]
    >>> mini = TokenLogits().collate(items)     # as `ask` made them of a teacher with two tags
    >>> loss = TokenLogits().loss(torch.zeros(2, 2), mini.batch, mini.targets)
    """

    level: ClassVar[Level] = "token"

    def _whole(self, outputs: Tensor, targets: Targets) -> Tensor:
        return outputs

    def _answered(self, item: TrainingExample, logits: np.ndarray) -> TrainingExample:
        pieces = []
        for piece in item.windows:
            mine, logits = np.split(logits, [len(piece)])
            labels = np.full(len(piece), -1) if piece.values is None else piece.values
            weights = np.ones(len(piece), dtype=np.float32) if piece.weights is None else piece.weights
            values = np.concatenate([mine, labels[:, None]], axis=1, dtype=np.float32)  # (n, k + 1)
            pieces.append(replace(piece, values=values, weights=weights))
        return replace(item, windows=tuple(pieces))


# --- vectors of texts ---


class Embeddings(nn.Module):
    """A sentence encoder's vectors t against the student's pooled vectors s, for texts with weights w (1 unless given):

        cosine         Σᵢ wᵢ · (1 − cos(P sᵢ, tᵢ))
        mse            Σᵢ wᵢ · mean((P sᵢ − tᵢ)²)
        distances      Σᵢⱼ wᵢ wⱼ · huber(|sᵢ − sⱼ| / μₛ − |tᵢ − tⱼ| / μₜ) / W          RKD's, μ the mean distance i ≠ j
        angles         Σᵢⱼₖ wᵢ wⱼ wₖ · huber(cos∠sᵢsⱼsₖ − cos∠tᵢtⱼtₖ) / W²             RKD's, at the corner j
        similarities   Σᵢⱼ wᵢ wⱼ · (cos(sᵢ, sⱼ) − cos(tᵢ, tⱼ))² / W

    each times the number given for it; the whole has the weight W = Σ w. The last three compare the texts of one
    micro-batch with each other, and so change where it is cut. P is a matrix that this module learns, where the two
    widths differ and a term needs it: hand `parameters()` to the optimizer, and save it or let it go with the run.

    Widths are those of the pooled vectors, which several pooling modes make wider than the encoder.

    >>> from bertie.config import EncoderConfig, Full, Learned
    >>> from bertie.config import EmbeddingConfig
    >>> student = Model(EncoderConfig(
    ...     vocab=100, width=8, layer_map=(0,), heads=2, head_width=4, kv_heads=2, ff_width=16, activation="gelu",
    ...     embeddings=EmbeddingConfig(width=8), positions=(Learned(32),), patterns=(Full(),), max_length=32), {})
    >>> objective = Embeddings(8, 12, mse=1.0)
    >>> loss = objective.loss(student, Batch.from_ids([[1, 2, 3], [4]]), torch.randn(2, 12))
    >>> loss.backward()
    >>> objective.project.weight.grad.shape
    torch.Size([12, 8])
    """

    def __init__(
        self,
        student: int,
        teacher: int,
        *,
        pooling: str | Sequence[str] = "mean",
        cosine: float = 0.0,
        mse: float = 0.0,
        distances: float = 0.0,
        angles: float = 0.0,
        similarities: float = 0.0,
    ) -> None:
        super().__init__()
        terms = {"cosine": cosine, "mse": mse, "distances": distances, "angles": angles, "similarities": similarities}
        _check(**terms)
        if not any(terms.values()):
            raise ConfigError(f"all terms are 0; give at least one of {', '.join(terms)} a weight")
        self.terms, self.widths = terms, (student, teacher)
        self.pooling = Pooling(pooling)
        needed = student != teacher and (cosine or mse)
        self.project = nn.Linear(student, teacher, bias=False) if needed else None

    def loss(
        self,
        student: Model,
        batch: Batch,
        wanted: Tensor | Callable[[Batch], Tensor],
        weights: Tensor | None = None,
    ) -> Tensor:
        """-> (). `wanted` (B, Dt) are the teacher's vectors of the batch's texts, or what computes them of the batch.

        Vectors made beforehand are the way for a teacher with another tokenizer. A teacher that is a module is put
        into evaluation mode.
        """
        if not isinstance(wanted, Tensor):
            if isinstance(wanted, nn.Module):
                wanted.eval()
            with torch.no_grad():
                wanted = wanted(batch)
        return self.between(self.pooling(student.hidden(batch), batch), wanted, weights)

    def between(self, vectors: Tensor, wanted: Tensor, weights: Tensor | None = None) -> Tensor:
        """-> () for vectors (B, Ds) that are pooled already, as those of texts in several windows."""
        for name, x, width in (("vectors", vectors, self.widths[0]), ("wanted", wanted, self.widths[1])):
            if x.shape != (len(vectors), width):
                raise InputError(f"{name} has shape {tuple(x.shape)}; ({len(vectors)}, {width}) is needed")
        terms = self.terms
        with torch.autocast(vectors.device.type, enabled=False):
            s = vectors.float()
            t = wanted.detach().to(s)
            w = s.new_ones(len(s)) if weights is None else weights.to(s)
            # Whatever a text without weight has for a vector, it adds nothing to the loss or to its gradient.
            s, t = (torch.where(w[:, None] > 0, x, 0.0) for x in (s, t))
            whole = w.sum().clamp(min=torch.finfo(w.dtype).tiny)
            total = s.new_zeros(())
            if terms["cosine"] or terms["mse"]:
                p = s if self.project is None else self.project(s)
                total = total + terms["cosine"] * (w * (1 - F.cosine_similarity(p, t, dim=-1))).sum()
                total = total + terms["mse"] * (w * ((p - t) ** 2).mean(-1)).sum()
            if terms["distances"]:
                apart = F.smooth_l1_loss(_distances(s, w), _distances(t, w), reduction="none")
                total = total + terms["distances"] * (w @ apart @ w) / whole
            if terms["angles"]:
                step = max(1, AT_ONCE // (len(s) * max(len(s), *self.widths)))
                for corners in torch.split(torch.arange(len(s), device=s.device), step):
                    part = checkpoint(_bent, s, t, w, corners, use_reentrant=False, preserve_rng_state=False)
                    total = total + terms["angles"] * part / whole**2
            if terms["similarities"]:
                a, b = (F.normalize(x, dim=-1) for x in (s, t))
                total = total + terms["similarities"] * (w @ (a @ a.T - b @ b.T) ** 2 @ w) / whole
            return total


def _distances(x: Tensor, w: Tensor) -> Tensor:
    """(B, D) -> (B, B), in units of the mean distance of two."""
    # The shortcut by a matrix product loses small distances, and its gradient at 0 is not a number.
    apart = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = w.sum() ** 2 - (w**2).sum()
    tiny = torch.finfo(x.dtype).tiny
    return apart / ((w @ apart @ w) / pairs.clamp(min=tiny)).clamp(min=tiny)


def _bent(s: Tensor, t: Tensor, w: Tensor, corners: Tensor) -> Tensor:
    """() the difference of the angles at some corners, of the lines to all pairs of texts."""

    def cosines(x: Tensor) -> Tensor:
        lines = F.normalize(x - x[corners, None], dim=-1)  # (b, B, D)
        return lines @ lines.mT  # (b, B, B)

    apart = F.smooth_l1_loss(cosines(s), cosines(t), reduction="none")
    return torch.einsum("bij,b,i,j->", apart, w[corners], w, w)


def _check(**numbers: float) -> None:
    """A temperature is above 0, and a term's weight not below it."""
    for name, value in numbers.items():
        least = "greater than 0" if name == "temperature" else "0 or greater"
        if not (0 <= value < float("inf")) or (name == "temperature" and value == 0):
            raise ConfigError(f"{name}={value} must be a number {least}")
