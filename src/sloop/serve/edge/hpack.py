"""Header compression of HTTP/2, as far as a server of unary gRPC needs it: decoding what clients send, with bounds, and
encoding without a table of our own.

What a block expands to is counted while it is decoded: two bytes of it may refer to four thousand of a table. Source:
RFC 7541.
"""

from typing import Final

TABLE_BYTES_MAX: Final = 4096
"""The size of the dynamic table, which is the protocol's default."""
HEAD_BYTES_MAX: Final = 16 * 1024
"""The most that a block may expand to, counted as the protocol does: names, values and 32 bytes for each field."""
FIELD_BYTES: Final = 32
INTEGER_BYTES_MAX: Final = 4
RESIZES_MAX: Final = 2
"""Changes of the table's size at the beginning of a block: the least size since the block before, and the last."""

KNOWN_MAX: Final = 16
KNOWN_BYTES_MAX: Final = 512
"""How many decoded blocks are kept, and of what size."""

Field = tuple[str, str]

_NAMES: Final = (
    "accept-language accept-ranges accept access-control-allow-origin age allow authorization cache-control "
    "content-disposition content-encoding content-language content-length content-location content-range content-type "
    "cookie date etag expect expires from host if-match if-modified-since if-none-match if-range if-unmodified-since "
    "last-modified link location max-forwards proxy-authenticate proxy-authorization range referer refresh retry-after "
    "server set-cookie strict-transport-security transfer-encoding user-agent vary via www-authenticate"
)
_STATIC: Final[tuple[Field, ...]] = (
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    *((":status", status) for status in ("200", "204", "206", "304", "400", "404", "500")),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    *((name, "") for name in _NAMES.split()),
)
"""RFC 7541, appendix A; the first has the index 1."""

# RFC 7541, appendix B: the length in bits of the code of each byte, and of the end of a string. The code is canonical:
# codes of one length are consecutive, in the order of the bytes, so that the lengths say all.
_BITS: Final = (
    "13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28 28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28 "
    "6 10 10 12 13 6 8 11 10 10 8 11 8 6 6 6 5 5 5 6 6 6 6 6 6 6 7 8 15 6 12 10 "
    "13 6 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 8 7 8 13 19 13 14 6 "
    "15 5 6 5 6 5 6 6 6 5 7 7 6 6 6 5 6 7 6 5 5 6 7 7 7 7 7 15 11 14 13 28 "
    "20 22 20 20 22 22 22 23 22 23 23 23 23 23 24 23 24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24 "
    "22 21 20 22 22 23 23 21 23 22 22 24 21 22 23 23 21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23 "
    "26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25 19 21 26 27 27 26 27 24 21 21 26 26 28 27 27 27 "
    "20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27 27 27 27 27 28 27 27 27 27 27 26 30"
)
_CODE_BITS: Final = bytes(map(int, _BITS.split()))
_END: Final = 256


class HpackError(Exception):
    """The block is malformed or expands to too much. The connection cannot go on: the tables differ from now on."""


def _code() -> dict[tuple[int, int], int]:
    """By (bits, code), the byte that it stands for."""
    found: dict[tuple[int, int], int] = {}
    code = bits_before = 0
    for bits, byte in sorted((bits, byte) for byte, bits in enumerate(_CODE_BITS)):
        code = (code + 1 if found else 0) << (bits - bits_before)
        found[bits, code] = byte
        bits_before = bits
    return found


_CODE: Final = _code()


class _State(dict[int, tuple[bytes, "_State"]]):
    """By the next byte, the bytes found and the state after it. Filled as needed."""

    __slots__ = ("bits", "rest")

    def __init__(self, bits: int, rest: int) -> None:
        super().__init__()
        self.bits, self.rest = bits, rest
        """The number and value of the bits that remain of the byte before."""

    def __missing__(self, byte: int) -> tuple[bytes, "_State"]:
        found = bytearray()
        bits, rest = self.bits, self.rest
        for shift in range(7, -1, -1):
            bits, rest = bits + 1, rest << 1 | (byte >> shift & 1)
            known = _CODE.get((bits, rest))
            if known is not None:
                if known == _END:
                    raise HpackError("a string contains the code of its end")
                found.append(known)
                bits = rest = 0
        after = _STATES.get((bits, rest))
        if after is None:
            after = _STATES[bits, rest] = _State(bits, rest)
        self[byte] = step = bytes(found), after
        return step


_START: Final = _State(0, 0)
_STATES: Final = {(0, 0): _START}
"""Those there have been. What remains of a byte is the beginning of a code, so that there are at most 256."""


def unpacked(data: bytes) -> bytes:
    """The string that the Huffman-coded `data` stands for."""
    found: list[bytes] = []
    state = _START
    for byte in data:
        part, state = state[byte]
        found.append(part)
    if state.bits > 7 or state.rest != (1 << state.bits) - 1:
        raise HpackError("a string is padded with something else than the beginning of its end")
    return b"".join(found)


class Decoder:
    """Decodes the blocks of one connection, in their order."""

    __slots__ = ("_bytes_max", "_entries", "_known", "_size", "_version")

    def __init__(self) -> None:
        self._entries: list[Field] = []
        """The dynamic table; the newest entry is the last."""
        self._size = 0
        self._bytes_max = TABLE_BYTES_MAX
        self._version = 0
        """Grows with each change of the table."""
        self._known: dict[bytes, list[Field]] = {}
        """Blocks that were decoded since the table changed: most calls of a client have the same head."""

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a block. The text is one character per byte (Latin-1)."""
        known = self._known.get(block)
        if known is not None:
            return known
        fields: list[Field] = []
        at = size = resizes = 0
        version = self._version
        while at < len(block):
            if block[at] & 0xE0 == 0x20:
                resizes += 1
                if fields:
                    raise HpackError("the size of the table changes within a block")
                if resizes > RESIZES_MAX:
                    raise HpackError(f"the size of the table changes more than {RESIZES_MAX} times before a block")
                at = self._resize(block, at)
                continue
            field, at = self._field(block, at)
            size += len(field[0]) + len(field[1]) + FIELD_BYTES
            if size > HEAD_BYTES_MAX:
                raise HpackError(f"a head of more than {HEAD_BYTES_MAX} bytes")
            fields.append(field)
        if version != self._version:
            self._known.clear()
        elif len(self._known) < KNOWN_MAX and len(block) < KNOWN_BYTES_MAX:
            self._known[block] = fields
        return fields

    def _field(self, block: bytes, at: int) -> tuple[Field, int]:
        """A field, and where what follows begins."""
        first = block[at]
        if first & 0x80:
            index, at = _integer(block, at, 7)
            return self._entry(index), at
        is_kept = first & 0x40
        index, at = _integer(block, at, 6 if is_kept else 4)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        if is_kept:
            self._version += 1
            self._entries.append((name, value))
            self._size += len(name) + len(value) + FIELD_BYTES
            self._evict()
        return (name, value), at

    def _resize(self, block: bytes, at: int) -> int:
        """Change the size of the dynamic table, and return where what follows begins."""
        self._bytes_max, at = _integer(block, at, 5)
        if self._bytes_max > TABLE_BYTES_MAX:
            raise HpackError(f"a table of {self._bytes_max} bytes; the most is {TABLE_BYTES_MAX}")
        self._version += 1
        self._evict()
        return at

    def _entry(self, index: int) -> Field:
        """An entry of the static table, or behind it of the dynamic one, which begins with the newest."""
        if 1 <= index <= len(_STATIC):
            return _STATIC[index - 1]
        place = index - len(_STATIC)
        if not 1 <= place <= len(self._entries):
            raise HpackError(f"no entry {index} in the tables")
        return self._entries[-place]

    def _evict(self) -> None:
        while self._size > self._bytes_max:
            name, value = self._entries.pop(0)
            self._size -= len(name) + len(value) + FIELD_BYTES


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number whose first `bits` bits end the byte at `at`, and where what follows begins."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for place in range(INTEGER_BYTES_MAX):
        if at >= len(block):
            raise HpackError("the block ends within a number")
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at
    raise HpackError("a number of more than 28 bits")


def _string(block: bytes, at: int) -> tuple[str, int]:
    """A string, and where what follows begins."""
    if at >= len(block):
        raise HpackError("the block ends before a string")
    is_packed = block[at] & 0x80
    length, at = _integer(block, at, 7)
    end = at + length
    if end > len(block):
        raise HpackError("the block ends within a string")
    raw = block[at:end]
    return (unpacked(raw) if is_packed else raw).decode("latin-1"), end


def encode(*fields: Field) -> bytes:
    """A block of these fields that leaves the reader's table as it is."""
    parts: list[bytes] = []
    for name, value in fields:
        parts.append(b"\0")
        for text in (name, value):
            raw = text.encode("latin-1")
            parts += (_length(len(raw)), raw)
    return b"".join(parts)


def _length(size: int) -> bytes:
    """The length of a string, as a number with a prefix of seven bits."""
    if size < 127:
        return bytes((size,))
    found, size = bytearray((127,)), size - 127
    while size >= 128:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)
