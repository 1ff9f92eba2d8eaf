"""Text in, token ids out: one `Encoding` a text, never padded and never cut.

A folder's tokenizer.json decides; where there is none, `bertie.text.legacy` builds the tokenizer from old files. The
Rust library `tokenizers` does the work, and this file sees to the rest: special tokens, segment ids, clear errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from bertie.errors import CheckpointError, ConfigError, InputError
from bertie.text import legacy as old
from bertie.text import wordpiece as fast
from bertie.text.legacy import LegacyTokenizer, Settings
from bertie.text.tokenizer_files import read_text, rust_errors
from bertie.text.wordpiece import state

IntArray = NDArray[np.int64]

# The two classes of transformers that take a tokenizer.json as it is; all others may rebuild it by rules of their own.
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")

# What the special tokens are mostly called: asked last, when neither the folder nor a recipe says.
COMMON = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}


def _unknown() -> IntArray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """One text, or one pair of texts, as tokens.

    >>> e = Encoding(*(np.zeros(s, np.int64) for s in (3, 3, (3, 2), 3)), special=np.array([True, False, True]))
    >>> len(e)
    3
    """

    ids: IntArray  # (n,)
    segments: IntArray  # (n,) what the model's segment table is asked for
    offsets: IntArray  # (n, 2) characters of the first or second text, as Python counts them
    words: IntArray  # (n,) which word of its text a token is part of; -1 at special tokens
    special: NDArray[np.bool_]  # (n,) tokens that the template added, not those that the text spells out
    # (n,) 0: of the first text, 1: of the second, -1: of neither. Segments cannot tell, as many models have only one.
    sources: IntArray = field(default_factory=_unknown)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def text_tokens(self) -> int:
        """How many tokens are not the template's."""
        return int((self.sources >= 0).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """Many texts as tokens, one behind the other."""

    ids: IntArray  # (T,)
    segments: IntArray  # (T,)
    lengths: IntArray  # (N,)


class _Encoded(Encoding):
    """An encoding fresh from the library: all but ids and segments is read when it is first asked for.

    Few callers ask, and each field takes as long to read as the ids.
    """

    __slots__ = ("_paired", "_raw")

    @classmethod
    def of(cls, ids: IntArray, segments: IntArray, raw: tokenizers.Encoding, paired: bool) -> _Encoded:
        """Beside the constructor, which takes all fields."""
        self, put = cls.__new__(cls), object.__setattr__  # frozen
        put(self, "ids", ids)
        put(self, "segments", segments)
        put(self, "_raw", raw)
        put(self, "_paired", paired)
        return self

    @property
    def text_tokens(self) -> int:
        """The same without an array: it is asked for every text."""
        return len(self) - int(sum(self._raw.special_tokens_mask))

    def __getattr__(self, name: str) -> Any:
        """A field that has no value yet."""
        if name not in ("offsets", "words", "special", "sources"):
            raise AttributeError(f"an encoding has no {name!r}")
        raw, n = self._raw, len(self)
        value: Any
        if name == "offsets":
            value = np.fromiter(chain.from_iterable(raw.offsets), np.int64, 2 * n).reshape(n, 2)
        elif name == "words":
            value = np.array([-1 if w is None else w for w in raw.word_ids], np.int64)
        elif name == "special":
            value = np.array(raw.special_tokens_mask, np.bool_)
        elif self._paired:
            value = np.array([-1 if s is None else s for s in raw.sequence_ids], np.int64)
        else:
            value = np.where(self.special, np.int64(-1), np.int64(0))
        object.__setattr__(self, name, value)
        return value


class Tokenizer:
    """Turns texts into ids and back.

    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "vocab.txt").write_text("[PAD]\\n[UNK]\\n[CLS]\\n[SEP]\\n[MASK]\\nhello\\nworld\\n")
    >>> recipe = LegacyTokenizer(kind="wordpiece", files=("vocab.txt",), cls="[CLS]", sep="[SEP]", unk="[UNK]")
    >>> tokenizer = Tokenizer.from_folder(folder, recipe)
    >>> tokenizer.encode("hello world").ids
    array([2, 5, 6, 3])
    >>> tokenizer.encode("hello", "world").segments
    array([0, 0, 0, 1, 1])
    >>> tokenizer.decode([2, 5, 6, 3])
    'hello world'
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        legacy: LegacyTokenizer | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._settings = settings or Settings()
        self._legacy = legacy
        self._backend = backend
        padding = backend.padding or {}
        backend.no_padding()  # a flat batch has no use for either, and cutting is only done when asked for
        backend.no_truncation()
        backend.encode_special_tokens = False
        self._special = self._find_special(padding.get("pad_token"))
        self._segments = self._segments_reach_model()
        self._alone = _one_segment(state(backend.post_processor))  # whether texts without a pair have segment 0 alone
        self._max_length = self._read_max_length()
        for index in self.encode("", "").ids:  # the template's ids, which the library takes from the file unseen
            if backend.id_to_token(int(index)) is None:
                raise CheckpointError(f"the tokenizer's template adds id={index}, which its vocabulary does not have")

    @classmethod
    def from_folder(cls, path: str | Path, legacy: LegacyTokenizer | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder: its tokenizer.json, else its old files by the recipe `legacy`.

        The recipe is used beside a tokenizer.json, too: it knows which segment ids the model is fed, and what the
        special tokens are called where the folder does not say.
        """
        folder = Path(path)
        settings = old.read_settings(folder)
        file = folder / "tokenizer.json"
        if file.is_file():
            text = read_text(file)
            with rust_errors(str(file)):
                backend = tokenizers.Tokenizer.from_str(text)
                # As transformers does: what the other files declare and tokenizer.json lacks is added behind it.
                old.add_declared(backend, settings)
                old.add_missing(backend, [*settings.named.values(), *settings.extra])
                self = cls(backend, legacy, settings)
                self._refuse_contradiction()
            return self
        if legacy is None:
            kind = settings.options.get("tokenizer_class", "its kind")
            raise CheckpointError(
                f"{folder} holds no tokenizer.json, and Bertie has no recipe for old files of {kind}; save one with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        backend = old.build(folder, legacy)
        with rust_errors(f"the tokenizer in {folder}"):
            return cls(backend, legacy, settings)

    # ── text to ids ──

    def encode(self, text: str, pair: str | None = None, special: bool = True) -> Encoding:
        """Encode a text, or a text and its pair; `special` adds the template's tokens ([CLS], [SEP])."""
        return self.encode_batch([text if pair is None else (text, pair)], special)[0]

    def encode_batch(self, items: Sequence[str | tuple[str, str]], special: bool = True) -> list[Encoding]:
        """Encode many texts or pairs, on all cores; the order is kept."""
        if isinstance(items, str):
            raise InputError("encode_batch takes a list of texts, not one text; wrap it: [text]")
        # A str can only be at fault in its letters, and then the library refuses it.
        items = [item if type(item) is str else _checked(item, index) for index, item in enumerate(items)]
        raw = self._encoded(self._backend.encode_batch, items, special)
        # A view of one array for each text: to make an array takes longer than to fill it.
        flat = self._flat(raw, any(isinstance(item, tuple) for item in items))
        ends = np.cumsum(flat.lengths).tolist()
        return [
            _Encoded.of(flat.ids[start:end], flat.segments[start:end], one, isinstance(item, tuple))
            for (start, end), one, item in zip(pairwise([0, *ends]), raw, items, strict=True)
        ]

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """Encode many texts, as `encode_batch` does, for callers that want their ids and no more: twice as fast.

        ASCII texts for BERT's WordPiece are taken by `bertie.text.wordpiece`: forty times as fast, on one core.
        """
        texts = list(texts)
        quick = self._quick if fast.enabled else None
        mine = [i for i, text in enumerate(texts) if type(text) is str and text.isascii()] if quick else []
        if quick is None or not mine:
            return self._flat(self._by_library(texts, range(len(texts))))
        ids, lengths = quick.encode([texts[i] for i in mine])
        if len(mine) == len(texts) and (lengths >= 0).all():
            return Flat(ids, np.zeros_like(ids), lengths)
        taken = np.array(mine)[lengths >= 0]  # those that spell out a token are left
        others = np.setdiff1d(np.arange(len(texts)), taken)
        found = self._flat(self._by_library(texts, others.tolist()))
        lengths = np.concatenate((lengths[lengths >= 0], found.lengths))
        order = np.argsort(np.concatenate((taken, others)))
        begins, lengths = (np.cumsum(lengths) - lengths)[order], lengths[order]
        at = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        ids = np.concatenate((ids, found.ids))[at]
        return Flat(ids, np.zeros_like(ids), lengths)

    def is_quick(self, texts: Sequence[str]) -> bool:
        """Whether nine in ten of such texts, of which there are some, are taken by `bertie.text.wordpiece`."""
        if not texts or not fast.enabled or self._quick is None:
            return False
        return sum(type(text) is str and text.isascii() for text in texts) >= 0.9 * len(texts)

    @cached_property
    def _quick(self) -> fast.WordPiece | None:
        return fast.find(self._backend)

    def _flat(self, raw: list[tokenizers.Encoding], paired: bool = False) -> Flat:
        lengths = np.array([len(one) for one in raw], np.int64)
        total = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(one.ids for one in raw), np.int64, total)
        if not self._segments or (self._alone and not paired):  # to read them takes as long as the ids
            return Flat(ids, np.zeros(total, np.int64), lengths)
        segments = np.fromiter(chain.from_iterable(one.type_ids for one in raw), np.int64, total)
        return Flat(ids, segments, lengths)

    def _by_library(self, texts: list[str], which: Sequence[int]) -> list[tokenizers.Encoding]:
        # The library's fast way knows no offsets, and is the same in all else.
        return self._encoded(self._backend.encode_batch_fast, [texts[i] for i in which], True, which)

    @staticmethod
    def _encoded(
        call: Any, items: list[Any], special: bool, numbers: Sequence[int] | None = None
    ) -> list[tokenizers.Encoding]:
        """What the library makes of them. If it fails, the item that is at fault is named."""
        try:
            found: list[tokenizers.Encoding] = call(items, add_special_tokens=special)
            return found
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # its panics are no Exception
            for index, item in zip(numbers or range(len(items)), items, strict=True):
                _checked(item, index)
            raise CheckpointError(f"the tokenizer is broken: it fails on a sound text ({str(error)[:300]})") from error

    def decode(self, ids: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        """The text of some ids; `skip_special` leaves special tokens out."""
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise InputError(f"ids must be one row of integers, not {numbers.dtype} of shape {numbers.shape}")
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 32:
            raise InputError(f"ids range from {numbers.min()} to {numbers.max()}; allowed: 0 to {self.vocab_size - 1}")
        with rust_errors("the tokenizer's decoder"):
            return self._backend.decode(numbers.tolist(), skip_special_tokens=skip_special)

    # ── facts ──

    @property
    def kind(self) -> str:
        """How words become tokens: WordPiece, BPE, Unigram, …"""
        return type(self._backend.model).__name__

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def cls_id(self) -> int | None:
        """The id of the token that opens a text."""
        return self._role_id("cls")

    @property
    def sep_id(self) -> int | None:
        """The id of the token that closes a text."""
        return self._role_id("sep")

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token: Bertie never uses it, but positions of some models are counted from it."""
        return self._role_id("pad")

    @property
    def mask_id(self) -> int | None:
        """The id of the token that stands for a hidden one."""
        return self._role_id("mask")

    @property
    def unk_id(self) -> int | None:
        """The id of the token that stands for what the vocabulary lacks."""
        return self._role_id("unk")

    @property
    def mask_token(self) -> str | None:
        """How the mask token is spelled in a text."""
        return self._special.get("mask")

    @property
    def special_count(self) -> int:
        """How many special tokens a single text is given."""
        return self._backend.num_special_tokens_to_add(False)

    @property
    def model_max_length(self) -> int | None:
        """The longest text the folder's files allow, in tokens; None where they do not say."""
        return self._max_length

    @property
    def vocabulary(self) -> dict[int, str]:
        """Every token by its id, in the order of ids, which may leave gaps."""
        return dict(sorted((id, token) for token, id in self._backend.get_vocab(with_added_tokens=True).items()))

    def token(self, id: int) -> str:
        """The token of an id."""
        token = self._backend.id_to_token(int(id)) if 0 <= id < 1 << 32 else None
        if token is None:
            raise InputError(f"id={id} is not in the vocabulary of {self.vocab_size} tokens")
        return token

    def id(self, token: str) -> int | None:
        """The id of a token, spelled as in the vocabulary."""
        return self._backend.token_to_id(checked_text(token, "token"))

    # ── saving ──

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files, for Bertie and for transformers."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, raw in self.files().items():
            (target / name).write_bytes(raw)

    def files(self) -> dict[str, bytes]:
        """The files that `save` writes, by name.

        tokenizer_config.json is kept as it was, unless the class that it names would make transformers rebuild the
        tokenizer by other rules than tokenizer.json's: then it names the class that keeps them.
        """
        result = {"tokenizer.json": self._backend.to_str(pretty=True).encode("utf-8")}
        raw = self._settings.raw
        if "tokenizer_config.json" in raw and self._class_agrees():
            result["tokenizer_config.json"] = raw["tokenizer_config.json"]
        else:
            result["tokenizer_config.json"] = _json_bytes(self._config())
        names = {f"{role}_token": text for role, text in self._special.items()}
        result["special_tokens_map.json"] = raw.get("special_tokens_map.json", _json_bytes(names))
        return result

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {f"{role}_token": text for role, text in self._special.items()}
        config["clean_up_tokenization_spaces"] = False
        if self._max_length is not None:
            config["model_max_length"] = self._max_length
        config |= self._settings.options
        config["tokenizer_class"] = GENERIC[0]
        config["model_input_names"] = ["input_ids", *["token_type_ids"][: self._segments], "attention_mask"]
        return config

    def _class_agrees(self) -> bool:
        """Whether transformers' own class, which may rebuild the tokenizer, would keep its rules."""
        recipe, settings, backend = self._legacy, self._settings, self._backend
        if recipe is None or settings.options.get("tokenizer_class") in GENERIC:
            return True
        same_words = state(backend.pre_tokenizer) == state(old.pre_tokenizer(recipe, settings))
        if recipe.kind == "sentencepiece":  # its normalizer depends on a table that only the model file has
            return recipe.faithful and same_words
        return recipe.faithful and same_words and state(backend.normalizer) == self._expected_normalizer()

    def _expected_normalizer(self) -> Any:
        if self._legacy is None or self._settings.flag("do_basic_tokenize") is False:
            return None
        return state(old.normalizer(self._legacy, self._settings, b""))

    # ── reading the facts ──

    def _find_special(self, pad: str | None) -> dict[str, str]:
        """The special tokens by role: the folder's word first, then the recipe's, then common usage."""
        added = {t.content for t in self._backend.get_added_tokens_decoder().values() if t.special}
        unk = getattr(self._backend.model, "unk_token", None)
        found: dict[str, str] = {}
        for role in old.ROLES:
            said = self._settings.named.get(role)
            guesses: list[str | None] = [said.content] if said is not None else []
            if self._legacy is not None:
                guesses.append(getattr(self._legacy, role))
            guesses.append({"unk": unk, "pad": pad}.get(role))
            guesses += [text for text in COMMON.get(role, ()) if text in added]
            for text in guesses:
                if text is not None and self._backend.token_to_id(text) is not None:
                    found[role] = text
                    break
        return found

    def _role_id(self, role: str) -> int | None:
        text = self._special.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _segments_reach_model(self) -> bool:
        names = self._settings.options.get("model_input_names")
        if names is not None:
            if not isinstance(names, list):
                raise CheckpointError(f"tokenizer_config.json: model_input_names={names!r} must be a list")
            return "token_type_ids" in names
        return self._legacy is None or self._legacy.segments

    def _read_max_length(self) -> int | None:
        value = self._settings.options.get("model_max_length")
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise CheckpointError(f"tokenizer_config.json: model_max_length={value!r} must be a positive number")
        return int(value) if value < 1e9 else None  # transformers writes 1e30 for "no limit"

    def _refuse_contradiction(self) -> None:
        """Refuse a folder whose two files disagree about the case of letters.

        tokenizer.json would be right, but transformers follows tokenizer_config.json: whoever trained the model may
        have used either, so nobody can know which answer is the wrong one.
        """
        rules = state(self._backend.normalizer)
        if not isinstance(rules, dict) or rules.get("type") != "BertNormalizer":
            return
        if self._settings.options.get("tokenizer_class") in GENERIC:
            return  # such a class reads none of these options
        lower = bool(rules["lowercase"])
        accents = rules["strip_accents"]
        for key, actual in (
            ("do_lower_case", lower),
            ("strip_accents", lower if accents is None else accents),
            ("tokenize_chinese_chars", bool(rules["handle_chinese_chars"])),
        ):
            said = self._settings.flag(key)
            if said is not None and said != actual:
                raise ConfigError(
                    f"tokenizer_config.json says {key}={said} and tokenizer.json does {key}={actual}; "
                    "make the two files agree (a model answers well only to the one it was trained with)"
                )


def _checked(item: Any, index: int) -> str | tuple[str, str]:
    if isinstance(item, tuple | list):
        if len(item) != 2:
            raise InputError(f"item {index} holds {len(item)} texts; a text or a pair of two texts is allowed")
        return checked_text(item[0], f"item {index}, first text"), checked_text(item[1], f"item {index}, second text")
    return checked_text(item, f"item {index}")


def checked_text(text: Any, where: str) -> str:
    """The text, if it is one that can be read; an error calls it `where`."""
    if not isinstance(text, str):
        raise InputError(f"{where} must be a str, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where}: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which is no text; "
            "read the file with its true encoding, or replace it: text.encode('utf-8', 'replace').decode()"
        ) from None
    return text


def _one_segment(rules: Any) -> bool:
    """Whether a template gives every token of a text without a pair segment 0."""
    kind = None if rules is None else rules["type"]
    if kind == "Sequence":
        return all(map(_one_segment, rules["processors"]))
    if kind == "TemplateProcessing":
        return all(part["type_id"] == 0 for item in rules["single"] for part in item.values())
    return kind in (None, "ByteLevel") or {"cls", "sep"} <= set(rules)  # a family's own template has these two


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=2) + "\n").encode("utf-8")
