"""Serve models over HTTP: embeddings, classification, token classification, question answering, fill-mask, reranking
and search.

The server speaks the APIs of OpenAI (/v1/embeddings), text-embeddings-inference (/embed, /rerank,
…), Cohere and Jina (/v1/rerank) and its own (/fill, /classify, /tag, /answer, /search). The
playground is at /, the API reference at /docs. It listens on the loopback interface only; another
--host requires API keys.

SIGTERM stops the server after requests in flight are answered; SIGHUP reloads the API keys and the
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
from typing import TYPE_CHECKING

from bertie import threads
from bertie.cli.common import UsageError, add_device, add_precision, model_name, select_device, verb
from bertie.errors import BertieWarning, ConfigError, MissingPackageError
from bertie.switches import disable

if TYPE_CHECKING:
    from socket import socket as Socket

    from bertie.cli.common import Verbs
    from bertie.search.index import Index
    from bertie.serve.metrics import Metrics
    from bertie.serve.registry import Registry
    from bertie.serve.supervisor import WorkerInfo

EXAMPLE = """  bertie serve
  bertie serve bertie-small ner=./my-tagger --port 8000 --workers 2
  bertie serve --new-key alice --api-key-file keys.txt
  bertie serve --host 0.0.0.0 --api-key-file keys.txt --index my-index
"""
# A request takes the GIL a dozen times, and must not wait 5 ms, the default, for a busy thread each time.
SWITCH_SECONDS = 0.001
LOOPBACK = ("127.0.0.1", "::1", "localhost")
COUNTS = ("workers", "max_body_bytes", "max_items", "max_tokens", "max_reply_bytes", "max_requests", "batch_tokens")
CONNECTION_COUNTS = {  # flags and fields of ConnectionLimits
    "max_connections": "connections",
    "max_connections_per_address": "per_address",
    "max_total_body_bytes": "request_bytes",
    "max_total_reply_bytes": "reply_bytes",
    "max_header_bytes": "header_bytes",
    "min_rate": "min_rate",
}
CONNECTION_TIMES = {
    "header_timeout": "header_seconds",
    "read_timeout": "read_seconds",
    "write_timeout": "write_seconds",
    "idle_timeout": "idle_seconds",
}


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
        "--workers", type=int, default=1, metavar="N", help="worker processes behind the port (default: 1)"
    )
    parser.add_argument("--index", metavar="FOLDER", help="index made by `bertie index`, for /search")
    add_device(parser)
    add_precision(parser)
    parser.add_argument(
        "--disable",
        action="append",
        default=[],
        metavar="BACKEND",
        help="do not use a fast path: cuda_graphs, native, triton.attention, … (/info lists those in use)",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="one forward pass per window: on a GPU, results then do not depend on other requests; slow",
    )
    keys = parser.add_argument_group("authentication")
    keys.add_argument("--api-key-file", metavar="FILE", help="hashed API keys, one of which each request must send")
    keys.add_argument("--new-key", metavar="NAME", help="add a key to --api-key-file, print it, and exit")
    keys.add_argument("--no-auth", action="store_true", help="allow another --host without API keys")
    keys.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="accept this Host header")
    _add_limits(parser)
    _add_connection_limits(parser)
    logs = parser.add_argument_group("logging")
    logs.add_argument("--log-texts", action="store_true", help="log request bodies")
    logs.add_argument("--log-traces", action="store_true", help="log stack traces")
    parser.set_defaults(run=run)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-body-bytes", type=int, default=8 << 20, metavar="N", help="bytes of a request body (default: 8,388,608)"
    )
    limits.add_argument("--max-items", type=int, default=1024, metavar="N", help="texts per request (default: 1,024)")
    limits.add_argument(
        "--max-tokens", type=int, default=1_000_000, metavar="N", help="tokens per request (default: 1,000,000)"
    )
    limits.add_argument(
        "--max-reply-bytes", type=int, default=1 << 26, metavar="N", help="bytes of a reply (default: 67,108,864)"
    )
    limits.add_argument("--max-requests", type=int, default=512, metavar="N", help="requests in flight (default: 512)")
    limits.add_argument("--max-wait", type=float, default=1.0, metavar="S", help="seconds in the queue (default: 1)")
    limits.add_argument("--batch-tokens", type=int, metavar="N", help="tokens per batch (default: measured at startup)")
    limits.add_argument("--deadline", type=float, default=30.0, metavar="S", help="seconds per request (default: 30)")
    limits.add_argument(
        "--grace", type=float, default=1.0, metavar="S", help="seconds from unready to closed (default: 1)"
    )
    limits.add_argument(
        "--worker-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds until a worker that hangs is killed and restarted; 0: never (default: 30)",
    )


def _add_connection_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits of connections, in each worker")
    for flag, default, help in (
        ("--max-connections", 2048, "open connections; beyond it, the one with the least progress is closed"),
        ("--max-connections-per-address", 1024, "of one client address, or IPv6 network of 64 bits"),
        ("--max-total-body-bytes", 256 << 20, "of all bodies, from arrival to reply"),
        ("--max-total-reply-bytes", 256 << 20, "of all replies that clients have not read; half of it for one address"),
        ("--max-header-bytes", 32 << 10, "of a request's headers"),
        ("--min-rate", 1024, "bytes per second at which clients must send and read, over 5 seconds"),
    ):
        limits.add_argument(flag, type=int, default=default, metavar="N", help=f"{help} (default: {default:,})")
    for flag, seconds, help in (
        ("--header-timeout", 10.0, "to receive the headers"),
        ("--read-timeout", 30.0, "to receive a body"),
        ("--write-timeout", 120.0, "to send a reply"),
        ("--idle-timeout", 65.0, "to keep an unused connection open"),
    ):
        limits.add_argument(
            flag, type=float, default=seconds, metavar="S", help=f"seconds {help} (default: {seconds:g})"
        )


def run(args: argparse.Namespace) -> None:
    """Serve models over HTTP."""
    _check(args)
    args.models, args.model = [*args.models, *(args.model or [])] or [model_name(args)], None
    if args.new_key is not None:
        from bertie.serve.auth import new_key

        print(new_key(args.api_key_file, args.new_key))
        return
    try:
        import orjson  # noqa: F401
        import pydantic  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"serving needs {error.name}: pip install 'bertie[serve]'") from None
    from bertie.serve.supervisor import Supervisor, WorkerInfo, bertie_command
    from bertie.serve.workers import bind_socket

    worker = WorkerInfo.from_environment()
    started = time.monotonic()
    with worker.socket or bind_socket(args.host, args.port, shared=args.workers > 1) as socket:
        port = socket.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host

        def on_ready() -> None:
            print(f"http://{host}:{port} is ready after {time.monotonic() - started:.1f} s", flush=True)

        if args.workers > 1 and worker.folder is None:
            sockets = [socket, *(bind_socket(args.host, port, shared=True) for _ in range(args.workers - 1))]
            command = bertie_command(*_worker_argv(args, port))
            times = {"shutdown_seconds": args.deadline, "timeout": args.worker_timeout}
            Supervisor(command, sockets, on_ready=on_ready, **times).run()
        else:
            _serve(args, socket, worker, on_ready, started)
    if args.workers == 1 or worker.folder is not None:
        # All requests are answered. Threads of libraries (of a download, for example) may still run, and ending the
        # interpreter under them would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _check(args: argparse.Namespace) -> None:
    for name in (*COUNTS, *CONNECTION_COUNTS):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1")
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
    if args.deterministic and args.batch_tokens is not None:
        raise UsageError("--deterministic runs one window at a time, so --batch-tokens has no effect; give only one")
    if args.new_key is not None:
        if args.api_key_file is None:
            raise UsageError("--new-key needs --api-key-file, where its hash is stored")
    elif args.host not in LOOPBACK and args.api_key_file is None and not args.no_auth:
        raise UsageError(
            f"--host {args.host} is reachable from other machines: give --api-key-file, or --no-auth for open access"
        )


def _worker_argv(args: argparse.Namespace, port: int) -> list[str]:
    """The command line of a worker: the same, with the port that was bound."""
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
    import logging

    from bertie.serve.auth import Keys
    from bertie.serve.connections import ConnectionLimits
    from bertie.serve.http import LOCAL_HOSTS, App, ServerSettings
    from bertie.serve.limits import Limits
    from bertie.serve.logs import Log, LogHandler
    from bertie.serve.memory import limit_arenas
    from bertie.serve.metrics import Metrics
    from bertie.serve.workers import serve

    limit_arenas()
    sys.setswitchinterval(SWITCH_SECONDS)
    log = Log(traces=args.log_traces)
    logging.getLogger("uvicorn.error").addHandler(LogHandler(log))
    warnings.showwarning = lambda message, category, *place: log(
        "warning", category=category.__name__, message=str(message) if issubclass(category, BertieWarning) else None
    )
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
    # On loopback only local names are accepted: a web page must not reach the server through a DNS name of its own.
    hosts = (*LOCAL_HOSTS, *args.allow_host) if args.host in LOOPBACK or args.allow_host else ()
    settings = ServerSettings(limits, args.deadline, hosts, args.log_texts, connections)
    app = App(registry, settings, keys=keys, index=index, metrics=metrics, log=log)
    gc.collect()
    gc.freeze()  # the models stay: the garbage collector need not scan them

    def log_ready() -> None:
        log("ready", models=list(registry), worker=worker.number, seconds=round(time.monotonic() - started, 3))
        on_ready()

    serve(app, socket, grace=args.grace, shutdown_seconds=args.deadline, on_ready=log_ready, worker=worker)
    log("stopped", worker=worker.number)
    log.flush()


def _load(args: argparse.Namespace, worker: WorkerInfo, metrics: Metrics) -> tuple[Registry, tuple[Index, str] | None]:
    """Load the models, each with a measured batch budget, and the index over one of them."""
    import torch

    from bertie.checkpoints.hub import resolve
    from bertie.serve.registry import Registry, name_models

    # Replayed CUDA graphs use other attention kernels than single passes.
    disable(*args.disable, *(["cuda_graphs"] if args.deterministic else []))
    device = select_device(args.device)
    if device == "cuda" and worker.count > 1:  # spread the workers over the GPUs
        device = f"cuda:{worker.number % torch.cuda.device_count()}"
    if worker.count > 1 and not threads.count_is_given():
        torch.set_num_threads(max(1, threads.available() // worker.count))
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
    options = {"budget": 1 if args.deterministic else args.batch_tokens, "max_wait": args.max_wait}
    return Registry(models, devices=[device], precision=args.precision, on_batch=metrics.count_batch, **options), index
