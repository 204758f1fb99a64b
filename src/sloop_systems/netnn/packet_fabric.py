"""Emulated switches as processes that exchange real packets, to test loss, duplication and reordering.

    with PacketFabric(compile_network(network), faults=Faults(loss=0.001, duplicates=0.2, jitter_ns=5e6)) as fabric:
        verdicts = fabric.run(rows)

Each switch is a network namespace, each link a pair of veth devices, and packets go through AF_PACKET sockets. A
process for each layer executes its units' instructions (`netnn.switch`) on the packets that arrive; this process
is the feature extractor and collects verdicts. The sender of a copy loses, repeats or delays it, as the seed
determines. The order of packets on the machine is not determined, so two runs differ. Each answer equals `Network.run`
bit for bit, or is missing.

It is slow, because Python executes every instruction. Nothing is left when this process ends, however it ends: the
other processes end when their pipe from it breaks. Linux only; needs root.
"""

import contextlib
import heapq
import itertools
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from sloop.api import InputError, MachineError
from sloop.api.experiments import stream
from sloop_systems.netnn.emulator import Faults, emitted
from sloop_systems.netnn.namespaces import FabricCables
from sloop_systems.netnn.network import Ints
from sloop_systems.netnn.packets import packets_of
from sloop_systems.netnn.program import Program
from sloop_systems.netnn.requester import ETHERNET, FRAME_MAX, RealFabric, Requester
from sloop_systems.netnn.switch import Pipeline, UnitCounts

TIMEOUT_S: Final = 10.0
"""After which an inference without a verdict is aborted. Python needs 0.1 ms for a packet."""
RECEIVE_BYTES: Final = 1 << 25
CLOSE_S: Final = 10.0


class FaultyLinks:
    """Sends copies of packets, and loses, repeats and delays them."""

    def __init__(self, faults: Faults, draw: Random) -> None:
        self._faults, self._draw = faults, draw
        self._delayed: list[tuple[int, int, socket.socket, bytes]] = []
        self._numbers = itertools.count()

    def send(self, content: bytes, ends: Sequence[socket.socket]) -> None:
        """One copy to each end, or none, or two, now or later."""
        faults, draw = self._faults, self._draw
        for end in ends:
            for _ in range(1 + (draw.random() < faults.duplicates)):
                if draw.random() < faults.loss:
                    continue
                due_ns = time.monotonic_ns() + int(draw.random() * faults.jitter_ns)
                heapq.heappush(self._delayed, (due_ns, next(self._numbers), end, content))
        self.flush()

    def flush(self) -> int | None:
        """Sends what is due. Milliseconds until more is; None if nothing waits."""
        while self._delayed:
            left_ns = self._delayed[0][0] - time.monotonic_ns()
            if left_ns > 0:
                return int(left_ns / 1e6) + 1
            _, _, end, content = heapq.heappop(self._delayed)
            end.send(ETHERNET + content)
        return None


@dataclass(frozen=True)
class _Layer:
    """What a process gets to know: the units of one layer with the numbers of their sockets."""

    program: Program
    label: int
    inputs: list[list[int]]
    outputs: list[list[int]]
    faults: Faults
    seed: int


class PacketFabric(RealFabric):
    """A compiled network on emulated switches that exchange real packets, for the duration of a `with` block."""

    _timeout_s = TIMEOUT_S

    def __init__(self, program: Program, *, faults: Faults | None = None, seed: int = 0) -> None:
        """InputError for `Faults.lost`: real packets have no numbers by which to lose single copies."""
        super().__init__()
        self._program, self._faults, self._seed = program, faults or Faults(), seed
        if self._faults.lost:
            raise InputError("real packets have no numbers to lose them by", help="give a share, or use the emulator")
        self.counts: list[list[UnitCounts]] = []
        """Of each layer's units, after the fabric has been closed."""

    def _build(self, opening: contextlib.ExitStack) -> None:
        sizes = [(layer.name, len(layer.units)) for layer in self._program.layers]
        wiring = FabricCables(opening, sizes)
        processes: list[subprocess.Popen[bytes]] = []
        for label, nodes in enumerate(wiring.layers):
            with contextlib.ExitStack() as given:
                inputs, outputs = (
                    [
                        [
                            given.enter_context(end.namespace.packet_socket(end, receive_bytes=size))
                            for end in getattr(node, side)
                        ]
                        for node in nodes
                    ]
                    for side, size in (("inputs", RECEIVE_BYTES), ("outputs", 0))
                )
                processes.append(self._start(opening, label, inputs, outputs))
        for label, process in enumerate(processes):
            assert process.stdout
            if process.stdout.readline() != b"ready\n":
                raise MachineError(f"the process of layer {label} did not start", help="see its error above")
        first = [
            opening.enter_context(contextlib.closing(wiring.features.packet_socket(end))) for end in wiring.features_out
        ]
        results = [
            opening.enter_context(contextlib.closing(wiring.host.packet_socket(end, receive_bytes=RECEIVE_BYTES)))
            for end in wiring.verdicts
        ]
        self._links, self._first = FaultyLinks(self._faults, stream(self._seed, "innet/links/features")), first
        self._sending = threading.Condition()
        self._over = False
        sender = threading.Thread(target=self._send_delayed, daemon=True)
        sender.start()
        opening.callback(self._stop, sender)
        self._requester = Requester(self._program, self._begin, results)

    def _start(
        self,
        opening: contextlib.ExitStack,
        label: int,
        inputs: list[list[socket.socket]],
        outputs: list[list[socket.socket]],
    ) -> "subprocess.Popen[bytes]":
        """Starts the process of a layer. It ends when its stdin does."""
        numbers = [[[end.fileno() for end in ends] for ends in side] for side in (inputs, outputs)]
        process = subprocess.Popen(
            [sys.executable, "-m", "sloop_systems.netnn.packet_fabric"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[number for side in numbers for ends in side for number in ends],
        )
        opening.callback(self._end, process)
        assert process.stdin
        layer = _Layer(self._program, label, numbers[0], numbers[1], self._faults, self._seed)
        pickle.dump(layer, process.stdin)
        process.stdin.flush()
        return process

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        try:
            content, _ = process.communicate(timeout=CLOSE_S)
            self.counts.insert(0, pickle.loads(content))
        except (subprocess.TimeoutExpired, EOFError):
            process.kill()
            process.communicate()

    def _begin(self, inference: int, row: Ints) -> None:
        """The feature extractor sends the messages of an inference."""
        with self._sending:
            for packet in packets_of(self._program, row, inference):
                self._links.send(packet.build(), self._first)
            self._sending.notify_all()

    def _send_delayed(self) -> None:
        with self._sending:
            while not self._over:
                left_ms = self._links.flush()
                self._sending.wait(None if left_ms is None else left_ms / 1e3)

    def _stop(self, sender: threading.Thread) -> None:
        with self._sending:
            self._over = True
            self._sending.notify_all()
        sender.join()


def _serve(layer: _Layer) -> list[UnitCounts]:
    """Executes the units of a layer on what arrives, until stdin ends."""
    units = [Pipeline(layer.program, layer.label, unit) for unit in range(len(layer.inputs))]
    links = FaultyLinks(layer.faults, stream(layer.seed, f"innet/links/{layer.label}"))
    outputs = [[_socket(number) for number in numbers] for numbers in layer.outputs]
    inputs = {number: (_socket(number), unit) for unit, numbers in enumerate(layer.inputs) for number in numbers}
    poll = select.poll()
    for number in (sys.stdin.fileno(), *inputs):
        poll.register(number, select.POLLIN)
    while True:
        for number, _ in poll.poll(links.flush()):
            if number not in inputs:
                return [unit.counts for unit in units]
            end, unit = inputs[number]
            content = end.recv(FRAME_MAX)[len(ETHERNET) :]
            for emission in units[unit].receive(content)[0]:
                for packet in emitted(layer.program, layer.label, unit, emission):
                    links.send(packet.build(), outputs[unit])


def _socket(number: int) -> socket.socket:
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0, fileno=number)


def main() -> None:
    """The process of one layer: `_Layer` on stdin, counts on stdout at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns the fabric
    layer = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    counts = _serve(layer)
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(counts, sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
