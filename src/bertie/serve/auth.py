"""API keys and rate limits: a file with one hashed key per line.

    # name    sha256 of the key    limits (optional): per minute, and at a time
    alice     5e88…                requests=60 tokens=100000 concurrency=8
    build     9f86…

A key is 32 random bytes, so an unsalted hash does not weaken it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bertie.errors import ConfigError, ExistsError, NotFoundError
from bertie.serve.api_errors import ApiError

RATES = ("requests", "tokens")  # per minute
LIMITS = (*RATES, "concurrency")


@dataclass(slots=True)
class TokenBucket:
    """A rate limit per minute: a full minute's worth may come at once, and overdraft must be waited for."""

    rate: float  # per minute
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    updated: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.updated = self.rate, self.clock()

    def wait(self, cost: float = 1.0) -> float:
        """Seconds until `cost` is available; 0 if it is now."""
        now = self.clock()
        self.level = min(self.rate, self.level + (now - self.updated) * self.rate / 60)
        self.updated = now
        return max(0.0, (min(cost, self.rate) - self.level) * 60 / self.rate)

    def spend(self, cost: float) -> None:
        """Subtract a cost, below zero if need be: the tokens of a text are known only after tokenization."""
        self.level -= cost


@dataclass(slots=True)
class Key:
    """An API key's name and limits."""

    name: str
    buckets: dict[str, TokenBucket]
    concurrency: int | None = None  # requests at a time, from their headers to their reply
    active: int = 0

    def admit(self) -> None:
        """Count a request until `finish`, or raise 429 with the time after which to retry."""
        if self.concurrency is not None and self.active >= self.concurrency:
            message = f"the key {self.name!r} may have {self.concurrency} requests at a time"
            raise ApiError("rate_limit_exceeded", message, retry_after=1.0)
        for unit, bucket in self.buckets.items():
            if wait := bucket.wait():
                message = f"the key {self.name!r} has used up its {unit} per minute"
                raise ApiError("rate_limit_exceeded", message, retry_after=wait)
        if "requests" in self.buckets:
            self.buckets["requests"].spend(1)
        self.active += 1

    def finish(self, tokens: int) -> None:
        """Count the tokens of a request that was admitted."""
        self.active -= 1
        if "tokens" in self.buckets:
            self.buckets["tokens"].spend(tokens)


Rows = dict[str, tuple[str, dict[str, float]]]  # name -> hash and limits


class Keys:
    """API keys by their hash.

    >>> keys = Keys({"bob": ("2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b", {"requests": 60})})
    >>> keys.find(b"Bearer secret").name
    'bob'
    """

    def __init__(self, rows: Rows, share: int = 1) -> None:
        """`share`: the number of worker processes; each enforces its share of every limit."""
        self._share = share
        self._by_hash: dict[str, Key] = {}
        self._path: Path | None = None
        self._stamp = self._seen = ""  # of the file as it was read, and as it was last seen
        self.update(rows)

    @classmethod
    def read(cls, path: str | Path, share: int = 1) -> Keys:
        """Read a key file."""
        stamp, rows = _file_stamp(Path(path)), _read_rows(Path(path))
        if not rows:
            raise ConfigError(f"{path} has no keys; add one with --new-key NAME")
        keys = cls(rows, share)
        keys._path, keys._stamp = Path(path), stamp
        return keys

    def __len__(self) -> int:
        return len(self._by_hash)

    def update(self, rows: Rows) -> None:
        """Replace the keys. Those that stay keep what is left of their limits."""
        by_hash = {}
        for name, (digest, limits) in rows.items():
            key = by_hash[digest] = self._by_hash.get(digest) or Key(name, {})
            shares = {unit: max(limit / self._share, 1.0) for unit, limit in limits.items()}
            old, key.name = key.buckets, name
            key.concurrency = int(shares["concurrency"]) if "concurrency" in shares else None
            key.buckets = {unit: _bucket(shares[unit], old.get(unit)) for unit in RATES if unit in shares}
        self._by_hash = by_hash

    def has_changed(self) -> bool:
        """Whether the file has changed since it was read, and not since the last call: it may be half written."""
        if self._path is None:
            return False
        previous, self._seen = self._seen, _file_stamp(self._path)
        return self._seen == previous != self._stamp

    def reload(self) -> None:
        """Read the file again. A file that cannot be read raises an error, and the keys stay as they were.

        A file without keys is valid here: the last key was deleted, and nobody is admitted.
        """
        if self._path is not None:
            self._stamp = _file_stamp(self._path)  # a broken file is reported once
            self.update(_read_rows(self._path))

    def find(self, authorization: bytes | None) -> Key:
        """The key in a request's Authorization header."""
        scheme, _, secret = (authorization or b"").partition(b" ")
        key = self._by_hash.get(hashlib.sha256(secret.strip()).hexdigest()) if scheme.lower() == b"bearer" else None
        if key is None:
            raise ApiError("invalid_api_key", "an API key is required: send it as 'Authorization: Bearer KEY'")
        return key


def _bucket(rate: float, old: TokenBucket | None) -> TokenBucket:
    """A bucket for a rate; if there was one, with what is left in it."""
    if old is not None and old.rate == rate:
        return old
    new = TokenBucket(rate)
    if old is not None:
        old.wait()  # brings its level up to date
        new.level = min(rate, old.level)
    return new


def _file_stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return "missing"
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _read_rows(path: Path) -> Rows:
    rows: Rows = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise NotFoundError(f"there is no key file {str(path)!r}; create one with --new-key NAME") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a key file: it is not UTF-8") from None
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        if len(words) < 2 or not re.fullmatch(r"[0-9a-f]{64}", words[1]):
            raise ConfigError(f"{where}: must be a name, the key's SHA-256 as 64 hex digits, and optional limits")
        if words[0] in rows or any(words[1] == digest for digest, _ in rows.values()):
            raise ConfigError(f"{where}: the name {words[0]!r}, or its key, is a duplicate")
        rows[words[0]] = words[1], dict(_limit(word, where) for word in words[2:])
    return rows


def _limit(word: str, where: str) -> tuple[str, float]:
    name, _, value = word.partition("=")
    if name not in LIMITS or not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{where}: {word!r} must be {' or '.join(f'{unit}=N' for unit in LIMITS)}, with N at least 1")
    return name, float(value)


def new_key(path: str | Path, name: str) -> str:
    """Create a key, append its hash to the file, and return the key, which is stored nowhere."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(f"the key's name {name!r:.80} must be 1 to 64 letters, digits, dots, dashes or underscores")
    path = Path(path)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if any(line.split()[:1] == [name] for line in old.splitlines()):
        raise ExistsError(f"{path} already has a key named {name!r}")
    key = "bertie-" + secrets.token_urlsafe(32)
    line = f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n"
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
        file.write(line if not old or old.endswith("\n") else "\n" + line)
    return key
