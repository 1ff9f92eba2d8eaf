"""Monitoring of a pretraining run: held-out evaluation, and fill-mask samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from bertie.data.atomic import atomic_write
from bertie.errors import ConfigError, InputError
from bertie.evaluation.intervals import RESAMPLES, FloatArray, Score, bootstrap, finite_or_none, from_sums
from bertie.nn.model import Model
from bertie.text.batch import Batch, pack
from bertie.text.tokenizer import Tokenizer
from bertie.training.pretrain.masking import Ints, Masking, masking_rng
from bertie.training.pretrain.packing import PackedCorpus

MAX_LOGITS = 1 << 25  # in memory at a time
SAMPLES = "samples.jsonl"
SENTENCES = (
    "Paris is the [MASK] of France.",
    "The cat sat on the [MASK].",
    "She opened the [MASK] and walked into the room.",
    "He was born in [MASK] and died in London.",
    "The river flows into the [MASK] near the border.",
    "In the [MASK] of 1945, the war came to an [MASK].",
)


# --- held-out evaluation ---


@dataclass(frozen=True, slots=True)
class MaskedPassage:
    """A passage of a document with masked tokens."""

    document: int
    ids: Ints  # (n,) after masking
    rows: Ints  # (m,) positions of the masked tokens
    targets: Ints  # (m,) the original tokens


class HeldOutEvaluation:
    """Masked-language-modelling loss and accuracy on text that the model is not trained on.

    Reads the first steps of `packed`, up to `limit` tokens, `budget` at a time. The mask of a
    passage follows from the seed and its place in the corpus alone: all evaluations of a run, and
    of two runs over one corpus, predict the same tokens. `dtype`: the autocast dtype, for GPUs.

    >>> held_out = HeldOutEvaluation(PackedCorpus(corpus, 65536, 512, seed=0), tokenizer, budget=8192)  # doctest: +SKIP
    >>> held_out(model)                                                                              # doctest: +SKIP
    {'loss': 2.031, 'accuracy': 0.601, 'perplexity': 7.62, 'tokens': 74981.0, 'loss_se': 0.012, 'accuracy_se': 0.002}
    """

    def __init__(
        self,
        packed: PackedCorpus,
        tokenizer: Tokenizer,
        *,
        masking: Masking | None = None,
        budget: int,
        limit: int = 500_000,
        seed: int = 0,
        head: str = "mlm",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        for name, value in (("budget", budget), ("limit", limit)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1 token")
        if tokenizer.mask_id is None:
            raise InputError("the tokenizer has no mask token, and masked-language modelling needs one")
        self.masking, self.seed, self.head, self.dtype = masking or Masking(), seed, head, dtype
        self._mask_id, self._vocab = tokenizer.mask_id, tokenizer.vocab_size
        self._special_ids: list[int] = packed.corpus.manifest["tokenizer"]["special"]
        self._passages = list(self._read(packed, limit))
        if not sum(len(passage.rows) for passage in self._passages):
            raise InputError(f"{packed.corpus.folder} holds special tokens only: there is nothing to mask")
        self._groups = list(pack([len(passage.ids) for passage in self._passages], budget))

    def __call__(self, model: Model) -> dict[str, float]:
        """The mean loss of masked tokens, their accuracy, the perplexity, the number of tokens, and standard errors.

        `loss_se` and `accuracy_se` are from the variance between documents, as the tokens of one correlate.
        """
        documents = self.sums(model)
        total = documents.sum(0, keepdims=True)  # (1, 3)
        scores = {name: float(value[0]) for name, value in (_means(total) | {"tokens": total[:, 2]}).items()}
        return scores | _standard_errors(documents)

    def sums(self, model: Model) -> FloatArray:
        """(documents, 3) per document: the summed loss, the number of correct predictions, the number of tokens."""
        training = model.training
        model.eval()
        try:
            parts = [self._predict(model, [self._passages[i] for i in group]) for group in self._groups]
        finally:
            model.train(training)
        predictions = torch.cat(parts, dim=1).cpu().double().numpy()  # (2, M), the only synchronization
        passages = [self._passages[i] for group in self._groups for i in group]
        owner = np.repeat([p.document for p in passages], [len(p.rows) for p in passages])  # (M,)
        documents, owner = np.unique(owner, return_inverse=True)
        columns = (predictions[0], predictions[1], None)
        return np.stack([np.bincount(owner, weights=column, minlength=len(documents)) for column in columns], axis=1)

    def groups(self) -> Iterator[list[MaskedPassage]]:
        """The passages by batches."""
        return ([self._passages[i] for i in group] for group in self._groups)

    def special(self, passage: MaskedPassage) -> NDArray[np.bool_]:
        """(n,) which tokens of a passage are special; masked ones are not."""
        special = np.isin(passage.ids, self._special_ids)
        special[passage.rows] = False
        return special

    def _read(self, packed: PackedCorpus, limit: int) -> Iterator[MaskedPassage]:
        used = 0
        for step in range(packed.steps()):
            ids, cu, special, words = packed.batch(step)
            for b, (document, start, _) in enumerate(packed.step(step)):
                part = slice(int(cu[b]), int(cu[b + 1]))
                used += part.stop - part.start
                if used > limit and used > part.stop - part.start:  # at least one passage
                    return
                rng = masking_rng(self.seed, epoch=None, index=document * 1_000_003 + start)
                ends = np.array([0, part.stop - part.start])
                rows = self.masking.choose(special[part], words[part], ends, rng)
                masked, targets = self.masking.apply(
                    ids[part], rows, rng, vocab=self._vocab, mask_id=self._mask_id, never=self._special_ids
                )
                yield MaskedPassage(document, masked, rows, targets)

    @torch.no_grad()
    def _predict(self, model: Model, passages: Sequence[MaskedPassage]) -> Tensor:
        """(2, M) the loss of each masked token, and whether the prediction is correct. Logits are chunked."""
        device = model.device
        batch = Batch.from_ids([passage.ids for passage in passages]).to(device)
        starts = np.cumsum([0, *batch.lengths[:-1]])
        rows = np.concatenate([passage.rows + start for passage, start in zip(passages, starts, strict=True)])
        targets = torch.from_numpy(np.concatenate([passage.targets for passage in passages])).to(device)  # (M,)
        autocast = nullcontext() if self.dtype == torch.float32 else torch.autocast(device.type, self.dtype)
        results = []
        with autocast:
            hidden = model.hidden(batch, self.head)[torch.from_numpy(rows).to(device)]  # (T, D) -> (M, D)
            size = max(1, MAX_LOGITS // model.config.vocab)
            for chunk, expected in zip(torch.split(hidden, size), torch.split(targets, size), strict=True):
                logits = model.head(self.head)(chunk, batch, model.encoder.embeddings.words.weight).float()  # (m, V)
                loss = F.cross_entropy(logits, expected, reduction="none")
                results.append(torch.stack((loss, (logits.argmax(-1) == expected).float())))
        return torch.cat(results, dim=1)


def evaluate_with_intervals(
    model: Model, held_out: HeldOutEvaluation, *, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Score]:
    """Loss, accuracy and perplexity with bootstrap intervals; documents are resampled, as their tokens correlate."""
    sums = held_out.sums(model)
    return bootstrap(from_sums(sums, _means), len(sums), resamples=resamples, seed=seed)


def _standard_errors(sums: FloatArray) -> dict[str, float]:
    """Of the loss and the accuracy, as ratios of sums over documents; none for a single document."""
    documents, total = len(sums), sums[:, 2].sum()
    if documents < 2:
        return {}
    gaps = sums[:, :2] - sums[:, :2].sum(axis=0) / total * sums[:, 2:]
    errors = np.sqrt((gaps**2).sum(axis=0) * documents / (documents - 1)) / total
    return {"loss_se": float(errors[0]), "accuracy_se": float(errors[1])}


def _means(sums: FloatArray) -> dict[str, FloatArray]:
    """(n, 3) -> (n,) of each metric."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        loss = sums[:, 0] / sums[:, 2]
        return {"loss": loss, "accuracy": sums[:, 1] / sums[:, 2], "perplexity": np.exp(loss)}


# --- fill-mask samples ---


@torch.no_grad()
def fill_mask_samples(
    model: Model, tokenizer: Tokenizer, texts: Sequence[str] = SENTENCES, top: int = 5, *, head: str = "mlm"
) -> list[dict[str, Any]]:
    """The model's best predictions for each [MASK] of some texts, with their probabilities.

    >>> fill_mask_samples(model, tokenizer, ["Paris is the [MASK] of France."], top=2)         # doctest: +SKIP
    [{'text': 'Paris is the [MASK] of France.', 'masks': [{'capital': 0.9969, 'heart': 0.0006}]}]
    """
    if tokenizer.mask_token is None:
        raise InputError("the tokenizer has no mask token, and filling masks needs one")
    training = model.training
    model.eval()
    try:
        return [_fill(model, tokenizer, text, top, head) for text in texts]
    finally:
        model.train(training)


def _fill(model: Model, tokenizer: Tokenizer, text: str, top: int, head: str) -> dict[str, Any]:
    assert tokenizer.mask_token is not None
    encoding = tokenizer.encode(text.replace("[MASK]", tokenizer.mask_token))
    at = np.flatnonzero(encoding.ids == tokenizer.mask_id)
    if not len(at):
        raise InputError(f"no [MASK] in the text: {text[:60]!r}")
    if len(encoding) > model.config.max_length:
        raise InputError(f"{text[:60]!r} has {len(encoding)} tokens; the model's limit is {model.config.max_length}")
    batch = Batch.from_encodings([encoding]).to(model.device)
    hidden = model.hidden(batch, head)[torch.from_numpy(at).to(model.device)]  # (T, D) -> (masks, D)
    logits = model.head(head)(hidden, batch, model.encoder.embeddings.words.weight)
    probabilities = logits.float().softmax(-1).cpu()[:, : tokenizer.vocab_size]  # the table may have unused rows
    best = probabilities.topk(min(top, probabilities.shape[1]))
    return {
        "text": text,
        "masks": [
            {tokenizer.token(i): finite_or_none(round(probability, 4)) for i, probability in zip(ids, row, strict=True)}
            for ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
    }


def write_samples(folder: Path, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
    """Append samples to samples.jsonl, replacing those of this step and later ones, from before a rollback."""
    path = folder / SAMPLES
    lines = path.read_text("utf-8").split("\n") if path.exists() else []
    lines = [line for line in lines if line and json.loads(line)["step"] < step]
    lines += [json.dumps({"step": step, **sample}, ensure_ascii=False) for sample in samples]
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode("utf-8"))
