"""Read SentencePiece model files without protobuf: the pieces and normalization of a `ModelProto`."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertie.errors import CheckpointError, ConfigError
from bertie.text.tokenizer_files import read_bytes

MAX_PIECES = 1 << 22

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # sentencepiece_model.proto, SentencePiece.Type


@dataclass(frozen=True, slots=True)
class SentencePieceModel:
    """The parts of a SentencePiece model that determine token ids."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    kind: Literal["unigram", "bpe"]
    unk_id: int
    byte_fallback: bool
    precompiled_charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a SentencePiece model file. Every field is checked: the file may be corrupt or malicious."""
    try:
        model = _parse_model(memoryview(read_bytes(path)), str(path))
    except (ValueError, TypeError, IndexError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        if isinstance(error, ConfigError):
            raise
        raise CheckpointError(f"{path} is not a SentencePiece model: {error}") from error
    return model


def _parse_model(data: memoryview, path: str) -> SentencePieceModel:
    pieces: list[tuple[str, float, int]] = []
    # Fields that are missing in the file have the defaults of sentencepiece_model.proto.
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            if len(pieces) == MAX_PIECES:
                raise ValueError(f"more than {MAX_PIECES} pieces")
            pieces.append(_piece(value))
        elif number == 2:
            trainer.update(_fields(value))
        elif number == 3:
            normalizer.update(_fields(value))
    kind = {1: "unigram", 2: "bpe"}.get(trainer.get(3, 1))
    if kind is None:
        raise ConfigError(f"{path}: SentencePiece model_type={trainer[3]}; supported: 1 (unigram) and 2 (bpe)")
    if trainer.get(24, 0):
        raise ConfigError(f"{path}: treat_whitespace_as_suffix is not supported")
    if any(kind == UNUSED for _, _, kind in pieces):
        raise ConfigError(f"{path}: unused pieces (a restricted vocabulary) are not supported")
    unk_id = trainer.get(40, 0)
    if not isinstance(unk_id, int) or unk_id >= len(pieces) or pieces[unk_id][2] != UNKNOWN:
        raise ValueError(f"unk_id={unk_id!r} is not the unknown piece of {len(pieces)}")
    charsmap = normalizer.get(2, b"")
    if not isinstance(charsmap, bytes | memoryview):
        raise ValueError("precompiled_charsmap must be bytes")
    return SentencePieceModel(
        pieces=pieces,
        kind="unigram" if kind == "unigram" else "bpe",
        unk_id=unk_id,
        byte_fallback=bool(trainer.get(35, 0)),
        precompiled_charsmap=bytes(charsmap),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _piece(data: memoryview) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1:
            text = str(value, "utf-8")  # TypeError for a varint, where bytes(value) would allocate that many bytes
        elif number == 2:
            score = struct.unpack("<f", value)[0]
        elif number == 3:
            kind = value
    if not text:
        raise ValueError("a piece has no text")
    if not math.isfinite(score) or kind not in range(1, 7):
        raise ValueError(f"piece {text!r} has score={score} and type={kind}")
    return text, score, kind


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """The fields of a message: varints as int, others as bytes. No allocation depends on sizes in the file."""
    if not isinstance(data, memoryview):
        raise ValueError("expected a message")
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire == 5:
            size = 4
        elif wire == 1:
            size = 8
        else:
            raise ValueError(f"wire type {wire}")
        if size > end - at:
            raise ValueError(f"a field of {size} bytes where {end - at} are left")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a varint of more than ten bytes")
