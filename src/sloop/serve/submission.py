"""The line between the gateway and the driver: what is handed in, and the one answer that comes back.

The gateway knows protocols and nothing of queues; the driver knows the core and nothing of HTTP. Between them stands
`Submitter`, so that either can be tested against a fake of the other.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from sloop.tensor import Tensor
from sloop.vocabulary import Outcome, RequestId


class Ended(Struct, frozen=True, gc=False):
    """How a request ended, with its outputs by name where it was served or late."""

    outcome: Outcome
    outputs: Mapping[str, Tensor] = {}  # msgspec makes a new one for each instance
    why: str = ""
    retry_after_ns: int = 0
    """For a rejected request: when to try again."""


class Submitter(Protocol):
    """Takes requests and answers each exactly once. Everything happens in the event loop's thread."""

    def submit(
        self,
        tensors: Mapping[str, Tensor],
        *,
        slo_ns: int | None,
        elapsed_ns: int,
        began_ns: int | None = None,
        on_end: Callable[[Ended], None],
    ) -> RequestId:
        """Hand in one request. `tensors` match the application's signature and agree on their number of rows.

        `slo_ns` overrides the application's end-to-end budget, of which `elapsed_ns` was spent on the way here.
        `began_ns` says when it began to arrive, in `time.monotonic_ns`, now if left out: its deadline does not wait
        for a body that is slow to come.
        `on_end` is called once, possibly before `submit` returns (a rejection), and never after `cancel`.
        """
        ...

    def cancel(self, request: RequestId) -> None:
        """The client went away. Does nothing for a request that has ended."""
        ...
