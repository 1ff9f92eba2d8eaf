"""Check the installation: versions, CPU and GPU, compiled extensions, memory, disk, the built-in model and settings.

Each problem is printed with a fix. The exit status is 1 if something is broken, and 0 if there are only warnings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertie.cli.doctor_checks import Check, all_checks
from bertie.cli.parser import verb
from bertie.data.terminal import style

if TYPE_CHECKING:
    from bertie.cli.parser import Verbs

EXAMPLE = """  bertie doctor
  bertie doctor --network                                                # also: is the Hugging Face hub reachable?
  bertie doctor --json | jq '.checks[] | select(.status != "ok")'
"""
SYMBOLS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "error": ("✗", "red")}


def add(verbs: Verbs) -> None:
    """Add the verb to the parser."""
    parser = verb(verbs, "doctor", "check the installation and the machine, and suggest fixes", __doc__, EXAMPLE)
    parser.add_argument("--network", action="store_true", help="also check that the Hugging Face hub can be reached")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run all checks, print them, and return the exit status."""
    checks: list[Check] = []
    for check in all_checks(network=args.network):
        if not args.json:
            _print(check, new_section=not checks or checks[-1].section != check.section)
        checks.append(check)
    status = worst(checks)
    if args.json:
        print(json.dumps({"status": status, "checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        print("\n" + _summary(checks))
    return int(status == "error")


def worst(checks: Sequence[Check]) -> str:
    """The status of all checks together: ok, warning or error."""
    statuses = {check.status for check in checks}
    return next((status for status in ("error", "warning") if status in statuses), "ok")


def _print(check: Check, *, new_section: bool) -> None:
    if new_section:
        print(style(check.section, "bold"))
    symbol, color = SYMBOLS[check.status]
    print(f"  {style(symbol, color)} {check.name:<18} {check.text}", flush=True)
    if check.fix:
        print(f"    {style('fix:', 'bold')} {check.fix}")


def _summary(checks: Sequence[Check]) -> str:
    errors, warnings = (sum(check.status == status for check in checks) for status in ("error", "warning"))
    if not errors + warnings:
        return style("no problems found", "green")
    counts = [f"{n} {name}{'' if n == 1 else 's'}" for n, name in ((errors, "error"), (warnings, "warning")) if n]
    return style(" and ".join(counts), "red" if errors else "yellow")
