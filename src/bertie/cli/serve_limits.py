"""The options of `bertie serve` that limit requests and connections."""

from __future__ import annotations

import argparse

COUNTS = ("workers", "max_body_bytes", "max_items", "max_tokens", "max_reply_bytes", "max_requests", "batch_tokens")
CONNECTION_COUNTS = {  # flags and fields of ConnectionLimits
    "max_connections": "connections",
    "max_connections_per_address": "per_address",
    "max_total_body_bytes": "request_bytes",
    "max_total_reply_bytes": "reply_bytes",
    "max_header_bytes": "header_bytes",
    "min_rate": "min_rate",
}
CONNECTION_TIMES = {
    "header_timeout": "header_seconds",
    "read_timeout": "read_seconds",
    "write_timeout": "write_seconds",
    "idle_timeout": "idle_seconds",
}


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    _add_request_limits(parser)
    _add_connection_limits(parser)


def _add_request_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-body-bytes",
        type=int,
        default=8 << 20,
        metavar="N",
        help="maximum size of a request body (default: 8,388,608)",
    )
    limits.add_argument(
        "--max-items", type=int, default=1024, metavar="N", help="maximum texts per request (default: 1,024)"
    )
    limits.add_argument(
        "--max-tokens", type=int, default=1_000_000, metavar="N", help="maximum tokens per request (default: 1,000,000)"
    )
    limits.add_argument(
        "--max-reply-bytes",
        type=int,
        default=1 << 26,
        metavar="N",
        help="maximum size of a reply (default: 67,108,864)",
    )
    limits.add_argument(
        "--max-requests", type=int, default=512, metavar="N", help="maximum requests in flight (default: 512)"
    )
    limits.add_argument(
        "--max-wait", type=float, default=1.0, metavar="S", help="maximum seconds in the queue (default: 1)"
    )
    limits.add_argument(
        "--batch-tokens", type=int, metavar="N", help="maximum tokens per batch (default: measured at startup)"
    )
    limits.add_argument(
        "--deadline", type=float, default=30.0, metavar="S", help="maximum seconds per request (default: 30)"
    )
    limits.add_argument(
        "--grace",
        type=float,
        default=1.0,
        metavar="S",
        help="on SIGTERM, seconds to answer 503 on /health before the port is closed (default: 1)",
    )
    limits.add_argument(
        "--worker-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds until a hanging worker is killed and restarted; 0: never (default: 30)",
    )


def _add_connection_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("connection limits, per worker")
    for flag, default, help in (
        ("--max-connections", 2048, "open connections; beyond that, the one with the least progress is closed"),
        ("--max-connections-per-address", 1024, "open connections per client address; IPv6: per /64 network"),
        ("--max-total-body-bytes", 256 << 20, "bytes of all request bodies, from arrival to reply"),
        (
            "--max-total-reply-bytes",
            256 << 20,
            "bytes of all replies that clients have not read; half of it per address",
        ),
        ("--max-header-bytes", 32 << 10, "bytes of a request's headers"),
        ("--min-rate", 1024, "bytes per second at which clients must send and read, over 5 seconds"),
    ):
        limits.add_argument(flag, type=int, default=default, metavar="N", help=f"{help} (default: {default:,})")
    for flag, seconds, help in (
        ("--header-timeout", 10.0, "to receive the headers"),
        ("--read-timeout", 30.0, "to receive a body"),
        ("--write-timeout", 120.0, "to send a reply"),
        ("--idle-timeout", 65.0, "to keep an unused connection open"),
    ):
        limits.add_argument(
            flag, type=float, default=seconds, metavar="S", help=f"seconds {help} (default: {seconds:g})"
        )
