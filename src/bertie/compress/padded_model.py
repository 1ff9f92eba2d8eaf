"""A model as one graph over padded batches: the encoder with a head, or with pooling and what follows it.

The inputs are `input_ids`, `attention_mask` and, if the model has several segments, `token_type_ids`. The outputs
have the names that transformers uses:

    embeddings                         last_hidden_state (B, S, D), sentence_embedding (B, E)
    a head over texts                  logits (B, n)
    a head over tokens, or the vocabulary    logits (B, S, n)
    a head for question answering      start_logits, end_logits (B, S)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.compress.padded_encoder import PaddedEncoder
from bertie.nn.heads import Head
from bertie.nn.model import Model
from bertie.nn.pooling import MIN_WEIGHT, Pooling
from bertie.nn.sentence_layers import Dense, Normalize


class PaddedModel(nn.Module):
    """What is exported: an encoder, and a head or sentence-transformers modules over it.

    `spans`: the head's two outputs per token are the start and the end of an answer. `temperature` divides the logits:
    a calibrated head is exported with its calibration.
    """

    def __init__(
        self,
        model: Model,
        head: str | None = None,
        *,
        sentence: SentenceModules | None = None,
        spans: bool = False,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.encoder = PaddedEncoder(model.encoder)
        self.words = model.encoder.embeddings.words
        self.head = None if head is None else model.head(head)
        self.spans = spans
        self.sentence = sentence
        self.temperature = temperature
        self.eval()

    @property
    def input_names(self) -> list[str]:
        """The names of the graph's inputs, in order."""
        segments = self.encoder.cfg.embeddings.segments > 1
        return ["input_ids", "attention_mask", *(["token_type_ids"] if segments else [])]

    @property
    def output_names(self) -> list[str]:
        """The names of the graph's outputs, in order."""
        if self.head is not None:
            return ["start_logits", "end_logits"] if self.spans else ["logits"]
        return ["last_hidden_state", *(["sentence_embedding"] if self.pools else [])]

    @property
    def pools(self) -> bool:
        """Whether the graph has sentence embeddings: not if pooling leaves out the prompt, whose length is unknown."""
        return self.sentence is not None and self.sentence.pooling.include_prompt

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """(B, S) each -> the outputs, in the order of `output_names`."""
        segments, global_tokens = token_type_ids, None
        if self.head is not None:
            segments = _segments(self.head, input_ids, attention_mask, segments)
            if self.encoder.cfg.global_tokens:
                global_tokens = _global_tokens(self.head, input_ids, attention_mask)
        hidden = self.encoder(input_ids, attention_mask, segments, global_tokens)
        if self.head is not None:
            return self._head(self.head, hidden, attention_mask)
        if self.sentence is None or not self.pools:
            return (hidden,)
        return hidden, _project(self.sentence, _pool(self.sentence.pooling, hidden, input_ids, attention_mask))

    def _head(self, head: Head, hidden: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        cfg = head.cfg
        x = hidden
        if cfg.kind == "text" and cfg.pooling != "late":
            x = _first(x, mask) if cfg.pooling == "first" else _mean(x, mask)
        logits = head.project(x, self.words.weight)
        if cfg.kind == "text" and cfg.pooling == "late":
            logits = _mean(logits, mask)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.spans:
            return logits[..., 0], logits[..., 1]
        return (logits,)


def _first(x: Tensor, mask: Tensor) -> Tensor:
    """(B, S, D) -> (B, D) the first token that is not padding."""
    return x[torch.arange(x.shape[0]), mask.argmax(1)]


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """(B, S, D) -> (B, D)."""
    inside = torch.where(mask[..., None] > 0, x, 0.0)
    return inside.sum(1) / mask.sum(1, keepdim=True).clamp(min=1).to(x.dtype)


def _pool(pooling: Pooling, hidden: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """(B, S, D) -> (B, modes * D): as `Pooling`, whose modes are described there."""
    real = mask[..., None] > 0
    positions = mask.cumsum(1)  # from 1
    count = mask.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)  # (B, 1)
    weight = None
    if pooling.token_weights is not None:
        of_tokens = torch.where(mask > 0, pooling.token_weights[ids].clamp(min=0), 0.0)[..., None]  # (B, S, 1)
        hidden = hidden * of_tokens
        weight = of_tokens.sum(1).clamp(min=MIN_WEIGHT)  # (B, 1)
    inside = torch.where(real, hidden, 0.0)
    pooled = []
    for mode in pooling.modes:
        if mode == "cls":
            pooled.append(_first(hidden, mask))
        elif mode == "lasttoken":
            pooled.append(hidden[torch.arange(hidden.shape[0]), (positions * mask).argmax(1)])
        elif mode == "max":
            pooled.append(torch.where(real, hidden, torch.finfo(hidden.dtype).min).amax(1))
        elif mode == "weightedmean":
            rising = torch.where(mask > 0, positions, 0).to(hidden.dtype)[..., None]
            pooled.append((inside * rising).sum(1) / (rising.sum(1).clamp(min=1) if weight is None else weight))
        else:
            divisor = count if weight is None else weight
            pooled.append(inside.sum(1) / (divisor if mode == "mean" else divisor.sqrt()))
    return torch.cat(pooled, dim=1) if len(pooled) > 1 else pooled[0]


def _project(sentence: SentenceModules, vectors: Tensor) -> Tensor:
    """(B, pooled width) -> (B, dimension)."""
    for layer in sentence.layers:
        if isinstance(layer, Dense):
            out = layer.activation(layer.linear(vectors))
            if layer.add_input:
                out = out + (vectors if layer.residual is None else layer.residual(vectors))
            vectors = out
        elif isinstance(layer, Normalize):
            vectors = vectors / vectors.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
        else:
            vectors = layer(vectors)
    return vectors if sentence.truncate_dim is None else vectors[:, : sentence.truncate_dim]


# --- what heads derive from the ids ---


def _after_separator(head: Head, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, S) positions, (B, 1) the first separator's, and (B, 1) whether there is one."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    separators = ((ids == head.cfg.separator_id) & (mask > 0)).long()
    found = separators.amax(1, keepdim=True) > 0
    return positions, positions.gather(1, separators.argmax(1, keepdim=True)), found


def _segments(head: Head, ids: Tensor, mask: Tensor, segments: Tensor | None) -> Tensor | None:
    """The segment ids, with those that the head derives for texts that have none."""
    if head.cfg.segments == "given" or segments is None:
        return segments
    positions, separator, found = _after_separator(head, ids, mask)
    derived = (positions > torch.where(found, separator, 0)).long()
    return torch.where((segments * mask).amax(1, keepdim=True) == 0, derived, segments)


def _global_tokens(head: Head, ids: Tensor, mask: Tensor) -> Tensor | None:
    """(B, S) which tokens are global for the head."""
    if head.cfg.globals == "none":
        return None
    positions, separator, _ = _after_separator(head, ids, mask)
    if head.cfg.globals == "first":
        chosen = positions == 0
    elif head.cfg.globals == "before_separator":
        chosen = positions < separator
    else:
        chosen = positions > separator + 1
    return chosen & (mask > 0)
