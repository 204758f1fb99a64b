"""What an application, and a server of several, takes at most: the keys of `limits:` in their files, and of the file
that `sloop serve --limits` names.

Sizes are in bytes; names say other units. A key of an application holds for this application alone, one of a deployment
for its server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Final

from sloop.options import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Value,
    adjust,
    check_range,
    read_options,
)

ROWS_MOST: Final = 2**31 - 1
"""The largest number of rows: that of a dimension in the protocols."""
ROWS_MAX: Final = 1024
"""The most rows of one request, unless a file says otherwise. They are 64 forward passes of 16 rows each, which take
an ordinary model seconds on a core: a larger request would hardly meet its own deadline."""
REQUESTS_MAX: Final = 16_384
BODIES_BYTES_MAX: Final = 2**30
LOG_BYTES_MIN: Final = 2**20
"""The least that an event log may take."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a server takes, of one application or of all together; 0 for the limits of the server."""

    requests: NonNegativeInt = 0
    """Open requests."""
    bytes: NonNegativeInt = 0
    """Bodies of open requests, in bytes."""
    rows: Annotated[int, Range(least=0, most=ROWS_MOST)] = 0
    """The most rows of one request; in a deployment, for each application that sets no limit of its own. 0 stands for
    `ROWS_MAX`."""
    worker_bytes: NonNegativeInt = 0
    """The memory of one worker; in a deployment, for each application that says nothing. 0: what follows from its
    profile (`sloop.serve.worker_memory`)."""


@dataclass(frozen=True, slots=True)
class ServerLimits(Limits):
    """How much a server takes and keeps, and how long it waits for clients."""

    body_bytes: PositiveInt = 2**26
    """The body of one request."""
    json_body_bytes: PositiveInt = 2**23
    """The JSON in a body; binary tensors do not count."""
    answers_bytes: PositiveInt = 2**28
    """Answers over HTTP that clients have not yet taken, at each edge. Beyond it, the connection that has stalled
    longest is closed."""
    connections: NonNegativeInt = 0
    """Open connections to each edge. 0: 16,384, or what the limit of file descriptors allows."""
    connections_each: NonNegativeInt = 0
    """The same from one address, of IPv6 from one /64. 0: half of `connections`."""
    head_s: PositiveFloat = 10.0
    """To send the head of a request, from its first byte."""
    pause_s: PositiveFloat = 10.0
    """Between two parts of a body."""
    body_s: PositiveFloat = 60.0
    """To send a body, or to take an answer at 16 KiB/s on average."""
    idle_s: PositiveFloat = 620.0
    """Between two requests of a connection over HTTP: longer than load balancers of clouds keep connections to
    servers (600 s at Google's). A server that closes first resets requests that the balancer is sending."""
    send_s: PositiveFloat = 10.0
    """In which a client must take some of its answer."""
    drain_s: NonNegativeFloat = 30.0
    """To finish open requests when the server stops."""
    spare_workers: NonNegativeInt | None = None
    """Workers that are started ahead, to be there when a replica is needed. None: one for each core."""
    log_bytes: NonNegativeInt = 2**30
    """The event log with those of earlier runs; the oldest segments are deleted. 0: no event log."""
    log_age_h: NonNegativeFloat = 0.0
    """Hours after which a segment of the event log is deleted. 0: never."""
    log_sample: Annotated[float, Range(least=0, most=1)] = 1.0
    """The fraction of the requests served in time that the event log has; all others are logged."""
    otlp_ratio: Annotated[float, Range(least=0, most=1)] = 1.0
    """Of the requests that come without a traceparent, the fraction that is traced."""

    def __post_init__(self) -> None:
        """Raise `OutOfRange` for a log that could not hold its segments."""
        if self.log_bytes:
            check_range("log_bytes", self.log_bytes, least=LOG_BYTES_MIN)

    @property
    def requests_max(self) -> int:
        """The most open requests of all applications together."""
        return self.requests or REQUESTS_MAX

    @property
    def bodies_bytes_max(self) -> int:
        """The most bytes of the bodies of all open requests."""
        return self.bytes or BODIES_BYTES_MAX


SERVER_KEYS: Final = frozenset(each.name for each in fields(ServerLimits)) - {each.name for each in fields(Limits)}
"""The keys that only a server has."""


def read_limits(declared: Value, limits: ServerLimits = ServerLimits()) -> ServerLimits:
    """The limits of a server that are declared, and those of `limits` for all other keys."""
    return adjust(limits, declared)


def read_own_limits(declared: Value) -> Limits:
    """The limits of one application. InputError for a key that only a server has, saying where it belongs."""
    for key in SERVER_KEYS.intersection(declared.content if isinstance(declared.content, Mapping) else ()):
        fix = "write it into `limits:` of a deployment file, or into a file for `sloop serve --limits`"
        declared.mapping()[key].fail(f"{key!r} is a limit of a server, not of one application", fix)
    return read_options(Limits, declared)


def setting(key: str) -> str:
    """Which key sets a limit that a client has met, for an error."""
    return f"`limits: {{{key}: …}}` of the server sets the limit"
