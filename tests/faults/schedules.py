"""Random schedules over the commands: faults, what may follow from them, and what must not."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import shim
from tests.faults.jobs import Job, Tree
from tests.faults.processes import Command, Outcome, in_child

TRANSFERS = ("write", "read")
CHANGES = ("open", "write", "sync", "rename", "unlink", "link", "truncate", "mkdir")
ERRORS = (errno.EIO, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.EMFILE)


@dataclass(frozen=True)
class Fault:
    """What happens to one run of a command."""

    kind: str
    settings: dict[str, object] = field(default_factory=dict)  # of the shim
    signal: int = 0  # sent by the harness
    after: float = 0.0  # seconds
    must_succeed: bool = False
    stdout: str | None = None

    @property
    def signals(self) -> tuple[int, ...]:
        """The signals that may end the command."""
        return tuple(int(str(number)) for number in (self.signal, self.settings.get("SIGNAL", 0)) if number)


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its result, its time and its calls."""

    tree: Tree
    seconds: float
    calls: dict[str, int]


class Violation(Exception):
    """A schedule whose outcome is not allowed."""


@dataclass
class Bench:
    """A folder for the runs, and the uninterrupted runs so far."""

    folder: Path
    inputs: Path
    references: dict[str, Reference] = field(default_factory=dict)

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def new_folder(self, job: Job) -> Path:
        folder = self.folder / f"run-{time.monotonic_ns()}"
        folder.mkdir(parents=True)
        if job.prepare is not None:
            job.prepare(self.inputs, folder)
        return folder

    def reference(self, job: Job) -> Reference:
        """The uninterrupted run of a command."""
        if job.name not in self.references:
            folder = self.new_folder(job)
            counting: dict[str, object] = {"PATH": folder, "CALLS": ",".join(shim.FILE_CALLS)}
            outcome = Command(job.command(self.inputs), folder, self.logs, counting, before=job.before).outcome()
            if outcome.status != 0:
                raise Violation(f"{job.name} fails without any fault: {outcome}")
            tree = in_child(lambda: job.read(folder))
            self.references[job.name] = Reference(tree, outcome.seconds, outcome.injected.by_kind)
            folder.rename(self.kept(job))
        return self.references[job.name]

    def kept(self, job: Job) -> Path:
        """The folder of the uninterrupted run."""
        return self.folder / f"reference-{job.name.replace(' ', '-')}"


# --- faults ---


def draw_fault(draw: random.Random, kind: str, reference: Reference, folder: Path) -> Fault:
    """A fault of a kind, at a random call or time of the uninterrupted run."""

    def calls(*names: str, **settings: object) -> dict[str, object]:
        total = sum(reference.calls[name] for name in names)
        settings = {"AT": draw.randint(1, max(1, total)), **settings}
        return {"PATH": folder, "CALLS": ",".join(names), **settings}

    moment = draw.uniform(0.0, reference.seconds * 1.1)
    when = draw.choice(["before", "middle", "after"])
    if kind == "kill":
        return Fault(kind, signal=signal.SIGKILL, after=moment)
    if kind == "signal":
        return Fault(kind, signal=draw.choice([signal.SIGTERM, signal.SIGINT]), after=moment)
    if kind == "kill-at-call":
        return Fault(kind, calls(*CHANGES, SIGNAL=int(signal.SIGKILL), WHEN=when))
    if kind == "signal-at-call":
        return Fault(kind, calls(*CHANGES, SIGNAL=int(draw.choice([signal.SIGTERM, signal.SIGINT])), WHEN=when))
    if kind == "full-disk":
        names = draw.choice([("write",), ("write", "mkdir"), ("write", "open", "mkdir")])
        return Fault(kind, calls(*names, ERRNO=errno.ENOSPC, TIMES=-1, SHORT=draw.randint(0, 1)))
    if kind == "error":
        name = draw.choice([name for name in shim.FILE_CALLS if reference.calls[name]] or ["write"])
        times = draw.choice([1, 1, 2, -1])
        return Fault(kind, calls(name, ERRNO=draw.choice(ERRORS), TIMES=times))
    if kind == "short":
        return Fault(kind, calls(*TRANSFERS, SHORT=1, TIMES=draw.choice([1, 5, -1])), must_succeed=True)
    if kind == "interrupted-call":
        return Fault(kind, calls("open", *TRANSFERS, ERRNO=errno.EINTR, TIMES=draw.choice([1, 3])), must_succeed=True)
    if kind == "clock":
        step = draw.choice([-1, 1]) * draw.choice([2, 3700, 86400 * 400])
        return Fault(kind, {"CLOCK": step, "CLOCK_AFTER": int(1000 * moment)}, must_succeed=True)
    if kind == "stdout":
        return Fault(kind, stdout="/dev/full")
    raise ValueError(kind)


KINDS = {  # with how often they are drawn
    "kill": 4,
    "kill-at-call": 6,
    "signal": 2,
    "signal-at-call": 3,
    "full-disk": 4,
    "error": 6,
    "short": 1,
    "interrupted-call": 1,
    "clock": 1,
    "stdout": 0.5,
    "two-writers": 2,
}


# --- schedules ---


def run_schedule(bench: Bench, job: Job, draw: random.Random, kind: str | None = None) -> str:
    """Run one schedule; returns its description, raises Violation."""
    reference = bench.reference(job)
    folder = bench.new_folder(job)
    steps = [job.name]
    try:
        extra: tuple[str, ...] = ()
        if job.replace is not None and draw.random() < 0.3:
            extra = job.replace
            _put_old(bench.kept(job) / job.output, folder / job.output)
            steps.append("over an old output")
        old = _raw(folder / job.output)
        check = Checker(job, bench.inputs, folder, reference, old)
        for number in range(draw.choice([1, 1, 2, 3])):
            name = kind or draw.choices(list(KINDS), list(KINDS.values()))[0]
            again = number > 0 or (name == "two-writers" and draw.random() < 0.7)
            argv = job.command(bench.inputs, tuple(dict.fromkeys((*extra, *(job.again if again else ())))))
            if name == "two-writers":
                check.after_two(_two_writers(bench, job, argv, folder, draw, steps))
                continue
            fault = draw_fault(draw, name, reference, folder)
            steps.append(describe(fault))
            command = Command(argv, folder, bench.logs, fault.settings, stdout=fault.stdout, before=job.before)
            if fault.signal:
                command.wait(fault.after)
                command.send(fault.signal)
            outcome = command.outcome()
            steps[-1] += f" -> {outcome.status} ({outcome.injected.first or 'no call'})"
            check.after_fault(fault, outcome)
        argv = job.command(bench.inputs, tuple(dict.fromkeys((*extra, *job.again))))
        check.after_rerun(Command(argv, folder, bench.logs, {}, before=job.before).outcome())
    except Violation as violation:
        raise Violation(f"{'; '.join(steps)}: {violation} [{folder}]") from None
    shutil.rmtree(folder, ignore_errors=True)
    return "; ".join(steps)


def describe(fault: Fault) -> str:
    """A fault in words."""
    settings = " ".join(f"{name}={value}" for name, value in fault.settings.items() if name != "PATH")
    sent = f" {signal.Signals(fault.signal).name} after {fault.after:.3f} s" if fault.signal else ""
    return f"{fault.kind}{sent} {settings}".strip()


def _two_writers(
    bench: Bench, job: Job, argv: list[str], folder: Path, draw: random.Random, steps: list[str]
) -> list[Outcome]:
    """Two processes that write the same output, some of them killed."""
    writers, seconds = [], bench.reference(job).seconds
    for _ in range(draw.choice([2, 2, 3])):
        writers.append(Command(argv, folder, bench.logs, {}, before=job.before))
        time.sleep(draw.choice([0.0, 0.0, 0.02, seconds / 2]))
    for writer in writers:
        if draw.random() < 0.25:
            writer.wait(draw.uniform(0, seconds))
            writer.send(signal.SIGKILL)
    outcomes = [writer.outcome() for writer in writers]
    steps.append(f"two-writers -> {[outcome.status for outcome in outcomes]}")
    return outcomes


def _raw(path: Path) -> dict[str, bytes | None] | None:
    """The bytes of a file, or of all files of a folder."""
    if path.is_file():
        return {"": path.read_bytes()}
    if not path.is_dir():
        return None
    return {
        item.relative_to(path).as_posix(): item.read_bytes() if item.is_file() else None
        for item in sorted(path.rglob("*"))
    }


def _put_old(result: Path, target: Path) -> None:
    """An earlier output: that of the uninterrupted run, with something appended to each file."""
    if result.is_file():
        target.write_bytes(result.read_bytes() + b"\n")
        return
    shutil.copytree(result, target)
    for path in target.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes() + b"\n")


@dataclass
class Checker:
    """The oracle: what may be there after a fault, and what must be there after a success."""

    job: Job
    inputs: Path
    folder: Path
    reference: Reference
    old: dict[str, bytes | None] | None
    undeleted: set[str] = field(default_factory=set)  # what a failing unlink has left behind

    def after_fault(self, fault: Fault, outcome: Outcome) -> None:
        """Success with the right result, or an error with a message and nothing half-done."""
        if "unlink" in str(fault.settings.get("CALLS")) and "ERRNO" in fault.settings and outcome.injected.injected:
            self.undeleted.update(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*"))
        if outcome.status == 0:
            self.check_complete(outcome)
            return
        if fault.must_succeed:
            raise Violation(f"must succeed: {outcome}")
        self.check_failure(outcome, fault.signals)
        injected = outcome.injected.injected and "ERRNO" in fault.settings
        if injected and outcome.status == 1:
            number = int(str(fault.settings["ERRNO"]))
            if not names_error(outcome.err, number):
                raise Violation(f"the message does not say why ({os.strerror(number)}): {outcome}")
        self.check_output(outcome)

    def after_two(self, outcomes: list[Outcome]) -> None:
        """Each writer succeeds, or says that another one is at work, or that the work is done."""
        for outcome in outcomes:
            if outcome.status != 0:
                self.check_failure(outcome, (signal.SIGKILL,))
        self.check_output(outcomes[0])

    def after_rerun(self, outcome: Outcome) -> None:
        """The last run has no faults."""
        if outcome.status != 0:
            raise Violation(f"the rerun fails: {outcome}")
        self.check_complete(outcome)

    def check_failure(self, outcome: Outcome, signals: tuple[int, ...]) -> None:
        """A failed command says what happened, unless a signal ended it."""
        if outcome.status is None:
            raise Violation(f"hangs: {outcome}")
        if "Traceback" in outcome.err or "Exception ignored" in outcome.err:
            raise Violation(f"a traceback: {outcome}")
        if outcome.status < 0:
            if -outcome.status not in signals:
                raise Violation(f"ended by an unexpected signal: {outcome}")
        elif "bertie: " not in outcome.err:
            raise Violation(f"no message: {outcome}")
        elif outcome.status not in (1, 130):
            raise Violation(f"exit status {outcome.status}: {outcome}")

    def check_output(self, outcome: Outcome) -> None:
        """The output is absent, the complete old one, or the complete new one."""
        if (check := self.job.check_partial) is not None:
            try:
                problem = in_child(lambda: check(self.inputs, self.folder, self.reference.tree))
            except RuntimeError as error:
                problem = str(error)
            if problem:
                raise Violation(f"{problem}: {outcome}")
            return
        now = _raw(self.folder / self.job.output)
        if now is None or now == self.old:
            return
        tree = self._read(outcome)
        name = self.job.output
        inside = {key: value for key, value in tree.items() if key == name or key.startswith(f"{name}/")}
        expected = {
            key: value for key, value in self.reference.tree.items() if key == name or key.startswith(f"{name}/")
        }
        self._compare(inside, expected, outcome)

    def check_complete(self, outcome: Outcome) -> None:
        """All is as after an uninterrupted run, and nothing is left over."""
        self._compare(self._read(outcome), self.reference.tree, outcome)

    def _read(self, outcome: Outcome) -> Tree:
        try:
            tree: Tree = in_child(lambda: self.job.read(self.folder))
        except RuntimeError as error:
            raise Violation(f"the output cannot be read: {error}; {outcome}") from None
        return tree

    def _compare(self, tree: Tree, expected: Tree, outcome: Outcome) -> None:
        more, less = sorted(tree.keys() - expected.keys() - self.undeleted), sorted(expected.keys() - tree.keys())
        different = [key for key in tree.keys() & expected.keys() if tree[key] != expected[key]]
        if more or less or different:
            raise Violation(f"left over {more}, missing {less}, different {different}: {outcome}")


def names_error(message: str, number: int) -> bool:
    """Whether a message names an error of the operating system."""
    known = [os.strerror(number).lower(), f"os error {number}", f"errno {number}"]
    if number in (errno.ENOSPC, errno.EDQUOT):
        known.append("disk is full")
    known += ["disk i/o error", "readonly database", "unable to open database file", "malformed"]  # SQLite's words
    return any(text in message.lower() for text in known)
