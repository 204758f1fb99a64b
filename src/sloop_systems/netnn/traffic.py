"""Synthetic traffic: flows of real IPv4 packets from a seed, benign or hostile, to try detection with.

There are two sets. `calls` is a set of covert channels: video calls, half of which carry a tunnel as Facet or
DeltaShaper do. Their differences are drawn packet by packet, with the strengths in `Knobs`. These strengths were
calibrated, so accuracies on this set are tuned, and only their order means anything. `mixed` is the traffic of a link:
the `CLASSES`, with floods and scans beside ordinary use, and calls of both kinds among them.

A packet has a valid header and checksum; its bytes after the first 68 are zero, since nothing reads them. All addresses
are in 10.0.0.0/8. One seed gives the same bytes on every machine: the draws come from NumPy's legacy generator, whose
numbers are frozen (NEP 19).

Sources: the set of covert calls follows Barradas et al. (USENIX Security 2018) for the lengths that betray a tunnel;
packet sizes and timing of the other classes are those that the tools send by default, rounded.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from heapq import merge
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from sloop.api import InputError
from sloop.api.experiments import stream

HEAD_BYTES: Final = 68
"""The first bytes of a packet that detection reads: the longest IPv4 header and a UDP header."""
TCP, UDP = 6, 17
SYN, PUSH, ACK = 2, 8, 16
ETHERNET: Final = bytes.fromhex("0200000000020200000000010800")
"""An Ethernet header with locally administered addresses, for captures and for sending."""

Heads = NDArray[np.uint8]
Whole = NDArray[np.int64]


class TimedPacket(NamedTuple):
    """A packet from its IP header on, and when it came, in microseconds."""

    time_us: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TrafficFlow:
    """The packets of one 5-tuple in one direction, as arrays: `heads` has the first 68 bytes of each."""

    label: str
    """The class, as `CLASSES` names it."""
    malicious: bool
    times_us: Whole
    lengths: Whole
    """Bytes from the IP header on."""
    heads: Heads

    def __len__(self) -> int:
        return len(self.times_us)

    def packets(self) -> Iterator[TimedPacket]:
        """Its packets in order of time."""
        for time_us, length, head in zip(self.times_us.tolist(), self.lengths.tolist(), self.heads, strict=True):
            yield TimedPacket(time_us, head.tobytes()[:length].ljust(length, b"\0"))


def in_order_of_time(flows: Iterable[TrafficFlow]) -> Iterator[TimedPacket]:
    """The packets of all flows, as a link carries them."""
    return merge(*(flow.packets() for flow in flows), key=lambda packet: packet.time_us)


# What a class of traffic looks like.


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A distribution, cut at `least` and `most`. `sigma` is of the logarithm; with 0 it is the median."""

    median: float
    sigma: float = 0.0
    least: float = 0.0
    most: float = 1e12

    def draw(self, random: RandomState, count: int, scale: float = 1.0) -> Whole:
        """`count` whole numbers. `scale` moves the median: what differs between flows of one class."""
        values = self.median * scale * np.exp(self.sigma * random.standard_normal(count))
        return np.clip(np.rint(values), self.least, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """How flows of one kind look. Lengths are bytes from the IP header on, gaps microseconds between packets."""

    malicious: bool
    protocol: int
    ports: tuple[int, int]
    """The range of the destination's port."""
    lengths: tuple[tuple[float, LogNormal], ...]
    """Shares of packets, each with its distribution."""
    gaps_us: LogNormal
    packets: LogNormal
    """Packets of one flow."""
    ttls: tuple[int, ...] = (64, 128)
    """Of the sending machine; hops are taken off."""
    dscps: tuple[int, ...] = (0,)
    opening: tuple[int, ...] = (SYN, ACK)
    """Flags of the first packets (TCP)."""
    flags: tuple[int, ...] = (ACK, ACK | PUSH)
    """Flags of the packets after these, each drawn."""
    windows: tuple[int, ...] = (64240, 65535, 29200, 501)
    timestamps: bool = True
    """Whether TCP carries the options of an ordinary machine; tools that make packets themselves leave them out."""
    payload: str = "random"
    """`random` (encrypted), `rtp`, `dns`, `tls`, `text` or `zero`."""


_MINUTE_US: Final = 60_000_000

CLASSES: Final[Mapping[str, TrafficClass]] = {
    "dns": TrafficClass(
        False, UDP, (53, 53), ((1, LogNormal(68, 0.15, 48, 110)),), LogNormal(900_000, 1.2, 800),
        LogNormal(2, 0.6, 1, 6), payload="dns",
    ),
    "https": TrafficClass(
        False, TCP, (443, 443), ((0.55, LogNormal(52)), (0.3, LogNormal(420, 0.7, 60, 1500)), (0.15, LogNormal(1500))),
        LogNormal(6_000, 1.6, 20), LogNormal(40, 1.0, 6, 1100), payload="tls",
    ),
    "voip": TrafficClass(
        False, UDP, (16_384, 32_767), ((1, LogNormal(200, 0.02, 180, 220)),), LogNormal(20_000, 0.04, 10_000),
        LogNormal(500, 0.6, 100, 1100), dscps=(46, 46, 0), payload="rtp",
    ),
    "ssh": TrafficClass(
        False, TCP, (22, 22), ((0.6, LogNormal(88, 0.2, 52, 200)), (0.4, LogNormal(52))), LogNormal(160_000, 1.1, 300),
        LogNormal(80, 0.8, 12, 600), dscps=(0, 4),
    ),
    "iot": TrafficClass(
        False, UDP, (5683, 5684), ((1, LogNormal(92, 0.25, 40, 200)),), LogNormal(8_000_000, 0.1, 1000),
        LogNormal(12, 0.5, 3, 50), ttls=(64, 255),
    ),
    "syn_flood": TrafficClass(
        True, TCP, (80, 443), ((1, LogNormal(40)),), LogNormal(1), LogNormal(1), ttls=(64, 255), opening=(SYN,),
        windows=(512, 1024, 64), timestamps=False, payload="zero",
    ),
    "udp_flood": TrafficClass(
        True, UDP, (1, 65_535), ((1, LogNormal(540, 0.6, 60, 1500)),), LogNormal(90, 0.5, 5),
        LogNormal(400, 0.6, 60, 1100), payload="zero",
    ),
    "port_scan": TrafficClass(
        True, TCP, (1, 10_000), ((1, LogNormal(44)),), LogNormal(700_000, 0.5, 500), LogNormal(1, 0.35, 1, 2),
        ttls=(37, 44, 52, 59), opening=(SYN, SYN), windows=(1024,), timestamps=False, payload="zero",
    ),
    "ssh_guessing": TrafficClass(
        True, TCP, (22, 22), ((0.5, LogNormal(100, 0.35, 60, 700)), (0.5, LogNormal(52))), LogNormal(9_000, 0.7, 100),
        LogNormal(18, 0.2, 10, 30),
    ),
    "dns_tunnel": TrafficClass(
        True, UDP, (53, 53), ((1, LogNormal(190, 0.2, 110, 290)),), LogNormal(45_000, 0.5, 500),
        LogNormal(200, 0.7, 30, 1100), payload="dns",
    ),
    "slow_http": TrafficClass(
        True, TCP, (80, 80), ((1, LogNormal(66, 0.1, 53, 90)),), LogNormal(7_000_000, 0.2, 1000),
        LogNormal(24, 0.4, 8, 60), flags=(ACK | PUSH,), payload="text",
    ),
    "beacon": TrafficClass(
        True, TCP, (443, 8443), ((1, LogNormal(180, 0.03, 150, 220)),), LogNormal(_MINUTE_US, 0.04, 1000),
        LogNormal(12, 0.4, 5, 40), flags=(ACK | PUSH,), payload="tls",
    ),
}  # fmt: skip
"""Traffic by class, calls aside. What is not said of a class is as in `TrafficClass`."""

CALL, FACET, DELTASHAPER = "call", "facet", "deltashaper"
MIX: Final[Mapping[str, float]] = {
    **{"dns": 4, "https": 5, "voip": 2, "ssh": 2, "iot": 2, CALL: 5},
    **{"syn_flood": 3, "udp_flood": 2, "port_scan": 3, "ssh_guessing": 2, "dns_tunnel": 2, "slow_http": 1},
    **{"beacon": 2, FACET: 2.5, DELTASHAPER: 2.5},
}
"""Shares of the flows of `mixed`, in units of their sum: one half is benign."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """How much covert calls differ from others. The defaults are calibrated (docs/innet.md): for packets alone, trees
    on length and gap reach about 58 %, the network on raw bits about 83 %, which a publication reports."""

    delta_len: float = 0.27
    """The share of packets whose length moves into the bands that betray a tunnel."""
    delta_iat: float = 0.35
    """By which share the gaps before packets of a tunnel are longer."""
    delta_hdr: float = 0.21
    """Six bits of the headers (DSCP, parity of the TTL, identification, payload type, marker and extension of RTP) are
    1 with this much more than 0.5 in a tunnel, and this much less in a call."""
    subnet_leak: float = 0.0
    """The share of flows whose addresses tell their class."""


def mixed(seed: int, flows: int, *, packets_max: int = 1100, over_s: float = 60.0) -> Iterator[TrafficFlow]:
    """`flows` flows of all classes in the shares of `MIX`, in order of their begin, which is even over `over_s`
    seconds; many last longer. InputError for a number out of range."""
    _check(flows, packets_max, over_s)
    for number, label in enumerate(_shuffled(MIX, seed, flows)):
        random = _random(seed, f"mixed/{number}")
        begin_us = round(number * over_s * 1e6 / flows)
        flow = (
            _plain(random, label, CLASSES[label], packets_max)
            if label in CLASSES
            else _call(random, label, packets_max, Knobs())
        )
        yield replace(flow, times_us=flow.times_us + begin_us)


def calls(seed: int, flows: int, *, packets: int = 1100, knobs: Knobs | None = None) -> Iterator[TrafficFlow]:
    """`flows` calls of `packets` packets each: half are ordinary, a quarter each carries one of the tunnels."""
    _check(flows, packets, 1.0)
    for number, label in enumerate(_shuffled({CALL: 2, FACET: 1, DELTASHAPER: 1}, seed, flows)):
        random = _random(seed, f"calls/{number}")
        flow = _call(random, label, packets, knobs or Knobs())
        yield replace(flow, times_us=flow.times_us + number * 1000)


def _check(flows: int, packets: int, over_s: float) -> None:
    for name, value in (("flows", flows), ("packets", packets), ("over_s", over_s)):
        if not 0 < value <= 10_000_000:
            raise InputError(f"{name} is {value}", help="give a positive number, at most ten million")


def _random(seed: int, name: str) -> RandomState:
    """The generator of one flow: flows do not depend on how many there are before them."""
    drawn = stream(seed, name)
    return RandomState(np.array([drawn.getrandbits(32) for _ in range(4)], dtype=np.uint32))


def _shuffled(shares: Mapping[str, float], seed: int, count: int) -> list[str]:
    """`count` labels in these shares as exactly as whole numbers allow, in random order."""
    total, labels, owed = sum(shares.values()), list[str](), 0.0
    for label, share in shares.items():
        owed += share / total * count
        labels += [label] * (round(owed) - len(labels))
    stream(seed, "labels").shuffle(labels)
    return labels


# Flows of the classes in the table.


def _plain(random: RandomState, label: str, kind: TrafficClass, packets_max: int) -> TrafficFlow:
    count = min(packets_max, int(kind.packets.draw(random, 1)[0]))
    scale = float(np.exp(0.08 * random.standard_normal()))
    shares = np.array([share for share, _ in kind.lengths])
    which = np.searchsorted(np.cumsum(shares)[:-1], random.random_sample(count), side="right")
    lengths = np.zeros(count, np.int64)
    for mode, (_, spread) in enumerate(kind.lengths):
        chosen = which == mode
        lengths[chosen] = spread.draw(random, int(chosen.sum()), scale if spread.sigma else 1.0)
    gaps = np.maximum(1, kind.gaps_us.draw(random, count, float(np.exp(0.2 * random.standard_normal()))))
    gaps[0] = 0
    base = _Addresses.drawn(random, kind.ports)
    hops = random.randint(1, 20) if kind.ttls != CLASSES["port_scan"].ttls else 0
    ttls = np.full(count, random.choice(kind.ttls) - hops)
    tos = np.full(count, random.choice(kind.dscps) << 2)
    ids = (random.randint(1 << 16) + np.arange(count)) & 0xFFFF
    if kind.protocol == UDP:
        body = _payload(random, kind.payload, count, HEAD_BYTES - 28)
        heads = _udp_heads(base, np.maximum(lengths, 28), tos, ttls, ids, body)
        return TrafficFlow(label, kind.malicious, np.cumsum(gaps), np.maximum(lengths, 28), heads)
    flags = np.array(random.choice(kind.flags, count), np.int64)
    flags[: len(kind.opening)] = kind.opening[:count]
    lengths, heads = _tcp_heads(random, base, kind, lengths, tos, ttls, ids, flags)
    return TrafficFlow(label, kind.malicious, np.cumsum(gaps), lengths, heads)


# Calls, with and without a tunnel.

_AUDIO_GAP_US, _FRAME_GAP_US, _FRAGMENT_BYTES = 20_000, 33_333, 1205
_HEADERS_BYTES: Final = 28 + 12
"""IP, UDP and RTP."""


def _call(random: RandomState, label: str, packets: int, knobs: Knobs) -> TrafficFlow:
    """Audio of 50 packets a second and video of 30 frames a second, merged in order of time."""
    covert = label != CALL
    times, lengths, video = _call_timeline(random, packets, knobs.delta_iat if covert else 0.0)
    # The share that moves differs between flows of both kinds, so that the lengths of a whole flow do not settle it.
    share = 0.12 + (knobs.delta_len if covert else 0.0) + knobs.delta_len / 3.0 * random.standard_normal()
    moved = random.random_sample(packets) < np.clip(share, 0.0, 1.0)
    if label == FACET or (label == CALL and random.random_sample() < 0.5):
        moved_bytes = 115 + 8 * random.randint(0, 11, packets)
        moved &= ~video
    else:
        moved_bytes = np.where(random.random_sample(packets) < 0.5, 85 + 4 * random.randint(0, 4, packets),
                        1105 + 20 * random.randint(0, 6, packets))  # fmt: skip
    lengths = np.where(moved, moved_bytes + _HEADERS_BYTES, lengths)
    lean = (knobs.delta_hdr if covert else -knobs.delta_hdr) + 0.03 * random.standard_normal(6)
    bits = (random.random_sample((packets, 6)) < 0.5 + lean).astype(np.int64)
    leaks = random.random_sample() < knobs.subnet_leak
    base = _Addresses.drawn(random, (16_384, 32_767), subnet=(200 if covert else 100) if leaks else None)
    body = _payload(random, "random", packets, HEAD_BYTES - 28)
    body[:, 0] = 0x80 | bits[:, 5] << 4
    body[:, 1] = bits[:, 4] << 7 | np.where(video, 96, 110) | bits[:, 3]
    _place(body, 2, (random.randint(1 << 16) + np.arange(packets)) & 0xFFFF, 2)
    _place(body, 4, (times * 9 // 100 + random.randint(1 << 31)) & 0xFFFFFFFF, 4)
    _place(body, 8, np.full(packets, random.randint(1 << 31)), 4)
    ids = np.where(bits[:, 2] == 1, 0, random.randint(1, 1 << 16, packets))
    ttls = 2 * (random.choice((64, 128)) // 2 - random.randint(1, 10)) + bits[:, 1]
    tos = np.where(bits[:, 0] == 1, 34 << 2, 46 << 2)
    return TrafficFlow(label, covert, times, lengths, _udp_heads(base, lengths, tos, ttls, ids, body))


def _call_timeline(random: RandomState, packets: int, slower: float) -> tuple[Whole, Whole, NDArray[np.bool_]]:
    """Times in µs from 0, lengths, and which packets are video."""
    audio_lengths = np.clip(np.exp(np.log(130 + 6 * random.standard_normal()) + 0.2 * random.standard_normal(packets)),
                            85, 195)  # fmt: skip
    audio_times = np.cumsum(_AUDIO_GAP_US * random.gamma(30, 1 / 30, packets))
    frames = packets
    size, sizes, mean = 0.0, np.zeros(frames), 2200 * np.exp(0.25 * random.standard_normal())
    noise, scenes = random.standard_normal(frames), random.random_sample(frames) < 0.01
    for at in range(frames):  # sizes follow each other, until a scene changes
        size = 1.5 + 0.5 * noise[at] if scenes[at] else 0.9 * size + 0.25 * noise[at]
        sizes[at] = size
    frame_bytes = np.clip(mean * np.exp(sizes * 0.6), 120, 12 * _FRAGMENT_BYTES).astype(np.int64)
    frame_times = np.cumsum(_FRAME_GAP_US * random.gamma(30, 1 / 30, frames))
    pieces = -(-frame_bytes // _FRAGMENT_BYTES)
    video_lengths = np.full(int(pieces.sum()), _FRAGMENT_BYTES)
    last = np.cumsum(pieces) - 1
    video_lengths[last] = np.maximum(40, frame_bytes - (pieces - 1) * _FRAGMENT_BYTES)
    order_in_frame = np.arange(len(video_lengths)) - np.repeat(last - pieces + 1, pieces)
    video_times = np.repeat(frame_times, pieces) + 120 * order_in_frame
    times = np.concatenate((audio_times, video_times))
    first = np.argsort(times, kind="stable")[:packets]
    lengths = np.concatenate((audio_lengths, video_lengths))[first].astype(np.int64) + _HEADERS_BYTES
    # A tunnel's encoder delays single packets. The factor differs between flows as the shares of lengths do.
    gaps = np.diff(times[first], prepend=times[first][0])
    late = random.random_sample(packets) < 0.15 + slower + 0.07 * random.standard_normal()
    gaps = np.where(late, gaps + random.exponential(2_000, packets), gaps)
    return np.cumsum(np.rint(gaps)).astype(np.int64), lengths, first >= packets


# Bytes.


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The 5-tuple of a flow, without its protocol."""

    source: int
    target: int
    source_port: int
    target_port: int

    @classmethod
    def drawn(cls, random: RandomState, ports: tuple[int, int], subnet: int | None = None) -> "_Addresses":
        source, target = (10 << 24 | int(random.randint(1 << 24)) for _ in range(2))
        if subnet is not None:
            source = 10 << 24 | subnet << 16 | source & 0xFFFF
        return cls(source, target, int(random.randint(1024, 65_536)), int(random.randint(ports[0], ports[1] + 1)))


def _place(rows: Heads, at: int, values: Any, size: int) -> None:  # noqa: ANN401  # an array or a number
    """Writes numbers of `size` bytes, big endian, at one offset of every row."""
    for byte in range(size):
        rows[:, at + byte] = np.asarray(values) >> 8 * (size - 1 - byte) & 0xFF


def _payload(random: RandomState, kind: str, count: int, size: int) -> Heads:
    """The first `size` bytes after the transport header, before they are cut to the packet's length."""
    body: Heads = random.randint(0, 256, (count, size)).astype(np.uint8)
    match kind:
        case "zero":
            body[:] = 0
        case "text":
            body[:] = np.frombuffer(b"X-a: 4827\r\nX-b: 1930\r\nX-c: 5561\r\nX-d: 7".ljust(size)[:size], np.uint8)
        case "tls":
            body[:, :3] = (0x17, 3, 3)
        case "rtp":
            body[:, 0], body[:, 1] = 0x80, 0
            _place(body, 2, random.randint(1 << 16) + np.arange(count), 2)
        case "dns":
            body[:, 2:12] = (1, 0, 0, 1, 0, 0, 0, 0, 0, 0)
            body[:, 12:] = 0x61 + body[:, 12:] % 26
    return body


def _ip_heads(base: _Addresses, protocol: int, lengths: Whole, tos: Whole, ttls: Whole, ids: Whole) -> Heads:
    heads: Heads = np.zeros((len(lengths), HEAD_BYTES), np.uint8)
    heads[:, 0], heads[:, 1], heads[:, 6], heads[:, 9] = 0x45, tos, 0x40, protocol
    heads[:, 8] = ttls
    _place(heads, 2, lengths, 2)
    _place(heads, 4, ids, 2)
    _place(heads, 12, base.source, 4)
    _place(heads, 16, base.target, 4)
    _place(heads, 20, base.source_port, 2)
    _place(heads, 22, base.target_port, 2)
    _place(heads, 10, _checksum(heads[:, :20]), 2)
    return heads


def _udp_heads(base: _Addresses, lengths: Whole, tos: Whole, ttls: Whole, ids: Whole, body: Heads) -> Heads:
    heads = _ip_heads(base, UDP, lengths, tos, ttls, ids)
    _place(heads, 24, lengths - 20, 2)
    heads[:, 28:] = body
    _cut(heads, lengths)
    sums = _transport_checksum(heads, lengths)
    _place(heads, 26, np.where(sums == 0, 0xFFFF, sums), 2)
    return heads


def _tcp_heads(
    random: RandomState,
    base: _Addresses,
    kind: TrafficClass,
    lengths: Whole,
    tos: Whole,
    ttls: Whole,
    ids: Whole,
    flags: Whole,
) -> tuple[Whole, Heads]:
    """Heads, and the lengths, which are at least those of the headers; a SYN carries its options and nothing else."""
    opening = (flags & SYN) > 0
    # 40 bytes of header: MSS, SACK, timestamps, window scale. 32: timestamps. 24 or 20: what packet makers send.
    header = np.where(opening, 40, 32) if kind.timestamps else np.where(lengths == 44, 24, 20)
    lengths = np.where(opening, 20 + header, np.maximum(lengths, 20 + header))
    heads = _ip_heads(base, TCP, lengths, tos, ttls, ids)
    body = lengths - 20 - header
    sequence = (random.randint(1 << 31) + np.cumsum(body + opening) - body) & 0xFFFFFFFF
    _place(heads, 24, sequence, 4)
    _place(heads, 28, np.where(opening, 0, random.randint(1 << 31)), 4)
    heads[:, 32], heads[:, 33] = header << 2, flags
    _place(heads, 34, int(random.choice(kind.windows)), 2)
    clock = random.randint(1 << 31) + np.arange(len(lengths))
    payload = _payload(random, kind.payload, len(lengths), HEAD_BYTES - 40)
    for size in np.unique(header).tolist():
        rows = header == size
        part = heads[rows]
        if size in (24, 40):
            part[:, 40:44] = (2, 4, 5, 0xB4)
        if size == 40:
            part[:, 44:48] = (4, 2, 8, 10)
            _place(part, 48, clock[rows], 4)
            part[:, 56:60] = (1, 3, 3, 7)
        if size == 32:
            part[:, 40:44] = (1, 1, 8, 10)
            _place(part, 44, clock[rows], 4)
        part[:, 20 + size :] = payload[rows][:, : HEAD_BYTES - 20 - size]
        heads[rows] = part
    _cut(heads, lengths)
    _place(heads, 36, _transport_checksum(heads, lengths), 2)
    return lengths, heads


def _cut(heads: Heads, lengths: Whole) -> None:
    """Zeroes what lies behind the end of a packet."""
    heads[np.arange(HEAD_BYTES) >= lengths[:, None]] = 0


def _checksum(rows: Heads, extra: Whole | int = 0) -> Whole:
    """The Internet checksum of each row (RFC 1071)."""
    words = rows.reshape(len(rows), -1, 2).astype(np.int64)
    total: Whole = (words[:, :, 0] << 8 | words[:, :, 1]).sum(axis=1) + extra
    for _ in range(2):
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _transport_checksum(heads: Heads, lengths: Whole) -> Whole:
    """Of TCP or UDP with its pseudo header; the checksum's own field has to be zero."""
    return _checksum(heads[:, 12:], (lengths - 20) + heads[:, 9])


def labels_csv(flows: Iterable[TrafficFlow], seed: int) -> str:
    """One line per flow: its 5-tuple, class and seed, as a table beside a capture."""
    lines = ["source,source_port,target,target_port,protocol,class,malicious,seed"]
    for flow in flows:
        head = flow.heads[0].tobytes()
        source, target = (".".join(map(str, head[at : at + 4])) for at in (12, 16))
        source_port, target_port = struct.unpack(">HH", head[20:24])
        fields = (source, source_port, target, target_port, head[9], flow.label, int(flow.malicious), seed)
        lines.append(",".join(map(str, fields)))
    return "\n".join(lines) + "\n"
