"""What a pretraining run says of itself: the loss on text that it never reads, words for masks, alarms."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertie.data.atomic import atomic_write
from bertie.errors import ConfigError, InputError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, Score, bootstrap, finite_or_none, from_sums
from bertie.nn.model import Model
from bertie.text.batch import Batch, pack
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.masking import Ints, Masking, seeded
from bertie.training.pretrain.packing import Packed

CELLS = 1 << 25  # logits held at a time
SAMPLES = "samples.jsonl"
SENTENCES = (
    "Paris is the [MASK] of France.",
    "The cat sat on the [MASK].",
    "She opened the [MASK] and walked into the room.",
    "He was born in [MASK] and died in London.",
    "The river flows into the [MASK] near the border.",
    "In the [MASK] of 1945, the war came to an [MASK].",
)


# --- text that the run never reads ---


@dataclass(frozen=True, slots=True)
class _Hidden:
    """A piece of a document with some of its tokens hidden."""

    document: int
    ids: Ints  # (n,) as the model reads them
    rows: Ints  # (m,) the hidden ones
    targets: Ints  # (m,) what they were


class HeldOutEvaluation:
    """How well a model finds the hidden tokens of text that it is not trained on.

    The pieces are those of the first steps of `packed`, up to `most` tokens; `budget` are read at a time. What is
    hidden of a piece follows from the seed and its place in the corpus alone, so that all evaluations of a run, and
    those of two runs over one corpus, ask the same. `dtype`: half precision, by autocast, for GPUs.

    >>> held = HeldOutEvaluation(Packed(corpus, 65536, 512, seed=0), tokenizer, budget=65536)    # doctest: +SKIP
    >>> held(model)                                                                    # doctest: +SKIP
    {'loss': 2.031, 'accuracy': 0.601, 'perplexity': 7.62, 'tokens': 74981.0}
    """

    def __init__(
        self,
        packed: Packed,
        tokenizer: Tokenizer,
        *,
        masking: Masking | None = None,
        budget: int,
        most: int = 500_000,
        seed: int = 0,
        head: str = "mlm",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("budget", budget), ("most", most)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1 token")
        if tokenizer.mask_id is None:
            raise InputError("the tokenizer has no mask token, and masked language modelling needs one")
        self.masking, self.seed, self.head, self.dtype = masking or Masking(), seed, head, dtype
        self._mask_id, self._vocab = tokenizer.mask_id, tokenizer.vocab_size
        self._never: list[int] = packed.corpus.about["tokenizer"]["special"]
        self._pieces = list(self._read(packed, most))
        if not sum(len(piece.rows) for piece in self._pieces):
            raise InputError(f"{packed.corpus.folder} holds special tokens alone: there is nothing to hide")
        self._groups = list(pack([len(piece.ids) for piece in self._pieces], budget))

    def __call__(self, model: Model) -> dict[str, float]:
        """The mean loss of a hidden token, how many are found, the loss's exponential, and how many there are."""
        sums = self.sums(model).sum(0, keepdims=True)  # (1, 3)
        return {name: float(value[0]) for name, value in (_means(sums) | {"tokens": sums[:, 2]}).items()}

    def sums(self, model: Model) -> FloatArray:
        """(documents, 3) of each that was read: the loss of its hidden tokens, how many are found, how many it has."""
        training = model.training
        model.eval()
        try:
            parts = [self._judged(model, [self._pieces[i] for i in group]) for group in self._groups]
        finally:
            model.train(training)
        predictions = torch.cat(parts, dim=1).cpu().double().numpy()  # (2, M): the host waits for the device here, once
        pieces = [self._pieces[i] for group in self._groups for i in group]
        owner = np.repeat([piece.document for piece in pieces], [len(piece.rows) for piece in pieces])  # (M,)
        documents, owner = np.unique(owner, return_inverse=True)
        columns = (predictions[0], predictions[1], None)
        return np.stack([np.bincount(owner, weights=column, minlength=len(documents)) for column in columns], axis=1)

    def _read(self, packed: Packed, most: int) -> Iterator[_Hidden]:
        used = 0
        for step in range(packed.steps()):
            ids, cu, special, words = packed.batch(step)
            for b, (document, start, _) in enumerate(packed.step(step)):
                part = slice(int(cu[b]), int(cu[b + 1]))
                used += part.stop - part.start
                if used > most and used > part.stop - part.start:  # one at least
                    return
                rng = seeded(self.seed, epoch=None, index=document * 1_000_003 + start)
                ends = np.array([0, part.stop - part.start])
                rows = self.masking.choose(special[part], words[part], ends, rng)
                masked, targets = self.masking.apply(
                    ids[part], rows, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._never
                )
                yield _Hidden(document, masked, rows, targets)

    @torch.no_grad()
    def _judged(self, model: Model, pieces: Sequence[_Hidden]) -> Tensor:
        """(2, M) the loss of each hidden token, and whether it is found. Only few logits are there at a time."""
        device = model.device
        batch = Batch.from_ids([piece.ids for piece in pieces]).to(device)
        starts = np.cumsum([0, *batch.lengths[:-1]])
        rows = np.concatenate([piece.rows + start for piece, start in zip(pieces, starts, strict=True)])
        targets = torch.from_numpy(np.concatenate([piece.targets for piece in pieces])).to(device)  # (M,)
        half = nullcontext() if self.dtype == torch.float32 else torch.autocast(device.type, self.dtype)
        found = []
        with half:
            hidden = model.hidden(batch, self.head)[torch.from_numpy(rows).to(device)]  # (T, D) -> (M, D)
            most = max(1, CELLS // model.config.vocab)
            for some, wanted in zip(torch.split(hidden, most), torch.split(targets, most), strict=True):
                logits = model.head(self.head)(some, batch, model.encoder.embeddings.words.weight).float()  # (m, V)
                loss = F.cross_entropy(logits, wanted, reduction="none")
                found.append(torch.stack((loss, (logits.argmax(-1) == wanted).float())))
        return torch.cat(found, dim=1)


def predict_labelled(
    model: Model, held: HeldOutEvaluation, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Loss, accuracy and perplexity with their intervals: documents are drawn anew, as their tokens hang together."""
    sums = held.sums(model)
    return bootstrap(from_sums(sums, _means), len(sums), resamples=resamples, seed=seed)


def _means(sums: FloatArray) -> dict[str, FloatArray]:
    """(n, 3) -> (n,) of each metric."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        loss = sums[:, 0] / sums[:, 2]
        return {"loss": loss, "accuracy": sums[:, 1] / sums[:, 2], "perplexity": np.exp(loss)}


# --- words for masks ---


@torch.no_grad()
def samples(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str] = SENTENCES, top: int = 5, *, head: str = "mlm"
) -> list[dict[str, Any]]:
    """What the model would put for each mask of some texts, best first. [MASK] stands for the tokenizer's own mask.

    >>> samples(model, tokenizer, ["Paris is the [MASK] of France."], top=2)         # doctest: +SKIP
    [{'text': 'Paris is the [MASK] of France.', 'masks': [{'capital': 0.9969, 'heart': 0.0006}]}]
    """
    if tokenizer.mask_token is None:
        raise InputError("the tokenizer has no mask token, and filling masks needs one")
    training = model.training
    model.eval()
    try:
        return [_filled(model, tokenizer, text, top, head) for text in texts]
    finally:
        model.train(training)


def _filled(model: Model, tokenizer: Tokenizer, text: str, top: int, head: str) -> dict[str, Any]:
    assert tokenizer.mask_token is not None
    encoding = tokenizer.encode(text.replace("[MASK]", tokenizer.mask_token))
    at = np.flatnonzero(encoding.ids == tokenizer.mask_id)
    if not len(at):
        raise InputError(f"no [MASK] in the text: {text[:60]!r}")
    if len(encoding) > model.config.max_length:
        raise InputError(f"{text[:60]!r} has {len(encoding)} tokens; the model reads {model.config.max_length} at once")
    batch = Batch.from_encodings([encoding]).to(model.device)
    hidden = model.hidden(batch, head)[torch.from_numpy(at).to(model.device)]  # (T, D) -> (masks, D)
    logits = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight)
    chances = logits.float().softmax(-1).cpu()[:, : tokenizer.vocab_size]  # a table may have rows without a token
    best = chances.topk(min(top, chances.shape[1]))
    return {
        "text": text,
        "masks": [
            {tokenizer.token(i): finite_or_none(round(chance, 4)) for i, chance in zip(ids, found, strict=True)}
            for ids, found in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }


def write_samples(folder: Path, step: int, found: Sequence[Mapping[str, Any]]) -> None:
    """Add a line for each text to samples.jsonl. What an earlier try wrote for this step or later ones is dropped."""
    path = folder / SAMPLES
    lines = path.read_text("utf-8").split("\n") if path.exists() else []
    lines = [line for line in lines if line and json.loads(line)["step"] < step]
    lines += [json.dumps({"step": step, **one}, ensure_ascii=False) for one in found]
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))
