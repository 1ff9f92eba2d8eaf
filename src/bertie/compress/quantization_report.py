"""What a smaller form of a model costs: both read the same texts, and what they say is compared."""

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

TOKENS = 512  # a batch: the scores of a vocabulary take much memory
MASKED = 7  # one in so many tokens is masked, where a head fills masks
PAIRED = ("answer", "nsp", "sop", "choice")  # heads that read two texts
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
    """What two forms of a model say of the texts: hidden states, sentence vectors and each head.

    >>> checkpoint = Checkpoint.load("path/to/folder", device="cuda", precision="bf16")         # doctest: +SKIP
    >>> smaller = Checkpoint.load("path/to/folder", device="cuda", precision="fp8")       # doctest: +SKIP
    >>> differences(checkpoint, smaller)["hidden"]["least_cosine"] > 0.99                           # doctest: +SKIP
    True
    """
    if before.tokenizer is None:
        raise InputError(f"{before.source} has no tokenizer to read texts with")
    if not texts:
        raise InputError("there are no texts to compare the models on")
    singles = [(text,) for text in texts]
    pairs = list(zip(texts, [*texts[1:], texts[0]], strict=True))
    with torch.inference_mode(), Progress("compare", lambda: None) as progress:
        states, errors = [], []
        for batch, _ in _batches(before, singles):
            a, b = (_there(one, batch) for one in (before, after))
            states.append(_cosine(a, b))
            errors.append((a - b).norm(dim=-1) / a.norm(dim=-1))
            progress.update(len(batch))
        heads: dict[str, Any] = {}
        for name, info in before.heads.items():
            paired = info.kind in PAIRED or info.task == "rerank" or before.cross_encoder is not None
            found = []
            for batch, some in _batches(before, pairs if paired else singles):
                found.append(_head(before, after, name, batch, some))
                progress.update(len(batch))
            heads[name] = _summary(found[0][0], [values for _, values in found])
        vectors = None if before.sentence is None else _vectors(before, after, texts)
    hidden = _summary("cosine", states) | {"largest_error": float(torch.cat(errors).max())}
    return {"hidden": hidden, "sentence": vectors, "heads": heads}


def _there(checkpoint: Checkpoint, batch: Batch, head: str | None = None) -> Tensor:
    """What a model says of a batch, wherever it lies: its hidden states, or what a head makes of them."""
    model, batch = checkpoint.model, batch.to(checkpoint.model.device)
    return (model.hidden(batch) if head is None else model(batch, head)).float().cpu()


def _batches(checkpoint: Checkpoint, things: Sequence[tuple[str, ...]]) -> Iterator[tuple[Batch, Tensor]]:
    """The texts or pairs, whole, with the places (n,) in the batch of every MASKED-th token of each."""
    assert checkpoint.tokenizer is not None
    encoded = checkpoint.tokenizer.encode_batch([(one[0], one[1]) if len(one) > 1 else one[0] for one in things])
    cut = (windows(encoding, one, checkpoint.max_length) for encoding, one in zip(encoded, things, strict=True))
    read = [window.encoding for found in cut for window in found]
    for group in pack([len(one) for one in read], TOKENS):
        members = [read[i] for i in group]
        starts = np.cumsum([0, *map(len, members[:-1])])
        some = [
            start + np.flatnonzero(one.sequence_ids >= 0)[::MASKED] for start, one in zip(starts, members, strict=True)
        ]
        yield Batch.from_encodings(members), torch.from_numpy(np.concatenate(some))


def _head(before: Checkpoint, after: Checkpoint, name: str, batch: Batch, some: Tensor) -> tuple[str, Tensor]:
    """How much a head's outputs have in common on a batch, and by which measure; `some` (n,) are places to mask."""
    assert before.tokenizer is not None
    head, mask = before.model.head(name), before.tokenizer.mask_id
    if head.cfg.kind == "vocabulary" and mask is not None:  # asked where it has to guess: what it can see is easy
        batch = replace(batch, ids=batch.ids.index_fill(0, some, mask))
        a, b = (_there(one, batch, name)[some] for one in (before, after))
    else:
        a, b = (_there(one, batch, name) for one in (before, after))
    return _measure(head, before.heads[name].kind, batch, a, b)


def _measure(head: Head, kind: str, batch: Batch, a: Tensor, b: Tensor) -> tuple[str, Tensor]:
    """`a` and `b` (N, n): a row a token or a row a text."""
    if head.cfg.outputs is None and not head.cfg.tied:  # a state, of which no number is an answer
        return "cosine", _cosine(a, b)
    if a.shape[1] == 1:
        return "difference", (a - b).abs()[:, 0]
    if kind == "answer":  # which token of a text is the first, and which is the last
        rows = zip(*(torch.split(one, list(batch.lengths)) for one in (a, b)), strict=True)
        return "top1", torch.cat([x.argmax(0) == y.argmax(0) for x, y in rows])
    return "top1", a.argmax(1) == b.argmax(1)


def _vectors(before: Checkpoint, after: Checkpoint, texts: Sequence[str]) -> dict[str, Any]:
    from bertie.tasks import Embedder

    a, b = (torch.from_numpy(Embedder(one).embed(list(texts))) for one in (before, after))
    return _summary("cosine", [_cosine(a, b)])


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """(N, D), (N, D) -> (N,)."""
    return torch.cosine_similarity(a.double(), b.double(), dim=-1)


def _summary(measure: str, found: Sequence[Tensor]) -> dict[str, Any]:
    values = torch.cat(list(found)).double()
    if measure == "cosine":
        facts = {"mean_cosine": float(values.mean()), "least_cosine": float(values.min())}
    elif measure == "top1":
        facts = {"equal_top1": float(values.mean())}
    else:
        facts = {"largest_difference": float(values.max())}
    return facts | {"of": len(values)}


def lines(found: dict[str, Any]) -> dict[str, str]:
    """What `differences` found, for people: a line a thing."""
    rows = {"hidden": _said(found.get("hidden"), "tokens"), "sentence": _said(found.get("sentence"), "texts")}
    rows |= {f"head {name}": _said(facts, "outputs") for name, facts in found.get("heads", {}).items()}
    return {name: text for name, text in rows.items() if text}


def _said(facts: dict[str, Any] | None, what: str) -> str:
    if facts is None:
        return ""
    of = f"of {facts['of']:,} {what}"
    if "mean_cosine" in facts:
        error = f"; an error of at most {facts['largest_error']:.2%}" if "largest_error" in facts else ""
        return f"cosine {facts['mean_cosine']:.5f} in the mean, {facts['least_cosine']:.5f} at least, {of}{error}"
    if "equal_top1" in facts:
        return f"the same first choice in {facts['equal_top1']:.2%} {of}"
    return f"a difference of at most {facts['largest_difference']:.2g} {of}"
