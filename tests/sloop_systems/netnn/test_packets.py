"""The packet format: the specification's worked example, the way there and back, and bytes that are no packets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop_systems.netnn.mapper import Fabric
from sloop_systems.netnn.packets import (
    HEADER_BYTES,
    Malformed,
    Packet,
    PacketKind,
    ValueEncoding,
    message_of,
    packets_of,
    parse,
)
from sloop_systems.netnn.program import compile_network
from tests.sloop_systems.netnn.models import flow_model, picture_model, rows_of, small_model

EXAMPLE = Packet(version=1, label=0, inference=9, source=0, position=7, values=(1, 0, 1, 1, 0), cell=1)
PROGRAM = compile_network(small_model())


def test_the_worked_example() -> None:
    assert EXAMPLE.build().hex() == "4e01000100000000000900050007000100000100010100"
    assert parse(EXAMPLE.build()) == EXAMPLE
    assert (PROGRAM.slot(9), PROGRAM.epoch(9)) == (1, 1)


@st.composite
def packets(draw: st.DrawFn) -> Packet:
    encoding = draw(st.sampled_from(ValueEncoding))
    low, high = {
        ValueEncoding.INT8: (-128, 127),
        ValueEncoding.INT16: (-(2**15), 2**15 - 1),
        ValueEncoding.BITS: (0, 1),
        ValueEncoding.INT32: (-(2**31), 2**31 - 1),
    }[encoding]
    fields = {
        name: draw(st.integers(0, 2**bits - 1))
        for name, bits in (("version", 16), ("label", 8), ("inference", 32), ("source", 8), ("position", 16))
    }
    values = tuple(draw(st.lists(st.integers(low, high), max_size=255)))
    others = {name: draw(st.integers(0, 2**16 - 1)) for name in ("cell", "part")}
    return Packet(**fields, **others, values=values, encoding=encoding, kind=draw(st.sampled_from(PacketKind)))


@given(packets(), st.binary(max_size=40))
def test_there_and_back_with_padding(packet: Packet, padding: bytes) -> None:
    assert parse(packet.build() + padding) == packet


@given(st.binary(max_size=60))
def test_any_bytes_are_a_packet_or_malformed(content: bytes) -> None:
    try:
        packet = parse(content)
    except Malformed:
        return
    assert len(packet.values) <= 255


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_a_damaged_packet_is_a_packet_or_malformed(at: int, damage: bytes) -> None:
    content = bytearray(EXAMPLE.build())
    content[at % len(content) :][: len(damage)] = damage
    place = at % len(content)
    content[place : place + len(damage)] = damage
    try:
        message = message_of(parse(bytes(content)), PROGRAM.layers[0], PROGRAM)
    except Malformed:
        return
    assert 0 <= message < PROGRAM.layers[0].messages


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are less than a header of 18"),
        (EXAMPLE.build()[: HEADER_BYTES - 1], "17 bytes are less"),
        (EXAMPLE.build()[:-1], "it has 5 values, and 4 bytes for them instead of 5"),
        (b"\x00" + EXAMPLE.build()[1:], "it begins with 0x0001"),
        (EXAMPLE.build()[:5] + b"\x40" + EXAMPLE.build()[6:], "kind 4 with encoding 0 is unknown"),
        (EXAMPLE.build()[:5] + b"\x07" + EXAMPLE.build()[6:], "kind 0 with encoding 7 is unknown"),
    ],
)
def test_bytes_that_are_no_packet(content: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        parse(content)


@pytest.mark.parametrize(
    ("packet", "message"),
    [
        (Packet(1, 0, 9, 1, 7, (1, 0, 1, 1), 2), "source 1, part 0; layer 'conv1' has 1 sources and 1 parts"),
        (Packet(1, 0, 9, 0, 7, (1, 0, 1, 1), 2, part=1), "source 0, part 1"),
        (Packet(1, 0, 9, 0, 57, (1, 0, 1, 1), 19), "position 57 is outside the input"),
        (Packet(1, 0, 9, 0, 7, (1, 0, 1, 1), 3), "window 7 is not in pooling cell 3"),
        (Packet(1, 0, 9, 0, 7, (1, 0, 1), 2), "3 values instead of 4"),
        (Packet(1, 0, 9, 0, 7, (1, 0, 1, 2), 2), "values from 0 to 2, outside 0 to 1"),
    ],
)
def test_packets_of_another_program(packet: Packet, message: str) -> None:
    assert message_of(Packet(1, 0, 9, 0, 7, (1, 0, 1, 1), 2), PROGRAM.layers[0], PROGRAM) == 7
    with pytest.raises(Malformed, match=message):
        message_of(packet, PROGRAM.layers[0], PROGRAM)


def test_activations_are_never_negative() -> None:
    with pytest.raises(Malformed, match="values from -1 to 1, outside 0 to 127"):
        message_of(Packet(1, 1, 9, 0, 7, (1, -1, 1)), PROGRAM.layers[1], PROGRAM)


@pytest.mark.parametrize(
    ("packet", "message"),
    [
        (Packet(1, 0, 0, 0, 0, (128,)), "values from 128 to 128, 1 of them, do not fit into INT8"),
        (Packet(1, 0, 0, 0, 0, (0,) * 256), "256 of them"),
        (Packet(1, 0, 0, 0, 2**16, (0,)), "a field is too large"),
    ],
)
def test_packets_that_cannot_be_built(packet: Packet, message: str) -> None:
    with pytest.raises(InputError, match=message):
        packet.build()


def test_what_the_feature_extractor_sends() -> None:
    program = compile_network(flow_model())
    (row,) = rows_of(flow_model(), 1)
    sent = packets_of(program, row, 17)
    assert len(sent) == 810
    assert all(packet.values == tuple(row[at : at + 5]) for at, packet in enumerate(sent))
    assert [packet.cell for packet in sent[:6]] == [0, 0, 0, 0, 0, 1]
    assert [message_of(parse(packet.build()), program.layers[0], program) for packet in sent] == [*range(810)]


def test_a_row_in_segments() -> None:
    network = picture_model()
    program = compile_network(network, Fabric(sends_windows=False))
    (row,) = np.random.default_rng(0).integers(0, 2, (1, network.input_count))
    sent = packets_of(program, row, 0)
    assert [len(packet.values) for packet in sent] == [64, 64, 16]
    assert [value for packet in sent for value in packet.values] == row.tolist()
