"""The latency of short requests without and with long ones beside them."""

from __future__ import annotations

import json
import math

from benchmarks import serve_fairness
from tests.benchmarks.stub_server import Stub


def test_a_round_has_both_phases(stub: Stub) -> None:
    stub.plain = True
    result = serve_fairness.measure(stub.url, "/embed", "3x2x5000", 0.3)
    lengths = {round(len(json.loads(body)["inputs"]), -1) for body in stub.seen}
    assert lengths == {60, 5000}
    assert result["without"]["answered"] > 3
    assert result["long"]["answered"] >= 2
    assert 0 < result["p99_ratio"] < math.inf


def phase(p99: float | None, refused: int = 0) -> dict[str, object]:
    statuses = {"429": refused} if refused else {}
    return {"answered": 10, "refused": refused / 10, "statuses": statuses, "p50_ms": 1.0, "p99_ms": p99, "max_ms": p99}


def test_rounds_are_summarized_by_medians() -> None:
    rounds = [
        {"without": phase(10.0), "with": phase(p99), "long": phase(None, 2), "p50_ratio": 1.0, "p99_ratio": p99 / 10}
        for p99 in (15.0, 90.0, 12.0)
    ]
    summary = serve_fairness.summarize(rounds)
    assert summary["p99_ratio"] == 1.5
    assert summary["with"]["p99_ms"] == 15.0
    assert summary["with"]["answered"] == 30
    assert summary["long"]["statuses"] == {"429": 6}
    row = serve_fairness.table_row({"source": "here", "scenario": "20x2x200000", **summary})
    assert row == "| here | 20x2x200000 | 1, 1 | 10, 15 | 1.50 | 0.00% | 30 {'429': 6} |"
