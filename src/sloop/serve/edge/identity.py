"""What clients call their requests: `x-request-id`, the protocol's `id`, and W3C's `traceparent`.

The name goes into the event log, errors and answers, so that its length and characters are bounded. A header that is
not of this form is ignored, as Trace Context asks for `traceparent`; it must not make a request fail.

Source: W3C Trace Context, level 1, 3.2.
"""

import re
from typing import Final, NamedTuple

REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"
ID_CHARS_MAX: Final = 128
_ID: Final = re.compile(rf"[\x21-\x7e]{{1,{ID_CHARS_MAX}}}")
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?:-.*)?"
)


class Identity(NamedTuple):
    """What a client calls a request. Both are empty if it says nothing."""

    request_id: str = ""
    trace: str = ""
    """`TRACE-SPAN-FLAGS`: the trace, the client's span in it, and whether it is sampled."""


NAMELESS: Final = Identity()


def named(value: object) -> str:
    """A client's name for a request, if it is one: visible ASCII, at most `ID_CHARS_MAX`. Otherwise empty."""
    return value if isinstance(value, str) and _ID.fullmatch(value) else ""


def identity_of(request_id: str | None, traceparent: str | None, own: object = "") -> Identity:
    """The identity of a request with these headers, whose body calls it `own`. The first of `x-request-id`, `own` and
    the trace's id is its name."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    trace = f"{found['trace']}-{found['span']}-{found['flags']}" if found is not None else ""
    return Identity(named(request_id) or named(own) or (found["trace"] if found is not None else ""), trace)
