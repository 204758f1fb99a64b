"""Records of a load run, and its result: counts, attainment, latencies, and the generator's own lag.

The sending process writes a fixed-size record per request to a file, with times in ns from the start of the run;
evaluation reads them as a numpy array. Every request is in exactly one of `ok`, `late`, `dropped`, `rejected` and
`errors`. Latency runs from the time when a request was due, not from when it was sent (which would hide a slow server
behind a stalled client), to the last byte of its answer; a link's transfer time is part of it.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.errors import MachineError
from sloop.load.sent import SentWorks
from sloop.units import NS_PER_MS, NS_PER_S, rank, to_ms
from sloop.vocabulary import Outcome


class Ending(IntEnum):
    """How a request ended as the client saw it."""

    ANSWERED = 0
    TIMEOUT = 1
    DISCONNECTED = 2
    """The connection closed before the answer was complete."""
    UNREACHABLE = 3
    """No connection could be made."""
    BROKEN = 4
    """The answer was not HTTP, or a 200 without outputs."""
    OVERFLOW = 5
    """All allowed connections were busy when the request was due."""


LAYOUT: Final = struct.Struct("<qqqhbb4x")
DTYPE: Final = np.dtype(
    {
        "names": ["number", "sent_ns", "done_ns", "status", "ending", "slo_met"],
        "formats": ["<i8", "<i8", "<i8", "<i2", "<i1", "<i1"],
        "offsets": [0, 8, 16, 24, 26, 27],
        "itemsize": LAYOUT.size,
    }
)
"""`number` is the request's index in the schedule; `slo_met` is 1, 0, or -1 if the server did not report it."""

BUFFER_BYTES: Final = LAYOUT.size * 4_096


class RecordWriter:
    """Appends records to a file through a buffer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffer = bytearray(BUFFER_BYTES)
        self._used = 0
        self.written = 0

    def write(self, number: int, sent_ns: int, done_ns: int, status: int, ending: int, slo_met: int) -> None:
        LAYOUT.pack_into(self._buffer, self._used, number, sent_ns, done_ns, status, ending, slo_met)
        self._used += LAYOUT.size
        self.written += 1
        if self._used == BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        self._file.write(memoryview(self._buffer)[: self._used])
        self._used = 0


def read_records(path: Path) -> NDArray[Any]:
    """The records of a finished run, in the order in which the requests ended."""
    return np.fromfile(path, dtype=DTYPE)


DROPPED_STATUS: Final = 504
REJECTED_STATUSES: Final = (429, 503)
OUTCOMES: Final = tuple(Outcome)
CHUNK: Final = 100_000
LAG_SHARE_MAX: Final = 0.1
"""A fraction of the SLO. If the generator's lag at p99 exceeds it, the result has a note, because latencies include
lag."""


class SecondRow(msgspec.Struct, frozen=True):
    """The requests due in one second; latencies of the answered ones, in ms."""

    second: int
    sent: int
    ok: int
    late: int
    dropped: int
    rejected: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None
    lag_max_ms: float


class SizeRow(msgspec.Struct, frozen=True):
    """The requests whose rows are of one size, or of one class of sizes, named by its upper bound."""

    size: int
    sent: int
    ok: int
    attainment: float
    p50_ms: float | None
    p99_ms: float | None
    """Of the answered ones."""


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run. Rates are per second of the schedule; latencies count only answers with status 200."""

    sent: int
    ok: int
    late: int
    dropped: int
    rejected: int
    errors: int
    attainment: float | None
    """`ok / sent`."""
    goodput_rps: float
    offered_rps: float
    answered_rps: float
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    response_p50_ms: float | None
    """Time from the actual sending to the answer: server and network, without the generator's lag or the link."""
    response_p99_ms: float | None
    lag_p50_ms: float
    """How late the generator sent, compared with its schedule."""
    lag_p99_ms: float
    lag_max_ms: float
    late_by_server: int
    """Answers that the server marked with `x-slo-met: false`."""
    error_kinds: dict[str, int]
    connections: int
    duration_s: float
    wall_s: float
    note: str
    """Why these numbers may not describe the server; empty if there is no such reason."""
    seconds: list[SecondRow]
    rows_sent: int = 0
    """Of all requests; as many as these if each had one."""
    goodput_rows_per_s: float = 0.0
    """Of the requests that were served in time."""
    sizes: list[SizeRow] = []  # msgspec copies the empty list for each instance
    """Ascending; empty if all rows are equally large."""
    cpu_us: float = 0.0
    """The processor time of the sending process for each request, in microseconds."""

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, in the order to print them."""
        shares = ", ".join(f"{kind} {count:,}" for kind, count in self.error_kinds.items())
        return [
            ("sent", f"{self.sent:,} in {self.duration_s:,.1f} s ({self.offered_rps:,.1f} rps)"),
            ("served in time", f"{self.ok:,}"),
            ("late", f"{self.late:,}"),
            ("dropped", f"{self.dropped:,}"),
            ("rejected", f"{self.rejected:,}"),
            ("errors", f"{self.errors:,}" + (f" ({shares})" if shares else "")),
            ("attainment", "–" if self.attainment is None else f"{self.attainment:.4%}"),
            ("goodput", f"{self.goodput_rps:,.1f} rps" + self._in_rows()),
            ("latency (from due time) p50 / p99 / max", _spread(self.p50_ms, self.p99_ms, self.max_ms)),
            ("response (from sending) p50 / p99", _spread(self.response_p50_ms, self.response_p99_ms)),
            ("generator's lag p50 / p99 / max", _spread(self.lag_p50_ms, self.lag_p99_ms, self.lag_max_ms)),
            ("generator's processor time", f"{self.cpu_us:,.0f} µs a request"),
            *([("note", self.note)] if self.note else []),
        ]

    def _in_rows(self) -> str:
        has_one_each = self.rows_sent in (0, self.sent)
        return "" if has_one_each else f", {self.goodput_rows_per_s:,.1f} rows/s of {self.rows_sent:,} rows sent"


class Measured(msgspec.Struct, frozen=True):
    """Records joined with the schedule, one entry for each request, in the order they were due; times in ns."""

    due_ns: NDArray[np.int64]
    elapsed_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    done_ns: NDArray[np.int64]
    status: NDArray[np.int16]
    ending: NDArray[np.int8]
    slo_met: NDArray[np.int8]

    @property
    def latency_ns(self) -> NDArray[np.int64]:
        return self.done_ns - self.due_ns + self.elapsed_ns

    def is_answered(self) -> NDArray[np.bool_]:
        """Whether a request has an answer with status 200 and outputs."""
        answered: NDArray[np.bool_] = (self.ending == Ending.ANSWERED) & (self.status == 200)
        return answered

    def outcomes(self, slo_ns: int) -> NDArray[np.int8]:
        """The outcome of each request as an index into `OUTCOMES`, by the client's clock."""
        answered = self.ending == Ending.ANSWERED
        found = np.full(len(self.due_ns), OUTCOMES.index(Outcome.FAILED), dtype=np.int8)
        found[answered & (self.status == DROPPED_STATUS)] = OUTCOMES.index(Outcome.DROPPED)
        found[answered & np.isin(self.status, REJECTED_STATUSES)] = OUTCOMES.index(Outcome.REJECTED)
        found[self.is_answered()] = OUTCOMES.index(Outcome.LATE)
        found[self.is_answered() & (self.latency_ns <= slo_ns)] = OUTCOMES.index(Outcome.SERVED)
        return found


def join(records: NDArray[Any], schedule: NDArray[np.int64]) -> Measured:
    """Records in the order of the schedule."""
    ordered = records[np.argsort(records["number"], kind="stable")]
    if len(ordered) != len(schedule) or not np.all(ordered["number"] == np.arange(len(schedule))):
        raise MachineError(
            f"the sending process recorded {len(ordered)} of {len(schedule)} requests",
            help="it may have run out of disk or memory: try a shorter trace",
        )
    return Measured(
        due_ns=schedule[:, 0],
        elapsed_ns=schedule[:, 1],
        **{name: ordered[name] for name in ("sent_ns", "done_ns", "status", "ending", "slo_met")},
    )


def summarise(
    measured: Measured,
    *,
    slo_ns: int,
    duration_s: float,
    connections: int,
    wall_s: float,
    cpu_s: float = 0.0,
    sent: SentWorks | None = None,
) -> LoadResult:
    """Compute the result of a run whose requests brought what was `sent`; None for one row of the only size each."""
    outcomes = measured.outcomes(slo_ns)
    counts = np.bincount(outcomes, minlength=len(OUTCOMES))
    answered = measured.is_answered()
    latency = measured.latency_ns[answered]
    response = (measured.done_ns - measured.sent_ns)[answered]
    lag = np.maximum(measured.sent_ns - measured.due_ns, 0)
    served, total = int(counts[OUTCOMES.index(Outcome.SERVED)]), len(outcomes)
    is_served = outcomes == OUTCOMES.index(Outcome.SERVED)
    return LoadResult(
        sent=total,
        ok=served,
        late=int(counts[OUTCOMES.index(Outcome.LATE)]),
        dropped=int(counts[OUTCOMES.index(Outcome.DROPPED)]),
        rejected=int(counts[OUTCOMES.index(Outcome.REJECTED)]),
        errors=int(counts[OUTCOMES.index(Outcome.FAILED)]),
        attainment=served / total if total else None,
        cpu_us=1e6 * cpu_s / total if total else 0.0,
        goodput_rps=served / duration_s,
        offered_rps=total / duration_s,
        answered_rps=len(latency) / duration_s,
        mean_ms=to_ms(round(float(latency.mean()))) if len(latency) else None,
        p50_ms=_quantile_ms(latency, 0.50),
        p90_ms=_quantile_ms(latency, 0.90),
        p99_ms=_quantile_ms(latency, 0.99),
        max_ms=_quantile_ms(latency, 1.0),
        response_p50_ms=_quantile_ms(response, 0.50),
        response_p99_ms=_quantile_ms(response, 0.99),
        lag_p50_ms=_quantile_ms(lag, 0.50) or 0.0,
        lag_p99_ms=_quantile_ms(lag, 0.99) or 0.0,
        lag_max_ms=_quantile_ms(lag, 1.0) or 0.0,
        late_by_server=int(np.count_nonzero(answered & (measured.slo_met == 0))),
        error_kinds=_error_kinds(measured, outcomes),
        connections=connections,
        duration_s=duration_s,
        wall_s=wall_s,
        note=_note(
            _quantile_ms(lag, 0.99) or 0.0, to_ms(slo_ns), int(np.count_nonzero(measured.ending == Ending.OVERFLOW))
        ),
        seconds=list(_seconds(measured, outcomes)),
        rows_sent=total if sent is None else int(sent.rows.sum()),
        goodput_rows_per_s=(served if sent is None else int(sent.rows[is_served].sum())) / duration_s,
        sizes=[] if sent is None else list(_sizes(measured, is_served, sent)),
    )


def _sizes(measured: Measured, is_served: NDArray[np.bool_], sent: SentWorks) -> Iterator[SizeRow]:
    """One row for each size, or class of sizes, if there are several."""
    classes, latency, answered = sent.classes, measured.latency_ns, measured.is_answered()
    bounds = np.unique(classes)
    for bound in bounds if len(bounds) > 1 else []:
        here = classes == bound
        count, ok = int(np.count_nonzero(here)), int(np.count_nonzero(here & is_served))
        p50_ms, p99_ms = (_quantile_ms(latency[here & answered], share) for share in (0.50, 0.99))
        yield SizeRow(int(bound), count, ok, ok / count, p50_ms, p99_ms)


def _note(lag_p99_ms: float, slo_ms: float, overflows: int) -> str:
    if overflows:
        return f"{overflows:,} requests were not sent because all connections were busy: allow more connections"
    if lag_p99_ms > LAG_SHARE_MAX * slo_ms:
        return f"the generator itself lagged by {lag_p99_ms:.1f} ms at p99: give it a dedicated core or a lower rate"
    return ""


def _error_kinds(measured: Measured, outcomes: NDArray[np.int8]) -> dict[str, int]:
    """Failed requests by cause: `http 500`, `timeout`, `disconnected`, …"""
    failed = outcomes == OUTCOMES.index(Outcome.FAILED)
    kinds: dict[str, int] = {}
    for ending in Ending:
        here = failed & (measured.ending == ending)
        if ending == Ending.ANSWERED:
            statuses, counts = np.unique(measured.status[here], return_counts=True)
            kinds |= {f"http {status}": int(count) for status, count in zip(statuses, counts, strict=True)}
        elif here.any():
            kinds[ending.name.lower()] = int(np.count_nonzero(here))
    return kinds


def _seconds(measured: Measured, outcomes: NDArray[np.int8]) -> Iterator[SecondRow]:
    """One row for each second with requests; `measured` is sorted by the instant due."""
    second_of = measured.due_ns // NS_PER_S
    latency, answered = measured.latency_ns, measured.is_answered()
    lag = np.maximum(measured.sent_ns - measured.due_ns, 0)
    seconds, starts = np.unique(second_of, return_index=True)
    ends = np.append(starts, len(second_of))[1:]
    for second, first, after in zip(seconds, starts, ends[: len(seconds)], strict=True):
        here = slice(int(first), int(after))
        counts = {outcome: int(np.count_nonzero(outcomes[here] == place)) for place, outcome in enumerate(OUTCOMES)}
        answered_here = latency[here][answered[here]]
        yield SecondRow(
            second=int(second),
            sent=int(after - first),
            ok=counts[Outcome.SERVED],
            late=counts[Outcome.LATE],
            dropped=counts[Outcome.DROPPED],
            rejected=counts[Outcome.REJECTED],
            errors=counts[Outcome.FAILED],
            p50_ms=_quantile_ms(answered_here, 0.50),
            p99_ms=_quantile_ms(answered_here, 0.99),
            lag_max_ms=_quantile_ms(lag[here], 1.0) or 0.0,
        )


def write_jsonl(measured: Measured, path: Path, *, slo_ns: int, sent: SentWorks | None = None) -> None:
    """A line of JSON for each request: when it was due, sent and done (ms), its latency, outcome and status; if these
    differ, its rows and their size."""
    outcomes = measured.outcomes(slo_ns)
    latency = measured.latency_ns
    encoder = msgspec.json.Encoder()
    try:
        with path.open("wb") as file:
            for first in range(0, len(outcomes), CHUNK):
                for place in range(first, min(first + CHUNK, len(outcomes))):
                    line = {
                        "id": place,
                        "due_ms": int(measured.due_ns[place]) / NS_PER_MS,
                        "sent_ms": int(measured.sent_ns[place]) / NS_PER_MS,
                        "done_ms": int(measured.done_ns[place]) / NS_PER_MS,
                        "elapsed_ms": int(measured.elapsed_ns[place]) / NS_PER_MS,
                        "latency_ms": int(latency[place]) / NS_PER_MS,
                        "outcome": OUTCOMES[outcomes[place]],
                        "ending": Ending(measured.ending[place]).name.lower(),
                        "status": int(measured.status[place]),
                    }
                    if sent is not None:
                        work = sent.works[sent.kinds[place]]
                        line |= {"rows": work.rows, "size": work.size}
                    file.write(encoder.encode(line) + b"\n")
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}", help="choose another place for it") from None


def _quantile_ms(values_ns: NDArray[np.int64], share: float) -> float | None:
    """The nearest-rank quantile in ms; None for no values."""
    if not len(values_ns):
        return None
    place = rank(share, len(values_ns))
    return to_ms(int(np.partition(values_ns, place)[place]))


def _spread(*values_ms: float | None) -> str:
    return " / ".join("–" if value is None else f"{value:,.2f}" for value in values_ms) + " ms"
