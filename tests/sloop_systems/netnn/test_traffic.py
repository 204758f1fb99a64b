"""Synthetic traffic: real packets, the same for one seed, with the classes that it claims."""

import hashlib
import struct
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from sloop.errors import InputError
from sloop_systems.netnn.traffic import (
    CALL,
    CLASSES,
    DELTASHAPER,
    FACET,
    HEAD_BYTES,
    MIX,
    TCP,
    UDP,
    Knobs,
    calls,
    in_order_of_time,
    labels_csv,
    mixed,
)


def _sum_of(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_every_packet_is_a_valid_packet_of_a_private_address() -> None:
    labels = set()
    for flow in mixed(3, 60, packets_max=20):
        labels.add(flow.label)
        for packet in flow.packets():
            data = packet.data
            assert data[0] == 0x45
            assert data[12] == data[16] == 10
            assert int.from_bytes(data[2:4]) == len(data)
            assert _sum_of(data[:20]) == 0xFFFF
            assert data[9] in (TCP, UDP)
            pseudo = data[12:20] + bytes([0, data[9]]) + struct.pack(">H", len(data) - 20)
            assert _sum_of(pseudo + data[20:]) == 0xFFFF, flow.label
            if data[9] == UDP:
                assert int.from_bytes(data[24:26]) == len(data) - 20
            assert not any(data[HEAD_BYTES:])
    assert labels == {*CLASSES, CALL, FACET, DELTASHAPER}


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


def test_the_mix_has_its_shares() -> None:
    counts = Counter(flow.label for flow in mixed(1, 400, packets_max=4))
    total = sum(MIX.values())
    for label, share in MIX.items():
        assert abs(counts[label] - 400 * share / total) <= 1
    malicious = sum(flow.malicious for flow in mixed(1, 400, packets_max=4))
    assert malicious == 200


def test_packets_come_in_order_of_time() -> None:
    times = [packet.time_us for packet in in_order_of_time(mixed(2, 40, packets_max=30))]
    assert times == sorted(times)
    assert len(times) > 200


def test_flows_begin_within_the_given_seconds() -> None:
    begins = [int(flow.times_us[0]) for flow in mixed(2, 10, packets_max=3, over_s=2.0)]
    assert all(0 <= begin - 200_000 * number < 100_000 for number, begin in enumerate(begins))


def test_a_flood_is_many_flows_of_one_packet_and_a_scan_knocks_at_many_ports() -> None:
    flows = list(mixed(1, 400))
    floods = [flow for flow in flows if flow.label == "syn_flood"]
    assert {len(flow) for flow in floods} == {1}
    assert {flow.heads[0, 33] for flow in floods} == {2}
    ports = {bytes(flow.heads[0, 22:24]) for flow in flows if flow.label == "port_scan"}
    assert len(ports) > 20


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


def test_labels_name_the_flow_as_its_packets_do() -> None:
    flow = next(iter(calls(1, 4, packets=2)))
    head = flow.heads[0].tobytes()
    line = labels_csv([flow], 1).splitlines()[1].split(",")
    assert line[0] == ".".join(map(str, head[12:16]))
    assert line[1:2] == [str(int.from_bytes(head[20:22]))]
    assert line[4:] == ["17", flow.label, str(int(flow.malicious)), "1"]


@pytest.mark.parametrize(("flows", "packets"), [(0, 1), (-1, 1), (1, 0), (10**9, 1)])
def test_numbers_out_of_range_are_refused(flows: int, packets: int) -> None:
    with pytest.raises(InputError, match="is "):
        list(calls(1, flows, packets=packets))
