"""AdamW on a CPU: one fused pass over parameters, gradients and moments; sparse updates of embeddings.

A step reads few rows of the word embeddings, so their gradient is sparse. Rows that never had a gradient have zero
moments: for them AdamW reduces to weight decay. This is exact, unlike `torch.optim.SparseAdam`. The state has the
format of `torch.optim.AdamW`, and the result is the same up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bertie import switches
from bertie.ops.native import training as native

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def is_supported(parameters: Sequence[Tensor]) -> bool:
    """Whether the compiled library can update these parameters."""
    return (
        native.instruction_level() is not None
        and not switches.is_disabled("native.training.optimizer")
        and all(
            x.device.type == "cpu" and type(x.data) is Tensor and x.dtype == torch.float32 and x.is_contiguous()
            for x in parameters
        )
    )


class CpuAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` in the compiled library; `clip` replaces `clip_grad_norm_`."""

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> None:
        super().__init__(groups, betas=betas)
        self._gradient_scale = 1.0
        self._active: dict[Tensor, Tensor] = {}  # of tables with sparse gradients: (R,) rows that ever had a gradient

    def clip(self, max_norm: float) -> float:
        """Scale the gradients of the next step so that their norm is at most `max_norm`; returns the norm."""
        gradients = [_dense_part(self._gradient(p)) for group in self.param_groups for p in group["params"] if has(p)]
        norm = math.sqrt(native.sum_of_squares(gradients))
        self._gradient_scale = min(1.0, max_norm / (norm + CLIP_EPS))
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients."""
        self._gradient_scale = 1.0
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of this class or of `torch.optim.AdamW`."""
        super().load_state_dict(dict(state_dict))
        self._active.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        updated = [parameter for group in self.param_groups for parameter in group["params"] if has(parameter)]
        dense: dict[tuple[float, ...], tuple[list[Tensor], list[float]]] = {}
        for group in self.param_groups:
            options = (*group["betas"], group["eps"], self._gradient_scale)
            for parameter in filter(has, group["params"]):
                state = self._state(parameter)
                state["step"] += 1
                factors = _factors(group, state["step"].item())
                gradient = self._gradient(parameter)
                averages = (state["exp_avg"], state["exp_avg_sq"])
                if gradient.is_sparse:
                    self._update_rows(parameter, gradient, averages, factors, options)
                    continue
                self._active.pop(parameter, None)
                tensors, all_factors = dense.setdefault(options, ([], []))
                tensors += (parameter, gradient, *averages)
                all_factors += factors
        for options, (tensors, all_factors) in dense.items():
            native.adamw(tensors, all_factors, options)
        # The kernel writes without incrementing version counters, which tell that a copy of a weight is outdated.
        torch.autograd.graph.increment_version(updated)
        self._gradient_scale = 1.0

    def _gradient(self, parameter: Tensor) -> Tensor:
        """The gradient, contiguous or coalesced."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse and not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        return gradient if gradient.is_sparse else gradient.contiguous()

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state

    def _update_rows(
        self,
        parameter: Tensor,
        gradient: Tensor,
        averages: tuple[Tensor, Tensor],
        factors: tuple[float, ...],
        options: tuple[float, ...],
    ) -> None:
        active = self._active.get(parameter)
        if active is None:
            # From the moments: a resumed run, or one that had dense gradients, continues exactly.
            first, second = averages
            active = self._active[parameter] = (first.ne(0) | second.ne(0)).any(1).to(torch.uint8)
        rows = gradient.indices()[0]
        active[rows] = 1
        gradient_row = torch.full((len(parameter),), -1, dtype=torch.int32)
        gradient_row[rows] = torch.arange(len(rows), dtype=torch.int32)
        native.adamw_rows((parameter, _dense_part(gradient), *averages), gradient_row, active, factors, options)


def has(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient."""
    return parameter.grad is not None


def use_sparse_gradients(words: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    """Use sparse gradients for the word embeddings if the optimizer is a `CpuAdamW` and they are not parametrized."""
    words.sparse = isinstance(optimizer, CpuAdamW) and "weight" in words._parameters


def _dense_part(gradient: Tensor) -> Tensor:
    return gradient.values().contiguous() if gradient.is_sparse else gradient


def _factors(group: Mapping[str, Any], step: float) -> tuple[float, float, float]:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return 1 - lr * group["weight_decay"], lr / (1 - beta1**step), (1 - beta2**step) ** -0.5
