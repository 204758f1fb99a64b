"""Captures: both formats, and what is damaged."""

import builtins
import contextlib
import gzip
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop_systems.netnn.captures import BLOCK_BYTES_MAX, CaptureReader, write_capture
from sloop_systems.netnn.traffic import ETHERNET, TimedPacket, in_order_of_time, mixed

pytest.importorskip("dpkt")

PACKETS = list(in_order_of_time(mixed(1, 12, packets_max=6)))


def _block(kind: int, body: bytes, order: str = "<") -> bytes:
    body += b"\0" * (-len(body) % 4)
    size = struct.pack(f"{order}I", len(body) + 12)
    return struct.pack(f"{order}I", kind) + size + body + size


def _pcapng(packets: list[TimedPacket], *, link: int = 1, order: str = "<", front: bytes = ETHERNET) -> bytes:
    found = _block(0x0A0D0D0A, struct.pack(f"{order}IHHq", 0x1A2B3C4D, 1, 0, -1), order)
    found += _block(1, struct.pack(f"{order}HHI", link, 0, 0), order)
    for time_us, data in packets:
        frame = front + data
        head = struct.pack(f"{order}IIIII", 0, time_us >> 32, time_us & 0xFFFFFFFF, len(frame), len(frame))
        found += _block(6, head + frame, order)
    return found


def _read(path: Path, content: bytes) -> tuple[list[TimedPacket], CaptureReader]:
    path.write_bytes(content)
    reader = CaptureReader(path)
    return list(reader), reader


def test_a_written_capture_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "traffic.pcap"
    assert write_capture(path, PACKETS) == len(PACKETS)
    reader = CaptureReader(path)
    assert list(reader) == PACKETS
    assert reader.counts == {"packets": len(PACKETS)}
    assert not reader.cut_short


@pytest.mark.parametrize("order", ["<", ">"])
def test_pcapng_of_both_byte_orders(tmp_path: Path, order: str) -> None:
    assert _read(tmp_path / "a.pcapng", _pcapng(PACKETS, order=order))[0] == PACKETS


@pytest.mark.parametrize(
    ("link", "front"),
    [
        (101, b""),
        (113, bytes(14) + b"\x08\0"),
        (276, b"\x08\0" + bytes(18)),
        (0, b"\2\0\0\0"),
        (1, ETHERNET[:12] + b"\x81\0\0\5\x88\xa8\0\7\x08\0"),
    ],
)
def test_link_layers(tmp_path: Path, link: int, front: bytes) -> None:
    assert _read(tmp_path / "a", _pcapng(PACKETS, link=link, front=front))[0] == PACKETS


def _interface(link: int, *, resolution: int = 6, offset_s: int = 0, order: str = "<") -> bytes:
    options = struct.pack(f"{order}HHB3x", 9, 1, resolution) + struct.pack(f"{order}HHq", 14, 8, offset_s)
    return _block(1, struct.pack(f"{order}HHI", link, 0, 0) + options + bytes(4), order)


@pytest.mark.parametrize("order", ["<", ">"])
def test_each_interface_of_a_pcapng_has_its_link_layer_and_clock(tmp_path: Path, order: str) -> None:
    """As Wireshark writes what it captures on several interfaces."""
    content = _pcapng([], order=order)
    content += _interface(101, resolution=9, order=order) + _interface(113, resolution=0x80 | 20, order=order)
    content += _interface(1, resolution=3, offset_s=5, order=order) + _interface(105, order=order)
    data = PACKETS[0].data
    fronts = (ETHERNET, b"", bytes(14) + b"\x08\0", ETHERNET, b"\x08\x01")
    ticks = (7_000_000, 7_000_000_000, 7 << 20, 2_000, 7_000_000)
    for interface, (front, stamp) in enumerate(zip(fronts, ticks, strict=True)):
        size = len(front + data)
        head = struct.pack(f"{order}IIIII", interface, stamp >> 32, stamp & 0xFFFFFFFF, size, size)
        content += _block(6, head + front + data, order)
    content += _block(3, struct.pack(f"{order}I", len(ETHERNET + data)) + ETHERNET + data, order)
    found, reader = _read(tmp_path / "a.pcapng", content)
    assert found == [TimedPacket(7_000_000, data)] * 4
    assert reader.counts == {"packets": 5, "not_ip": 1, "without_time": 1}
    with pytest.raises(InputError, match="a packet of interface 9, which is not described"):
        _read(tmp_path / "a.pcapng", content + _block(6, struct.pack(f"{order}IIIII", 9, 0, 0, 0, 0), order))


def test_a_compressed_capture_says_how_to_unpack_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is compressed") as error:
        _read(tmp_path / "a.gz", gzip.compress(_pcapng(PACKETS[:1])))
    assert "gunzip" in str(error.value.help)


def test_frames_without_ip_are_counted(tmp_path: Path) -> None:
    found, reader = _read(tmp_path / "a", _pcapng(PACKETS[:3], front=ETHERNET[:12] + b"\x08\x06"))
    assert found == []
    assert reader.counts == {"packets": 3, "not_ip": 3}


@pytest.mark.parametrize("kind", ["pcap", "pcapng"])
def test_a_capture_that_ends_anywhere_gives_what_is_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "pcap":
        write_capture(path, PACKETS[:3])
        content, before = path.read_bytes(), 24
        sizes = [16 + 14 + len(packet.data) for packet in PACKETS[:3]]
    else:
        content, before = _pcapng(PACKETS[:3]), 28 + 20
        sizes = [32 + (14 + len(packet.data) + 3) // 4 * 4 for packet in PACKETS[:3]]
    ends = [before]
    for size in sizes:
        ends.append(ends[-1] + size)
    assert ends[-1] == len(content)
    around = {end + offset for end in ends for offset in (-1, 0, 1)}
    for end in sorted({*range(before, len(content) + 1, 11), *around} & set(range(before, len(content) + 1))):
        found, reader = _read(path, content[:end])
        whole = sum(each <= end for each in ends) - 1
        assert found == PACKETS[:whole], end
        assert reader.cut_short == (end not in ends), end


@pytest.mark.parametrize("size", [0, 3, 20, 23])
def test_what_is_shorter_than_a_header_is_no_capture(tmp_path: Path, size: int) -> None:
    write_capture(tmp_path / "whole", PACKETS[:1])
    for content in ((tmp_path / "whole").read_bytes(), _pcapng(PACKETS[:1])):
        with pytest.raises(InputError, match=r"too short for a capture|no capture"):
            _read(tmp_path / "a", content[:size])


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is no capture"):
        _read(tmp_path / "a", b"source,target\n" * 10)
    with pytest.raises(InputError, match="cannot be read: No such file"):
        CaptureReader(tmp_path / "missing")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        CaptureReader(tmp_path)
    with pytest.raises(InputError, match="link layer 105"):
        _read(tmp_path / "a", _pcapng(PACKETS[:1], link=105))


def test_a_length_that_no_packet_has_is_damage_not_memory(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_capture(path, PACKETS[:2])
    damaged = bytearray(path.read_bytes())
    struct.pack_into("<I", damaged, 24 + 16 + 14 + len(PACKETS[0].data) + 8, BLOCK_BYTES_MAX + 1)
    with pytest.raises(InputError, match="damaged after 1 packets: a block of 16777217 bytes"):
        _read(path, bytes(damaged))
    small = _pcapng(PACKETS[:1]) + struct.pack("<II", 6, 4)
    with pytest.raises(InputError, match="damaged after 1 packets: a block of -4 bytes"):
        _read(path, small)


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_capture(path, PACKETS[:1])
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "dpkt":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="needs dpkt") as error:
        CaptureReader(path)
    assert error.value.help == "pip install dpkt"


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 5), st.data())
def test_no_file_breaks_the_reader(tail: bytes, packets: int, data: st.DataObject) -> None:
    """Whatever a file contains, it is read or refused."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        write_capture(path, PACKETS[:packets])
        for content in (path.read_bytes(), _pcapng(PACKETS[:packets])):
            damaged = bytearray(content + tail)
            for _ in range(data.draw(st.integers(0, 4))):
                damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
            with contextlib.suppress(InputError):
                _read(path, bytes(damaged))
