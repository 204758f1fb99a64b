"""Saying no: what is wrong with a request, in words that name the field, its value and the fix.

A `Refusal` carries an HTTP status; gRPC maps it to its own codes. What the core decides (dropped, rejected, failed)
is put into the same form here, so that both protocols tell the same story.
"""

from http import HTTPStatus
from typing import Final

from sloop.serve.protocols import Ended
from sloop.units import NS_PER_S
from sloop.vocabulary import Outcome

SHOWN_CHARS_MAX: Final = 80


class Refusal(Exception):
    """This request gets no inference: `what` is wrong, `fix` is what to do."""

    def __init__(self, status: int, what: str, fix: str = "", *, retry_after_s: int = 0) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.fix = fix
        self.retry_after_s = retry_after_s

    def within(self, field: str) -> "Refusal":
        """The same, its field being a part of `field`."""
        return Refusal(self.status, f"{field}.{self.what}", self.fix, retry_after_s=self.retry_after_s)

    def __str__(self) -> str:
        return f"{self.what}; help: {self.fix}" if self.fix else self.what


def bad(field: str, what: str, fix: str = "") -> Refusal:
    """A 400 that names the field."""
    return Refusal(HTTPStatus.BAD_REQUEST, f"{field}: {what}", fix)


def shown(value: object) -> str:
    """A value as it may be put into an error: short, on one line."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


def of_ended(ended: Ended) -> Refusal:
    """The answer to a request that ended without outputs."""
    match ended.outcome:
        case Outcome.DROPPED:
            return Refusal(
                HTTPStatus.GATEWAY_TIMEOUT,
                f"dropped: {ended.why or 'its deadline could not be met'}",
                "allow more time with x-slo-ms, or send less",
            )
        case Outcome.REJECTED:
            # Whole seconds, as the header wants them, and at least one: 0 would invite an instant retry.
            seconds = max(1, -(-ended.retry_after_ns // NS_PER_S))
            return Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"rejected: {ended.why or 'the queue is full'}",
                f"try again in {seconds} s",
                retry_after_s=seconds,
            )
        case _:
            return Refusal(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"failed: {ended.why or 'no reason was given'}",
                "look at the server's log; the same input may fail again",
            )
