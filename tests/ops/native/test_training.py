"""The library of training kernels: found where it was built, and left alone where it was built from other sources."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bertie.ops import dispatch
from bertie.ops.dispatch import select
from bertie.ops.native import training
from bertie.ops.site import Site
from tests.ops.forced import turn_off


@pytest.fixture
def fresh() -> Iterator[None]:
    training.library.cache_clear()
    dispatch.clear_cache()
    yield
    training.library.cache_clear()
    dispatch.clear_cache()


def test_without_the_library(fresh: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(training, "__file__", str(tmp_path / "training.py"))
    assert training.library() is None
    assert training.instruction_level() is None
    assert select("attention", _site())[0].backend == "torch.attention.grouped"


@pytest.mark.skipif(training.library() is None, reason="no compiler was here when the package was built")
class TestLibrary:
    def test_another_version(self, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "ABI_VERSION", training.ABI_VERSION + 1)
        assert training.library() is None

    def test_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It trains on a CPU in float32, and only that."""
        operations = ("attention", "norm", "activation")
        assert all(select(name, _site())[0].backend == f"native.training.{name}" for name in operations)
        others = (_site(training=False), _site(dtype=torch.bfloat16), _site(autocast=True))
        assert not any(select(name, s)[0].backend.startswith("native") for s in others for name in operations)
        turn_off(monkeypatch, "native.training")
        assert not any(select(name, _site())[0].backend.startswith("native") for name in operations)

    @pytest.mark.parametrize("sizes", [(1,), (3, 100_003), (70_000, 5)])
    def test_sum_of_squares(self, sizes: tuple[int, ...]) -> None:
        tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
        expected = sum(x.double().pow(2).sum().item() for x in tensors)
        assert training.sum_of_squares(tensors) == pytest.approx(expected, rel=1e-6)


def _site(dtype: torch.dtype = torch.float32, training: bool = True, autocast: bool = False) -> Site:
    return Site(torch.device("cpu"), dtype, training, autocast)
