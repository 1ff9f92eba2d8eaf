"""The rule engine between a checkpoint's tensors and ours. A rule is read in both directions."""

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
    """Another name under which some checkpoints hold the same tensor."""

    name: str
    dead: bool = False  # the original ignores what it holds: it need not be equal, and never stands in


@dataclass(frozen=True, slots=True)
class TensorRule:
    """Our tensor `ours` is their tensors `theirs`, one below the other."""

    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # rows of each of `theirs`, if they are several
    aliases: tuple[TensorAlias, ...] = ()
    # Their rows go head by head, each with its query, key and value; ours go query, key, value. 0: they do not.
    interleaved_heads: int = 0

    def shapes(self, ours: Shape) -> list[Shape]:
        """The shapes that theirs must have."""
        if not self.sizes:
            return [ours]
        return [(size, *ours[1:]) for size in self.sizes]

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        """Theirs to ours."""
        x = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if self.interleaved_heads:
            x = x.reshape(self.interleaved_heads, 3, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
        return x

    def write(self, x: Tensor) -> list[Tensor]:
        """Ours to theirs."""
        if self.interleaved_heads:
            x = x.reshape(3, self.interleaved_heads, -1, *x.shape[1:]).transpose(0, 1).flatten(0, 2)
        return [x] if not self.sizes else list(torch.split(x, list(self.sizes)))


@dataclass(frozen=True, slots=True)
class TiedTensor:
    """`name` is another name of our tensor `ours`, whose rule stands elsewhere."""

    ours: str
    name: str


def resolve_ties(rules: Iterable[TensorRule | TiedTensor]) -> list[TensorRule]:
    """Give each tie to the rule it is about."""
    ties: dict[str, list[TensorAlias]] = {}
    kept: list[TensorRule] = []
    for rule in rules:
        if isinstance(rule, TiedTensor):
            ties.setdefault(rule.ours, []).append(TensorAlias(rule.name))
        else:
            kept.append(rule)
    return [replace(r, aliases=(*r.aliases, *ties[r.ours])) if r.ours in ties else r for r in kept]


def same(ours: str, theirs: str, *aliases: TensorAlias) -> TensorRule:
    """One tensor under another name."""
    return TensorRule(ours, (theirs,), aliases=aliases)


def linear(ours: str, theirs: str, bias: bool = True) -> Iterator[TensorRule]:
    """A weight and, mostly, a bias."""
    yield same(f"{ours}.weight", f"{theirs}.weight")
    if bias:
        yield same(f"{ours}.bias", f"{theirs}.bias")


def concatenated(ours: str, theirs: Sequence[str], sizes: Sequence[int], bias: bool = True) -> Iterator[TensorRule]:
    """Several linears that are one product here."""
    for part in ("weight", "bias") if bias else ("weight",):
        yield TensorRule(f"{ours}.{part}", tuple(f"{name}.{part}" for name in theirs), tuple(sizes))


class TensorSource(Protocol):
    """A checkpoint's tensors, read one at a time."""

    def shapes(self) -> Mapping[str, Shape]:
        """Every name with its shape, without reading the data."""

    def get(self, name: str) -> Tensor:
        """One tensor."""


@dataclass(slots=True)
class WeightMap:
    """Which tensors of a checkpoint become which of ours, worked out before any of them is read."""

    rules: list[TensorRule]
    rename: Callable[[str], str]  # from canonical names to the checkpoint's own
    dropped: list[str] = field(default_factory=list)  # by name

    def check(self, model: nn.Module, found: Mapping[str, Shape], droppable: Iterable[str]) -> None:
        """Refuse missing, left over and reshaped tensors, by name."""
        ours = {name: tuple(p.shape) for name, p in model.named_parameters()}
        unmapped = {rule.ours for rule in self.rules} ^ set(ours)
        assert not unmapped, f"the family's table and the model disagree on {sorted(unmapped)}"

        wanted: dict[str, Shape] = {}
        known: set[str] = set()
        for rule in self.rules:
            for name, shape in zip(rule.theirs, rule.shapes(ours[rule.ours]), strict=True):
                stand_in = next((a.name for a in rule.aliases if not a.dead and self.rename(a.name) in found), name)
                wanted[name if self.rename(name) in found else stand_in] = shape
            for alias in rule.aliases:
                if self.rename(alias.name) in found:
                    known.add(self.rename(alias.name))
                    if not alias.dead:
                        wanted[alias.name] = ours[rule.ours]
        wanted = {self.rename(name): shape for name, shape in wanted.items()}
        left = sorted(set(found) - set(wanted) - known)
        patterns = [re.compile(p) for p in droppable]
        self.dropped = [name for name in left if any(p.search(name) for p in patterns)]
        left = [name for name in left if name not in self.dropped]
        missing = sorted(set(wanted) - set(found))
        problems = [f"missing: {_some(missing)}"] * bool(missing) + [f"left over: {_some(left)}"] * bool(left)
        problems += [
            f"{name} has shape {tuple(found[name])}, the config asks for {shape}"
            for name, shape in sorted(wanted.items())
            if name in found and tuple(found[name]) != tuple(shape)
        ][:8]
        if problems:
            raise CheckpointError("the weights do not fit the config: " + "; ".join(problems))

    @torch.no_grad()
    def load(self, model: nn.Module, source: TensorSource) -> None:
        """Copy every tensor into its place."""
        names = source.shapes()
        ours = dict(model.named_parameters())
        for rule in self.rules:
            theirs = [self.rename(name) for name in rule.theirs]
            others = [self.rename(a.name) for a in rule.aliases if not a.dead and self.rename(a.name) in names]
            if theirs[0] not in names:
                theirs = [others.pop(0)]
            target = ours[rule.ours]
            start = 0
            if rule.sizes and not rule.interleaved_heads:  # part by part: no second copy of the whole
                for name, size in zip(theirs, rule.sizes, strict=True):
                    place = target[start : start + size]
                    place.copy_(_sound(source.get(name), name, place.shape))
                    start += size
            else:
                shapes = rule.shapes(tuple(target.shape))
                parts = [_sound(source.get(n), n, shape) for n, shape in zip(theirs, shapes, strict=True)]
                target.copy_(rule.read(parts))
            # In the precision that is asked for, too: what overflows there would answer nan to everything.
            if not all(x.isfinite() for x in torch.aminmax(target)):
                raise CheckpointError(f"{' or '.join(theirs)} holds numbers that are not finite in {target.dtype}")
            for other in others:
                if not torch.equal(target, _sound(source.get(other), other, target.shape).to(target)):
                    raise CheckpointError(
                        f"{other} differs from {theirs[0]}, though the config ties them; "
                        'set "tie_word_embeddings": false in config.json if they are meant to differ'
                    )

    def store(self, model: nn.Module) -> dict[str, Tensor]:
        """Our tensors under their names."""
        ours = dict(model.named_parameters())
        out: dict[str, Tensor] = {}
        for rule in self.rules:
            parts = rule.write(ours[rule.ours].detach())
            out |= {self.rename(n): part.contiguous() for n, part in zip(rule.theirs, parts, strict=True)}
            out |= {self.rename(a.name): parts[0].clone() for a in rule.aliases if a.dead}
        return out


# Others of torch's floating types are codes that need a scale to be read.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _sound(x: Tensor, name: str, shape: Sequence[int]) -> Tensor:
    """A tensor that may be copied: `copy_` alone would stretch a wrong shape to fit."""
    if x.dtype not in _FLOATS:
        raise CheckpointError(f"{name} holds {x.dtype}; weights must be floating point numbers of 16 to 64 bits")
    if tuple(x.shape) != tuple(shape):
        raise CheckpointError(f"{name} has shape {tuple(x.shape)}, the config asks for {tuple(shape)}")
    return x


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
