"""Bad input names the field, the value and what is allowed; layers and heads do as their configs say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from bertie.config import Disentangled, Full, HeadConfig, Learned, NormConfig, Rotary
from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.nn import attention
from bertie.nn.encoder import Encoder
from bertie.nn.model import Model
from bertie.nn.pooling import MODES, Pooling
from bertie.ops.attention import attend
from bertie.ops.contracts import AttentionInputs
from bertie.text.batch import Batch
from tests.test_config import GOOD


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([[1, 50]], "ids holds 50; allowed are 0 to 49"),
        ([[-1]], "ids holds -1"),
        ([[1] * 33], "has 33 tokens.*has 32 positions"),
    ],
)
def test_ids_outside_the_tables(ids: list[list[int]], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Encoder(GOOD)(Batch.from_ids(ids))


def test_segments_outside_the_table() -> None:
    cfg = replace(GOOD, embeddings=replace(GOOD.embeddings, segments=2))
    with pytest.raises(InputError, match="segments holds 2; allowed are 0 to 1"):
        Encoder(cfg)(Batch.from_ids([[1, 2]], [[0, 2]]))


def test_a_batch_built_by_hand_is_checked() -> None:
    batch = Batch.from_ids([[1, 2]])
    with pytest.raises(InputError, match="ids holds 51"):
        Encoder(GOOD)(replace(batch, ids=batch.ids + 49))


@pytest.mark.parametrize("positions", [(Learned(34, skip_id=1),), (Rotary((10.0, 20.0)),)], ids=str)
def test_a_pass_does_not_synchronize(positions: tuple[Learned | Rotary, ...]) -> None:
    encoder = Encoder(replace(GOOD, positions=positions)).to("meta")  # where every question is an error
    batch = Batch.from_ids([[1, 2, 3], [4]]).to("meta")
    pool = Pooling(MODES, include_prompt=False)
    assert pool(encoder(batch), batch, [1, 0]).shape == (2, len(MODES) * GOOD.width)


def test_layers_of_a_pass_share_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward pass has its own."""
    seen: list[dict[Any, Any]] = []

    def spy(inputs: AttentionInputs, backends: Any) -> Any:
        assert inputs.cache is not None
        inputs.cache[len(inputs.cache)] = torch.zeros(0)
        seen.append(inputs.cache)
        return attend(inputs, backends)

    monkeypatch.setattr(attention, "attend", spy)
    encoder, batch = Encoder(GOOD), Batch.from_ids([[1, 2, 3], [4]])
    for _ in range(2):
        encoder(batch)
    assert [len(cache) for cache in seen] == [2, 2, 2, 2]
    assert seen[0] is seen[1]
    assert seen[1] is not seen[2]


@pytest.mark.parametrize("relative", [False, True])
def test_gradient_checkpointing_gives_identical_gradients(relative: bool) -> None:
    cfg = replace(GOOD, dropout=0.3, attention_dropout=0.3, layer_map=(0, 1, 0), patterns=(Full(),) * 3)
    if relative:
        cfg = replace(cfg, positions=(Disentangled(("c2p", "p2c"), 8),))
    torch.manual_seed(0)
    encoder = Encoder(cfg)
    batch = Batch.from_ids([[1, 2, 3], [4]])

    def step() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        out = encoder(batch)
        return out, *torch.autograd.grad(out.sin().sum(), list(encoder.parameters()))

    plain = step()
    calls = []
    for block in encoder.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    encoder.gradient_checkpointing = True
    again = step()
    assert len(calls) == 2 * cfg.depth  # once on the way there, once on the way back
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)
    encoder.eval()(batch)
    assert len(calls) == 3 * cfg.depth


def test_hidden_states_of_all_layers() -> None:
    encoder = Encoder(GOOD).eval()
    batch = Batch.from_ids([[1, 2, 3]])
    states = list(encoder.hidden_states(batch))
    assert len(states) == GOOD.depth + 1
    assert_close(states[-1], encoder(batch))


def test_shared_blocks_share_weights() -> None:
    shared = Encoder(replace(GOOD, layer_map=(0, 0)))
    assert len(shared.blocks) == 1
    own = Encoder(GOOD)
    for block in own.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    own.embeddings.load_state_dict(shared.embeddings.state_dict())
    batch = Batch.from_ids([[1, 2, 3], [4]])
    assert_close(own.eval()(batch), shared.eval()(batch))


def test_dropout_only_in_training() -> None:
    torch.manual_seed(0)
    encoder = Encoder(replace(GOOD, dropout=0.5, attention_dropout=0.5))
    batch = Batch.from_ids([[1, 2, 3]])
    assert not torch.equal(encoder(batch), encoder(batch))
    encoder.eval()
    assert torch.equal(encoder(batch), encoder(batch))


def test_unknown_head() -> None:
    model = Model(GOOD, {"tag": HeadConfig(kind="token", outputs=3)})
    with pytest.raises(NotFoundError, match="no head 'answer'; it has: tag"):
        model(Batch.from_ids([[1]]), "answer")


def test_tied_head_of_another_width() -> None:
    with pytest.raises(ConfigError, match="width 4 cannot use word embeddings of width 8"):
        Model(GOOD, {"mlm": HeadConfig(kind="vocabulary", outputs=50, dense=4, norm=NormConfig(), tied=True)})


def test_questions_need_a_separator() -> None:
    head = HeadConfig(kind="token", outputs=2, globals="before_separator", separator_id=9)
    model = Model(replace(GOOD, global_tokens=True), {"answer": head})
    with pytest.raises(InputError, match="text 1 of the batch has no separator"):
        model(Batch.from_ids([[1, 9, 9, 2], [1, 2]]), "answer")
    chosen = model.head("answer").global_tokens(Batch.from_ids([[1, 5, 9, 9, 2, 9], [1, 9, 9, 3]]))
    assert chosen is not None
    assert chosen.tolist() == [True, True, False, False, False, False, True, False, False, False]
