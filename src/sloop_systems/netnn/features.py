"""Features of flows, as the first switch makes them: inference points, their encoding as integers, votes.

The switch keeps a few registers for each flow: the number of packets so far, and the shortest and longest gap between
two. At packets 1, 2, 4, …, 1024 of a flow (its *inference points*) it encodes these, and the head of the packet, as the
integers that the network takes. The network's logits come back as votes, and the verdict on the flow is the majority of
its votes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.api import InputError
from sloop_systems.netnn.network import BITS, BYTES, InputRange
from sloop_systems.netnn.traffic import HEAD_BYTES

POINT_MAX: Final = 1024
POINTS: Final = tuple(1 << exponent for exponent in range(POINT_MAX.bit_length()))
"""The packets of a flow at which it is classified: 1, 2, 4, …, 1024."""
GAP_MAX: Final = 2**32 - 1
"""Gaps are 32 bits of microseconds; longer ones saturate."""
KEY_BYTES: Final = 13
"""Addresses, ports, protocol as on the wire."""

Rows = NDArray[np.int64]


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

    def rows(self, points: "PointArrays") -> Rows:
        """One row of integers for each point."""
        heads, keys = points.heads.copy(), points.keys.copy()
        if not self.identity:  # addresses and ports
            heads[:, 12:24] = 0
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
    """The first 68 bytes from the IPv4 header on, with zeros behind the end of a shorter packet."""
    lengths: Rows
    """Bytes from the IP header on."""
    gaps_us: Rows
    """Since the flow's packet before; 0 at its first."""
    gap_min_us: Rows
    gap_max_us: Rows


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


def vote(logits: Sequence[float]) -> bool:
    """Whether a flow with these logits is malicious: by majority; at a tie, by the sign of their sum."""
    doubled = 2 * sum(logit >= 0 for logit in logits)
    return doubled > len(logits) or (doubled == len(logits) and sum(logits) >= 0)
