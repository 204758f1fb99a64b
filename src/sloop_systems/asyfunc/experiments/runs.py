"""A simulated run of AsyFunc or of a system that it is compared with, and its memory, cores and violations.

A node has 26 cores and 96 GiB, as published. The number of nodes is not published; it is 12 here. Latencies are those
of the parametric profiles, without noise, because the publication emulates its system with tables. The first seconds of
a run do not count.

Source: AsyFunc specification, sections 3.1, 5.1 and 5.2.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Final, Literal

import numpy as np
from msgspec import structs

from sloop.api import NS_PER_S, BatchId, Node, ReplicaId, s
from sloop.api.experiments import (
    Application,
    ColdStartTruth,
    Estimates,
    Finished,
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
    WorkerReady,
    WorkerStopped,
    World,
    simulate,
)
from sloop.api.profiles import PUBLISHED, Profile
from sloop_systems.asyfunc.experiments.traces import relative_rates, trace_at
from sloop_systems.asyfunc.published import BATCH_MAX, CONTAINER_S, CORES_MAX
from sloop_systems.comparison.harness import RunResult, Trial

SystemName = Literal[
    "asyfunc",
    "asyfunc-noadapt",
    "asyfunc-nolls",
    "headstart",
    "batch",
    "batch-plus",
    "on-demand",
    "last-value",
    "k-last-value",
    "opt",
]
MODELS: Final[Mapping[str, str]] = {
    "InceptionV3": "InceptionV3",
    "EfficientNet-b5": "EfficientNet-b5",
    "YOLOv8x": "YOLOv8x",
    "SSD300": "SSD300",
    "ResNet101": "ResNet50",
    "VGG19": "VGG16",
}
"""Each of the six with the name that the publication prints (section 3.1)."""
VIT: Final = "ViT-B"

NODES, NODE_CORES, NODE_BYTES = 12, 26.0, 96 << 30
LEAD_S: Final = 30
"""Seconds of requests that do not count, because the first decision has no rate, and YOLOv8x loads for 12 s."""
LOAD: Final = 2.09
"""Mean demand, as a multiple of what one body with 16 cores carries: 110 requests/s of InceptionV3."""
PERIOD_S: Final = 10
CHECKED: Final = 20_000
"""Records of seed 0 that the checkers see."""
PATIENCE_S: Final = 600
MIB: Final = 2**20
SMALL_BODIES: Final = 128.0
"""K with which AsyFunc starts bodies of two cores, as BATCH does, so that memory can be compared."""

Options = tuple[tuple[str, bool | float | str], ...]


class AsyFuncResult(RunResult, frozen=True, kw_only=True):
    """The result of one run, over the part that counts. `cores` are those of bodies and shadows."""

    memory_mib: float
    """Weights of all bodies and shadows, provisioned or starting: mean over time."""
    utility: float
    """Core time in batches over core time provisioned, in percent."""
    utility_most: float
    """Of the best period of ten seconds."""
    violations_median: float
    """Of the periods of ten seconds, in percent."""
    dropped: float
    """In percent."""
    batch: float
    """Mean number of requests in a batch."""
    replicas: float
    """Bodies, mean over time."""
    shadows: int
    """Shadows started."""
    shadow_cores: float
    """Mean over time."""
    memory_by_period: tuple[float, ...]
    utility_by_period: tuple[float, ...]


class AsyFuncTrial(Trial, frozen=True, kw_only=True):
    """One run."""

    model: str = "InceptionV3"
    system: SystemName = "asyfunc"
    weight: float = SMALL_BODIES
    """K of AsyFunc; 0: the model's multiply-adds in 10⁹, as the publication's formula has it."""
    prewarm: float = 1.0
    """k_b of BATCH."""
    load: float = LOAD
    seconds: int = 300
    shape: Literal["twitter", "surge"] = "twitter"
    """`surge`: steady, then twice as much for 5 s, then steady again (Fig. 6)."""
    body_load: float = 0.0
    """λ: how many inferences a body takes to load, if not as many as the profile says."""
    start_s: float | None = None
    """How long a replica takes to start instead."""
    options: Options = ()
    """Further parameters of the system."""
    spare_workers: int = 1

    def label(self) -> str:
        return f"{self.system}, {self.model}"

    def play(self) -> AsyFuncResult:
        """Simulate it; the first records of seed 0 under the checkers."""
        world = world_of(self)
        seen, summary = (
            Provisions(self.profile.weights_bytes, block_bytes(self.profile)),
            RunSummary(world.application.graph, start_ns=0),
        )
        check_first = CHECKED if self.seed == 0 else 0
        simulate(world, [seen, summary], check_first=check_first, patience_ns=s(PATIENCE_S))
        return seen.result(summary, LEAD_S, self.seconds)

    @property
    def profile(self) -> Profile:
        """Of the model."""
        return PUBLISHED[f"{self.model}-asyfunc"]


def slo_ms(profile: Profile) -> float:
    """The published deadline: what the largest batch takes on all cores."""
    return profile.latency_ms.latency_ms(BATCH_MAX, CORES_MAX)


def rate_rps(trial: AsyFuncTrial) -> float:
    """Mean requests per second."""
    return trial.load * 1e3 * BATCH_MAX / slo_ms(trial.profile)


def block_bytes(profile: Profile) -> tuple[int, ...]:
    """The weights of each block."""
    assert profile.layers is not None
    return tuple(each.param_bytes for each in profile.layers.blocks)


def rates_of(trial: AsyFuncTrial) -> list[float]:
    """The rate of each second, with those that do not count."""
    mean_rps = rate_rps(trial)
    if trial.shape == "surge":
        third = trial.seconds // 3
        surge = range(LEAD_S + third, LEAD_S + third + 5)
        return [mean_rps * (2.0 if second in surge else 1.0) for second in range(LEAD_S + trial.seconds)]
    shares = relative_rates(trial.seed, trial.seconds)
    return [mean_rps * shares[0]] * LEAD_S + [mean_rps * share for share in shares]


def world_of(trial: AsyFuncTrial) -> World:
    """The trial as a world of the simulator."""
    trace = trace_at(rates_of(trial), trial.seed, "requests")
    profile, start_s = trial.profile, trial.start_s
    if start_s is None and trial.body_load:
        start_s = CONTAINER_S + trial.body_load * profile.latency_ms.latency_ms(1, CORES_MAX) / 1e3
    application = Application(
        name="model",
        slo_ms=slo_ms(profile),
        stages=(Stage("model", (Variant("v", profile=profile),)),),
        system=SystemChoice(trial.system, _parameters(trial, trace.counts_per_s())),
        cluster=tuple(Node(f"n{place}", "cpu", NODE_CORES, NODE_BYTES) for place in range(NODES)),
        estimates=Estimates(correct=False),
    )
    truth = Truth(
        service=ServiceTruth(ratio=1.0, cv=0.0),
        cold_start=ColdStartTruth(start_s=start_s, warm=True, spare_workers=trial.spare_workers),
        plan_ms=0.0,
    )
    return World.of(application, trace, seed=trial.seed, duration_ns=trace.duration_ns, truth=truth)


def _parameters(trial: AsyFuncTrial, counts: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if trial.system.startswith(("asyfunc", "headstart")):
        found |= {"memory_cores": trial.weight, "initial_rps": rate_rps(trial)}
    elif trial.system.startswith("batch"):
        found |= {"prewarm": trial.prewarm, "rate_rps": rate_rps(trial)}
    elif trial.system == "opt":
        found["forecast"] = {"name": "oracle", "counts": list(map(float, counts)), "horizon_s": 1}
    for key, value in trial.options:
        verb, _, own = key.partition(".")
        if own:
            found[verb] = {**found.get(verb, {}), own: value}
        else:
            found[key] = value
    return found


class Provisions:
    """A sink: when bodies and shadows were provisioned, and when their cores computed.

    A shadow counts as busy for every batch of its body that starts while it is ready. That the pair leaves some batches
    to the body alone is not in the log.
    """

    def __init__(self, body_bytes: int, blocks_bytes: Sequence[int]) -> None:
        self._body_bytes, self._blocks_bytes = body_bytes, blocks_bytes
        self._bodies: dict[ReplicaId, tuple[int, float]] = {}
        self._shadows: dict[ReplicaId, tuple[int, float, int]] = {}
        self._body_of: dict[ReplicaId, ReplicaId] = {}
        self._ready: set[ReplicaId] = set()
        self._running: dict[BatchId, tuple[int, float]] = {}
        self._held: list[tuple[int, int, float, float]] = []
        """From, until, cores, bytes: of bodies,"""
        self._held_shadows: list[tuple[int, int, float, float]] = []
        """and of shadows."""
        self._busy: list[tuple[int, int, float]] = []
        self._sizes: list[tuple[int, int]] = []
        self.started: list[int] = []
        """When shadows were started."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if isinstance(record, StartBatch):
            body = self._bodies[record.replica]
            cores = body[1] + (self._shadows[record.replica][1] if record.replica in self._ready else 0.0)
            self._running[record.batch] = now_ns, cores
            self._sizes.append((now_ns, len(record.requests)))
        elif isinstance(record, Finished):
            self._busy.append((self._running[record.batch][0], now_ns, self._running.pop(record.batch)[1]))
        elif isinstance(record, StartWorker):
            self._start(now_ns, record)
        elif isinstance(record, WorkerReady):
            if record.worker in self._body_of:
                self._ready.add(self._body_of[record.worker])
        elif isinstance(record, WorkerStopped | WorkerLost):
            self._end_shadow(now_ns, self._body_of.pop(record.worker, record.worker))
            if record.worker in self._bodies:
                begin_ns, cores = self._bodies.pop(record.worker)
                self._held.append((begin_ns, now_ns, cores, self._body_bytes))

    def _start(self, now_ns: int, order: StartWorker) -> None:
        shadow = order.spec.shadow
        if order.replica is None or shadow is None:
            self._bodies[order.worker] = now_ns, order.spec.cores
            return
        size = sum(self._blocks_bytes[block] for block in shadow.layers)
        self._shadows[order.replica] = now_ns, shadow.cores, size
        self._body_of[order.worker] = order.replica
        self.started.append(now_ns)

    def _end_shadow(self, now_ns: int, replica: ReplicaId) -> None:
        self._ready.discard(replica)
        if replica in self._shadows:
            begin_ns, cores, size = self._shadows.pop(replica)
            self._held_shadows.append((begin_ns, now_ns, cores, size))

    def result(self, summary: RunSummary, first_s: int, seconds: int) -> AsyFuncResult:
        """The figures of so many seconds from the first that counts."""
        end_ns = s(first_s + seconds)
        for replica in [*self._bodies]:
            self._end_shadow(end_ns, replica)
            begin_ns, cores = self._bodies.pop(replica)
            self._held.append((begin_ns, end_ns, cores, self._body_bytes))
        edges_ns = list(range(s(first_s), end_ns + 1, s(PERIOD_S)))
        periods = list(pairwise(edges_ns))
        everything = self._held + self._held_shadows
        cores_s, bytes_s, shadow_cores_s = (
            _by_period([(begin_ns, until_ns, row[place]) for begin_ns, until_ns, *row in rows], periods)
            for rows, place in ((everything, 0), (everything, 1), (self._held_shadows, 0))
        )
        bodies_s = _by_period([(begin_ns, until_ns, 1.0) for begin_ns, until_ns, *_ in self._held], periods)
        busy_s = _by_period(self._busy, periods)
        utility = [100 * busy / held if held else 0.0 for busy, held in zip(busy_s, cores_s, strict=True)]
        rows = summary.seconds()[first_s : first_s + seconds]
        arrivals = sum(row.arrivals for row in rows)
        by_second = [100 * row.violations for row in rows]
        missed = [row.violations * row.arrivals for row in rows]
        by_period = [
            100 * sum(missed[at : at + PERIOD_S]) / max(1, sum(row.arrivals for row in rows[at : at + PERIOD_S]))
            for at in range(0, len(rows), PERIOD_S)
        ]
        sizes = [size for at_ns, size in self._sizes if edges_ns[0] <= at_ns < end_ns]
        return AsyFuncResult(
            violations=100 * sum(missed) / max(1, arrivals),
            violations_by_second=tuple(by_second),
            violations_median=median(by_period or [0.0]),
            dropped=100 * sum(row.dropped for row in rows) / max(1, arrivals),
            cores=sum(cores_s) / seconds,
            cores_by_second=tuple(row.cores for row in rows),
            memory_mib=sum(bytes_s) / seconds / MIB,
            memory_by_period=tuple(each / PERIOD_S / MIB for each in bytes_s),
            utility=100 * sum(busy_s) / sum(cores_s),
            utility_most=max(utility),
            utility_by_period=tuple(utility),
            batch=fmean(sizes) if sizes else 0.0,
            replicas=sum(bodies_s) / seconds,
            shadows=sum(edges_ns[0] <= at_ns < end_ns for at_ns in self.started),
            shadow_cores=sum(shadow_cores_s) / seconds,
        )


def _by_period(held: Sequence[tuple[int, int, float]], periods: Sequence[tuple[int, int]]) -> list[float]:
    """In each period, the sum of what was held × the seconds for which it was."""
    if not held:
        return [0.0] * len(periods)
    begins, ends, amounts = (np.array(column, dtype=np.float64) for column in zip(*held, strict=True))
    return [
        float((np.clip(np.minimum(ends, until_ns) - np.maximum(begins, from_ns), 0, None) * amounts).sum()) / NS_PER_S
        for from_ns, until_ns in periods
    ]


def with_options(trial: AsyFuncTrial, **options: bool | float | str) -> AsyFuncTrial:
    """The trial with further parameters of its system: `batch__overflow` is the parameter `overflow` of the policy for
    `batch`."""
    own = tuple(sorted((key.replace("__", "."), value) for key, value in options.items()))
    return structs.replace(trial, options=(*trial.options, *own))
