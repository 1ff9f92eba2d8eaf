"""The open connections of a server: how many there are, what each waits for, and which are dropped.

A connection takes a thread and a place among the requests in flight only once its request has
arrived. What it holds before and after is limited here: the number of connections in total and per
client address, the bytes of request bodies and of unsent replies, and the time and the minimum rate
at which a client must send and read. When a limit on the number is reached, the connection that has
made the least progress is closed in favour of the new one.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import resource
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertie.serve.connection_progress import MonitoredProtocol

SWEEP_SECONDS = 0.1
SPARE_FILES = 256  # descriptors for models, indexes, logs and threads


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of connections, in each worker process."""

    connections: int = 2048  # in total
    per_address: int = 1024  # from one IPv4 address or one IPv6 network of 64 bits
    request_bytes: int = 256 * 1024 * 1024  # of all request bodies, from their arrival to the reply
    reply_bytes: int = 256 * 1024 * 1024  # of all replies that wait to be sent; half of it to one address
    header_bytes: int = 32 * 1024  # of a request line and its headers
    headers: int = 100  # per request
    header_seconds: float = 10.0  # in which they must arrive
    read_seconds: float = 30.0  # in which a body must arrive
    write_seconds: float = 120.0  # in which a reply must be read
    idle_seconds: float = 65.0  # between two requests
    min_rate: int = 1024  # bytes per second that a client must send or read
    grace_seconds: float = 5.0  # over which the rate is averaged

    @property
    def quantum(self) -> int:
        """Bytes that count as progress: as many as must be transferred within `grace_seconds`."""
        return max(1, int(self.min_rate * self.grace_seconds))

    def fit_open_files(self) -> ConnectionLimits:
        """Raise the process's limit of open files for these connections, or lower the limits to it."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = self.connections + self.connections // 4 + SPARE_FILES  # a quarter for lingering ones
        if soft != resource.RLIM_INFINITY and soft < wanted:
            soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            if soft < wanted:
                most = max(16, (soft - SPARE_FILES) * 4 // 5)
                return replace(self, connections=most, per_address=min(self.per_address, most))
        return self


class State(Enum):
    """What a connection waits for."""

    RECEIVING = "receiving"  # for its client to send a request
    BUSY = "busy"  # for the server to answer
    SENDING = "sending"  # for its client to read a reply
    IDLE = "idle"  # for the next request
    LINGERING = "lingering"  # for its client to close it; what arrives is discarded


class Connections:
    """All connections of a server, by state, each in the order of their last progress."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.now = 0.0  # seconds, not counting times when this process did not run
        self.count = 0
        self.request_bytes = 0
        self.reply_bytes = 0
        self.dropped: Counter[str] = Counter()  # connections by reason
        self.half_closed: set[MonitoredProtocol] = set()  # whose requests are being processed
        self._states: dict[State, dict[MonitoredProtocol, None]] = {state: {} for state in State}
        self._per_address: Counter[str] = Counter()
        self._reply_bytes: Counter[str] = Counter()  # by address
        self._swept = time.monotonic()

    # --- the number of connections ---

    def admit(self, connection: MonitoredProtocol) -> bool:
        """Count a new connection. If there are too many, close another; if none can be, return False."""
        limits, address = self.limits, connection.address
        if self._per_address[address] >= limits.per_address and not self._make_room(address):
            return False
        if self.count >= limits.connections and not self._make_room(None):
            return False
        self.count += 1
        self._per_address[address] += 1
        connection.counted = True
        return True

    def discount(self, connection: MonitoredProtocol) -> None:
        """Count a connection no longer: it is closed, or about to be."""
        if connection.counted:
            connection.counted = False
            self.count -= 1
            self._per_address[connection.address] -= 1
            if not self._per_address[connection.address]:
                del self._per_address[connection.address]

    def remove(self, connection: MonitoredProtocol) -> None:
        """Forget a closed connection."""
        self.discount(connection)
        self.release_request(connection)
        self.release_reply(connection)
        self._states[connection.state].pop(connection, None)
        self.half_closed.discard(connection)

    def all(self) -> list[MonitoredProtocol]:
        """All connections that are not closed."""
        return [connection for state in self._states.values() for connection in state]

    def move(self, connection: MonitoredProtocol, state: State) -> None:
        """Note a connection's state, or its progress within a state."""
        self._states[connection.state].pop(connection, None)
        connection.state, connection.mark = state, self.now
        self._states[state][connection] = None
        if state is State.LINGERING:
            self.discount(connection)
            if len(self._states[state]) > self.limits.connections // 4 + 1:
                next(iter(self._states[state])).abort("lingering")

    def _make_room(self, address: str | None) -> bool:
        """Close the connection, of this address if given, whose client has made the least progress."""
        for state, seconds in (
            (State.RECEIVING, 0.5),
            (State.IDLE, 0.0),
            (State.RECEIVING, 0.0),
            (State.SENDING, 1.0),
        ):
            for connection in self._states[state]:
                if self.now - connection.mark < seconds:
                    break
                if connection.counted and address in (None, connection.address):
                    self.discount(connection)
                    connection.evict("connections")
                    return True
        return False

    # --- bytes ---

    def hold_request(self, connection: MonitoredProtocol, size: int) -> None:
        """Count bytes of a request. If there are too many, drop the slowest requests that are incomplete."""
        connection.held += size
        self.request_bytes += size
        if self.request_bytes > self.limits.request_bytes:
            receiving = [other for other in self._states[State.RECEIVING] if other.held and other is not connection]
            for victim in (*receiving, connection):
                self.release_request(victim)
                victim.drop("request_bytes", "the bodies of all requests take too much memory", "overloaded")
                if self.request_bytes <= self.limits.request_bytes:
                    break

    def release_request(self, connection: MonitoredProtocol) -> None:
        """Count the bytes of a connection's requests no longer."""
        self.request_bytes -= connection.held
        connection.held = 0

    def hold_reply(self, connection: MonitoredProtocol, size: int) -> None:
        """Count the bytes of a reply that wait to be sent. If there are too many, drop the slowest readers."""
        added, address = size - connection.unsent, connection.address
        connection.unsent = size
        self.reply_bytes += added
        self._reply_bytes[address] += added
        if self._reply_bytes[address] > self.limits.reply_bytes // 2:
            self._drop_readers(connection, address)
        if self.reply_bytes > self.limits.reply_bytes:
            self._drop_readers(connection, None)

    def release_reply(self, connection: MonitoredProtocol) -> None:
        """Count the bytes of a connection's replies no longer."""
        if connection.unsent:
            self.reply_bytes -= connection.unsent
            self._reply_bytes[connection.address] -= connection.unsent
            if not self._reply_bytes[connection.address]:
                del self._reply_bytes[connection.address]
            connection.unsent = 0

    def _drop_readers(self, newest: MonitoredProtocol, address: str | None) -> None:
        """Abort connections, of this address if given, in the order of their progress, but not the newest."""
        limit = self.limits.reply_bytes // (1 if address is None else 2)
        for connection in list(self._states[State.SENDING]):
            if (self.reply_bytes if address is None else self._reply_bytes[address]) <= limit:
                return
            if connection is not newest and address in (None, connection.address):
                if connection.transport.get_write_buffer_size():
                    connection.abort("reply_bytes")
                else:
                    self.release_reply(connection)

    # --- time ---

    def sweep(self) -> None:
        """Drop the connections whose clients are too slow."""
        now = time.monotonic()
        # Neither a stopped process nor a blocked event loop makes the clients late.
        self.now += min(now - self._swept, 2 * SWEEP_SECONDS)
        self._swept = now
        for connection in list(self._waiting()):
            connection.check()

    def _waiting(self) -> Iterator[MonitoredProtocol]:
        for state in (State.RECEIVING, State.SENDING, State.LINGERING):
            yield from self._states[state]
        yield from self.half_closed
        for connection in self._states[State.IDLE]:
            if self.now - connection.mark < self.limits.idle_seconds:
                break
            yield connection


def client_network(client: tuple[str, int] | str | None) -> str:
    """What counts as one client: an IPv4 address, or the IPv6 network of 64 bits that one host usually has.

    >>> client_network(("2001:db8::1", 80)), client_network(("::ffff:192.0.2.1", 80))
    ('2001:db8::/64', '192.0.2.1')
    """
    if not isinstance(client, tuple):  # a Unix socket
        return ""
    if ":" not in client[0]:
        return client[0]
    address = ipaddress.IPv6Address(client[0].partition("%")[0])
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def unread_bytes(transport: asyncio.Transport) -> int:
    """Bytes that wait for the client to read, in this process and in the kernel."""
    return transport.get_write_buffer_size() + _kernel_bytes(transport, termios.TIOCOUTQ)


def received_bytes(transport: asyncio.Transport) -> int:
    """Bytes from the client that this process has not read yet."""
    return _kernel_bytes(transport, termios.FIONREAD)


def _kernel_bytes(transport: asyncio.Transport, queue: int) -> int:
    size = struct.pack("i", 0)
    with suppress(OSError, ValueError):  # closed
        size = fcntl.ioctl(transport.get_extra_info("socket").fileno(), queue, size)
    return int(struct.unpack("i", size)[0])


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once, and discard what the client has not read, in the kernel as well."""
    with suppress(OSError, ValueError):  # closed
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
