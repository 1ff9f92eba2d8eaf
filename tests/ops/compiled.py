"""Triton's programs compiled for a GPU, without one: what the interpreter takes, the compiler may not."""

from __future__ import annotations

from typing import Any

HOPPER = 90


def compiled(program: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 1) -> Any:
    """With assembly of each step. `types` are those of pointers and of numbers that are not i32; constants may be None.

    Pointers and strides are multiples of 16, as they mostly are.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = program.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = [i for i, name in enumerate(names) if name.endswith(("_at", "_stride")) and name not in constants]
    source = ASTSource(program, signature, constants, {(i,): [["tt.divisibility", 16]] for i in even})
    return compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": warps, "num_stages": stages})
