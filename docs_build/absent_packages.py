"""Stand-ins for packages that the reference pages do not need, so that a build of the site installs no torch.

As Sphinx's `autodoc_mock_imports`: an import of an absent package gives an object whose every attribute exists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

PACKAGES = ("torch", "tokenizers", "safetensors", "huggingface_hub", "httptools", "greenlet", "uvloop", "orjson")


class _Absent(MagicMock):
    """An object with every attribute, which can also be a base class."""

    def __getattr__(self, name: str) -> Any:
        return "absent" if name in ("__name__", "__qualname__") else super().__getattr__(name)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()


class _AbsentPackages(MetaPathFinder, Loader):
    """Finds the given packages, and all their modules."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = _Absent(name=spec.name)
        module.__spec__, module.__path__ = spec, []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def absent_packages() -> Iterator[None]:
    """Allow imports of those `PACKAGES` that are not installed."""
    stand_ins = [name for name in PACKAGES if isinstance(sys.modules.get(name), _Absent)]  # of an earlier call
    finder = _AbsentPackages(tuple(name for name in PACKAGES if name in stand_ins or find_spec(name) is None))
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
