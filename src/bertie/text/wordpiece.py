"""BERT's WordPiece for ASCII texts in C++ (cpp/): the ids that the library `tokenizers` gives, many times as fast.

Built with the package where there is a compiler. Where there is none, for tokenizers of other kinds and for texts that
are not ASCII or spell out an added token such as [MASK], `tokenizers` does the work.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers.models import WordPiece as WordPieceModel
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

enabled = True  # whether the library is used where it can be
ABI_VERSION = 2  # increment here and in wordpiece.cpp when the C interface changes
NORMALIZER = {"type", "clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}
LETTER, SPACE, PUNCTUATION, DROPPED = 0, 1, 2, 255
MAX_ADDED = 1 << 14  # characters of added tokens: each takes up to half a kilobyte


@cache
def library() -> ctypes.CDLL | None:
    """The compiled part, if it was built, and from these sources."""
    files = (Path(__file__).with_name(f"_wordpiece{ending}") for ending in EXTENSION_SUFFIXES)
    found = next((file for file in files if file.exists()), None)
    if found is None:
        return None
    lib = ctypes.CDLL(str(found))
    if not hasattr(lib, f"bertie_wordpiece_abi_{ABI_VERSION}"):  # left over from an older installation
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


def find(backend: tokenizers.Tokenizer) -> WordPiece | None:
    """The fast twin of a tokenizer that neither pads nor cuts. None where there is none: no guesses.

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
    around, letters = _template(backend), _letters(backend)
    if around is None or letters is None or not model.continuing_subword_prefix.isascii():
        return None
    added = _added(backend, letters[0])
    if added is None:
        return None
    return WordPiece(backend, lib, vocab, around, letters, added)


class WordPiece:
    """The library's copy of a vocabulary."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        lib: ctypes.CDLL,
        vocab: dict[str, int],
        around: tuple[list[int], list[int]],
        letters: tuple[bytes, bytes],
        added: list[str],
    ) -> None:
        self._backend, self._run, self._free = backend, lib.bertie_wordpiece_encode, lib.bertie_wordpiece_destroy
        self._around = sum(map(len, around))
        pieces = [piece for piece in vocab if piece.isascii()]
        ids = np.array([vocab[piece] for piece in pieces], np.int64)
        template = np.array([*around[0], *around[1]], np.int64)
        (raw, ends), (special, special_ends) = _joined(pieces), _joined(added)
        model: Any = backend.model
        prefix = model.continuing_subword_prefix.encode()
        self._handle = lib.bertie_wordpiece_create(
            *(*letters, raw, ends.ctypes.data, ids.ctypes.data, len(pieces), prefix, len(prefix)),
            *(special, special_ends.ctypes.data, len(added), template.ctypes.data, len(around[0]), len(around[1])),
            *(vocab[model.unk_token], min(model.max_input_chars_per_word, 1 << 62)),
        )
        if not self._handle:
            raise MemoryError("no memory for the tokenizer's vocabulary")

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(T,) the ids of ASCII texts, one behind the other, and (N,) how many each has: -1 where it is not for us."""
        raw, ends = _joined(texts)
        ids = np.empty(len(raw) + len(texts) * self._around, np.int64)  # no token is shorter than a character
        lengths = np.empty(len(texts), np.int64)
        total = self._run(
            *(self._handle, raw, len(raw), ends.ctypes.data, len(texts)),
            *(ids.ctypes.data, len(ids), lengths.ctypes.data),
        )
        if total < 0:
            raise MemoryError(f"no memory to tokenize {len(texts)} texts")
        return ids[:total], lengths

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self._backend,)  # a copy, here or in another process, is made anew

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._free(self._handle)


def state(part: Any) -> Any:
    """What a part of a tokenizer says of itself in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _joined(texts: Sequence[str]) -> tuple[bytes, NDArray[np.int64]]:
    return "".join(texts).encode("ascii"), np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))


def _template(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """The ids before and after every text; None if that is not all that is done to a text."""
    rules = state(backend.post_processor)
    own = rules is None or {"cls", "sep"} <= set(rules)  # these two are all that a family's own template has
    if not own and (rules["type"] != "TemplateProcessing" or sum("Sequence" in one for one in rules["single"]) != 1):
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


def _letters(backend: tokenizers.Tokenizer) -> tuple[bytes, bytes] | None:
    """What the tokenizer makes of each ASCII character, and where it cuts: asked, and not known by heart."""
    becomes, kinds = bytearray([DROPPED] * 256), bytearray(256)
    normalizer: Any = backend.normalizer
    cutter: Any = backend.pre_tokenizer
    for code in range(128):
        letter = chr(code)
        now = normalizer.normalize_str(letter)
        words = [word for word, _ in cutter.pre_tokenize_str(f"a{letter}a")]
        kind = {1: LETTER, 2: SPACE, 3: PUNCTUATION}.get(len(words))
        expected = {LETTER: [f"a{letter}a"], SPACE: ["a", "a"], PUNCTUATION: ["a", letter, "a"]}
        if kind is None or words != expected[kind] or len(now) > 1 or not now.isascii():
            return None
        kinds[code] = kind
        if now:
            becomes[code] = ord(now)
    return bytes(becomes), bytes(kinds)


def _added(backend: tokenizers.Tokenizer, becomes: bytes) -> list[str] | None:
    """Added tokens as a normalized text in lower case would have them: a text without these has none of them.

    That finds more than `tokenizers` does, never less: it looks for some in the text as it is, for others in the
    normalized text, and for some only at word boundaries.
    """
    normalizer: Any = backend.normalizer
    contents = [token.content for token in backend.get_added_tokens_decoder().values()]
    spelled = chain(contents, map(normalizer.normalize_str, contents))  # an accent may be taken away: then it is ASCII
    kept = [text.encode("ascii") for text in spelled if text.isascii()]
    found = {bytes(becomes[c] for c in text if becomes[c] != DROPPED).decode().lower() for text in kept}
    if "" in found or sum(map(len, found)) > MAX_ADDED:
        return None
    return sorted(found)
