"""A simulated run of PALDIA or of a system that it is compared with, on its six kinds of EC2 nodes.

One node of each kind can be rented; requests arrive in one group each second. Durations have the calibrated noise of 3
%, and a node and its workers are ready one second after the order. These are the settings B of the specification (3.5),
which are the defaults of the systems in the catalogue. Source: Bhasi et al., PALDIA (IPDPS 2024), specification
sections 3 to 5.
"""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from msgspec import structs

from sloop.api import NS_PER_MS, NS_PER_S, Node, ReplicaId, Request, RequestId
from sloop.api.experiments import (
    Application,
    BackgroundTruth,
    BatchFailed,
    ColdStartTruth,
    End,
    Estimates,
    Finished,
    NodeRow,
    NodeTruth,
    Record,
    RunSummary,
    ServiceTruth,
    Stage,
    StartBatch,
    StartWorker,
    SystemChoice,
    Truth,
    Variant,
    WorkerLost,
    WorkerStopped,
    World,
    faults_of,
    simulate,
    with_known_future,
)
from sloop.api.profiles import KINDS, Profile, power_of
from sloop_systems.comparison.harness import RunResult, Trial
from sloop_systems.paldia.experiments.offline import EC2
from sloop_systems.paldia.experiments.traces import clumps, rates_of
from sloop_systems.paldia.published import PALDIA_MODELS, SLO_MS, PaldiaModel

LANGUAGE: Final = ("ALBERT", "BERT", "DistilBERT", "FunnelTransformer")
VISION: Final = tuple(name for name in PALDIA_MODELS if name not in LANGUAGE)
V100_TIME, V100_GB_PER_S, M60_GB_PER_S = 0.25, 900.0, 160.0
OVERRIDES: Final = {
    "SENet18, figure 1": PaldiaModel(50, 128, 0.50, 0.45, 70, 575),
    "DenseNet121, figure 1": PaldiaModel(72, 64, 0.65, 0.45, 25, 160),
    "DenseNet121, figure 1, slower": PaldiaModel(90, 64, 0.62, 0.35, 25, 160),
    "ResNet50 on Wikipedia": PaldiaModel(95, 64, 0.68, 0.8, 40, 170),
    "DPN92 on Twitter": PaldiaModel(125, 64, 0.75, 0.6, 25, 92),
    "GoogleNet, exhaustion": PaldiaModel(
        50 / V100_TIME, 128, 0.43 * V100_TIME * V100_GB_PER_S / M60_GB_PER_S, 0.7, 25, 700
    ),
}
"""Values that fit single figures better than the common ones (specification, 3.4); of the last column, the trace's peak
or mean. Those of exhaustion are for the V100: 50 ms, and 0.43 of its bandwidth."""
LOADS: Final = {
    "SENet18, figure 1": "flat",
    "DenseNet121, figure 1": "flat",
    "DenseNet121, figure 1, slower": "flat",
    "ResNet50 on Wikipedia": "wiki",
    "DPN92 on Twitter": "twitter",
    "GoogleNet, exhaustion": "constant",
}
NOISE: Final = 0.03
CHECKED: Final = 20_000
"""Records that the checkers see of the first seed."""
START_S: Final = 1e-4
"""A worker is ready when its node is: the second of acquisition covers both."""
OUTAGE_AT_S, OUTAGE_S = 60.3, 60.0
"""Every second minute the node in use fails, 0.3 s after the full minute, when the batches of a second have ended. In
this experiment nodes are pooled, so that another one takes over before the next second: `acquire_s` is shorter."""
BACKGROUND: Final = BackgroundTruth(part=0.3)
NEAR_PEAK: Final = 0.8
"""Seconds with more than this part of the peak are the period of highest traffic."""
TAIL: Final = (98.5, 99.5)
"""The requests between these percentiles are those of the P99, whose latency is taken apart."""

Options = tuple[tuple[str, Any], ...]
"""Parameters of a system that differ from its defaults; `batch.lane` is one of its batch policy."""


class PaldiaResult(RunResult, frozen=True, kw_only=True):
    """The result of one run; a request that was never answered is late."""

    compliance: float
    """Requests in time, in percent."""
    p99_ms: float
    usd_per_h: float
    """Of the nodes, from their acquisition to their release."""
    dearer: float
    """Part of the time with a replica on a node that is dearer than the M60's, in percent."""
    latencies_ms: tuple[float, ...]
    """At 1, 2, … 100 %."""
    watts: float
    """The power of all nodes held, as a mean over the run."""
    gpu_busy: float
    """Part of the time in which GPU nodes were held and a batch ran on them, in percent; 0 if none was held."""
    gpu_p99_ms: float
    """P99 of the requests that ran on GPUs; 0 if none did."""
    near_peak: float
    """Compliance of the requests that came in the seconds near the peak."""
    overhead: float
    """The part of the latency at the P99 that exceeds the duration of the batch alone, in percent."""
    interference: float
    """The part of it that is caused by other batches on the device."""
    queueing: float


class TailParts(NamedTuple):
    """The parts of the latency at the P99 besides the duration of the batch alone, in percent of that latency."""

    interference: float
    queueing: float

    @property
    def overhead(self) -> float:
        """Both."""
        return self.interference + self.queueing


class PaldiaTrial(Trial, frozen=True, kw_only=True):
    """One model under one system."""

    model: str
    system: str
    options: Options = ()
    load: str = ""
    """A key of `traces.RATES`; empty: that of the model."""
    arrivals: Literal["clumps", "poisson"] = "clumps"
    acquire_s: float = 1.0
    faults: Literal["", "outages", "background"] = ""
    first_seed: int = 0
    """Added to the seed."""

    @property
    def world_seed(self) -> int:
        """The seed of arrivals and durations."""
        return self.first_seed + self.seed

    def label(self) -> str:
        return f"{self.model}, {self.system}"

    def play(self) -> PaldiaResult:
        """Simulate it."""
        world = world_of(self)
        summary = RunSummary(world.application.graph, nodes=world.deployment.cluster)
        batches = BatchAccount({kind: own for kind in EC2 if (own := model_of(self)[0].profile(kind)) is not None})
        simulate(world, [summary, batches], check_first=CHECKED if self.seed == 0 and not self.faults else 0)
        return result_of(self, world, summary, batches)


def model_of(trial: PaldiaTrial) -> tuple[PaldiaModel, str]:
    """The calibrated model, and the name of its load."""
    if trial.model in OVERRIDES:
        return OVERRIDES[trial.model], trial.load or LOADS[trial.model]
    return PALDIA_MODELS[trial.model], trial.load or "azure"


def world_of(trial: PaldiaTrial) -> World:
    """The trial as a world of the simulator."""
    model, load = model_of(trial)
    profiles = {kind: profile for kind in EC2 if (profile := model.profile(kind)) is not None}
    variant = Variant("v", profiles={kind: structs.replace(each, load_s=START_S) for kind, each in profiles.items()})
    application = Application(
        name="model",
        slo_ms=SLO_MS,
        stages=(Stage("model", (variant,)),),
        system=SystemChoice(trial.system, parameters=parameters_of(trial.options)),
        cluster=tuple(_on_demand(kind) for kind in EC2 if kind in profiles),
        estimates=Estimates(correct=False),
    )
    truth = Truth(
        service=ServiceTruth(ratio=1.0, cv=NOISE),
        cold_start=ColdStartTruth(start_s=START_S),
        nodes=NodeTruth(
            acquire_s=trial.acquire_s,
            outage_at_s=OUTAGE_AT_S if trial.faults == "outages" else None,
            outage_s=OUTAGE_S,
        ),
        background=BACKGROUND if trial.faults == "background" else None,
        plan_ms=0.0,
    )
    trace = clumps(load, model.peak_rps, trial.world_seed, poisson=trial.arrivals == "poisson", data=trial.data)
    made = World.of(
        application, trace, seed=trial.world_seed, duration_ns=trace.duration_ns, truth=truth, faults=faults_of(truth)
    )
    return replace(made, deployment=with_known_future(made.deployment, made.clients))


def parameters_of(options: Options) -> dict[str, Any]:
    """As an application declares them."""
    found: dict[str, Any] = {}
    for key, value in options:
        verb, _, parameter = key.rpartition(".")
        of_verb: dict[str, Any] = found.setdefault(verb, {}) if verb else found
        of_verb[parameter] = list(value) if isinstance(value, tuple) else value
    return found


def _on_demand(kind: str) -> Node:
    """The one node of a kind, which is paid for while it is held."""
    return structs.replace(KINDS[kind].node(f"{kind}-0"), on_demand=True)


def result_of(trial: PaldiaTrial, world: World, summary: RunSummary, batches: "BatchAccount") -> PaldiaResult:
    """The figures of a run that has ended."""
    row, rows = summary.row(system=trial.system, seed=trial.seed), summary.deployment.nodes.rows()
    run_s, parts = world.duration_ns / NS_PER_S, batches.tail()
    model, load = model_of(trial)
    rates = rates_of(load, model.peak_rps, trial.world_seed, data=trial.data)
    near_peak = seconds_near_peak(rates)
    busy = [second for second in summary.seconds() if second.start_s in near_peak]
    arrivals, served = sum(each.arrivals for each in busy), sum(each.served for each in busy)
    gpus = [each for each in rows if KINDS[each.hardware].devices]
    return PaldiaResult(
        violations=100.0 * row.violations,
        cores=0.0,
        compliance=100.0 - 100.0 * row.violations,
        p99_ms=row.p99_ms or 0.0,
        usd_per_h=row.node_usd / run_s * 3600,
        dearer=100.0 * batches.dearer_s(world.duration_ns) / run_s,
        latencies_ms=tuple(summary.latency_ms([percent / 100 for percent in range(1, 101)])),
        watts=sum(_watts(each, batches) * each.held_s for each in rows) / run_s,
        gpu_busy=_busy(gpus, batches),
        gpu_p99_ms=batches.gpu_p99_ms,
        near_peak=100.0 * served / arrivals if arrivals else 100.0,
        overhead=parts.overhead,
        interference=parts.interference,
        queueing=parts.queueing,
    )


def seconds_near_peak(rates: tuple[float, ...]) -> set[int]:
    """Those that belong to the highest traffic."""
    least = NEAR_PEAK * max(rates)
    return {second for second, rate in enumerate(rates) if rate > least}


def _watts(row: NodeRow, batches: "BatchAccount") -> float:
    """What a node of this kind draws while it is held."""
    power = power_of(_on_demand(row.hardware))
    assert power is not None, f"the power of {row.hardware} is unknown"
    return power.watts(batches.busy_s(row.hardware) / row.held_s) if row.held_s else 0.0


def _busy(rows: list[NodeRow], batches: "BatchAccount") -> float:
    held_s = sum(each.held_s for each in rows)
    return 100.0 * sum(batches.busy_s(each.hardware) for each in rows) / held_s if held_s else 0.0


class BatchAccount:
    """A sink: on which hardware batches ran and for how long at least one did; what the latency of requests was."""

    def __init__(self, profiles: Mapping[str, Profile]) -> None:
        self._alone_ns = {
            kind: [round(profile.latency_ms.latency_ms(size, 1) * NS_PER_MS) for size in range(profile.max_batch + 1)]
            for kind, profile in profiles.items()
        }
        """By kind and size, how long a batch takes that is alone."""
        self._kinds: dict[ReplicaId, str] = {}
        self._sent_ns: dict[RequestId, int] = {}
        self._running: dict[ReplicaId, tuple[int, StartBatch]] = {}
        self._count = dict.fromkeys(EC2, 0)
        self._since_ns = dict.fromkeys(EC2, 0)
        self._busy_ns = dict.fromkeys(EC2, 0)
        self._dearer, self._dearer_since_ns, self._dearer_ns = 0, 0, 0
        self._times_ns = [array("q") for _ in range(4)]
        """Of each request, its latency, what it waited, what its batch takes alone, and whether it was on a GPU."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if type(record) is End:  # most records are ends and requests
            return
        if type(record) is Request:
            self._sent_ns[record.id] = record.sent_ns
        elif isinstance(record, StartBatch):
            kind = self._kinds[record.replica]
            if not self._count[kind]:
                self._since_ns[kind] = now_ns
            self._count[kind] += 1
            self._running[record.replica] = now_ns, record
        elif isinstance(record, Finished):
            self._finish(now_ns, record)
        elif isinstance(record, StartWorker):
            kind = self._kinds[record.worker] = record.spec.slot.hardware
            if kind in EC2[4:]:
                self._dearer_since_ns = self._dearer_since_ns if self._dearer else now_ns
                self._dearer += 1
        elif isinstance(record, WorkerStopped | WorkerLost):
            self._lose(now_ns, record.worker)
        elif isinstance(record, BatchFailed):
            self._leave(now_ns, record.replica)

    def _finish(self, now_ns: int, record: Finished) -> None:
        start_ns, batch = self._running[record.replica]
        kind, size = self._kinds[record.replica], len(batch.requests)
        sent_ns = self._sent_ns
        latencies, waits, alone, on_gpu = self._times_ns
        own_ns = [now_ns - sent_ns.pop(id) for id in batch.requests]
        latencies.extend(own_ns)
        waits.extend([latency_ns - (now_ns - start_ns) for latency_ns in own_ns])
        alone.extend([self._alone_ns[kind][size]] * size)
        on_gpu.extend([bool(KINDS[kind].devices)] * size)
        self._leave(now_ns, record.replica)

    def _leave(self, now_ns: int, replica: ReplicaId) -> None:
        if self._running.pop(replica, None) is not None:
            kind = self._kinds[replica]
            self._count[kind] -= 1
            if not self._count[kind]:
                self._busy_ns[kind] += now_ns - self._since_ns[kind]

    def _lose(self, now_ns: int, replica: ReplicaId) -> None:
        self._leave(now_ns, replica)
        if self._kinds.pop(replica, "") in EC2[4:]:
            self._dearer -= 1
            self._dearer_ns += 0 if self._dearer else now_ns - self._dearer_since_ns

    def busy_s(self, hardware: str) -> float:
        """For how long at least one batch ran on this kind."""
        return self._busy_ns[hardware] / NS_PER_S

    def dearer_s(self, end_ns: int) -> float:
        """For how long there was a replica on a node that is dearer than the M60's."""
        return (self._dearer_ns + (max(0, end_ns - self._dearer_since_ns) if self._dearer else 0)) / NS_PER_S

    @property
    def gpu_p99_ms(self) -> float:
        """Of the requests that ran on GPUs; 0 if none did."""
        latencies, _, _, on_gpu = (np.frombuffer(each, dtype=np.int64) for each in self._times_ns)
        own = latencies[on_gpu == 1]
        return float(np.percentile(own, 99)) / NS_PER_MS if len(own) else 0.0

    def tail(self) -> TailParts:
        """What the latency at the P99 consists of (specification, 2.9)."""
        latencies, waits, alone, _ = (np.frombuffer(each, dtype=np.int64) for each in self._times_ns)
        if not len(latencies):
            return TailParts(0.0, 0.0)
        low, high = np.percentile(latencies, TAIL)
        own = (latencies >= low) & (latencies <= high)
        total, queueing, least = (float(each[own].mean()) for each in (latencies, waits, alone))
        return TailParts(100.0 * (total - queueing - least) / total, 100.0 * queueing / total)
