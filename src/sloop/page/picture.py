"""What the page shows of a run, as plain values for JSON: all of it once, then what has changed.

Everything comes from the fold over the log (`sloop.runlog.fold`). Requests that have ended count in the second of their
arrival, so that a second's ends add up to its arrivals. Latencies count in the second of the end.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from sloop.actions import Decided, End, Rollout
from sloop.app.application import SystemChoice
from sloop.app.graph import declared_name
from sloop.report.explain.texts import plan_difference, plan_text, rollout_text, slot_text
from sloop.runlog import Header, Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.replicas import ReplicaRecord
from sloop.runlog.requests import SecondRecord
from sloop.runlog.run import Kept, RunState
from sloop.runlog.versions import VersionRecord
from sloop.units import NS_PER_S, to_ms, to_s
from sloop.vocabulary import Life, Outcome, Plan, Request, RequestId, kind_of

SECONDS: Final = 3_600
MINUTES: Final = 1_440
"""How many seconds and minutes a page shows."""
DECISIONS: Final = 500
MISSED: Final = 200
"""How many decisions, and how many requests that were not served in time, a page lists."""
KEPT: Final = Kept(seconds=SECONDS, routes=False, service=True)
TARGET: Final = 0.99
"""The share of requests to be served in time against which the error budget is counted."""
OUTCOMES: Final = ("served", "late", "dropped", "rejected", "failed")
COUNTS: Final = ("s", "arrivals", *OUTCOMES)
"""The columns of a row of counts. `s` is the begin of the second or minute."""


class Levels(NamedTuple):
    """What there is of an application."""

    waiting: int
    """Visits in its queues."""
    ready: int
    starting: int
    """Replicas."""
    cores: float
    usd_per_h: float


LEVELS: Final = ("s", "p50_ms", "p99_ms", *Levels._fields)
"""The columns of a row of levels: latencies of the requests that ended since the row before, then what there is at the
end of the second."""


class ApplicationSeries:
    """The rows of one application: a ring of seconds and one of minutes."""

    def __init__(self) -> None:
        self.levels: deque[list[float | None]] = deque(maxlen=SECONDS)
        self.minute_counts: deque[list[int]] = deque(maxlen=MINUTES)
        self.minute_levels: deque[list[float | None]] = deque(maxlen=MINUTES)
        self.counts: dict[int, list[int]] = {}
        """By second, in order."""
        self.settled_s = 0
        """All requests that arrived before this second have ended."""
        self.total = dict.fromkeys(COUNTS[1:], 0)
        """Since the beginning of the log."""
        self._latencies_ns: deque[np.ndarray] = deque()
        """Of the seconds of the present minute."""

    def count(self, rows: Iterable[SecondRecord]) -> list[list[int]]:
        """Take the counts of seconds; returns the rows that have changed."""
        changed: list[list[int]] = []
        for second in rows:
            row = [second.start_s, second.arrivals, *(getattr(second, outcome) for outcome in OUTCOMES)]
            before = self.counts.get(second.start_s)
            if row == before:
                continue
            self.counts[second.start_s] = row
            minute = self._minute(second.start_s)
            for place, name in enumerate(COUNTS[1:], 1):
                more = row[place] - (before[place] if before else 0)
                self.total[name] += more
                if minute is not None:
                    minute[place] += more
            changed.append(row)
        while len(self.counts) > SECONDS:
            del self.counts[next(iter(self.counts))]
        return changed

    def level(self, at_s: int, latencies_ns: "np.ndarray", levels: Sequence[float]) -> list[float | None]:
        """Take the latencies in ns of requests that have ended, and what there is now; returns the row."""
        row = [at_s, *_percentiles_ms(latencies_ns), *levels]
        self.levels.append(row)
        self._latencies_ns.append(latencies_ns)
        if at_s % 60 == 59:
            whole = np.concatenate(self._latencies_ns)
            self._latencies_ns.clear()
            self.minute_levels.append([at_s - 59, *_percentiles_ms(whole), *levels])
        return row

    def _minute(self, second: int) -> list[int] | None:
        """The row of the minute with this second; None if it has left the ring."""
        start_s = second - second % 60
        rows = self.minute_counts
        if not rows or rows[-1][0] < start_s:
            rows.append([start_s, *(0 for _ in COUNTS[1:])])
        return next((row for row in reversed(rows) if row[0] == start_s), None)

    def last_minutes(self) -> dict[str, Any]:
        """The newest rows of minutes."""
        return {"counts": list(self.minute_counts)[-2:], "levels": list(self.minute_levels)[-1:]}

    def whole(self) -> dict[str, Any]:
        """All rows."""
        return {
            "counts": [self.counts[at] for at in sorted(self.counts)],
            "levels": list(self.levels),
            "minute_counts": list(self.minute_counts),
            "minute_levels": list(self.minute_levels),
        }


class Recent(NamedTuple):
    """The requests of the last seconds of an application."""

    attainment: float | None
    """Served in time, of those that have ended; None without any."""
    p99_ms: float | None
    """The largest P99 of a second; None without answers."""


class Picture:
    """What a page shows of the run with this header. `state` is the fold at the beginning of the records; it takes
    `append`ed records. Instants are seconds since the run began, at the Unix time `zero_unix_s`. `where` are addresses
    that the page shows as they are."""

    def __init__(
        self, header: Header, state: DeploymentState, zero_unix_s: float, where: Mapping[str, str] = {}
    ) -> None:
        state.keep(KEPT)
        self.state, self._where = state, where
        self._header, self._zero_unix_s = header, zero_unix_s
        self._series: dict[str, ApplicationSeries] = {}
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS)
        self._missed: deque[dict[str, Any]] = deque(maxlen=MISSED)
        self._open: dict[RequestId, Request] = {}
        self._next_s: int | None = None
        """The end of the second whose levels are to be taken next."""
        self._sent: dict[str, bytes] = {}
        """By key, what was last told of each application and of the nodes."""
        self._changes: dict[str, Any] = _no_changes()

    def append(self, now_ns: int, record: Record) -> None:
        """Add the next record of the log."""
        if self._next_s is None or now_ns >= self._next_s * NS_PER_S:
            self.reach(now_ns)
        if isinstance(record, Request):
            self._open[record.id] = record
        elif isinstance(record, End):
            self._end(now_ns, record)
        elif isinstance(record, Decided | Rollout):
            self._decide(now_ns, record)
        self.state.append(now_ns, record)

    def reach(self, now_ns: int) -> None:
        """Take the levels of all seconds that have ended by `now_ns`, at most those of the last hour."""
        now_s = now_ns // NS_PER_S
        if self._next_s is None:
            self._next_s = now_s + 1
        for end_s in range(max(self._next_s, now_s - SECONDS), now_s + 1):
            self._take_levels(end_s - 1)
        self._next_s = max(self._next_s, now_s + 1)

    def recent(self, name: str, seconds: int) -> Recent:
        """The last seconds of an application, up to the last call of `changes`."""
        series, from_s = self._series_of(name), self._now_s - seconds
        rows = [row for at, row in series.counts.items() if at >= from_s]
        served, ended = sum(row[2] for row in rows), sum(sum(row[2:]) for row in rows)
        p99s_ms = [row[2] for row in islice(reversed(series.levels), seconds) if row[2] is not None]
        return Recent(served / ended if ended else None, max(p99s_ms, default=None))

    # Telling

    def whole(self) -> dict[str, Any]:
        """Everything that a page shows."""
        self._look()
        return {
            **self._facts(),
            "applications": {key: msgspec.Raw(value) for key, value in self._sent.items() if key},
            "nodes": msgspec.Raw(self._sent[""]),
            "series": {name: series.whole() for name, series in self._series.items()},
            "totals": {name: series.total for name, series in self._series.items()},
            "decisions": list(self._decisions),
            "missed": list(self._missed),
        }

    def changes(self) -> dict[str, Any]:
        """What has changed since the last call."""
        before = dict(self._sent)
        self._look()
        changes, self._changes = self._changes, _no_changes()
        applications = {key: msgspec.Raw(value) for key, value in self._sent.items() if before.get(key) != value}
        nodes = applications.pop("", None)
        return {
            "now_s": self._now_s,
            "draining": self.state.draining,
            "applications": applications,
            "gone": [key for key in before if key not in self._sent],
            **({"nodes": nodes} if nodes is not None else {}),
            "totals": {name: series.total for name, series in self._series.items()},
            "minutes": {name: series.last_minutes() for name, series in self._series.items()},
            **changes,
        }

    @property
    def segment(self) -> int:
        """The segment of the log with which it begins."""
        return self._header.segment

    @property
    def _now_s(self) -> float:
        return float(self._next_s or 0)

    def _facts(self) -> dict[str, Any]:
        header = self._header
        return {
            "name": header.name,
            "system": header.system,
            "origin": header.origin,
            "machine": header.machine,
            "software": header.software,
            "date": header.date,
            "sample": header.sample,
            "zero_unix_s": self._zero_unix_s,
            "now_s": self._now_s,
            "draining": self.state.draining,
            "columns": {"counts": COUNTS, "levels": LEVELS},
            "target": TARGET,
            **self._where,
        }

    def _look(self) -> None:
        """Note everything as it is now."""
        state = self.state
        seen: dict[str, bytes] = {"": msgspec.json.encode([self._node(name) for name in state.nodes.records])}
        for name, records in state.applications.items():
            present = [record for record in records if not record.has_ended]
            if present:
                systems = [self._system_of(record) for record in present]
                seen[name] = msgspec.json.encode(_application(name, present, systems))
            self._count(name, records)
        self._sent = seen

    def _system_of(self, record: VersionRecord) -> str:
        """The system that decides for a version, as text; empty if the log does not say."""
        definition = record.definition or self._header.definitions.get(record.key)
        if not definition:
            return ""
        system = SystemChoice(definition["system"]["name"], definition["system"]["parameters"])
        return f"{record.choice}, chosen by {system.label}" if record.choice else system.text

    def _count(self, name: str, records: Sequence[VersionRecord]) -> None:
        series, seconds = self._series_of(name), dict[int, SecondRecord]()
        for record in records:
            for second in takewhile(lambda second: second.start_s >= series.settled_s, reversed(record.run.seconds)):
                known = seconds.get(second.start_s)
                seconds[second.start_s] = second if known is None else _added(known, second)
        rows = series.count([seconds[at] for at in sorted(seconds)])
        if rows:
            self._changes["counts"].setdefault(name, {}).update({str(row[0]): row for row in rows})
        unsettled = [at for at, second in seconds.items() if second.served + second.missed < second.arrivals]
        series.settled_s = min(unsettled, default=max(seconds, default=series.settled_s))

    def _series_of(self, name: str) -> ApplicationSeries:
        return self._series.setdefault(name, ApplicationSeries())

    # Taking

    def _take_levels(self, at_s: int) -> None:
        for name, records in self.state.applications.items():
            latencies = np.concatenate([_drained(record.run) for record in records])
            present = [record.run for record in records if not record.has_ended]
            row = self._series_of(name).level(at_s, latencies, levels_of(present))
            self._changes["levels"].setdefault(name, []).append(row)
            for record in [record for record in records if record.has_ended]:
                self._count(name, records)
                self.state.forget(record)

    def _end(self, now_ns: int, end: End) -> None:
        request = self._open.pop(end.request, None)
        if end.outcome is Outcome.SERVED or request is None:
            return
        run = self.state.run_of_request(end.request)
        version = self.state.version_of(run) if run is not None else None
        row = {
            "id": end.request,
            "name": request.client_id,
            "application": version.application if version is not None else request.application,
            "at_s": to_s(now_ns),
            "outcome": end.outcome.value,
            "ms": to_ms(now_ns - request.sent_ns),
            "slo_ms": to_ms(request.slo_ns),
            "stage": declared_name(end.stage) if end.stage else "",
            "why": end.why,
        }
        self._missed.append(row)
        self._changes["missed"] = [*self._changes["missed"], row][-MISSED:]

    def _decide(self, now_ns: int, decided: Decided | Rollout) -> None:
        row: dict[str, Any] = {"at_s": to_s(now_ns), "why": decided.why}
        if isinstance(decided, Rollout):
            row |= {"kind": "rollout", "application": decided.application, "what": rollout_text(decided)}
        else:
            version = self.state.version_for(decided)
            before = version.run.plan if version is not None else None
            row |= {
                "kind": decided.kind,
                "application": version.application if version is not None else "",
                "what": _decided_text(decided),
                "before": plan_text(before) if before is not None and decided.plan is not None else "",
                "change": plan_difference(before, decided.plan) if decided.plan is not None else "",
                "feasible": decided.plan is None or decided.plan.feasible,
            }
        self._decisions.append(row)
        self._changes["decisions"] = [*self._changes["decisions"], row][-DECISIONS:]

    def _node(self, name: str) -> dict[str, Any]:
        record = self.state.nodes.records[name]
        used: dict[str, float] = {}
        for version in self.state.records:
            for replica in version.run.replicas.values():
                if replica.spec.node in (name, None):
                    used[version.application] = used.get(version.application, 0.0) + replica.all_cores(replica.cores)
        return {
            "name": name,
            "hardware": record.node.hardware,
            "state": record.state.value,
            "cores": record.node.cores,
            "used": used,
            "usd_per_h": record.node.usd_per_h if record.is_held else 0.0,
            "devices": [device.kind for device in record.node.devices],
        }


def _no_changes() -> dict[str, Any]:
    return {"counts": {}, "levels": {}, "decisions": [], "missed": []}


def levels_of(runs: Sequence[RunState]) -> Levels:
    """What the versions of an application have together."""
    return Levels(
        waiting=sum(run.waiting for run in runs),
        ready=sum(run.count(Life.READY) for run in runs),
        starting=sum(run.count(Life.STARTING) for run in runs),
        cores=sum(run.cost.cores for run in runs),
        usd_per_h=sum(run.cost.usd_per_h for run in runs),
    )


def _percentiles_ms(latencies_ns: "np.ndarray") -> list[float | None]:
    """P50 and P99, in ms; None without any."""
    if not len(latencies_ns):
        return [None, None]
    return [round(float(value) / 1e6, 3) for value in np.percentile(latencies_ns, (50, 99), method="higher")]


def _drained(run: RunState) -> "np.ndarray":
    """The latencies in ns of the requests that were answered since the last call. All samples of the run are emptied,
    so that its memory stays bounded."""
    answered = np.array([*run.served_ns, *run.late_ns], dtype=np.int64)
    workers = run.workers
    samples = [run.served_ns, run.late_ns, *run.missed_ns.values(), *workers.resize_ns.values()]
    samples += [stage.waits_ns for stage in run.stages.values()]
    samples += [*workers.cold_start_ns.values(), *workers.pipelines.completion_ns.values(), workers.pipelines.answer_ns]
    for group in workers.groups.values():
        samples.append(group.service_ns)
        group.durations_ns.clear()
        group.resized_ns.clear()
    for sample in samples:
        del sample[:]
    return answered


def _added(one: SecondRecord, other: SecondRecord) -> SecondRecord:
    """The counts of two versions in the same second."""
    made = SecondRecord(one.start_s, one.arrivals + other.arrivals)
    for outcome in OUTCOMES:
        setattr(made, outcome, getattr(one, outcome) + getattr(other, outcome))
    return made


def _application(name: str, records: Sequence[VersionRecord], systems: Sequence[str]) -> dict[str, Any]:
    """One application, as it is now, with the system of each version."""
    first = records[0].run
    return {
        "name": name,
        "slo_ms": to_ms(first.graph.slo_ns),
        "usd_per_h": sum(record.run.cost.usd_per_h for record in records),
        "open": sum(len(record.run.open) for record in records),
        "versions": [_version(*pair) for pair in zip(records, systems, strict=True)],
    }


def _version(record: VersionRecord, system: str) -> dict[str, Any]:
    run = record.run
    return {
        "version": record.version,
        "system": system,
        "state": record.state.value,
        "share": record.share,
        "why": record.why or record.planner_error,
        "plan": _plan(run.plan, run.plan_ns),
        "stages": [_stage(name, run) for name in run.graph.stages],
    }


def _plan(plan: Plan | None, since_ns: int) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "text": plan_text(plan),
        "why": plan.why,
        "feasible": plan.feasible,
        "since_s": to_s(since_ns),
        "replicas": sum(group.count for stage in plan.stages for group in stage.groups),
    }


def _stage(name: str, run: RunState) -> dict[str, Any]:
    target = next((target for target in run.plan.stages if target.stage == name), None) if run.plan else None
    return {
        "name": declared_name(name),
        "after": [declared_name(before) for before in run.graph.stages[name].after],
        "queued": run.queued(name),
        "batch_max": target.batch_max if target is not None else 0,
        "planned": sum(group.count for group in target.groups) if target is not None else 0,
        "padding": _padding(name, run),
        "replicas": [_replica(replica) for replica in run.replicas.values() if replica.spec.stage == name],
    }


def _padding(stage: str, run: RunState) -> float:
    """The fraction of what a stage has computed that was padding."""
    groups = [group for group in run.workers.groups.values() if group.key[0] == stage]
    padded, elements = sum(group.padded for group in groups), sum(group.elements for group in groups)
    return padded / (elements + padded) if padded else 0.0


def _replica(replica: ReplicaRecord) -> dict[str, Any]:
    return {
        "id": replica.id,
        "variant": replica.spec.variant,
        "node": replica.spec.node or "",
        "slot": slot_text(replica.group.slot),
        "life": replica.life.value,
        "step": replica.step,
        "since_s": to_s(replica.since_ns),
        "cores": replica.cores,
        "wanted": replica.wanted_cores,
        "form": kind_of(replica.group.shape),
        "running": replica.rows if replica.running else 0,
        "size": replica.running.size if replica.running else 0,
    }


def _decided_text(decided: Decided) -> str:
    if decided.plan is not None:
        return plan_text(decided.plan)
    if decided.choice:
        return f"{decided.choice} decides"
    at = f" at {declared_name(decided.stage)}" if decided.stage else ""
    return f"replica {decided.replica}{at}" if decided.replica is not None else at.strip()
