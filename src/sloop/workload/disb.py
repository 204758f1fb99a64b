"""DISB workloads: JSON files that list clients, each with a load: periodic, poisson, trace (ms) or continuous.

Promises the arrivals of one client, or of all open-loop clients merged. A continuous client is a closed loop, whose
arrivals depend on the server, so it has no place in a trace: it is left out, and named in the provenance.
Source: the DISB benchmark's workload files and their description (SJTU-IPADS/disb, benchmarks/workloads).
"""

from collections.abc import Iterator
from heapq import merge
from itertools import chain, takewhile

import msgspec

from sloop.errors import InputError
from sloop.options import Limits, nearest
from sloop.streams import stream
from sloop.units import ms, s
from sloop.workload.archive import Text
from sloop.workload.generate import Equal, Poisson
from sloop.workload.trace import RATE_ABOVE_0, Trace, trace_of

ARRIVALS_MAX = 50_000_000
CONTINUOUS = "continuous"


class _Load(msgspec.Struct):
    type: str
    frequency: float = 0.0
    trace: list[float] = []  # msgspec copies the empty list for each instance


class _Client(msgspec.Struct):
    id: str
    load: _Load


class _Workload(msgspec.Struct):
    time: float
    clients: list[_Client] = msgspec.field(name="tasks")


def parse(text: Text, *, client: str, seed: int) -> Trace:
    """The trace of a workload file; it lasts the file's `time`."""
    try:
        workload = msgspec.json.decode(text.text, type=_Workload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"not a DISB workload: {error}", where=text.where, help="see the DISB workload format"
        ) from None
    Limits(above=0, most=1e7).check(workload.time, f"{text.where} time")
    chosen = _chosen(workload, client, text.where)
    closed = [one.id for one in chosen if one.load.type == CONTINUOUS]
    opened = [one for one in chosen if one.load.type != CONTINUOUS]
    if not opened:
        raise InputError(
            "only closed-loop (continuous) clients, which have no arrivals of their own",
            where=text.where,
            help="use a workload with a periodic, poisson or trace client",
        )
    duration_ns = s(workload.time)
    walks = [_times_ns(one, duration_ns, seed, f"{text.where} tasks[{one.id}]") for one in opened]
    left_out = f", closed-loop clients left out: {', '.join(closed)}" if closed else ""
    source = f"published: DISB workload {text.where.rpartition('/')[2]}, clients {', '.join(one.id for one in opened)}"
    return trace_of(merge(*walks), duration_ns=duration_ns, name=client or "disb", provenance=source + left_out)


def _chosen(workload: _Workload, client: str, where: str) -> list[_Client]:
    if not client:
        return workload.clients
    chosen = [one for one in workload.clients if one.id == client]
    if not chosen:
        raise InputError(
            f"no client {client!r}", where=where, help=nearest(client, [one.id for one in workload.clients])
        )
    return chosen


def _times_ns(one: _Client, duration_ns: int, seed: int, where: str) -> Iterator[int]:
    kind = one.load.type
    if kind == "trace":
        return _traced_ns(one.load.trace, duration_ns, where)
    if kind not in ("periodic", "poisson"):
        raise InputError(
            f"unknown type of load {kind!r}",
            where=where,
            help=nearest(kind, ("periodic", "poisson", "trace", CONTINUOUS)),
        )
    rate = RATE_ABOVE_0.check(one.load.frequency, f"{where}.frequency")
    if rate * duration_ns / 1e9 > ARRIVALS_MAX:
        raise InputError(f"over {ARRIVALS_MAX:,} arrivals", where=where, help="lower `time` or `frequency`")
    process = Equal(rate) if kind == "periodic" else Poisson(rate)
    return chain.from_iterable(process.blocks(stream(seed, f"arrivals/{one.id}"), duration_ns))


def _traced_ns(times_ms: list[float], duration_ns: int, where: str) -> Iterator[int]:
    if not times_ms:
        raise InputError("the trace is empty", where=where, help="list times of arrival in ms")
    limits = Limits(least=0, most=1e10)
    times_ns = [ms(limits.check(at_ms, f"{where}.trace[{place}]")) for place, at_ms in enumerate(times_ms)]
    if times_ns != sorted(times_ns):
        raise InputError("the trace is not sorted", where=where, help="sort it by time")
    return takewhile(lambda at_ns: at_ns < duration_ns, times_ns)
