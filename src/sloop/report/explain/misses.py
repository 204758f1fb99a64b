"""Why requests were not served in time."""

import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import Final

from msgspec import Struct

from sloop.actions import End
from sloop.runlog import Record
from sloop.units import to_s
from sloop.vocabulary import Outcome, Request, RequestId

NUMBER: Final = re.compile(r"(?<![\w.-])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
"""A number in a reason, but not the digits of a name such as `stage2`."""


class MissReason(Struct, frozen=True):
    """Requests of one application with the same outcome and the same reason; numbers in the reason are ignored."""

    application: str
    """Empty if the deployment has only one application."""
    outcome: str
    why: str
    count: int
    first_request: int
    """An example request, for `explain_request`."""
    first_s: float


class MissReasons:
    """Why requests were not served in time, as records come."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Outcome, tuple[str, ...]], _Reason] = {}
        self._names: dict[RequestId, str] = {}
        """The applications of open requests."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add the next record."""
        if isinstance(record, Request):
            if record.application:
                self._names[record.id] = record.application
        elif isinstance(record, End):
            name = self._names.pop(record.request, "")
            if record.outcome is not Outcome.SERVED:
                words, numbers = tuple(NUMBER.split(record.why)), NUMBER.findall(record.why)
                first = _Reason(record.request, to_s(now_ns))
                self._found.setdefault((name, record.outcome, words), first).add(numbers)

    @property
    def rows(self) -> list[MissReason]:
        """By application, the most frequent first."""
        reasons = [
            MissReason(name, outcome.value, reason.text(words), reason.count, reason.first_request, reason.first_s)
            for (name, outcome, words), reason in self._found.items()
        ]
        return sorted(reasons, key=lambda reason: (-reason.count, reason.application, reason.outcome, reason.why))


def miss_reasons(records: Iterable[tuple[int, Record]]) -> list[MissReason]:
    """Why requests of a log were not served in time."""
    found = MissReasons()
    for now_ns, record in records:
        found.append(now_ns, record)
    return found.rows


class _Reason:
    """Requests that share a reason but for its numbers, of which the range is kept."""

    def __init__(self, first_request: int, first_s: float) -> None:
        self.first_request = first_request
        self.first_s = first_s
        self.count = 0
        self._low: list[str] = []
        self._high: list[str] = []

    def add(self, numbers: list[str]) -> None:
        """Count one more request, with the numbers in its reason as they are written there."""
        self.count += 1
        self._low = [min(pair, key=_value) for pair in zip(self._low or numbers, numbers, strict=True)]
        self._high = [max(pair, key=_value) for pair in zip(self._high or numbers, numbers, strict=True)]

    def text(self, words: tuple[str, ...]) -> str:
        """The reason, with a range for each number that differed: `11–14 requests wait at read`."""
        ranges = [_range(low, high) for low, high in zip(self._low, self._high, strict=True)]
        return "".join(map("".join, zip_longest(words, ranges, fillvalue="")))


def _range(low: str, high: str) -> str:
    """`11–14`, `-8.5 to -0.1`, or the number itself if both are the same."""
    return low if low == high else f"{low} to {high}" if low.startswith("-") else f"{low}–{high}"


def _value(number: str) -> float:
    return float(number.replace(",", ""))
