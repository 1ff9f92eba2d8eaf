"""Stream a million lines through `bertie embed`: memory, throughput, and resuming after kills.

    python benchmarks/stream_million.py TEXT --model FOLDER [--lines 1000000] [--kills 10] [--json FILE]

TEXT is any text file; its lines are repeated until there are enough. One run is not interrupted, and
its memory is sampled every half second; another is killed at random moments and resumed each time.
The two outputs must be equal byte for byte. Slow: hours for a million lines on a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

WARMUP = 60.0  # seconds after which memory must be constant


def repeat_lines(text: Path, lines: int, target: Path) -> None:
    """Repeat the non-empty lines of a file."""
    texts = [line.strip() for line in text.read_text("utf-8").splitlines() if line.strip()]
    with open(target, "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in islice(cycle(texts), lines))


def start(options: argparse.Namespace, source: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start the command."""
    bertie = [sys.executable, "-P", "-m", "bertie"]
    command = [*bertie, "embed", str(source), "-m", options.model, "-o", str(out), "--resume"]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def sample_memory(process: subprocess.Popen[bytes]) -> Iterator[tuple[float, float]]:
    """Yield elapsed seconds and resident memory in MiB until the process ends."""
    begin = time.perf_counter()
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except FileNotFoundError:
            return
        resident = next((line for line in status.splitlines() if line.startswith("VmRSS")), None)
        if resident is not None:
            yield time.perf_counter() - begin, int(resident.split()[1]) / 1024
        time.sleep(0.5)


def run_uninterrupted(options: argparse.Namespace, source: Path, out: Path) -> dict[str, Any]:
    """Measure memory and throughput of one run."""
    begin = time.perf_counter()
    process = start(options, source, out)
    samples = list(sample_memory(process))
    seconds = time.perf_counter() - begin
    assert process.wait() == 0, "the uninterrupted run failed"
    warm = min(WARMUP, seconds / 2)
    later = [mib for elapsed, mib in samples if elapsed > warm]
    half = len(later) // 2
    return {
        "seconds": round(seconds, 1),
        "lines_per_second": round(options.lines / seconds, 1),
        "warm_after_seconds": round(warm, 1),
        "rss_mib_when_warm": round(later[0], 1),
        "rss_mib_at_most": round(max(mib for _, mib in samples), 1),
        "rss_mib_rise_later": round(statistics.mean(later[half:]) - statistics.mean(later[:half]), 1),
        "rss_mib_each_tenth": [round(samples[len(samples) * i // 10][1]) for i in range(10)],
    }


def run_killed(options: argparse.Namespace, source: Path, out: Path) -> dict[str, Any]:
    """Kill a run repeatedly, and resume it each time."""
    draw = random.Random(options.seed)
    journal = out.with_name(out.name + ".part.json")

    def rows() -> int:
        return int(json.loads(journal.read_text())["rows"]) if journal.exists() else 0

    safe, begin = [], time.perf_counter()
    # Kills are spread over the rows rather than over time, so that a busy machine changes nothing.
    for share in sorted(draw.uniform(0, 0.9) for _ in range(options.kills)):
        process = start(options, source, out)
        while rows() < share * options.lines and process.poll() is None:
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 5))
        assert process.poll() is None, "the run ended before it could be killed: use more lines"
        process.kill()
        process.wait()
        safe.append(rows())
    process = start(options, source, out)
    assert process.wait() == 0, "the last run failed"
    return {"kills": len(safe), "rows_safe_at_each": safe, "seconds": round(time.perf_counter() - begin, 1)}


def digest(file: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(file, "rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="any text file")
    parser.add_argument("--model", required=True)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("-o", "--output", default="out.npy", help="output file; its suffix selects the format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "lines.txt"
        repeat_lines(options.text, options.lines, source)
        complete, resumed = Path(folder) / f"whole.{options.output}", Path(folder) / f"killed.{options.output}"
        report: dict[str, Any] = {"lines": options.lines, "input_mib": round(source.stat().st_size / 2**20, 1)}
        report["undisturbed"] = run_uninterrupted(options, source, complete)
        report["killed"] = run_killed(options, source, resumed)
        report["output_mib"] = round(complete.stat().st_size / 2**20, 1)
        report["sha256"] = [digest(complete), digest(resumed)]
        report["same"] = report["sha256"][0] == report["sha256"][1]
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["same"] else 1


if __name__ == "__main__":
    sys.exit(main())
