"""API keys: the file, rate limits, and what needs a key."""

from __future__ import annotations

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bertie.errors import ConfigError, ExistsError, NotFoundError
from bertie.serve.api_errors import ApiError
from bertie.serve.auth import Key, Keys, TokenBucket, new_key
from tests.serve.conftest import BlockedQueue, Running, Start, until


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_token_bucket_refills() -> None:
    now = 100.0
    bucket = TokenBucket(60.0, lambda: now)
    for _ in range(60):
        assert bucket.wait() == 0
        bucket.spend(1)
    assert bucket.wait() == pytest.approx(1.0)
    now += 0.5
    assert bucket.wait() == pytest.approx(0.5)
    now += 0.5
    assert bucket.wait() == 0
    now += 10_000
    bucket.wait()
    assert bucket.level == 60  # at most one minute's worth


def test_overdraft_delays_the_next_request() -> None:
    now = 0.0
    key = Key("bob", {"tokens": TokenBucket(100.0, lambda: now)})
    key.admit()
    key.finish(250)
    with pytest.raises(ApiError) as refusal:
        key.admit()
    assert refusal.value.retry_after == pytest.approx(151 * 0.6)
    now = 91.0
    key.admit()


def test_a_new_key_is_stored_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    one, two = new_key(file, "alice"), new_key(file, "bob")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert one not in file.read_text()
    keys = Keys.read(file)
    assert keys.find(f"Bearer {one}".encode()).name == "alice"
    assert keys.find(f"bearer  {two}".encode()).name == "bob"
    for bad in (None, b"", b"Bearer", b"Bearer wrong", one.encode(), f"Basic {one}".encode(), b"\xff \xfe"):
        with pytest.raises(ApiError, match="API key is required"):
            keys.find(bad)
    with pytest.raises(ExistsError, match="alice"):
        new_key(file, "alice")
    with pytest.raises(ConfigError, match="letters, digits"):
        new_key(file, "a b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no keys"),
        ("# nobody\n", "has no keys"),
        ("bob\n", "line 1"),
        (f"\nbob {'g' * 64}\n", "line 2"),
        (f"bob {digest('a')} requests=0\n", "requests=0"),
        (f"bob {digest('a')} speed=3\n", "speed=3"),
        (f"bob {digest('a')}\nbob {digest('b')}\n", "line 2.*'bob'"),
        (f"bob {digest('a')}\nmax {digest('a')}\n", "line 2.*'max'"),
    ],
)
def test_invalid_key_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Keys.read(tmp_path / "keys")


def test_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="--new-key"):
        Keys.read(tmp_path / "keys")


@pytest.fixture(scope="module")
def locked(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Running:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"bob {digest('b')} requests=3\nmax {digest('m')} tokens=50  # few\nall {digest('a')}\n")
    return start(keys=Keys.read(file))


def test_public_and_protected_paths(locked: Running) -> None:
    assert locked.client.get("/health").status_code == 200
    assert locked.client.get("/").status_code == 200
    assert locked.client.get("/openapi.json").json()["security"] == [{"key": []}]
    for path in ("/metrics", "/info", "/v1/models", "/about", "/nope", "/v1/models/small"):
        reply = locked.client.get(path)
        assert (path, reply.status_code) == (path, 401)
        assert reply.headers["www-authenticate"] == "Bearer"
        assert locked.client.get(path, headers={"authorization": "Bearer a"}).status_code in (200, 404)
    assert locked.client.get("/ping").status_code == locked.client.get("/docs").status_code == 200
    for path in ("/", "/invocations", "/embeddings", "/embed", "/v1/embeddings", "/v1/rerank", "/fill"):
        assert locked.post(path, {}).status_code == 401


def test_requests_per_minute(locked: Running) -> None:
    bob = {"authorization": "Bearer b"}
    for _ in range(3):
        assert locked.post("/embed", {"inputs": "a"}, headers=bob).status_code == 200
    reply = locked.post("/embed", {"inputs": "a"}, headers=bob)
    assert (reply.status_code, reply.json()["error_type"]) == (429, "Overloaded")
    assert 1 <= int(reply.headers["retry-after"]) <= 20
    assert locked.post("/embed", {"inputs": "a"}, headers={"authorization": "Bearer a"}).status_code == 200


def test_tokens_per_minute(locked: Running) -> None:
    mine = {"authorization": "Bearer m"}
    assert locked.post("/embed", {"inputs": "a cat " * 40}, headers=mine).status_code == 200  # 82, all at once
    reply = locked.post("/embed", {"inputs": "a"}, headers=mine)
    assert reply.status_code == 429
    assert "tokens per minute" in reply.json()["error"]


def test_logs_have_the_name_of_the_key_only(locked: Running) -> None:
    locked.post("/embed", {"inputs": "a"}, headers={"authorization": "Bearer a", "x-request-id": "who"})
    (line,) = [one for one in locked.lines if one.get("id") == "who"]
    assert line["key"] == "all"
    assert "Bearer" not in locked.log


# --- reloading ---


def admitted(server: Running, key: str) -> bool:
    return server.client.get("/info", headers={"authorization": f"Bearer {key}"}).status_code == 200


def write(file: Path, text: str) -> None:
    """Replace a file as editors do, with another inode."""
    (file.parent / "new").write_text(text)
    os.replace(file.parent / "new", file)


def test_a_deleted_key_stops_working(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {digest('a')}\nbob {digest('b')} requests=3\n")
    keys = Keys.read(file)
    server = start(keys=keys)
    bob = keys.find(b"Bearer b")
    assert admitted(server, "a")
    write(file, f"bob {digest('b')} requests=3\ncarol {digest('c')}\n")
    until(lambda: not admitted(server, "a"))
    assert admitted(server, "b")
    assert admitted(server, "c")
    assert keys.find(b"Bearer b") is bob  # with what is left of its limits

    write(file, f"bob {digest('b')}\nalice not-a-hash\n")
    server.app.reload_keys()
    assert admitted(server, "c")
    assert not admitted(server, "a")
    file.unlink()
    server.app.reload_keys()
    assert admitted(server, "c")
    write(file, "# nobody\n")
    server.app.reload_keys()
    assert not admitted(server, "c")
    (broken, _) = [line for line in server.lines if line["event"] == "keys not reloaded"]
    assert (broken["error"], broken["line"]) == ("ConfigError", 2)
    assert "not-a-hash" not in server.log
    assert str(file) not in server.log


def test_buckets_after_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    names = ("same", "lower", "higher")
    file.write_text("".join(f"{name} {digest(name[0])} requests=60\n" for name in names))
    keys = Keys.read(file)
    found = {name: keys.find(b"Bearer " + name[:1].encode()) for name in names}
    for key in found.values():
        key.buckets["requests"].spend(50)
    rates = {"same": 60, "lower": 6, "higher": 600}
    file.write_text("".join(f"new-{name} {digest(name[0])} requests={rate}\n" for name, rate in rates.items()))
    keys.reload()
    assert keys.find(b"Bearer s") is found["same"]  # requests in flight still count
    assert found["same"].name == "new-same"
    levels = {name: key.buckets["requests"].level for name, key in found.items()}
    assert levels == pytest.approx({"same": 10, "lower": 6, "higher": 10}, abs=0.5)
    file.write_text(f"same {digest('s')} tokens=5\n")
    keys.reload()
    assert list(found["same"].buckets) == ["tokens"]
    with pytest.raises(ApiError):
        keys.find(b"Bearer l")


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice {digest('a')}\n")
    keys = Keys.read(file)
    assert not keys.has_changed()
    for size in range(3):
        file.write_text("#" * size)
        assert not keys.has_changed()
    assert keys.has_changed()
    keys.reload()
    assert not keys.has_changed()
    assert len(keys) == 0
    assert not Keys({}).has_changed()


def test_concurrent_requests_of_a_key_are_limited(start: Start, blocked: BlockedQueue, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"bob {digest('b')} concurrency=2\namy {digest('a')}\n")
    server = start(keys=Keys.read(tmp_path / "keys"))

    def post(key: str) -> int:
        body = {"inputs": "a", "model": "embed"}
        return httpx.post(f"{server.url}/embed", json=body, headers={"authorization": f"Bearer {key}"}).status_code

    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(post, "b") for _ in range(2)]
        until(lambda: len(blocked.tickets) == 2)
        assert post("b") == 429
        other = pool.submit(post, "a")
        until(lambda: len(blocked.tickets) == 3)
        blocked.release.set()
        assert [reply.result() for reply in (*first, other)] == [200] * 3
    assert post("b") == 200
    assert Keys.read(tmp_path / "keys", share=4).find(b"Bearer b").concurrency == 1
