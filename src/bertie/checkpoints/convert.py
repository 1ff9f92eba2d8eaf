"""Convert between the tensors of a checkpoint and those of the model. Rules are applied in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from bertie.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorAlias:
    """Another name under which some checkpoints store the same tensor."""

    name: str
    dead: bool = False  # the original implementation ignores its values: they need not be equal, and are never loaded


@dataclass(frozen=True, slots=True)
class TensorRule:
    """Our tensor `ours` is the concatenation of their tensors `theirs` along the first axis."""

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # rows of each of `theirs`, if there are several
    aliases: tuple[TensorAlias, ...] = ()
    # Their rows are ordered by head, then query, key, value; ours by query, key, value, then head. 0: no difference.
    interleaved_heads: int = 0

    def shapes(self, ours: Shape) -> list[Shape]:
        """The shapes that their tensors must have."""
        if not self.sizes:
            return [ours]
        return [(size, *ours[1:]) for size in self.sizes]

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        """Convert their tensors to ours."""
        x = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if self.interleaved_heads:
            x = x.reshape(self.interleaved_heads, 3, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
        return x

    def write(self, x: Tensor) -> list[Tensor]:
        """Convert our tensor to theirs."""
        if self.interleaved_heads:
            x = x.reshape(3, self.interleaved_heads, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
        return [x] if not self.sizes else list(torch.split(x, list(self.sizes)))


@dataclass(frozen=True, slots=True)
class TiedTensor:
    """`name` is tied to our tensor `ours`, which has a rule of its own."""

    ours: str
    name: str


def resolve_ties(rules: Iterable[TensorRule | TiedTensor]) -> list[TensorRule]:
    """Add each tied name to the aliases of its rule."""
    ties: dict[str, list[TensorAlias]] = {}
    untied: list[TensorRule] = []
    for rule in rules:
        if isinstance(rule, TiedTensor):
            ties.setdefault(rule.ours, []).append(TensorAlias(rule.name))
        else:
            untied.append(rule)
    return [replace(r, aliases=(*r.aliases, *ties[r.ours])) if r.ours in ties else r for r in untied]


def same(ours: str, theirs: str, *aliases: TensorAlias) -> TensorRule:
    """A tensor under another name."""
    return TensorRule(ours, (theirs,), aliases=aliases)


def linear(ours: str, theirs: str, bias: bool = True) -> Iterator[TensorRule]:
    """A linear layer or a norm: a weight and, by default, a bias."""
    yield same(f"{ours}.weight", f"{theirs}.weight")
    if bias:
        yield same(f"{ours}.bias", f"{theirs}.bias")


def concatenated(ours: str, theirs: Sequence[str], sizes: Sequence[int], bias: bool = True) -> Iterator[TensorRule]:
    """Several linear layers that are one here."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield TensorRule(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), tuple(sizes))


class TensorSource(Protocol):
    """The tensors of a checkpoint, read one at a time."""

    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor, without reading the data."""

    def get(self, name: str) -> Tensor:
        """One tensor."""


@dataclass(slots=True)
class WeightMap:
    """Which tensors of a checkpoint become which of ours, determined before any of them is read."""

    rules: list[TensorRule]
    rename: Callable[[str], str]  # from the family's tensor names to those of the checkpoint
    dropped: list[str] = field(default_factory=list)  # tensors of the checkpoint that are not loaded

    def check(self, model: nn.Module, shapes: Mapping[str, Shape], droppable: Iterable[str]) -> None:
        """Raise an error that names missing and unexpected tensors, and those of the wrong shape."""
        ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
        unmapped = {rule.ours for rule in self.rules} ^ set(ours)
        assert not unmapped, f"the family's table and the model disagree on {sorted(unmapped)}"

        expected: dict[str, Shape] = {}
        known: set[str] = set()
        for rule in self.rules:
            for name, shape in zip(rule.theirs, rule.shapes(ours[rule.ours]), strict=True):
                alias = next((a.name for a in rule.aliases if not a.dead and self.rename(a.name) in shapes), name)
                expected[name if self.rename(name) in shapes else alias] = shape
            for other in rule.aliases:
                if self.rename(other.name) in shapes:
                    known.add(self.rename(other.name))
                    if not other.dead:
                        expected[other.name] = ours[rule.ours]
        expected = {self.rename(name): shape for name, shape in expected.items()}
        unexpected = sorted(set(shapes) - set(expected) - known)
        patterns = [re.compile(p) for p in droppable]
        self.dropped = [name for name in unexpected if any(p.search(name) for p in patterns)]
        unexpected = [name for name in unexpected if name not in self.dropped]
        missing = sorted(set(expected) - set(shapes))
        problems = [f"missing: {_abbreviate(missing)}"] * bool(missing)
        problems += [f"unexpected: {_abbreviate(unexpected)}"] * bool(unexpected)
        problems += [
            f"{name} has shape {tuple(shapes[name])}, but the config implies {shape}"
            for name, shape in sorted(expected.items())
            if name in shapes and tuple(shapes[name]) != tuple(shape)
        ][:8]
        if problems:
            raise CheckpointError("the weights do not fit the config: " + "; ".join(problems))

    @torch.no_grad()
    def load(self, model: nn.Module, source: TensorSource) -> None:
        """Copy every tensor into the model."""
        names = source.shapes()
        ours = dict(model.named_parameters())
        for rule in self.rules:
            theirs = [self.rename(name) for name in rule.theirs]
            others = [self.rename(a.name) for a in rule.aliases if not a.dead and self.rename(a.name) in names]
            if theirs[0] not in names:
                theirs = [others.pop(0)]
            target = ours[rule.ours]
            start = 0
            if rule.sizes and not rule.interleaved_heads:  # part by part, without a second copy of the whole
                for name, size in zip(theirs, rule.sizes, strict=True):
                    rows = target[start : start + size]
                    rows.copy_(_checked(source.get(name), name, rows.shape))
                    start += size
            else:
                shapes = rule.shapes(tuple(target.shape))
                parts = [_checked(source.get(n), n, shape) for n, shape in zip(theirs, shapes, strict=True)]
                target.copy_(rule.read(parts))
            # In the model's dtype: what overflows there would make every output nan.
            if not all(x.isfinite() for x in torch.aminmax(target)):
                raise CheckpointError(f"{' or '.join(theirs)} has values that are not finite in {target.dtype}")
            for other in others:
                if not torch.equal(target, _checked(source.get(other), other, target.shape).to(target)):
                    raise CheckpointError(
                        f"{other} differs from {theirs[0]}, though the config ties them; "
                        'set "tie_word_embeddings": false in config.json if they are meant to differ'
                    )

    def store(self, model: nn.Module) -> dict[str, Tensor]:
        """Return our tensors under their names."""
        ours = dict(model.named_parameters())
        tensors: dict[str, Tensor] = {}
        for rule in self.rules:
            parts = rule.write(ours[rule.ours].detach())
            tensors |= {self.rename(n): part.contiguous() for n, part in zip(rule.theirs, parts, strict=True)}
            tensors |= {self.rename(a.name): parts[0].clone() for a in rule.aliases if a.dead}
        return tensors


# torch's other floating-point types are quantized and need a scale.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _checked(x: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    """Check dtype and shape: `copy_` alone would broadcast a wrong shape."""
    if x.dtype not in _FLOATS:
        raise CheckpointError(f"{name} has dtype {x.dtype}; weights must be floating point of 16 to 64 bits")
    if tuple(x.shape) != tuple(shape):
        raise CheckpointError(f"{name} has shape {tuple(x.shape)}, but the config implies {tuple(shape)}")
    return x


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
