"""Fresh and extend_vocabulary models, against transformers; and the recipes that begin with them."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken
from torch.testing import assert_close

from bertie import recipes
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.config import HeadInfo
from bertie.errors import ConfigError
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.text.tokenizer_training import extend, train
from bertie.training.pretrain.initialization import extend_vocabulary, new_model
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.mlm_distillation import DistilBertLoss, copy_layers
from bertie.training.pretrain.pretrain_recipe import PretrainRecipe
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection

TEXTS = ["The cat sat on the mat, and a dog looked at it.", "A river runs to the sea; the sea is never full."] * 3
PAIR = ("the cat looked at the sea", "a dog sat on it")
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
}
TINY: dict[str, dict[str, Any]] = {
    "bert": SMALL,
    "roberta": SMALL,
    "albert": SMALL | {"embedding_size": 12},
    "electra": SMALL | {"embedding_size": 12},
    "modernbert": SMALL | {"num_hidden_layers": 3, "local_attention": 4},
    "deberta-v2": SMALL
    | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 48},
    "mpnet": SMALL,
}
ANGLES = ("roberta", "mpnet")  # positions count from the padding id, which must be 1
PAPERS = sorted(file for file in (recipes.FOLDER / "pretrain").glob("*.toml") if file.stem != "tiny")


@cache
def tokenizer_of(model_type: str) -> Tokenizer:
    if model_type in ANGLES:
        return train(TEXTS, "bpe", 300, style="angles")
    kind = {"modernbert": "bpe", "deberta-v2": "unigram", "albert": "unigram"}.get(model_type, "wordpiece")
    return train(TEXTS, kind, 300, min_frequency=1)  # type: ignore[arg-type]


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **TINY[model_type], **more}


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return checkpoint.model.state_dict()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def theirs(folder: Path, name: str) -> Any:
    """transformers' model, which must find every tensor and need no other."""
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def both(checkpoint: Checkpoint, folder: Path, name: str, text: str, pair: str | None = None) -> tuple[Batch, Any]:
    """The flat batch of one text or pair, and what transformers' model and tokenizer make of it."""
    assert checkpoint.tokenizer is not None
    encoding = checkpoint.tokenizer.encode(text, pair)
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(text, pair, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == encoding.ids.tolist()
    return Batch.from_encodings([encoding]), theirs(folder, name)(**inputs)


# --- new models ---


@pytest.mark.parametrize("model_type", TINY)
def test_transformers_loads_what_is_saved(model_type: str, tmp_path: Path) -> None:
    checkpoint = new_model(config(model_type, initializer_range=0.3), tokenizer_of(model_type))
    (name,) = checkpoint.config["architectures"]
    assert name.endswith("ForMaskedLM")
    assert checkpoint.config["vocab_size"] == tokenizer_of(model_type).vocab_size
    checkpoint.save(tmp_path / "model")
    assert_same(weights(Checkpoint.load(tmp_path / "model")), weights(checkpoint))
    batch, out = both(checkpoint, tmp_path / "model", name, *PAIR)
    with torch.no_grad():
        # Weights as large as these make logits of 5, of which float32 has a digit less.
        size = max(1.0, float(out.logits.abs().max()))
        assert_close(checkpoint.model(batch, "mlm"), out.logits[0], atol=1e-5 * size, rtol=0)
    read = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for role in ("pad", "cls", "sep", "mask"):
        assert getattr(read, f"{role}_token_id") == getattr(words, f"{role}_token_id") is not None


@pytest.mark.parametrize(
    ("model_type", "head", "name", "output"),
    [
        ("bert", "nsp", "BertForPreTraining", "seq_relationship_logits"),
        ("albert", "sop", "AlbertForPreTraining", "sop_logits"),
        ("electra", "rtd", "ElectraForPreTraining", "logits"),
    ],
)
def test_other_heads(model_type: str, head: Any, name: str, output: str, tmp_path: Path) -> None:
    checkpoint = new_model(config(model_type, initializer_range=0.3), tokenizer_of(model_type), head=head)
    assert checkpoint.config["architectures"] == [name]
    assert list(checkpoint.model.heads) == list(checkpoint.heads) == ([head] if head == "rtd" else ["mlm", head])
    checkpoint.save(tmp_path / "model")
    assert_same(weights(Checkpoint.load(tmp_path / "model")), weights(checkpoint))
    batch, out = both(checkpoint, tmp_path / "model", name, *PAIR)
    with torch.no_grad():
        assert_close(checkpoint.model(batch, head).squeeze(), out[output].squeeze(), atol=1e-5, rtol=0)


def test_a_borrowed_head_is_not_saved(tmp_path: Path) -> None:
    """DistilBERT has no head that finds replaced tokens: others load the encoder."""
    checkpoint = new_model(config("distilbert"), tokenizer_of("distilbert"), head="rtd")
    assert checkpoint.config["architectures"] == ["DistilBertModel"]
    head = checkpoint.model.head("rtd")
    assert head.dense is not None
    assert head.out is not None
    assert head.out.out_features == 1
    assert 0.015 < float(head.dense.weight.detach().std()) < 0.025
    checkpoint.save(tmp_path / "model")
    batch, out = both(checkpoint, tmp_path / "model", "DistilBertModel", *PAIR)
    with torch.no_grad():
        assert_close(checkpoint.model.hidden(batch), out.last_hidden_state[0], atol=1e-5, rtol=0)
        assert checkpoint.model(batch, "rtd").shape == (len(batch.ids), 1)
    left = {name: x for name, x in weights(checkpoint).items() if not name.startswith("heads.rtd.")}
    assert_same(weights(Checkpoint.load(tmp_path / "model")), left)


def test_the_discriminator_of_deberta_is_saved_as_published(tmp_path: Path) -> None:
    checkpoint = new_model(config("deberta-v2"), tokenizer_of("deberta-v2"), head="rtd")
    assert checkpoint.config["architectures"] == ["DebertaV2Model"]
    checkpoint.save(tmp_path / "model")
    again = Checkpoint.load(tmp_path / "model")
    assert list(again.heads) == ["rtd"]
    assert_same(weights(again), weights(checkpoint))


def test_the_seed_alone_decides() -> None:
    tokenizer = tokenizer_of("bert")
    first = new_model(config("bert"), tokenizer, seed=7)
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    again = new_model(config("bert"), tokenizer, seed=7)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was moved"
    assert_same(weights(first), weights(again))
    other = new_model(config("bert"), tokenizer, seed=8)
    table = "encoder.embeddings.words.weight"
    assert not torch.equal(weights(first)[table], weights(other)[table])
    paired = new_model(config("bert"), tokenizer, head="nsp", seed=7)
    assert torch.equal(weights(first)[table], weights(paired)[table])


def test_weights_and_dropout_are_those_of_the_config() -> None:
    made = new_model(
        config("bert", hidden_size=64, initializer_range=0.05, hidden_dropout_prob=0.3), tokenizer_of("bert")
    )
    for name, x in weights(made).items():
        if x.ndim > 1:
            assert abs(float(x.std()) - 0.05) < 0.005, name
        else:
            assert torch.equal(x, torch.full_like(x, 0.0 if name.endswith("bias") else 1.0)), name
    assert made.model.config.dropout == 0.3
    assert not made.model.training


def test_vocabulary_sizes() -> None:
    tokenizer = tokenizer_of("bert")
    size = tokenizer.vocab_size
    rounded = new_model(config("bert", vocab_size=320), tokenizer)
    assert rounded.model.config.vocab == rounded.config["vocab_size"] == 320
    with pytest.raises(ConfigError, match=rf"vocab_size={size - 1} must be at least {size}"):
        new_model(config("bert", vocab_size=size - 1), tokenizer)
    with pytest.raises(ConfigError, match="vocab_size='many'"):
        new_model(config("bert", vocab_size="many"), tokenizer)


def test_ids_with_gaps() -> None:
    """The last id decides, not the number of tokens."""
    state = json.loads(tokenizer_of("bert").files()["tokenizer.json"])
    last = max(state["model"]["vocab"].values())
    state["model"]["vocab"]["zebra"] = last + 10
    backend = type(tokenizer_of("bert")._backend).from_str(json.dumps(state))
    assert new_model(config("bert"), Tokenizer(backend)).config["vocab_size"] == last + 11


def test_what_contradicts_the_tokenizer_is_refused() -> None:
    tokenizer = tokenizer_of("bert")
    with pytest.raises(ConfigError, match="pad_token_id=3 must be 0, as in the tokenizer, or absent"):
        new_model(config("bert", pad_token_id=3), tokenizer)
    assert new_model(config("bert", pad_token_id=0), tokenizer).config["pad_token_id"] == 0
    with pytest.raises(ConfigError, match="pad_token_id=0 is not supported; allowed: 1"):
        new_model(config("mpnet"), tokenizer)
    with pytest.raises(ConfigError, match="type_vocab_size=1 must be at least 2"):
        new_model(config("bert", type_vocab_size=1), tokenizer)
    assert (
        new_model(config("roberta", type_vocab_size=1), tokenizer_of("roberta")).model.config.embeddings.segments == 1
    )


def test_a_tokenizer_without_padding() -> None:
    state = json.loads(tokenizer_of("bert").files()["tokenizer.json"])
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] != "[PAD]"]
    bare = Tokenizer(type(tokenizer_of("bert")._backend).from_str(json.dumps(state)))
    assert bare.pad_id is None
    for model_type in ("bert", "modernbert"):  # which has an id of its own for it, beyond this vocabulary
        assert new_model(config(model_type), bare).model.config.pad_id is None
    with pytest.raises(ConfigError, match="pad_token_id=None"):
        new_model(config("roberta"), bare)


def test_unknown_families_heads_and_keys() -> None:
    tokenizer = tokenizer_of("bert")
    with pytest.raises(ConfigError, match="head='sop' is not available for bert, only for albert"):
        new_model(config("bert"), tokenizer, head="sop")
    with pytest.raises(ConfigError, match="head='classify' must be one of mlm, nsp, sop, rtd"):
        new_model(config("bert"), tokenizer, head="classify")
    with pytest.raises(ConfigError, match="model_type='gpt2'"):
        new_model(SMALL | {"model_type": "gpt2"}, tokenizer)
    with pytest.raises(ConfigError, match="hiden_size=32"):
        new_model(config("bert", hiden_size=32), tokenizer)
    with pytest.raises(ConfigError, match="does not fit in memory"):
        new_model(config("bert", hidden_size=2**31 - 2), tokenizer)


# --- extend_vocabulary ---

NEW = "A stethoscope and the sphygmomanometer measured hypertension."


def longer(old: Tokenizer, folder: Path) -> Tokenizer:
    old.save(folder)
    return extend(folder, [NEW], new_tokens=6, min_frequency=1)


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"vocab_size": 400}])
def test_new_rows_are_means_of_old_ones(changes: dict[str, Any], tmp_path: Path) -> None:
    old = train(
        [*TEXTS, "hypogymnosperm scope"], vocab_size=70, min_frequency=1
    )  # which has the letters of the new words
    before = new_model(config("bert", initializer_range=0.3, **changes), old)
    for part in before.model.head("mlm").parameters():
        part.normal_()
    before.add_head("topics", HeadInfo("classify", {0: "a", 1: "b"}))
    before.add_head("guess", HeadInfo("mlm"))
    before.save(tmp_path / "old")
    kept = {name: x.clone() for name, x in weights(before).items()}
    words = longer(old, tmp_path / "tokenizer")
    size = before.model.config.vocab
    known = [old.vocabulary.get(id, "") for id in range(size)]
    before.sentence = SentenceModules.create(16).with_token_weights(torch.rand(size), known)
    new = extend_vocabulary(before, words)
    given, made = (one.sentence.pooling.token_weights for one in (before, new) if one.sentence is not None)
    assert given is not None
    assert made is not None
    assert torch.equal(made[: old.vocab_size], given[: old.vocab_size])
    for id in range(old.vocab_size, words.vocab_size):
        assert_close(made[id], given[old.encode(words.token(id), special=False).ids].mean())
    before.sentence, new.sentence = None, None
    assert words.vocab_size == old.vocab_size + 5
    assert new.config["vocab_size"] == new.model.config.vocab == max(words.vocab_size, changes.get("vocab_size", 0))
    assert_same(weights(before), kept)

    # Old texts: the same states, to the bit. New ones: fewer tokens.
    batch = Batch.from_encodings([old.encode(*PAIR)])
    assert old.encode(*PAIR).ids.tolist() == words.encode(*PAIR).ids.tolist()
    assert torch.equal(before.model.hidden(batch), new.model.hidden(batch))
    assert torch.equal(before.model(batch, "topics"), new.model(batch, "topics"))
    assert_close(new.model(batch, "guess")[:, : old.vocab_size], before.model(batch, "guess")[:, : old.vocab_size])
    assert len(words.encode(NEW)) < len(old.encode(NEW))

    # Saved, and read by transformers: its tables and its tokenizer tell what the rows should be.
    new.save(tmp_path / "new")
    assert_same(weights(Checkpoint.load(tmp_path / "new")), weights(new))
    batch, out = both(new, tmp_path / "new", "BertForMaskedLM", NEW)
    assert_close(new.model(batch, "mlm"), out.logits[0], atol=1e-4, rtol=0)
    first, second = theirs(tmp_path / "old", "BertForMaskedLM"), theirs(tmp_path / "new", "BertForMaskedLM")
    cut = transformers.AutoTokenizer.from_pretrained(tmp_path / "old")
    for id in range(old.vocab_size, words.vocab_size):
        pieces = cut(words.token(id), add_special_tokens=False)["input_ids"]
        assert len(pieces) > 1
        for ours, given in (
            (second.get_input_embeddings().weight, first.get_input_embeddings().weight),
            (second.get_output_embeddings().weight, first.get_output_embeddings().weight),
            (second.get_output_embeddings().bias, first.get_output_embeddings().bias),
        ):
            assert_close(ours[id], sum(given[piece] for piece in pieces) / len(pieces))
            assert_close(ours[: old.vocab_size], given[: old.vocab_size], atol=0, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["roberta", "albert", "modernbert", "deberta-v2", "distilbert"])
def test_other_families_and_added_tokens(model_type: str, tmp_path: Path) -> None:
    """A token that was added by hand, to tokenizers that cannot be extended by words."""
    old = tokenizer_of(model_type)
    before = new_model(config(model_type, initializer_range=0.3), old)
    backend = type(old._backend).from_str(old._backend.to_str())
    backend.add_tokens([AddedToken("zebrafish", normalized=False), AddedToken("\u2028", normalized=False)])
    new = extend_vocabulary(before, Tokenizer(backend, settings=old._settings))
    table, given = new.model.encoder.embeddings.words.weight, before.model.encoder.embeddings.words.weight
    assert table.shape[0] == old.vocab_size + 2
    assert_close(table[-2], given[old.encode("zebrafish", special=False).ids].mean(0))
    assert bool(table.isfinite().all())
    new.save(tmp_path / "new")
    batch, out = both(new, tmp_path / "new", new.config["architectures"][0], "the zebrafish sat on the mat")
    assert_close(new.model(batch, "mlm"), out.logits[0], atol=1e-4, rtol=0)


def test_gaps_and_other_precisions() -> None:
    old = tokenizer_of("bert")
    state = json.loads(old.files()["tokenizer.json"])
    state["model"]["vocab"]["zebra"] = old.vocab_size + 3
    words = Tokenizer(type(old._backend).from_str(json.dumps(state)))
    before = new_model(config("bert"), old)
    before.model.to(torch.bfloat16).train()
    new = extend_vocabulary(before, words)
    assert new.model.dtype == torch.bfloat16
    assert new.model.training
    table = new.model.encoder.embeddings.words.weight.detach().float()
    rows = before.model.encoder.embeddings.words.weight.detach().float()
    assert len(table) == old.vocab_size + 4
    for row in table[old.vocab_size : -1]:
        assert_close(row, rows.mean(0), atol=1e-3, rtol=0)


def test_old_tokens_must_keep_their_ids() -> None:
    checkpoint = new_model(config("bert"), tokenizer_of("bert"))
    state = json.loads(tokenizer_of("bert").files()["tokenizer.json"])
    vocab = state["model"]["vocab"]
    vocab["cat"], vocab["the"] = vocab["the"], vocab["cat"]
    first = min(vocab["cat"], vocab["the"])
    swapped = Tokenizer(type(tokenizer_of("bert")._backend).from_str(json.dumps(state)))
    with pytest.raises(ConfigError, match=rf"id {first} is '(cat|the)' in the model's tokenizer and '(cat|the)'"):
        extend_vocabulary(checkpoint, swapped)
    shorter = json.loads(tokenizer_of("bert").files()["tokenizer.json"])
    last, id = max(shorter["model"]["vocab"].items(), key=lambda one: one[1])
    del shorter["model"]["vocab"][last]
    cut = Tokenizer(type(tokenizer_of("bert")._backend).from_str(json.dumps(shorter)))
    with pytest.raises(ConfigError, match=rf"id {id} is '{last}' in the model's tokenizer and None in the new one"):
        extend_vocabulary(checkpoint, cut)
    checkpoint.tokenizer = None
    with pytest.raises(ConfigError, match="has no tokenizer"):
        extend_vocabulary(checkpoint, swapped)


# --- recipes ---

SHRUNK = {
    "hidden_size": 16,
    "dim": 16,
    "embedding_size": 8,
    "intermediate_size": 24,
    "hidden_dim": 24,
    "num_attention_heads": 2,
    "n_heads": 2,
    "num_hidden_layers": 2,
    "n_layers": 2,
}


def shrunk(model: dict[str, Any]) -> dict[str, Any]:
    return model | {key: small for key, small in SHRUNK.items() if key in model}


def test_the_recipes_are_there() -> None:
    names = ["albert-base", "bert-base", "deberta-v3-small", "distilbert", "electra-small", "modernbert-small"]
    assert [path.stem for path in PAPERS] == [*names, "roberta-base"]


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_recipes(path: Path) -> None:
    """Every field is one that its part takes, and the model is one that can be made."""
    asked = PretrainRecipe.read(path)  # which refuses what it does not know
    recipe = tomllib.loads(path.read_text())
    assert recipe.keys() == {"data", "model", "training", "objective"}
    assert asked.steps > 10_000
    assert ("decay" in recipe["training"]) == (asked.recipe.schedule == "wsd")

    (objective,) = recipe["objective"]
    kind, pairs = objective.pop("kind"), objective.pop("pairs", None)
    assert isinstance(objective.pop("static"), bool)
    masking = {key: objective.pop(key) for key in tuple(objective) if key in Masking.__slots__}
    assert Masking(**masking).rate in (0.15, 0.3)

    tokenizer = tokenizer_of(recipe["model"]["model_type"])
    model = shrunk(recipe["model"])
    checkpoint = new_model(model, tokenizer, head=pairs or ("rtd" if kind == "rtd" else "mlm"))
    assert checkpoint.model.config.max_length >= recipe["training"]["max_length"]
    if kind == "mlm":
        assert not objective
    elif kind == "rtd":
        smaller = objective.pop("generator")
        assert smaller.keys() <= model.keys()
        half = {key: recipe["model"][key] // value for key, value in smaller.items()}
        assert all(share in (2, 4) for share in half.values())
        small = model | {key: max(1, model[key] // share) for key, share in half.items()}
        ReplacedTokenDetection(new_model(small, tokenizer, seed=1).model, checkpoint.model, **objective)
    else:
        objective.pop("teacher")
        assert objective.pop("copy_layers")
        teacher = new_model(config("bert", num_hidden_layers=4, max_position_embeddings=512), tokenizer)
        assert copy_layers(teacher.model, checkpoint.model) == []
        DistilBertLoss(teacher.model, **objective)


def test_full_sizes() -> None:
    """The models of the papers, by the number of their weights; without memory for them."""
    sizes = {"bert-base": 109.5, "roberta-base": 124.6, "electra-small": 13.5, "albert-base": 11.7, "distilbert": 66.4}
    wanted = {"roberta-base": 50265, "albert-base": 30000}
    for path in PAPERS:
        if path.stem in sizes:
            model = tomllib.loads(path.read_text())["model"]
            with torch.device("meta"):
                theirs: Any = transformers.AutoModel.from_config(
                    transformers.AutoConfig.for_model(**model, vocab_size=wanted.get(path.stem, 30522))
                )
            count = np.sum([p.numel() for p in theirs.parameters()])
            assert count / 1e6 == pytest.approx(sizes[path.stem], abs=0.1), path.stem
