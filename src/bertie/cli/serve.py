"""Serve models over HTTP: embeddings, classification, token classification, question answering, fill-mask, reranking
and search.

The server implements the APIs of OpenAI (/v1/embeddings), text-embeddings-inference (/embed, /rerank,
…), Cohere and Jina (/v1/rerank) and its own (/fill, /classify, /tag, /answer, /search). The
playground is at /, the API reference at /docs. By default it listens on the loopback interface only;
any other --host requires API keys or --no-auth.

SIGTERM stops the server after all requests in flight are answered; SIGHUP reloads the API keys and the
models without downtime. With --workers, workers that die or hang are restarted.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bertie import threads
from bertie.cli.common import UsageError, add_device, add_precision, model_name, select_device, verb
from bertie.cli.serve_limits import CONNECTION_COUNTS, CONNECTION_TIMES, COUNTS, add_limits
from bertie.errors import BertieWarning, ConfigError, MissingPackageError
from bertie.switches import disable

if TYPE_CHECKING:
    from socket import socket as Socket

    from bertie.cli.common import Verbs
    from bertie.search.index import Index
    from bertie.serve.logs import Log
    from bertie.serve.metrics import Metrics
    from bertie.serve.registry import Registry
    from bertie.serve.supervisor import WorkerInfo
    from bertie.serve.tracing import Tracing

EXAMPLE = """  bertie serve
  bertie serve bertie-small ner=./my-tagger --port 8000 --workers 2
  bertie serve --unix bertie.sock --cache-mb 256
  bertie serve --new-key alice --api-key-file keys.txt
  bertie serve --host 0.0.0.0 --api-key-file keys.txt --index my-index
"""
# A request acquires the GIL a dozen times, and must not wait the default 5 ms for a busy thread each time.
SWITCH_SECONDS = 0.001
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "serve", "serve models over HTTP", __doc__, EXAMPLE)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="folders, built-in names or hub ids (default: the built-in model)",
    )
    parser.add_argument("-m", "--model", metavar="[NAME=]MODEL", action="append", help="the same as [NAME=]MODEL")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="port; 0: any free one (default: 8080)")
    parser.add_argument(
        "--unix", metavar="PATH", help="listen on a Unix socket that only this user may connect to, not on a port"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of front ends: processes that handle HTTP and tokenize, in front of one engine process per GPU "
        "(default: from the number of cores; without a GPU, a single process does everything)",
    )
    parser.add_argument("--index", metavar="FOLDER", help="index created by `bertie index`, for /search")
    add_device(parser)
    add_precision(parser)
    parser.add_argument(
        "--disable",
        action="append",
        default=[],
        metavar="BACKEND",
        help="disable a backend: cuda_graphs, native, triton.attention, … (/info lists those in use)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="run one window per forward pass, so that results on a GPU do not depend on other requests (slow)",
    )
    _add_authentication(parser)
    add_limits(parser)
    parser.add_argument(
        "--cache-mb",
        type=int,
        default=0,
        metavar="N",
        help="size of a cache of recent embeddings in MiB, over all front ends (default: 0, no cache)",
    )
    logs = parser.add_argument_group("logging")
    logs.add_argument("--log-texts", action="store_true", help="log request bodies")
    logs.add_argument("--log-traces", action="store_true", help="log stack traces")
    logs.add_argument(
        "--trace", action="store_true", help="send OpenTelemetry spans, configured by the OTEL_* environment variables"
    )
    parser.set_defaults(run=run)


def _add_authentication(parser: argparse.ArgumentParser) -> None:
    """Add the flags for API keys and the Host header."""
    keys = parser.add_argument_group("authentication")
    keys.add_argument(
        "--api-key-file", metavar="FILE", help="file of hashed API keys; requests must send one of the keys"
    )
    keys.add_argument("--new-key", metavar="NAME", help="add a key to --api-key-file, print it, and exit")
    keys.add_argument("--no-auth", action="store_true", help="allow any --host without API keys")
    keys.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="accept requests with this Host header"
    )


def run(args: argparse.Namespace) -> None:
    """Serve models over HTTP."""
    _check(args)
    gc.disable()  # imports and models are never freed: collecting garbage takes a tenth of the startup time
    try:
        _start(args)
    finally:
        gc.enable()


def _start(args: argparse.Namespace) -> None:
    """Run the server, its supervisor or one of its processes."""
    args.models, args.model = [*args.models, *(args.model or [])] or [model_name(args)], None
    if args.new_key is not None:
        from bertie.serve.auth import new_key

        print(new_key(args.api_key_file, args.new_key))
        return
    try:
        import greenlet  # noqa: F401
        import httptools  # noqa: F401
        import orjson  # noqa: F401
        import pydantic  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"serving needs {error.name}: pip install 'bertie[serve]'") from None
    from bertie.serve.supervisor import Supervisor, WorkerInfo, bertie_command

    worker = WorkerInfo.from_environment()
    started = time.monotonic()
    if worker.role == "engine":
        _run_engine(args, worker, started)
        _exit()
    workers, engines = _count_processes(args)
    with worker.socket or _bind(args, shared=workers > 1) as socket:
        port = args.port if args.unix is not None else socket.getsockname()[1]

        def on_ready() -> None:
            print(f"{_address(args, port)} is ready after {time.monotonic() - started:.1f} s", flush=True)

        if engines and not worker.is_supervised:
            sockets = [socket, *(_bind_another(args, socket, port) for _ in range(workers - 1))]
            command = bertie_command(*_worker_argv(args, port))
            times = {"shutdown_seconds": args.deadline, "timeout": args.worker_timeout}
            gc.enable()
            Supervisor(command, sockets, engines=engines, on_ready=on_ready, **times).run()
            return
        _serve(args, socket, worker, on_ready, started)
    _exit()


def _bind(args: argparse.Namespace, *, shared: bool) -> AbstractContextManager[Socket]:
    from bertie.serve.workers import bind_socket, unix_socket

    if args.unix is not None:
        return unix_socket(args.unix)
    return bind_socket(args.host, args.port, shared=shared)


def _bind_another(args: argparse.Namespace, first: Socket, port: int) -> Socket:
    """A socket for another front end; a duplicate if it is a Unix socket, which can be bound only once."""
    from bertie.serve.workers import bind_socket

    return first.dup() if args.unix is not None else bind_socket(args.host, port, shared=True)


def _address(args: argparse.Namespace, port: int) -> str:
    """The server's URL; for a Unix socket, with the path as host, as some HTTP clients accept it."""
    if args.unix is not None:
        return f"http+unix://{quote(os.path.abspath(args.unix), safe='')}"
    return f"http://[{args.host}]:{port}" if ":" in args.host else f"http://{args.host}:{port}"


def _exit() -> None:
    """End the process. All requests are answered; threads of libraries (of a download, for example) may still run.

    Ending the interpreter under them would abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _count_processes(args: argparse.Namespace) -> tuple[int, int]:
    """The number of front ends and of engines; without engines, one process does everything.

    On a CPU the model takes far more time than the rest of a request, and a second process would only split the
    cores. A GPU is fast enough to keep several front ends busy; its engine takes a core.
    """
    gpus = 0 if args.precision == "int8" else _count_gpus(args.device)
    if not gpus:
        return (1, 0) if args.workers in (None, 1) else (args.workers, 1)
    return args.workers or max(2, (threads.available() - gpus) * 4 // 5), gpus


def _count_gpus(device: str | None) -> int:
    """GPUs that the server uses, without importing torch: all visible ones, or the one that `device` selects."""
    if device is not None and not device.startswith("cuda"):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is not None:
        devices = min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
    return min(devices, 1) if device is not None and ":" in device else devices


def _check(args: argparse.Namespace) -> None:
    for name in (*COUNTS, *CONNECTION_COUNTS):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not 0 <= args.port < 1 << 16:  # the system would reduce it modulo 65536
        raise UsageError(f"--port {args.port} must lie between 0 and 65535")
    for name in ("deadline", "max_wait", *CONNECTION_TIMES):
        if not 0 < getattr(args, name) <= 3600:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must lie between 0 and 3600 seconds")
    if args.worker_timeout != 0 and not 1 <= args.worker_timeout <= 3600:
        raise UsageError(f"--worker-timeout {args.worker_timeout} must be 0, or lie between 1 and 3600 seconds")
    for name in args.disable:
        try:
            with disable(name):
                pass
        except ConfigError as error:
            raise UsageError(str(error).replace(f"disable={name!r}", f"--disable {name}")) from None
    if args.cache_mb < 0:
        raise UsageError(f"--cache-mb {args.cache_mb} must be at least 0")
    if args.unix is not None and (args.host != "127.0.0.1" or args.port not in (0, 8080)):
        raise UsageError("--unix replaces --host and --port; pass only one")
    if args.deterministic and args.batch_tokens is not None:
        raise UsageError("--deterministic runs one window at a time, so --batch-tokens has no effect; pass only one")
    if args.new_key is not None:
        if args.api_key_file is None:
            raise UsageError("--new-key needs --api-key-file, where the hash of the key is stored")
    elif args.host not in LOOPBACK and args.api_key_file is None and not args.no_auth:
        raise UsageError(
            f"--host {args.host} is reachable from other machines: pass --api-key-file, or --no-auth for open access"
        )


def _worker_argv(args: argparse.Namespace, port: int) -> list[str]:
    """The command line of a worker: that of the server, with the port that was bound."""
    argv = ["serve", *args.models, "--port", str(port)]
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("models", "port", "run", "verb", "cleanup", "new_key") or value is None or value is False:
            continue
        if isinstance(value, list):
            argv += [word for item in value for word in (flag, item)]
        else:
            argv += [flag] if value is True else [flag, str(value)]
    return argv


def _serve(
    args: argparse.Namespace, socket: Socket, worker: WorkerInfo, on_ready: Callable[[], None], started: float
) -> None:
    """Run one server process."""
    from bertie.serve.auth import Keys
    from bertie.serve.connections import ConnectionLimits
    from bertie.serve.http import LOCAL_HOSTS, App, ServerSettings
    from bertie.serve.limits import Limits
    from bertie.serve.memory import limit_arenas
    from bertie.serve.metrics import Metrics
    from bertie.serve.workers import serve

    limit_arenas()
    sys.setswitchinterval(SWITCH_SECONDS)
    log = _open_log(args)
    keys = None if args.api_key_file is None else Keys.read(args.api_key_file, worker.count)
    metrics = Metrics(worker.folder)
    registry, index = _load(args, worker, metrics)
    limits = Limits(
        body=args.max_body_bytes,
        items=args.max_items,
        tokens=args.max_tokens,
        requests=args.max_requests,
        reply=args.max_reply_bytes,
    )
    fields = (CONNECTION_COUNTS | CONNECTION_TIMES).items()
    connections = ConnectionLimits(**{field: getattr(args, flag) for flag, field in fields})
    # On loopback only local names are accepted: web pages must not reach the server by DNS rebinding.
    local = args.host in LOOPBACK and args.unix is None
    hosts = (*LOCAL_HOSTS, *args.allow_host) if local or args.allow_host else ()
    settings = ServerSettings(limits, args.deadline, hosts, args.log_texts, connections)
    tracing = _open_tracing(args, log)
    app = App(registry, settings, keys=keys, index=index, metrics=metrics, log=log, tracing=tracing)
    gc.freeze()  # the models stay: the garbage collector need not scan them
    gc.enable()

    def log_ready() -> None:
        log("ready", models=list(registry), worker=worker.number, seconds=round(time.monotonic() - started, 3))
        on_ready()

    serve(app, socket, grace=args.grace, shutdown_seconds=args.deadline, on_ready=log_ready, worker=worker)
    if tracing is not None:
        tracing.close()
    log.close("stopped", worker=worker.number)


def _load(args: argparse.Namespace, worker: WorkerInfo, metrics: Metrics) -> tuple[Registry, tuple[Index, str] | None]:
    """Load the models, each with a measured batch budget, and the index with the name of its model."""
    import torch

    from bertie.checkpoints.hub import resolve
    from bertie.serve.embedding_cache import EmbeddingCache
    from bertie.serve.registry import Registry, name_models

    # Replayed CUDA graphs use other attention kernels than single forward passes.
    disable(*args.disable, *(["cuda_graphs"] if args.deterministic else []))
    engines, device, workers = None, "cpu", None
    if worker.role == "front-end" and worker.engines:
        from bertie.serve.engine_client import EngineClient

        if worker.count > 1:  # threads of the tokenizers library in each front end would compete for the same cores
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        engines = EngineClient([worker.engine_path(number) for number in range(worker.engines)])
        torch.set_num_threads(1)
    else:
        device = select_device(args.device)
        if device == "cuda":
            device = f"cuda:{worker.number}"
            workers = 0 if worker.role == "engine" else None  # the event loop drives it
    models = name_models(args.models)
    index = None
    if args.index is not None:
        from bertie.search.index import Index

        opened = Index.open(args.index)
        source = opened.config["model"]
        names = {resolve(model).resolve(): name for name, model in models.items()}
        name = names.get(resolve(source).resolve()) or next(iter(name_models([source])))
        models.setdefault(name, source)
        index = opened, name
    options: dict[str, Any] = {
        "budget": 1 if args.deterministic else args.batch_tokens,
        "max_wait": args.max_wait,
        "workers": workers,
    }
    if args.cache_mb and worker.role == "front-end":  # each has its share
        options["cache"] = EmbeddingCache((args.cache_mb << 20) // worker.count)
    if engines is not None:
        return Registry(models, engines=engines, cache=options.get("cache")), index
    return Registry(models, devices=[device], precision=args.precision, on_batch=metrics.count_batch, **options), index


def _run_engine(args: argparse.Namespace, worker: WorkerInfo, started: float) -> None:
    """Run one engine process."""
    from bertie.serve.engine_process import run_engine
    from bertie.serve.memory import limit_arenas
    from bertie.serve.metrics import Metrics

    limit_arenas()
    sys.setswitchinterval(SWITCH_SECONDS)
    log = _open_log(args)
    metrics = Metrics(worker.folder)
    registry, _ = _load(args, worker, metrics)
    gc.freeze()
    gc.enable()
    log("ready", engine=worker.number, models=list(registry), seconds=round(time.monotonic() - started, 3))
    run_engine(registry, worker, metrics, log, shutdown_seconds=args.deadline)
    log.close("stopped", engine=worker.number)


def _open_tracing(args: argparse.Namespace, log: Log) -> Tracing | None:
    """Tracing, if --trace or the environment enables it; only --trace raises if its packages are missing."""
    from bertie.serve.tracing import Tracing, wants_tracing

    if not args.trace and not wants_tracing():
        return None
    try:
        return Tracing()
    except MissingPackageError as error:
        if args.trace:
            raise
        log("tracing is off", reason=str(error))
        return None


def _open_log(args: argparse.Namespace) -> Log:
    """The log on standard error, which also receives warnings."""
    from bertie.serve.logs import Log

    log = Log(traces=args.log_traces)
    warnings.showwarning = lambda message, category, *place: log(
        "warning", category=category.__name__, message=str(message) if issubclass(category, BertieWarning) else None
    )
    return log
