"""The first switch: flows, inference points, encodings, votes, and what it does not classify."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop_systems.netnn.accuracy import dataset
from sloop_systems.netnn.detection import (
    POINTS,
    Detector,
    FeatureEncoding,
    FlowTable,
    InferencePoint,
    ParsedPacket,
    Representation,
    Rows,
    Unparsed,
    flow_name,
    parse,
    vote,
)
from sloop_systems.netnn.traffic import TimedPacket, calls, in_order_of_time, mixed

HEADER = bytes.fromhex("4500003c0001400040110000") + bytes([10, 0, 0, 1, 10, 0, 0, 2])
UDP_PACKET = HEADER + (5000).to_bytes(2) + (6000).to_bytes(2) + (40).to_bytes(2) + b"\0\0" + bytes(range(32))
"""The worked example of the specification (2.4)."""
V6_PACKET = bytes.fromhex("60000000001c1140") + bytes(range(32)) + bytes.fromhex("13881770001c0000") + bytes(20)


def _observed(table: FlowTable, packets: int, gap_us: int = 1000, data: bytes = UDP_PACKET) -> list[InferencePoint]:
    found = (table.observe(TimedPacket(number * gap_us, data)) for number in range(packets))
    return [point for point in found if point is not None]


def test_the_example_of_the_specification() -> None:
    assert len(UDP_PACKET) == 60
    parsed = parse(UDP_PACKET)
    assert not isinstance(parsed, Unparsed)
    point = InferencePoint(parsed.key, 2, parsed.head, 60, parsed.ports_at, 1000, 1000, 250_000, 0)
    row = FeatureEncoding(identity=True).rows([point])[0]
    assert len(row) == 814
    parts = [row[:544].sum(), row[544:648].sum(), row[648:680].sum(), row[680:712].sum(), row[712:].sum()]
    assert parts == [112, 20, 6, 7, 0]
    assert flow_name(parsed.key) == "10.0.0.1:5000 → 10.0.0.2:6000 UDP"


def test_inference_points_are_the_powers_of_two_up_to_1024() -> None:
    points = _observed(FlowTable(), 3000)
    assert tuple(point.n for point in points) == POINTS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert [point.n for point in _observed(FlowTable(first_point=2), 5)] == [2, 4]
    assert points[0].gap_min_us == points[0].gap_max_us == 0
    assert points[1].gap_min_us == points[1].gap_max_us == 1000


def test_gaps_are_the_least_and_greatest_so_far_and_saturate() -> None:
    table = FlowTable()
    times = [0, 500, 300, 10_000, 10**12]  # the third overtook the second
    points = [table.observe(TimedPacket(time_us, UDP_PACKET)) for time_us in times]
    fourth = points[3]
    assert fourth is not None
    assert (fourth.gap_min_us, fourth.gap_max_us) == (0, 9_500)
    last = _observed(FlowTable(), 8, gap_us=2**40)[-1]
    assert last.gap_max_us == 2**32 - 1


def test_two_flows_of_one_register_do_not_mix() -> None:
    table = FlowTable(1, idle_us=1_000_000)
    other = UDP_PACKET[:19] + b"\3" + UDP_PACKET[20:]
    assert table.observe(TimedPacket(0, UDP_PACKET)) is not None
    assert table.observe(TimedPacket(10, other)) is None
    assert table.counts["collision"] == 1
    second = table.observe(TimedPacket(20, UDP_PACKET))
    assert second is not None
    assert second.n == 2
    evicting = table.observe(TimedPacket(1_000_021, other))
    assert evicting is not None
    assert evicting.n == 1


def test_a_head_ends_with_its_packet() -> None:
    """What pads an Ethernet frame, or checks it, is no feature."""
    expected = parse(UDP_PACKET)
    assert parse(UDP_PACKET + b"\xab\xcd\xef\x01") == expected
    assert isinstance(expected, ParsedPacket)
    assert expected.head == UDP_PACKET + bytes(8)
    unknown = UDP_PACKET[:2] + b"\0\0" + UDP_PACKET[4:]  # the network card would have filled it in
    assert isinstance(parse(unknown), ParsedPacket)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", Unparsed.NOT_IP),
        (b"\x11" * 60, Unparsed.NOT_IP),
        (b"\x41" + UDP_PACKET[1:], Unparsed.NOT_IP),  # a header of 4 bytes
        (UDP_PACKET[:22], Unparsed.CUT_SHORT),
        (V6_PACKET[:43], Unparsed.CUT_SHORT),
        (UDP_PACKET[:59], Unparsed.CUT_SHORT),  # a capture of the first bytes of each packet
        (V6_PACKET[:67], Unparsed.CUT_SHORT),
        (UDP_PACKET[:2] + b"\0\x17" + UDP_PACKET[4:], Unparsed.CUT_SHORT),  # ends within its ports, it says
        (UDP_PACKET[:6] + b"\x20\x08" + UDP_PACKET[8:], Unparsed.FRAGMENT),
        (UDP_PACKET[:9] + b"\x01" + UDP_PACKET[10:], Unparsed.OTHER_PROTOCOL),
        (V6_PACKET[:6] + b"\x2c" + V6_PACKET[7:], Unparsed.OTHER_PROTOCOL),
    ],
)
def test_what_has_no_flow_is_counted_with_its_reason(data: bytes, why: Unparsed) -> None:
    assert parse(data) is why
    table = FlowTable()
    assert table.observe(TimedPacket(0, data)) is None
    assert table.counts == {"packets": 1, why.value: 1}


@given(st.binary(max_size=100))
def test_no_packet_breaks_the_parser(data: bytes) -> None:
    for start in (b"", b"\x45", b"\x4f", b"\x60"):
        parsed = parse(start + data)
        if not isinstance(parsed, Unparsed):
            assert len(parsed.key) == 13
            assert len(parsed.head) == 68
            point = InferencePoint(parsed.key, 1, parsed.head, parsed.length, parsed.ports_at, 0, 0, 0, 0)
            for representation in Representation:
                encoding = FeatureEncoding(representation)
                row = encoding.rows([point])
                assert row.shape == (1, encoding.inputs)
                assert encoding.range.low <= row.min()
                assert row.max() <= encoding.range.high


@pytest.mark.parametrize("data", [UDP_PACKET, V6_PACKET, b"\x46" + UDP_PACKET[1:20] + b"\1\1\1\1" + UDP_PACKET[20:]])
@pytest.mark.parametrize("representation", list(Representation))
def test_a_masked_row_says_nothing_of_who_sent_it(data: bytes, representation: Representation) -> None:
    parsed = parse(data)
    assert not isinstance(parsed, Unparsed)
    start, end = (12, parsed.ports_at + 4) if data[0] >> 4 == 4 else (8, 44)
    start_ports = parsed.ports_at
    other = bytearray(data)
    for at in (*range(start, min(end, 20 if data[0] >> 4 == 4 else 40)), *range(start_ports, start_ports + 4)):
        other[at] ^= 0xFF
    rows = {}
    for identity in (False, True):
        encoding = FeatureEncoding(representation, identity=identity)
        rows[identity] = [
            encoding.rows([point])
            for point in (_observed(FlowTable(), 1, data=bytes(each))[0] for each in (data, other))
        ]
    assert np.array_equal(rows[False][0], rows[False][1])
    assert not np.array_equal(rows[True][0], rows[True][1])


def test_an_encoding_that_is_too_short_is_refused() -> None:
    with pytest.raises(InputError, match="712 features do not fit into 700 inputs"):
        FeatureEncoding(length=700).rows(_observed(FlowTable(), 1))
    assert FeatureEncoding().rows([]).shape == (0, 814)
    with pytest.raises(InputError, match="power of two"):
        FlowTable(1000)


def test_points_of_arrays_are_those_of_packets() -> None:
    """Training sees what the switch sees."""
    flows = list(calls(3, 6, packets=70)) + list(mixed(3, 20, packets_max=70))
    points = {(point.key, point.n): point for point in _points_of(flows)}
    data = dataset(flows)
    for representation in Representation:
        encoding = FeatureEncoding(representation, identity=True)
        rows = encoding.from_arrays(data.points)
        assert len(rows) == len(points)
        for row, key, n in zip(rows, data.points.keys, data.points.n.tolist(), strict=True):
            assert np.array_equal(row, encoding.rows([points[key.tobytes(), n]])[0])


def _points_of(flows: list) -> list[InferencePoint]:  # type: ignore[type-arg]
    table = FlowTable(1 << 20)
    found = [table.observe(packet) for packet in in_order_of_time(flows)]
    assert not table.counts["collision"]
    return [point for point in found if point is not None]


# Votes


def test_votes() -> None:
    assert vote([5])
    assert vote([0])
    assert not vote([-1])
    assert not vote([9, -1, -1])
    assert vote([9, -1])  # a tie: the sum decides
    assert not vote([1, -2])
    assert vote([2, -2])


def test_a_lost_inference_is_no_vote_and_no_verdict() -> None:
    def infer(rows: Rows) -> list[int | None]:
        return [None if number % 2 else -7 for number in range(len(rows))]

    detector = Detector(infer, FeatureEncoding(), together=4)
    changed = list(detector.run(TimedPacket(number, UDP_PACKET) for number in range(8)))
    assert [verdict.logits for verdict in changed] == [[-7, -7], [-7, -7]]  # one object, as it is now
    assert detector.counts["points"] == 4
    assert detector.counts["votes"] == 2
    assert detector.counts["without_verdict"] == 2
    assert not next(iter(detector.verdicts.values())).malicious


def test_a_new_flow_with_old_addresses_starts_its_votes_anew() -> None:
    detector = Detector(lambda rows: [3] * len(rows), FeatureEncoding(), table=FlowTable(1, idle_us=100), together=1)
    other = UDP_PACKET[:19] + b"\3" + UDP_PACKET[20:]
    for time_us, data in ((0, UDP_PACKET), (1, UDP_PACKET), (200, other), (400, UDP_PACKET)):
        detector.observe(TimedPacket(time_us, data))
    parsed = parse(UDP_PACKET)
    assert not isinstance(parsed, Unparsed)
    assert detector.verdicts[parsed.key].logits == [3]


def test_verdicts_are_bounded() -> None:
    detector = Detector(lambda rows: [1] * len(rows), FeatureEncoding(), together=1, flows_max=3)
    for number in range(10):
        detector.observe(TimedPacket(number, UDP_PACKET[:19] + bytes([number]) + UDP_PACKET[20:]))
    assert len(detector.verdicts) == 3
