"""Fault injection: random schedules of kills, failing system calls and hostile clients, with an oracle.

`python -m tests.faults --help` has the command line; `make test-faults` runs 500 schedules.
"""
