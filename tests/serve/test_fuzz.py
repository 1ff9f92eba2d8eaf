"""Fuzzing: mutated bodies, and schemathesis on the OpenAPI description."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from bertie.serve.openapi import describe_api
from tests.serve import fuzz
from tests.serve.conftest import Running

CHECKS = "not_a_server_error status_code_conformance content_type_conformance response_schema_conformance".split()


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_bodies(server: Running, count: int) -> None:
    before = len(server.lines)  # other tests cause failures on purpose
    seen = fuzz.run(server.url, count, seed=1)
    assert seen[200] > count / 10  # some mutations are valid
    assert seen[422] > count / 6
    assert not [line for line in server.lines[before:] if line["event"] == "failed"]


def test_the_same_seed_gives_the_same_bodies() -> None:
    assert list(fuzz.bodies(50, 3)) == list(fuzz.bodies(50, 3))
    assert list(fuzz.bodies(50, 3)) != list(fuzz.bodies(50, 4))


@pytest.mark.parametrize("examples", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_schemathesis(server: Running, examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import CHECKS as known

    schema = schemathesis.openapi.from_dict(describe_api())
    checks = [known.get_one(name) for name in CHECKS]  # which are registered once a schema is loaded
    schema.config.update(base_url=server.url)
    usual = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == len(describe_api()["paths"])
    for operation in operations:

        @given(case=operation.as_strategy())
        @usual
        def run(case: Any) -> None:
            case.call_and_validate(checks=checks)

        run()
