"""The same on a GPU: attention against its twin in every precision, and each family's encoder against the CPU's."""

from __future__ import annotations

import json

import pytest
import torch
from torch.testing import assert_close

from bertie.config import BlockSparse, Disentangled, Full, Pattern, Sliding
from bertie.families import blueprint
from bertie.kernels import Relative, attend, gpu, reference
from bertie.model import Model
from bertie.nn.positions import relative_rows
from bertie.text.batch import Batch
from tests.parity.tiny import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LENGTHS = [1, 2, 15, 16, 17, 127, 128, 129, 300, 1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("pattern", [Full(), Sliding(5), Sliding(64), BlockSparse(16, 1)], ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_attention(dtype: torch.dtype, pattern: Pattern, relative: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(LENGTHS), 2, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
    leaves, wide = [q, k, v], [x.detach().float().cpu().requires_grad_() for x in (q, k, v)]
    terms = [None, None]
    if relative:
        scheme = Disentangled(("c2p", "p2c"), 64, buckets=16)
        table = torch.randn(2 * scheme.span, 2, 64, dtype=dtype, device="cuda", requires_grad=True)
        leaves.append(table)
        wide.append(table.detach().float().cpu().requires_grad_())
        terms = [
            Relative(relative_rows(scheme, max(LENGTHS), torch.device(device)), keys=one, queries=one)
            for device, one in (("cuda", table), ("cpu", wide[-1]))
        ]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    fast = attend(q, k, v, tuple(LENGTHS), cu, scale=0.1, pattern=pattern, relative=terms[0])
    slow = reference.attend(*wide[:3], tuple(LENGTHS), scale=0.1, pattern=pattern, relative=terms[1])
    # Relative terms are three products in half precision instead of one.
    assert_close(fast.float().cpu(), slow, atol=TOLERANCE[dtype] * (2 if relative else 1), rtol=0)
    upstream = torch.randn_like(slow)
    got = torch.autograd.grad(fast, leaves, upstream.to(dtype).cuda())
    for one, other in zip(got, torch.autograd.grad(slow, wide, upstream), strict=True):
        scale = float(other.abs().max())
        assert_close(one.float().cpu(), other, atol=2 * TOLERANCE[dtype] * max(scale, 1), rtol=0)


def test_which_path_half_precision_takes() -> None:
    q = torch.zeros(1, 2, 64, dtype=torch.bfloat16, device="cuda")
    assert gpu.can(q, Full(), None, None, 0.0)
    assert not gpu.can(q.float(), Full(), None, None, 0.0)


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_encoders(name: str) -> None:
    from transformers import AutoConfig

    tiny = TINY[name]
    try:
        raw = json.loads(AutoConfig.for_model(tiny.model_type, **tiny.config).to_json_string())
    except ValueError as error:
        pytest.skip(f"this transformers does not know it: {error}")
    plan = blueprint(raw, None)
    torch.manual_seed(0)
    model = Model(plan.encoder, {}).eval()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    ids = [torch.randint(3, 60, (n,)).tolist() for n in (1, tiny.longest, 7, 7, tiny.longest, 2)]
    batch = Batch.from_ids(ids)
    on_cpu = model.hidden(batch)
    on_gpu = model.cuda()
    assert_close(on_gpu.hidden(batch.to("cuda")).cpu(), on_cpu, atol=5e-5, rtol=0)
    for dtype in (torch.bfloat16, torch.float16):
        half = on_gpu.to(dtype).hidden(batch.to("cuda")).float().cpu()
        assert torch.isfinite(half).all()
        cosine = torch.cosine_similarity(half, on_cpu, dim=-1)
        assert cosine.mean() > 0.98, f"{dtype}: mean cosine {cosine.mean():.4f}"
