"""The clients' books against the server's: which request was answered how, told apart one by one.

Promises that a request is only counted as answered once where the client has one complete answer, the server's log one
arrival and one end of that very request, and the answer's status is what that end stands for. Knows files, no server.

How a client's request is found in the log: the load generator is given a link that takes as many microseconds as the
request's number; it travels as `x-elapsed-ms`, and the log has it as the time the request was on its way.
"""

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.actions import End, StartBatch
from sloop.report.tables import Cell
from sloop.runlog import read_log
from sloop.sim.checkers import Checkers, Violation
from sloop.systems.replay import Replayed, rebuild, replay_log
from sloop.systems.setup import Setup
from sloop.vocabulary import Outcome, Request, RequestId
from sloop.workload import Link

Rows = list[tuple[str, Cell]]

NS_PER_US: Final = 1_000
STATUS: Final = {
    Outcome.SERVED: 200,
    Outcome.LATE: 200,
    Outcome.DROPPED: 504,
    Outcome.REJECTED: 503,
    Outcome.FAILED: 500,
}


class Numbering(Link):
    """No link but a numbering: the k-th request, from 1, is "on its way" for k µs. For one run; use ATTACH with it."""

    def __init__(self) -> None:
        super().__init__(name="numbering", bytes_per_ms=(1.0,), provenance="assumed: numbers, not times")
        object.__setattr__(self, "_numbers", count(1))

    def transfer_ns(self, sent_ns: int, payload_bytes: int) -> int:
        number: int = next(self._numbers)  # type: ignore[attr-defined]
        return number * NS_PER_US


class Answer(Struct, frozen=True):
    """A line of the load generator's records, what of it is used here."""

    elapsed_ms: float
    ending: str
    status: int

    @property
    def number(self) -> int:
        return round(self.elapsed_ms * 1e3)


class Account(Struct, frozen=True, kw_only=True):
    """What came of every request."""

    sent: int
    exactly_once: int
    """Sent once, arrived once, ended once, answered once, and with the status of that end."""
    outcomes: dict[str, int]
    """By the server's log."""
    retried: int
    """Requests that were in a batch more than once, because a worker was lost with it."""
    unsound: list[str]
    """What was wrong with the others, the first of them."""

    @property
    def is_whole(self) -> bool:
        return self.exactly_once == self.sent

    def rows(self) -> Rows:
        return [
            ("requests sent", self.sent),
            ("answered exactly once", self.exactly_once),
            ("so with every request", self.is_whole),
            ("by outcome", ", ".join(f"{outcome} {number:,}" for outcome, number in sorted(self.outcomes.items()))),
            ("in a second batch, their first worker lost", self.retried),
            *(("unsound", what) for what in self.unsound),
        ]


def account(records: Path, log: Path) -> Account:
    """Hold the clients' records against the server's log."""
    answers: dict[int, list[Answer]] = {}
    for line in records.read_bytes().splitlines():
        answer = msgspec.json.decode(line, type=Answer)
        answers.setdefault(answer.number, []).append(answer)
    arrivals: dict[int, list[RequestId]] = {}
    ends: dict[RequestId, list[Outcome]] = {}
    batches: Counter[RequestId] = Counter()
    for _, record in read_log(log):
        if isinstance(record, Request):
            arrivals.setdefault(record.elapsed_ns // NS_PER_US, []).append(record.id)
        elif isinstance(record, End):
            ends.setdefault(record.request, []).append(record.outcome)
        elif isinstance(record, StartBatch):
            batches.update(record.requests)
    unsound = []
    for number in sorted(answers.keys() | arrivals.keys()):
        seen, arrived = answers.get(number, []), arrivals.get(number, [])
        ended = [outcome for id in arrived for outcome in ends.get(id, [])]
        sound = len(seen) == len(arrived) == len(ended) == 1
        if not (sound and seen[0].ending == "answered" and seen[0].status == STATUS[ended[0]]):
            told = [f"{answer.ending} {answer.status}" for answer in seen]
            unsound.append(f"request {number}: client {told}, arrived as {arrived}, ended {ended}")
    return Account(
        sent=len(answers),
        exactly_once=len(answers.keys() | arrivals.keys()) - len(unsound),
        outcomes=Counter(str(outcome) for all_ended in ends.values() for outcome in all_ended),
        retried=sum(times > 1 for times in batches.values()),
        unsound=unsound[:5],
    )


def check(log: Path, setup: Setup | None = None) -> tuple[str, Replayed]:
    """The checkers' complaint about a log (empty for none), and its replay; `setup` is that of its header if None."""
    recorded = read_log(log)
    setup = setup or rebuild(recorded.header)
    checkers = Checkers(setup.application, setup.application.cluster, order=setup.system.policies.order)
    complaint = ""
    try:
        for now_ns, record in recorded:
            checkers.append(now_ns, record)
        checkers.finish()
    except Violation as violation:
        complaint = str(violation)
    return complaint, replay_log(recorded, setup.core())


def check_rows(complaint: str, played: Replayed) -> Rows:
    """As rows of a table."""
    difference = played.difference
    said = f"{played.events:,} events, {played.actions:,} actions equal"
    return [
        ("checkers on the log", complaint.replace("\n", "; ") or "no complaint"),
        ("replay of the log", said if difference is None else f"**differs** at record {difference.record:,}"),
    ]
