"""Synthetic traffic: real packets, the same for one seed, with the classes that it claims."""

import hashlib
import struct
from itertools import islice

import numpy as np
import pytest

from sloop.errors import InputError
from sloop_systems.netnn.traffic import (
    CALL,
    DELTASHAPER,
    FACET,
    UDP,
    Knobs,
    calls,
)


def _sum_of(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_every_packet_has_a_valid_header_of_a_private_address() -> None:
    flows = list(calls(3, 12, packets=20))
    assert {flow.label for flow in flows} == {CALL, FACET, DELTASHAPER}
    assert sum(flow.malicious for flow in flows) == 6
    for flow in flows:
        assert list(flow.times_us) == sorted(flow.times_us)
        for length, head in zip(flow.lengths.tolist(), flow.heads, strict=True):
            data = head.tobytes()[:length].ljust(length, b"\0")
            assert data[0] == 0x45
            assert data[12] == data[16] == 10
            assert data[9] == UDP
            assert int.from_bytes(data[2:4]) == length
            assert int.from_bytes(data[24:26]) == length - 20
            assert _sum_of(data[:20]) == 0xFFFF
            pseudo = data[12:20] + bytes([0, UDP]) + struct.pack(">H", length - 20)
            assert _sum_of(pseudo + data[20:]) == 0xFFFF, flow.label


def test_one_seed_gives_the_same_bytes() -> None:
    def digest(seed: int, flows: int) -> list[str]:
        return [
            hashlib.sha256(flow.heads.tobytes() + flow.lengths.tobytes()).hexdigest()[:16]
            for flow in islice(calls(seed, flows, packets=40), 8)
        ]

    assert digest(5, 8) == digest(5, 8)
    assert digest(5, 8) != digest(6, 8)
    # The legacy generator's numbers are frozen, so this holds for every version of NumPy.
    assert digest(5, 8)[0] == "4daf68dbfde842a5"


def test_knobs_move_what_they_name() -> None:
    def lean(label: str, knobs: Knobs) -> float:
        flows = [flow for flow in calls(1, 24, packets=600, knobs=knobs) if flow.label == label]
        return float(np.mean([(flow.heads[:, 29] >> 7).mean() for flow in flows]))  # the marker bit of RTP

    none, strong = Knobs(delta_hdr=0.0), Knobs(delta_hdr=0.3)
    assert abs(lean(CALL, none) - lean(FACET, none)) < 0.05
    assert lean(FACET, strong) - lean(CALL, strong) > 0.5

    leaky = list(calls(1, 24, packets=2, knobs=Knobs(subnet_leak=1.0)))
    assert {int(flow.heads[0, 13]) for flow in leaky if flow.malicious} == {200}
    assert {int(flow.heads[0, 13]) for flow in leaky if not flow.malicious} == {100}


@pytest.mark.parametrize(("flows", "packets"), [(0, 1), (-1, 1), (1, 0), (10**9, 1)])
def test_numbers_out_of_range_are_refused(flows: int, packets: int) -> None:
    with pytest.raises(InputError, match="is "):
        list(calls(1, flows, packets=packets))
