"""Pooling of hidden states into one embedding per text: the modes of sentence-transformers, on flat batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertie.errors import ConfigError, InputError
from bertie.ops import dispatch
from bertie.ops.triton.pooling import MODES as KERNEL_MODES
from bertie.text.batch import Batch, send

# In the order in which sentence-transformers concatenates the modes that its older configs enable by flags.
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
MIN_WEIGHT = 1e-9  # smallest sum of token weights to divide by


class Pooling(nn.Module):
    """Pool (T, D) hidden states into (B, D) embeddings; several modes are concatenated to (B, modes * D).

    `cls` and `lasttoken` take a text's first and last token; `max` and `mean` are over its tokens;
    `mean_sqrt_len_tokens` is the sum divided by the square root of the length; `weightedmean` weights a text's n-th
    token by n. With `include_prompt=False` a text's first tokens, as many as its prompt has, are left out. With
    `token_weights`, one weight per token of the vocabulary (SIF or IDF), states are multiplied by them first, and means
    divide by their sum; a weight that training has driven below 0 counts as 0.

    >>> batch = Batch.from_ids([[101, 7592, 102], [101, 102]])
    >>> Pooling("mean")(torch.arange(10.0).view(5, 2), batch).tolist()
    [[2.0, 3.0], [7.0, 8.0]]
    """

    token_weights: nn.Parameter | None

    def __init__(
        self, modes: str | Sequence[str] = "mean", include_prompt: bool = True, token_weights: Tensor | None = None
    ) -> None:
        super().__init__()
        self.modes = (modes,) if isinstance(modes, str) else tuple(modes)
        self.include_prompt = include_prompt
        self.token_weights = None if token_weights is None else nn.Parameter(token_weights)  # (V,)
        if not self.modes or any(mode not in MODES for mode in self.modes):
            raise ConfigError(f"pooling modes={modes!r} must be one or more of {', '.join(MODES)}")

    def extra_repr(self) -> str:
        """The fields, for print(model)."""
        weights = "" if self.token_weights is None else f", token_weights=({len(self.token_weights)},)"
        return f"modes={self.modes}, include_prompt={self.include_prompt}{weights}"

    def forward(self, hidden: Tensor, batch: Batch, prompt_lengths: Sequence[int] | None = None) -> Tensor:
        """(T, D) -> (B, modes * D).

        `prompt_lengths` counts a prompt's tokens as sentence-transformers does: the prompt tokenized alone, with the
        special tokens before it ([CLS]) and without the one after it ([SEP]). It matters with `include_prompt=False`
        only.
        """
        if hidden.ndim != 2 or len(hidden) != len(batch.ids):
            raise InputError(f"hidden has shape {tuple(hidden.shape)}; the batch needs ({len(batch.ids)}, D)")
        needs_grad = hidden.requires_grad or (self.token_weights is not None and torch.is_grad_enabled())
        if self.modes == ("mean",) and not hidden.is_cuda and not needs_grad and self.include_prompt:
            return torch.from_numpy(self.means(hidden, batch)).to(hidden.dtype)
        prompts = None if self.include_prompt else prompt_lengths
        if self.token_weights is None and prompts is None and all(mode in KERNEL_MODES for mode in self.modes):
            run = dispatch.row_for("pooling", hidden).run
            if run is not None:
                columns = [run(hidden, batch.cu_seqlens, mode) for mode in self.modes]
                return torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
        lengths = batch.cu_seqlens.diff().long()  # (B,)
        starts = batch.cu_seqlens[:-1].long()
        ends = batch.cu_seqlens[1:].long()
        text = batch.text_of_token()
        counts, left_out, dtype = lengths, None, hidden.dtype
        weight = None
        if self.token_weights is not None:
            of_tokens = self.token_weights[batch.ids].clamp(min=0)[:, None]  # (T, 1)
            hidden = hidden * of_tokens  # in float32 at least
            # Over all tokens, the prompt included even where it is left out, as in sentence-transformers.
            weight = _sum(of_tokens, text, lengths).clamp(min=MIN_WEIGHT)  # (B, 1)
        if prompts is not None:
            skip = self._skip(batch, prompts)  # (B,)
            # Masked, not removed: the number of remaining tokens would have to be read from the device.
            left_out = (batch.positions < skip[text])[:, None]  # (T, 1)
            counts, starts = lengths - skip, starts + skip
        kept = hidden if left_out is None else hidden.masked_fill(left_out, 0)

        # Half precision has too few digits for the sum over a long text.
        wide = kept.float() if kept.dtype in (torch.float16, torch.bfloat16) else kept
        pooled: list[Tensor] = []
        for mode in self.modes:
            # An empty text, which only a batch with spare room has, must give finite numbers.
            if mode == "cls":
                pooled.append(hidden[starts.clamp(max=len(hidden) - 1)])
            elif mode == "lasttoken":
                pooled.append(hidden[ends - 1])
            elif mode == "max":
                seen = hidden if left_out is None else hidden.masked_fill(left_out, float("-inf"))
                nothing = hidden.new_zeros(len(batch), hidden.shape[1])
                at = text[:, None].expand_as(seen)
                pooled.append(nothing.scatter_reduce(0, at, seen, "amax", include_self=False))
            elif mode == "weightedmean":
                # Tokens keep their numbers even when the prompt is left out.
                weights = (batch.positions + 1).to(wide.dtype)[:, None]  # (T, 1)
                total = weights if left_out is None else weights.masked_fill(left_out, 0)
                whole = _sum(total, text, lengths).clamp(min=1) if weight is None else weight
                pooled.append(_sum(wide * weights, text, lengths) / whole)
            else:
                count = counts.clamp(min=1).to(wide.dtype)[:, None] if weight is None else weight  # (B, 1)
                pooled.append(_sum(wide, text, lengths) / (count if mode == "mean" else count.sqrt()))
        return torch.cat([column.to(dtype) for column in pooled], dim=1)  # (B, modes * D)

    def means(self, hidden: Tensor, batch: Batch) -> NDArray[Any]:
        """Mean pooling on a CPU in numpy: the same sums in the same order, in a tenth of the time for a short text."""
        rows = hidden.float().numpy() if hidden.dtype == torch.bfloat16 else hidden.numpy()
        weights = None
        if self.token_weights is not None:
            weights = self.token_weights.detach().cpu().numpy()[batch.ids.numpy()].clip(min=0)  # (T,)
            rows = rows * weights[:, None]
        out = np.empty((len(batch), rows.shape[1]), np.float64 if rows.dtype == np.float64 else np.float32)
        ends = batch.cu_seqlens.tolist()
        for b, (start, end) in enumerate(pairwise(ends)):
            rows[start:end].sum(0, dtype=out.dtype, out=out[b])
            out[b] /= max(1, end - start) if weights is None else max(MIN_WEIGHT, weights[start:end].sum())
        return out

    @staticmethod
    def _skip(batch: Batch, prompt_lengths: Sequence[int]) -> Tensor:
        if len(prompt_lengths) != len(batch):
            raise InputError(f"{len(prompt_lengths)} prompt_lengths for {len(batch)} texts; pass one per text")
        for b, (prompt, length) in enumerate(zip(prompt_lengths, batch.lengths, strict=True)):
            if not 0 <= prompt < length:
                raise InputError(
                    f"prompt_lengths[{b}]={prompt} must be from 0 to {length - 1}: text {b} has {length} tokens, "
                    "and pooling without the prompt needs at least one that is not the prompt's"
                )
        return send(torch.tensor(list(prompt_lengths)), batch.positions.device)


def splade_pool(logits: Tensor, batch: Batch) -> Tensor:
    """SPLADE embeddings: (T, V) masked-language-modelling logits -> (B, V) sparse term weights.

    A term's weight is the maximum of log(1 + relu(logit)) over the text's tokens.

    >>> batch = Batch.from_ids([[101, 102], [102]])
    >>> splade_pool(torch.tensor([[1.0, -1.0], [0.0, -2.0], [0.0, 3.0]]), batch).exp().round().tolist()
    [[2.0, 1.0], [1.0, 4.0]]
    """
    if logits.ndim != 2 or len(logits) != len(batch.ids):
        raise InputError(f"logits have shape {tuple(logits.shape)}; the batch needs ({len(batch.ids)}, V)")
    # log(1 + relu(x)) is monotonic: taking the maximum first applies it to B rows instead of T.
    texts = torch.split(logits, list(batch.lengths))
    # Text by text: the last elements of a tensor take another code path, with other last bits.
    return torch.cat([logits[:0], *(text.amax(0)[None].relu().log1p() for text in texts)])


def _sum(values: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    """(T, D) -> (B, D), each text's rows added in order."""
    if values.is_cuda:
        # index_add adds in no fixed order, so that a text's sum would vary from run to run.
        return torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)
    # The same sum, ten times as fast as segment_reduce on a CPU.
    return values.new_zeros(len(lengths), values.shape[1]).index_add(0, text, values)
