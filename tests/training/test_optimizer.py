"""Groups, schedule, freezing and updates, against transformers' schedules and an AdamW written by hand."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from bertie.checkpoints.model_spec import model_spec
from bertie.errors import ConfigError, NotFoundError
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.text.batch import Batch
from bertie.training import lora
from bertie.training.optimizer import (
    apply_freezing,
    build_optimizer,
    frozen_layers,
    param_groups,
    set_lr,
)
from bertie.training.schedule import Schedule
from tests.parity.tiny import TINY
from tests.training.test_schedule import theirs

BATCH = [[2, 5, 6, 7, 3], [2, 8, 3], [2, 9, 10, 11, 12, 13, 14, 3]]


def tiny(name: str, suffix: str = "ForSequenceClassification", *, layers: int = 2, std: float = 0.25) -> Model:
    """A model of a family, of random weights; in evaluation mode, without dropout."""
    shape = TINY[name]
    depth = {} if "layer_types" in shape.config else {"num_hidden_layers": layers}
    raw = {"model_type": shape.model_type, "architectures": [shape.stem + suffix], **shape.config, **depth}
    plan = model_spec(raw, None)
    model = Model(plan.encoder, dict(plan.heads))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.2 * noise if "norm" in key and key.endswith("weight") else std * noise)
    return model.eval()


def loss_of(model: Model, shift: float = 0.0) -> Tensor:
    logits = model(Batch.from_ids(BATCH), "classify")
    return torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 0])) + shift * logits.square().mean()


def named(model: Model, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """From a parameter's name to its group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(parameter)], group) for group in groups for parameter in group["params"]]
    assert len(found) == len(dict(found)), "a parameter is in two groups"
    return dict(found)


# --- groups ---


def test_all_weights_train_and_only_matrices_decay() -> None:
    for name in ("bert", "albert", "modernbert", "deberta-v2", "mpnet", "longformer"):
        model = tiny(name)
        groups = named(model, param_groups(model, "classify", Recipe(lr=1e-5, weight_decay=0.1)))
        assert set(groups) == {name for name, _ in model.named_parameters()}
        for key, group in groups.items():
            plain = key.endswith("bias") or "norm" in key or "post_" in key or "pre_" in key
            assert group["weight_decay"] == (0.0 if plain else 0.1), key
            assert group["scale"] == group["lr"] == 1e-5
        assert {group["name"].split(",")[0] for group in groups.values()} == {"encoder", "head"}


def test_layer_wise_learning_rates() -> None:
    model = tiny("bert", layers=3)
    groups = named(model, param_groups(model, "classify", Recipe(lr=0.01, head_lr=0.5, layer_decay=0.5)))
    for key, group in groups.items():
        if key.startswith("heads."):
            assert (group["scale"], group["name"].split(",")[0]) == (0.5, "head")
        elif key.startswith("encoder.blocks."):
            number = int(key.split(".")[2])
            assert group["scale"] == pytest.approx(0.01 * 0.5 ** (2 - number))
            assert group["name"].split(",")[0] == f"layer {number + 1}"
        else:
            assert group["scale"] == pytest.approx(0.01 * 0.5**3)
            assert group["name"].split(",")[0] == "embeddings"
    assert len({group["name"] for group in groups.values()}) == 10


def test_weights_outside_the_layers() -> None:
    recipe = Recipe(lr=0.01, layer_decay=0.5)
    model = tiny("modernbert")
    groups = named(model, param_groups(model, "classify", recipe))
    assert groups["encoder.norm.weight"]["scale"] == 0.01
    assert groups["encoder.norm.weight"]["name"] == "layer 3, no decay"
    for name, key in (
        ("deberta-v2", "relative.rows.weight"),
        ("deberta-v2", "conv.weight"),
        ("mpnet", "relative.rows.weight"),
    ):
        model = tiny(name)
        groups = named(model, param_groups(model, "classify", recipe))
        assert groups[f"encoder.{key}"]["scale"] == pytest.approx(0.01 * 0.5**2)
        assert groups[f"encoder.{key}"]["weight_decay"] > 0


def test_shared_blocks_count_as_their_topmost_layer() -> None:
    recipe = Recipe(lr=0.01, layer_decay=0.5)
    model = tiny("albert", layers=3)
    groups = named(model, param_groups(model, "classify", recipe))
    assert groups["encoder.blocks.0.ff.up.weight"]["scale"] == 0.01
    assert groups["encoder.embeddings.words.weight"]["scale"] == pytest.approx(0.01 / 8)
    model = tiny("albert-groups", layers=4)
    assert model.config.layer_map == (0, 0, 1, 1)
    groups = named(model, param_groups(model, "classify", recipe))
    assert groups["encoder.blocks.0.ff.up.weight"]["scale"] == pytest.approx(0.01 / 4)
    assert groups["encoder.blocks.1.ff.up.weight"]["scale"] == 0.01


def test_heads_that_are_not_trained_are_left_out() -> None:
    model = tiny("bert", "ForPreTraining")
    heads = set(model.heads)
    assert len(heads) > 1
    for chosen in ([one] for one in heads):
        groups = named(model, param_groups(model, chosen[0], Recipe()))
        assert {key.split(".")[1] for key in groups if key.startswith("heads.")} == set(chosen)
        assert set(groups) == set(named(model, param_groups(model, chosen, Recipe())))
    groups = named(model, param_groups(model, sorted(heads), Recipe()))
    assert set(groups) == {name for name, _ in model.named_parameters()}
    with pytest.raises(NotFoundError, match="no head 'classify'"):
        param_groups(model, "classify", Recipe())


def test_frozen_weights_are_left_out_unless_they_unfreeze() -> None:
    model = tiny("bert", layers=3)

    def blocks(recipe: Recipe) -> set[str]:
        keys = named(model, param_groups(model, "classify", recipe))
        return {key.split(".")[2] for key in keys if ".blocks." in key} | (
            {"e"} if any("words" in k for k in keys) else set()
        )

    assert blocks(Recipe(freeze=2)) == {"2"}
    assert blocks(Recipe(freeze="encoder")) == set()
    assert blocks(Recipe(freeze="encoder", unfreeze=1, epochs=3)) == {"1", "2"}
    assert blocks(Recipe(freeze="encoder", unfreeze=1, epochs=3.1)) == {"0", "1", "2", "e"}
    assert blocks(Recipe(freeze=2, unfreeze=1, epochs=0.5)) == {"2"}


# --- freezing ---


def test_layers_unfreeze_from_the_top() -> None:
    assert [frozen_layers(Recipe(freeze=4), epoch, 6) for epoch in (0, 1, 9)] == [4, 4, 4]
    assert [frozen_layers(Recipe(freeze=4, unfreeze=3), epoch, 6) for epoch in (0, 0.99, 1, 1.5, 2, 3)] == [
        4,
        4,
        1,
        1,
        0,
        0,
    ]
    assert frozen_layers(Recipe(freeze="encoder"), 2, 6) == 6
    assert frozen_layers(Recipe(), 0, 6) == 0
    with pytest.raises(ConfigError, match="freeze=7 must be at most 6"):
        frozen_layers(Recipe(freeze=7), 0, 6)


def training(model: Model) -> set[str]:
    """The parts that train."""
    keys = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {".".join(key.split(".")[1:3]) if ".blocks." in key else ".".join(key.split(".")[:2]) for key in keys}


def test_freezing() -> None:
    model = tiny("modernbert")
    rest = {"heads.classify"}
    top = {"encoder.norm", "blocks.2"}
    every = {"encoder.embeddings", "blocks.0", "blocks.1"} | top | rest
    assert training(model) == every
    assert not apply_freezing(model, "classify", Recipe(), 0)
    recipe = Recipe(freeze="encoder", unfreeze=1)
    expected = [rest, rest | top, rest | top | {"blocks.1"}, every, every]
    for epoch, wanted in enumerate(expected):
        assert apply_freezing(model, "classify", recipe, epoch) == (epoch < 4)
        assert training(model) == wanted
        assert not apply_freezing(model, ["classify"], recipe, epoch + 0.5)
    assert apply_freezing(model, "classify", Recipe(freeze=1), 0)
    assert training(model) == every - {"encoder.embeddings", "blocks.0"}
    assert apply_freezing(model, "classify", Recipe(freeze=3), 0)
    assert training(model) == rest


def test_freezing_a_shared_block_needs_all_of_its_layers() -> None:
    model = tiny("albert", layers=3)
    apply_freezing(model, "classify", Recipe(freeze=2), 0)
    assert training(model) == {"blocks.0", "heads.classify"}
    apply_freezing(model, "classify", Recipe(freeze=3), 0)
    assert training(model) == {"heads.classify"}


def test_other_heads_are_frozen() -> None:
    model = tiny("bert", "ForPreTraining")
    one, other = sorted(model.heads)[:2]
    apply_freezing(model, one, Recipe(), 0)
    assert f"heads.{one}" in training(model)
    assert f"heads.{other}" not in training(model)


def test_lora_trains_its_factors_and_the_head() -> None:
    model = tiny("bert")
    with pytest.raises(ConfigError, match="lora=2, but the model has no LoRA factors"):
        param_groups(model, "classify", Recipe(lora=2))
    lora.add(model, 2)
    with pytest.raises(ConfigError, match="lora=0, but the model has some LoRA factors"):
        apply_freezing(model, "classify", Recipe(), 0)
    recipe = Recipe(lora=2, lr=0.01, layer_decay=0.5)
    apply_freezing(model, "classify", recipe, 0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = named(model, param_groups(model, "classify", recipe))
    assert set(groups) == trained
    inside = {name for name in trained if not name.startswith("heads.")}
    assert len(inside) == 2 * 4 * 2  # layers, matrices, factors
    assert all(name.endswith((".a", ".b")) for name in inside)
    assert len(trained) == len(inside) + len(list(model.heads["classify"].parameters()))
    for name in inside:
        assert groups[name]["scale"] == pytest.approx(0.005 if ".blocks.0." in name else 0.01)
        assert groups[name]["weight_decay"] > 0


def test_frozen_weights_do_not_move() -> None:
    model = tiny("bert", layers=2)
    recipe = Recipe(freeze=1, unfreeze=1, epochs=2, lr=0.01, weight_decay=0.5)
    loss_of(model).backward()  # gradients of before, which must not count
    apply_freezing(model, "classify", recipe, 0)
    optimizer = build_optimizer(param_groups(model, "classify", recipe), "cpu", recipe)
    low, high = model.encoder.blocks[0].ff.up.weight, model.encoder.blocks[1].ff.up.weight
    for epoch in (0, 1):
        apply_freezing(model, "classify", recipe, epoch)
        before = low.detach().clone(), high.detach().clone()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(low, before[0]) == (epoch == 0)  # type: ignore[arg-type]
        assert not torch.equal(high, before[1])  # type: ignore[arg-type]


# --- updates ---


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_updates_equal_adamw_written_out(kind: Any) -> None:
    """Several steps of AdamW, each parameter with its rate and decay, written out."""
    recipe = Recipe(
        lr=2e-3, head_lr=1e-2, layer_decay=0.8, weight_decay=0.1, beta2=0.98, warmup=0.3, schedule=kind, max_grad_norm=0
    )
    total = 7
    model = tiny("bert")
    twin = copy.deepcopy(model).double()
    schedule = Schedule(recipe, total)
    optimizer = build_optimizer(param_groups(model, "classify", recipe), "cpu", recipe)
    rates = theirs(kind, 2, total)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in twin.named_parameters()}
    for step in range(total):
        set_lr(optimizer, schedule.factor(step))
        loss_of(model, shift=step / 10).backward()
        optimizer.step()
        optimizer.zero_grad()

        loss_of(twin, shift=step / 10).backward()
        with torch.no_grad():
            for name, p in twin.named_parameters():
                assert p.grad is not None
                below = 0 if "heads." in name else 1 - int(name.split(".")[2]) if ".blocks." in name else 2
                rate = rates[step] * (1e-2 if "heads." in name else 2e-3 * 0.8**below)
                p.mul_(1 - rate * (0.1 if p.ndim > 1 else 0.0))
                mean, square = moments[name]
                mean.mul_(0.9).add_(0.1 * p.grad)
                square.mul_(0.98).add_(0.02 * p.grad**2)
                p.sub_(rate * (mean / (1 - 0.9 ** (step + 1))) / ((square / (1 - 0.98 ** (step + 1))).sqrt() + 1e-8))
                p.grad = None
    start = tiny("bert").state_dict()
    for (name, ours), (_, other) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert not torch.equal(ours, start[name]), name
        if name.endswith("qkv.bias"):  # a key's bias has no gradient but rounding, and Adam makes that a full step
            (query, _, value), (a, _, b) = ours.chunk(3), other.chunk(3)
            ours, other = torch.cat((query, value)), torch.cat((a, b))
        assert_close(ours.double(), other, atol=2e-5, rtol=1e-4, msg=name)


def test_repeated_and_resumed_runs_are_identical() -> None:
    recipe = Recipe(lr=1e-3, layer_decay=0.9)

    def run(break_at: int | None) -> dict[str, Tensor]:
        model = tiny("deberta-v2")
        optimizer = build_optimizer(param_groups(model, "classify", recipe), "cpu", recipe)
        schedule = Schedule(recipe, 6)
        for step in range(6):
            if step == break_at:
                held = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = tiny("deberta-v2", std=0.1)
                optimizer = build_optimizer(param_groups(model, "classify", recipe), "cpu", recipe)
                model.load_state_dict(held[0])
                optimizer.load_state_dict(held[1])
            set_lr(optimizer, schedule.factor(step))
            loss_of(model, shift=step / 10).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    whole = run(None)
    for other in (run(None), run(3)):
        assert all(torch.equal(whole[key], other[key]) for key in whole)


def test_learning_rate_tensors_are_updated_in_place() -> None:
    """As on CUDA, where a captured graph holds on to them."""
    model = tiny("bert")
    recipe = Recipe(lr=0.25, head_lr=0.5)
    optimizer = build_optimizer(param_groups(model, "classify", recipe), "cpu", recipe)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]))
    held = [group["lr"] for group in optimizer.param_groups]
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25 * 0.5] * 2 + [0.5 * 0.5] * 2
    assert all(group["lr"] is one for group, one in zip(optimizer.param_groups, held, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_follows_the_schedule() -> None:
    """Played back with the same gradients, also after a resume from a state that lay on the CPU."""
    recipe = Recipe(lr=1e-3, head_lr=1e-2, weight_decay=0.1)
    model = tiny("bert").cuda()
    twin = tiny("bert")
    draw = torch.Generator().manual_seed(1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = torch.randn(q.shape, generator=draw)
        p.grad = q.grad.cuda()
    slow = build_optimizer(param_groups(twin, "classify", recipe), "cpu", recipe)
    fast = build_optimizer(param_groups(model, "classify", recipe), "cuda", recipe)
    factors = [0.25, 0.5, 1.0, 0.5, 0.125]
    set_lr(fast, factors[0])
    fast.step()  # makes the state
    held = io.BytesIO()
    torch.save(fast.state_dict(), held)
    held.seek(0)
    fast = build_optimizer(param_groups(model, "classify", recipe), "cuda", recipe)
    fast.load_state_dict(torch.load(held, map_location="cpu", weights_only=True))
    set_lr(fast, factors[1])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        fast.step()
    for factor in factors[1:]:
        set_lr(fast, factor)
        graph.replay()
    for factor in factors:
        set_lr(slow, factor)
        slow.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_close(p.cpu(), q, atol=1e-6, rtol=1e-5, msg=name)
