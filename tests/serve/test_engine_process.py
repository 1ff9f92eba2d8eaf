"""An engine in a process of its own: when it stops."""

from __future__ import annotations

import io
import json
from pathlib import Path

from bertie.serve.engine_process import run_engine
from bertie.serve.logs import Log
from bertie.serve.metrics import Metrics
from bertie.serve.registry import Registry
from bertie.serve.supervisor import WorkerInfo


def test_a_process_whose_engine_has_failed_exits(models: dict[str, str], tmp_path: Path) -> None:
    """The supervisor starts another one."""
    registry = Registry({"embed": models["embed"]}, devices=["cpu"], budget=256, workers=0)
    worker = WorkerInfo(folder=tmp_path, role="engine", engines=1)
    out = io.StringIO()
    beats = []

    def beat() -> None:
        beats.append(1)
        if len(beats) == 3:
            registry["embed"].engine.queue.close(drain=False)  # as after an error of the device
        assert len(beats) < 10, "it goes on"

    worker.beat = beat
    run_engine(registry, worker, Metrics(tmp_path), Log(out), shutdown_seconds=1.0)
    assert len(beats) == 3
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["engine failed"]
