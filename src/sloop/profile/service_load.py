"""A stand-in for the clients and the edge that share the machine with a replica in service.

A model measured on an otherwise idle machine is faster than it will be in service: there, the process that waits for
its answer also parses requests, and clients on the same machine send them. So while a profile is measured, a second
process, `python -m sloop.profile.service_load PORT`, sends HTTP requests over loopback connections at the rate that the
replica could serve, and the measuring process answers them in the same loop in which it waits for the replica, as the
server does. Requests are open loop, but each connection has at most one outstanding request, so that a slow machine is
not flooded.

The client process reads lines `RATE_RPS BODY_BYTES` from stdin and ends when stdin is closed; a rate of 0 pauses it.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from random import Random
from time import perf_counter_ns, process_time_ns
from typing import Final

import msgspec

from sloop.machine import cpu_ns_of
from sloop.units import NS_PER_S

CONNECTIONS: Final = 8
"""Also the limit of outstanding requests: one per connection."""
RATE_RPS_MAX: Final = 400.0
BYTES_PER_S_MAX: Final = 150e6
"""Limits of the stand-in: it must share the machine, not saturate it."""
HEAD_END: Final = b"\r\n\r\n"
STDIN: Final = 0
CHUNK_BYTES: Final = 1 << 18
ANSWER: Final = msgspec.json.encode(
    {"model_name": "m", "outputs": [{"name": "y", "datatype": "FP32", "data": [0.1] * 10}]}
)


class ServiceLoad:
    """The edge's side of the stand-in: answers the clients while the caller waits for a replica."""

    def __init__(self, process: "subprocess.Popen[bytes]", connections: Sequence[socket.socket]) -> None:
        self._process = process
        self._selector = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytearray] = {}
        self.answered = 0
        for connection in connections:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._received[connection] = bytearray()

    def set_rate(self, rate_rps: float, body_bytes: int) -> float:
        """Set the clients' request rate and body size; returns the rate after the limits."""
        rate_rps = min(rate_rps, RATE_RPS_MAX, BYTES_PER_S_MAX / max(1, body_bytes))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the clients died; the measurement continues without them
            self._process.stdin.write(f"{rate_rps} {body_bytes}\n".encode())
            self._process.stdin.flush()
        return rate_rps

    def cpu_ns(self) -> int:
        """The processor time that both sides have taken: the clients, and this process, which answers them."""
        return process_time_ns() + cpu_ns_of(self._process.pid)

    def wait_for(self, sock: socket.socket, timeout_s: float) -> None:
        """Answer requests until `sock` is readable. TimeoutError after `timeout_s`."""
        self._selector.register(sock, selectors.EVENT_READ)
        end_ns = perf_counter_ns() + round(timeout_s * NS_PER_S)
        try:
            while not self._serve(end_ns, sock):
                if perf_counter_ns() >= end_ns:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
        finally:
            self._selector.unregister(sock)

    def serve_until(self, end_ns: int) -> None:
        """Answer requests until this time of `perf_counter_ns`."""
        while perf_counter_ns() < end_ns:
            self._serve(end_ns)

    def _serve(self, end_ns: int, awaited: socket.socket | None = None) -> bool:
        """Wait for bytes and answer complete requests; True if `awaited` became readable."""
        found = False
        for key, _ in self._selector.select(max(0, end_ns - perf_counter_ns()) / NS_PER_S):
            if key.fileobj is awaited:
                found = True
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._receive(key.fileobj)
        return found

    def _receive(self, connection: socket.socket) -> None:
        received = self._received[connection]
        try:
            chunk = connection.recv(CHUNK_BYTES)
            received += chunk
            if chunk and _is_complete(received):
                msgspec.json.decode(bytes(received).partition(HEAD_END)[2].partition(b"\0")[0])
                received.clear()
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)
                self.answered += 1
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._selector.unregister(connection)


def _is_complete(message: bytearray) -> bool:
    head, found, _ = bytes(message[:512]).partition(HEAD_END)
    if not found:
        return False
    length = int(head.rpartition(b"content-length: ")[2])
    return len(message) - len(head) - len(HEAD_END) >= length


@contextlib.contextmanager
def service_load() -> Iterator[ServiceLoad]:
    """Start clients that send nothing until `set_rate`; they stop when the context ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", __name__, str(listener.getsockname()[1])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        connections: list[socket.socket] = []
        try:
            listener.settimeout(30.0)
            connections += [listener.accept()[0] for _ in range(CONNECTIONS)]
            yield ServiceLoad(process, connections)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            for connection in connections:
                connection.close()


def main(arguments: Sequence[str]) -> None:
    """Entry point of the client process: send requests at the current rate until stdin is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which then closes stdin
    connections = [socket.create_connection(("127.0.0.1", int(arguments[0]))) for _ in range(CONNECTIONS)]
    idle, random = list(connections), Random(0)
    rate_rps, message, next_ns = 0.0, b"", 0
    with selectors.DefaultSelector() as selector:
        selector.register(STDIN, selectors.EVENT_READ)
        for connection in connections:
            selector.register(connection, selectors.EVENT_READ)
        while True:
            wait_s = max(0, next_ns - perf_counter_ns()) / NS_PER_S if rate_rps else None
            for key, _ in selector.select(wait_s):
                if key.fileobj == STDIN:
                    orders = os.read(STDIN, 4096).split()
                    if not orders:
                        return
                    rate_rps, message = float(orders[-2]), request_of(int(orders[-1]))
                    next_ns = perf_counter_ns()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    answer = key.fileobj.recv(CHUNK_BYTES)
                    if not answer:
                        return
                    msgspec.json.decode(answer.partition(HEAD_END)[2])
                    idle.append(key.fileobj)
            if rate_rps and perf_counter_ns() >= next_ns:
                next_ns += round(random.expovariate(rate_rps) * NS_PER_S)
                if idle:
                    idle.pop().sendall(message)


def request_of(body_bytes: int) -> bytes:
    """An inference request: a JSON description followed by `body_bytes` of tensor data."""
    described = {"id": "1", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, body_bytes // 4]}]}
    body = msgspec.json.encode(described) + bytes(1 + body_bytes)
    return b"POST /v2/models/m/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body


if __name__ == "__main__":
    main(sys.argv[1:])
