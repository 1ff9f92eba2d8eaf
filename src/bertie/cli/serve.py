"""Serve models over HTTP: vectors, labels, entities, answers, masks, reranking and search, for many at a time.

The APIs of OpenAI (/v1/embeddings), of text-embeddings-inference (/embed, /rerank, …), of Cohere and Jina (/v1/rerank),
our own (/fill, /classify, /tag, /answer, /search), and a page to try them at /. Only this machine can reach it, unless
--host says otherwise, which needs keys.

SIGTERM ends it once all are answered; SIGHUP loads the models anew meanwhile. With --workers, those are the children of
this process, and are started anew when they die.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bertie.cli.common import UsageError, add_precision, device_of, verb
from bertie.errors import MissingPackageError

if TYPE_CHECKING:
    from socket import socket as Socket

    from bertie.cli.common import Verbs
    from bertie.search.index import Index
    from bertie.serve.metrics import Metrics
    from bertie.serve.registry import Registry
    from bertie.serve.workers import Place

EXAMPLE = """  bertie serve
  bertie serve bertie-small names=./my-tagger --port 8000 --workers 2
  bertie serve --new-key alice --api-key-file keys.txt
  bertie serve --host 0.0.0.0 --api-key-file keys.txt --index my-index
"""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def add(verbs: Verbs) -> None:
    """Declare the verb."""
    parser = verb(verbs, "serve", "answer over HTTP", __doc__, EXAMPLE)
    parser.add_argument(
        "models", nargs="*", metavar="[NAME=]MODEL", help="folders, built-in names or hub ids (the built-in model)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve at (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="the port; 0: any that is free (8080)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes behind the port (1)")
    parser.add_argument("--index", metavar="PLACE", help="an index that `bertie index` made, for /search")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (a GPU if there is one)")
    add_precision(parser)
    keys = parser.add_argument_group("who may ask")
    keys.add_argument("--api-key-file", metavar="FILE", help="hashes of keys, one of which each request must bring")
    keys.add_argument("--new-key", metavar="NAME", help="add a key to --api-key-file, print it, and serve nothing")
    keys.add_argument("--no-auth", action="store_true", help="serve at another --host without keys")
    keys.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="a name of this server")
    limits = parser.add_argument_group("how much")
    limits.add_argument("--max-body", type=int, default=8 << 20, metavar="N", help="bytes of a request (8,388,608)")
    limits.add_argument("--max-items", type=int, default=1024, metavar="N", help="texts of a request (1,024)")
    limits.add_argument("--max-tokens", type=int, default=1_000_000, metavar="N", help="tokens of one (1,000,000)")
    limits.add_argument("--max-requests", type=int, default=512, metavar="N", help="requests under way (512)")
    limits.add_argument("--max-wait", type=float, default=1.0, metavar="S", help="seconds for others' work first (1)")
    limits.add_argument("--batch-tokens", type=int, metavar="N", help="tokens a batch (measured at the start)")
    limits.add_argument("--deadline", type=float, default=30.0, metavar="S", help="seconds for an answer (30)")
    limits.add_argument("--read-timeout", type=float, default=30.0, metavar="S", help="seconds for a body (30)")
    limits.add_argument("--grace", type=float, default=1.0, metavar="S", help="seconds from unready to closed (1)")
    logs = parser.add_argument_group("what is logged")
    logs.add_argument("--log-texts", action="store_true", help="write the bodies of requests to the log")
    logs.add_argument("--log-traces", action="store_true", help="write stacks of errors to the log")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    for name in ("workers", "max_body", "max_items", "max_tokens", "max_requests", "batch_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value} must be at least 1")
    for name in ("deadline", "read_timeout", "max_wait"):
        if not 0 < getattr(args, name) <= 3600:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)} must lie between 0 and 3600 seconds")
    if args.new_key is not None:
        if args.api_key_file is None:
            raise UsageError("--new-key needs --api-key-file, where its hash is kept")
        from bertie.serve.auth import new_key

        print(new_key(args.api_key_file, args.new_key))
        return
    if args.host not in LOOPBACK and args.api_key_file is None and not args.no_auth:
        raise UsageError(
            f"--host {args.host} lets other machines in: give --api-key-file, or --no-auth if anyone may ask"
        )
    try:
        import orjson  # noqa: F401
        import pydantic  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(f"serving needs {error.name}: pip install 'bertie[serve]'") from None
    from bertie.serve.workers import Parent, Place, bound

    place = Place.here()
    begun = time.monotonic()
    with bound(args.host, args.port, shared=args.workers > 1) as socket:
        port = socket.getsockname()[1]
        host = f"[{args.host}]" if ":" in args.host else args.host

        def ready() -> None:
            place.ready()
            print(f"http://{host}:{port} is ready after {time.monotonic() - begun:.1f} s", flush=True)

        if args.workers > 1 and place.folder is None:
            Parent(_again(args, port), args.workers, patience=args.deadline, on_ready=ready).run()
        else:
            _serve(args, socket, place, ready, begun)
    if args.workers == 1 or place.folder is not None:
        # All is answered and written. Threads of libraries may be at work still (a download's, say), and to end the
        # interpreter under them is an abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _again(args: argparse.Namespace, port: int) -> list[str]:
    """The command line of a worker: the same, at the port that was found."""
    argv = ["serve", *args.models, "--port", str(port)]
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("models", "port", "run", "verb", "new_key") or value is None or value is False:
            continue
        if isinstance(value, list):
            argv += [word for one in value for word in (flag, one)]
        else:
            argv += [flag] if value is True else [flag, str(value)]
    return argv


def _serve(args: argparse.Namespace, socket: Socket, place: Place, ready: Callable[[], None], begun: float) -> None:
    """One process."""
    import logging

    from bertie.serve.auth import Keys
    from bertie.serve.http import LOCAL, App, Settings
    from bertie.serve.limits import Limits
    from bertie.serve.logs import Handler, Log
    from bertie.serve.memory import few_arenas
    from bertie.serve.metrics import Metrics
    from bertie.serve.workers import serve

    few_arenas()
    log = Log(traces=args.log_traces)
    logging.getLogger("uvicorn.error").addHandler(Handler(log))
    keys = None if args.api_key_file is None else Keys.read(args.api_key_file, place.share)
    metrics = Metrics(place.folder)
    registry, index = _loaded(args, place, metrics)
    limits = Limits(args.max_body, args.max_items, args.max_tokens, args.read_timeout, args.max_requests)
    # What only this machine reaches is not to be reached through a name that some page's DNS gives to it.
    hosts = (*LOCAL, *args.allow_host) if args.host in LOOPBACK or args.allow_host else ()
    settings = Settings(limits, args.deadline, hosts, args.log_texts)
    made = App(registry, settings, keys=keys, index=index, metrics=metrics, log=log)
    gc.collect()
    gc.freeze()  # what was loaded stays: there is no need to look through it again and again

    def started() -> None:
        log("ready", models=list(registry), worker=place.number, seconds=round(time.monotonic() - begun, 3))
        ready()

    serve(made, socket, grace=args.grace, patience=args.deadline, on_ready=started)
    log("stopped", worker=place.number)


def _loaded(args: argparse.Namespace, place: Place, metrics: Metrics) -> tuple[Registry, tuple[Index, str] | None]:
    """The models, each measured by a real pass; and the index over one of them."""
    import torch

    from bertie.checkpoints.checkpoint import default_model, resolve
    from bertie.serve.registry import Registry, named

    device = device_of(args.device)
    if device == "cuda" and place.share > 1:  # a replica on each GPU
        device = f"cuda:{place.number % torch.cuda.device_count()}"
    if place.share > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.share))
    models = named(args.models or [default_model()])
    index = None
    if args.index is not None:
        from bertie.search.index import Index

        opened = Index.open(args.index)
        source = opened.about["model"]
        known = {resolve(one).resolve(): name for name, one in models.items()}
        name = known.get(resolve(source).resolve()) or next(iter(named([source])))
        models.setdefault(name, source)
        index = opened, name
    settings = {"budget": args.batch_tokens, "max_wait": args.max_wait}
    return Registry(models, devices=[device], precision=args.precision, watch=metrics.watch, **settings), index
