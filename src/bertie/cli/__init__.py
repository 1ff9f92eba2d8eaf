"""The command line: one verb a job."""

from bertie.cli.main import main

__all__ = ["main"]
