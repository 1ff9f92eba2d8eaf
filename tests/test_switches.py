"""Turning backends off by name, by group and by environment variable."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bertie import switches
from bertie.errors import ConfigError
from bertie.ops import disable
from bertie.ops.dispatch import ROWS


def test_a_name_turns_off_what_is_below_it() -> None:
    assert not switches.is_disabled("triton.fused.norm")
    with disable("triton.fused", "cuda_graphs"):
        assert switches.is_disabled("triton.fused.norm")
        assert switches.is_disabled("cuda_graphs")
        assert not switches.is_disabled("triton.rotary")
    assert not switches.disabled()


def test_blocks_nest_in_any_order() -> None:
    first, second = disable("native"), disable("native")
    first.__exit__()
    assert switches.is_disabled("native.encoder")
    second.__exit__()
    assert not switches.is_disabled("native.encoder")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"disable='triton\.norm' must be one of cuda_graphs, .*triton\.rotary"):
        disable("triton.norm")
    assert not switches.disabled()


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("triton.attention, cuda_graphs", "['cuda_graphs', 'triton.attention']"),
        ("", "[]"),
        ("fast", "BERTIE_DISABLE='fast' must be one of"),
    ],
)
def test_environment_variable(value: str, printed: str) -> None:
    code = "from bertie import switches; print(sorted(switches.disabled()))"
    environment = os.environ | {"BERTIE_DISABLE": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert printed in done.stdout + done.stderr


def test_every_switch_has_a_row_and_every_optional_row_a_switch() -> None:
    """Rows without a switch are those that take everything; the tokenizer is chosen in `text`."""
    rows = {row.backend for row in ROWS}
    always = {"none", "torch.layers", "torch.eager", "torch.attention.grouped"}
    assert rows - always == set(switches.BACKENDS) - {"native.wordpiece"}
