"""How long the playground takes to answer while a user types: from a key press to the displayed answer, in Chromium.

    python -m benchmarks.playground
    python -m benchmarks.playground --url http://127.0.0.1:8080 --presses 100

Without --url a server with the built-in model is started. Every view that answers on typing gets key presses one by
one, at the end of its first example; printed are the median and the 90th percentile, in milliseconds, with the load of
the machine before and after, since other processes on it lengthen all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FIELDS = {  # by view: the field that is typed into
    "fill": "#fill-text",
    "tokens": "#tokens-text",
    "attention": "#attention-text",
    "tag": "#tag-text",
    "answer": "#answer-question",
    "classify": "#classify-text",
    "similarity": "#similarity-texts",
    "rerank": "#rerank-query",
}
PAUSE = 100  # milliseconds between an answer and the next key press
# Resolves with the milliseconds until the line with the response time changes, which comes with the answer.
PRESS = """async ([view, selector, presses, pause]) => {
    const field = document.querySelector(selector), read = document.querySelector(`#view-${view} .read`);
    const times = [];
    for (let i = 0; i < presses; i += 1) {
        await new Promise((resolve) => setTimeout(resolve, pause));
        const started = performance.now();
        const answered = new Promise((resolve) => {
            const observer = new MutationObserver(() => {
                if (!read.textContent.includes(" in ")) return;
                observer.disconnect();
                resolve(performance.now() - started);
            });
            observer.observe(read, { childList: true, characterData: true, subtree: true });
        });
        field.value = i % 2 ? field.value.slice(0, -1) : `${field.value}s`;
        field.dispatchEvent(new Event("input", { bubbles: true }));
        times.push(await answered);
    }
    return times;
}"""


def main() -> None:
    """Measure all views and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server")
    parser.add_argument("--presses", type=int, default=40)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    args = parser.parse_args()
    from playwright.sync_api import sync_playwright

    load = [os.getloadavg()[0]]
    rows: dict[str, dict[str, float]] = {}
    with served(args.url) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(120_000)
        for view in FIELDS:
            rows[view] = measure(page, url, view, args.presses)
            print(f"{view:12}median {rows[view]['median']:6.0f} ms   90% {rows[view]['p90']:6.0f} ms", flush=True)
        browser.close()
    load.append(os.getloadavg()[0])
    print(f"{os.cpu_count()} cores; load {load[0]:.1f} before, {load[1]:.1f} after")
    if args.json:
        args.json.write_text(json.dumps({"milliseconds": rows, "cores": os.cpu_count(), "load": load}, indent=1))


def measure(page: Any, url: str, view: str, presses: int) -> dict[str, float]:
    """The response times of one view; the first few presses do not count."""
    page.goto(f"{url}/#/{view}")
    page.wait_for_function("view => document.querySelector(`#view-${view} .read`)?.textContent", arg=view)
    times = sorted(page.evaluate(PRESS, [view, FIELDS[view], presses + 4, PAUSE])[4:])
    return {"median": statistics.median(times), "p90": times[int(0.9 * len(times))]}


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """The URL of a server, which is started if there is none."""
    if url is not None:
        yield url.rstrip("/")
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bertie", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{url}/health"):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def find_chromium() -> str | None:
    """An installed Chromium, or None for that of playwright."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


if __name__ == "__main__":
    main()
