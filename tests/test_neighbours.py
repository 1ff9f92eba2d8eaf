"""Same text, same answer: a text alone and in any batch gives equal results, for every family."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import AutoConfig

from bertie.checkpoints.model_spec import model_spec
from bertie.config import HeadConfig, HeadName
from bertie.nn.model import Model
from bertie.text.batch import Batch
from tests.parity.tiny import TINY


@cache
def fresh(name: str) -> Model:
    """A random model with every head of its family."""
    tiny = TINY[name]
    raw = json.loads(AutoConfig.for_model(tiny.model_type, **tiny.config).to_json_string())
    plan = model_spec(raw, None)
    torch.manual_seed(0)
    model = Model(
        plan.encoder, {"classify": _text_head(plan.encoder.width), "tag": HeadConfig(kind="token", outputs=3)}
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@cache
def exact(name: str) -> Model:
    return deepcopy(fresh(name)).double()


def _text_head(width: int) -> HeadConfig:
    return HeadConfig(kind="text", outputs=3, pooling="mean", dense=width, activation="tanh", globals="first")


@pytest.mark.parametrize("name", TINY)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
@torch.no_grad()
def test_alone_and_in_any_batch(name: str, data: st.DataObject) -> None:
    """In double precision nothing but a neighbour could make a difference; in single, rounding makes a small one."""
    longest = TINY[name].longest
    length = st.one_of(st.sampled_from([1, 2, longest]), st.integers(1, longest))
    lengths = data.draw(st.lists(length, min_size=2, max_size=7))
    chosen = data.draw(st.integers(0, len(lengths) - 1))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    ids = [torch.randint(0, 60, (n,)).tolist() for n in lengths]
    batch, alone = Batch.from_ids(ids), Batch.from_ids([ids[chosen]])
    start = sum(lengths[:chosen])
    heads: list[HeadName] = ["classify", "tag"]
    for head, (model, atol) in product(heads, ((exact(name), 1e-13), (fresh(name), 2e-6))):
        together = model(batch, head)
        mine = together[[chosen]] if head == "classify" else together[start : start + lengths[chosen]]
        assert_close(mine, model(alone, head), atol=atol, rtol=0)
        assert torch.equal(together, model(batch, head)), "the same batch twice"
