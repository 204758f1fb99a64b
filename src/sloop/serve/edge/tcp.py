"""What the kernel knows of TCP connections, and how many of them may wait there."""

import socket
import sys
import time
from typing import Final

from sloop.units import NS_PER_MS, NS_PER_S


def waited_in_kernel_ns(sock: socket.socket) -> int:
    """For how long, at least, the last bytes of a client have been here; 0 if none have come. The kernel counts in its
    ticks (`TICK_NS`)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_BYTES + 8)
    if not any(info[RECEIVED_BYTES : RECEIVED_BYTES + 8]):  # the kernel would say for how long the connection is open
        return 0
    since_ns = int.from_bytes(info[LAST_RECEIVED : LAST_RECEIVED + 4], sys.byteorder) * NS_PER_MS
    return max(0, since_ns - TICK_NS)


def client_has_left(sock: socket.socket) -> bool:
    """Whether the client has closed the connection, or at least sends no more."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED


class Backlog:
    """How many connections may wait in the kernel: `BACKLOG`, but under overload so few that each is accepted while its
    client still waits.

    The kernel hands out the oldest first. A long queue whose clients have given up takes seconds to work through, and
    meanwhile those that come give up too: after one pause, a server would stay overloaded that could serve them.
    """

    def __init__(self) -> None:
        self.size = self._told = BACKLOG

    def was_late(self, sock: socket.socket) -> None:
        """A connection of this listening socket had waited for too long."""
        self._set(sock, self.size // 2)

    def was_early(self, sock: socket.socket) -> None:
        """One was accepted in time."""
        if self.size < BACKLOG:
            self._set(sock, self.size + 1)

    def is_empty(self, sock: socket.socket) -> None:
        """None waits."""
        if self.size < BACKLOG:
            self._set(sock, 2 * self.size)

    def _set(self, sock: socket.socket, size: int) -> None:
        self.size = size = min(max(size, BACKLOG_MIN), BACKLOG)
        is_bound = size in (BACKLOG_MIN, BACKLOG)
        if size != self._told and (is_bound or abs(size - self._told) > self._told // 4):  # it is a system call
            self._told = size
            sock.listen(size)


BACKLOG: Final = 1024
"""Connections that may wait in the kernel; beyond it, TCP tries again after a second."""
BACKLOG_MIN: Final = 16
ESTABLISHED: Final = 1
"""The state of an open connection, `tcpi_state`, the first of `struct tcp_info`."""
LAST_RECEIVED: Final = 52
"""Where `tcpi_last_data_recv` stands in Linux's `struct tcp_info`."""
RECEIVED_BYTES: Final = 128
"""Where `tcpi_bytes_received` stands there, since Linux 4.1."""
CLOCK_MONOTONIC_COARSE: Final = 6
"""Linux's clock that counts ticks, which Python has no name for."""
TICK_NS: Final = round(time.clock_getres(CLOCK_MONOTONIC_COARSE) * NS_PER_S)
"""What comes just before a tick seems to have waited for all of it: 4 ms with most kernels."""


def bind(sock: socket.socket, host: str, port: int) -> None:
    """Bind to an address. Python leaves out the scope of one such as `fe80::1%eth0`, unless it is given as a number."""
    scoped = socket.getaddrinfo(host, port, sock.family, sock.type)[0][4] if "%" in host else None
    sock.bind(scoped or (host, port))
