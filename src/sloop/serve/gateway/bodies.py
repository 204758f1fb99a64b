"""Bodies of requests: how large each may be, and how many bytes all together may be held at one time.

Promises that the bytes of every request that is being read or waits for its answer are counted once, that what would
go beyond the bounds is refused (413 for one body, 503 with `Retry-After` for all together) and counted. Shared by both
protocols. Knows nothing of what is in a body, or of how long it may take.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sloop.serve.gateway.refusal import Refusal

ALL_BYTES_MAX: Final = 2**30
LINGER_S: Final = 2.0
"""How long a refused body is read and thrown away."""
WHOLE_BYTES_MAX: Final = 2**20
"""A body up to this size is read at once, its room taken before it comes. Larger ones take room as they arrive, or a
few clients that announce much and send nothing would fill the server."""


class Incoming(Protocol):
    """A request's body that has not been read."""

    async def __call__(self) -> bytes: ...
    def __aiter__(self) -> AsyncIterator[bytes]: ...


class Bodies(Collector):
    """The room for bodies: `each_bytes_max` for one, `all_bytes_max` for all that are held at one time."""

    def __init__(self, each_bytes_max: int, all_bytes_max: int = ALL_BYTES_MAX) -> None:
        assert each_bytes_max <= all_bytes_max, f"one body of {each_bytes_max} bytes in a room for {all_bytes_max}"
        self.each_bytes_max, self.all_bytes_max = each_bytes_max, all_bytes_max
        self.held_bytes = 0
        self.refused: Counter[str] = Counter()
        """Bodies that were refused, by the bound they broke."""

    def too_large(self, size: int, *, at_least: bool = False) -> Refusal:
        """The refusal of one body, which is counted here."""
        self.refused["each"] += 1
        return Refusal(
            413,
            f"the body is {'at least ' if at_least else ''}{size} bytes, over {self.each_bytes_max}",
            "send fewer rows, or binary tensors instead of JSON; the server's limit is its --body-bytes",
        )

    def full(self) -> Refusal:
        """The refusal of a body that has no room beside the others, which is counted here."""
        self.refused["all"] += 1
        return Refusal(
            503,
            f"rejected: the server holds {self.held_bytes} bytes of requests, and {self.all_bytes_max} is all it may",
            "try again in 1 s; the server's limit is its --bodies-bytes",
            retry_after_s=1,
        )

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        yield GaugeMetricFamily("sloop_body_bytes", "Bytes of requests held by the gateway.", value=self.held_bytes)
        refused = CounterMetricFamily(
            "sloop_bodies_refused", "Requests whose body had no room: too large, or too many at once.", labels=["bound"]
        )
        for bound in ("each", "all"):
            refused.add_metric([bound], self.refused[bound])
        yield refused


class Hold:
    """One request's part of the room, given back when the context ends."""

    __slots__ = ("_bodies", "size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size = 0

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    def take(self, size: int) -> None:
        """Take room for `size` more bytes; a `Refusal` (503) where there is none."""
        bodies = self._bodies
        if bodies.held_bytes + size > bodies.all_bytes_max:
            raise bodies.full()
        bodies.held_bytes += size
        self.size += size

    def drop(self) -> None:
        """Give back what was taken."""
        self._bodies.held_bytes -= self.size
        self.size = 0

    def has_taken(self, size: int) -> bool:
        """Take room for a body that may be read at once; False, and nothing taken, for one that only `read` may read,
        or refuse.
        """
        bodies = self._bodies
        held_bytes = bodies.held_bytes + size
        if size > WHOLE_BYTES_MAX or size > bodies.each_bytes_max or held_bytes > bodies.all_bytes_max:
            return False
        bodies.held_bytes = held_bytes
        self.size += size
        return True

    async def read(self, incoming: Incoming, declared: int | None, *, asks_first: bool = False) -> bytes:
        """The body, of `declared` bytes where that is known. Raises a `Refusal`: 413 or 503.

        A sender that waits to be asked for its body (`asks_first`, HTTP's `Expect`) is refused at once.
        """
        if declared is None:
            return await self._gather(incoming)
        try:
            if declared > self._bodies.each_bytes_max:
                raise self._bodies.too_large(declared)
            if declared <= WHOLE_BYTES_MAX:
                self.take(declared)
        except Refusal:
            if not asks_first:
                await throw_away(incoming)
            raise
        return await (incoming() if declared <= WHOLE_BYTES_MAX else self._gather(incoming))

    async def _gather(self, incoming: AsyncIterable[bytes]) -> bytes:
        """The body that comes in parts, each of which takes its room."""
        parts: list[bytes] = []
        async with contextlib.aclosing(pass_on(incoming)) as stream:
            try:
                async for part in stream:
                    if self.size + len(part) > self._bodies.each_bytes_max:
                        raise self._bodies.too_large(self.size + len(part), at_least=True)
                    self.take(len(part))
                    parts.append(part)
            except Refusal:
                parts.clear()
                self.drop()
                await throw_away(stream)
                raise
        return b"".join(parts)


async def pass_on(incoming: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same parts, in a form that can be left and taken up again: Granian's own cannot."""
    async for part in incoming:
        yield part


async def throw_away(stream: AsyncIterable[bytes]) -> None:
    """Read on for a moment and forget what comes, or the sender would see an error of its own and not the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            async for _ in stream:
                pass
