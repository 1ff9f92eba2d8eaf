"""Quantization report: compare a quantized model with the original on the same texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.data.progress import Progress
from bertie.errors import InputError
from bertie.nn.heads import Head
from bertie.text.batch import Batch, pack
from bertie.text.windows import windows

BATCH_TOKENS = 512  # logits over a vocabulary take much memory
MASK_EVERY = 7  # for MLM heads, every n-th token is masked
PAIRED = ("answer", "nsp", "sop", "choice")  # heads that take two texts
TEXTS = tuple(
    """The old bridge was closed for repairs after the flood in March.
Can you tell me when the next train to Vienna leaves?
She bought three kilos of apples, two lemons and a loaf of bread.
Researchers found that the drug lowered blood pressure in most patients.
I have never been so disappointed by a film in my whole life.
The committee will publish its report on the first of June 2021.
Please restart the router and wait until the green light stops blinking.
A small dog is chasing a red ball across the wet grass.
Prices rose by 4.5 percent last year, the fastest pace since 1991.
He studied law in Edinburgh before he became a journalist.
Water boils at a lower temperature on top of a mountain.
The goalkeeper saved a penalty in the last minute of the match.
Nobody knows who wrote the letter that was found in the attic.
What a wonderful evening, thank you all for coming!
The function returns an empty list if no file matches the pattern.
Our flight was delayed twice, and then they lost our luggage.
Mozart wrote his first symphony when he was eight years old.
The court ruled that the contract had been broken by both sides.
Add the flour slowly, stirring all the time, so that no lumps form.
Bees find their way home by the position of the sun.
The company, founded in Osaka in 1933, employs 12,000 people worldwide.
If it rains tomorrow, the concert will be held in the town hall.
My grandmother's house stood between the river and the railway.
"I did not say that," the minister replied, "and I never will.\"""".splitlines()
)


def differences(before: Checkpoint, after: Checkpoint, texts: Sequence[str] = TEXTS) -> dict[str, Any]:
    """Compare two versions of a model: hidden states, sentence embeddings and the outputs of each head.

    >>> checkpoint = Checkpoint.load("path/to/folder", device="cuda", precision="bf16")         # doctest: +SKIP
    >>> quantized = Checkpoint.load("path/to/folder", device="cuda", precision="fp8")       # doctest: +SKIP
    >>> differences(checkpoint, quantized)["hidden"]["min_cosine"] > 0.99                           # doctest: +SKIP
    True
    """
    if before.tokenizer is None:
        raise InputError(f"{before.source} has no tokenizer to encode texts with")
    if not texts:
        raise InputError("there are no texts to compare the models on")
    singles = [(text,) for text in texts]
    pairs = list(zip(texts, [*texts[1:], texts[0]], strict=True))
    with torch.inference_mode(), Progress("compare", lambda: None) as progress:
        states, errors = [], []
        for batch, _ in _batches(before, singles):
            a, b = (_outputs(checkpoint, batch) for checkpoint in (before, after))
            states.append(_cosine(a, b))
            errors.append((a - b).norm(dim=-1) / a.norm(dim=-1))
            progress.update(len(batch))
        heads: dict[str, Any] = {}
        for name, info in before.heads.items():
            paired = info.kind in PAIRED or info.task == "rerank" or before.cross_encoder is not None
            compared = []
            for batch, masked in _batches(before, pairs if paired else singles):
                compared.append(_compare_head(before, after, name, batch, masked))
                progress.update(len(batch))
            heads[name] = _summary(compared[0][0], [values for _, values in compared])
        sentence = None if before.sentence is None else _compare_embeddings(before, after, texts)
    hidden = _summary("cosine", states) | {"max_error": float(torch.cat(errors).max())}
    return {"hidden": hidden, "sentence": sentence, "heads": heads}


def _outputs(checkpoint: Checkpoint, batch: Batch, head: str | None = None) -> Tensor:
    """The hidden states of a batch, or the outputs of a head, on the CPU."""
    model, batch = checkpoint.model, batch.to(checkpoint.model.device)
    return (model.hidden(batch) if head is None else model(batch, head)).float().cpu()


def _batches(checkpoint: Checkpoint, texts: Sequence[tuple[str, ...]]) -> Iterator[tuple[Batch, Tensor]]:
    """Batches of the windows of texts or pairs, each with the positions (n,) of the tokens to mask."""
    assert checkpoint.tokenizer is not None
    encoded = checkpoint.tokenizer.encode_batch([(text[0], text[1]) if len(text) > 1 else text[0] for text in texts])
    split = (windows(encoding, text, checkpoint.max_length) for encoding, text in zip(encoded, texts, strict=True))
    encodings = [window.encoding for parts in split for window in parts]
    for group in pack([len(encoding) for encoding in encodings], BATCH_TOKENS):
        members = [encodings[i] for i in group]
        starts = np.cumsum([0, *map(len, members[:-1])])
        masked = [
            start + np.flatnonzero(encoding.sequence_ids >= 0)[::MASK_EVERY]
            for start, encoding in zip(starts, members, strict=True)
        ]
        yield Batch.from_encodings(members), torch.from_numpy(np.concatenate(masked))


def _compare_head(before: Checkpoint, after: Checkpoint, name: str, batch: Batch, masked: Tensor) -> tuple[str, Tensor]:
    """Compare a head's outputs on a batch; return the measure and its values."""
    assert before.tokenizer is not None
    head, mask = before.model.head(name), before.tokenizer.mask_id
    if head.cfg.kind == "vocabulary" and mask is not None:  # compare at masked tokens: visible ones are easy to predict
        batch = replace(batch, ids=batch.ids.index_fill(0, masked, mask))
        a, b = (_outputs(checkpoint, batch, name)[masked] for checkpoint in (before, after))
    else:
        a, b = (_outputs(checkpoint, batch, name) for checkpoint in (before, after))
    return _measure(head, before.heads[name].kind, batch, a, b)


def _measure(head: Head, kind: str, batch: Batch, a: Tensor, b: Tensor) -> tuple[str, Tensor]:
    """Compare outputs (N, n), one row per token or per text."""
    if head.cfg.outputs is None and not head.cfg.tied:  # a pooled state
        return "cosine", _cosine(a, b)
    if a.shape[1] == 1:
        return "difference", (a - b).abs()[:, 0]
    if kind == "answer":  # the first and the last token of the answer
        rows = zip(*(torch.split(outputs, list(batch.lengths)) for outputs in (a, b)), strict=True)
        return "top1", torch.cat([x.argmax(0) == y.argmax(0) for x, y in rows])
    return "top1", a.argmax(1) == b.argmax(1)


def _compare_embeddings(before: Checkpoint, after: Checkpoint, texts: Sequence[str]) -> dict[str, Any]:
    from bertie.tasks import Embedder

    a, b = (torch.from_numpy(Embedder(checkpoint).embed(list(texts))) for checkpoint in (before, after))
    return _summary("cosine", [_cosine(a, b)])


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """(N, D), (N, D) -> (N,)."""
    return torch.cosine_similarity(a.double(), b.double(), dim=-1)


def _summary(measure: str, parts: Sequence[Tensor]) -> dict[str, Any]:
    values = torch.cat(list(parts)).double()
    if measure == "cosine":
        summary = {"mean_cosine": float(values.mean()), "min_cosine": float(values.min())}
    elif measure == "top1":
        summary = {"top1_agreement": float(values.mean())}
    else:
        summary = {"max_difference": float(values.max())}
    return summary | {"count": len(values)}


def lines(report: dict[str, Any]) -> dict[str, str]:
    """The result of `differences` as text, one line per comparison."""
    rows = {"hidden": _line(report.get("hidden"), "tokens"), "sentence": _line(report.get("sentence"), "texts")}
    rows |= {f"head {name}": _line(summary, "outputs") for name, summary in report.get("heads", {}).items()}
    return {name: text for name, text in rows.items() if text}


def _line(summary: dict[str, Any] | None, unit: str) -> str:
    if summary is None:
        return ""
    count = f"{summary['count']:,} {unit}"
    if "mean_cosine" in summary:
        error = f", relative error at most {summary['max_error']:.2%}" if "max_error" in summary else ""
        return f"cosine mean {summary['mean_cosine']:.5f}, min {summary['min_cosine']:.5f}{error} ({count})"
    if "top1_agreement" in summary:
        return f"top-1 agreement {summary['top1_agreement']:.2%} ({count})"
    return f"difference at most {summary['max_difference']:.2g} ({count})"
