"""The throughput of large matrix multiplications on a device: the ceiling that models are compared with."""

from __future__ import annotations

import time

import torch

from bertie.errors import ConfigError

REPEATS = 8  # multiplications between two readings of the clock


class GemmBenchmark:
    """Multiplies two large square matrices: 8192 × 8192 on a GPU, 1024 × 1024 on a CPU.

    >>> GemmBenchmark("cpu", torch.float32).flops_per_s() > 1e8
    True
    """

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        device = torch.device(device)
        self.dtype, self.side = dtype, 1024 if device.type == "cpu" else 8192
        generator = torch.Generator(device).manual_seed(0)
        # Not zeros: chips draw less power for these, and run faster.
        self._a, self._b = (
            (20 * torch.randn(self.side, self.side, generator=generator, device=device)).to(dtype) for _ in range(2)
        )
        wide = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16}.get(dtype, dtype)
        self._out = torch.empty(self.side, self.side, dtype=wide, device=device)
        self._scales = torch.ones(self.side, device=device)
        self._run(1)  # the library initializes itself

    @property
    def nbytes(self) -> int:
        """Memory of the matrices."""
        return sum(x.numel() * x.element_size() for x in (self._a, self._b, self._out, self._scales))

    def flops_per_s(self) -> float:
        """Floating-point (or integer) operations per second of a few multiplications."""
        return REPEATS * 2 * self.side**3 / self._run(REPEATS)

    def best(self, seconds: float) -> float:
        """The highest throughput within so many seconds."""
        if not seconds > 0:
            raise ConfigError(f"seconds={seconds} must be greater than 0")
        highest, until = self.flops_per_s(), time.perf_counter() + seconds
        while time.perf_counter() < until:
            highest = max(highest, self.flops_per_s())
        return highest

    def _run(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self._multiply()
        self._out[0, 0].item()  # waits for the device
        return time.perf_counter() - began

    def _multiply(self) -> None:
        if self.dtype == torch.int8:
            torch._int_mm(self._a, self._b, out=self._out)
        elif self.dtype == torch.float8_e4m3fn:  # as ops/triton/fp8.py calls it
            torch._scaled_mm(
                *(self._a, self._b.T, self._scales[:, None], self._scales[None]),
                out_dtype=self._out.dtype,
                use_fast_accum=True,
                out=self._out,
            )
        else:
            torch.mm(self._a, self._b, out=self._out)
