"""The two queues in sloop: a scenario as a user would write it, simulated with the policies in the wheel.

The two priorities are two deadlines under earliest deadline first: the patient class has so much more time that no
urgent request ever waits for a patient one. `plain` simulates without checkers, `checked` with all of them; `counted`
is the default of `sloop simulate`: checkers for the first records, and the statistics of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from benchmarks.simulators.setting import (
    BATCH_MAX,
    BATCHING,
    EACH_S,
    FIXED_S,
    MANY_SERVERS,
    SERVICE_S,
    Case,
    Waits,
    main,
)
from sloop.actions import StartBatch
from sloop.app.load import load_scenario
from sloop.runlog import Record, Sink
from sloop.runlog.summary import RunSummary
from sloop.sim import World, simulate
from sloop.sim.scenarios import CHECK_FIRST
from sloop.units import NS_PER_S, s, to_s
from sloop.vocabulary import Request, RequestId
from sloop.workload import trace_of

URGENT_S: Final = 1.0
PATIENT_S: Final = 1e6
ALL_S: Final = 1e5
CLASSES: Final = {s(URGENT_S): "urgent", s(PATIENT_S): "patient", s(ALL_S): "all"}
CHECKED_RECORDS: Final = {"plain": 0, "checked": None, "counted": CHECK_FIRST}
"""By style, how many records the checkers see; all for None."""


@dataclass
class Waiting:
    """A sink that adds up the waits of requests by class, which follows from the deadline."""

    came: dict[RequestId, Request] = field(default_factory=dict)
    waits_s: dict[str, list[float]] = field(default_factory=dict)

    def append(self, now_ns: int, record: Record) -> None:
        if isinstance(record, Request):
            self.came[record.id] = record
        elif isinstance(record, StartBatch):
            for id in record.requests:
                request = self.came.pop(id)
                waits_s = self.waits_s.setdefault(CLASSES[request.slo_ns], [])
                waits_s.append(to_s(now_ns - request.arrived_ns))


def declared(case: Case) -> dict[str, Any]:
    """A case as in a scenario file, with one deadline for all requests."""
    batches = case.queue == BATCHING
    fixed_s, each_s = (FIXED_S, EACH_S) if batches else (SERVICE_S, 0.0)
    latency_ms = {"form": "quadratic", "alpha": 0.0, "beta": 1e3 * each_s, "gamma": 1e3 * fixed_s}
    profile = {"latency_ms": latency_ms, "max_batch": BATCH_MAX if batches else 1, "max_cores": 1}
    system = {"name": "static", "replicas": case.servers, "drop": "never", "order": "edf" if batches else "fifo"}
    return {
        "name": case.queue,
        "slo_ms": 1e3 * ALL_S,
        "stages": [{"name": "only", "variants": [{"name": "a", "profile": profile}]}],
        "system": system | {"batch_max": BATCH_MAX if batches else 1},
        "cluster": {"nodes": [{"hardware": "custom", "cores": case.servers, "memory_bytes": 10**9}]},
        "trace": {"kind": "poisson", "rate": case.rate_rps},
        "duration_s": case.requests / case.rate_rps,
        "seed": case.seed,
        "truth": {"service": {"ratio": 1.0, "shape": "exponential"}},
    }


def world(case: Case) -> World:
    """The world of a case, with two deadlines if it has two classes."""
    slos_ns = (s(URGENT_S), s(PATIENT_S)) if case.queue == BATCHING else ()
    return with_clients(World.from_scenario(load_scenario(declared(case))), slos_ns=slos_ns)


def with_clients(world: World, **fields: Any) -> World:  # noqa: ANN401  # of `Clients`
    """The world with other fields of its clients."""
    return replace(world, clients={name: replace(own, **fields) for name, own in world.clients.items()})


def play(case: Case, style: str) -> Waits:
    played = world(case)
    setup, waiting = played.setup(), Waiting()
    summary = RunSummary(setup.parts(), nodes=setup.deployment.cluster, start_ns=0)
    sinks: list[Sink] = [summary] if style == "counted" else []
    if case.waits:
        sinks.append(waiting)
    totals = simulate(played, sinks, check_first=CHECKED_RECORDS[style])
    if style == "counted":
        summary.row(system="static", seed=case.seed)
    assert totals.open == 0, f"{totals.open} requests never ended"
    return waiting.waits_s


def begin(case: Case) -> Waits:
    """Simulate the same world without requests, which takes the time to start its servers."""
    silent = trace_of([], duration_ns=NS_PER_S, name="none", provenance="assumed: silence")
    simulate(replace(with_clients(world(case), trace=silent), duration_ns=0), check_first=0)
    return {}


def models() -> Mapping[tuple[str, str], Any]:
    return {
        (queue, style): partial(play, style=style) for queue in (MANY_SERVERS, BATCHING) for style in CHECKED_RECORDS
    }


if __name__ == "__main__":
    main(models(), before=begin)
