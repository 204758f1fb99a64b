"""Synthetic traffic: flows of real IPv4 packets from a seed, to compare detectors with.

Video calls, half of which carry a tunnel as Facet or DeltaShaper do: covert channels. Their differences are drawn
packet by packet, with the strengths in `Knobs`. These strengths were calibrated, so accuracies are tuned, and only
their order means anything.

A packet has a valid header and checksum. All addresses are in 10.0.0.0/8. One seed gives the same bytes on every
machine: the draws come from NumPy's legacy generator, whose numbers are frozen (NEP 19).

Source: the lengths that betray a tunnel follow Barradas et al. (USENIX Security 2018).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from sloop.api import InputError
from sloop.api.experiments import stream

HEAD_BYTES: Final = 68
"""The first bytes of a packet that detection reads: the longest IPv4 header and a UDP header."""
UDP: Final = 17

Heads = NDArray[np.uint8]
Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TrafficFlow:
    """The packets of one 5-tuple in one direction, as arrays: `heads` has the first 68 bytes of each."""

    label: str
    """The class: `CALL`, `FACET` or `DELTASHAPER`."""
    malicious: bool
    times_us: Whole
    lengths: Whole
    """Bytes from the IP header on."""
    heads: Heads

    def __len__(self) -> int:
        return len(self.times_us)


CALL, FACET, DELTASHAPER = "call", "facet", "deltashaper"


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


def calls(seed: int, flows: int, *, packets: int = 1100, knobs: Knobs | None = None) -> Iterator[TrafficFlow]:
    """`flows` calls of `packets` packets each: half are ordinary, a quarter each carries one of the tunnels."""
    for name, value in (("flows", flows), ("packets", packets)):
        if not 0 < value <= 10_000_000:
            raise InputError(f"{name} is {value}", help="give a positive number, at most ten million")
    for number, label in enumerate(_shuffled({CALL: 2, FACET: 1, DELTASHAPER: 1}, seed, flows)):
        random = _random(seed, f"calls/{number}")
        flow = _call(random, label, packets, knobs or Knobs())
        yield replace(flow, times_us=flow.times_us + number * 1000)


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
    body: Heads = random.randint(0, 256, (packets, HEAD_BYTES - 28)).astype(np.uint8)
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
