"""Servers to compare `bertie serve` with: FastAPI with sentence-transformers, and infinity-emb.

    python -m benchmarks.serve_peers plain --model FOLDER --port 9001
    python -m benchmarks.serve_peers async --model FOLDER --port 9001
    python -m benchmarks.serve_peers batched --model FOLDER --port 9001 --max-texts 64 --batch 8 [--processes 2]
    python -m benchmarks.serve_peers infinity --model FOLDER --port 9001 --settings '{"batch_size": 32}'

plain: as both documentations suggest. A blocking function is declared with `def`, FastAPI calls it
in a thread, and it calls `encode` on the request's texts.

async: the same with `async def`, a common mistake: one `encode` after the other, on the event loop.

batched: queued texts are encoded together in one thread, up to a maximum; sentence-transformers
sorts them by length and pads them in batches. Responses are serialized by orjson from numpy. POST
/tune sets both sizes and the time to wait for more texts. With --processes, several processes share
the port and the cores.

infinity: infinity-emb's own application and engine; `--settings` are its EngineArgs. It needs an
environment of its own (`python -m benchmarks.serve_infinity setup`).

infinity answers OpenAI's POST /embeddings, the others text-embeddings-inference's POST /embed, with
one or several texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import orjson
import torch
import uvicorn
from fastapi import FastAPI, Response
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer


class EmbedBody(BaseModel):
    inputs: str | list[str]


class Tuning(BaseModel):
    max_texts: int
    batch: int
    wait_ms: float


def as_list(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def plain(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.post("/embed")
    def embed(body: EmbedBody) -> list[list[float]]:
        vectors: list[list[float]] = model.encode(as_list(body.inputs)).tolist()
        return vectors

    return app


def on_event_loop(model: SentenceTransformer) -> FastAPI:
    app = FastAPI()

    @app.post("/embed")
    async def embed(body: EmbedBody) -> list[list[float]]:
        vectors: list[list[float]] = model.encode(as_list(body.inputs)).tolist()
        return vectors

    return app


def batched(model: SentenceTransformer, max_texts: int, batch: int, wait: float) -> FastAPI:
    app = FastAPI()
    waiting: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()
    running: list[asyncio.Task[None]] = []

    @app.post("/tune")
    async def tune(tuning: Tuning) -> None:
        nonlocal max_texts, batch, wait
        max_texts, batch, wait = tuning.max_texts, tuning.batch, tuning.wait_ms / 1000

    def encode(texts: list[str]) -> Any:
        return model.encode(texts, batch_size=batch, show_progress_bar=False)

    async def work() -> None:
        while True:
            texts_and_futures = [await waiting.get()]
            if wait and waiting.qsize() < max_texts - 1:
                await asyncio.sleep(wait)
            while len(texts_and_futures) < max_texts and not waiting.empty():
                texts_and_futures.append(waiting.get_nowait())
            try:
                vectors = await asyncio.to_thread(encode, [text for text, _ in texts_and_futures])
            except Exception as error:
                for _, future in texts_and_futures:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), vector in zip(texts_and_futures, vectors, strict=True):
                    if not future.done():
                        future.set_result(vector)

    @app.post("/embed")
    async def embed(body: EmbedBody) -> Response:
        if not running:
            running.append(asyncio.create_task(work()))
        futures = [asyncio.get_running_loop().create_future() for _ in as_list(body.inputs)]
        for text, future in zip(as_list(body.inputs), futures, strict=True):
            waiting.put_nowait((text, future))
        vectors = await asyncio.gather(*futures)
        return Response(orjson.dumps(vectors, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

    return app


def infinity(model: str, settings: dict[str, Any]) -> FastAPI:
    """infinity-emb's application, without its telemetry and with the settings of one model."""
    import torch.onnx.symbolic_opset14

    # optimum 1.27, the last with BetterTransformer, imports names for its exporter that torch 2.13 does not have. The
    # exporter is not used here.
    names = ("_attention_scale", "_causal_attention_mask", "_onnx_symbolic", "_type_utils", "jit_utils")
    for name in (*names, "symbolic_helper"):
        if not hasattr(torch.onnx.symbolic_opset14, name):
            setattr(torch.onnx.symbolic_opset14, name, MagicMock())
    arguments = import_module("infinity_emb.args").EngineArgs
    create_server = import_module("infinity_emb.infinity_server").create_server
    settings = {"model_name_or_path": model, "served_model_name": "model"} | settings
    app: FastAPI = create_server(engine_args_list=[arguments(**settings)])
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("plain", "async", "batched", "infinity"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-texts", type=int, default=64, help="texts that are encoded together")
    parser.add_argument("--batch", type=int, default=8, help="texts that are padded to one length")
    parser.add_argument("--wait-ms", type=float, default=0.0)
    parser.add_argument("--settings", type=json.loads, default={}, help="EngineArgs of infinity, in JSON")
    parser.add_argument("--device")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", args.port), backlog=2048)
    if args.processes > 1:
        children = []
        for _ in range(args.processes):
            if not (child := os.fork()):
                torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.processes))
                serve(args, listener)
                os._exit(0)
            children.append(child)

        def stop(*_: Any) -> None:
            for child in children:
                os.kill(child, signal.SIGTERM)

        signal.signal(signal.SIGTERM, stop)
        for child in children:
            os.waitpid(child, 0)
        sys.exit()
    serve(args, listener)


def serve(args: argparse.Namespace, listener: socket.socket) -> None:
    app = application(args)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def application(args: argparse.Namespace) -> FastAPI:
    if args.kind == "infinity":
        return infinity(args.model, {"device": args.device or "cpu"} | args.settings)
    model = SentenceTransformer(args.model, device=args.device)
    model.encode(["warm-up"])
    if args.kind == "plain":
        return plain(model)
    if args.kind == "async":
        return on_event_loop(model)
    return batched(model, args.max_texts, args.batch, args.wait_ms / 1000)


if __name__ == "__main__":
    main()
