"""Namespaces are joined by cables, carry frames, and go with whoever holds them."""

import contextlib
import os
import socket
import time

import pytest

from sloop.errors import MachineError
from sloop_systems.netnn.namespaces import CableEnd, FabricCables, Namespace

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]

FRAME = b"\xff" * 6 + bytes(6) + b"\x88\xb5" + bytes(range(60))


def test_a_frame_crosses_a_cable_and_stays_in_its_namespaces() -> None:
    with Namespace("one") as one, Namespace("two") as two:
        here, there = one.connect(two, ("left", "right"))
        with (
            contextlib.closing(one.packet_socket(here)) as sender,
            contextlib.closing(two.packet_socket(there, receive_bytes=1 << 16)) as receiver,
        ):
            sender.send(FRAME)
            receiver.settimeout(60)
            assert receiver.recv(2048) == FRAME
        assert "left" not in dict(socket.if_nameindex()).values()
        assert [name for _, name in two.within(socket.if_nameindex)] == ["lo", "right"]


def test_devices_go_with_the_namespace() -> None:
    name = f"slg{os.getpid()}"
    with Namespace("own", own=True) as own:
        with Namespace("gone") as gone:
            own.connect(gone, (name, "peer"))
            assert name in dict(socket.if_nameindex()).values()
        give_up = time.monotonic() + 60
        while name in dict(socket.if_nameindex()).values():
            assert time.monotonic() < give_up
            time.sleep(0.01)


def test_a_cable_that_cannot_be_laid_says_between_what() -> None:
    with Namespace("one") as one, Namespace("two") as two:
        one.connect(two, ("left", "right"))
        with pytest.raises(MachineError, match=r"(?s)cannot lay a cable from one to two: File exists"):
            one.connect(two, ("left", "other"))


def test_the_paper_s_fabric_has_18_switches_and_58_links(monkeypatch: pytest.MonkeyPatch) -> None:
    laid: list[tuple[CableEnd, CableEnd]] = []
    connect = Namespace.connect

    def counted(*arguments: object, **options: object) -> tuple[CableEnd, CableEnd]:
        laid.append(connect(*arguments, **options))  # type: ignore[arg-type]
        return laid[-1]

    monkeypatch.setattr(Namespace, "connect", counted)
    with contextlib.ExitStack() as opening:
        wiring = FabricCables(opening, [("conv1", 4), ("conv2", 4), ("dense1", 4), ("dense2", 4), ("dense3", 1)])
        assert len(laid) == 58
        assert 1 + sum(map(len, wiring.layers)) == 18
        for before, after in zip(wiring.layers, wiring.layers[1:], strict=False):
            for source in before:
                assert len(source.outputs) == len(after)
            assert all(len(node.inputs) == len(before) for node in after)
