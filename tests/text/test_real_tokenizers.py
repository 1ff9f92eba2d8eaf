"""Ten published tokenizers, on real texts in fifteen languages and on nasty ones: not one difference is allowed.

The files are not part of the repository: BERTIE_TOKENIZERS and BERTIE_DATA say where they are.
"""

import gzip
import json
import os
import shutil
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from sentencepiece import sentencepiece_model_pb2 as proto
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import AlbertConverter

from bertie.errors import InputError
from bertie.text.encoding import Encoding
from bertie.text.tokenizer import Tokenizer
from tests.text.recipes import RECIPES

SHARED = Path(__file__).parents[3] / "shared"
FILES = Path(os.environ.get("BERTIE_TOKENIZERS", SHARED / "models/tokenizers"))
DATA = Path(os.environ.get("BERTIE_DATA", SHARED / "data"))
FAMILY = {
    "albert-base-v2": "albert",
    "bert-base-cased": "bert",
    "bert-base-chinese": "bert",
    "bert-base-multilingual-cased": "bert",
    "bert-base-uncased": "bert",
    "deberta-v3": "deberta-v2",
    "modernbert-base": "modernbert",
    "mpnet": "mpnet",
    "roberta-base": "roberta",
    "xlm-r": "xlm-roberta",
}
OLD_AND_NEW = ["bert-base-chinese", "bert-base-uncased", "deberta-v3", "mpnet", "xlm-r"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILES.is_dir() or not DATA.is_dir(), reason="set BERTIE_TOKENIZERS and BERTIE_DATA"),
]

NASTY = [
    "",
    " ",
    "\n\t\r\n",
    "\u3000\u00a0\u2028\u200b",
    "a" + " " * 500 + "b\t\t\n\n c ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ☺️ \U0001f9d1\u200d\U0001f52c",
    "e\u0301\u0302\u0323 A\u030a Å ﬃ ① Ⅷ ½ ﷺ ㌔ ｶﾞ" + "\u0301" * 300,
    "日本語のテキスト、中文文本。한국어 텍스트 𠀀𪚥",
    "اَلْعَرَبِيَّةُ ‏‎ עִבְרִית",
    "ภาษาไทยไม่มีช่องว่าง คำ น้ำ",
    "".join(map(chr, range(160))),
    "\x00",
    "a\x00b\x07c\x7f\x85d\ufeffe\ufffdf\uffff",
    "[MASK] [CLS][SEP] [UNK] [PAD] x[MASK]y  [MASK] .",
    "<s> </s><mask> <pad> <unk> a<mask>b  <mask> <s>NOTUSED |||IP_ADDRESS||| <|endoftext|>",
    "［ＭＡＳＫ］ ＜s＞ <MASK> [mask] [ MASK ]",
    "##ing ## ▁▁ ▁the Ġthe <0x41> `` '' ``x''",
    "1999, 3,14 1,000,000, U.S.A. don't I'LL we've (x)–£5€",
    "ΑΣ ς İI ıi ẞß Ǆǆ",
    "x" * 101 + " " + "y" * 100,
    "https://example.org/a_b?c=d&e=%20#f user@mail.com C:\\path\\file.txt",
]
HUGE = "abcdé😀中א" * 125_000  # a million characters and no space: every tokenizer here is linear in it


@lru_cache
def rows(pattern: str, fields: tuple[str, ...], count: int) -> list[tuple[str, ...]]:
    selected: dict[tuple[str, ...], None] = {}
    for path in sorted(DATA.glob(pattern)):
        own: dict[tuple[str, ...], None] = {}
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                own[tuple(row[f] for f in fields)] = None
                if len(own) == count:
                    break
        selected |= own
    return list(selected)


def texts() -> list[str]:
    texts = dict.fromkeys(text for row in rows("xnli/dev.*", ("text_a", "text_b"), 520) for text in row)
    return [*texts, *[text for (text,) in rows("xquad/*.gz", ("context",), 30)], *NASTY]


def pairs() -> list[tuple[str, str]]:
    texts = [(a, b) for a, b in rows("xnli/dev.*", ("text_a", "text_b"), 60)]
    return [*texts, *zip(NASTY, reversed(NASTY), strict=True), ("", ""), ("a", ""), ("", "b")]


def unpacked(name: str, target: Path) -> Path:
    target.mkdir()
    for file in (FILES / name).iterdir():
        if file.suffix == ".gz":
            with gzip.open(file) as packed, (target / file.stem).open("wb") as plain:
                shutil.copyfileobj(packed, plain)
        else:
            shutil.copyfile(file, target / file.name)
    (target / "config.json").write_text(json.dumps({"model_type": FAMILY[name]}))
    return target


def theirs(name: str, folder: Path) -> transformers.PreTrainedTokenizerBase:
    """transformers' tokenizer; where its class disagrees with the published tokenizer.json, that file as it is."""
    if name in ("bert-base-cased", "deberta-v3"):
        # The class lower-cases (no file says otherwise), or leaves SentencePiece's normalization out.
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    if name == "roberta-base":  # the class forgot the flag that all published files have
        mask = AddedToken("<mask>", lstrip=True, normalized=False, special=True)
        return transformers.RobertaTokenizer.from_pretrained(folder, mask_token=mask)
    if name == "albert-base-v2":
        # From spiece.model alone, the class forgets the scores of "1999," and takes "." and "(" for special tokens;
        # with the vocabulary of transformers' own converter it is right.
        model = proto.ModelProto()  # type: ignore[attr-defined]
        model.ParseFromString((folder / "spiece.model").read_bytes())
        return transformers.AlbertTokenizer(
            vocab=AlbertConverter.vocab(SimpleNamespace(), model),
            _spm_precompiled_charsmap=model.normalizer_spec.precompiled_charsmap,
            mask_token=AddedToken("[MASK]", lstrip=True, normalized=False, special=True),
        )
    return transformers.AutoTokenizer.from_pretrained(folder)


def differences(items: list, got: list[Encoding], reference: transformers.PreTrainedTokenizerBase) -> list:
    want = reference(
        items,
        add_special_tokens=True,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        truncation=False,
    )
    wrong = []
    for i, (item, e) in enumerate(zip(items, got, strict=True)):
        same = (
            e.ids.tolist() == want["input_ids"][i]
            and e.offsets.tolist() == [list(o) for o in want["offset_mapping"][i]]
            and e.special.astype(int).tolist() == want["special_tokens_mask"][i]
            and ("token_type_ids" not in want or e.segments.tolist() == want["token_type_ids"][i])
        )
        if not same:
            wrong.append(item)
    return wrong


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_against_transformers(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path / "model")
    tokenizer, reference = Tokenizer.from_folder(folder, RECIPES.get(FAMILY[name])), theirs(name, folder)
    total = 0
    for items in (texts(), pairs(), [HUGE]):
        assert differences(items, tokenizer.encode_batch(items), reference) == []
        total += len(items)
    assert len(texts()) > 10_000
    print(f"{name}: {total} texts and pairs, no difference")
    for text in ("a\ud800", "\udfff"):
        with pytest.raises(InputError, match="lone surrogate"):
            tokenizer.encode(text)
        with pytest.raises((TypeError, UnicodeEncodeError)):
            reference(text)


@pytest.mark.parametrize("name", OLD_AND_NEW)
def test_old_files_against_tokenizer_json(name: str, tmp_path: Path) -> None:
    folder, recipe = unpacked(name, tmp_path / "model"), RECIPES[FAMILY[name]]
    new = Tokenizer.from_folder(folder, recipe)
    (folder / "tokenizer.json").unlink()
    old = Tokenizer.from_folder(folder, recipe)
    assert (old.vocab_size, old.mask_id, old.cls_id) == (new.vocab_size, new.mask_id, new.cls_id)
    items = [*texts(), *pairs()]
    wrong = [
        item
        for item, a, b in zip(items, old.encode_batch(items), new.encode_batch(items), strict=True)  # type: ignore[arg-type]
        if a.ids.tolist() != b.ids.tolist()
        or a.offsets.tolist() != b.offsets.tolist()
        or a.segments.tolist() != b.segments.tolist()
        or a.special.tolist() != b.special.tolist()
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_saved_for_transformers(name: str, tmp_path: Path) -> None:
    """Whatever the folder was like, what is saved gives the same ids in transformers."""
    tokenizer = Tokenizer.from_folder(unpacked(name, tmp_path / "model"), RECIPES.get(FAMILY[name]))
    tokenizer.save(tmp_path / "saved")
    (tmp_path / "saved/config.json").write_text(json.dumps({"model_type": FAMILY[name]}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    items = [*texts()[::20], *NASTY]
    assert differences(items, tokenizer.encode_batch(items), reference) == []
