"""What to send, where and when: the value a load run is made from.

Promises that a plan which exists is sound: anything a user can get wrong raises `InputError`. Knows nothing of sockets.
Deadlines follow the request, not the server: `deadline = sent + slo`, where a link's transfer time passes before the
server sees the request (Sponge specification 1.4 and 4.3, `delay` and `attach`).
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

from sloop.errors import InputError
from sloop.workload import Link, Trace

REQUESTS_MAX: Final = 20_000_000
CONNECTIONS_MAX: Final = 20_000
DURATION_S_MAX: Final = 7 * 86_400.0


class Delivery(StrEnum):
    """What a link's transfer time does to a request."""

    DELAY = "delay"
    """The client holds it back for that long: it arrives later, as on a real link."""
    ATTACH = "attach"
    """It arrives at once and its budget is that much smaller, as in Sponge's artefact."""


class Encoding(StrEnum):
    """How tensors travel."""

    AUTO = "auto"
    """Binary where the server says it knows the extension, else JSON."""
    JSON = "json"
    BINARY = "binary"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Instead of a trace: each of `connections` sends its next request as soon as it has an answer."""

    connections: int
    duration_s: float
    warmup_s: float = 0.0
    """Answers before this much time has passed are not counted."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load run. Open loop where `arrivals` is a trace: requests go out when due, answered or not."""

    url: str
    """Of the server, such as `http://localhost:8000`."""
    model: str
    arrivals: Trace | ClosedLoop
    slo_ms: float
    seed: int = 0
    """Of the made-up inputs."""
    link: Link | None = None
    payload_bytes: int | None = None
    """What the link carries for each request; the body's own size where it is None."""
    delivery: Delivery = Delivery.DELAY
    encoding: Encoding = Encoding.AUTO
    input_file: Path | None = None
    """`.npy`: the first input's tensor; `.json`: a whole request body. Otherwise inputs are made up from metadata."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By input name, where the model leaves dimensions open; open ones are 1 otherwise."""
    timeout_s: float = 30.0
    connections_max: int = 4_096
    warm_connections: int = 16
    """Opened before the first request is due."""
    records: Path | None = None
    """Where to write a line of JSON for each request."""
    cpus: tuple[int, ...] = ()
    """CPUs the sending process may run on; all where empty."""

    def __post_init__(self) -> None:
        split_url(self.url)
        if not self.model:
            raise InputError("no model named", where="model", help="name the application or model to send to")
        _within(self.slo_ms, 0.001, 1e9, "slo_ms")
        _within(self.timeout_s, 0.001, 3_600.0, "timeout_s")
        _within(self.connections_max, 1, CONNECTIONS_MAX, "connections_max")
        _within(self.warm_connections, 0, self.connections_max, "warm_connections")
        if self.payload_bytes is not None:
            _within(self.payload_bytes, 0, 2**40, "payload_bytes")
        if isinstance(self.arrivals, ClosedLoop):
            _within(self.arrivals.connections, 1, self.connections_max, "connections")
            _within(self.arrivals.duration_s, 0.001, DURATION_S_MAX, "duration_s")
            _within(self.arrivals.warmup_s, 0.0, self.arrivals.duration_s, "warmup_s")
            if self.link is not None:
                raise InputError("a closed loop has no link", where="link", help="give a trace to replay instead")
        else:
            _within(self.arrivals.duration_ns / 1e9, 1e-9, DURATION_S_MAX, "duration_s")


def split_url(url: str) -> SplitResult:
    """The parts of an http(s) URL, checked."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url!r} is not a URL: {error}", where="url", help="write http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise InputError(f"{url!r} is not a server's URL", where="url", help="write http://host:port")
    if not url.isascii() or any(ord(sign) <= 32 for sign in url):
        raise InputError(f"{url!r} has signs a URL cannot have", where="url", help="write http://host:port")
    before, inside, _ = f"{parts.path}/".partition("/v2/")
    if inside:
        root = parts._replace(path=before).geturl()
        raise InputError(f"{url!r} is inside a server", where="url", help=f"write {root}, and the model with --model")
    return parts


def _within(value: float, low: float, high: float, name: str) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise InputError(f"{value!r} is out of range", where=name, help=f"[{low:g}, {high:g}]")
