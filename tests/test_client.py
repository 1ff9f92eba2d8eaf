"""The client against a server whose replies are scripted, and against the real one beside the local objects."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

import bertie
from bertie.client import AsyncClient, Client, calls, clients, tries
from bertie.errors import InputError, NotFoundError

Script = Callable[[str, Any], tuple[int, dict[str, str], Any]]


class Fake:
    """A server that says what a script tells it to."""

    def __init__(self) -> None:
        self.script: Script = echo
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        self.connections = 0
        self.under_way = self.most = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Else a reply in two packets waits for the client's word on the first.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                with lock:
                    outer.connections += 1

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                with lock:
                    outer.asked.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                    outer.under_way += 1
                    outer.most = max(outer.most, outer.under_way)
                try:
                    status, headers, reply = outer.script(self.path, body)
                finally:
                    with lock:
                        outer.under_way -= 1
                if status == 0:  # hang up
                    self.close_connection = True
                    return
                data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda request, address: None  # type: ignore[method-assign]  # clients that left
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(sum(map(ord, text)) % 1000) / 7, 1.0]


def echo(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
    """Vectors that say which text they are of."""
    data = [
        {
            "index": i,
            "embedding": base64.b64encode(np.array(vector_of(text), dtype="<f4").tobytes()).decode(),
            "tokens_total": len(text),
            "tokens_read": len(text),
            "windows": 1,
        }
        for i, text in enumerate(body["input"])
    ]
    return 200, {}, {"data": data}


@pytest.fixture
def fake() -> Iterator[Fake]:
    made = Fake()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "FIRST_PAUSE", 0.01)


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call a verb of either client: `call(url, "embed", texts, retries=0, _prompt=…)`."""

    def sync(url: str, verb: str, *args: Any, how: dict[str, Any] | None = None, **options: Any) -> Any:
        with Client(url, **options) as client:
            return getattr(client, verb)(*args, **(how or {}))

    def twin(url: str, verb: str, *args: Any, how: dict[str, Any] | None = None, **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient(url, **options) as client:
                return await getattr(client, verb)(*args, **(how or {}))

        return asyncio.run(main())

    return sync if request.param == "sync" else twin


# --- many texts, few requests at a time ---


def test_long_lists_go_in_several_requests_and_come_back_in_order(fake: Fake, call: Callable[..., Any]) -> None:
    texts = [f"text {i} " + "x" * (i % 50) for i in range(500)]

    def uneven(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        time.sleep(0.02 * (len(fake.asked) % 3))  # so that replies overtake each other
        return echo(path, body)

    fake.script = uneven
    found = call(fake.url, "embed", iter(texts))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([vector_of(text) for text in texts], dtype=np.float32))
    assert len(fake.asked) == -(-500 // calls.ITEMS)
    assert 1 < fake.most <= clients.IN_FLIGHT
    assert fake.connections <= clients.IN_FLIGHT  # they are kept
    assert all(path == "/v1/embeddings" and body["encoding_format"] == "base64" for path, body, _ in fake.asked)


def test_requests_are_cut_by_characters_too_and_a_longer_text_goes_alone(
    fake: Fake, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "CHARACTERS", 100)
    texts = ["a" * 60, "b" * 40, "c", "d" * 300, "e"]
    found = call(fake.url, "embed", texts, in_flight=1)
    assert found[:, 0].tolist() == [60, 40, 1, 300, 1]
    assert [body["input"] for _, body, _ in fake.asked] == [texts[:2], texts[2:3], texts[3:4], texts[4:]]


def test_results_come_before_all_was_read(fake: Fake) -> None:
    """A stream of texts without an end costs a few requests ahead, and one who leaves it stops the rest."""

    def endless() -> Iterator[str]:
        i = 0
        while True:
            yield f"text {i}"
            i += 1

    with Client(fake.url) as client:
        stream = client.embed_each(endless())
        first = [next(stream) for _ in range(10)]
        assert [one.vector[0] for one in first] == [6.0] * 10
        assert first[0].tokens_total == 6
        stream.close()  # type: ignore[attr-defined]
        time.sleep(0.05)
        assert len(fake.asked) <= clients.IN_FLIGHT

    async def main() -> int:
        async with AsyncClient(fake.url) as client:
            async for one in client.embed_each(endless()):
                return one.tokens_total
        return 0

    fake.asked.clear()
    assert asyncio.run(main()) == 6
    assert len(fake.asked) <= clients.IN_FLIGHT


def test_no_texts_are_vectors_of_the_right_length(fake: Fake, call: Callable[..., Any]) -> None:
    found = call(fake.url, "embed", [])
    assert found.shape == (0, 3)
    assert found.dtype == np.float32
    fake.asked.clear()
    assert call(fake.url, "classify", []) == []
    assert fake.asked == []


def test_threads_may_share_a_client(fake: Fake) -> None:
    found: dict[int, Any] = {}
    with Client(fake.url) as client:

        def work(number: int) -> None:
            found[number] = client.embed([f"{number} {i}" for i in range(200)])

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for number in range(8):
        expected = np.array([vector_of(f"{number} {i}") for i in range(200)], dtype=np.float32)
        np.testing.assert_array_equal(found[number], expected)
    assert fake.connections <= clients.IN_FLIGHT


def test_a_cancelled_verb_takes_its_requests_back(fake: Fake) -> None:
    gone = threading.Event()

    def slow(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        gone.wait(5)
        return echo(path, body)

    fake.script = slow

    async def main() -> None:
        async with AsyncClient(fake.url) as client:
            task = asyncio.create_task(client.embed([f"{i}" for i in range(1000)]))
            while not fake.asked:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1  # this one

    asyncio.run(main())
    gone.set()
    assert len(fake.asked) <= clients.IN_FLIGHT


# --- trouble ---


@pytest.mark.parametrize(("status", "headers"), [(429, {"retry-after": "0"}), (502, {}), (503, {}), (0, {})])
def test_what_may_go_away_is_tried_again(
    fake: Fake, call: Callable[..., Any], status: int, headers: dict[str, str]
) -> None:
    left = [3]

    def at_last(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        left[0] -= 1
        return echo(path, body) if left[0] < 0 else (status, headers, {"error": "busy", "error_type": "Overloaded"})

    fake.script = at_last
    assert call(fake.url, "embed", ["a"])[0, 0] == 1.0
    assert len(fake.asked) == 4
    assert len({json.dumps(body) for _, body, _ in fake.asked}) == 1


def test_tries_come_to_an_end(fake: Fake, call: Callable[..., Any]) -> None:
    fake.script = lambda path, body: (429, {"retry-after": "0", "x-request-id": "abc"}, {"error": "the server is busy"})
    with pytest.raises(bertie.ServerError, match="answered 429: the server is busy") as caught:
        call(fake.url, "embed", ["a"], retries=2)
    assert (caught.value.status, caught.value.request_id) == (429, "abc")
    assert len(fake.asked) == 3


@pytest.mark.parametrize("verb", ["fill", "tag"])
def test_nobody_there(call: Callable[..., Any], verb: str) -> None:
    with pytest.raises(bertie.ServerError, match=r"no answer from http://127\.0\.0\.1:9/\w+: ConnectError"):
        call("http://127.0.0.1:9", verb, ["a"], retries=1)


def test_a_server_that_asks_for_too_much_patience_is_not_waited_for(fake: Fake, call: Callable[..., Any]) -> None:
    fake.script = lambda path, body: (503, {"retry-after": "3600"}, {"error": "closed for today"})
    with pytest.raises(bertie.ServerError, match="closed for today"):
        call(fake.url, "embed", ["a"])
    assert len(fake.asked) == 1


def test_pauses_grow_and_are_as_long_as_asked_for() -> None:
    asked = tries.Tries(6, "there")
    pauses = [asked.failed(OSError()) for _ in range(5)]
    for i, pause in enumerate(pauses):
        assert 0.5 * tries.FIRST_PAUSE * 2**i <= pause <= tries.FIRST_PAUSE * 2**i
    assert 7.0 <= asked._next(7.0) < 7.0 + tries.FIRST_PAUSE * 2**5
    asked.pause = 100 * tries.LONGEST_PAUSE
    asked._next(0.0)
    assert asked.pause == tries.LONGEST_PAUSE


def test_retry_after_in_both_spellings() -> None:
    assert tries.retry_after(None) == 0.0
    assert tries.retry_after("7") == 7.0
    assert tries.retry_after("-1") == 0.0
    assert tries.retry_after("soon") == 0.0
    assert 50 < tries.retry_after(email.utils.formatdate(time.time() + 60, usegmt=True)) <= 60


@pytest.mark.parametrize("status", [400, 401, 413, 422, 424, 500, 504])
def test_what_does_not_go_away_is_asked_once(fake: Fake, call: Callable[..., Any], status: int) -> None:
    fake.script = lambda path, body: (status, {}, {"error": {"message": "so it is", "type": "x"}})
    kind = InputError if status in (400, 413, 422) else bertie.ServerError
    with pytest.raises(kind, match="so it is"):
        call(fake.url, "embed", ["a"])
    assert len(fake.asked) == 1


def test_each_api_has_its_shape_of_errors(fake: Fake, call: Callable[..., Any]) -> None:
    shapes: list[Any] = [{"error": {"message": "wrong"}}, {"error": "wrong"}, {"message": "wrong"}, b"wrong"]
    for shape in shapes:
        fake.script = lambda path, body, shape=shape: (404, {}, shape)
        with pytest.raises(NotFoundError, match=r"^http://.*/embeddings: wrong$"):
            call(fake.url, "embed", ["a"])


def test_errors_count_from_the_beginning_of_the_list(fake: Fake, call: Callable[..., Any]) -> None:
    def second(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        if "bad" in body["input"]:
            return 422, {}, {"error": f"text {body['input'].index('bad')} has 12 tokens"}
        return echo(path, body)

    fake.script = second
    with pytest.raises(InputError, match=r"^text 101 has 12 tokens"):
        call(fake.url, "embed", ["good"] * 101 + ["bad"])


@pytest.mark.parametrize("reply", [b"<html>", {"data": [{}]}, [], {"data": [{"embedding": "A"}]}])
def test_another_kind_of_server_is_told_from_ours(fake: Fake, call: Callable[..., Any], reply: Any) -> None:
    fake.script = lambda path, body: (200, {}, reply)
    with pytest.raises(bertie.ServerError, match="is not as `bertie serve`"):
        call(fake.url, "embed", ["a"])


def test_a_server_that_takes_too_long_is_not_asked_again(fake: Fake, call: Callable[..., Any]) -> None:
    done = threading.Event()

    def slow(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        done.wait(5)
        return echo(path, body)

    fake.script = slow
    with pytest.raises(bertie.ServerError, match="ReadTimeout"):
        call(fake.url, "embed", ["a"], timeout=0.1)
    done.set()
    assert len(fake.asked) == 1
    assert fake.asked[0][2]["x-request-timeout"] == "0.1"


def test_what_is_no_text_is_refused_here(fake: Fake, call: Callable[..., Any]) -> None:
    for verb, given, words in [
        ("embed", "a text", "takes a list"),
        ("embed", ["a", 3], "text 1 must be a str"),
        ("tag", ["\ud800"], "surrogate"),
        ("classify", [("a", "b", "c")], "pair"),
        ("answer", ["question"], "pair"),
        ("fill", None, "takes a list"),
    ]:
        with pytest.raises(InputError, match=words):
            call(fake.url, verb, given)
    with pytest.raises(InputError, match="top_k=0"):
        call(fake.url, "rerank", "q", ["a"], how={"top_k": 0})
    with pytest.raises(InputError, match="at least one"):
        call(fake.url, "zero_shot", ["a"], [])
    assert fake.asked == []


@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("127.0.0.1:80", {}, "http://"),
        ("ftp://a", {}, "http://"),
        ("http://a:b", {}, "url="),
        ("http://a", {"timeout": 0}, "timeout=0"),
        ("http://a", {"retries": -1}, "retries=-1"),
        ("http://a", {"in_flight": 0}, "in_flight=0"),
    ],
)
def test_what_cannot_be_a_client(url: str, options: dict[str, Any], words: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InputError, match=words):
            kind(url, **options)


def test_keys_and_models_are_sent(fake: Fake, call: Callable[..., Any]) -> None:
    call(fake.url + "/behind/", "embed", ["a"], api_key="sk-1", model="small", how={"prompt": "query"})
    path, body, headers = fake.asked[0]
    assert path == "/behind/v1/embeddings"
    assert headers["authorization"] == "Bearer sk-1"
    assert (body["model"], body["prompt"], body["input"]) == ("small", "query", ["a"])
    assert "sk-1" not in repr(Client(fake.url, api_key="sk-1"))


def test_ready(fake: Fake, call: Callable[..., Any]) -> None:
    fake.script = lambda path, body: (200 if path == "/health" else 404, {}, b"")
    assert call(fake.url, "ready") is True
    fake.script = lambda path, body: (503, {}, b"")
    assert call(fake.url, "ready") is False
    assert call("http://127.0.0.1:9", "ready") is False


def test_vectors_cost_no_torch(fake: Fake) -> None:
    code = f"import sys, bertie; bertie.Client({fake.url!r}).embed(['a']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_without_httpx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(clients, "import_module", absent)
    with pytest.raises(bertie.MissingPackageError, match="pip install httpx2"):
        Client()


def test_either_httpx_will_do(fake: Fake, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("httpx")
    load = clients.import_module

    def older(name: str) -> Any:
        if name == "httpx2":
            raise ModuleNotFoundError(name=name)
        return load(name)

    monkeypatch.setattr(clients, "import_module", older)
    assert call(fake.url, "embed", ["a"])[0, 0] == 1.0
    with pytest.raises(bertie.ServerError, match="ConnectError"):
        call("http://127.0.0.1:9", "embed", ["a"], retries=0)


def test_both_clients_have_the_same_verbs() -> None:
    def verbs(kind: type) -> dict[str, list[inspect.Parameter]]:
        public = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        return {name: list(inspect.signature(getattr(kind, name)).parameters.values()) for name in public}

    assert verbs(Client) == verbs(AsyncClient)
    assert list(inspect.signature(Client.embed).parameters) == ["self", "texts", "prompt", "dimensions"]
    assert "one vector a text" in (Client.embed.__doc__ or "")
    assert inspect.iscoroutinefunction(AsyncClient.embed)
    assert not inspect.iscoroutinefunction(Client.embed)
