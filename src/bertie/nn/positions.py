"""Relative positions: the learned table and the row that each distance looks up.

(Learned absolute positions are added in embeddings.py; rotary embeddings are in ops/torch/eager.py.)
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from bertie.config import Bucketed, Disentangled, EncoderConfig
from bertie.nn.norms import build_norm


class RelativeTable(nn.Module):
    """The learned table of relative positions, shared by all layers."""

    def __init__(self, cfg: EncoderConfig, scheme: Bucketed | Disentangled) -> None:
        super().__init__()
        self.scheme = scheme
        if isinstance(scheme, Bucketed):
            self.rows = nn.Embedding(scheme.buckets, cfg.heads)
            self.norm = None
        else:
            self.rows = nn.Embedding(2 * scheme.span, cfg.width)
            self.norm = build_norm(scheme.norm, cfg.width) if scheme.norm else None

    def forward(self) -> Tensor:
        """-> (R, H) scores, or (R, D) embeddings."""
        rows: Tensor = self.rows.weight
        return rows if self.norm is None else self.norm(rows)


def relative_rows(scheme: Bucketed | Disentangled, max_len: int, device: torch.device) -> Tensor:
    """(2 · max_len − 1,) the table's row for each distance i − j of query i from key j, from −(max_len − 1) up."""
    # Built for the next power of two and sliced, so that few tables serve all lengths.
    size = 1 << max(0, max_len - 1).bit_length()
    return _cached_rows(device, scheme, size)[size - max_len : size + max_len - 1]


@lru_cache(maxsize=64)
def _cached_rows(device: torch.device, scheme: Bucketed | Disentangled, max_len: int) -> Tensor:
    # Kept on the device: copying it there would synchronize in every pass.
    with torch.inference_mode(False):  # a later pass may record gradients
        return _rows(scheme, max_len).to(device)


def _rows(scheme: Bucketed | Disentangled, max_len: int) -> Tensor:
    distance = torch.arange(-(max_len - 1), max_len)
    if isinstance(scheme, Bucketed):
        return _bidirectional_buckets(distance, scheme.buckets, scheme.max_distance)
    span = scheme.span
    if scheme.buckets is not None:
        distance = _log_buckets(distance, scheme.buckets, scheme.max_distance)
    return (distance + span).clamp(0, 2 * span - 1)


def _bidirectional_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """T5's bidirectional buckets: one per small distance, logarithmic for large ones."""
    half = buckets // 2
    exact = half // 2
    far = distance.abs()
    # In float32 throughout: the bucket of a large distance depends on the rounding of the original.
    log = exact + (torch.log(far.float() / exact) / math.log(max_distance / exact) * (half - exact)).long()
    return (distance < 0).long() * half + torch.where(far < exact, far, log.clamp(max=half - 1))


def _log_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """DeBERTa's signed buckets: one per distance up to buckets / 2, logarithmic beyond."""
    middle = buckets // 2
    near = (distance < middle) & (distance > -middle)
    far = torch.where(near, torch.tensor(middle - 1), distance.abs())
    log = torch.ceil(torch.log(far / middle) / torch.log(torch.tensor((max_distance - 1) / middle)) * (middle - 1))
    return torch.where(far <= middle, distance.float(), (log + middle) * distance.sign()).long()
