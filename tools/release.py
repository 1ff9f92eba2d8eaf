"""Check that a release can be made, and print the commands that make it: make release-check.

    python -m tools.release                # check
    python -m tools.release --tag          # check, then create the tag vX.Y.Z

The version is that of src/bertie/_version.py. Nothing is uploaded from here: pushing the tag starts
.github/workflows/release.yml, which builds the wheels, checks and publishes them.
"""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def version() -> str:
    """The version of the package."""
    return str(runpy.run_path(str(ROOT / "src" / "bertie" / "_version.py"))["__version__"])


def git(*arguments: str) -> str:
    """The output of a git command."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def notes(number: str, changelog: str) -> str | None:
    """The section of a version in the changelog, "" if it has no date yet; None if there is none.

    >>> notes("1.2.0", "# Changelog\\n\\n## [1.2.0] - 2026-11-17\\n\\n- Fixed.\\n\\n## [1.1.0] - 2026-01-02\\n")
    '- Fixed.'
    >>> notes("1.2.0", "## [1.2.0] - unreleased\\n\\n- Fixed.\\n")
    ''
    """
    section = re.search(rf"^## \[{re.escape(number)}\] - (\S+)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    if section is None:
        return None
    return section[2].strip() if re.fullmatch(r"\d{4}-\d\d-\d\d", section[1]) else ""


def problems() -> list[str]:
    """What stands in the way of a release."""
    number, found = version(), []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", number):
        found.append(f"version {number!r} in src/bertie/_version.py must be like 1.2.3 or 1.2.3rc1")
    text = notes(number, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    if text is None:
        found.append(f"CHANGELOG.md has no section '## [{number}] - YYYY-MM-DD'")
    elif not text:
        found.append(f"CHANGELOG.md: the section [{number}] has no date")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    if f"\nversion: {number}\n" not in citation:
        found.append(f"CITATION.cff has another version than {number}")
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    if "example.org" in urls["Repository"]:
        found.append(f"pyproject.toml: Repository = {urls['Repository']!r} is a placeholder")
    if git("status", "--porcelain"):
        found.append("git status is not clean")
    if git("tag", "--list", f"v{number}"):
        found.append(f"the tag v{number} exists already")
    return found


def main() -> None:
    """Check, and tag if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", action="store_true", help="create the tag if nothing stands in the way")
    args = parser.parse_args()
    if found := problems():
        raise SystemExit("\n".join([f"{version()} cannot be released:", *(f"  {line}" for line in found)]))
    if args.tag:
        git("tag", "--annotate", f"v{version()}", "--message", f"Bertie {version()}")
    print(f"git push origin v{version()}" if args.tag else f"ready: python -m tools.release --tag  # v{version()}")


if __name__ == "__main__":
    main()
