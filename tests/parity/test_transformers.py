"""Hidden states, logits and gradients of all parameters equal to transformers', text by text, in ragged batches."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers.core_model_loading import revert_weight_conversion

from bertie.checkpoints.model_spec import model_spec
from bertie.nn.model import Model
from bertie.text.batch import Batch
from tests.parity.tiny import CASES, TINY, build, texts


class Memory:
    """A checkpoint that lies in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def as_saved(theirs: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names that files have: for some families transformers has others in memory."""
    named: dict[str, torch.Tensor] = revert_weight_conversion(theirs, tensors)
    return named


def ours(theirs: Any) -> tuple[Model, Any]:
    config = json.loads(theirs.config.to_json_string()) | {"architectures": [type(theirs).__name__]}
    source = Memory(as_saved(theirs, theirs.state_dict()))
    plan = model_spec(config, source.shapes())
    model = Model(plan.encoder, plan.heads).eval()
    plan.weight_map.check(model, source.shapes(), plan.family.dropped)
    plan.weight_map.load(model, source)
    return model, plan


def their_outputs(theirs: Any, ids: list[int], segments: list[int]) -> dict[str, Any]:
    """transformers' outputs for one text alone, under our names."""
    if type(theirs).__name__.startswith("BigBird") and theirs.config.attention_type == "block_sparse":
        # It switches to full attention for a short text, and never back.
        (getattr(theirs, "bert", theirs)).set_attention_type("block_sparse")
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    # Left out where there are none: BigBird's reader then makes some of its own.
    if any(segments) and "token_type_ids" in inspect.signature(theirs.forward).parameters:
        inputs["token_type_ids"] = torch.tensor([segments])
    choice = type(theirs).__name__.endswith("ForMultipleChoice")
    if choice:
        inputs = {k: v[:, None] for k, v in inputs.items()}
    out = theirs(**inputs)
    named = {}
    if hasattr(out, "last_hidden_state"):
        named["hidden"] = out.last_hidden_state[0]
        if theirs.config.output_hidden_states:
            named["layers"] = [state[0, : len(ids)] for state in out.hidden_states]
        if getattr(out, "pooler_output", None) is not None:
            named["pooler"] = out.pooler_output
    elif hasattr(out, "start_logits"):
        named["answer"] = torch.stack((out.start_logits[0], out.end_logits[0]), dim=-1)
    elif hasattr(out, "prediction_logits"):
        named["mlm"] = out.prediction_logits[0]
        named["sop" if hasattr(out, "sop_logits") else "nsp"] = (
            out.sop_logits if hasattr(out, "sop_logits") else out.seq_relationship_logits
        )
    else:
        suffix = type(theirs).__name__.split("For")[1]
        name = {
            "MaskedLM": "mlm",
            "SequenceClassification": "classify",
            "TokenClassification": "tag",
            "MultipleChoice": "choice",
            "NextSentencePrediction": "nsp",
            "PreTraining": "rtd",
        }[suffix]
        logits = out.logits
        per_token = name in ("mlm", "tag", "rtd")
        named[name] = (logits[0][:, None] if name == "rtd" else logits[0]) if per_token else logits
    return named


@pytest.mark.parametrize(("name", "suffix"), CASES)
@pytest.mark.parametrize("count", [1, 4, 7])
def test_outputs_and_gradients(name: str, suffix: str, count: int) -> None:
    theirs = build(name, suffix)
    model, plan = ours(theirs)
    ids, segments = texts(name, suffix, count, seed=count)
    batch = Batch.from_ids(ids, segments)

    expected = [their_outputs(theirs, i, s) for i, s in zip(ids, segments, strict=True)]
    found = {}
    for key in expected[0]:
        found[key] = model.hidden(batch) if key == "hidden" else model(batch, key)
        wanted = torch.cat([e[key] for e in expected])
        assert_close(found[key], wanted, atol=1e-5, rtol=0)

    if suffix.endswith("Model"):
        check_every_layer(theirs, model, batch, ids, segments)

    torch.manual_seed(1)
    weights = {key: torch.randn_like(value) / len(batch.ids) for key, value in found.items()}
    sum((weights[key] * torch.cat([e[key] for e in expected])).sum() for key in found).backward()
    sum((weights[key] * found[key]).sum() for key in found).backward()
    check_gradients(theirs, model, plan)


@torch.no_grad()
def check_every_layer(theirs: Any, model: Model, batch: Batch, ids: list[list[int]], segments: list[list[int]]) -> None:
    theirs.config.output_hidden_states = True
    wanted = [their_outputs(theirs, i, s)["layers"] for i, s in zip(ids, segments, strict=True)]
    theirs.config.output_hidden_states = False
    found = list(model.encoder.hidden_states(batch))
    assert len(found) == len(wanted[0]) == model.config.depth + 1
    for layer, state in enumerate(found):
        assert_close(state, torch.cat([one[layer] for one in wanted]), atol=1e-5, rtol=0)


def check_gradients(theirs: Any, model: Model, plan: Any) -> None:
    gradients = {
        key: torch.zeros_like(p) if p.grad is None else p.grad
        for key, p in theirs.named_parameters(remove_duplicate=False)
    }
    gradients = as_saved(theirs, gradients)
    parameters = dict(model.named_parameters())
    moved = 0
    for rule in plan.weight_map.rules:
        wanted = rule.read([gradients[plan.weight_map.rename(key)] for key in rule.theirs])
        got = parameters[rule.ours].grad
        got = torch.zeros_like(wanted) if got is None else got
        # Of a gradient of 9, float32 has a digit less behind the point than of one of 1.
        atol = 1e-5 * max(1.0, float(wanted.abs().max()))
        assert_close(got, wanted, atol=atol, rtol=0, msg=lambda m, rule=rule: f"{rule.ours}: {m}")
        moved += int(wanted.abs().max() > 1e-4)
    assert moved > len(plan.weight_map.rules) / 2, "too few parameters had a gradient to compare"


def test_every_family_is_here() -> None:
    from bertie.checkpoints.model_spec import FAMILIES

    assert {tiny.model_type for tiny in TINY.values()} == set(FAMILIES)


def test_bigbirds_reader_makes_segments() -> None:
    """Its tokenizer gives none: this head alone counts what follows the first separator as the second segment."""
    theirs = build("big_bird", "ForQuestionAnswering")
    model, _ = ours(theirs)
    separator = theirs.config.sep_token_id
    ids = [[1, 5, 6, separator, 10, 11, 12, separator], [1, 7, separator, 8, 9]]
    found = model(Batch.from_ids(ids), "answer")
    wanted = torch.cat([their_outputs(theirs, i, [0] * len(i))["answer"] for i in ids])
    allowed = wanted[:, 0] > -1e5  # the question's scores are lowered by a million there
    assert allowed.tolist() == [True, *[False] * 3, *[True] * 5, *[False] * 2, *[True] * 2]
    assert_close(found[allowed], wanted[allowed], atol=1e-5, rtol=0)
