"""Run the commands of the README and docs/ as they are written, each page in an empty folder: make test-wheel.

    python -m tests_wheel --bin .venv-wheel/bin [PAGE …]

The folder has small files by the names that the commands use. Models and indexes that a page does not create itself are
created once. Commands that need a network, large data, a cluster or a GPU are listed and not run.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
SKIPPED = re.compile(
    r"\b(DATA|WORK)\b|--data\b|(postgresql|lance)://|--ray\b|^torchrun|^hf |^bertie push|^tensorboard|^pip |--network|"
    r"papers/|clinic|modernbert-small|wiki\.txt|pages\.jsonl\.zst|--precision (bf16|fp8)|^curl |^python |"
    r"(serve|inspect|-m) [\w-]+/[\w.-]+|-m bert-base-uncased|m3e-small|my-electra|"  # models of the hub
    r"pretrain bert-base"  # hours
)
OUTPUT = re.compile(r"(?<= -o )\S+")
MADE = (
    "my-model",
    "other-model",
    "mood",
    "small",
    "base",
    "my-tagger",
    "my-encoder",
    "my-embedder",
    "my-index",
    "tickets",
    "my-elmo",
    "my-elmo-tagger",
    "my-chooser",
    "my-splade",
    "my-colbert",
    "my-entities",
)
ELMO = "import bertie; model = bertie.Elmo.random(bertie.ElmoConfig(width=32, cell_width=64))"
KINDS = {"docs/zero-shot-entities.md": {"my-model": "my-entities"}}
SECONDS = 900  # that a command may take


@dataclass
class Folder:
    """Where the commands of a page run."""

    path: Path
    bin: Path
    shared: Path  # with what several pages need
    kinds: dict[str, str] = field(default_factory=dict)  # on this page, a name of MADE is another kind of model

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command; a server is stopped as soon as it is ready."""
        environment = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.path / "home")}
        for name in ("PYTHONPATH", "BERTIE_MODEL"):
            environment.pop(name, None)
        options = {"cwd": self.path, "env": environment, "text": True, "stderr": subprocess.STDOUT}
        if command.startswith("bertie serve") and "--new-key" not in command:
            return self._serve(command if re.search("--(port|unix)", command) else f"{command} --port 0", options)
        return subprocess.run(
            command, shell=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=SECONDS, **options
        )  # type: ignore[call-overload]

    def _serve(self, command: str, options: dict[str, object]) -> subprocess.CompletedProcess[str]:
        process = subprocess.Popen(f"exec {command}", shell=True, stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
        lines = []
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        for line in process.stdout:
            lines.append(line)
            if re.search(r"https?://\S+:\d+|http\+unix://", line) and not line.startswith("{"):
                process.send_signal(signal.SIGTERM)
        timer.cancel()
        return subprocess.CompletedProcess(command, process.wait(60), "".join(lines))

    def prepare(self, command: str) -> None:
        """Provide what the command reads, and remove what it writes."""
        output = OUTPUT.search(command)
        written = output and output[0].removeprefix("./")
        for name in MADE:
            used = re.search(rf"(?<![\w-])(\./)?{name}(?![\w.-])", command.replace(f"-o {output and output[0]}", ""))
            if used and name != written and not (self.path / name).exists():
                shutil.copytree(self.made(self.kinds.get(name, name)), self.path / name)
        task = re.search(r"train (tag|zero-shot-tag|choose) train\.jsonl", command)
        for part in ("train", "dev", "test") if task else ():
            source = "questions.jsonl" if task and task[1] == "choose" else "sentences.jsonl"
            shutil.copy(self.path / source, self.path / f"{part}.jsonl")
        if "train classify to-label.csv" in command:  # as if its rows had been labelled
            shutil.copy(self.path / "train.csv", self.path / "to-label.csv")
        if "--corpus corpus" in command and not (self.path / "corpus").exists():
            for name in ("tokenizer", "corpus"):
                shutil.copytree(self.made(name), self.path / name)
        if written and not re.search(r"--resume|--refresh", command):
            duplicates = f"{written.partition('.')[0]}.duplicates.jsonl"
            for path in (self.path / written, self.path / f"{written}.training", self.path / duplicates):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def made(self, name: str) -> Path:
        """A model, an index, a tokenizer or a corpus, created once."""
        path = self.shared / name
        book = "recipes/examples/book.txt"
        commands = {
            "my-tagger": "bertie train tag sentences.jsonl -o my-tagger --epochs 2",
            "my-index": "bertie index docs/ -o my-index",
            "my-encoder": "python -c \"import bertie; bertie.Embedder().save('my-encoder')\"",
            "my-embedder": "python -c \"import bertie; bertie.Embedder().save('my-embedder')\"",
            "my-elmo": f"python -c \"{ELMO}; model.save('my-elmo')\"",
            "my-elmo-tagger": f'python -c "{ELMO}; '
            "bertie.ElmoTagger(model, epochs=1).fit('sentences.jsonl').save('my-elmo-tagger')\"",
            "my-chooser": "bertie train choose questions.jsonl -o my-chooser --epochs 1",
            "my-entities": "bertie train zero-shot-tag sentences.jsonl -o my-entities --epochs 1",
            "my-splade": "python -c \"import bertie; bertie.SparseEmbedder('bertie-small').save('my-splade')\"",
            "my-colbert": "bertie train late-interaction pairs.jsonl -o my-colbert --epochs 1",
            "tokenizer": f"bertie tokenizer train {book} --vocab-size 4000 -o tokenizer",
            "corpus": f"bertie corpus {book} --tokenizer tokenizer -o corpus --held-out 0.1",
        }
        if not path.exists():
            command = commands.get(name, f"bertie train --recipe example -o {name}")
            done = Folder(self.shared, self.bin, self.shared).run(command)
            if done.returncode or not path.exists():
                raise SystemExit(f"{command} failed:\n{done.stdout[-2000:]}")
        return path


def commands_of(page: str) -> list[str]:
    """The commands of a page: those of its shell blocks, and in the README those after a $."""
    text = (ROOT / page).read_text()
    found = []
    for block in re.finditer(r"```(?:sh|console)\n(.*?)```|^    \$ ([^\n]*)$", text, flags=re.DOTALL | re.MULTILINE):
        if block[1] is not None:
            found += block[1].replace("\\\n", " ").splitlines()
        elif page == "README.md":
            found.append(block[2].split("\n")[0])
    return [line.strip() for line in found if line.strip() and not line.startswith("#")]


def write_data(folder: Path) -> None:
    """Small files by the names that the commands use."""
    examples = ROOT / "src" / "bertie" / "recipes" / "examples"
    with open(examples / "tickets.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("*.png", "*.svg", "images"))
    shutil.copytree(ROOT / "src" / "bertie" / "recipes", folder / "recipes")
    (folder / "text").mkdir()
    shutil.copy(examples / "book.txt", folder / "text" / "book.txt")
    for place in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        (folder / "home" / place).mkdir(parents=True)
    parts = {"train": rows[::2], "dev": rows[1::4], "test": rows[3::4], "tickets": rows, "reviews": rows, "news": rows}
    parts |= {"unlabelled": rows, "to-label": rows[::3], "documents": rows, "feedback": rows, "texts": rows}
    parts |= {"january": rows[::2], "february": rows[1::2], "ordinary": rows * 17, "today": rows[1::2]}
    columns = {"reviews": "review", "feedback": "comment", "tickets": "message", "news": "body"}
    columns |= {"january": "message", "february": "message"}
    for name, part in parts.items():
        table = [row | ({columns[name]: row["text"]} if name in columns else {}) for row in part]
        for row in table if name in ("unlabelled", "news", "documents") else []:
            del row["label"]
        with open(folder / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
        write_lines(folder / f"{name}.jsonl", table)
    texts = [row["text"] for row in rows]
    write_lines(folder / "pairs.jsonl", [{"query": a, "passage": b} for a, b in pairwise(texts)])
    write_lines(folder / "corpus.jsonl", [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    pairs = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress(pairs.encode()))
    people = [("Ada", "Lovelace", "London"), ("Alan", "Turing", "Paris"), ("Grace", "Hopper", "Rome")] * 8
    tagged = [
        {"tokens": [first, last, "lives", "in", city, "."], "tags": ["B-PER", "I-PER", "O", "O", "B-LOC", "O"]}
        for first, last, city in people
    ]
    for name in ("sentences", "other-labels"):
        write_lines(folder / f"{name}.jsonl", tagged)
    choices = [{"context": a, "choices": [b, "The larvae eat leaves."], "label": 0} for a, b in pairwise(texts)]
    write_lines(folder / "questions.jsonl", choices)
    with open(folder / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text_a", "text_b"), *pairwise(texts)])
    (folder / "sentences.txt").write_text("".join(f"{first} {last} went to {city}.\n" for first, last, city in people))
    (folder / "notes.txt").write_text("A delight.\n")
    for name in ("questions", "passages", "drafts", "contract", "reviews"):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n" for text in texts))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_page(page: str, bin: Path, shared: Path) -> int:
    """Run the commands of a page; the number of failures."""
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Folder(Path(name), bin, shared, KINDS.get(page, {}))
        write_data(folder.path)
        for command in commands_of(page):
            if SKIPPED.search(command):
                print(f"skip          {page}: {command}", flush=True)
                continue
            folder.prepare(command)
            started = time.monotonic()
            try:
                done = folder.run(command)
                status, output = done.returncode, done.stdout
            except subprocess.TimeoutExpired:
                status, output = -1, "timeout"
            failures += status != 0
            seconds = time.monotonic() - started
            print(f"{'FAIL' if status else 'ok  '} {seconds:5.0f} s  {page}: {command}", flush=True)
            if status:
                print(output[-1500:], flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--bin", type=Path, required=True, help="of the environment with the installed wheel")
    args = parser.parse_args()
    bin = args.bin.resolve() if args.bin.is_symlink() else args.bin.absolute()
    with tempfile.TemporaryDirectory() as shared:
        write_data(Path(shared))
        failures = sum(run_page(page, bin, Path(shared)) for page in args.pages)
    print(f"{failures} commands failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
