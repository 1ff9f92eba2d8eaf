"""AdamW in the compiled library beside PyTorch's: the same weights, with sparse and dense gradients, resumed or not."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bertie.ops.native import training as native
from bertie.training.cpu_adamw import CpuAdamW, is_supported, use_sparse_gradients
from tests.ops.forced import turn_off

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler was here when the package was built")
BETAS, ROWS, WIDTH = (0.9, 0.99), 200, 37


class Subject:
    """A table and a linear layer, trained by one optimizer."""

    def __init__(self, compiled: bool, sparse: bool) -> None:
        torch.manual_seed(1)
        self.words, self.linear = nn.Embedding(ROWS, WIDTH, padding_idx=0, sparse=sparse), nn.Linear(WIDTH, 5)
        self.compiled = compiled
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [self.words.weight, self.linear.weight], "lr": 1e-3, "weight_decay": 0.1},
            {"params": [self.linear.bias], "lr": 2e-3, "weight_decay": 0.0},
        ]
        return CpuAdamW(groups, BETAS) if self.compiled else torch.optim.AdamW(groups, betas=BETAS)

    def step(self, step: int, clip: float = 1.0, tied: bool = False) -> float:
        ids = torch.randint(0, 20 + 2 * step, (13,), generator=torch.Generator().manual_seed(step))
        for part in (ids[:5], ids[5:]):  # two micro-batches
            hidden = self.words(part)
            loss = self.linear(hidden).pow(2).sum() * 3
            loss = loss + (hidden @ self.words.weight.T).pow(2).mean() if tied else loss
            loss.backward()
        parameters = [self.words.weight, *self.linear.parameters()]
        if isinstance(self.optimizer, CpuAdamW):
            norm = self.optimizer.clip(clip)
        else:
            norm = float(nn.utils.clip_grad_norm_(parameters, clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> list[torch.Tensor]:
        return [self.words.weight, *self.linear.parameters()]


@pytest.mark.parametrize(("sparse", "ties"), [(True, False), (True, True), (False, False)])
def test_same_weights(sparse: bool, ties: bool) -> None:
    fast, slow = Subject(True, sparse), Subject(False, False)
    for step in range(40):
        tied = ties and step % 10 == 9  # the gradient is then dense
        assert fast.step(step, tied=tied) == pytest.approx(slow.step(step, tied=tied), rel=1e-4)
        if step == 20:  # resumed
            state = deepcopy(fast.optimizer.state_dict())
            fast.optimizer = fast.make_optimizer()
            fast.optimizer.load_state_dict(state)
    assert_close(fast.weights(), slow.weights(), atol=1e-5, rtol=1e-5)
    if not ties:  # then the last rows had weight decay alone
        assert_close(fast.words.weight[150:], Subject(True, True).words.weight[150:] * (1 - 1e-4) ** 40)


def test_state_is_that_of_pytorch() -> None:
    """A run that started with one continues with the other."""
    fast, slow = Subject(True, True), Subject(False, False)
    for subject in (fast, slow):
        for step in range(5):
            subject.step(step)
    states = deepcopy((fast.optimizer.state_dict(), slow.optimizer.state_dict()))
    assert_close(states[0]["state"], states[1]["state"], atol=1e-6, rtol=1e-4)
    fast.optimizer.load_state_dict({"state": states[1]["state"], "param_groups": states[0]["param_groups"]})
    fast.step(5), slow.step(5)
    assert_close(fast.weights(), slow.weights(), atol=1e-5, rtol=1e-5)


def test_clipping_is_for_one_step() -> None:
    subject = Subject(True, True)
    subject.step(0, clip=1e-9)
    assert subject.optimizer._gradient_scale == 1.0  # type: ignore[attr-defined]
    subject.linear(subject.words(torch.tensor([3]))).sum().backward()
    subject.optimizer.clip(1e-9)  # type: ignore[attr-defined]
    subject.optimizer.zero_grad()  # as after running out of memory
    assert subject.optimizer._gradient_scale == 1.0  # type: ignore[attr-defined]


def test_a_weight_without_gradient_keeps_its_version() -> None:
    """Copies of weights are kept while the version is the same."""
    subject = Subject(True, True)
    versions = [weight._version for weight in subject.weights()]
    subject.words.weight.requires_grad_(False)
    subject.step(0)
    changed = [weight._version != version for weight, version in zip(subject.weights(), versions, strict=True)]
    assert changed == [False, True, True]


def test_what_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Parameter(torch.zeros(3, 4))
    assert is_supported([plain])
    assert not is_supported([plain, nn.Parameter(torch.zeros(2, dtype=torch.float64))])
    assert not is_supported([nn.Parameter(torch.zeros(3, 4).T)])
    turn_off(monkeypatch, "native.training.optimizer")
    assert not is_supported([plain])


def test_sparse_gradients_need_the_optimizer() -> None:
    subject = Subject(True, False)
    use_sparse_gradients(subject.words, subject.optimizer)
    assert subject.words.sparse
    use_sparse_gradients(subject.words, torch.optim.AdamW([subject.words.weight]))
    assert not subject.words.sparse
