"""A scenario out of the event log of a server: its applications and nodes, and the requests that really came.

So a user can ask what another system would have done with his own traffic. Of the log only the requests are used: when
each was sent, what it brought, and by what it was called; and what the server's own processes took for each. Durations
of batches come from the profiles, as in every scenario.
"""

from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from msgspec import Struct

from sloop.actions import Decided, End, Rollout
from sloop.app.application import Deployment
from sloop.app.scenario import ProcessesTruth, Scenario, Truth
from sloop.errors import InputError
from sloop.events import Deployed, SystemChanged
from sloop.runlog import Header, Record, RecordedLog, read_log
from sloop.runlog.processes import ProcessorUse
from sloop.systems.replay import ServedApplications, require_all, system_of
from sloop.units import quantile, s, to_ms, to_s
from sloop.vocabulary import Outcome, Request, RequestId
from sloop.workload import Trace, Work, trace_of

ONE_ROW: Final = Work()
"""What every request brings to a model of one size."""


class HappenedRow(Struct, frozen=True, kw_only=True):
    """What became of the requests of an application in the log, as far as they have ended."""

    application: str
    requests: int
    served: int
    late: int
    dropped: int
    rejected: int
    failed: int
    attainment: float
    """Served in time, of all that have ended; 1 without any."""
    p50_ms: float | None
    p99_ms: float | None
    """Of answered requests, from sending to the answer; None without any."""


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """The requests of a log, as a scenario, and what became of them."""

    scenario: Scenario
    from_s: float
    """When the scenario begins, in seconds of the log."""
    happened: tuple[HappenedRow, ...]


class RequestsSoFar:
    """A sink that keeps the requests of a run of the last `kept_s` seconds, and knows which applications it has."""

    def __init__(self, header: Header, kept_s: float) -> None:
        self._header, self._kept_ns = header, s(kept_s)
        self._served = ServedApplications(header)
        self._requests: deque[Request] = deque()

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if type(record) is Request:
            self._requests.append(record)
        elif isinstance(record, Decided | Rollout | Deployed | SystemChanged):
            self._served.append(record)

    def scenario(self, now_ns: int, last_s: float) -> Scenario:
        """The requests of the last seconds, as far as they are kept."""
        requests = self._requests
        while requests and requests[0].arrived_ns < now_ns - self._kept_ns:
            requests.popleft()
        from_ns = max(0, now_ns - min(s(last_s), self._kept_ns))
        found: dict[str, _Requests] = {}
        first = next(iter(self._served.by_name))
        for request in requests:
            if request.sent_ns >= from_ns:
                found.setdefault(request.application or first, _Requests()).add(request, from_ns)
        found = {name: each for name, each in found.items() if name in self._served.by_name}
        return _scenario(self._header, self._served, found, max(1, now_ns - from_ns), Path("this run"))


class _Requests:
    """The requests of one application."""

    def __init__(self) -> None:
        self.sent_ns = array("q")
        self.works: list[Work] = []
        """What each of them brought; empty as long as each brought one row of the only size."""
        self._known: dict[Work, Work] = {}
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.latencies_ns: list[int] = []

    def add(self, request: Request, from_ns: int) -> None:
        """One of them; instants count from `from_ns`."""
        work = Work(request.rows, request.size, request.shape)
        if self.works or work != ONE_ROW:
            self.works += [ONE_ROW] * (len(self.sent_ns) - len(self.works))
            self.works.append(self._known.setdefault(work, work))
        self.sent_ns.append(request.sent_ns - from_ns)

    def trace(self, name: str, duration_ns: int, path: Path) -> Trace:
        """They, in the order in which they were sent."""
        order = sorted(range(len(self.sent_ns)), key=self.sent_ns.__getitem__)
        works = [self.works[place] for place in order] if self.works else []
        return trace_of(
            map(self.sent_ns.__getitem__, order),
            duration_ns=duration_ns,
            name=name,
            provenance=f"measured: the requests in {path}",
            works=works.__iter__ if works else None,
        )

    def row(self, name: str) -> HappenedRow:
        """What became of them."""
        ended, answered = sum(self.outcomes.values()), sorted(self.latencies_ns)
        return HappenedRow(
            application=name,
            requests=len(self.sent_ns),
            **{outcome.value: count for outcome, count in self.outcomes.items()},
            attainment=self.outcomes[Outcome.SERVED] / ended if ended else 1.0,
            p50_ms=to_ms(quantile(answered, 0.5)) if answered else None,
            p99_ms=to_ms(quantile(answered, 0.99)) if answered else None,
        )


def recorded_traffic(path: Path, last_s: float | None = None) -> RecordedTraffic:
    """The requests of the last `last_s` seconds of a log, by default of all of it: a file, a segment, or the state
    folder of a server. InputError if it cannot be read, has only a sample of the requests, or has none in this time."""
    log = read_log(path)
    require_all(log, "a simulation of its requests")
    files = [*log.files]
    (last,) = deque(RecordedLog(path, read_log(files[-1]).header, files[-1:]), maxlen=1) or [(log.header.from_ns, None)]
    end_ns = last[0] + 1
    from_ns = log.header.from_ns
    if last_s is not None:
        from_ns = max(end_ns - s(min(last_s, to_s(end_ns))), from_ns)
    while len(files) > 1 and read_log(files[1]).header.from_ns <= from_ns:
        del files[0]
    header = read_log(files[0]).header
    served = ServedApplications(header)
    use = ProcessorUse()
    requests = _read(RecordedLog(path, header, files), served, use, from_ns, end_ns)
    requests = {name: found for name, found in requests.items() if found.sent_ns and name in served.by_name}
    if not requests:
        raise InputError("there are no requests in this time", where=str(path), help="name a longer time")
    scenario = _scenario(header, served, requests, end_ns - from_ns, path)
    if use.request_us is not None:
        scenario = replace(scenario, truth=Truth(processes=ProcessesTruth(use.request_us)))
    return RecordedTraffic(scenario, to_s(from_ns), tuple(found.row(name) for name, found in requests.items()))


def _read(
    log: RecordedLog, served: ServedApplications, use: ProcessorUse, from_ns: int, end_ns: int
) -> dict[str, _Requests]:
    """The requests of each application that were sent from `from_ns` on, and their ends; `served` gets to know what
    was deployed meanwhile. What a server has written since its log was looked at, from `end_ns` on, does not count."""
    requests = {name: _Requests() for name in served.by_name}
    first = next(iter(requests))
    waiting: dict[RequestId, tuple[_Requests, int]] = {}
    for now_ns, record in log:
        if now_ns >= end_ns:
            break
        use.append(now_ns, record)
        if isinstance(record, Request) and record.sent_ns >= from_ns:
            application = requests.setdefault(record.application or first, _Requests())
            application.add(record, from_ns)
            waiting[record.id] = application, record.sent_ns
        elif isinstance(record, End) and record.request in waiting:
            application, sent_ns = waiting.pop(record.request)
            application.outcomes[record.outcome] += 1
            if record.outcome in {Outcome.SERVED, Outcome.LATE}:
                application.latencies_ns.append(now_ns - sent_ns)
        else:
            served.append(record)
    return requests


def _scenario(
    header: Header, applications: ServedApplications, requests: Mapping[str, _Requests], length_ns: int, path: Path
) -> Scenario:
    """The applications that had requests, in the versions that served last, under the system of the log."""
    served = tuple(
        replace(applications.deciding(application), version="1", cluster=header.cluster)
        for name, application in applications.by_name.items()
        if name in requests
    )
    choice = system_of(header, served)
    traces = {name: found.trace(name, length_ns, path) for name, found in requests.items()}
    deployment = Deployment(header.name, served, choice, header.cluster, file=str(path))
    return Scenario(deployment, traces, to_s(length_ns), 0, Truth(), (choice,))
