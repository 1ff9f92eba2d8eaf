"""Every Triton kernel compiles for Hopper with the options that its caller uses."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bertie.ops.triton import activation as triton_activation
from bertie.ops.triton import disentangled_attention, fp8, pooling, rotary, short_attention
from bertie.ops.triton import norm as triton_norm
from bertie.ops.triton.launch import next_power_of_2
from tests.ops.triton.compilation import compile_kernel

FP8 = {"fp8_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_blocks(kernel: Any, types: dict[str, str], constants: dict[str, Any], blocks: dict[str, int]) -> Any:
    sizes = {name: size for name, size in blocks.items() if name != "num_warps"}
    return compile_kernel(kernel, types, constants | sizes, blocks["num_warps"])


@pytest.mark.parametrize(
    ("residual", "dropout", "store_sum", "width"),
    [
        *product(["bf16", "fp32"], [True, False], [True, False], [768]),
        ("bf16", True, True, 384),
        ("", False, False, 768),
    ],
)
def test_residual_norm(residual: str, dropout: bool, store_sum: bool, width: int) -> None:
    """With and without a residual, and with and without storing the sum."""
    from bertie.ops.triton import norm_kernels as kernels

    half = dict.fromkeys(("x_ptr", "out_ptr", "dout_ptr", "dx_ptr", "weight_ptr"), "*bf16")
    single = dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32")
    wide = dict.fromkeys(("residual_ptr", "sum_ptr", "dsum_ptr", "dresidual_ptr"), f"*{residual or 'bf16'}")
    types = half | single | wide | {"seed_ptr": "*i64", "eps": "fp32", "keep_scale": "fp32"} | FP8
    absent = ["bias_ptr", *([] if dropout else ["seed_ptr"]), *([] if residual else ["residual_ptr"])]
    for training in (True, False):
        unused = [*absent, *([] if store_sum else ["sum_ptr"]), *(FP8 if training else ["mean_ptr", "rstd_ptr"])]
        flags = {"HAS_RESIDUAL": bool(residual), "HAS_BIAS": False, "DROPOUT": dropout, "STORE_SUM": store_sum}
        flags |= {"STORE_STATS": training, "STORE_FP8": not training}
        blocks = triton_norm._block_sizes(width, 0)
        compile_blocks(kernels.residual_norm_forward, types, dict.fromkeys(unused) | flags, blocks)
    has_sum = store_sum or not residual
    unused = [*([] if dropout else ["seed_ptr", "dx_ptr"]), *(["x_ptr", "residual_ptr"] if has_sum else ["sum_ptr"])]
    unused += [] if store_sum else ["dsum_ptr"]
    flags = {"DROPOUT": dropout, "HAS_SUM": has_sum, "HAS_DSUM": store_sum}
    blocks = triton_norm._block_sizes(width, 1)
    compile_blocks(kernels.residual_norm_backward, types, dict.fromkeys(unused) | flags, blocks)


def test_embedding_norm() -> None:
    from bertie.ops.triton import norm_kernels as kernels

    kernel = kernels.embedding_norm_forward
    types = {name: "*i64" if name.startswith("ids") else "*bf16" for name in kernel.arg_names if name.endswith("_ptr")}
    types |= FP8 | {"eps": "fp32"}
    for store_fp8 in (True, False):
        flags = {"HAS_TABLE2": True, "HAS_TABLE3": True, "HAS_BIAS": True, "STORE_FP8": store_fp8}
        unused = {} if store_fp8 else dict.fromkeys(FP8)
        compile_blocks(kernel, types, flags | unused, triton_norm._block_sizes(768, 0))


@pytest.mark.parametrize(("gated", "width", "bias"), [(False, 3072, True), (True, 1152, False)])
@pytest.mark.parametrize("activation", triton_activation.ACTIVATIONS)
def test_activation(activation: str, gated: bool, width: int, bias: bool) -> None:
    from bertie.ops.triton import activation_kernels as kernels

    types = dict.fromkeys(("x_ptr", "out_ptr", "dout_ptr", "dx_ptr", "bias_ptr"), "*bf16") | {"dbias_ptr": "*fp32"}
    flags: dict[str, Any] = {"ACTIVATION": activation, "GATED": gated, "HAS_BIAS": bias}
    unused = {} if bias else {"bias_ptr": None}
    compile_blocks(kernels.activation_forward, types, flags | unused, triton_activation._block_sizes(width, 0))
    unused |= {} if bias else {"dbias_ptr": None}
    compile_blocks(kernels.activation_backward, types, flags | unused, triton_activation._block_sizes(width, 1))


@pytest.mark.parametrize(("gated", "width", "bias"), [(False, 4096, True), (True, 1152, False), (False, 768, False)])
def test_activation_fp8(gated: bool, width: int, bias: bool) -> None:
    """Rounds by the hardware's conversion instruction, to the nearest."""
    from bertie.ops.triton import activation_kernels as kernels

    types = dict.fromkeys(("x_ptr", "bias_ptr"), "*bf16") | FP8
    flags: dict[str, Any] = {"ACTIVATION": "gelu" if bias or gated else "identity", "GATED": gated, "HAS_BIAS": bias}
    unused = {} if bias else {"bias_ptr": None}
    compiled = compile_blocks(kernels.activation_fp8, types, flags | unused, fp8._block_sizes(width))
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]


@pytest.mark.parametrize("gradient", [True, False])
def test_cross_entropy(gradient: bool) -> None:
    from bertie.ops.triton import cross_entropy_kernels as kernels

    types = dict.fromkeys(("bias_ptr", "weights_ptr", "losses_ptr"), "*fp32")
    types |= {"logits_ptr": "*bf16", "targets_ptr": "*i64"}
    flags = {"VOCAB": 30522, "STRIDE": 30528, "STORE_GRADIENT": gradient, "HAS_BIAS": True, "BLOCK": 4096}
    compile_kernel(kernels.cross_entropy_forward_backward, types, flags, 8)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("mode", pooling.MODES)
def test_pooling(mode: str, dtype: str) -> None:
    from bertie.ops.triton import pooling_kernels as kernels

    types = {"hidden_ptr": f"*{dtype}", "out_ptr": f"*{dtype}", "cu_seqlens_ptr": "*i32"}
    constants = {"MODE": mode, "ROWS": pooling.ROWS, "BLOCK": pooling.BLOCK}
    compile_kernel(kernels.pool_forward, types, constants, pooling.WARPS)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(12, 12, 64), (16, 2, 128), (6, 2, 24), (1, 1, 16)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rotary(dtype: str, heads: int, kv_heads: int, width: int, backward: bool) -> None:
    """Each thread stores only where it has loaded, so that outputs may alias inputs."""
    from bertie.ops.triton import rotary_kernels as kernels

    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": width, "ROWS": rotary.ROWS, "BACKWARD": backward}
    blocks = {"BLOCK_HEADS": heads, "BLOCK_KV_HEADS": kv_heads, "BLOCK_HALF_DIM": width // 2}
    constants |= {name: next_power_of_2(size) for name, size in blocks.items()}
    types = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), f"*{dtype}")
    types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    compiled = compile_kernel(kernels.rotary, types, constants, rotary.WARPS)
    loads, stores = (
        Counter(re.findall(rf"tt\.{operation} .* : (tensor<.*>) loc", compiled.asm["ttgir"]))
        for operation in ("load", "store")
    )
    assert stores.total() == 4
    assert stores <= loads  # the same shapes in the same layouts


@pytest.mark.parametrize(("window", "causal"), [(True, False), (False, False), (False, True), (True, True)])
@pytest.mark.parametrize("keys", short_attention.TILES | short_attention.ROTARY_TILES)
@pytest.mark.parametrize(("dtype", "width"), [("bf16", 64), ("fp16", 24), ("bf16", 128)])
def test_short_attention(dtype: str, width: int, keys: int, window: bool, causal: bool) -> None:
    from bertie.ops.triton import short_attention_kernels as kernels

    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
    types |= {"tiles_ptr": "*i32", "log2_scale": "fp32"}
    for with_rotary, configs in ((False, short_attention.TILES), (True, short_attention.ROTARY_TILES)):
        if keys not in configs or (with_rotary and width != next_power_of_2(width)):
            continue
        config = configs[keys]
        constants: dict[str, Any] = {"HAS_WINDOW": window, "CAUSAL": causal, "ROTARY": with_rotary}
        constants |= {"HEADS": 12, "GROUP_SIZE": 3}
        constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        constants |= {"HEAD_DIM": width, "BLOCK_D": next_power_of_2(width)}
        tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
        unused = {} if with_rotary else dict.fromkeys(tables)
        stages = 1 if width > 64 else config.stages
        compile_kernel(kernels.attention_forward, types | tables, constants | unused, config.warps, stages)


@pytest.mark.parametrize("tile", disentangled_attention.OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "terms"), [("bf16", "bias"), ("fp16", "bias"), ("bf16", "none"), ("bf16", "dropout")]
)
def test_disentangled_attention(dtype: str, terms: str, tile: int) -> None:
    """With a bias, with dropout, and with no relative position terms at all."""
    from bertie.ops.triton import disentangled_attention_kernels as kernels

    single = dict.fromkeys(("lse_ptr", "delta_ptr", "bias_ptr", "dbias_ptr", "dc2p_ptr", "dp2c_ptr"), "*fp32")
    numbers = dict.fromkeys(("scale", "log2_scale", "keep_scale"), "fp32")
    constants: dict[str, Any] = {"C2P": False, "P2C": False, "BIAS": terms == "bias", "DROPOUT": terms == "dropout"}
    constants |= {"FP16_TERMS": True, "HEADS": 12, "HEAD_DIM": 64, "BLOCK_D": 64, "B": tile}
    constants |= {} if terms == "dropout" else {"seed_ptr": None}
    configs = (disentangled_attention.OPTIONS if terms == "bias" else disentangled_attention.PLAIN_OPTIONS)[tile]
    all_kernels = (kernels.attention_forward, kernels.attention_backward_q, kernels.attention_backward_kv)
    for kernel, config in zip(all_kernels, configs, strict=True):
        pointers = {name: f"*{dtype}" for name in kernel.arg_names if name.endswith("_ptr")}
        types = pointers | single | numbers | {"tiles_ptr": "*i32", "seed_ptr": "*i64"}
        compile_kernel(kernel, types, constants, config.warps, config.stages)


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("width", [1, 8, 100, 384, 512, 768, 1024, 1025, 2048, 4096, 8192])
def test_block_sizes(width: int, backward: int) -> None:
    """Tiles of a norm divide the eight rows of a program; blocks hold a row, or are powers of two that cover it."""
    blocks = triton_norm._block_sizes(width, backward)
    assert width <= blocks["BLOCK"] < 2 * max(1, width)
    assert 8 % blocks["BLOCK_ROWS"] == 0
    blocks = triton_activation._block_sizes(width, backward)
    for size in blocks.values():
        assert size == next_power_of_2(size)
    assert blocks["BLOCK"] <= triton_activation.MAX_BLOCK
