"""Compilation of Triton kernels without a GPU: the compiler rejects some code that the interpreter accepts."""

from __future__ import annotations

from typing import Any

HOPPER = 90


def compile_kernel(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int = 4, stages: int = 1
) -> Any:
    """Compile for Hopper. `types` are those of pointers, and of numbers that are not i32; constants may be None.

    Pointers and strides are assumed to be multiples of 16, as they mostly are.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [i for i, name in enumerate(names) if name.endswith(("_ptr", "_stride")) and name not in constants]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return compile(source, target=GPUTarget("cuda", HOPPER, 32), options={"num_warps": warps, "num_stages": stages})
