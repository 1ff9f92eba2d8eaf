"""Detect changes of a module's weights, submodules and hooks, to invalidate what is derived from them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

_version = attrgetter("_version")


class ModuleSnapshot:
    """The parameters and submodules of some modules, by identity and address.

    >>> layer = nn.Linear(2, 2)
    >>> snapshot = ModuleSnapshot(layer.modules())
    >>> layer.weight = nn.Parameter(layer.weight.detach().clone())
    >>> snapshot.is_current()
    False
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = list(modules)
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        parameters = [part._parameters for part in parts]
        owners: list[dict[str, Any]] = [*parameters, *(part._modules for part in parts)]
        entries = [(owner, name, value) for owner in owners for name, value in owner.items()]
        self._owners, self._names, self._values = (list(column) for column in zip(*entries, strict=True))
        self.weights = [weight for owner in parameters for weight in owner.values() if weight is not None]
        self._addresses = list(map(Tensor.data_ptr, self.weights))
        self._versioned = [weight for weight in self.weights if not weight.is_inference()]
        self._versions = list(map(_version, self._versioned))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied model takes its own

    def is_current(self) -> bool:
        """Whether no parameter or submodule was replaced, and no module has hooks.

        Called in every forward pass: no loop here is a Python loop.
        """
        return (
            all(map(is_, map(dict.get, self._owners, self._names), self._values))
            and list(map(Tensor.data_ptr, self.weights)) == self._addresses
            and not any(self._hooks)
        )

    def is_unchanged(self) -> bool:
        """Whether, in addition, no weight was written to, as far as version counters tell."""
        return self.is_current() and list(map(_version, self._versioned)) == self._versions
