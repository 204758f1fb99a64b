"""Compares the clients' records with the server's log, request by request.

A request was answered exactly once if the client has one complete answer, the log has one arrival and one end of it,
and the answer has the status of that end. Reads files only.

To find a client's request in the log, the load generator gets a link on which request k takes k microseconds. The time
is sent as `x-elapsed-ms`, and the log has it as the time that the request was on its way.
"""

from collections import Counter
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.actions import End, StartBatch
from sloop.events import Deployed
from sloop.report.tables import Cell
from sloop.runlog import read_log
from sloop.sim.checkers import Checkers, Rules, Violation
from sloop.systems.replay import Replayed, rebuild, replay_log
from sloop.systems.setup import Setup, application_in
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
    """A link that numbers requests: request k, from 1, takes k µs. For one run, with `Delivery.ATTACH`."""

    def __init__(self) -> None:
        super().__init__(name="numbering", bytes_per_ms=(1.0,), provenance="assumed: numbers, not times")
        object.__setattr__(self, "_numbers", count(1))

    def transfer_ns(self, sent_ns: int, payload_bytes: int) -> int:
        number: int = next(self._numbers)  # type: ignore[attr-defined]
        return number * NS_PER_US


class Answer(Struct, frozen=True):
    """The part of a line of the load generator's records that is used here."""

    elapsed_ms: float
    ending: str
    status: int

    @property
    def number(self) -> int:
        return round(self.elapsed_ms * 1e3)


class Account(Struct, frozen=True, kw_only=True):
    """How all requests ended, and whether records and log agree."""

    sent: int
    exactly_once: int
    """Sent once, arrived once, ended once, answered once, and with the status of that end."""
    outcomes: dict[str, int]
    """Requests by outcome, from the server's log."""
    retried: int
    """Requests that were in more than one batch, because a worker died."""
    unsound: list[str]
    """What was wrong with the others (the first five)."""

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
    """Compare the clients' records with the server's log."""
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
            seen_as = [f"{answer.ending} {answer.status}" for answer in seen]
            unsound.append(f"request {number}: client {seen_as}, arrived as {arrived}, ended {ended}")
    return Account(
        sent=len(answers),
        exactly_once=len(answers.keys() | arrivals.keys()) - len(unsound),
        outcomes=Counter(str(outcome) for all_ended in ends.values() for outcome in all_ended),
        retried=sum(times > 1 for times in batches.values()),
        unsound=unsound[:5],
    )


def check(log: Path, setup: Setup | None = None) -> tuple[str, Replayed]:
    """What the checkers find wrong with a log (empty for nothing), and its replay, by default with the setup in its
    header."""
    recorded = read_log(log)
    setup = setup or rebuild(recorded.header)
    rules = [Rules(each.application, each.system.policies.order) for each in setup.applications]
    deployed = (record for _, record in recorded if isinstance(record, Deployed))
    later = [Rules(application_in(record.definition), rules[0].order) for record in deployed]
    checkers = Checkers(rules, setup.deployment.cluster, later=later)
    complaint = ""
    try:
        for now_ns, record in recorded:
            checkers.append(now_ns, record)
        checkers.finish()
    except Violation as violation:
        complaint = str(violation)
    return complaint, replay_log(recorded, setup.core(), definitions=recorded.header.definitions)


def check_rows(complaint: str, played: Replayed) -> Rows:
    """The result of `check` as rows of a table."""
    difference = played.difference
    said = f"{played.events:,} events, {played.actions:,} actions equal"
    return [
        ("checkers on the log", complaint.replace("\n", "; ") or "no complaint"),
        ("replay of the log", said if difference is None else f"**differs** at record {difference.record:,}"),
    ]
