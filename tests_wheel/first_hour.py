"""Run the first hour with Bertie, from a wheel in an empty folder, and write docs/first-hour.md: make first-hour.

    python -m tests_wheel.first_hour --wheel dist/bertie-….whl [--write docs/first-hour.md]

Every command is run, and its output is what it printed, with lines left out where the page has `…`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PORT = 8080
INTRODUCTION = """Install, check, try, train, search and serve: every command on this page was run in this order on
{date}, with a wheel installed into a new environment, in an empty folder. A `…` marks omitted output. The machine has
{cpus} cores and no GPU{load}. `make first-hour` runs the commands again and writes this page."""


@dataclass(frozen=True)
class Step:
    """A command, how many lines of its output the page has from the beginning and the end, and the text after it."""

    command: str
    head: int = 100
    tail: int = 0
    after: str = ""


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    steps: tuple[Step, ...] = field(default=())


QUERY = "Who is the new servant of Phileas Fogg?"
HEADERS = "-H 'Content-Type: application/json'"
SECTIONS = (
    Section(
        "Install",
        "Python 3.11 or newer is required. The extras are for training reports, search and the server; in a checkout, "
        "install `'.[train,search,serve]'`. On Linux, torch from PyPI includes the CUDA libraries; without a GPU, "
        "install the CPU build first "
        "([pytorch.org](https://pytorch.org/get-started/locally/)).",
        (
            Step("python3 -m venv venv", 0),
            Step("venv/bin/pip install 'bertie[train,search,serve]'", 0),
            Step("source venv/bin/activate", 0),
        ),
    ),
    Section(
        "Check",
        "Is everything installed, and what does Bertie use on this machine? Each problem is listed with its fix.",
        (Step("bertie doctor"),),
    ),
    Section(
        "Try",
        "The built-in model needs no download. `bertie tour` runs every task once:",
        (
            Step("bertie tour", 30),
            Step(
                'bertie classify "A delight from start to finish." "What a waste of money, I am so angry."',
                after="Zero-shot classification, with any labels:",
            ),
            Step(
                'bertie classify "The match ended in a draw after extra time." --labels sport,politics,cooking',
                after="Fill-mask, named entity recognition and question answering:",
            ),
            Step('bertie fill "Paris is the [MASK] of France." --top-k 3'),
            Step('bertie tag "Ada Lovelace was born in London."'),
            Step('bertie answer "Who wrote Emma?" --context "Emma is a novel of 1815. It was written by Jane Austen."'),
        ),
    ),
    Section(
        "Train",
        "Recipes and example data come with the package. `tickets.csv` has 60 support tickets with five labels:",
        (
            Step("bertie recipes -o recipes"),
            Step(
                "head -4 recipes/examples/tickets.csv",
                after="Training needs only a file with texts and labels. The method, the learning rates and the "
                "number of epochs are chosen automatically; without a test file, the score is cross-validated:",
            ),
            Step(
                "bertie train classify recipes/examples/tickets.csv -o tickets",
                4,
                17,
                after="A report always compares the model with cheap baselines, and says if it does not beat them. "
                "`tickets/report.html` has the confusion matrix, the calibration, and all errors with word "
                "attributions ([Reports](reports.md)). The folder is a Hugging Face checkpoint; use it with `-m`:",
            ),
            Step('bertie classify "Where is my parcel?" "The invoice is wrong." "How do I log in?" -m tickets'),
        ),
    ),
    Section(
        "Search",
        "An index for hybrid search (embeddings and BM25) is built from a folder of text, Markdown, HTML and PDF files "
        "and tables. This one has three chapters of Jules Verne and the tickets:",
        (
            Step("bertie index recipes/examples -o my-index"),
            Step(
                'bertie search my-index "the parcel is late" -k 2',
                after="With `--rerank`, a cross-encoder reranks the best passages:",
            ),
            Step(f'bertie search my-index "{QUERY}" -k 2 --rerank'),
        ),
    ),
    Section(
        "Serve",
        "Serve both models and the index over HTTP:",
        (
            Step(f"bertie serve bertie-small tickets --index my-index --port {PORT} &", 3),
            Step(
                f"curl -s localhost:{PORT}/classify {HEADERS} "
                """-d '{"texts": "Where is my parcel?", "model": "tickets"}'"""
            ),
            Step(f"""curl -s localhost:{PORT}/tag {HEADERS} -d '{{"texts": "Ada Lovelace was born in London."}}'"""),
            Step(
                f"""curl -s localhost:{PORT}/fill {HEADERS} -d '{{"texts": "A [MASK].", "topk": 3}}'""",
                after="Open http://127.0.0.1:8080/ for [the playground](playground.md), and `/docs` for the API:",
            ),
            Step(
                f"curl -s localhost:{PORT}/ | grep -o '<title>.*</title>'",
                after="The Python client has the same methods and results as the local objects; [other "
                "clients](clients.md) work as well:",
            ),
            Step(
                'python -c "import bertie; client = bertie.Client(); '
                "print(client.answer('Who wrote Emma?', 'Emma is a novel by Jane Austen.').best.text); "
                "print(bertie.Client(model='tickets').classify('Where is my parcel?').label)\""
            ),
            Step("kill %1", 0),
        ),
    ),
)
END = """## Further

[Training](train.md), [reports](reports.md), [labelling](labelling.md), [search](search.md),
[serving](serve.md), [clients](clients.md), [Python](python.md), [the command line](command-line.md).
"""


class Hour:
    """The commands of the page in one folder, and the seconds they take."""

    def __init__(self, folder: Path, wheel: Path | None, bin: Path) -> None:
        self.folder, self.wheel, self.bin = folder, wheel, bin
        self.server: subprocess.Popen[str] | None = None
        self.seconds = 0.0

    def run(self, command: str) -> str:
        """Run a command and return what it prints."""
        if "pip install" in command and self.wheel is not None:
            (torch,) = re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
            command = command.replace("'bertie[", f"-q {torch} && {self.bin}/pip install -q '{self.wheel}[")
        if command.startswith("source") or (self.wheel is None and "venv" in command):
            return ""  # $PATH has the environment
        if command.startswith("kill"):
            assert self.server is not None
            self.server.send_signal(signal.SIGTERM)
            status = self.server.wait(60)
            assert status == 0, f"the server ended with status {status}"
            return ""
        if command.endswith(" &"):
            return self._serve(command.removesuffix(" &"))
        return self._shell(command)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.folder), "COLUMNS": "100"}

    def _shell(self, command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{command} failed:\n{done.stdout[-3000:]}")
        return done.stdout

    def _serve(self, command: str) -> str:
        with open(self.folder / "server.log", "w") as log:
            self.server = subprocess.Popen(
                f"exec {command}", shell=True, cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        assert self.server.stdout is not None
        lines = []
        for line in self.server.stdout:
            lines.append(line)
            if "http://" in line:
                break
        return "".join(lines)

    def step(self, step: Step) -> str:
        """The lines of a command on the page, and the time it took."""
        started, used = time.monotonic(), cpu_seconds()
        output = self.run(step.command)
        seconds, used = time.monotonic() - started, cpu_seconds() - used
        self.seconds += seconds
        print(f"{seconds:6.1f} s  {step.command}", file=sys.stderr, flush=True)
        parts = [
            "\n".join([f"    $ {step.command}", *(f"    {line}".rstrip() for line in trim(self.clean(output), step))])
        ]
        if step.command.startswith(("bertie", "venv")) and seconds >= 1:
            cpu = f"{used:.0f} seconds of CPU time, " if used >= 1 else ""  # a server's are known when it ends
            parts.append(f"*{cpu}{describe(seconds)} in all*")
        return "\n\n".join([*parts, wrap(step.after)] if step.after else parts)

    def clean(self, output: str) -> list[str]:
        """Output without the names of temporary folders, and without progress lines."""
        text = output.replace(str(self.folder), "~").replace(str(self.bin.parent), "~/venv")
        lines = [line for line in text.splitlines() if not re.search(r"/s .*\d+:\d\d( left)?$", line)]
        return [line if len(line) <= 160 else f"{line[:159]}…" for line in lines]


def trim(lines: list[str], step: Step) -> list[str]:
    """The first and the last lines."""
    if len(lines) <= step.head + step.tail:
        return lines
    return [*lines[: step.head], *(["…"] if step.head else []), *(lines[-step.tail :] if step.tail else [])]


def wrap(text: str) -> str:
    """Text in lines of up to 100 characters."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False)


def cpu_seconds() -> float:
    """The CPU time of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def describe(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def write_page(hour: Hour) -> str:
    """Run everything and return the page."""
    load = os.getloadavg()[0]
    busy = f", and other programs caused a load of {load:.0f}, so times are longer than usual" if load > 2 else ""
    introduction = INTRODUCTION.format(date=datetime.date.today().isoformat(), cpus=os.cpu_count(), load=busy)
    parts = [f"# The first hour\n\n{wrap(introduction)}\n"]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n\n{wrap(section.text)}\n")
        parts += [f"{hour.step(step)}\n" for step in section.steps]
    parts.append(f"All commands together took {describe(hour.seconds)}.\n")
    return "\n".join([*parts, END])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="installed into a new environment")
    parser.add_argument("--bin", type=Path, help="of an environment with the wheel, instead of --wheel")
    parser.add_argument("--write", type=Path, help="the page; by default it is printed")
    args = parser.parse_args()
    if (args.wheel is None) == (args.bin is None):
        parser.error("pass either --wheel or --bin")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hour = Hour(
            folder, args.wheel and args.wheel.absolute(), args.bin.absolute() if args.bin else folder / "venv/bin"
        )
        try:
            page = write_page(hour)
        finally:
            if hour.server is not None and hour.server.poll() is None:
                hour.server.kill()
    if args.write:
        args.write.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
