"""Captures of traffic: pcap and pcapng files, read with dpkt and written for other tools.

A capture may end in the middle of a packet, because the program that wrote it was stopped. The packets before that are
read, and `CaptureReader.cut_short` is true. A file that is no capture is an InputError. Packets whose link layer does
not carry IP are counted and left out.

dpkt takes the link layer and the clock of a pcapng file from its first interface. `_Interfaces` follows the others.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from sloop.api import InputError
from sloop_systems.netnn.traffic import ETHERNET, TimedPacket

BLOCK_BYTES_MAX: Final = 16 << 20
"""A longer packet, or block of a pcapng file, is taken for damage: no link carries it."""
_PCAPNG: Final = b"\x0a\x0d\x0d\x0a"
_BYTE_ORDER_LITTLE: Final = b"\x4d\x3c\x2b\x1a"
_GZIP: Final = b"\x1f\x8b"
_SECTION, _INTERFACE, _PACKET, _SIMPLE, _ENHANCED = 0x0A0D0D0A, 1, 2, 3, 6
"""Kinds of blocks in a pcapng file."""
_RESOLUTION, _OFFSET = 9, 14
"""Options of an interface: the unit of its time stamps, and seconds to add to them."""
_ETHERNET, _RAW, _LINUX_COOKED, _LOOPBACK, _LINUX_COOKED_2 = 1, 101, 113, 0, 276
_RAW_KINDS: Final = (_RAW, 12, 14, 228, 229)
_LINKS: Final = (_ETHERNET, _LINUX_COOKED, _LOOPBACK, _LINUX_COOKED_2, *_RAW_KINDS)
_VLAN_TYPES: Final = (0x8100, 0x88A8, 0x9100)
_IP_TYPES: Final = (0x0800, 0x86DD)


class CaptureReader:
    """The IP packets of a capture file, in its order. Iterate once; the counts are complete when that has ended.

    InputError, when it is made or while it is read, if the file is missing, no capture, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.counts: Counter[str] = Counter()
        """`packets`, and those left out: `not_ip`, `cut_short` (at the end of the file), `without_time` (simple packets
        of pcapng)."""
        self._path = path
        self._file = _open(path)
        self._bytes = path.stat().st_size
        self._interfaces = _Interfaces()
        try:
            self._reader = _dpkt_reader(self._file, path, self._interfaces)
        except BaseException:
            self._file.close()
            raise
        link = self._reader.datalink()
        if link not in _LINKS:
            self._file.close()
            what = f"its packets have link layer {link}, which carries no IP that is read here"
            raise InputError(what, where=str(path), help="capture on an Ethernet or IP interface")
        self._link = link

    @property
    def done(self) -> float:
        """The part of the file that has been read, 0 to 1."""
        return 1.0 if self._file.closed else self._file.tell() / max(1, self._bytes)

    @property
    def cut_short(self) -> bool:
        """Whether the file ended within a packet."""
        return bool(self.counts["cut_short"])

    def __iter__(self) -> Iterator[TimedPacket]:
        with self._file:
            records = iter(self._reader)
            while (record := self._next(records)) is not None:
                seconds, frame = record
                self.counts["packets"] += 1
                link, time_us = self._interfaces.latest or (self._link, round(seconds * 1_000_000))
                data = _ip_of(link, frame)
                if data is None:
                    self.counts["not_ip"] += 1
                else:
                    yield TimedPacket(time_us, data)
            if self._interfaces.simple:
                self.counts["without_time"] = self._interfaces.simple

    def _next(self, records: Iterator[tuple[Any, bytes]]) -> tuple[Any, bytes] | None:
        try:
            return next(records, None)
        except _CutShort:
            self.counts["cut_short"] += 1
            return None
        except Exception as error:  # dpkt raises its own, struct's and others for one damaged block
            what = f"damaged after {self.counts['packets']} packets: {error}"
            raise InputError(what, where=str(self._path), help="repair it, for example with editcap") from error


class _CutShort(Exception):
    """The file ended within a header or a packet."""


class _Interfaces:
    """The interfaces of a pcapng file, and from which of them its latest packet is. It sees each block as it is read;
    without any, the file is a pcap."""

    def __init__(self) -> None:
        self.latest: tuple[int, int] | None = None
        """The link layer of the latest packet, and its time in µs."""
        self.simple = 0
        """Packets without a time; dpkt leaves them out."""
        self._order = "<"
        self._known: list[tuple[int, int, int]] = []
        """Link layer, ticks in a second, and seconds to add."""

    def begin(self, head: bytes) -> None:
        """The header of the first section."""
        self._order = "<" if head[8:12] == _BYTE_ORDER_LITTLE else ">"

    def take(self, head: bytes, body: bytes) -> None:
        """A block. ValueError, or struct's, if it is damaged."""
        (kind,) = struct.unpack_from(f"{self._order}I", head)
        if kind == _SECTION:
            if (body[:4] == _BYTE_ORDER_LITTLE) != (self._order == "<"):
                raise ValueError("a section of the other byte order")
            self._known = []
        elif kind == _INTERFACE:
            self._known.append(self._described(body))
        elif kind in {_ENHANCED, _PACKET}:
            number, high, low = struct.unpack_from(f"{self._order}{'III' if kind == _ENHANCED else 'H2xII'}", body)
            if number >= len(self._known):
                raise ValueError(f"a packet of interface {number}, which is not described")
            link, ticks, offset_s = self._known[number]
            self.latest = link, offset_s * 1_000_000 + round((high << 32 | low) * 1_000_000 / ticks)
        elif kind == _SIMPLE:
            self.simple += 1

    def _described(self, body: bytes) -> tuple[int, int, int]:
        (link,) = struct.unpack_from(f"{self._order}H", body)
        ticks, offset_s, at = 1_000_000, 0, 8
        while at + 4 <= len(body) - 4:
            option, size = struct.unpack_from(f"{self._order}HH", body, at)
            if option == _RESOLUTION and size:
                ticks = (2 if body[at + 4] & 0x80 else 10) ** (body[at + 4] & 0x7F)
            elif option == _OFFSET:
                (offset_s,) = struct.unpack_from(f"{self._order}q", body, at + 4)
            elif option == 0:
                break
            at += 4 + -(-size // 4) * 4
        return link, ticks, offset_s


class _WholeReads:
    """A file of which dpkt reads headers and bodies in turn; it would take a short body for a whole one. Headers may be
    missing at the end of the file, bodies not."""

    name = "capture"

    def __init__(self, file: IO[bytes], first_body: int, interfaces: _Interfaces) -> None:
        """`first_body` is the number of the first read that is a body: 1 in a pcapng, which has blocks, and 2 in a
        pcap."""
        self._file = file
        self._reads = 0
        self._first_body = first_body
        self._head = b""
        self._interfaces = interfaces

    def read(self, size: int) -> bytes:
        number, self._reads = self._reads, self._reads + 1
        if not 0 <= size <= BLOCK_BYTES_MAX:
            raise ValueError(f"a block of {size} bytes")
        found = self._file.read(size)
        is_body = number >= self._first_body and (number - self._first_body) % 2 == 0
        if len(found) < size and (found or is_body or not number):
            raise _CutShort
        if self._first_body == 1 and found:
            if is_body and number > 1:
                self._interfaces.take(self._head, found)
            elif not number:
                self._interfaces.begin(found)
            self._head = found
        return found


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), help="give a capture file") from error


def _dpkt_reader(file: IO[bytes], path: Path, interfaces: _Interfaces) -> Any:  # noqa: ANN401  # a class without types
    try:
        from dpkt import pcap, pcapng  # type: ignore[import-untyped]  # noqa: PLC0415  # an extra
    except ImportError:
        raise InputError("reading captures needs dpkt", where=str(path), help="pip install dpkt") from None
    begin = file.read(4)
    file.seek(0)
    if begin[:2] == _GZIP:
        raise InputError("it is compressed", where=str(path), help=f"unpack it: gunzip -c {path} > capture.pcap")
    is_pcapng = begin == _PCAPNG
    whole = _WholeReads(file, 1 if is_pcapng else 2, interfaces)
    try:
        return pcapng.Reader(whole) if is_pcapng else pcap.Reader(whole)
    except _CutShort:
        what = "it is too short for a capture"
    except Exception as error:  # as above
        what = f"it is no capture: {str(error) or type(error).__name__}"
    raise InputError(what, where=str(path), help="give a pcap or pcapng file")


def _ip_of(link: int, frame: bytes) -> bytes | None:
    """The frame from its IP header on; None if it carries something else."""
    if link in _RAW_KINDS:
        return frame
    if link == _LOOPBACK:
        return frame[4:] if len(frame) > 4 else None
    if link == _LINUX_COOKED:
        at, kind = 16, frame[14:16]
    elif link == _LINUX_COOKED_2:
        at, kind = 20, frame[:2]
    else:
        at, kind = 14, frame[12:14]
        while int.from_bytes(kind) in _VLAN_TYPES:
            at, kind = at + 4, frame[at + 2 : at + 4]
    return frame[at:] if int.from_bytes(kind) in _IP_TYPES else None


def write_capture(path: Path, packets: Iterable[TimedPacket]) -> int:
    """Write packets as a pcap file with Ethernet headers; returns how many. OSError if the file cannot be written."""
    count = 0
    with path.open("wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 1 << 18, _ETHERNET))
        for time_us, data in packets:
            frame = ETHERNET + data
            file.write(struct.pack("<IIII", time_us // 1_000_000, time_us % 1_000_000, len(frame), len(frame)) + frame)
            count += 1
    return count
