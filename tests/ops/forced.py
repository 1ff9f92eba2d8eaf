"""Dispatch as if there were other hardware: kernels in the interpreter, GPUs that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from bertie import ops, switches
from bertie.ops import dispatch
from bertie.ops.contracts import AttentionInputs


@contextmanager
def forced(*backends: str) -> Iterator[None]:
    """As if these backends, or all below these names, supported every site. Encoders must be made inside."""
    rows = tuple(
        replace(row, supports=lambda site: True)
        if any(f"{row.backend}.".startswith(f"{name}.") for name in backends)
        else row
        for row in dispatch.ROWS
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dispatch, "ROWS", rows)
        dispatch.clear_cache()
        yield
    dispatch.clear_cache()


@contextmanager
def hardware(triton: bool = True, capability: tuple[int, int] = (9, 0), flash: bool = True) -> Iterator[None]:
    """As if there were a GPU of this compute capability."""
    with pytest.MonkeyPatch.context() as patched:
        dispatch.clear_cache()
        patched.setattr(dispatch, "has_triton", lambda: triton)
        patched.setattr(dispatch, "capability", lambda device: capability if device.type == "cuda" else (0, 0))
        patched.setattr("bertie.ops.torch.varlen_attention._has_flash", lambda device: flash)
        yield
    dispatch.clear_cache()


def turn_off(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Disable backends until the end of the test."""
    monkeypatch.setattr(switches, "_names", switches.disabled() | set(names))


def attend(*arguments: Any, **more: Any) -> Tensor:
    """`ops.attend` with the fields of its inputs as arguments."""
    return ops.attend(AttentionInputs(*arguments, **more))
