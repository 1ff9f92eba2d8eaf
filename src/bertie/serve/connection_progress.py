"""What a connection waits for, and whether its client is fast enough: the part of a protocol that measures progress."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod

from bertie.serve.api_errors import ApiError
from bertie.serve.connections import Connections, State, reset, unread_bytes
from bertie.serve.exchange import Exchange

PROBE = b"HTTP/1.1 "  # sent ahead of a reply to see whether a half-closed client is still there
PROBE_SECONDS = 0.3


class MonitoredProtocol(asyncio.Protocol):
    """A connection as `Connections` counts it and drops it."""

    transport: asyncio.Transport

    def __init__(self, connections: Connections) -> None:
        self._connections, self._limits = connections, connections.limits
        self.address = ""
        self.state = State.RECEIVING
        self.mark = 0.0  # time of the last progress
        self.counted = False
        self.held = 0  # bytes of requests
        self.unsent = 0  # bytes of replies
        self._read_paused = self._write_paused = False
        self._active: Exchange | None = None  # the latest request that was started
        self._began = 0.0  # time when the headers, the body or the reply began
        self._in_message = self._in_headers = False  # part of a request has arrived
        self._phase_began = False  # since the last call of `_update`
        self._progress = 0  # bytes received since `mark`; while sending: bytes unread at `mark`
        self._failed = self._eof = self._probed = False

    @abstractmethod
    def _refuse(self, error: ApiError) -> None:
        """Answer a request that has not arrived completely, and close the connection."""

    @abstractmethod
    def shutdown(self) -> None:
        """Close the connection, after the reply if a request is being answered or has begun to arrive."""

    def abort(self, reason: str) -> None:
        """Close the connection at once, and discard what the client has not read, in the kernel as well."""
        self._connections.dropped[reason] += 1
        reset(self.transport)
        self._connections.remove(self)

    def evict(self, reason: str) -> None:
        """Close the connection in favour of others."""
        if self.state is State.SENDING:
            self.abort(reason)
        elif self.state is State.IDLE:
            self._connections.dropped[reason] += 1
            self.transport.close()
        else:
            self.drop(reason, "the request arrived too slowly for a server without free connections")

    def drop(self, reason: str, message: str, code: str = "request_timeout") -> None:
        """Refuse a request that has not arrived completely."""
        self._connections.dropped[reason] += 1
        self._refuse(ApiError(code, message, retry_after=1.0))

    def check(self) -> None:
        """Drop the connection if its client is too slow; called several times a second."""
        limits, now = self._limits, self._connections.now
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        self._update()
        stalled = now - self.mark >= limits.grace_seconds
        if self.state is State.SENDING:
            size = unread_bytes(self.transport)
            if size > self._progress or self._progress - size >= limits.quantum:
                self._progress = size
                self._connections.move(self, State.SENDING)
            elif stalled or now - self._began >= limits.write_seconds:
                self.abort("write_timeout")
        elif self.state is State.RECEIVING and not self._failed:
            self._check_receiving(stalled, now - self._began)
        elif self.state is State.LINGERING:
            if stalled or now - self._began >= limits.read_seconds:
                self.transport.abort()
        elif self.state is State.IDLE:
            if now - self.mark >= limits.idle_seconds:
                self.abort("write_timeout") if unread_bytes(self.transport) else self.transport.close()
        elif self._eof:
            self._probe()

    def _check_receiving(self, stalled: bool, seconds: float) -> None:
        limits = self._limits
        if self._read_paused:  # by the server
            self._connections.move(self, State.RECEIVING)
        elif not self._in_message or self._in_headers:
            if seconds >= limits.header_seconds or (stalled and self._in_message):
                self.drop("header_timeout", f"no headers arrived within {limits.header_seconds:g} seconds")
        elif seconds >= limits.read_seconds:
            self.drop("read_timeout", f"the body did not arrive within {limits.read_seconds:g} seconds")
        elif stalled:
            self.drop("read_timeout", f"the body arrived at less than {limits.min_rate:,} bytes per second")

    def _probe(self) -> None:
        """Find out whether a half-closed client is gone: its kernel then resets the connection when a reply begins."""
        if self._active is None or self._active.replied:
            return
        if not self._probed and self._connections.now - self._began >= PROBE_SECONDS:
            self.transport.write(PROBE)
            self._probed = True
        raw = self.transport.get_extra_info("socket")
        if self._probed and raw is not None and raw.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def _update(self) -> None:
        """Note the state of the connection after an event."""
        if self.state is State.LINGERING:
            return
        connections, active = self._connections, self._active
        unsent = self.transport.get_write_buffer_size()
        if not unsent and self.unsent:
            connections.release_reply(self)
        if active is not None and not active.replied and not self._write_paused:
            state = State.RECEIVING if active.more_body else State.BUSY
        elif unsent:
            state = State.SENDING
        elif self._in_message or active is None:
            state = State.RECEIVING
        else:
            state = State.IDLE
        if state is not self.state:
            self._progress = 0
            if state is State.SENDING:
                self._began = connections.now
            connections.move(self, state)
        if state is State.RECEIVING and (self._phase_began or self._progress >= self._limits.quantum):
            if self._phase_began:
                self._began = connections.now
            self._phase_began, self._progress = False, 0
            connections.move(self, state)
