"""Switches as network namespaces of this process, joined by cables: pairs of veth devices, made through rtnetlink.

A namespace has no name and no process of its own: this process holds it by a file descriptor. So the kernel removes it,
with its devices, as soon as this process ends, however it ends. Linux only; needs root.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self, TypeVar

from sloop.api import MachineError

T = TypeVar("T")

NEW_NETWORK: Final = 0x40000000
OWN_NAMESPACE: Final = "/proc/thread-self/ns/net"
MTU: Final = 1500
WAIT_S: Final = 30.0
"""For what takes the kernel a millisecond, if the machine is busy."""
OWN_DEVICES: Final = 1 << 20
BUFFER_FORCED: Final = getattr(socket, "SO_RCVBUFFORCE", 33)
FRAMES_OF_EVERY_KIND: Final = 0x0003

_NEW_LINK, _GET_LINK, _ERROR = 16, 18, 2
_REQUEST, _ACKNOWLEDGE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_NAME, _MTU, _QUEUE, _LINK_INFO, _NAMESPACE = 3, 4, 6, 18, 28
_INFO_KIND, _INFO_DATA, _PEER = 1, 2, 1
_UP: Final = 1

_libc: Final = ctypes.CDLL(None, use_errno=True)


class CableEnd(NamedTuple):
    """One end of a cable."""

    namespace: "Namespace"
    device: int
    """Its number in its namespace."""
    name: str


class Namespace:
    """A network of its own, without devices at first."""

    def __init__(self, name: str, *, own: bool = False) -> None:
        """`own`: the network that this thread is in, instead of a new one. MachineError without the rights."""
        self.name = name
        # The first is the loopback device; this process's own network may have others.
        self._numbers = itertools.count(OWN_DEVICES if own else 2)
        self._descriptor = -1
        self._netlink: socket.socket | None = None
        if own:
            self._open()
        else:
            _in_thread(self._make)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives it back: the kernel removes it and its devices unless it was this process's own. A second call does
        nothing."""
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def within(self, call: Callable[[], T]) -> T:
        """What `call` returns in a thread inside this namespace. Sockets and links made there belong to it."""

        def entered() -> T:
            _libc_call("setns", self._descriptor, NEW_NETWORK)
            return call()

        return _in_thread(entered)

    def packet_socket(self, cable: CableEnd, *, receive_bytes: int = 0) -> socket.socket:
        """A socket that sends frames at one end of a cable, and receives if it has a buffer of so many bytes."""
        assert cable.namespace is self, f"{cable.name} is not in {self.name}"

        def made() -> socket.socket:
            end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            if receive_bytes:
                with contextlib.suppress(OSError):  # limited by the system without CAP_NET_ADMIN
                    end.setsockopt(socket.SOL_SOCKET, BUFFER_FORCED, receive_bytes)
            end.bind((cable.name, FRAMES_OF_EVERY_KIND if receive_bytes else 0))
            return end

        return self.within(made)

    def connect(self, other: "Namespace", names: tuple[str, str], *, mtu: int = MTU) -> tuple[CableEnd, CableEnd]:
        """Lays a cable from here to another namespace, or to this one; both ends are up. MachineError if refused."""
        here, there = CableEnd(self, next(self._numbers), names[0]), CableEnd(other, next(other._numbers), names[1])
        peer = _interface(there.device) + _attribute(_NAME, _text(there.name)) + _attribute(_MTU, struct.pack("I", mtu))
        peer += _attribute(_NAMESPACE, struct.pack("I", other._descriptor))
        information = _attribute(_INFO_KIND, b"veth") + _attribute(_INFO_DATA, _attribute(_PEER, peer))
        body = _interface(here.device) + _attribute(_NAME, _text(here.name)) + _attribute(_MTU, struct.pack("I", mtu))
        what = f"lay a cable from {self.name} to {other.name}"
        self._request(_CREATE | _EXCLUSIVE, body + _attribute(_LINK_INFO, information), what)
        for end in (here, there):
            end.namespace._request(0, _interface(end.device, flags=_UP, change=_UP), f"switch {end.name} on")
        for end in (here, there):
            end.namespace._await_queue(end)
        return here, there

    def _make(self) -> None:
        _libc_call("unshare", NEW_NETWORK)
        for kind in ("default", "all"):  # IPv6 announces devices by itself
            with contextlib.suppress(OSError):
                Path(f"/proc/sys/net/ipv6/conf/{kind}/disable_ipv6").write_text("1")
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(OWN_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)  # of the namespace it was made in
        self._netlink.bind((0, 0))

    def _await_queue(self, end: CableEnd) -> None:
        """The kernel gives the end that was switched on first its queue a little later, and until then loses what is
        sent there."""
        assert self._netlink is not None
        give_up = time.monotonic() + WAIT_S
        while True:
            body = _interface(end.device)
            self._netlink.send(struct.pack("=IHHII", 16 + len(body), _GET_LINK, _REQUEST, 1, 0) + body)
            if _attributes(self._netlink.recv(1 << 16)[32:]).get(_QUEUE, b"noop\0") != b"noop\0":
                return
            if time.monotonic() > give_up:
                raise MachineError(f"{end.name} in {self.name} got no queue in {WAIT_S:g} s", help="try again")
            time.sleep(0.0005)

    def _request(self, flags: int, body: bytes, what: str) -> None:
        assert self._netlink is not None, f"{self.name} is closed"
        header = struct.pack("=IHHII", 16 + len(body), _NEW_LINK, _REQUEST | _ACKNOWLEDGE | flags, 1, 0)
        self._netlink.send(header + body)
        answer = self._netlink.recv(1 << 16)
        _, kind, _, _, _, code = struct.unpack_from("=IHHIIi", answer)
        assert kind == _ERROR, f"rtnetlink answered with {kind}"
        if code:
            raise _refusal(what, -code)


def _interface(device: int, *, flags: int = 0, change: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, device, flags, change)


def _attribute(kind: int, value: bytes) -> bytes:
    """`struct rtattr` and its value, padded to four bytes."""
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(content: bytes) -> dict[int, bytes]:
    """The attributes of an answer, those inside others left as they are."""
    found, place = {}, 0
    while place + 4 <= len(content):
        length, kind = struct.unpack_from("=HH", content, place)
        found[kind] = content[place + 4 : place + length]
        place += max(-(-length // 4) * 4, 4)
    return found


def _text(name: str) -> bytes:
    assert len(name) < 16, f"device name {name!r} has more than 15 characters"
    return name.encode() + b"\0"


def _libc_call(name: str, *arguments: int) -> None:
    if not hasattr(_libc, name):
        raise MachineError(f"this system has no {name}", help="needs Linux; elsewhere use the emulator")
    if getattr(_libc, name)(*arguments) != 0:
        raise _refusal(f"{name} a network namespace", ctypes.get_errno())


def _refusal(what: str, code: int) -> MachineError:
    fix = "needs root; without it use the emulator" if code == errno.EPERM else "needs Linux with veth devices"
    return MachineError(f"cannot {what}: {os.strerror(code)}", help=fix)


def _in_thread(call: Callable[[], T]) -> T:
    """What a call returns in a thread of its own, whose namespace ends with it."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(call).result()


@dataclass(eq=False)
class UnitCables:
    """One unit of a fabric: its namespace and its cables."""

    namespace: Namespace
    inputs: list[CableEnd] = field(default_factory=list)
    sources: list[CableEnd] = field(default_factory=list)
    """The other ends of the inputs."""
    outputs: list[CableEnd] = field(default_factory=list)
    """To every unit of the next layer, or to the host."""


class FabricCables:
    """Namespaces and cables of a fabric: host, feature extractor, the units of each layer, and back to the host; every
    unit of a layer has a cable to every unit of the next. 58 cables for the network of the paper."""

    def __init__(self, opening: contextlib.ExitStack, layers: Sequence[tuple[str, int]], *, mtu: int = MTU) -> None:
        """`layers`: name and number of units of each. `mtu`: of the first cable, on which rows come. What is made is
        closed by `opening`. MachineError without the rights."""

        def namespace(name: str) -> Namespace:
            return opening.enter_context(Namespace(name))

        self.host, self.features = namespace("host"), namespace("features")
        self.layers = [[UnitCables(namespace(f"{name}.{number}")) for number in range(count)] for name, count in layers]
        self.rows, self.features_in = self.host.connect(self.features, ("rows", "in"), mtu=mtu)
        self.features_out = [_join(self.features, node, number) for number, node in enumerate(self.layers[0])]
        for before, after in itertools.pairwise(self.layers):
            for source in before:
                source.outputs += [_join(source.namespace, node, number) for number, node in enumerate(after)]
        self.verdicts: list[CableEnd] = []
        for number, node in enumerate(self.layers[-1]):
            out, sink = node.namespace.connect(self.host, ("out", f"verdicts{number}"))
            node.outputs.append(out)
            self.verdicts.append(sink)


def _join(source: Namespace, node: UnitCables, number: int) -> CableEnd:
    """Lays a cable to a unit and returns the end at the source."""
    out, into = source.connect(node.namespace, (f"out{number}", f"in{len(node.inputs)}"))
    node.inputs.append(into)
    node.sources.append(out)
    return out
