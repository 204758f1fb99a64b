"""Errors of an edge: each names the field, its value and the correction, and carries an HTTP status.

gRPC maps the status to its own codes. Requests that the core dropped, rejected or failed use the same class, so that
both protocols report them in the same way.
"""

from http import HTTPStatus

from sloop.serve.protocols import RequestResult
from sloop.units import NS_PER_S
from sloop.vocabulary import Outcome


class Refusal(Exception):
    """The request is not served: `what` is wrong, `fix` is the correction."""

    def __init__(self, status: int, what: str, fix: str = "", *, retry_after_s: int = 0) -> None:
        super().__init__(what)
        self.status = status
        self.what = what
        self.fix = fix
        self.retry_after_s = retry_after_s

    @property
    def fields(self) -> tuple[int, str, str, int]:
        """What to make it of again in another process."""
        return self.status, self.what, self.fix, self.retry_after_s

    @classmethod
    def of(cls, fields: tuple[int, str, str, int]) -> "Refusal":
        """The refusal with these fields."""
        status, what, fix, retry_after_s = fields
        return cls(status, what, fix, retry_after_s=retry_after_s)

    def within(self, field: str) -> "Refusal":
        """The same refusal with `field` as a prefix of its field name."""
        return Refusal(self.status, f"{field}.{self.what}", self.fix, retry_after_s=self.retry_after_s)

    def __str__(self) -> str:
        return f"{self.what}; help: {self.fix}" if self.fix else self.what


def bad(field: str, what: str, fix: str = "") -> Refusal:
    """A 400 that names the field."""
    return Refusal(HTTPStatus.BAD_REQUEST, f"{field}: {what}", fix)


def refusal_of(ended: RequestResult) -> Refusal:
    """The error for a request that ended without outputs."""
    seconds = -(-ended.retry_after_ns // NS_PER_S)  # the header takes whole ones
    match ended.outcome:
        case Outcome.DROPPED:
            what = f"dropped: {ended.why or 'its deadline could not be met'}"
            fix = f"try again in {seconds} s" if seconds else "allow more time with x-slo-ms, or send less"
            return Refusal(HTTPStatus.GATEWAY_TIMEOUT, what, fix, retry_after_s=seconds)
        case Outcome.REJECTED if ended.is_refused:
            return Refusal(HTTPStatus.BAD_REQUEST, ended.why)
        case Outcome.REJECTED:
            seconds = max(1, seconds)  # 0 would cause an immediate retry
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
                "see the server's log; the same input may fail again",
            )
