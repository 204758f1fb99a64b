"""A demonstration of detection on the path: a client, a switch and a server, with traffic between them.

With root, three network namespaces are joined by pairs of veth devices, packets are sent as frames, the switch forwards
each frame at once and unchanged, and the neural network runs as programs in the kernel. Without root, the emulator runs
instead, on the same packets at the same virtual times; `LiveReport.runner` says which it was.

Traffic never leaves the namespaces, which are removed afterwards. Its duration and its number of packets are bounded.
"""

import contextlib
import queue
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from sloop.api import quantile
from sloop_systems.netnn.detection import Detector, FeatureEncoding, InferencePoint, flow_name, parse
from sloop_systems.netnn.emulator import run_in_lanes
from sloop_systems.netnn.namespaces import Namespace
from sloop_systems.netnn.program import Program
from sloop_systems.netnn.traffic import ETHERNET, TimedPacket, TrafficFlow, in_order_of_time, mixed
from sloop_systems.netnn.xdp import XdpFabric, why_no_xdp

FLOWS_PER_S: Final = 5.0
"""Of the mix. They have about six inference points each: a third of what programs in the kernel of one core compute."""
PACKETS_MAX: Final = 300_000
POINTS_WAITING_MAX: Final = 256
"""Points that wait for the fabric; more are not classified, and counted."""
TOGETHER: Final = 8
LANES_MAX: Final = 1024
RECEIVE_BYTES: Final = 1 << 25
PACKET_OUTGOING: Final = 4
"""The kind of a frame that a packet socket sees because its own end sent it."""
END_S: Final = 3.0
"""After the last packet, for what is on its way."""


@dataclass(frozen=True, slots=True)
class LiveFlow:
    """A flow as the table of the demonstration shows it."""

    name: str
    label: str
    """What the generator made it as."""
    malicious: bool
    """In truth."""
    verdict: bool
    votes: int
    packets: int
    """At its last vote."""


@dataclass(slots=True)
class LiveReport:
    """What happened."""

    runner: str
    """`kernel`, or `emulator` with the reason why."""
    seconds: float
    sent: int = 0
    received: int = 0
    unchanged: bool = False
    """Whether the server got exactly the bytes that the client sent; in another order is fine."""
    counts: dict[str, int] = field(default_factory=dict)
    flows: list[LiveFlow] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)
    """From a packet's arrival at the switch to the vote on it; modelled, if emulated."""
    cpu_share: float = 0.0
    """CPU time of the whole process, its traffic included, by time; 1 is one core."""

    @property
    def right(self) -> float:
        """The share of the flows that are judged correctly."""
        return sum(flow.verdict == flow.malicious for flow in self.flows) / max(1, len(self.flows))

    def delay_ms(self, share: float) -> float:
        """A quantile of the delays; 0 without any."""
        return quantile(sorted(self.delays_ms), share) if self.delays_ms else 0.0


Watch = Callable[[float, LiveReport], None]
"""Gets the seconds so far and the report as it is."""


def demonstrate(
    program: Program,
    encoding: FeatureEncoding,
    *,
    seconds: float,
    seed: int,
    kernel: bool | None = None,
    watch: Watch | None = None,
) -> LiveReport:
    """Send mixed traffic for `seconds` through the fabric. `kernel`: None uses it if this machine can; True raises
    MachineError if it cannot."""
    flows = list(mixed(seed, max(1, round(FLOWS_PER_S * seconds)), over_s=seconds))
    packets = [packet for packet in in_order_of_time(flows) if packet.time_us < seconds * 1e6][:PACKETS_MAX]
    why = "" if kernel else "it was asked for" if kernel is False else why_no_xdp()
    report = LiveReport(f"emulator ({why})" if why else "kernel", seconds)
    truth = {key: flow for flow in flows if (key := _key_of(flow))}
    detector = Detector(lambda rows: [], encoding)
    if why:
        _emulate(program, encoding, packets, detector, report, watch)
    else:
        _LiveSwitch(program, encoding, packets, detector, report, truth, watch).run()
    report.flows, report.counts = _flows(detector, truth), detector.counts | report.counts
    return report


def _key_of(flow: TrafficFlow) -> bytes:
    parsed = parse(flow.heads[0].tobytes())
    return b"" if isinstance(parsed, str) else parsed.key


def _flows(detector: Detector, truth: dict[bytes, TrafficFlow]) -> list[LiveFlow]:
    return [
        LiveFlow(flow_name(key), flow.label, flow.malicious, votes.malicious, len(votes.logits), votes.last_n)
        for key, votes in list(detector.verdicts.items())
        if (flow := truth.get(key)) is not None
    ]


# Emulated


def _emulate(
    program: Program,
    encoding: FeatureEncoding,
    packets: Sequence[TimedPacket],
    detector: Detector,
    report: LiveReport,
    watch: Watch | None,
) -> None:
    began, used = time.monotonic(), time.process_time()
    table = detector.table
    points = [point for packet in packets if (point := table.observe(packet)) is not None]
    report.sent = report.received = len(packets)
    report.unchanged = True  # nothing stands between the two
    for start in range(0, len(points), LANES_MAX):
        part = points[start : start + LANES_MAX]
        logits = run_in_lanes(program, encoding.rows(part))[0]
        detector.vote(part, [int(each) for each in logits[:, 0]])
        report.delays_ms += [program.time.latency_ns / 1e6] * len(part)
        if watch is not None:
            report.counts = detector.counts
            watch(report.seconds * (start + len(part)) / len(points), report)
    report.cpu_share = (time.process_time() - used) / max(1e-9, time.monotonic() - began)


# Real


class _LiveSwitch:
    """Client, switch and server in namespaces, each with a thread of this process; the fabric with another."""

    def __init__(
        self,
        program: Program,
        encoding: FeatureEncoding,
        packets: Sequence[TimedPacket],
        detector: Detector,
        report: LiveReport,
        truth: dict[bytes, TrafficFlow],
        watch: Watch | None,
    ) -> None:
        self._program, self._encoding, self._packets = program, encoding, packets
        self._detector, self._report, self._truth, self._watch = detector, report, truth, watch
        self._points: queue.Queue[tuple[InferencePoint, float]] = queue.Queue(POINTS_WAITING_MAX)
        self._ended = threading.Event()
        self._sent_sum = self._received_sum = 0
        self._refused = 0

    def run(self) -> None:
        """Everything, from building to tearing down."""
        with contextlib.ExitStack() as opened:
            fabric = opened.enter_context(XdpFabric(self._program))
            client, switch, server = (opened.enter_context(Namespace(name)) for name in ("client", "switch", "server"))
            client_end, inward = client.connect(switch, ("client", "inward"))
            outward, server_end = switch.connect(server, ("outward", "server"))
            # Sockets before threads: what is sent before one is there is lost.
            sockets = [
                opened.enter_context(contextlib.closing(end.namespace.packet_socket(end, receive_bytes=RECEIVE_BYTES)))
                for end in (client_end, inward, outward, server_end)
            ]
            began, used = time.monotonic(), time.process_time()
            with ThreadPoolExecutor(3) as threads:
                running = [
                    threads.submit(self._serve, sockets[3]),
                    threads.submit(self._switch, sockets[1], sockets[2]),
                    threads.submit(self._infer, fabric),
                ]
                try:
                    self._send(sockets[0])
                    time.sleep(min(END_S, 0.2 + self._report.seconds / 10))
                finally:
                    self._ended.set()
                for each in running:
                    each.result()
            self._report.cpu_share = (time.process_time() - used) / (time.monotonic() - began)
        self._report.unchanged = self._report.sent == self._report.received and self._sent_sum == self._received_sum
        self._report.counts = {"no_slot": self._refused}

    def _send(self, client: socket.socket) -> None:
        begun, reported_s = time.monotonic(), 0.0
        for packet in self._packets:
            wait_s = begun + packet.time_us / 1e6 - time.monotonic()
            if wait_s > 0.001:
                time.sleep(wait_s)
            frame = ETHERNET + packet.data
            client.send(frame)
            self._report.sent += 1
            self._sent_sum += zlib.crc32(frame)
            now_s = time.monotonic() - begun
            if self._watch is not None and now_s - reported_s > 0.5:
                reported_s = now_s
                self._report.flows = _flows(self._detector, self._truth)
                self._watch(now_s, self._report)

    def _switch(self, source: socket.socket, target: socket.socket) -> None:
        """Forward each frame at once; then look at it."""
        for frame in self._frames(source):
            target.send(frame)
            arrived = time.monotonic()
            point = self._detector.table.observe(TimedPacket(round(arrived * 1e6), frame[len(ETHERNET) :]))
            if point is not None:
                try:
                    self._points.put_nowait((point, arrived))
                except queue.Full:
                    self._refused += 1

    def _frames(self, source: socket.socket) -> Iterator[bytes]:
        """Frames until the end; those that this end sent itself are left out."""
        source.settimeout(0.1)
        while True:
            try:
                frame, sender = source.recvfrom(1 << 16)
            except TimeoutError:
                if self._ended.is_set():
                    return
                continue
            if sender[2] != PACKET_OUTGOING and frame[12:14] == ETHERNET[12:14]:
                yield frame

    def _infer(self, fabric: XdpFabric) -> None:
        while True:
            waiting: list[tuple[InferencePoint, float]] = []
            with contextlib.suppress(queue.Empty):
                waiting.append(self._points.get(timeout=0.1))
                while len(waiting) < TOGETHER:
                    waiting.append(self._points.get_nowait())
            if not waiting:
                if self._ended.is_set():
                    return
                continue
            points = [point for point, _ in waiting]
            verdicts = fabric.run(self._encoding.rows(points))
            now = time.monotonic()
            logits = [None if each.logits is None else int(each.logits[0]) for each in verdicts]
            self._detector.vote(points, logits)
            self._report.delays_ms += [(now - arrived) * 1e3 for _, arrived in waiting]

    def _serve(self, server: socket.socket) -> None:
        for frame in self._frames(server):
            self._report.received += 1
            self._received_sum += zlib.crc32(frame)
