"""The table of routes: every task with an endpoint has a route, its own or a generic one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from bertie.serve.openapi import describe_api
from bertie.serve.registry import Registry
from bertie.serve.routes import all_routes
from bertie.tasks import Tagger
from bertie.tasks.registry import TASKS, TaskRow
from tests.serve.conftest import Start


def test_paths_are_unique_and_cover_the_table_of_tasks() -> None:
    paths = [route.path for route in all_routes()]
    assert len(set(paths)) == len(paths)
    assert {row.endpoint for row in TASKS.values() if row.endpoint is not None} <= set(paths)


@dataclass
class ToyResult:
    tokens: int
    tokens_total: int
    tokens_read: int
    windows: int


class ToyTagger(Tagger):
    """A task that only the table of tasks knows: the number of tokens of a text."""

    def decode(self, *args: Any) -> Any:
        (window,) = args[1]
        return ToyResult(len(window), len(window) - 2, len(window) - 2, 1)


def test_a_row_in_the_table_of_tasks_is_an_endpoint(
    start: Start, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{ToyTagger.__module__}:ToyTagger"
    monkeypatch.setitem(TASKS, "toy", TaskRow(name="toy", path=path, head_kind="tag", endpoint="/toy"))
    assert "/toy" in describe_api()["paths"]
    server = start()
    reply = server.post_json("/toy", {"texts": ["a cat sat", "the dog"], "model": "tag"})
    assert [result["tokens"] for result in reply["results"]] == [5, 4]
    assert (reply["model"], reply["head"]) == ("tag", "tag")
    assert server.post("/toy", {"texts": []}).status_code == 400
