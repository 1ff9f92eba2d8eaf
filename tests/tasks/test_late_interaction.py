"""Late interaction against recorded results of PyLate, sentence-transformers' MultiVectorEncoder and transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import bertie
from bertie import Checkpoint, Embedder, LateInteraction
from bertie.errors import CheckpointError, ConfigError, InputError, NotFoundError
from bertie.tasks.late_interaction import maxsim
from tests.tasks.tiny import document, save, sentences

PYLATE = Path(__file__).parent.parent / "parity" / "pylate"
MODEL = PYLATE / "model"
TEXTS = json.loads((PYLATE / "texts.json").read_text())
QUERIES, DOCUMENTS = TEXTS["queries"], TEXTS["documents"]
NAMES = {"attend_to_expansion_tokens": "attend_to_expansion", "do_query_expansion": "query_expansion"}


@pytest.fixture(scope="module")
def model() -> LateInteraction:
    return LateInteraction.load(MODEL)


def with_settings(**changes: Any) -> LateInteraction:
    checkpoint = Checkpoint.load(MODEL)
    assert checkpoint.late_interaction is not None
    modules = checkpoint.late_interaction.with_settings(**changes)
    return LateInteraction(replace(checkpoint, late_interaction=modules), overflow="truncate")


def assert_close(ours: list[np.ndarray], theirs: list[Any]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, np.asarray(b), atol=1e-5)


@pytest.mark.parametrize("variant", list(TEXTS["variants"]))
def test_as_in_pylate(variant: str) -> None:
    """PyLate pins other versions: tests/parity/pylate_references.py recorded what it computes."""
    expected = np.load(PYLATE / "expected.npz")
    changes = {NAMES.get(name, name): value for name, value in TEXTS["variants"][variant].items()}
    late = with_settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()})
    assert_close(late.embed_queries(QUERIES), [expected[f"{variant} query {i}"] for i in range(len(QUERIES))])
    assert_close(late.embed_documents(DOCUMENTS), [expected[f"{variant} document {i}"] for i in range(len(DOCUMENTS))])


def test_as_with_transformers(model: LateInteraction) -> None:
    """Encoded from scratch: the prefix, the mask masked attention, the projection, MaxSim."""
    encoder = transformers.AutoModel.from_pretrained(MODEL).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    projection = load_file(MODEL / "1_Dense" / "model.safetensors")["linear.weight"]
    settings = model.settings

    def encode(text: str, prefix: str, length: int) -> tuple[list[int], np.ndarray]:
        first, *rest = tokenizer(text)["input_ids"]
        ids = [first, tokenizer.convert_tokens_to_ids(prefix), *rest]
        mask = torch.tensor([[1] * len(ids) + [0] * max(0, length - len(ids))])
        ids += [tokenizer.mask_token_id] * max(0, length - len(ids))
        with torch.no_grad():
            hidden = encoder(torch.tensor([ids]), attention_mask=mask).last_hidden_state[0]
        return ids, torch.nn.functional.normalize(hidden @ projection.T, dim=-1).numpy()

    query, text = "what do cats eat", "The cat sat on the mat, about nothing."
    _, ours = encode(query, settings.query_prefix, int(settings.query_length or 0))
    np.testing.assert_allclose(model.embed_queries(query), ours, atol=1e-5)
    ids, rows = encode(text, settings.document_prefix, 0)
    skipped = {tokenizer.vocab.get(word) for word in settings.skiplist_words}
    kept = rows[[id not in skipped for id in ids]]
    assert len(kept) < len(rows)
    np.testing.assert_allclose(model.embed_documents(text), kept, atol=1e-5)
    score = sum(max(float(q @ d) for d in kept) for q in ours)
    assert model.predict((query, text)) == pytest.approx(score, abs=1e-4)


def test_as_in_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    theirs = MultiVectorEncoder(str(MODEL), device="cpu")
    theirs.save(str(tmp_path / "native"))
    for folder in (MODEL, tmp_path / "native"):
        ours = bertie.load(folder, overflow="truncate")
        assert isinstance(ours, LateInteraction)
        assert_close(ours.embed_queries(QUERIES), theirs.encode_query(QUERIES, convert_to_numpy=True))
        assert_close(ours.embed_documents(DOCUMENTS), theirs.encode_document(DOCUMENTS, convert_to_numpy=True))
        ours.save(tmp_path / f"saved {folder.name}")
        again = MultiVectorEncoder(str(tmp_path / f"saved {folder.name}"), device="cpu")
        assert_close(ours.embed_queries(QUERIES), again.encode_query(QUERIES, convert_to_numpy=True))
    scores = theirs.similarity(theirs.encode_query(QUERIES[:2]), theirs.encode_document(DOCUMENTS)).numpy()
    short = LateInteraction.load(MODEL, overflow="truncate")
    np.testing.assert_allclose(short.similarity(QUERIES[:2], DOCUMENTS), scores, atol=1e-4)


def stanford(folder: Path) -> Path:
    """A folder of Stanford's ColBERT: the projection among the encoder's weights, and the settings of its training."""
    save(folder, "wordpiece", "")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["HF_ColBERT"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = {"query_token_id": "##ay", "doc_token_id": "##b", "query_maxlen": 12, "doc_maxlen": 30}
    settings |= {"attend_to_mask_tokens": False, "mask_punctuation": True, "similarity": "cosine", "lr": 1e-5}
    (folder / "artifact.metadata").write_text(json.dumps(settings))
    return folder


def test_stanford_folders(tmp_path: Path) -> None:
    from sentence_transformers import MultiVectorEncoder

    folder = stanford(tmp_path / "stanford")
    ours, texts = LateInteraction.load(folder, overflow="truncate"), sentences(6)
    theirs = MultiVectorEncoder(str(folder), device="cpu")
    assert_close(ours.embed_queries(texts), theirs.encode_query(texts, convert_to_numpy=True))
    assert_close(ours.embed_documents(texts), theirs.encode_document(texts, convert_to_numpy=True))
    ours.save(tmp_path / "saved")
    assert_close(LateInteraction.load(tmp_path / "saved").embed_documents(texts), ours.embed_documents(texts))
    metadata = json.loads((folder / "artifact.metadata").read_text())
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"similarity": "l2"}))
    with pytest.raises(ConfigError, match="similarity='l2'"):
        Checkpoint.load(folder)


def test_long_texts_are_read_whole(model: LateInteraction) -> None:
    text = DOCUMENTS[-1]
    (result,) = model.embed_documents_each([text])
    assert result.windows > 1
    assert result.tokens_read == result.tokens_total
    assert result.tokens.count("[CLS]") == 1
    kept = [token for token in result.tokens if token not in ("[CLS]", "[SEP]", "[d] ", "[D] ")]
    whole = model.tokenizer.encode(text)
    words = [model.tokenizer.token(id) for id in whole.ids[~whole.special]]
    assert kept == [word for word in words if word not in model.settings.skiplist_words]
    query = "about the river " * 8
    (long,) = model.embed_queries_each([query])
    assert long.tokens_read == long.tokens_total
    assert len(long) > int(model.settings.query_length or 0)
    assert "[MASK]" not in long.tokens
    with pytest.raises(InputError, match="overflow='window'"):
        LateInteraction.load(MODEL, overflow="error").embed_queries(query)


def test_a_result_does_not_depend_on_the_batch(model: LateInteraction) -> None:
    for embed, texts in ((model.embed_queries, QUERIES), (model.embed_documents, DOCUMENTS)):
        for text, vectors in zip(texts, embed(texts), strict=True):
            np.testing.assert_array_equal(embed(text), vectors)


def test_ranking(model: LateInteraction) -> None:
    ranked = model.rank(QUERIES[0], DOCUMENTS, top_k=3)
    scores = model.predict([(QUERIES[0], text) for text in DOCUMENTS])
    assert [document.score for document in ranked] == sorted(scores.tolist(), reverse=True)[:3]
    assert ranked[0].text == DOCUMENTS[ranked[0].index]
    assert model.rerank(QUERIES[0], DOCUMENTS[0]).score == scores[0]
    np.testing.assert_array_equal(model.similarity(QUERIES[0], DOCUMENTS), scores)
    query, text = model.embed_queries(QUERIES[0]), model.embed_documents(DOCUMENTS[0])
    assert scores[0] == np.float32(maxsim(query, text))
    assert maxsim(query, text[:0]) == 0.0


def test_wrong_folders(model: LateInteraction, tmp_path: Path) -> None:
    assert isinstance(bertie.load(MODEL), LateInteraction)
    with pytest.raises(InputError, match=r"late-interaction \(ColBERT\) model.*bertie\.LateInteraction"):
        Embedder.load(MODEL)
    with pytest.raises(NotFoundError, match="is not a late-interaction"):
        LateInteraction.load(save(tmp_path / "bert", "wordpiece", ""))
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "config_sentence_transformers.json"
    config = json.loads(file.read_text())
    for change, kind, message in (
        ({"query_prefix": "[nothing]"}, CheckpointError, r"the prefix '\[nothing\]' is not a token"),
        ({"similarity_fn_name": "dot"}, ConfigError, "similarity_fn_name='dot'"),
        ({"query_length": 0}, ConfigError, "query_length=0"),
        ({"skiplist_words": [1]}, ConfigError, "skiplist_words must be a list of tokens"),
        ({"unknown": 1}, ConfigError, "unknown"),
    ):
        file.write_text(json.dumps(config | change))
        with pytest.raises(kind, match=message):
            LateInteraction.load(tmp_path / "model").embed_queries("a cat")


def test_a_folder_of_an_older_pylate(tmp_path: Path) -> None:
    """Without the type of the model."""
    shutil.copytree(MODEL, tmp_path / "model")
    file = tmp_path / "model" / "config_sentence_transformers.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "model_type"}))
    older = LateInteraction.load(tmp_path / "model")
    assert_close(older.embed_queries(QUERIES), LateInteraction.load(MODEL).embed_queries(QUERIES))


def test_a_lower_maximum_length_is_saved(tmp_path: Path) -> None:
    Checkpoint.load(MODEL).with_max_length(16).save(tmp_path / "short")
    short = LateInteraction.load(tmp_path / "short")
    assert short.checkpoint.max_length == short.settings.document_length == 16
    assert short.embed_documents(document(3)).shape[1] == short.dimension


def test_deberta_cannot_ignore_tokens(tmp_path: Path) -> None:
    text = transformers.AutoTokenizer.from_pretrained(MODEL)
    config = transformers.DebertaV2Config(
        vocab_size=len(text), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8,
    )  # fmt: skip
    transformers.DebertaV2Model(config).save_pretrained(tmp_path)
    text.save_pretrained(tmp_path)
    for file in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        shutil.copy(MODEL / file, tmp_path / file)
    shutil.copytree(MODEL / "1_Dense", tmp_path / "1_Dense")
    with pytest.raises(ConfigError, match="masked attention"):
        LateInteraction.load(tmp_path).embed_queries("a cat")
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attend_to_expansion_tokens": True}))  # type: ignore[attr-defined]
    assert len(LateInteraction.load(tmp_path).embed_queries("a cat")) == 12
