"""Detection on the path, as the first switch does it: flows, inference points, features, votes.

The switch forwards every packet unchanged and keeps a few registers for each flow: the number of packets so far, the
time of the last one, and the shortest and longest gap between two. At packets 1, 2, 4, …, 1024 of a flow (its
*inference points*) it encodes these, and the head of the packet, as the integers that the network takes. The network's
logits come back as votes, and the verdict on the flow is the majority of its votes.

The switch gives no verdict on what it cannot classify, and counts it (`Detector.counts`): packets that are not IP, cut
short, or later fragments; flows whose register another flow holds; inference points without a free slot; lost
inferences.
"""

import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sloop.api import InputError
from sloop_systems.netnn.network import BITS, BYTES, InputRange
from sloop_systems.netnn.traffic import HEAD_BYTES, TCP, UDP, TimedPacket

POINT_MAX: Final = 1024
POINTS: Final = tuple(1 << exponent for exponent in range(POINT_MAX.bit_length()))
"""The packets of a flow at which it is classified: 1, 2, 4, …, 1024."""
GAP_MAX: Final = 2**32 - 1
"""Gaps are 32 bits of microseconds; longer ones saturate."""
KEY_BYTES: Final = 13
FLOWS_MAX: Final = 65_536
IDLE_US: Final = 60_000_000

Rows = NDArray[np.int64]


# Packets.


class ParsedPacket(NamedTuple):
    """What the parser of the switch extracts."""

    key: bytes
    """Addresses, ports, protocol as on the wire, 13 bytes; of an IPv6 address the CRC-32."""
    head: bytes
    """The first 68 bytes from the IP header on, with zeros behind the end of a shorter packet."""
    length: int
    """Bytes from the IP header on, as the header says."""
    ports_at: int
    """Where the ports are in `head`."""


class Unparsed(StrEnum):
    """Why a packet has no flow."""

    NOT_IP = "not_ip"
    CUT_SHORT = "cut_short"
    FRAGMENT = "fragment"
    OTHER_PROTOCOL = "other_protocol"


def parse(data: bytes) -> ParsedPacket | Unparsed:
    """The flow and head of an IPv4 or IPv6 packet that carries TCP or UDP, from its IP header on.

    `CUT_SHORT` if bytes of the head are missing, as in a capture of the first bytes of packets: zeros in their place
    would be other features than a switch sees. What follows the packet in its frame does not belong to the head.
    """
    match data[0] >> 4 if data else 0:
        case 4:
            return _parse_v4(data)
        case 6:
            return _parse_v6(data)
    return Unparsed.NOT_IP


def _parse_v4(data: bytes) -> ParsedPacket | Unparsed:
    ports_at = 4 * (data[0] & 15)
    if ports_at < 20:
        return Unparsed.NOT_IP
    if len(data) < ports_at + 4:
        return Unparsed.CUT_SHORT
    if int.from_bytes(data[6:8]) & 0x1FFF:
        return Unparsed.FRAGMENT  # ports are in the first fragment only
    if data[9] not in (TCP, UDP):
        return Unparsed.OTHER_PROTOCOL
    length = int.from_bytes(data[2:4])
    head = _head(data, length, ports_at + 4)
    if head is None:
        return Unparsed.CUT_SHORT
    ports = data[ports_at : ports_at + 4]
    key = data[12:16] + ports[:2] + data[16:20] + ports[2:] + data[9:10]
    return ParsedPacket(key, head, length, ports_at)


def _parse_v6(data: bytes) -> ParsedPacket | Unparsed:
    if len(data) < 44:
        return Unparsed.CUT_SHORT
    if data[6] not in (TCP, UDP):
        return Unparsed.OTHER_PROTOCOL  # extension headers, among them that of fragments, included
    payload = int.from_bytes(data[4:6])
    head = _head(data, 40 + payload if payload else 0, 44)
    if head is None:
        return Unparsed.CUT_SHORT
    source, target = (zlib.crc32(data[at : at + 16]).to_bytes(4) for at in (8, 24))
    key = source + data[40:42] + target + data[42:44] + data[6:7]
    return ParsedPacket(key, head, 40 + payload, 40)


def _head(data: bytes, length: int, least: int) -> bytes | None:
    """The head of a packet of `length` bytes, 0 if its header leaves that to the network card; None if bytes of it are
    missing."""
    end = min(HEAD_BYTES, length or len(data))
    return None if end < least or len(data) < end else data[:end].ljust(HEAD_BYTES, b"\0")


def flow_name(key: bytes) -> str:
    """`10.0.0.1:5000 → 10.0.0.2:6000 UDP`."""
    source, target = (".".join(map(str, key[at : at + 4])) for at in (0, 6))
    ports = int.from_bytes(key[4:6]), int.from_bytes(key[10:12])
    return f"{source}:{ports[0]} → {target}:{ports[1]} {'TCP' if key[12] == TCP else 'UDP'}"


# The registers of the first switch.


class InferencePoint(NamedTuple):
    """A flow at one of its inference points."""

    key: bytes
    n: int
    """The packet's number in its flow, from 1."""
    head: bytes
    length: int
    ports_at: int
    gap_us: int
    """Since the flow's packet before; 0 at its first."""
    gap_min_us: int
    """0 at the first packet."""
    gap_max_us: int
    time_us: int


@dataclass(slots=True)
class _FlowRegisters:
    key: bytes
    last_us: int
    n: int = 0
    gap_min_us: int = GAP_MAX
    gap_max_us: int = 0


class FlowTable:
    """The flow registers: an array that a hash of the 5-tuple addresses.

    If two flows have the same hash, the second passes unclassified while the first is not idle (`counts["collision"]`).
    InputError if `size` is no power of two.
    """

    def __init__(self, size: int = FLOWS_MAX, *, idle_us: int = IDLE_US, first_point: int = 1) -> None:
        if size < 1 or size & (size - 1):
            raise InputError(f"a flow table of {size} places", help="give a power of two; a switch cannot divide")
        self.counts: Counter[str] = Counter()
        self._mask = size - 1
        self._idle_us = idle_us
        self._first_point = first_point
        self._flows: dict[int, _FlowRegisters] = {}

    def observe(self, packet: TimedPacket) -> InferencePoint | None:
        """Count a packet; returns the inference point, if it is one. Packets may be slightly out of order in time."""
        self.counts["packets"] += 1
        parsed = parse(packet.data)
        if isinstance(parsed, Unparsed):
            self.counts[parsed.value] += 1
            return None
        key, now_us = parsed.key, packet.time_us
        place = zlib.crc32(key) & self._mask
        flow = self._flows.get(place)
        if flow is None or (flow.key != key and now_us - flow.last_us > self._idle_us):
            self.counts["flows"] += 1
            flow = self._flows[place] = _FlowRegisters(key, now_us)
        elif flow.key != key:
            self.counts["collision"] += 1
            return None
        flow.n += 1
        gap_us = min(max(now_us - flow.last_us, 0), GAP_MAX)
        if flow.n > 1:
            flow.gap_min_us = min(flow.gap_min_us, gap_us)
            flow.gap_max_us = max(flow.gap_max_us, gap_us)
        flow.last_us = max(flow.last_us, now_us)
        n = flow.n
        if n > POINT_MAX or n & (n - 1) or n < self._first_point:
            return None
        self.counts["points"] += 1
        least = flow.gap_min_us if n > 1 else 0
        return InferencePoint(
            key, n, parsed.head, parsed.length, parsed.ports_at, gap_us, least, flow.gap_max_us, now_us
        )


# From a point to the integers that a network takes.


class Representation(StrEnum):
    """How a point becomes inputs: each bit one, each byte one, or each field of the headers as a number."""

    BIT = "bit"
    BYTE = "byte"
    BASE10 = "base10"


BASE10_FIELDS: Final = 16


@dataclass(frozen=True, slots=True)
class FeatureEncoding:
    """The inputs of a network: which features, in which representation.

    `identity` includes addresses and ports (and the 5-tuple as a flow identifier): a network that sees them can learn
    who was hostile in training instead of what hostile traffic looks like, so that they are masked unless asked for.
    """

    representation: Representation = Representation.BIT
    identity: bool = False
    flow_features: bool = True
    """The 5-tuple and the gaps; without them the input is the head alone."""
    length: int = 814
    """Inputs, for bits: zeros follow the 712 features. 814 is the geometry of the published program."""

    @property
    def inputs(self) -> int:
        """The number of inputs."""
        match self.representation:
            case Representation.BIT:
                return self.length if self.flow_features else 8 * HEAD_BYTES
            case Representation.BYTE:
                return HEAD_BYTES + (KEY_BYTES + 8 if self.flow_features else 0)
        return BASE10_FIELDS

    @property
    def range(self) -> InputRange:
        """The range of the input values."""
        return BITS if self.representation is Representation.BIT else BYTES

    def rows(self, points: Sequence[InferencePoint]) -> Rows:
        """One row of integers for each point."""
        if not points:
            return np.zeros((0, self.inputs), np.int64)
        return self.from_arrays(points_as_arrays(points))

    def from_arrays(self, points: "PointArrays") -> Rows:
        """As `rows`, for many points at once."""
        heads, keys = points.heads.copy(), points.keys.copy()
        if not self.identity:
            _mask_identity(heads, points.ports_at)
            keys[:, : KEY_BYTES - 1] = 0
        if self.representation is Representation.BASE10:
            return _numbers(points, heads, with_flow=self.flow_features)
        flow = (
            [keys, _big_endian(points.gap_min_us, 4), _big_endian(points.gap_max_us, 4)] if self.flow_features else []
        )
        octets = np.concatenate([heads, *flow], axis=1)
        if self.representation is Representation.BYTE:
            return (octets >> 1).astype(np.int64)
        bits = np.unpackbits(octets, axis=1)
        if bits.shape[1] > self.inputs:
            raise InputError(
                f"{bits.shape[1]} features do not fit into {self.inputs} inputs", help="give a length of 712 or more"
            )
        return np.pad(bits, ((0, 0), (0, self.inputs - bits.shape[1]))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class PointArrays:
    """Inference points as arrays, one element or row for each."""

    keys: NDArray[np.uint8]
    heads: NDArray[np.uint8]
    ports_at: Rows
    lengths: Rows
    gaps_us: Rows
    gap_min_us: Rows
    gap_max_us: Rows
    n: Rows


def points_as_arrays(points: Sequence[InferencePoint]) -> PointArrays:
    """The same points as arrays."""
    numbers = np.array([(p.ports_at, p.length, p.gap_us, p.gap_min_us, p.gap_max_us, p.n) for p in points], np.int64)
    keys = np.frombuffer(b"".join(p.key for p in points), np.uint8).reshape(len(points), KEY_BYTES)
    heads = np.frombuffer(b"".join(p.head for p in points), np.uint8).reshape(len(points), HEAD_BYTES)
    return PointArrays(keys, heads, *numbers.T)


def _mask_identity(heads: NDArray[np.uint8], ports_at: Rows) -> None:
    """Zeroes addresses and ports."""
    is_v6 = (heads[:, 0] >> 4) == 6
    heads[~is_v6, 12:20] = 0
    heads[is_v6, 8:40] = 0
    for offset in range(4):
        heads[np.arange(len(heads)), ports_at + offset] = 0


def _big_endian(values: Rows, size: int) -> NDArray[np.uint8]:
    shifts = 8 * np.arange(size)[::-1]
    return (values[:, None] >> shifts & 0xFF).astype(np.uint8)


def _numbers(points: PointArrays, heads: NDArray[np.uint8], *, with_flow: bool) -> Rows:
    """The fields of the headers as numbers, each divided by a power of two so that its largest is 127."""

    def number(at: int, size: int) -> Rows:
        wide = heads[:, at : at + size].astype(np.int64)
        return np.asarray((wide << 8 * np.arange(size)[::-1]).sum(axis=1))

    columns = [
        *(number(2, 2) >> 9, number(4, 2) >> 9, number(1, 1) >> 1, number(8, 1) >> 1, number(9, 1) >> 1),
        *(number(12, 4) >> 25, number(16, 4) >> 25, number(20, 2) >> 9, number(22, 2) >> 9, number(24, 2) >> 9),
        np.minimum(points.lengths >> 4, 127),
    ]
    if with_flow:
        # Milliseconds up to 8 s: as microseconds of 32 bits, divided by 2^25, nearly every gap would be 0.
        columns += [np.minimum(gaps >> 16, 127) for gaps in (points.gap_min_us, points.gap_max_us)]
    rows = np.zeros((len(heads), BASE10_FIELDS), np.int64)
    rows[:, : len(columns)] = np.stack(columns, axis=1)
    return rows


# Votes.


def vote(logits: Sequence[float]) -> bool:
    """Whether a flow with these logits is malicious: by majority; at a tie, by the sign of their sum."""
    doubled = 2 * sum(logit >= 0 for logit in logits)
    return doubled > len(logits) or (doubled == len(logits) and sum(logits) >= 0)


@dataclass(slots=True)
class FlowVotes:
    """What is known of a flow so far."""

    key: bytes
    logits: list[int] = field(default_factory=list)
    last_n: int = 0
    """The packet of the flow that was classified last."""
    last_us: int = 0

    @property
    def malicious(self) -> bool:
        """By the votes so far."""
        return vote(self.logits)

    @property
    def margin(self) -> float:
        """From 0 (the votes are even) to 1 (all agree). A larger model may judge flows with a small margin."""
        return abs(2 * sum(logit >= 0 for logit in self.logits) - len(self.logits)) / max(1, len(self.logits))


Infer = Callable[[Rows], Sequence[int | None]]
"""Logits for rows; None where an inference was lost or not admitted, which is no vote."""


class Detector:
    """The first switch with the network behind it: packets in, verdicts of flows out.

    At most `flows_max` verdicts are kept; the one whose flow was classified longest ago is forgotten.
    """

    def __init__(
        self,
        infer: Infer,
        encoding: FeatureEncoding,
        *,
        table: FlowTable | None = None,
        together: int = 64,
        flows_max: int = FLOWS_MAX,
    ) -> None:
        self.verdicts: OrderedDict[bytes, FlowVotes] = OrderedDict()
        self.table = table or FlowTable()
        self._infer = infer
        self._encoding = encoding
        self._together = together
        self._flows_max = flows_max
        self._waiting: list[InferencePoint] = []
        self._lost = 0

    @property
    def counts(self) -> dict[str, int]:
        """Packets, flows, inference points and votes, and everything that was not classified, with its reason."""
        votes = self.table.counts["points"] - self._lost - len(self._waiting)
        return {**self.table.counts, "votes": votes, "without_verdict": self._lost}

    def observe(self, packet: TimedPacket) -> list[FlowVotes]:
        """Take a packet; returns the verdicts that changed, possibly those of earlier inference points."""
        point = self.table.observe(packet)
        if point is not None:
            self._waiting.append(point)
        return self.flush() if len(self._waiting) >= self._together else []

    def flush(self) -> list[FlowVotes]:
        """Classify the waiting inference points; returns the verdicts that changed."""
        points, self._waiting = self._waiting, []
        return self.vote(points, self._infer(self._encoding.rows(points))) if points else []

    def vote(self, points: Sequence[InferencePoint], logits: Sequence[int | None]) -> list[FlowVotes]:
        """Count logits of inference points as votes, and None as lost; returns the verdicts that changed."""
        changed: list[FlowVotes] = []
        for point, logit in zip(points, logits, strict=True):
            if logit is None:
                self._lost += 1
                continue
            verdict = self.verdicts.get(point.key)
            if verdict is None or point.n <= verdict.last_n:  # a new flow with the addresses of an old one
                verdict = self.verdicts[point.key] = FlowVotes(point.key)
            verdict.logits.append(int(logit))
            verdict.last_n, verdict.last_us = point.n, point.time_us
            self.verdicts.move_to_end(point.key)
            changed.append(verdict)
        while len(self.verdicts) > self._flows_max:
            self.verdicts.popitem(last=False)
        return changed

    def run(self, packets: Iterable[TimedPacket]) -> Iterator[FlowVotes]:
        """Take all packets; yields each verdict when it changes."""
        for packet in packets:
            yield from self.observe(packet)
        yield from self.flush()


def infer_with(network: Any) -> Infer:  # noqa: ANN401  # whatever has the `run` of a Network
    """The reference as an `Infer`: it loses no inference."""

    def infer(rows: Rows) -> list[int | None]:
        return [int(logit) for logit in network.run(rows)[:, 0]]

    return infer
