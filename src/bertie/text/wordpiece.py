"""BERT's WordPiece for ASCII texts in C++ (cpp/): the same ids as the `tokenizers` library, about forty times as fast.

Built with the package where a compiler is available. Without one, for other kinds of tokenizers, and for texts that
are not ASCII or that contain an added token such as [MASK], the `tokenizers` library is used.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.models import WordPiece as WordPieceModel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bertie.compiled import load_library
from bertie.text.encoding import Encodings, IntArray, ranges

ABI_VERSION = 2  # increment here and in wordpiece.cpp when the C interface changes
NORMALIZER = {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}
LETTER, SPACE, PUNCTUATION, DROPPED = 0, 1, 2, 255
MAX_ADDED = 1 << 14  # characters of added tokens: each takes up to half a kilobyte


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library, if it was built from these sources."""
    lib = load_library(__file__, "_wordpiece", f"bertie_wordpiece_abi_{ABI_VERSION}")
    if lib is None:
        return None
    text, pointer, wide = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64
    lib.bertie_wordpiece_create.restype = pointer
    lib.bertie_wordpiece_create.argtypes = [
        *(text, text, text, pointer, pointer, wide, text, wide, text, pointer, wide),
        *(pointer, wide, wide, wide, wide),
    ]
    lib.bertie_wordpiece_encode.restype = wide
    lib.bertie_wordpiece_encode.argtypes = [pointer, text, wide, pointer, wide, pointer, wide, pointer]
    lib.bertie_wordpiece_destroy.argtypes = [pointer]
    return lib


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """Special tokens around a pair of texts, and the segment ids of all five parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    segments: tuple[list[int], int, list[int], int, list[int]]  # before, first text, between, second text, after


def find(backend: tokenizers.Tokenizer) -> WordPiece | None:
    """The compiled equivalent of a tokenizer without padding and truncation; None if there is none.

    >>> find(tokenizers.Tokenizer(tokenizers.models.BPE())) is None
    True
    """
    lib, model, normalizer = library(), backend.model, backend.normalizer
    if lib is None or not isinstance(model, WordPieceModel) or backend.encode_special_tokens:
        return None
    if not isinstance(normalizer, BertNormalizer) or set(state(normalizer)) != NORMALIZER:
        return None
    if not isinstance(backend.pre_tokenizer, BertPreTokenizer) or backend.truncation or backend.padding:
        return None
    vocab = backend.get_vocab(with_added_tokens=False)
    if model.unk_token not in vocab or len(set(vocab.values())) != len(vocab):
        return None
    template, characters = _template(backend), _characters(backend)
    if template is None or characters is None or not model.continuing_subword_prefix.isascii():
        return None
    added = _added(backend, characters[0])
    if added is None:
        return None
    return WordPiece(backend, lib, vocab, template, characters, added)


class WordPiece:
    """A vocabulary in the compiled library."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        lib: ctypes.CDLL,
        vocab: dict[str, int],
        template: tuple[list[int], list[int]],
        characters: tuple[bytes, bytes],
        added: list[str],
    ) -> None:
        self._backend, self._run, self._free = backend, lib.bertie_wordpiece_encode, lib.bertie_wordpiece_destroy
        self._before, self._specials = len(template[0]), sum(map(len, template))
        self.pair_template = _pair_template(backend)
        pieces = [piece for piece in vocab if piece.isascii()]
        ids = np.array([vocab[piece] for piece in pieces], np.int64)
        special_ids = np.array([*template[0], *template[1]], np.int64)
        (raw, ends), (special, special_ends) = _join(pieces), _join(added)
        model: Any = backend.model
        prefix = model.continuing_subword_prefix.encode()
        self._handle = lib.bertie_wordpiece_create(
            *(*characters, raw, ends.ctypes.data, ids.ctypes.data, len(pieces), prefix, len(prefix)),
            *(special, special_ends.ctypes.data, len(added)),
            *(special_ids.ctypes.data, len(template[0]), len(template[1])),
            *(vocab[model.unk_token], min(model.max_input_chars_per_word, 1 << 62)),
        )
        if not self._handle:
            raise MemoryError("out of memory for the tokenizer's vocabulary")

    def encode(self, texts: Sequence[str]) -> tuple[IntArray, IntArray]:
        """(T,) concatenated ids of ASCII texts, and (N,) their lengths; -1 for texts that the library has to encode."""
        raw, ends = _join(texts)
        ids = np.empty(len(raw) + len(texts) * self._specials, np.int64)  # no token is shorter than a character
        lengths = np.empty(len(texts), np.int64)
        total = self._run(
            *(self._handle, raw, len(raw), ends.ctypes.data, len(texts)),
            *(ids.ctypes.data, len(ids), lengths.ctypes.data),
        )
        if total < 0:
            raise MemoryError(f"out of memory while tokenizing {len(texts)} texts")
        return ids[:total], lengths

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[Encodings, NDArray[np.bool_]]:
        """Encode pairs of ASCII texts; returns the encodings of supported pairs, and (N,) which pairs are supported."""
        template = self.pair_template
        assert template is not None
        ids, lengths = self.encode(list(chain.from_iterable(pairs)))
        both = lengths.reshape(-1, 2)
        usable: NDArray[np.bool_] = np.all(both >= 0, axis=1)
        starts = (np.cumsum(lengths.clip(0)) - lengths.clip(0)).reshape(-1, 2)[usable] + self._before
        texts = both[usable] - self._specials  # (n, 2) without special tokens
        parts = [len(template.before), len(template.between), len(template.after)]
        totals = texts.sum(1) + sum(parts)
        first = np.cumsum(totals) - totals
        places = np.stack([first + parts[0], first + parts[0] + texts[:, 0] + parts[1]], 1)  # (n, 2) of the texts
        out, segments = np.empty(int(totals.sum()), np.int64), np.empty(int(totals.sum()), np.int64)
        at = ranges(places.ravel(), texts.ravel())
        out[at] = ids[ranges(starts.ravel(), texts.ravel())]
        segments[at] = np.repeat(np.tile([template.segments[1], template.segments[3]], len(texts)), texts.ravel())
        specials = (
            (first, template.before, template.segments[0]),
            (places[:, 1] - parts[1], template.between, template.segments[2]),
            (first + totals - parts[2], template.after, template.segments[4]),
        )
        for begin, tokens, kinds in specials:
            for k, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
                out[begin + k], segments[begin + k] = token, kind
        return Encodings(out, segments, totals), usable

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self._backend,)  # a handle cannot be copied: a copy builds its own

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._free(self._handle)


def state(part: Any) -> Any:
    """A component of a tokenizer as it is serialized in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _join(texts: Sequence[str]) -> tuple[bytes, IntArray]:
    return "".join(texts).encode("ascii"), np.fromiter(map(len, texts), np.int64, len(texts)).cumsum()


def _template(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids before and after every text; None if the post-processor does more than add them."""
    rules = state(backend.post_processor)
    own = rules is None or {"cls", "sep"} <= set(rules)  # BertProcessing and RobertaProcessing have just these two
    if not own and (rules["type"] != "TemplateProcessing" or sum("Sequence" in part for part in rules["single"]) != 1):
        return None
    whole, bare = backend.encode("a b"), backend.encode("a b", add_special_tokens=False)
    mask, n = whole.special_tokens_mask, len(bare.ids)
    if 0 not in mask or any(whole.type_ids):
        return None
    at = mask.index(0)
    before, after = whole.ids[:at], whole.ids[at + n :]
    if whole.ids != before + bare.ids + after or mask != [1] * at + [0] * n + [1] * len(after):
        return None
    return (before, after) if backend.encode("").ids == before + after else None


def _pair_template(backend: tokenizers.Tokenizer) -> PairTemplate | None:
    """The special tokens around and between the texts of a pair; None if the post-processor does more than add them."""
    rules = state(backend.post_processor)
    if rules is not None and rules["type"] == "TemplateProcessing":
        names = [part["Sequence"]["id"] for part in rules["pair"] if "Sequence" in part]
        if names != ["A", "B"]:
            return None
    whole = backend.encode("a b", "c d e")
    first, second = (backend.encode(text, add_special_tokens=False).ids for text in ("a b", "c d e"))
    mask, kinds = whole.special_tokens_mask, whole.type_ids
    if 0 not in mask:
        return None
    a = mask.index(0)
    b = a + len(first) + [*mask[a + len(first) :], 0].index(0)
    parts = [slice(0, a), slice(a, a + len(first)), slice(a + len(first), b), slice(b, b + len(second))]
    parts.append(slice(b + len(second), None))
    before, between, after = (whole.ids[parts[i]] for i in (0, 2, 4))
    expected = [1] * len(before) + [0] * len(first) + [1] * len(between) + [0] * len(second) + [1] * len(after)
    if whole.ids != before + first + between + second + after or mask != expected:
        return None
    if any(len(set(kinds[part])) > 1 for part in (parts[1], parts[3])):
        return None
    if backend.encode("", "").ids != before + between + after:
        return None
    segments = (kinds[parts[0]], kinds[a], kinds[parts[2]], kinds[b], kinds[parts[4]])
    return PairTemplate(before, between, after, segments)


def _characters(backend: tokenizers.Tokenizer) -> tuple[bytes, bytes] | None:
    """Each ASCII character after normalization, and its kind for the pre-tokenizer: found by calling both."""
    becomes, kinds = bytearray([DROPPED] * 256), bytearray(256)
    normalizer: Any = backend.normalizer
    pre_tokenizer: Any = backend.pre_tokenizer
    for code in range(128):
        letter = chr(code)
        normalized = normalizer.normalize_str(letter)
        words = [word for word, _ in pre_tokenizer.pre_tokenize_str(f"a{letter}a")]
        kind = {1: LETTER, 2: SPACE, 3: PUNCTUATION}.get(len(words))
        expected = {LETTER: [f"a{letter}a"], SPACE: ["a", "a"], PUNCTUATION: ["a", letter, "a"]}
        if kind is None or words != expected[kind] or len(normalized) > 1 or not normalized.isascii():
            return None
        kinds[code] = kind
        if normalized:
            becomes[code] = ord(normalized)
    return bytes(becomes), bytes(kinds)


def _added(backend: tokenizers.Tokenizer, becomes: bytes) -> list[str] | None:
    """Added tokens as they appear in a normalized, lower-cased text: a text without these contains none of them.

    This may match more than `tokenizers` does, never less: `tokenizers` looks for some in the raw text, for others in
    the normalized text, and for some at word boundaries only.
    """
    normalizer: Any = backend.normalizer
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    spellings = chain(contents, map(normalizer.normalize_str, contents))  # stripping accents may make a token ASCII
    encoded = [text.encode("ascii") for text in spellings if text.isascii()]
    normalized = {bytes(becomes[c] for c in text if becomes[c] != DROPPED).decode().lower() for text in encoded}
    if "" in normalized or sum(map(len, normalized)) > MAX_ADDED:
        return None
    return sorted(normalized)


def ascii_pairs(items: Sequence[Any]) -> list[int]:
    """The indices of the pairs of ASCII texts."""
    return [
        i
        for i, item in enumerate(items)
        if isinstance(item, tuple | list)
        and len(item) == 2
        and all(type(text) is str and text.isascii() for text in item)
    ]
