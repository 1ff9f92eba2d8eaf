"""Both clients against a server with scripted responses: batching, retries, errors, cancellation."""

from __future__ import annotations

import asyncio
import base64
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
from bertie.client import AsyncClient, Client, clients, requests, retries
from bertie.errors import InputError, NotFoundError

Script = Callable[[str, Any], tuple[int, dict[str, str], Any]]


class ScriptedServer:
    """A server that answers with the results of a function."""

    def __init__(self) -> None:
        self.script: Script = echo
        self.received: list[tuple[str, Any, dict[str, str]]] = []
        self.connections = 0
        self.in_flight = self.most_in_flight = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Otherwise a response in two packets waits for the acknowledgement of the first.
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
                    outer.received.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                    outer.in_flight += 1
                    outer.most_in_flight = max(outer.most_in_flight, outer.in_flight)
                try:
                    status, headers, reply = outer.script(self.path, body)
                finally:
                    with lock:
                        outer.in_flight -= 1
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
        self.server.handle_error = lambda request, address: None  # of disconnected clients
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


def vector_of(text: str) -> list[float]:
    return [float(len(text)), float(sum(map(ord, text)) % 1000) / 7, 1.0]


def echo(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
    """Return embeddings that identify their texts."""
    data = [
        {
            "index": i,
            "embedding": base64.b64encode(np.array(vector_of(text), dtype="<f4").tobytes()).decode(),
            "tokens_total": len(text),
            "tokens_read": len(text),
            "windows": 1,
            "tokens_unknown": 0,
            "tokens_non_english": 0,
        }
        for i, text in enumerate(body["input"])
    ]
    return 200, {}, {"data": data}


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Call a method of either client: `call(url, "embed", texts, retries=0, arguments={"prompt": …})`."""

    def sync(url: str, method: str, *args: Any, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        with Client(url, **options) as client:
            return getattr(client, method)(*args, **(arguments or {}))

    def asynchronous(url: str, method: str, *args: Any, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        async def main() -> Any:
            async with AsyncClient(url, **options) as client:
                return await getattr(client, method)(*args, **(arguments or {}))

        return asyncio.run(main())

    return sync if request.param == "sync" else asynchronous


# --- batching ---


def test_long_lists_are_split_and_results_are_in_order(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    texts = [f"text {i} " + "x" * (i % 50) for i in range(500)]

    def uneven(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        time.sleep(0.02 * (len(scripted.received) % 3))  # so that responses arrive out of order
        return echo(path, body)

    scripted.script = uneven
    found = call(scripted.url, "embed", iter(texts))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([vector_of(text) for text in texts], dtype=np.float32))
    assert len(scripted.received) == -(-500 // requests.MAX_ITEMS)
    assert 1 < scripted.most_in_flight <= clients.IN_FLIGHT
    assert scripted.connections <= clients.IN_FLIGHT  # which are kept alive
    assert all(path == "/v1/embeddings" and body["encoding_format"] == "base64" for path, body, _ in scripted.received)


def test_requests_are_limited_by_characters_and_a_longer_text_is_sent_alone(
    scripted: ScriptedServer, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_CHARACTERS", 100)
    texts = ["a" * 60, "b" * 40, "c", "d" * 300, "e"]
    found = call(scripted.url, "embed", texts, in_flight=1)
    assert found[:, 0].tolist() == [60, 40, 1, 300, 1]
    assert [body["input"] for _, body, _ in scripted.received] == [texts[:2], texts[2:3], texts[3:4], texts[4:]]


def test_results_are_streamed(scripted: ScriptedServer) -> None:
    """An endless stream of texts sends a few requests ahead, and closing it stops the rest."""

    def endless() -> Iterator[str]:
        i = 0
        while True:
            yield f"text {i}"
            i += 1

    with Client(scripted.url) as client:
        stream = client.embed_each(endless())
        first = [next(stream) for _ in range(10)]
        assert [one.vector[0] for one in first] == [6.0] * 10
        assert first[0].tokens_total == 6
        stream.close()  # type: ignore[attr-defined]
        time.sleep(0.05)
        assert len(scripted.received) <= clients.IN_FLIGHT

    async def main() -> int:
        async with AsyncClient(scripted.url) as client:
            async for one in client.embed_each(endless()):
                return one.tokens_total
        return 0

    scripted.received.clear()
    assert asyncio.run(main()) == 6
    assert len(scripted.received) <= clients.IN_FLIGHT


def test_an_empty_list_gives_embeddings_of_the_right_dimension(
    scripted: ScriptedServer, call: Callable[..., Any]
) -> None:
    found = call(scripted.url, "embed", [])
    assert found.shape == (0, 3)
    assert found.dtype == np.float32
    scripted.received.clear()
    assert call(scripted.url, "classify", []) == []
    assert scripted.received == []


def test_threads_can_share_a_client(scripted: ScriptedServer) -> None:
    found: dict[int, Any] = {}
    with Client(scripted.url) as client:

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
    assert scripted.connections <= clients.IN_FLIGHT


def test_cancelling_a_method_cancels_its_requests(scripted: ScriptedServer) -> None:
    gone = threading.Event()

    def slow(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        gone.wait(5)
        return echo(path, body)

    scripted.script = slow

    async def main() -> None:
        async with AsyncClient(scripted.url) as client:
            task = asyncio.create_task(client.embed([f"{i}" for i in range(1000)]))
            while not scripted.received:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len(asyncio.all_tasks()) == 1  # this one

    asyncio.run(main())
    gone.set()
    assert len(scripted.received) <= clients.IN_FLIGHT


# --- errors and retries ---


@pytest.mark.parametrize(("status", "headers"), [(429, {"retry-after": "0"}), (502, {}), (503, {}), (0, {})])
def test_transient_errors_are_retried(
    scripted: ScriptedServer, call: Callable[..., Any], status: int, headers: dict[str, str]
) -> None:
    left = [3]

    def at_last(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        left[0] -= 1
        return echo(path, body) if left[0] < 0 else (status, headers, {"error": "busy", "error_type": "Overloaded"})

    scripted.script = at_last
    assert call(scripted.url, "embed", ["a"])[0, 0] == 1.0
    assert len(scripted.received) == 4
    assert len({json.dumps(body) for _, body, _ in scripted.received}) == 1


def test_retries_are_limited(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    scripted.script = lambda path, body: (
        429,
        {"retry-after": "0", "x-request-id": "abc"},
        {"error": "the server is busy"},
    )
    with pytest.raises(bertie.ServerError, match="answered 429: the server is busy") as caught:
        call(scripted.url, "embed", ["a"], retries=2)
    assert (caught.value.status, caught.value.request_id) == (429, "abc")
    assert len(scripted.received) == 3


@pytest.mark.parametrize("method", ["fill", "tag"])
def test_no_server(call: Callable[..., Any], method: str) -> None:
    with pytest.raises(bertie.ServerError, match=r"no response from http://127\.0\.0\.1:9/\w+: ConnectError.*running"):
        call("http://127.0.0.1:9", method, ["a"], retries=1)


def test_a_long_retry_after_is_not_waited_for(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    scripted.script = lambda path, body: (503, {"retry-after": "3600"}, {"error": "closed for today"})
    with pytest.raises(bertie.ServerError, match="closed for today"):
        call(scripted.url, "embed", ["a"])
    assert len(scripted.received) == 1


@pytest.mark.parametrize("status", [400, 401, 413, 422, 424, 500, 504])
def test_permanent_errors_are_not_retried(scripted: ScriptedServer, call: Callable[..., Any], status: int) -> None:
    scripted.script = lambda path, body: (status, {}, {"error": {"message": "so it is", "type": "x"}})
    kind = InputError if status in (400, 413, 422) else bertie.ServerError
    with pytest.raises(kind, match="so it is"):
        call(scripted.url, "embed", ["a"])
    assert len(scripted.received) == 1


def test_error_formats_of_all_apis(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    shapes: list[Any] = [{"error": {"message": "wrong"}}, {"error": "wrong"}, {"message": "wrong"}, b"wrong"]
    for shape in shapes:
        scripted.script = lambda path, body, shape=shape: (404, {}, shape)
        with pytest.raises(NotFoundError, match=r"^http://.*/embeddings: wrong$"):
            call(scripted.url, "embed", ["a"])


def test_errors_count_from_the_beginning_of_the_list(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    def second(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        if "bad" in body["input"]:
            return 422, {}, {"error": f"text {body['input'].index('bad')} has 12 tokens"}
        return echo(path, body)

    scripted.script = second
    with pytest.raises(InputError, match=r"^text 101 has 12 tokens"):
        call(scripted.url, "embed", ["good"] * 101 + ["bad"])


@pytest.mark.parametrize("reply", [b"<html>", {"data": [{}]}, [], {"data": [{"embedding": "A"}]}])
def test_responses_of_another_server_are_reported(
    scripted: ScriptedServer, call: Callable[..., Any], reply: Any
) -> None:
    scripted.script = lambda path, body: (200, {}, reply)
    with pytest.raises(bertie.ServerError, match="is not one of `bertie serve`"):
        call(scripted.url, "embed", ["a"])


def test_timeouts_are_not_retried(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    done = threading.Event()

    def slow(path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        done.wait(5)
        return echo(path, body)

    scripted.script = slow
    with pytest.raises(bertie.ServerError, match="ReadTimeout"):
        call(scripted.url, "embed", ["a"], timeout=0.1)
    done.set()
    assert len(scripted.received) == 1
    assert scripted.received[0][2]["x-request-timeout"] == "0.1"


def test_invalid_inputs_are_refused_before_sending(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    for verb, given, words in [
        ("embed", {"a": "text"}, "takes a list"),
        ("embed", ["a", 3], "text 1 must be a str"),
        ("tag", ["\ud800"], "surrogate"),
        ("classify", [("a", "b", "c")], "pair"),
        ("answer", ["question"], "pair"),
        ("fill", None, "takes a list"),
    ]:
        with pytest.raises(InputError, match=words):
            call(scripted.url, verb, given)
    with pytest.raises(InputError, match="top_k=0"):
        call(scripted.url, "rerank", "q", ["a"], arguments={"top_k": 0})
    with pytest.raises(InputError, match="at least one"):
        call(scripted.url, "zero_shot", ["a"], [])
    assert scripted.received == []


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
def test_invalid_options(url: str, options: dict[str, Any], words: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InputError, match=words):
            kind(url, **options)


def test_keys_and_models_are_sent(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    call(scripted.url + "/behind/", "embed", ["a"], api_key="sk-1", model="small", arguments={"prompt": "query"})
    path, body, headers = scripted.received[0]
    assert path == "/behind/v1/embeddings"
    assert headers["authorization"] == "Bearer sk-1"
    assert (body["model"], body["prompt"], body["input"]) == ("small", "query", ["a"])
    assert "sk-1" not in repr(Client(scripted.url, api_key="sk-1"))


def test_ready(scripted: ScriptedServer, call: Callable[..., Any]) -> None:
    scripted.script = lambda path, body: (200 if path == "/health" else 404, {}, b"")
    assert call(scripted.url, "ready") is True
    scripted.script = lambda path, body: (503, {}, b"")
    assert call(scripted.url, "ready") is False
    assert call("http://127.0.0.1:9", "ready") is False


def test_embed_does_not_import_torch(scripted: ScriptedServer) -> None:
    code = f"import sys, bertie; bertie.Client({scripted.url!r}).embed(['a']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_without_httpx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(clients, "import_module", absent)
    with pytest.raises(bertie.MissingPackageError, match="pip install httpx2"):
        Client()


def test_both_names_of_httpx_work(
    scripted: ScriptedServer, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("httpx")
    load = clients.import_module  # type: ignore[attr-defined]

    def older(name: str) -> Any:
        if name == "httpx2":
            raise ModuleNotFoundError(name=name)
        return load(name)

    monkeypatch.setattr(clients, "import_module", older)
    assert call(scripted.url, "embed", ["a"])[0, 0] == 1.0
    with pytest.raises(bertie.ServerError, match="ConnectError"):
        call("http://127.0.0.1:9", "embed", ["a"], retries=0)


def test_both_clients_have_the_same_methods() -> None:
    def verbs(kind: type) -> dict[str, list[inspect.Parameter]]:
        public = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
        return {name: list(inspect.signature(getattr(kind, name)).parameters.values()) for name in public}

    assert verbs(Client) == verbs(AsyncClient)
    assert list(inspect.signature(Client.embed).parameters) == ["self", "texts", "prompt", "prompt_name", "dimension"]
    assert "one row per text" in (Client.embed.__doc__ or "")
    assert inspect.iscoroutinefunction(AsyncClient.embed)
    assert not inspect.iscoroutinefunction(Client.embed)
