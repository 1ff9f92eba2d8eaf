"""Run random fault schedules.

    python -m tests.faults [--schedules 500] [--seed 0] [--first I] [--only KIND] [--job NAME] [--jobs 2]

Every schedule is printed with its number; `--seed S --first I --schedules 1` runs that one again. The
random moments of kills by time differ from run to run; those at system calls do not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults import shim

SERVER = "server"
SERVER_SHARE = 0.1


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--first", type=int, default=0, metavar="I", help="number of the first schedule")
    parser.add_argument("--only", metavar="KIND", help="only this kind of fault; server: only server schedules")
    parser.add_argument("--job", metavar="NAME", help="only commands whose name contains this")
    parser.add_argument("--quick", action="store_true", help="leave out training and pretraining")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="schedules at a time")
    parser.add_argument("--folder", type=Path, help="for inputs and runs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    parser.add_argument("--verbose", action="store_true", help="print the schedules that pass, too")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    """Start the workers, and add up what they report."""
    args = parse()
    if args.worker is not None:
        return work(args)
    args.seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="bertie-faults-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        library = shim.compile_shim(folder)
        if library is None:
            print("skipped: the fault injection needs Linux and a C compiler (cc)")
            return 0
        started = time.monotonic()
        print(f"seed {args.seed}", flush=True)
        prepare(folder)
        results = run_workers(args, folder, library)
        seconds = time.monotonic() - started
    failed = [result for result in results if result["violation"]]
    kinds = Counter(result["job"] for result in results)
    summary = {"seed": args.seed, "schedules": len(results), "failed": len(failed), "seconds": round(seconds, 1)}
    print(json.dumps(summary | {"by_job": dict(kinds)}))
    if args.json is not None:
        args.json.write_text(json.dumps(summary | {"by_job": dict(kinds), "violations": failed}, indent=1) + "\n")
    return 1 if failed or len(results) < args.schedules else 0


def environment() -> dict[str, str]:
    """One thread in all libraries, since forks inherit none."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_IO_THREADS"), "1")
    return {**os.environ, **threads, "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}


def prepare(folder: Path) -> None:
    """Write the inputs in a process of its own, unless they are there."""
    if (folder / "ready").exists():
        return
    code = "import sys, pathlib; from tests.faults.jobs import make_inputs; make_inputs(pathlib.Path(sys.argv[1]))"
    (folder / "in").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, folder / "in"], env=environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"the inputs could not be made: {done.stderr[-2000:]}")
    (folder / "ready").touch()


def run_workers(args: argparse.Namespace, folder: Path, library: Path) -> list[dict[str, str]]:
    """Run the schedules in several processes, and print what they report."""
    env = environment() | {"LD_PRELOAD": str(library), "BERTIE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "tests.faults", "--seed", str(args.seed), "--schedules", str(args.schedules)]
    command += ["--first", str(args.first), "--folder", str(folder), "--jobs", str(args.jobs)]
    command += ["--only", args.only] if args.only else []
    command += ["--job", args.job] if args.job else []
    command += ["--quick"] if args.quick else []
    source, target = os.pipe()
    workers = [
        subprocess.Popen([*command, "--worker", str(i)], env=env, stdout=target, pass_fds=()) for i in range(args.jobs)
    ]
    os.close(target)
    results = []
    try:
        with os.fdopen(source) as lines:
            for line in lines:
                result = json.loads(line)
                results.append(result)
                if result["violation"] or args.verbose:
                    print(f"{result['number']}: {result['violation'] or result['steps']}", flush=True)
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()
    return results


def work(args: argparse.Namespace) -> int:
    """Run every n-th schedule, and report each as a line of JSON."""
    from tests.faults.jobs import all_jobs
    from tests.faults.processes import import_everything, import_training
    from tests.faults.schedules import Bench, run_schedule
    from tests.faults.server import run_server_schedule

    assert shim.is_loaded(), "LD_PRELOAD does not name the shim"
    import_everything()
    folder = args.folder / f"worker-{args.worker}"
    bench = Bench(folder, args.folder / "in")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run
    bench.logs.mkdir(parents=True)
    jobs = [job for job in all_jobs() if args.job is None or args.job in job.name]
    jobs = [job for job in jobs if job.weight >= 1 or not args.quick]
    for number in range(args.first + args.worker, args.first + args.schedules, args.jobs):
        draw = random.Random(f"{args.seed}:{number}")
        if args.only == SERVER or (args.only is args.job is None and draw.random() < SERVER_SHARE):
            report(number, SERVER, lambda: run_server_schedule(bench, draw))  # noqa: B023
            continue
        job = draw.choices(jobs, [job.weight for job in jobs])[0]
        if "train" in job.name:
            import_training()
        report(number, job.name, lambda: run_schedule(bench, job, draw, args.only))  # noqa: B023
    return 0


def report(number: int, name: str, run: Callable[[], str]) -> None:
    """Run a schedule, and write a line of JSON."""
    from tests.faults.schedules import Violation

    started = time.monotonic()
    result: dict[str, object] = {"number": number, "job": name, "steps": "", "violation": ""}
    try:
        result["steps"] = run()
    except Violation as violation:
        result["violation"] = str(violation)
    except Exception:  # the harness itself
        result["violation"] = traceback.format_exc()
    result["seconds"] = round(time.monotonic() - started, 2)
    os.write(1, json.dumps(result).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
