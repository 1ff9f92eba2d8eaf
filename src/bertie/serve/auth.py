"""API keys: a file of hashes, one a line, each with limits of its own.

    # name    sha256 of the key    limits, if any
    alice     5e88…                requests=60 tokens=100000
    build     9f86…

The limits are of a minute. A key is 32 random bytes, so that its plain hash gives nothing away.
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
from bertie.serve.problems import Problem

LIMITS = ("requests", "tokens")


@dataclass(slots=True)
class Bucket:
    """So many a minute: a full minute's worth may come at once. What was spent beyond it must be waited for."""

    rate: float  # a minute
    clock: Callable[[], float] = time.monotonic
    left: float = field(init=False)
    seen: float = field(init=False)

    def __post_init__(self) -> None:
        self.left, self.seen = self.rate, self.clock()

    def wait(self, cost: float = 1.0) -> float:
        """Seconds until so much may be spent: 0, if it may be now."""
        now = self.clock()
        self.left = min(self.rate, self.left + (now - self.seen) * self.rate / 60)
        self.seen = now
        return max(0.0, (min(cost, self.rate) - self.left) * 60 / self.rate)

    def spend(self, cost: float) -> None:
        """Take it, even where there is less: what a text costs is known only when it was read."""
        self.left -= cost


@dataclass(slots=True)
class Key:
    """One user of the server."""

    name: str
    buckets: dict[str, Bucket]

    def admit(self) -> None:
        """Count a request, or say when to come back."""
        for what, bucket in self.buckets.items():
            if wait := bucket.wait():
                raise Problem("rate", f"the key {self.name!r} has used up its {what} a minute", retry_after=wait)
        if "requests" in self.buckets:
            self.buckets["requests"].spend(1)

    def spend(self, tokens: int) -> None:
        """Count what a request has read."""
        if "tokens" in self.buckets:
            self.buckets["tokens"].spend(tokens)


class Keys:
    """Those of a file.

    >>> keys = Keys({"bob": ("2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b", {"requests": 60})})
    >>> keys.find(b"Bearer secret").name
    'bob'
    """

    def __init__(self, rows: dict[str, tuple[str, dict[str, float]]], share: int = 1) -> None:
        """`share`: of how many workers this is one; each counts for itself."""
        self._by_hash = {
            digest: Key(name, {what: Bucket(max(rate / share, 1.0)) for what, rate in limits.items()})
            for name, (digest, limits) in rows.items()
        }

    @classmethod
    def read(cls, path: str | Path, share: int = 1) -> Keys:
        """The file."""
        rows: dict[str, tuple[str, dict[str, float]]] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise NotFoundError(f"there is no file of keys {str(path)!r}; make one with --new-key NAME") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a file of keys: it is not UTF-8") from None
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            where = f"{path}, line {number}"
            if len(words) < 2 or not re.fullmatch(r"[0-9a-f]{64}", words[1]):
                raise ConfigError(f"{where}: must be a name, the key's sha256 in 64 hex digits, and limits")
            if words[0] in rows or any(words[1] == digest for digest, _ in rows.values()):
                raise ConfigError(f"{where}: the name {words[0]!r}, or its key, is there already")
            rows[words[0]] = words[1], dict(_limit(word, where) for word in words[2:])
        if not rows:
            raise ConfigError(f"{path} holds no key; add one with --new-key NAME")
        return cls(rows, share)

    def find(self, authorization: bytes | None) -> Key:
        """The user of a request's Authorization header."""
        kind, _, key = (authorization or b"").partition(b" ")
        found = self._by_hash.get(hashlib.sha256(key.strip()).hexdigest()) if kind.lower() == b"bearer" else None
        if found is None:
            raise Problem("key", "this server wants a key: send it as 'Authorization: Bearer KEY'")
        return found


def _limit(word: str, where: str) -> tuple[str, float]:
    name, _, value = word.partition("=")
    if name not in LIMITS or not value.isascii() or not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{where}: {word!r} must be {' or '.join(f'{one}=N' for one in LIMITS)}, with N from 1")
    return name, float(value)


def new_key(path: str | Path, name: str) -> str:
    """Make a key, put its hash into the file, and return it: it is kept nowhere."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ConfigError(f"the key's name {name!r:.80} must be 1 to 64 letters, digits, dots, dashes or underscores")
    path = Path(path)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if any(line.split()[:1] == [name] for line in old.splitlines()):
        raise ExistsError(f"{path} has a key named {name!r} already")
    key = "bertie-" + secrets.token_urlsafe(32)
    line = f"{name} {hashlib.sha256(key.encode()).hexdigest()}\n"
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
        file.write(line if not old or old.endswith("\n") else "\n" + line)
    return key
