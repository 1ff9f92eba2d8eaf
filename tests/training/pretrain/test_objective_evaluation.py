"""Held-out scores of pairs of sentences and of replaced tokens, beside plain computations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from bertie.text.batch import Batch
from bertie.text.tokenizer_training import train
from bertie.training.pretrain.corpus import Corpus, CorpusSettings, build_corpus
from bertie.training.pretrain.initialization import new_model
from bertie.training.pretrain.monitoring import HeldOutEvaluation
from bertie.training.pretrain.objective_evaluation import PairEvaluation, ReplacedTokenEvaluation
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection
from bertie.training.pretrain.sentence_pairs import NextSentence, SentenceOrder, SentencePairSampler
from tests.training.pretrain.corpus_texts import texts

SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Corpus]:
    folder: Path = tmp_path_factory.mktemp("evaluation")
    (folder / "in.txt").write_text("\n\n".join(texts(40, seed=2)) + "\n")
    tokenizer = train((folder / "in.txt").read_text().split("\n"), vocab_size=200, max_length=64)
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "corpus", CorpusSettings())
    return tokenizer, Corpus.open(folder / "corpus", tokenizer)


def model(tokenizer: Any, head: Any, family: str = "bert", seed: int = 0) -> Any:
    made = new_model({"model_type": family, **SHAPE, "max_position_embeddings": 64}, tokenizer, head=head, seed=seed)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter))
    return made.model


@pytest.mark.parametrize(("head", "task"), [("nsp", NextSentence), ("sop", SentenceOrder)])
def test_the_accuracy_of_pairs(parts: tuple[Any, Corpus], head: str, task: Any) -> None:
    tokenizer, corpus = parts
    of = model(tokenizer, head, "bert" if head == "nsp" else "albert")
    sampler = SentencePairSampler(
        corpus, tokenizer, 1 << 20, pairs=task(), budget=512, max_length=64, seed=0
    ).first_epoch()
    evaluation = PairEvaluation(sampler, head, dtype=torch.float32)
    right = []
    with torch.no_grad():
        for step in range(sampler.total_steps):
            for example in sampler.read(step)[1]:
                (window,) = example.windows
                logits = of(Batch.from_ids([window.ids], [window.segments]), head)[0]
                right.append(int(logits.argmax()) == int(example.extras["label"]))
    assert len(right) > 30
    of.train()
    assert evaluation(of)[f"{head}_accuracy"] == pytest.approx(np.mean(right))
    assert of.training
    score = evaluation.scores(of)[f"{head}_accuracy"]
    assert score.low < score.value < score.high
    limited = PairEvaluation(sampler, head, limit=10, dtype=torch.float32)
    assert 0 < len(limited.correct(of)) < len(right)


@pytest.mark.parametrize("family", ["electra", "deberta-v2"])
def test_replaced_tokens(parts: tuple[Any, Corpus], family: str) -> None:
    tokenizer, corpus = parts
    discriminator, generator = model(tokenizer, "rtd", family), model(tokenizer, "mlm", family, seed=1)
    detection = ReplacedTokenDetection(generator, discriminator, "none")
    held_out = HeldOutEvaluation(PackedCorpus(corpus, 512, 64, seed=0), tokenizer, budget=512)
    evaluation = ReplacedTokenEvaluation(held_out, detection)
    logits: list[float] = []
    labels: list[bool] = []
    with torch.no_grad():
        probe = discriminator.eval()(Batch.from_ids([next(held_out.groups())[0].ids]), "rtd")
        discriminator.head("rtd").out.bias -= probe.median()
        for number, passages in enumerate(held_out.groups()):
            batch = Batch.from_ids([passage.ids for passage in passages])
            starts = np.cumsum([0, *batch.lengths[:-1]])
            rows = np.concatenate([p.rows + start for p, start in zip(passages, starts, strict=True)])
            targets = np.concatenate([p.targets for p in passages])
            special = torch.from_numpy(np.isin(batch.ids.numpy(), corpus.manifest["tokenizer"]["special"]))
            special[rows] = False
            tensors = (torch.from_numpy(rows), torch.from_numpy(targets), special)
            losses = detection.eval()(batch, *tensors, generator=torch.Generator().manual_seed(number))
            logits += losses.logits[~special].tolist()
            labels += losses.replaced[~special].tolist()
    scores = evaluation.scores(discriminator)
    predicted = [logit > 0 for logit in logits]
    assert scores["rtd_precision"].value == pytest.approx(precision_score(labels, predicted), abs=0.01)
    assert scores["rtd_recall"].value == pytest.approx(recall_score(labels, predicted), abs=0.01)
    assert scores["rtd_auroc"].value == pytest.approx(roc_auc_score(labels, logits), abs=0.01)
    assert all(score.low <= score.value <= score.high for score in scores.values())
    plain = held_out(generator)
    assert scores["generator_accuracy"].value == pytest.approx(plain["accuracy"])
    assert scores["generator_perplexity"].value == pytest.approx(plain["perplexity"])
    logged = evaluation(discriminator)
    assert logged["rtd_auroc"] == pytest.approx(scores["rtd_auroc"].value)
    assert logged["rtd_auroc_se"] > 0
