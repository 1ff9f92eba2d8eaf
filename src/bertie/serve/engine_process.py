"""An engine in a process of its own: its event loop, its heartbeats, its signals.

SIGTERM, SIGINT    answer what waits, then stop
SIGHUP             reload the models; front ends use the old ones until they have read the new files
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from bertie.serve.engine_server import EngineServer
from bertie.serve.workers import HEARTBEAT_SECONDS, new_event_loop

if TYPE_CHECKING:
    from bertie.serve.logs import Log
    from bertie.serve.metrics import Metrics
    from bertie.serve.registry import Registry
    from bertie.serve.supervisor import WorkerInfo


def run_engine(registry: Registry, worker: WorkerInfo, metrics: Metrics, log: Log, *, shutdown_seconds: float) -> None:
    """Run jobs of front ends until a signal stops the process."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_run(registry, worker, metrics, log, shutdown_seconds))
    registry.close()


async def _run(registry: Registry, worker: WorkerInfo, metrics: Metrics, log: Log, shutdown_seconds: float) -> None:
    server, stop, parent = EngineServer(registry), asyncio.Event(), os.getppid()
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop.set)
    loop.add_signal_handler(signal.SIGHUP, lambda: Thread(target=_reload, args=(server, log), daemon=True).start())
    metrics.add_collector(lambda: _update_gauges(registry, metrics))
    path = Path(worker.engine_path(worker.number))
    path.unlink(missing_ok=True)  # of an engine that was killed
    listener = await server.listen(str(path))
    saved = 0.0
    while not stop.is_set():
        worker.beat()
        if time.monotonic() - saved > 1.0:
            saved = time.monotonic()
            with suppress(OSError):
                await asyncio.to_thread(metrics.save)
        if os.getppid() != parent:  # the supervisor was killed
            break
        if not registry.ready:  # a device cannot be used any more: the supervisor starts another process
            log("engine failed", engine=worker.number)
            break
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), HEARTBEAT_SECONDS)
    listener.close()
    await server.drain(shutdown_seconds)


def _reload(server: EngineServer, log: Log) -> None:
    try:
        server.reload()
        log("reloaded", models=list(server.registry))
    except Exception as error:
        log.error("reload failed", error)


def _update_gauges(registry: Registry, metrics: Metrics) -> None:
    for name, load in registry.loads().items():
        metrics.waiting.set(load.waiting_tokens, name)
        metrics.budget.set(load.budget, name)
