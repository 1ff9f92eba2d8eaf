"""Tokenization: texts to token ids and back, without padding or truncation.

A folder's tokenizer.json is authoritative; without one, `bertie.text.legacy` builds the tokenizer from older vocabulary
files. The `tokenizers` library, or the compiled WordPiece, does the work; this module adds special tokens, segment ids
and clear errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from bertie.errors import CheckpointError, InputError
from bertie.switches import is_disabled
from bertie.text import wordpiece
from bertie.text.coverage import Coverage
from bertie.text.encoding import Encoding, Encodings, IntArray, merge
from bertie.text.item_checks import checked_item
from bertie.text.item_checks import checked_text as checked_text
from bertie.text.legacy import LegacyTokenizer, build, normalizer, pre_tokenizer
from bertie.text.tokenizer_files import json_bytes, read_text, rust_errors
from bertie.text.tokenizer_settings import (
    GENERIC,
    ROLES,
    TokenizerSettings,
    add_missing,
    add_with_ids,
    check_agreement,
    has_one_segment,
    read_settings,
)
from bertie.text.wordpiece import state

# Common names of special tokens: the fallback if neither the folder nor the family declares them.
COMMON = {
    "cls": ("[CLS]", "<s>"),
    "sep": ("[SEP]", "</s>"),
    "pad": ("[PAD]", "<pad>"),
    "mask": ("[MASK]", "<mask>"),
    "unk": ("[UNK]", "<unk>"),
}
MANY_IDS = 1024  # more are decoded by `decode_batch`, which releases the GIL; `decode` is quicker for a few


class Tokenizer:
    """Converts texts to token ids and back.

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
        settings: TokenizerSettings | None = None,
    ) -> None:
        self._settings = settings or TokenizerSettings()
        self._legacy = legacy
        self._backend = backend
        padding = backend.padding or {}
        backend.no_padding()  # flat batches need no padding, and truncation is explicit
        backend.no_truncation()
        backend.encode_special_tokens = False
        self._special = self._find_special(padding.get("pad_token"))
        self._segments = self._uses_segments()
        self._one_segment = has_one_segment(state(backend.post_processor))  # whether single texts have segment 0 only
        self._max_length = self._settings.model_max_length()
        for index in self.encode("", "").ids:  # the template's ids, which the library does not check
            if backend.id_to_token(int(index)) is None:
                raise CheckpointError(f"the tokenizer's template adds id={index}, which its vocabulary does not have")

    def __repr__(self) -> str:
        return f"Tokenizer({self.kind}, {self.vocab_size:,} tokens)"

    @classmethod
    def from_folder(cls, path: str | Path, legacy: LegacyTokenizer | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder: its tokenizer.json, else its older vocabulary files.

        `legacy` describes the family's tokenizer. It is also used with a tokenizer.json: it declares whether the model
        uses segment ids, and special tokens that the folder does not name.
        """
        folder = Path(path)
        settings = read_settings(folder)
        file = folder / "tokenizer.json"
        if file.is_file():
            text = read_text(file)
            with rust_errors(str(file)):
                backend = tokenizers.Tokenizer.from_str(text)
                # As in transformers: tokens that other files declare and tokenizer.json lacks are appended.
                add_with_ids(backend, settings)
                add_missing(backend, [*settings.named.values(), *settings.extra])
                self = cls(backend, legacy, settings)
                check_agreement(settings, backend, state(backend.normalizer))
            return self
        if legacy is None:
            kind = settings.options.get("tokenizer_class", "its kind")
            raise CheckpointError(
                f"{folder} holds no tokenizer.json, and Bertie cannot read the vocabulary files of {kind}; save one "
                "with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        backend = build(folder, legacy)
        with rust_errors(f"the tokenizer in {folder}"):
            return cls(backend, legacy, settings)

    def encode(self, text: str, pair: str | None = None, special: bool = True) -> Encoding:
        """Encode a text, or a text and its pair; `special` adds the special tokens of the template ([CLS], [SEP])."""
        return self.encode_batch([text if pair is None else (text, pair)], special)[0]

    def encode_batch(self, items: Sequence[str | tuple[str, str]], special: bool = True) -> list[Encoding]:
        """Encode texts or pairs, with character offsets and word ids; multi-threaded."""
        if isinstance(items, str):
            raise InputError("encode_batch takes a list of texts, not one text; wrap it: [text]")
        return list(self._encode(list(items), range(len(items)), special=special, offsets=True))

    def encode_words(self, lists: Sequence[Sequence[str]]) -> list[tuple[IntArray, IntArray]]:
        """Encode lists of words, each word separately, without special tokens: token ids and their word indices."""
        try:
            raw = self._backend.encode_batch(lists, is_pretokenized=True, add_special_tokens=False)
        except Exception as error:
            for i, words in enumerate(lists):
                checked_text(" ".join(words), f"item {i}")
            raise CheckpointError(f"the tokenizer is broken: it fails on valid words ({str(error)[:300]})") from error
        return [(np.array(part.ids, np.int64), np.array(part.word_ids, np.int64)) for part in raw]

    def encode_flat(self, items: Sequence[str | tuple[str, str]], *, offsets: bool = False) -> Encodings:
        """Encode texts or pairs into flat arrays of token ids.

        ASCII texts for BERT's WordPiece go through `bertie.text.wordpiece`, all others through the `tokenizers`
        library. Character offsets and the like are computed for a text when they are accessed; `offsets=True` computes
        them eagerly, which is cheaper if all of them are needed.
        """
        items = list(items)
        compiled = None if offsets else self._compiled
        if compiled is None:
            return self._encode(items, range(len(items)), offsets=offsets)
        texts = [i for i, item in enumerate(items) if type(item) is str and item.isascii()]
        if texts and len(texts) == len(items):
            ids, lengths = compiled.encode(items)  # type: ignore[arg-type]
            if lengths.min() >= 0:
                return self._describe(ids, np.zeros(len(ids), np.int64), lengths, items, paired=False)
        parts = self._encode_parts(compiled, items, texts)
        return self._describe(parts.ids, parts.segments, parts.lengths, items)

    def _encode_parts(self, compiled: wordpiece.WordPiece, items: list[Any], texts: list[int]) -> Encodings:
        """Encode with the compiled tokenizer where it can, and with the library elsewhere; `texts` are ASCII texts."""
        parts: list[tuple[IntArray, Encodings]] = []
        if texts:
            ids, lengths = compiled.encode([items[i] for i in texts])
            usable = lengths >= 0  # the others contain an added token
            parts.append((np.array(texts)[usable], Encodings(ids, np.zeros_like(ids), lengths[usable])))
        pairs = [] if compiled.pair_template is None else wordpiece.ascii_pairs(items)
        if pairs:
            encodings, usable = compiled.encode_pairs([items[i] for i in pairs])
            segments = encodings.segments if self._segments else np.zeros_like(encodings.ids)
            parts.append((np.array(pairs)[usable], Encodings(encodings.ids, segments, encodings.lengths)))
        done = np.concatenate([np.empty(0, np.int64), *(index for index, _ in parts)])
        if len(done) < len(items) or not parts:
            others = np.setdiff1d(np.arange(len(items)), done)
            parts.append((others, self._encode(items, others.tolist())))
        return merge(parts)

    def is_compiled(self, texts: Sequence[str]) -> bool:
        """Whether the compiled tokenizer encodes at least nine in ten of these texts."""
        if not texts or self._compiled is None:
            return False
        return sum(type(text) is str and text.isascii() for text in texts) >= 0.9 * len(texts)

    @property
    def _compiled(self) -> wordpiece.WordPiece | None:
        return None if is_disabled("native.wordpiece") else self._wordpiece

    @cached_property
    def _wordpiece(self) -> wordpiece.WordPiece | None:
        return wordpiece.find(self._backend)

    def _encode(
        self, items: list[Any], index: Sequence[int], *, special: bool = True, offsets: bool = False
    ) -> Encodings:
        """Encode the items at `index` with the library; without offsets by its fast method, which computes none."""
        chosen = [items[i] for i in index]
        raw = self._call_library(chosen, index, special, offsets)
        lengths = np.array([len(encoding) for encoding in raw], np.int64)
        total = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in raw), np.int64, total)
        paired = any(not isinstance(item, str) for item in chosen)
        if not self._segments or (self._one_segment and not paired):  # reading them takes as long as the ids
            segments = np.zeros(total, np.int64)
        else:
            segments = np.fromiter(chain.from_iterable(encoding.type_ids for encoding in raw), np.int64, total)
        return self._describe(ids, segments, lengths, chosen, raw if offsets else None, special, paired)

    def _describe(
        self,
        ids: IntArray,
        segments: IntArray,
        lengths: IntArray,
        items: list[Any],
        raw: list[tokenizers.Encoding] | None = None,
        special: bool = True,
        paired: bool = True,
    ) -> Encodings:
        """Encodings with the number of special tokens and, lazily, the details of each text.

        `paired`: whether there may be pairs among the items.
        """

        def load(i: int) -> tokenizers.Encoding:
            if raw is not None:
                return raw[i]
            item = items[i] if isinstance(items[i], str) else tuple(items[i])
            return self._backend.encode_batch([item])[0]  # `encode` would hold the GIL: seconds for megabytes of text

        single, pair = self._special_counts if special else (0, 0)
        template = self._template if special else (0, 0)
        if not paired:
            return Encodings(ids, segments, lengths, single, load, template=template)
        pairs = np.fromiter((not isinstance(item, str) for item in items), np.bool_, len(items))
        counts = np.where(pairs, pair, single)
        return Encodings(ids, segments, lengths, counts, load, pairs, template)

    @cached_property
    def _special_counts(self) -> tuple[int, int]:
        backend = self._backend
        return backend.num_special_tokens_to_add(False), backend.num_special_tokens_to_add(True)

    @cached_property
    def _template(self) -> tuple[int, int] | None:
        """The number of special tokens before and after a single text; None if unknown."""
        mask = self._backend.encode_batch(["a"])[0].special_tokens_mask
        if 0 not in mask:
            return None
        before, after = mask.index(0), mask[::-1].index(0)
        return (before, after) if before + after == sum(mask) else None

    def _call_library(
        self, items: list[Any], index: Sequence[int], special: bool, offsets: bool
    ) -> list[tokenizers.Encoding]:
        """Encode with the library. If it fails, the error names the invalid item."""
        # The fast method computes no offsets; without a post-processor it gives both texts of a pair the segment id 0.
        fast = not offsets and self._backend.post_processor is not None
        call = self._backend.encode_batch_fast if fast else self._backend.encode_batch
        # A str can only be wrong in its characters, which the library notices.
        items = [item if type(item) is str else checked_item(item, i) for i, item in zip(index, items, strict=True)]
        try:
            return call(items, add_special_tokens=special)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # its panics are no Exception
            for i, item in zip(index, items, strict=True):
                checked_item(item, i)
            raise CheckpointError(f"the tokenizer is broken: it fails on a valid text ({str(error)[:300]})") from error

    def decode(self, ids: Sequence[int] | IntArray, skip_special: bool = True) -> str:
        """Decode token ids into text; `skip_special` leaves special tokens out."""
        numbers = np.asarray(ids)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            raise InputError(f"ids must be one row of integers, not {numbers.dtype} of shape {numbers.shape}")
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < 1 << 32:
            raise InputError(f"ids range from {numbers.min()} to {numbers.max()}; allowed: 0 to {self.vocab_size - 1}")
        with rust_errors("the tokenizer's decoder"):
            if numbers.size > MANY_IDS:
                return self._backend.decode_batch([numbers.tolist()], skip_special_tokens=skip_special)[0]
            return self._backend.decode(numbers.tolist(), skip_special_tokens=skip_special)

    @property
    def kind(self) -> str:
        """The algorithm: WordPiece, BPE, Unigram, …"""
        return type(self._backend.model).__name__

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, added tokens included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def cls_id(self) -> int | None:
        """Id of the classification token, which begins every text."""
        return self._role_id("cls")

    @property
    def sep_id(self) -> int | None:
        """Id of the separator token, which ends every text."""
        return self._role_id("sep")

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token. Bertie never pads, but some models count positions from it."""
        return self._role_id("pad")

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token."""
        return self._role_id("mask")

    @property
    def unk_id(self) -> int | None:
        """Id of the unknown token."""
        return self._role_id("unk")

    @cached_property
    def coverage(self) -> Coverage:
        """Counts the tokens that the vocabulary does not cover, and those that are not English."""
        # Byte-level BPE covers every character; some folders declare the end-of-text token as the unknown token.
        unk_id = None if self.unk_id in self.encode("").ids else self.unk_id
        return Coverage(self._backend.get_vocab(with_added_tokens=True), unk_id)

    @property
    def mask_token(self) -> str | None:
        """The mask token as it is written in a text."""
        return self._special.get("mask")

    @property
    def special_count(self) -> int:
        """Number of special tokens added to a single text."""
        return self._special_counts[0]

    @property
    def model_max_length(self) -> int | None:
        """Maximum length in tokens that tokenizer_config.json declares; None if it declares none."""
        return self._max_length

    def with_max_length(self, max_length: int) -> Tokenizer:
        """A copy that declares another maximum length."""
        tokenizer = copy(self)
        tokenizer._settings, tokenizer._max_length = self._settings.with_max_length(max_length), max_length
        return tokenizer

    def with_special_tokens(self, tokens: Sequence[str]) -> Tokenizer:
        """A copy with these special tokens added, unless it has them already."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        add_missing(backend, [tokenizers.AddedToken(token, normalized=False, special=True) for token in tokens])
        return Tokenizer(backend, self._legacy, self._settings)

    @property
    def vocabulary(self) -> dict[int, str]:
        """Tokens by id, in order of ids, which may have gaps."""
        return dict(sorted((id, token) for token, id in self._backend.get_vocab(with_added_tokens=True).items()))

    def token(self, id: int) -> str:
        """Convert an id to its token."""
        token = self._backend.id_to_token(int(id)) if 0 <= id < 1 << 32 else None
        if token is None:
            raise InputError(f"id={id} is not in the vocabulary of {self.vocab_size} tokens")
        return token

    def id(self, token: str) -> int | None:
        """Convert a token, spelled as in the vocabulary, to its id; None if there is none."""
        return self._backend.token_to_id(checked_text(token, "token"))

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files, readable by transformers."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        for name, raw in self.files().items():
            (target / name).write_bytes(raw)

    def files(self) -> dict[str, bytes]:
        """The files that `save` writes, by name.

        tokenizer_config.json is kept unchanged, unless its class would make transformers rebuild the tokenizer by
        other rules than those of tokenizer.json: then it is rewritten with the generic class, which keeps them.
        """
        result = {"tokenizer.json": self._backend.to_str(pretty=True).encode("utf-8")}
        raw = self._settings.raw
        if "tokenizer_config.json" in raw and self._class_agrees():
            result["tokenizer_config.json"] = raw["tokenizer_config.json"]
        else:
            result["tokenizer_config.json"] = json_bytes(self._config())
        names = {f"{role}_token": text for role, text in self._special.items()}
        result["special_tokens_map.json"] = raw.get("special_tokens_map.json", json_bytes(names))
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
        """Whether the class that tokenizer_config.json names would keep the tokenizer's rules."""
        family, settings, backend = self._legacy, self._settings, self._backend
        if family is None or settings.options.get("tokenizer_class") in GENERIC:
            return True
        same_words = state(backend.pre_tokenizer) == state(pre_tokenizer(family, settings))
        if family.kind == "sentencepiece":  # its normalizer needs a table that only the model file has
            return family.class_keeps_rules and same_words
        return family.class_keeps_rules and same_words and state(backend.normalizer) == self._expected_normalizer()

    def _expected_normalizer(self) -> Any:
        if self._legacy is None or self._settings.flag("do_basic_tokenize") is False:
            return None
        return state(normalizer(self._legacy, self._settings, b""))

    def _find_special(self, pad: str | None) -> dict[str, str]:
        """Special tokens by role: declared by the folder, else by the family, else found by common names."""
        added = {t.content for t in self._backend.get_added_tokens_decoder().values() if t.special}
        unk = getattr(self._backend.model, "unk_token", None)
        special: dict[str, str] = {}
        for role in ROLES:
            token = self._settings.named.get(role)
            candidates: list[str | None] = [token.content] if token is not None else []
            if self._legacy is not None:
                candidates.append(getattr(self._legacy, role))
            candidates.append({"unk": unk, "pad": pad}.get(role))
            candidates += [text for text in COMMON.get(role, ()) if text in added]
            for text in candidates:
                if text is not None and self._backend.token_to_id(text) is not None:
                    special[role] = text
                    break
        return special

    def _role_id(self, role: str) -> int | None:
        text = self._special.get(role)
        return None if text is None else self._backend.token_to_id(text)

    def _uses_segments(self) -> bool:
        names = self._settings.options.get("model_input_names")
        if names is not None:
            if not isinstance(names, list):
                raise CheckpointError(f"tokenizer_config.json: model_input_names={names!r} must be a list")
            return "token_type_ids" in names
        return self._legacy is None or self._legacy.segments
