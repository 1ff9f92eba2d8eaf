"""Servers to compare `bertie serve` with: FastAPI over sentence-transformers, plainly and with batches.

    python -m benchmarks.serve_peers plain --model FOLDER --port 9001
    python -m benchmarks.serve_peers async --model FOLDER --port 9001
    python -m benchmarks.serve_peers batched --model FOLDER --port 9001 --most 64 --batch 8 --wait-ms 0 [--processes 2]

plain: as the documentations of both suggest. A function that blocks is declared with `def`, which FastAPI calls in one
of its threads, and it calls `encode` on what came in.
async: the same with `async def`, as many have it: one `encode` after the other, on the event loop.
batched: what waits is encoded together, up to a number of texts, in one thread; sentence-transformers sorts it by
length and pads it in batches of a size of its own. The reply is written by orjson, from numpy. POST /tune sets both
numbers, and how long is waited for more. With --processes, several share the port, and the cores.

All take text-embeddings-inference's POST /embed with one text, or several.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from typing import Any

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class TaskInput(BaseModel):
    inputs: str | list[str]


class Tuning(BaseModel):
    most: int
    batch: int
    wait_ms: float


def listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def plain(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.post("/embed")
    def embed(ask: TaskInput) -> list[list[float]]:
        found: list[list[float]] = model.encode(listed(ask.inputs)).tolist()
        return found

    return app


def on_the_loop(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.post("/embed")
    async def embed(ask: TaskInput) -> list[list[float]]:
        found: list[list[float]] = model.encode(listed(ask.inputs)).tolist()
        return found

    return app


def batched(model: SentenceTransformer, most: int, batch: int, wait: float) -> FastAPI:
    app = FastAPI()
    waiting: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()
    running: list[asyncio.Task[None]] = []

    @app.post("/tune")
    async def tune(ask: Tuning) -> None:
        nonlocal most, batch, wait
        most, batch, wait = ask.most, ask.batch, ask.wait_ms / 1000

    def encode(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=batch, show_progress_bar=False)

    async def work() -> None:
        while True:
            some = [await waiting.get()]
            if wait and waiting.qsize() < most - 1:
                await asyncio.sleep(wait)
            while len(some) < most and not waiting.empty():
                some.append(waiting.get_nowait())
            try:
                found = await asyncio.to_thread(encode, [text for text, _ in some])
            except Exception as error:
                for _, future in some:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), vector in zip(some, found, strict=True):
                    if not future.done():
                        future.set_result(vector)

    @app.post("/embed")
    async def embed(ask: TaskInput) -> Response:
        if not running:
            running.append(asyncio.create_task(work()))
        futures = [asyncio.get_running_loop().create_future() for _ in listed(ask.inputs)]
        for text, future in zip(listed(ask.inputs), futures, strict=True):
            waiting.put_nowait((text, future))
        vectors = await asyncio.gather(*futures)
        return Response(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plain", "async", "batched"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--most", type=int, default=64, help="texts that are encoded together")
    parser.add_argument("--batch", type=int, default=8, help="of which so many are padded to one length")
    parser.add_argument("--wait-ms", type=float, default=0.0)
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    place = socket.create_server(("127.0.0.1", args.port), backlog=2048)
    if args.processes > 1:
        children = []
        for _ in range(args.processes):
            if not (child := os.fork()):
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.processes))
                serve(args, place)
                os._exit(0)
            children.append(child)

        def stop(*_: Any) -> None:
            for child in children:
                os.kill(child, signal.SIGTERM)

        signal.signal(signal.SIGTERM, stop)
        for child in children:
            os.waitpid(child, 0)
        sys.exit()
    serve(args, place)


def serve(args: argparse.Namespace, place: socket.socket) -> None:
    model = SentenceTransformer(args.model, device=args.device)
    model.encode(["The first one is slow."])
    kinds = {
        "plain": lambda: plain(model),
        "async": lambda: on_the_loop(model),
        "batched": lambda: batched(model, args.most, args.batch, args.wait_ms / 1000),
    }
    uvicorn.Server(uvicorn.Config(kinds[args.kind](), log_level="warning", access_log=False)).run(sockets=[place])


if __name__ == "__main__":
    main()
