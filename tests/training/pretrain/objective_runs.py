"""Runs over a corpus, in processes that tests start.

    python -m tests.training.pretrain.objective_runs killed|ranks FOLDER CASE:HOW …

`killed`: as in tests.training.kill_points, with other cases. `ranks`: one of several processes, as in
tests.training.distributed_worker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.nn.model import Model
from bertie.recipe import Recipe
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.loop import Trainer
from bertie.training.objectives import ModelObjective, SingleLabelObjective, Targets, TrainingExample
from bertie.training.pretrain import replaced_tokens
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.initialization import new_model
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection, ReplacedTokenObjective
from bertie.training.pretrain.samplers import BatchSizeWarmup, MaskedLMSampler, MixtureSampler
from bertie.training.pretrain.sentence_distillation import (
    AlignedCorpora,
    SentenceDistillation,
    SentenceDistillationSampler,
)
from bertie.training.pretrain.sentence_pairs import NextSentence, SentencePairSampler
from bertie.training.sampling import BatchSampler, ExampleSampler, TrainingTask
from bertie.training.step import ObjectiveModule
from tests.training import kill_points, tiny
from tests.training.pretrain.corpus_texts import PIECES, SPECIALS, texts, tokenizer_of

REACH, BUDGET = 32, 160
STEPS = 14
CASES = ("mlm", "tied", "gdes", "taught", "pairs", "mixed", "growing", "poison")


@cache
def tokenizers() -> tuple[Tokenizer, Tokenizer]:
    """Of the same words: one has all syllables, the other pairs of them as well."""
    syllables = [*SPECIALS, ".", *PIECES, *(f"##{piece}" for piece in PIECES)]
    pairs = [f"{a}{b}" for a in PIECES[:20] for b in PIECES[:20]]
    return tokenizer_of(syllables), tokenizer_of([*syllables, *pairs])


def corpora(folder: Path) -> tuple[Corpus, Corpus]:
    """Two of the same documents; made when they are first asked for."""
    for number, tokenizer in enumerate(tokenizers()):
        if not (folder / str(number) / "corpus.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "in.txt").write_text("\n\n".join(texts(40, seed=3)) + "\n")
            build_corpus([str(folder / "in.txt")], tokenizer, folder / str(number))
    first, second = (Corpus.open(folder / str(number)) for number in range(2))
    return first, second


def checkpoint(tokenizer: Tokenizer, width: int = 16, seed: int = 0, **options: Any) -> Checkpoint:
    dropout = {"hidden_dropout_prob": options.pop("dropout", 0.0), "attention_probs_dropout_prob": 0.0}
    shape = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = {"model_type": "bert", **shape, **dropout, "max_position_embeddings": 64, "initializer_range": 0.2}
    return new_model(config, tokenizer, seed=seed, **options)


class Times(SingleLabelObjective):
    """A loss so many times as large."""

    detect_spikes = True

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def loss(self, outputs: Tensor, batch: Batch, targets: Targets) -> Tensor:
        return super().loss(outputs, batch, targets) * self.factor


class Poisoned:
    """A plan, of which the losses of some steps are so many times as large. It looks the same from outside."""

    def __init__(self, steps: int, factors: dict[int, float]) -> None:
        self.inner = ExampleSampler([tiny.source(32, length=6)], tiny.recipe(epochs=steps / 8, batch_size=4))
        self.factors = factors
        self.total_steps, self.heads, self.epoch_starts, self.single_head = (
            steps,
            self.inner.heads,
            self.inner.epoch_starts,
            True,
        )
        self.epoch_of, self.epochs_done, self.schedule_position = (
            self.inner.epoch_of,
            self.inner.epochs_done,
            self.inner.schedule_position,
        )
        self.fingerprint = self.inner.fingerprint

    def read(self, step: int) -> tuple[TrainingTask, list[TrainingExample]]:
        source, items = self.inner.read(step)
        return TrainingTask(source.head, Times(self.factors.get(step, 1.0)), ()), items


def made(case: str, data: Path, folder: Path | None = None, dropout: float = 0.0, **options: Any) -> Trainer:
    """A run of a case."""
    recipe = Recipe(lr=2e-3, batch_tokens=BUDGET, micro_tokens=64, dropout=dropout, seed=5)
    settings: dict[str, Any] = {"keep": "last", "progress": False, "rollback": folder is not None} | options
    if case == "poison":
        plan: BatchSampler = Poisoned(48, {17: float("nan"), 31: float("nan")})
        return Trainer(tiny.model(dropout), plan, tiny.recipe(batch_size=4), folder=folder, **settings)
    (ours, theirs), (tokenizer, other) = corpora(data), tokenizers()
    head: Any = {"tied": "rtd", "gdes": "rtd", "pairs": "nsp"}.get(case, "mlm")
    model = checkpoint(tokenizer, head=head, dropout=dropout).model
    packed = PackedCorpus(ours, BUDGET, REACH, 5)
    if case == "pairs":
        plan = SentencePairSampler(
            ours, tokenizer, STEPS, pairs=NextSentence(), budget=BUDGET, max_length=REACH, seed=5
        )
    elif case in ("tied", "gdes"):
        generator = checkpoint(tokenizer, 16, seed=1, dropout=dropout).model
        objective = ReplacedTokenObjective(ReplacedTokenDetection(generator, model, case))  # type: ignore[arg-type]
        plan = MaskedLMSampler(packed, tokenizer, STEPS, objective=objective, heads=("rtd",))
    elif case == "growing":
        plan = BatchSizeWarmup(MaskedLMSampler(packed, tokenizer, 3 * STEPS), 4, 0.5)
    elif case == "mlm":
        plan = MaskedLMSampler(packed, tokenizer, STEPS)
    else:
        teacher = checkpoint(other, 16, seed=2)
        teacher.sentence = SentenceModules.create(16, "mean", max_seq_length=64)
        aligned = AlignedCorpora(ours, theirs, REACH)
        how: dict[str, Any] = {"budget": BUDGET, "seed": 5}
        taught: Any = SentenceDistillationSampler(
            aligned, tokenizer, STEPS, SentenceDistillation(model, teacher, layers=2), masking=Masking(), **how
        )
        bare: Any = SentenceDistillationSampler(
            aligned, tokenizer, STEPS, SentenceDistillation(model, teacher, words=0.0), **how
        )
        plan = taught if case == "taught" else MixtureSampler([taught, bare], [1, 1], STEPS, 5)
    return Trainer(model, plan, recipe, folder=folder, **settings)


def train(case: str, folder: Path) -> None:
    """Train to the end, or on to it, and keep what came out."""
    trainer = made(case, DATA, folder, dropout=0.1, resume=True, save_steps=3, evaluate_at={4, 9})

    def evaluate() -> dict[str, float]:
        torch.rand(3)  # evaluating may draw numbers
        return {"size": float(sum(p.detach().double().abs().sum() for p in trainer.model.parameters()))}

    trainer.evaluate = evaluate
    done = trainer.run()
    kept = (tiny.weights(trainer.model), done.curve, done.evaluations, done.best_step, done.steps, done.tokens)
    torch.save(kept, folder / "result")


def kept(trainer: Trainer) -> dict[str, Any]:
    """What came out of a run."""
    return {"curve": trainer.run().curve, "weights": tiny.weights(trainer.model)}


def likeliest(logits: Tensor, draw: Any = None) -> Tensor:
    """Guesses that do not depend on which process makes them."""
    return logits.argmax(-1)


def gradients(
    of: Model, objective: ModelObjective, parts: Sequence[Sequence[TrainingExample]]
) -> tuple[float, dict[str, Tensor]]:
    """As the loop does it: each part's loss by the number of texts of the step."""
    whole = [item for part in parts for item in part]
    counted = objective.with_counts(objective.count_step(whole))
    of.zero_grad(set_to_none=True)
    total = 0.0
    for part in parts:
        loss = ObjectiveModule(of)(counted.collate(part), "", counted) / len(whole)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in of.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)], fused=True).zero_grad()  # what torch loads when it is first used
    top = Path(sys.argv[2])
    DATA = top / "data"
    if sys.argv[1] == "killed":
        kill_points.train = train
        corpora(DATA)
        for asked in sys.argv[3:]:
            print(asked, kill_points.main(*asked.split(":"), top / asked), flush=True)  # type: ignore[arg-type, call-arg]
    else:
        replaced_tokens.sample = likeliest
        for asked in sys.argv[3:]:
            case, strategy = asked.split(":")
            torch.save(kept(made(case, DATA, strategy=strategy)), top / f"{asked}-{os.environ['RANK']}")
