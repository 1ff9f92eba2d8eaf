"""Run every client against a real `bertie serve` with the built-in model, and print a table: make test-clients.

python -m tests_clients --bertie .venv/bin/bertie [--write docs/clients.md] [NAME …]
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests_clients.calls import CALLS, COHERE_MODEL, MODEL, Call

START, END = "<!-- clients: begin -->", "<!-- clients: end -->"


@contextmanager
def served(bertie: str) -> Iterator[str]:
    """The URL of a server with the built-in model, on a port that it chooses."""
    with tempfile.TemporaryFile("w+") as log:
        command = [bertie, "serve", MODEL, f"{COHERE_MODEL}={MODEL}", "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tempfile.gettempdir())
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://[\w.]+:\d+", line):
                    yield found[0]
                    return
            log.seek(0)
            raise SystemExit(f"bertie serve did not start:\n{log.read()[-2000:]}")
        finally:
            process.terminate()
            process.wait(30)


def run(call: Call, url: str) -> str | None:
    """Make a call; the error if it fails."""
    try:
        call.run(url)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only calls whose package or name contains one of these")
    parser.add_argument("--bertie", default="bertie", help="the command of the server")
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--write", type=Path, help="a page whose table is replaced")
    args = parser.parse_args()
    calls = [one for one in CALLS if not args.names or any(name in f"{one.package} {one.name}" for name in args.names)]
    # No call of a client leaves this machine.
    os.environ |= {"ANONYMIZED_TELEMETRY": "False", "HAYSTACK_TELEMETRY_ENABLED": "False"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    if args.url:
        failures = report(calls, args.url)
    else:
        with served(os.path.abspath(args.bertie)) as url:
            failures = report(calls, url)
    print(f"{len(calls) - failures} of {len(calls)} calls succeeded")
    if args.write and not failures:
        write_table(calls, args.write)
    return 1 if failures else 0


def report(calls: list[Call], url: str) -> int:
    """Make the calls and print a line for each; the number of failures."""
    failures = 0
    for one in calls:
        started = time.perf_counter()
        error = run(one, url)
        seconds = time.perf_counter() - started
        failures += error is not None
        package = f"{one.package} {version_of(one.package)}"
        print(f"{'ok  ' if error is None else 'FAIL'} {seconds:5.1f} s  {package:<56} {one.name}", flush=True)
        if error is not None:
            print(f"     {error[:1000]}")
    return failures


def write_table(calls: list[Call], page: Path) -> None:
    """Replace the table of a page: client, version, calls."""
    by_package: dict[str, list[str]] = {}
    for one in calls:
        by_package.setdefault(one.package, []).append(f"`{one.name}`")
    rows = [f"| {package} | {version_of(package)} | {'<br>'.join(names)} |" for package, names in by_package.items()]
    today = datetime.date.today().isoformat()
    summary = f"{len(calls)} calls of {len(by_package)} packages, all successful on {today}:"
    table = "\n".join([START, summary, "", "| package | version | calls |", "|---|---|---|", *rows, END])
    text = page.read_text()
    page.write_text(text[: text.index(START)] + table + text[text.index(END) + len(END) :])


if __name__ == "__main__":
    sys.exit(main())
