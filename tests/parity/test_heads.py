"""The heads of pretraining and multiple choice, as tasks, beside transformers (and Microsoft's code for DeBERTa-v3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bertie
from bertie.training.finetune.base import training_for
from bertie.training.finetune.data import read_dataset
from tests.tasks.tiny import WORDS, save, sentences, tokenizer

SENTENCES = sentences(24, seed=3)
PAIRS = list(zip(SENTENCES[:12], SENTENCES[12:], strict=True))
RELATIVE = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "share_att_key": True}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def randomize(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower():
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    return model.eval()


def save_family(folder: Path, stem: str, head: str, **config: Any) -> Any:
    """A tiny checkpoint of another family than BERT, with BERT's tokenizer; returns transformers' model."""
    text = tokenizer("wordpiece")
    text.model_max_length = 128
    made = getattr(transformers, f"{stem}Config")(vocab_size=len(text), **SIZES, **config)
    model = randomize(getattr(transformers, stem + head)(made))
    model.save_pretrained(folder)
    text.save_pretrained(folder)
    return model


def encoded(texts: list[Any]) -> dict[str, torch.Tensor]:
    text = tokenizer("wordpiece")
    first, second = ([pair[i] for pair in texts] for i in (0, 1))
    return dict(text(first, second, padding=True, return_tensors="pt"))


# --- pairs of sentences ---


@pytest.mark.parametrize("head", ["ForNextSentencePrediction", "ForPreTraining"])
def test_next_sentence_prediction(tmp_path: Path, head: str) -> None:
    folder = save(tmp_path / "model", "wordpiece", head, max_length=128)
    theirs = getattr(transformers, f"Bert{head}").from_pretrained(folder).eval()
    with torch.no_grad():
        output = theirs(**encoded(PAIRS))
    logits = output.logits if head == "ForNextSentencePrediction" else output.seq_relationship_logits
    expected = logits.softmax(-1).numpy()
    for task in (bertie.load(folder, head="nsp"), bertie.Classifier.load(folder, head="nsp")):
        assert isinstance(task, bertie.Classifier)
        assert task.classes_.tolist() == ["is_next", "not_next"]
        np.testing.assert_allclose(task.predict_proba(PAIRS), expected, atol=1e-5)
    assert task.classify([PAIRS[0]])[0].label == ("is_next", "not_next")[int(expected[0].argmax())]
    with pytest.raises(bertie.InputError, match="text 0 must be a pair of texts, which the head 'nsp' takes, not str"):
        task.classify(["a single text"])


def test_without_a_name_the_only_head_is_chosen(tmp_path: Path) -> None:
    folder = save(tmp_path / "nsp", "wordpiece", "ForNextSentencePrediction")
    assert bertie.load(folder).head == "nsp"
    both = save(tmp_path / "both", "wordpiece", "ForPreTraining")
    assert isinstance(bertie.load(both), bertie.MaskedLM)
    checkpoint = bertie.Checkpoint.load(both)
    assert bertie.Classifier(checkpoint).head == "nsp"
    bertie.MultiTask(checkpoint, {"mood": "classify"}, epochs=1, lr=1e-3).fit(
        {"mood": (SENTENCES, ["good", "bad"] * 12)}, progress=False
    ).save(tmp_path / "two")
    assert bertie.Classifier.load(tmp_path / "two").head == "mood"
    assert bertie.Classifier.load(tmp_path / "two", head="nsp").head == "nsp"


def test_sentence_order_prediction(tmp_path: Path) -> None:
    theirs = save_family(tmp_path, "Albert", "ForPreTraining", embedding_size=16, max_position_embeddings=128)
    with torch.no_grad():
        expected = theirs(**encoded(PAIRS)).sop_logits.softmax(-1).numpy()
    task = bertie.Classifier.load(tmp_path, head="sop")
    assert task.classes_.tolist() == ["in_order", "swapped"]
    np.testing.assert_allclose(task.predict_proba(PAIRS), expected, atol=1e-5)


# --- replaced-token detection ---


def test_replaced_token_detection(tmp_path: Path) -> None:
    theirs = save_family(tmp_path, "Electra", "ForPreTraining", embedding_size=16, max_position_embeddings=128)
    task = bertie.load(tmp_path)
    assert isinstance(task, bertie.ReplacedTokenDetector)
    text = tokenizer("wordpiece")
    for sentence, result in zip(SENTENCES, task.detect(SENTENCES), strict=True):
        with torch.no_grad():
            inputs = text(sentence, return_tensors="pt", return_offsets_mapping=True)
            offsets = inputs.pop("offset_mapping")[0, 1:-1].tolist()
            expected = theirs(**inputs).logits[0, 1:-1].sigmoid().tolist()
        assert [token.score for token in result.tokens] == pytest.approx(expected, abs=1e-5)
        assert [[token.start, token.end] for token in result.tokens] == offsets
        for word in result.words:
            inside = [t.score for t in result.tokens if word.start <= t.start and t.end <= word.end]
            assert word.score == max(inside)
            assert sentence[word.start : word.end] == word.text
        assert "".join(word.text for word in result.words) == sentence.replace(" ", "")
        assert all(word.score >= 0.5 for word in result.replaced)


class _Microsoft(torch.nn.Module):
    """LMMaskPredictionHead of the DeBERTa repository, by its description in the DeBERTa-v3 code."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(width, width)
        self.LayerNorm = torch.nn.LayerNorm(width, eps)
        self.classifier = torch.nn.Linear(width, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        states = self.LayerNorm(hidden[:, :1] + hidden)
        return self.classifier(torch.nn.functional.gelu(self.dense(states)))[..., 0]


def test_deberta_v3_discriminator(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    encoder = save_family(folder, "DebertaV2", "Model", type_vocab_size=0, **RELATIVE)
    head = randomize(_Microsoft(32, encoder.config.layer_norm_eps))
    with torch.no_grad():
        head.LayerNorm.weight.copy_(1 + 0.2 * torch.randn(32))
    tensors = {f"deberta.{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    tensors |= {f"mask_predictions.{name}": value.contiguous() for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    task = bertie.load(folder, head="rtd")
    assert isinstance(task, bertie.ReplacedTokenDetector)
    text = tokenizer("wordpiece")
    for sentence, result in zip(SENTENCES, task.detect(SENTENCES), strict=True):
        ids = text(sentence, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = head(encoder(ids).last_hidden_state)[0, 1:-1].sigmoid().tolist()
        assert [token.score for token in result.tokens] == pytest.approx(expected, abs=1e-5)
    task.save(tmp_path / "copy")
    again = bertie.ReplacedTokenDetector.load(tmp_path / "copy")
    assert again.detect(SENTENCES[0]) == task.detect(SENTENCES[0])


# --- multiple choice ---


@pytest.fixture(scope="module")
def choice_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("choice"), "wordpiece", "ForMultipleChoice", max_length=128)


QUESTIONS = [(SENTENCES[i], [SENTENCES[(i + 5 + j) % 24] for j in range(2 + i % 3)]) for i in range(12)]
RIGHT = [i % len(choices) for i, (_, choices) in enumerate(QUESTIONS)]


def their_logits(model: Any, question: tuple[str, list[str]]) -> torch.Tensor:
    inputs = encoded([(question[0], choice) for choice in question[1]])
    logits: torch.Tensor = model(**{name: value[None] for name, value in inputs.items()}).logits[0]
    return logits


def test_multiple_choice(choice_folder: Path) -> None:
    theirs = transformers.BertForMultipleChoice.from_pretrained(choice_folder).eval()
    task = bertie.load(choice_folder)
    assert isinstance(task, bertie.Chooser)
    results = task.choose(QUESTIONS)
    for question, result in zip(QUESTIONS, results, strict=True):
        with torch.no_grad():
            expected = their_logits(theirs, question).softmax(-1)
        assert list(result.scores) == pytest.approx(expected.tolist(), abs=1e-5)
        assert result.index == int(expected.argmax())
        assert result.choice == question[1][result.index]
        assert task.choose(*question) == result
    assert task.predict(QUESTIONS).tolist() == [result.index for result in results]


def test_gradients_of_multiple_choice(choice_folder: Path) -> None:
    theirs = transformers.BertForMultipleChoice.from_pretrained(choice_folder).eval()
    losses = [
        torch.nn.functional.cross_entropy(their_logits(theirs, q), torch.tensor(y))
        for q, y in zip(QUESTIONS, RIGHT, strict=True)
    ]
    total = torch.stack(losses).sum()
    total.backward()
    task = bertie.Chooser.load(choice_folder)
    training = training_for(task)
    data = read_dataset("choose", QUESTIONS, RIGHT)
    objective = training.objective(data)
    items = list(training.items(data))
    model = task.model
    for parts in ([items], [items[:5], items[5:]]):
        model.zero_grad()
        value = 0.0
        for part in parts:
            loss = objective.forward(model, objective.collate(part), "choice")
            loss.backward()
            value += float(loss.detach())
        assert value == pytest.approx(float(total.detach()), abs=1e-4)
        own = dict(model.named_parameters())
        stored = {rule.ours: rule for rule in task.checkpoint.spec.weight_map.rules}
        named = dict(theirs.named_parameters())
        compared = 0
        for name, rule in stored.items():
            gradient = own[name].grad
            if len(rule.theirs) == 1 and gradient is not None:
                torch.testing.assert_close(gradient, named[rule.theirs[0]].grad, atol=1e-5, rtol=1e-4)
                compared += 1
        assert compared > 20


def test_long_contexts_are_read_in_windows(choice_folder: Path) -> None:
    task = bertie.Chooser.load(choice_folder)
    context = " ".join(SENTENCES)
    result = task.choose(context, ["the river", "a letter"])
    assert result.tokens_read == result.tokens_total > 128
    assert result.windows > 2
    (example,) = training_for(task).items(read_dataset("choose", [(context, ["the river", "a letter"])], [1]))
    assert len(example.windows) == result.windows
    assert sum(window.share for window in example.windows) == pytest.approx(2)


# --- candidates of several tokens ---


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_candidates_of_several_tokens(tmp_path: Path, kind: str) -> None:
    folder = save(tmp_path, kind, "ForMaskedLM", max_length=128)
    stem = "Bert" if kind == "wordpiece" else "Roberta"
    theirs = getattr(transformers, f"{stem}ForMaskedLM").from_pretrained(folder).eval()
    text, task = tokenizer(kind), bertie.MaskedLM.load(folder)
    mask = text.mask_token
    candidates = ["the", "government", "Jane Austen", "international relationship"]
    content = f"The river was {mask} in the morning, {mask} wrote."
    result = task.fill(content, candidates=candidates)
    starts = [i for i in range(len(content)) if content.startswith(mask, i)]
    for start, prediction in zip(starts, result.masks, strict=True):
        expected = {}
        for candidate in candidates:
            variant = content[:start] + candidate + content[start + len(mask) :]
            encoding = text(variant, return_offsets_mapping=True)
            end = start + len(candidate)
            tokens = [i for i, (a, b) in enumerate(encoding["offset_mapping"]) if b > start and a < end and b > a]
            total = 0.0
            for i, token in enumerate(tokens):
                ids = list(encoding["input_ids"])
                for other in tokens[i:]:
                    ids[other] = text.mask_token_id
                with torch.no_grad():
                    logits = theirs(torch.tensor([ids])).logits[0, token]
                total += float(logits.log_softmax(-1)[encoding["input_ids"][token]])
            expected[candidate] = total
        ranked = sorted(expected, key=lambda name: -expected[name])
        assert [candidate.text for candidate in prediction.candidates] == ranked
        for scored in prediction.candidates:
            assert math.log(scored.score) == pytest.approx(expected[scored.text], abs=1e-4)
            assert (scored.id is None) == (" " in scored.token)
    assert task.fill([content, content], top_k=2, candidates=candidates)[1].masks == tuple(
        bertie.MaskPrediction(m.start, m.end, m.candidates[:2]) for m in result.masks
    )


def test_candidates_in_long_texts(tmp_path: Path) -> None:
    task = bertie.MaskedLM.load(save(tmp_path, "wordpiece", "ForMaskedLM"))
    text = " ".join(SENTENCES[:8]) + " [MASK] " + " ".join(SENTENCES[8:])
    result = task.fill(text, candidates=["Jane Austen", "London"])
    assert result.windows > 1
    assert result.tokens_read == result.tokens_total
    (mask,) = result.masks
    assert text[mask.start : mask.end] == "[MASK]"
    assert all(0 < candidate.score < 1 for candidate in mask.candidates)
    with pytest.raises(bertie.InputError, match="more than the maximum length allows"):
        task.fill(text, candidates=[" ".join(WORDS)])
