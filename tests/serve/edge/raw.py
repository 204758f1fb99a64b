"""A client that sends bytes as they are, and reads every answer until the server closes."""

import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import pytest

from tests.serve.edge.fakes import Gateway


@dataclass(frozen=True)
class Answer:
    """One answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"])


def one_answer(received: IO[bytes], *, has_body: bool = True) -> Answer:
    """The next answer; fails if there is none."""
    line = received.readline()
    if not line:
        pytest.fail("closed without an answer")
    headers: dict[str, str] = {}
    while (field := received.readline()) not in (b"\r\n", b""):
        name, _, value = field.decode("latin-1").partition(":")
        assert name not in headers, f"{name} twice"
        headers[name] = value.strip()
    status = int(line.split(b" ")[1])
    size = int(headers.get("content-length", 0)) if has_body and status != 204 else 0
    return Answer(status, headers, received.read(size))


def answers_to(
    gateway: Gateway, sent: bytes, *, cut: int = 0, ends: bool = False, timeout_s: float = 10
) -> list[Answer]:
    """All answers to `sent`, sent in pieces of `cut` bytes, 0 for as a whole. With `ends`, the client then ends
    its side. The list is empty if the server closed without one."""
    found: list[Answer] = []
    asked = len(re.findall(rb" HTTP/1\.\d\r?\n", sent))
    with socket.create_connection((gateway.host, gateway.port), timeout=timeout_s) as wire:
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionResetError, BrokenPipeError):
            for at in range(0, len(sent), cut or len(sent)):
                wire.sendall(sent[at : at + (cut or len(sent))])
            if ends:
                wire.shutdown(socket.SHUT_WR)
        received = wire.makefile("rb")
        with suppress(ConnectionResetError, TimeoutError):
            while received.peek(1):
                found.append(one_answer(received))
                if not ends and found[-1].headers.get("connection") != "close" and len(found) >= asked:
                    wire.shutdown(socket.SHUT_WR)
                    ends = True
    return found


def converse(gateway: Gateway, sent: bytes, *, cut: int = 0, ends: bool = False) -> list[Answer]:
    """The same, where at least one answer is due."""
    return answers_to(gateway, sent, cut=cut, ends=ends) or pytest.fail("no answer")
