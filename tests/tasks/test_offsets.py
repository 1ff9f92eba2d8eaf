"""Spans slice back to the text that they report, and words are whole: here with tiny tokenizers, and in all languages
of xquad and wikiann with the tokenizers of multilingual models (slow; BERTIE_TOKENIZERS and BERTIE_DATA).

The models are tiny and random, so that spans begin and end anywhere.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bertie import MaskedLM, Reader, Tagger
from tests.tasks.tiny import LABELS, document
from tests.text.test_real_tokenizers import DATA, FAMILY, FILES, unpacked

Made = Callable[..., Path]
NASTY = [
    "Zürich  (Suisse):\tCafé e\u0301te\u0301\n\n北京と東京。ภาษาไทย 👩‍👩‍👧 don't 3.14% U.S.A. " * 9,
    "  leading and trailing  ",
    "مدينة القاهرة الكبيرة. Москва́ — столица!",
]


def check(filler: MaskedLM, tagger: Tagger, reader: Reader, texts: list[str]) -> int:
    """How many spans there were, all of them right."""
    count = 0
    for strategy in ("none", "simple", "first", "average", "max"):
        results = tagger.tag(texts, aggregation_strategy=strategy, ignore_labels=())
        for text, tagged in zip(texts, results, strict=True):
            count += len(tagged.spans)
            assert all(text[s.start : s.end] == s.text for s in tagged.spans)
            assert [s.start for s in tagged.spans] == sorted(s.start for s in tagged.spans)
            if strategy in ("first", "average", "max"):
                assert not [s for s in tagged.spans if amid_word(text, s.start) or amid_word(text, s.end)]
    for text, found in zip(texts, reader.answer([("who?", text) for text in texts], top_k=5), strict=True):
        for answer in found.answers:
            count += 1
            assert answer.text == (text[answer.start : answer.end] if answer.start is not None else "")
            assert answer.text == answer.text.strip()
    mask = filler.tokenizer.mask_token
    assert mask is not None
    holed = [text[: len(text) // 2] + f" {mask} " + text[len(text) // 2 :] + f" {mask}" for text in texts]
    for text, filled in zip(holed, filler.fill(holed, top_k=1), strict=True):
        count += len(filled.masks)
        assert [text[m.start : m.end].strip() for m in filled.masks] == [mask, mask]
    return count


def amid_word(text: str, place: int) -> bool:
    """Whether two letters of one word lie on either side. Thai, Chinese and Japanese do not tell where a word ends."""
    around = text[place - 1 : place + 1] if place else ""
    spaced = all(unicodedata.category(c)[0] in "LM" and not re.match("[\u0e00-\u0e7f\u3040-\u9fff]", c) for c in around)
    return len(around) == 2 and spaced


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_offsets_of_tiny_models(made: Made, kind: str) -> None:
    tagger = Tagger.load(made(kind, "ForTokenClassification", labels=LABELS))
    filler, reader = MaskedLM.load(made(kind, "ForMaskedLM")), Reader.load(made(kind, "ForQuestionAnswering"))
    assert check(filler, tagger, reader, [document(25, seed=1), *NASTY]) > 500


def random_model(folder: Path, name: str, head: str, **config: Any) -> Path:
    """A tiny model around a published tokenizer."""
    torch.manual_seed(0)
    target, kind = unpacked(name, folder / head), FAMILY[name]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    limits = {"vocab_size": 260_000, "max_position_embeddings": 130, "pad_token_id": 0 if kind == "bert" else 1}
    made = transformers.AutoConfig.for_model(kind, **sizes, **limits, **config)
    model = getattr(transformers, f"AutoModel{head}").from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(target)
    return target


@pytest.mark.slow
@pytest.mark.skipif(not FILES.is_dir() or not DATA.is_dir(), reason="set BERTIE_TOKENIZERS and BERTIE_DATA")
@pytest.mark.parametrize("name", ["bert-base-multilingual-cased", "xlm-r"])
def test_offsets_in_all_languages(name: str, tmp_path: Path) -> None:
    labels = {"id2label": dict(enumerate(LABELS)), "label2id": {label: i for i, label in enumerate(LABELS)}}
    filler = MaskedLM.load(random_model(tmp_path, name, "ForMaskedLM"))
    tagger = Tagger.load(random_model(tmp_path, name, "ForTokenClassification", **labels))
    reader = Reader.load(random_model(tmp_path, name, "ForQuestionAnswering"))
    for path in sorted((DATA / "xquad").glob("*.jsonl.gz")):
        contexts = list(dict.fromkeys(row["context"] for row in some(path, 80)))
        print(name, path.name, len(contexts), check(filler, tagger, reader, contexts))
    for path in sorted((DATA / "wikiann").glob("dev.*.gz")):
        space = "" if ".zh." in path.name else " "
        texts = [space.join(row["tokens"]) for row in some(path, 100)]
        print(name, path.name, len(texts), check(filler, tagger, reader, texts))


def some(path: Path, count: int) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, count)]
