"""What the frames of a client cost, and how many fields the heads of its calls have, counted as they pass.

grpcio's server bounds the size of a head, but does not count the fields that a head takes from HPACK's table: a head of
10 kB becomes 10,000 fields of 3 kB each, for which Python makes 30 MB of strings before anybody sees the call (grpcio
1.85). So the fields are counted here before. And so are the frames that bring the client nothing but may come by the
million: settings, pings, windows, resets. Nothing is decoded: strings are skipped by their length. What is broken is
left to grpcio. Source: RFC 9113 (HTTP/2), 4.1 and 6.2; RFC 7541 (HPACK), 6.
"""

from typing import Final

PREFACE_BYTES: Final = 24
FRAME_HEAD_BYTES: Final = 9
FRAME_BYTES_MAX: Final = 16_384
"""Of a frame with a part of a head."""
DATA, HEADERS, SETTINGS, CONTINUATION = 0, 1, 4, 9
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
PRIORITY_BYTES: Final = 5
BLOCK_BYTES_MAX: Final = 32 * 1024
"""Of a head as it is sent: twice what grpcio allows, which counts more than these bytes."""
FIELDS_MAX: Final = 128
SETTINGS_COST: Final = 10


class TooMuch(Exception):
    """A head has more than it may (`head`), or the frames cost too much (`frame`)."""


class Heads:
    """Follows the frames of one client."""

    __slots__ = ("_block", "_rest", "_skipped")

    def __init__(self) -> None:
        self._skipped = PREFACE_BYTES
        """Bytes that are not looked at: of the preface, or of a frame that is no part of a head."""
        self._rest = b""
        """What has come of a frame that is looked at. Grpcio would unpack a part of a head at once."""
        self._block = b""
        """What has come of a head."""

    def follow(self, data: bytes, most: int) -> tuple[bytes, int]:
        """More has come. Returns what may be passed on (a frame with a part of a head only as a whole) and what it
        costs: 1 for each frame but data, more for settings. Raises `TooMuch`, also if that is more than `most`."""
        data = self._rest + data if self._rest else data
        at, end, cost = 0, len(data), 0
        while True:
            step = min(self._skipped, end - at)
            at, self._skipped = at + step, self._skipped - step
            if end - at < FRAME_HEAD_BYTES:
                break
            size, kind = int.from_bytes(data[at : at + 3], "big"), data[at + 3]
            if kind not in (HEADERS, CONTINUATION):
                at, self._skipped = at + FRAME_HEAD_BYTES, size
                cost = self._paid(cost + (SETTINGS_COST if kind == SETTINGS else kind != DATA), most)
                continue
            if size > FRAME_BYTES_MAX:
                raise TooMuch("head")
            after = at + FRAME_HEAD_BYTES + size
            if after > end:
                break
            cost = self._paid(cost + 1, most)
            self._take(kind, data[at + 4], data[at + FRAME_HEAD_BYTES : after])
            at = after
        self._rest = data[at:]
        return data[:at], cost

    @staticmethod
    def _paid(cost: int, most: int) -> int:
        if cost > most:
            raise TooMuch("frame")
        return cost

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == HEADERS:
            if flags & PADDED and payload:
                payload = payload[1 : max(1, len(payload) - payload[0])]
            self._block = payload[PRIORITY_BYTES:] if flags & WITH_PRIORITY else payload
        else:
            self._block += payload
        if len(self._block) > BLOCK_BYTES_MAX:
            raise TooMuch("head")
        if flags & END_HEADERS:
            block, self._block = self._block, b""
            check_fields(block)


def check_fields(block: bytes) -> None:
    """Raise `TooMuch` if a head has more fields than it may."""
    at = fields = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:  # a field of the table
                _, at = _number(block, at, 7)
            elif first & 0xE0 == 0x20:  # the size of the table
                _, at = _number(block, at, 5)
                fields -= 1
            else:  # a literal, whose name may be in the table
                name, at = _number(block, at, 6 if first & 0x40 else 4)
                for _ in range(1 if name else 2):
                    size, at = _number(block, at, 7)
                    at += size
            fields += 1
            if fields > FIELDS_MAX:
                raise TooMuch("head")
    except IndexError:
        return  # it is broken, which grpcio will find


def _number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number with a prefix of so many bits, and where what follows begins."""
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    shift = 0
    while value >= most and shift <= 28:
        byte = block[at]
        value, at = value + ((byte & 0x7F) << shift), at + 1
        if byte < 0x80:
            break
        shift += 7
    return value, at
