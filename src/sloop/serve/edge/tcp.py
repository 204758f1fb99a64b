"""What the kernel knows of a TCP connection."""

import socket
import sys
import time
from typing import Final

from sloop.units import NS_PER_MS, NS_PER_S


def waited_in_kernel_ns(sock: socket.socket) -> int:
    """How long ago, at least, the last bytes came from a client; 0 if none has. The kernel counts its ticks."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_BYTES + 8)
    if not any(info[RECEIVED_BYTES : RECEIVED_BYTES + 8]):  # it tells for how long the connection is open then
        return 0
    since_ns = int.from_bytes(info[LAST_RECEIVED : LAST_RECEIVED + 4], sys.byteorder) * NS_PER_MS
    return max(0, since_ns - TICK_NS)


def client_has_left(sock: socket.socket) -> bool:
    """Whether the client has closed the connection, or at least sends no more."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED


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
