"""Frames of HTTP/2 as attackers write them, with heads that are not compressed. Source: RFC 9113 and RFC 7541."""

import struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME: Final = struct.Struct(">BHBBL")
"""The head of a frame: its length as 8 and 16 bits, its type, flags, and the number of its stream."""
FRAME_BYTES_MAX: Final = 16_384
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 0x1, 0x4
INITIAL_WINDOW_SIZE: Final = 4
PREFIX_MAX: Final = 127
"""The largest length that a single byte of RFC 7541 holds, where one bit says whether the string is compressed."""


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, number) + payload


def encode(*fields: tuple[str, str]) -> bytes:
    """The fields of a head as literals, none of which is indexed."""
    return b"".join(b"\0" + text(name.encode()) + text(value.encode()) for name, value in fields)


def text(value: bytes, *, is_compressed: bool = False) -> bytes:
    """A string with its length."""
    mark, length = 128 * is_compressed, len(value)
    if length < PREFIX_MAX:
        return bytes((mark | length,)) + value
    found, more = bytearray((mark | PREFIX_MAX,)), length - PREFIX_MAX
    while more > 127:
        found.append(more & 127 | 128)
        more >>= 7
    return bytes(found) + bytes((more,)) + value
