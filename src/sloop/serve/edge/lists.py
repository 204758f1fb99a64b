"""Long lists in JSON, read and written piece by piece: no turn of the event loop is as long as megabytes take.

Nearly all of a large body is lists of numbers or strings. `outline` finds them without parsing and puts a mark in the
place of each, so that the strict decoder validates the short rest as it validates small bodies. Lists are then decoded
in pieces, which were cut at commas: brackets that are open at a cut are closed at the end of one piece and opened again
at the beginning of the next, so each piece is JSON of its own, and all of them are valid exactly if the list is.

What holds objects stays in the rest, which is why a list is one without braces outside strings. JSON that is long
beside its lists is refused.
"""

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, count
from math import prod
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.serve.edge.refusal import Refusal, bad
from sloop.serve.edge.steps import Steps

PIECE_BYTES: Final = 8 * 1024
"""About so long is a piece: numbers of so many bytes are decoded and converted in some 0.1 ms."""
LIST_BYTES_MIN: Final = 128
"""Shorter lists stay in the rest."""
STRING_BYTES_MIN: Final = 4 * 1024
"""A string in the rest that is at least so long may be a BYTES element, and is then kept beside it."""
REST_BYTES_MAX: Final = 64 * 1024
"""The most that may be left of a body, beside its lists: it is decoded at once."""
ELEMENT_BYTES_MAX: Final = 64 * 1024
"""An element of a list that is no string. No number is so long."""
TOKENS_AT_ONCE: Final = 128
DEPTH_MAX: Final = 64
"""Of nested lists. No tensor has so many dimensions."""
WORDS_BYTES_MAX: Final = 2**20
"""The largest JSON in which NaN and Infinity may be words without quotation marks: Python's parser, which takes them,
needs ten times as long as msgspec."""

Text = bytes | bytearray

_SPACE: Final = b" \t\r\n"
_SPACES: Final = re.compile(rb"[ \t\r\n]*+")
_STOPS: Final = re.compile(rb'[":]')
_FLAT: Final = re.compile(rb'\[[^][{}"]*+\]')
"""A list without lists, objects and strings."""
_INSIDE: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
"""What can follow within a string."""
_UNITS: Final = re.compile(rb'(?:[^"\\]++|\\u....|\\[^u])*+', re.DOTALL)
"""The same without the beginning of an escape sequence at the end."""
_SECOND_HALF: Final = re.compile(rb"\\u[dD][c-fC-F]..", re.DOTALL)
"""Of a character that JSON escapes in two."""
_WHOLE: Final = re.compile(rb'(?:[^"]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""Everything up to the first string that does not end."""
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKET: Final = re.compile(rb"[][{}:]")
_BRACKETS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}]', re.DOTALL)
_COMMA: Final = re.compile(rb"[ \t\r\n]*+,")
_BYTE: Final = re.compile(r" \(byte \d+\)")
_DECODE: Final = msgspec.json.Decoder(list[Any]).decode
_DECODE_STRING: Final = msgspec.json.Decoder(str).decode
_QUOTE: Final = ord('"')

HELP: Final = "send one JSON object; before binary tensors, its length in Inference-Header-Content-Length"


def malformed(why: object, fix: str = HELP) -> Refusal:
    """The 400 for what is no JSON."""
    return bad("body", f"malformed JSON ({why})", fix)


class LongList(Struct):
    """A list that was taken out of a body: the text of its pieces, and how many brackets are open before each."""

    pieces: deque[tuple[Text, int]]
    has_objects: bool = False

    def decode_next(self, has_words: bool | None) -> tuple[list[Any], int, int]:
        """Decode the next piece, and forget it: its lists, and how many brackets are open before and after it. Raises a
        400."""
        text, before = self.pieces.popleft()
        after = self.pieces[0][1] if self.pieces else 0
        return decoded_piece(text, before, after, has_words=has_words), before, after


class Outline(Struct):
    """A body without its long lists. `[mark, 3]` stands for the fourth of them, and `mark:3` for the fourth string."""

    rest: Text
    mark: str = ""
    lists: list[LongList] = []  # msgspec creates new lists for each instance
    strings: list[bytes] = []
    """In UTF-8."""
    has_words: bool | None = None
    """Whether NaN and Infinity are words somewhere; None if that is not known."""

    def list_at(self, value: object) -> LongList | None:
        """The list for which a decoded value stands."""
        if self.lists and type(value) is list and len(value) == 2 and value[0] == self.mark:
            return self.lists[value[1]]
        return None

    def string_at(self, value: object) -> bytes | None:
        """The string for which a decoded value stands."""
        if self.strings and type(value) is str and value.startswith(self.mark):
            return self.strings[int(value[len(self.mark) + 1 :])]
        return None


def outline(body: Text, size: int, key: bytes) -> Steps[Outline]:
    """The outline of the first `size` bytes of a body, without the long lists that `key` has, wherever it occurs.
    Raises a 400 for what cannot be JSON, and a 413 for too much beside these lists."""
    return (yield from _Scan(body, size, b'"%b"' % key).outline())


def outline_of_rows(body: Text, size: int, key: bytes) -> Steps[Outline]:
    """The outline of a body without any long lists and strings, and without the list that `key` has, even if that holds
    objects. Raises a 400 and a 413 likewise."""
    scan = _Scan(body, size, b'"%b"' % key, has_rows=True)
    found = yield from scan.outline()
    yield from _take_rows(found, key, scan.rows_at)
    return found


def _take_rows(given: Outline, key: bytes, start: int) -> Steps[None]:
    """Take the list that `key` has, which begins at `start`, out of the rest, if that is long."""
    rest = given.rest
    if start < 0 or len(rest) <= REST_BYTES_MAX:
        _check_rest(len(rest))
        return
    begun = start
    pieces: deque[tuple[Text, int]] = deque()
    depth = 0
    for place, token in enumerate(_BRACKETS.finditer(rest, start)):
        depth += (token[0] in b"[{") - (token[0] in b"]}")
        end = token.end()
        if end - begun > REST_BYTES_MAX + PIECE_BYTES:
            what = f"{key.decode()}: a row has more than {REST_BYTES_MAX} bytes outside its long lists and strings"
            raise Refusal(413, what, "send whole tensors as `inputs`, or in binary form")
        if depth == 0:
            break
        if depth == 1 and end - begun >= PIECE_BYTES and (comma := _COMMA.match(rest, end)):
            pieces.append((rest[begun:end], min(1, len(pieces))))
            begun = comma.end()
        if not place % TOKENS_AT_ONCE:
            yield
    if depth:
        raise malformed("a list does not end")
    pieces.append((rest[begun:end], min(1, len(pieces))))
    given.rest = rest[:start] + b'["%b",%d]' % (given.mark.encode(), len(given.lists)) + rest[end:]
    given.lists.append(LongList(pieces, has_objects=True))
    _check_rest(len(given.rest))


def _check_rest(size: int) -> None:
    if size > REST_BYTES_MAX:
        what = f"body: the JSON has {size} bytes or more outside the lists of its tensors"
        raise Refusal(413, what, f"send at most {REST_BYTES_MAX} there, and tensors as lists or in binary form")


class _Scan:
    """Goes through a body once. With `has_rows`, all lists are taken out, but within the rows, which `key` has, only
    those that are longer than a piece, and strings too."""

    def __init__(self, body: Text, size: int, key: bytes, *, has_rows: bool = False) -> None:
        self._body, self._size, self._key, self._has_rows = body, size, key, has_rows
        self._list_bytes_min = LIST_BYTES_MIN
        words = (body.find(b"NaN", 0, size), body.find(b"Infinity", 0, size)) if size <= WORDS_BYTES_MAX else (-1,)
        self._found = Outline(b"", secrets.token_hex(8), has_words=max(words) >= 0)
        self._parts: list[Text] = []
        self._parts_bytes = 0
        self._from = 0
        """Where the part of the rest begins that was not taken yet."""
        self.rows_at = -1
        """Where in the rest the first list begins that the key has; negative if there is none."""

    def outline(self) -> Steps[Outline]:
        body, size, at, is_key = self._body, self._size, 0, False
        for place in count():
            if at >= size:
                break
            if not self._has_rows:
                _check_rest(self._parts_bytes + at - self._from)
            end = min(at + PIECE_BYTES, size)
            found = _STOPS.search(body, at, end)
            if found is None:
                self._pass_nothing(at, end)
                at = end
            elif body[begin := found.start()] == _QUOTE:
                string = _STRING.match(body, begin, min(begin + STRING_BYTES_MIN, size))
                at = (yield from self._pass_string(begin)) if string is None else string.end()
                is_key = body[begin:at] == self._key
                if is_key and self._has_rows:
                    self._list_bytes_min = PIECE_BYTES
            else:
                at = yield from self._pass_space(begin + 1)
                if at < size and body[at] == ord("[") and (is_key or self._has_rows):
                    if is_key and self.rows_at < 0:
                        self.rows_at = self._parts_bytes + at - self._from
                    at = yield from self._pass_list(at)
            if found is None or not place % TOKENS_AT_ONCE:
                yield
        self._keep(size)
        self._found.rest = b"".join(self._parts)
        return self._found

    def _pass_nothing(self, at: int, end: int) -> None:
        """What is neither a string nor the beginning of a value: where it is long, it is space."""
        if not self._body[at:end].strip(_SPACE):
            self._keep(at, b" ")
            self._from = end
        elif self._has_rows and end - at == PIECE_BYTES:
            _check_rest(self._size)

    def _keep(self, until: int, mark: bytes = b"") -> None:
        """What is before `until` belongs to the rest, and then a mark."""
        self._parts += (self._body[self._from : until], mark)
        self._parts_bytes += until - self._from + len(mark)

    def _pass_space(self, at: int) -> Steps[int]:
        while at < self._size:
            end = min(at + PIECE_BYTES, self._size)
            found = _SPACES.match(self._body, at, end)
            assert found is not None, "it matches nothing"
            at = found.end()
            if at < end:
                break
            yield
        return at

    def _pass_string(self, start: int) -> Steps[int]:
        """Where a string ends that begins at `start`. A long one that is not a key is taken out."""
        end = yield from self._string_end(start)
        if self._has_rows and end - start >= STRING_BYTES_MIN:
            after = yield from self._pass_space(end)
            if self._body[after : after + 1] == b":":
                raise bad("body", f"a key has {end - start} bytes", "use the names of the inputs")
            self._keep(start, (yield from self._take_string(start, end)))
            self._from = end
        return end

    def _string_end(self, start: int) -> Steps[int]:
        body, size, at = self._body, self._size, start + 1
        while True:
            end = min(at + PIECE_BYTES, size)
            found = _INSIDE.match(body, at, end)
            assert found is not None, "it matches nothing"
            stop = found.end()
            if stop < end and body[stop] == _QUOTE:
                return stop + 1
            if end == size:
                raise malformed("it ends within a string")
            at = stop
            yield

    def _take_string(self, start: int, end: int) -> Steps[bytes]:
        """Keep a string, and return the mark that stands for it."""
        value = yield from _string_of(self._body, start + 1, end - 1)
        self._found.strings.append(value)
        return b'"%s:%d"' % (self._found.mark.encode(), len(self._found.strings) - 1)

    def _pass_list(self, start: int) -> Steps[int]:
        """Take out the list that begins at `start`, unless it is short or holds objects. Returns where to go on."""
        pieces: deque[tuple[Text, int]] = deque()
        flat = _FLAT.match(self._body, start, min(start + PIECE_BYTES, self._size))
        if flat is not None:
            end = flat.end()
            pieces.append((flat[0], 0))
        else:
            end = yield from self._cut(start, pieces)
            if end < 0:
                return start + 1
        if end - start >= self._list_bytes_min:
            self._keep(start, b'["%s",%d]' % (self._found.mark.encode(), len(self._found.lists)))
            self._from = end
            self._found.lists.append(LongList(pieces))
        return end

    def _cut(self, start: int, pieces: deque[tuple[Text, int]]) -> Steps[int]:
        """Cut a list into pieces. Returns where it ends; a negative number if it holds objects."""
        body, size = self._body, self._size
        held: list[Text] = []
        """What belongs to the next piece and had no comma."""
        at, depth, begun = start, 0, 0
        while True:
            stop = min(at + PIECE_BYTES, size)
            end = self._outside(at, stop)
            chunk = body[at:end]
            bare = _STRING.sub(b"", chunk) if b'"' in chunk and _BRACKET.search(chunk) else chunk
            after = depth + bare.count(b"[") - bare.count(b"]")
            if after <= 0 or b"{" in bare or b"}" in bare or b":" in bare:
                close = _end_in(chunk, depth)
                if close >= 0:
                    pieces.append((b"".join((*held, chunk[:close])), begun))
                    return at + close
                return close
            follows = _COMMA.match(body, end, min(end + ELEMENT_BYTES_MAX, size))
            comma, rest = _last_comma(chunk) if follows is None else (len(chunk), b"")
            if comma >= 0:
                depth = after - rest.count(b"[") + rest.count(b"]")
                pieces.append((b"".join((*held, chunk[:comma])) if held else chunk[:comma], begun))
                held, begun = [], depth
                at = at + comma + 1 if follows is None else follows.end()
                if depth > DEPTH_MAX:
                    raise too_deep()
            else:
                held.append(chunk if chunk.strip(_SPACE) else b" ")
                depth, at = after, end
                if at == size:
                    raise malformed("it ends within a list")
                if end < stop:
                    element, at = yield from self._element(at)
                    held.append(element)
                elif sum(map(len, held)) > ELEMENT_BYTES_MAX:
                    raise malformed(
                        f"an element of a list, with the space beside it, has more than {ELEMENT_BYTES_MAX} bytes"
                    )
            yield

    def _outside(self, at: int, stop: int) -> int:
        """Where the last string of a chunk ends, or, if it ends within one, where that begins."""
        body = self._body
        if body.find(b'"', at, stop) < 0:
            return stop
        if body.find(b"\\", at, stop) < 0:
            return stop if body.count(b'"', at, stop) % 2 == 0 else body.rfind(b'"', at, stop)
        found = _WHOLE.match(body, at, stop)
        assert found is not None, "it matches nothing"
        return found.end()

    def _element(self, start: int) -> Steps[tuple[Text, int]]:
        """The text of a string in a list, or the mark for it, and where it ends."""
        end = yield from self._string_end(start)
        if end - start < STRING_BYTES_MIN:
            return self._body[start:end], end
        return (yield from self._take_string(start, end)), end


def _last_comma(chunk: Text) -> tuple[int, Text]:
    """The last comma that is not in a string, or a negative number; and what follows, without what is in strings."""
    comma = chunk.rfind(b",", chunk.rfind(b'"') + 1)
    if comma < 0 and b'"' in chunk:
        chunk = _STRING.sub(lambda found: b" " * len(found[0]), chunk)
        comma = chunk.rfind(b",")
    return comma, chunk[comma + 1 :]


def _end_in(chunk: Text, depth: int) -> int:
    """Where the list ends in which `depth` brackets are open; negative if an object begins first."""
    for found in _BRACKETS.finditer(chunk):
        match found[0]:
            case b"[":
                depth += 1
            case b"]":
                depth -= 1
                if depth == 0:
                    return found.end()
            case b"{":
                return -1
            case b"}":
                break
    raise malformed("a list does not end")


def _string_of(body: Text, at: int, end: int) -> Steps[bytes]:
    """The value of a string, whose text is between `at` and `end`, in UTF-8. Raises a 400 if it is none."""
    found: list[bytes] = []
    while at < end:
        stop = min(at + 4 * PIECE_BYTES, end)
        if stop < end:
            units = _UNITS.match(body, at, stop)
            assert units is not None, "it matches nothing"
            stop = units.end()
            while stop > at and body[stop] & 0xC0 == 0x80:  # within a character
                stop -= 1
            if _SECOND_HALF.match(body, stop, end):
                stop += 6
            if stop == at:
                stop = end
        try:
            found.append(_DECODE_STRING(b'"' + body[at:stop] + b'"').encode())
        except (msgspec.DecodeError, UnicodeError) as error:
            raise malformed(_BYTE.sub("", str(error))) from None
        at = stop
        yield
    return b"".join(found)


# Reading a list


class Packed(Struct):
    """A list whose elements were converted."""

    data: bytearray
    count: int
    """Of the elements."""
    lengths: list[int]
    """Of the lists of each level, the outermost first."""


def pack_list(
    found: LongList,
    given: Outline,
    convert: Callable[[list[Any]], bytes],
    *,
    depth_max: int,
    count_max: int | None,
    field: str,
) -> Steps[Packed]:
    """Convert the elements of a list, which may be nested, piece by piece; it is empty then. Raises a 400 for a list
    that is malformed, nested more than `depth_max` deep or unevenly, or has more than `count_max` elements."""
    nesting, packed = _Nesting(depth_max, field), Packed(bytearray(), 0, [])
    while found.pieces:
        elements = nesting.flattened(*found.decode_next(given.has_words))
        if given.strings:
            elements = [each if (value := given.string_at(each)) is None else value for each in elements]
        packed.data += convert(elements)
        packed.count += len(elements)
        if count_max is not None and packed.count > count_max:
            break
        yield
    packed.lengths = nesting.lengths
    return packed


def check_list(found: LongList, given: Outline) -> Steps[None]:
    """Raise a 400 if a list that nobody needs is malformed."""
    while found.pieces:
        found.decode_next(given.has_words)
        yield


def decoded_piece(text: Text, before: int, after: int, *, has_words: bool | None) -> list[Any]:
    """The lists of a piece, before and after which so many brackets are open. Raises a 400."""
    text = text.strip(_SPACE)
    # A comma was before and behind it, which the decoder does not see.
    if not text or text[0] == ord("]") or text[-1] == ord("["):
        raise malformed("an element is missing")
    whole = b"[" * before + text + b"]" * after
    try:
        return _DECODE(whole)
    except msgspec.ValidationError as error:  # a number that is too large
        raise bad("body", _BYTE.sub("", str(error)), "/openapi.json describes every request") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        if has_words:
            try:
                return with_words(whole)  # type: ignore[no-any-return]  # a list, as it begins
            except ValueError as wrong:
                raise malformed(wrong) from None
        raise malformed(_BYTE.sub("", str(error))) from None
    except RecursionError:
        raise too_deep() from None


def with_words(text: Text) -> Any:  # noqa: ANN401  # any JSON
    """The value of JSON in which NaN and Infinity may be words. Raises `ValueError`."""
    try:
        found = json.loads(text)
        # Half a character, such as \ud800, passes Python's parser, but cannot be written.
        json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise too_deep() from None
    return found


def too_deep() -> Refusal:
    """The 400 for JSON that is nested too deeply."""
    return bad("body", "JSON nested too deeply", "send flat lists of elements")


class _Nesting:
    """Flattens nested lists that come in pieces: lists of the same level must have the same length."""

    def __init__(self, depth_max: int, field: str) -> None:
        self._depth_max, self._field = depth_max, field
        self.lengths: list[int] = []
        """By level, the length of its lists; negative until one has ended."""
        self._open: list[int] = []
        """By level, how many elements of the list that has not ended have come."""

    def flattened(self, piece: list[Any], before: int, after: int) -> list[Any]:
        """The elements of a piece."""
        if not self.lengths:
            self._begin(piece)
        if len(self.lengths) == 1:
            self._count([len(piece)], 0, before, after)
            return piece
        lists = [piece]
        for level in range(len(self.lengths)):
            self._count(list(map(len, lists)), level, before, after)
            inner = list(chain.from_iterable(lists))
            if level == len(self.lengths) - 1:
                break
            if any(type(each) is not list for each in inner):
                raise self._uneven()
            lists = inner
        return inner

    def _begin(self, piece: list[Any]) -> None:
        first: Any = piece
        while type(first) is list:
            self.lengths.append(-1)
            first = first[0] if first else None
        if len(self.lengths) > self._depth_max:
            what = f"lists nested more than {self._depth_max} deep, the number of dimensions"
            raise bad(self._field, what, "send a flat list, or lists nested like the shape")
        self._open = [0] * len(self.lengths)

    def _count(self, found: list[int], level: int, before: int, after: int) -> None:
        """Check the lengths of the lists of a level, of which the first may go on and the last may not have ended."""
        if before > level:
            # The list of the next level that goes on has been counted.
            found[0] += self._open[level] - (before > level + 1)
        if after > level:
            self._open[level] = found.pop()
        if found:
            if self.lengths[level] < 0:
                self.lengths[level] = found[0]
            if found.count(self.lengths[level]) != len(found):
                raise self._uneven()

    def _uneven(self) -> Refusal:
        return bad(self._field, "the nested lists differ in length", "send a flat list, or lists nested like the shape")


# Writing a list

ELEMENTS_AT_ONCE: Final = 1024
"""So many numbers are written in some 0.1 ms."""
PART_BYTES: Final = 256 * 1024
"""Pieces are joined to parts of this size, for an answer of many parts takes long to send."""
_ENCODE: Final = msgspec.json.Encoder().encode


Take = Callable[[int], Steps[list[Any]]]
"""Returns so many of the next elements of an output."""


def write_list(shape: Sequence[int], take: Take) -> Steps[list[bytes]]:
    """The JSON of a list that is nested like `shape`, in parts; without dimensions, of its only element."""
    if not shape:
        return [_ENCODE((yield from take(1))[0])]
    count = prod(shape)
    if not count:
        return (yield from write_list(shape[: shape.index(0)], _take_empty))
    levels = [prod(shape[level:]) for level in range(len(shape))]
    """How many elements a list of each level has."""
    whole = next((level for level in range(1, len(shape)) if levels[level] <= ELEMENTS_AT_ONCE), len(shape))
    """The lists of this level are written whole."""
    inner, outer = (levels[whole] if whole < len(shape) else 1), levels[:whole]
    parts, held, held_bytes, at = [], [b""], 0, 0
    while at < count:
        taken = min(inner * max(1, ELEMENTS_AT_ONCE // inner), outer[-1] - at % outer[-1])
        elements = nested((yield from take(taken)), shape[whole:])
        opened, at = sum(not at % each for each in outer), at + taken
        closed = sum(not at % each for each in outer)
        held.append(b"[" * opened + _ENCODE(elements)[1:-1] + b"]" * closed + b"," * (at < count))
        held_bytes += len(held[-1])
        if held_bytes > PART_BYTES:
            parts.append(b"".join(held))
            held, held_bytes = [], 0
        yield
    return [*parts, b"".join(held)]


def _take_empty(count: int) -> Steps[list[Any]]:
    """So many empty lists."""
    yield from ()
    return [[]] * count


def nested(elements: list[Any], shape: Sequence[int]) -> list[Any]:
    """Lists of this shape, as many as the elements fill."""
    for size in reversed(shape):
        elements = [elements[at : at + size] for at in range(0, len(elements), size)]
    return elements


def write_string(data: memoryview) -> Steps[msgspec.Raw]:
    """The JSON of a string in UTF-8. Raises `UnicodeDecodeError` if it is none."""
    parts, at = [b'"'], 0
    while at < len(data):
        end = min(at + 4 * PIECE_BYTES, len(data))
        while end < len(data) and end > at + 4 and data[end] & 0xC0 == 0x80:  # within a character
            end -= 1
        parts.append(_ENCODE(str(data[at:end], "utf-8"))[1:-1])
        at = end
        yield
    return msgspec.Raw(b"".join((*parts, b'"')))
