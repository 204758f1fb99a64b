"""Flashpoint's runs: a result depends only on model, policy, technique, trace, network and seed.

A core of a node stands for an accelerator: a replica takes one, and runs one request at a time. Execution times have no
noise, plans take effect at once, and 2 ms of network each way are added to every latency. The first plan is that of
Atoll's policy for the first minute, warm, on as few hosts as possible.

Source: Flashpoint specification, sections 2.13, 2.17, 3.4 and 5.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Final, Literal

import numpy as np
from msgspec import structs

from sloop.api import LINK_MBPS, NS_PER_S, STORE_MBPS, Node, ReplicaId, Request, RequestId, s, to_s
from sloop.api.experiments import (
    Application,
    ColdStartTruth,
    End,
    Estimates,
    NetworkTruth,
    Record,
    ServiceTruth,
    Spread,
    Stage,
    StartWorker,
    StoreLink,
    SystemChoice,
    TopologyTruth,
    Trace,
    Truth,
    Variant,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
    World,
    cut,
    scale,
    simulate,
)
from sloop.api.policies import CompletionInput, Policies, Provision, Provisioning, ProvisionInput
from sloop.api.profiles import Estimate, Profile, Quadratic, Startup
from sloop.api.systems import build_system
from sloop_systems.comparison.harness import RunResult, Trial, equalised
from sloop_systems.flashpoint.experiments.offline import T5, atoll_targets
from sloop_systems.flashpoint.experiments.traces import MAIN, requests_of
from sloop_systems.flashpoint.published import FLASHPOINT_MODELS, PROFILES

ScalingName = Literal["atoll-rate", "torchserve", "openwhisk", "sagemaker"]
SCALING: Final[tuple[ScalingName, ...]] = ("atoll-rate", "torchserve", "openwhisk", "sagemaker")
Technique = Literal[
    "baseline", "mp", "mc", "lc", "lc+mc", "lc+mc+mp", "gpu-faas", "atoll", "gillis", "serfer", "cheapest-start"
]
"""`mp` cuts models into pieces, `mc` sends weights along chains (multicast), `lc` starts replicas on nodes that have
the weights (locality). `gillis` and `serfer` cut models as these planners do."""
PROVISION: Final[Mapping[Technique, Mapping[str, Any]]] = {
    "baseline": {"locality": False, "multicast": False},
    "mp": {"locality": False, "multicast": False, "partition": True},
    "mc": {"locality": False},
    "lc": {"multicast": False},
    "lc+mc": {},
    "lc+mc+mp": {"partition": True},
    "gpu-faas": {"multicast": False, "join": False, "source": "store"},
    "atoll": {"multicast": False, "join": False, "source": "store"},
    "gillis": {"locality": False, "multicast": False, "partition": True, "cuts": "fewest"},
    "serfer": {"locality": False, "multicast": False, "partition": True, "cuts": "filled"},
    "cheapest-start": {"name": "cheapest_start", "partition": True},
}
"""The parameters of Flashpoint's provision policy for each system of section 5.1, and for each partition planner."""
LOADED_ONCE: Final[frozenset[Technique]] = frozenset({"lc", "lc+mc", "lc+mc+mp", "gpu-faas", "cheapest-start"})
"""The techniques with which a host that has a model has also loaded it, so that a start there takes no longer than to
send it to the accelerator. Policies believe that it is loaded again."""
KNOBS: Final[Mapping[ScalingName, tuple[str, float, int]]] = {
    "atoll-rate": ("factor", 1.0, 1),
    "torchserve": ("target_ms", 7000.0, -1),
    "openwhisk": ("target", 0.6, -1),
    "sagemaker": ("safety", 0.5, -1),
}
"""The parameter that says how many replicas a load gets, its default, and the sign with which it changes them."""

ACCELERATORS: Final = 1600
PER_HOST, HOSTS_PER_LEAF = 8, 20
LEAF_MBPS: Final = 97_000.0
"""100 Gbit/s with a goodput of 0.97; a host's link is the measured effective rate between two hosts."""
HOST_BYTES: Final = 200 << 30
REQUEST_NETWORK_S: Final = 0.004
NO_DEADLINE_MS: Final = 1e7
PATIENCE_NS: Final = s(4 * 3600)
"""How long an overloaded run may take to answer the waiting requests after the last arrival."""
MATCHED: Final = 1.05
"""The middle of the range of latencies that count as matched."""
FIRST_NS: Final = 1_000_000
"""Replicas of the first plan are ready at once."""
CHECKED: Final = 20_000
"""Records that the checkers see of the first seed: a few minutes of the trace, and the first starts."""


class FlashpointResult(RunResult, frozen=True, kw_only=True):
    """The result of one run. `violations` is always 0, for nothing has a deadline; `cores` are the replicas, from
    reservation until they have stopped, on average over the trace."""

    mean_s: float
    p99_s: float
    longest_s: float
    cold_s: float
    """Mean over the started replicas from reservation to readiness, of parts to that of their pipeline. One that was
    not ready at the end counts with the time until then if that is longer than the mean of the others. 0 if none was
    started."""
    cold_least_s: float
    cold_most_s: float
    started: int
    """Replicas that were started, without those of the first plan and those that were given up."""
    sent_only: float
    """Part of the starts that took no longer than to send the model to the accelerator, 0 to 1."""
    whole_only: float = 1.0
    """Part of the scale-ups in which no model was cut, 0 to 1."""
    parts_most: int = 1
    """The most parts of one model."""
    given_up: int = 0
    """Starts that were given up before they were ready, because fewer replicas were planned. They are not in the mean
    cold start, although they would have been the longest if the store is overloaded."""
    runs: int = 1
    """The number of runs that it took to find the policy's parameter."""


class FlashpointTrial(Trial, frozen=True, kw_only=True):
    """One run; `data` is the folder of public data."""

    model: str = T5
    policy: ScalingName = "atoll-rate"
    technique: Technique = "baseline"
    trace: str = MAIN
    scale: float = 1.0
    """Of the number of requests."""
    store: StoreLink = "shared"
    store_mbps: float = STORE_MBPS
    accelerators: int = ACCELERATORS
    per_host: int = PER_HOST
    pieces_max: int = 0
    """The most parts of one model; 0: as many as it has layers."""
    resources: float = 0.0
    """The mean number of replicas for which the policy's parameter is tuned, within 5 %; 0: as published."""
    matches_s: float = 0.0
    """The mean latency for which it is tuned instead, to at most 10 % above it; 0: for none."""

    def label(self) -> str:
        return f"{self.technique}, {self.policy}, {self.model}, {self.trace}"

    def play(self) -> FlashpointResult:
        """Simulate it, several times if its resources or its latency are to equal those of another run."""
        if self.resources:
            found = equalised(self.run, lambda result: result.cores, self.resources)
        elif self.matches_s:
            found = equalised(self.run, lambda result: 1.0 / result.mean_s, 1.0 / (MATCHED * self.matches_s))
        else:
            return self.run(1.0)
        return structs.replace(found.result, runs=found.runs)

    def run(self, knob: float) -> FlashpointResult:
        """One run with the policy's parameter changed by this factor, in the direction of more replicas."""
        world, seen = world_of(self, knob), StartsAndLatencies()
        check_first = CHECKED if self.seed == 0 and knob == 1.0 else 0
        totals = simulate(world, [seen], check_first=check_first, patience_ns=PATIENCE_NS)
        return seen.result(world.duration_ns, totals.ended_ns, send_s=FLASHPOINT_MODELS[self.model].send_s.value)


@cache
def profile_of(name: str) -> Profile:
    """A model's times and layers, on a core that stands for an accelerator."""
    model = FLASHPOINT_MODELS[name]
    load_s, send_s = model.load_s.value, model.send_s.value
    return Profile(
        latency_ms=Quadratic(0.0, model.exec_ms.value, 0.0),
        max_batch=1,
        max_cores=1,
        load_s=load_s + send_s,
        startup=Startup(0.0, load_s, 0.0, send_s=send_s),
        weights_bytes=round(model.size_bytes.value),
        layers=PROFILES[name].layers,
    )


@cache
def cluster_of(accelerators: int, per_host: int) -> tuple[Node, ...]:
    """The hosts, 20 at each leaf switch."""
    return tuple(
        Node(f"h{place}", "gpu", float(per_host), HOST_BYTES, rack=f"rack-{place // HOSTS_PER_LEAF}")
        for place in range(accelerators // per_host)
    )


def trace_of(trial: FlashpointTrial) -> Trace:
    """Requests at uniform instants within each second, thinned or copied for another scale."""
    excerpt = requests_of(trial.trace, Path(trial.data) if trial.data else None)
    return scale(excerpt.trace(seed=trial.seed, spread=Spread.UNIFORM), trial.scale, seed=trial.seed)


def world_of(trial: FlashpointTrial, knob: float = 1.0) -> World:
    """The trial as a world of the simulator; `knob`: by which factor the policy's parameter is changed, towards
    more replicas."""
    application = Application(
        name="model",
        slo_ms=NO_DEADLINE_MS,
        stages=(Stage("model", (Variant("v", profile=profile_of(trial.model)),)),),
        system=SystemChoice(trial.policy),
        cluster=cluster_of(trial.accelerators, trial.per_host),
        estimates=Estimates(correct=False),
    )
    send_s = FLASHPOINT_MODELS[trial.model].send_s.value
    topology = TopologyTruth(trial.store_mbps, trial.store, LINK_MBPS, HOSTS_PER_LEAF, LEAF_MBPS)
    truth = Truth(
        service=ServiceTruth(ratio=1.0, cv=0.0),
        cold_start=ColdStartTruth(local_s=send_s if trial.technique in LOADED_ONCE else None),
        network=NetworkTruth(payload_kb=(0.0,), topology=topology),
        plan_ms=0.0,
    )
    trace = trace_of(trial)
    return World.of(
        application,
        trace,
        seed=trial.seed,
        duration_ns=trace.duration_ns,
        truth=truth,
        policies=policies_of(trial, knob),
    )


def policies_of(trial: FlashpointTrial, knob: float) -> Policies:
    """The trial's autoscaler and technique."""
    key, default, sign = KNOBS[trial.policy]
    declared: dict[str, Any] = {
        key: default * knob**sign,
        "initial": first_replicas(trial),
        "replicas_max": trial.accelerators,
        "provision": {"name": "flashpoint", **PROVISION[trial.technique]},
    }
    if trial.pieces_max:
        declared["provision"]["pieces_max"] = trial.pieces_max
    if trial.technique == "cheapest-start":
        declared["provision"] |= {"store": trial.store, "store_mbps": trial.store_mbps}
    policies = build_system(trial.policy, declared).policies
    if not policies.provision.keeps:
        return policies
    return replace(policies, provision=OnFewestHosts(policies.provision, trial.per_host))


@dataclass(frozen=True, slots=True)
class OnFewestHosts(Provision):
    """Starts as `policy` says, but those of the first plan on as few hosts as possible, as if the application had grown
    from one replica; the publication does not say where they are."""

    policy: Provision
    per_host: int
    brings_weights: ClassVar[bool] = True

    @property
    def keeps(self) -> bool:
        return self.policy.keeps

    @property
    def partition(self) -> bool:
        return self.policy.partition

    def provide(self, now_ns: int, given: ProvisionInput) -> Provisioning:
        sites = given.sites[: -(-given.count // self.per_host)] if now_ns < FIRST_NS else given.sites
        return self.policy.provide(now_ns, structs.replace(given, sites=sites))

    def complete(self, now_ns: int, given: CompletionInput) -> Sequence[tuple[str, tuple[str, ...]]]:
        return self.policy.complete(now_ns, given)


def first_replicas(trial: FlashpointTrial) -> int:
    """What Atoll's policy wants for the first minute, whatever the policy."""
    counts = cut(trace_of(trial), duration_ns=s(60)).counts_per_s()
    belief = Estimate(profile_of(trial.model), variant="v", hardware="", correct=False)
    return min(trial.accelerators, atoll_targets(counts, belief)[0])


class StartsAndLatencies:
    """A sink: when requests arrived and ended, and when replicas were reserved, ready and gone."""

    def __init__(self) -> None:
        self._arrived: dict[RequestId, int] = {}
        self._latencies_ns: list[int] = []
        self._reserved: dict[ReplicaId, int] = {}
        self._starting: dict[ReplicaId, int] = {}
        self._cold_ns: list[int] = []
        self._parts: dict[ReplicaId, StartWorker] = {}
        """Of the replicas that start as parts."""
        self._with_part: dict[ReplicaId, list[ReplicaId]] = {}
        """By pipeline, those that have their parts and wait for the others."""
        self._scale_ups: dict[int, int] = {}
        """By the instant of a decision, the most parts of one model in it."""
        self._held: list[tuple[int, int]] = []
        self._given_up = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        kind = type(record)
        if kind is Request:
            self._arrived[record.id] = record.sent_ns  # type: ignore[union-attr]
        elif kind is End:
            self._latencies_ns.append(now_ns - self._arrived.pop(record.request))  # type: ignore[union-attr]
        elif isinstance(record, StartWorker):
            self._reserved[record.worker] = now_ns
            if now_ns > FIRST_NS:
                self._starting[record.worker] = now_ns
                parts = max(1, len(record.spec.shape))
                self._scale_ups[now_ns] = max(parts, self._scale_ups.get(now_ns, 1))
                if record.pipeline is not None:
                    self._parts[record.worker] = record
        elif isinstance(record, WorkerReady):
            self._ready(now_ns, record.worker)
        elif isinstance(record, WorkerStopped | WorkerLost):
            self._given_up += self._starting.pop(record.worker, None) is not None
            begin_ns = self._reserved.pop(record.worker, None)
            if begin_ns is not None:
                self._held.append((begin_ns, now_ns))

    def _ready(self, now_ns: int, replica: ReplicaId) -> None:
        """A replica is ready, or has its part: a pipeline is ready when all have theirs, and counts once for each."""
        part, ready = self._parts.pop(replica, None), [replica]
        if part is not None and part.pipeline is not None:
            ready = self._with_part.setdefault(part.pipeline, [])
            ready.append(replica)
            if len(ready) < len(part.spec.shape):
                return
        for each in ready:
            if each in self._starting:
                self._cold_ns.append(now_ns - self._starting.pop(each))

    def result(self, duration_ns: int, ended_ns: int, *, send_s: float) -> FlashpointResult:
        """The figures of the run, whose trace has this duration."""
        held = self._held + [(begin_ns, ended_ns) for begin_ns in self._reserved.values()]
        busy_ns = sum(max(0, min(end_ns, duration_ns) - begin_ns) for begin_ns, end_ns in held)
        ready_ns = fmean(self._cold_ns) if self._cold_ns else 0.0
        open_ns = [ended_ns - begin_ns for begin_ns in self._starting.values()]
        cold_ns = self._cold_ns + [each for each in open_ns if each > ready_ns]
        latencies_s = np.array(self._latencies_ns) / NS_PER_S + REQUEST_NETWORK_S
        quick_ns = s(send_s) + FIRST_NS
        return FlashpointResult(
            violations=0.0,
            cores=busy_ns / duration_ns,
            mean_s=float(latencies_s.mean()),
            p99_s=float(np.quantile(latencies_s, 0.99)),
            longest_s=float(latencies_s.max()),
            cold_s=to_s(round(fmean(cold_ns))) if cold_ns else 0.0,
            cold_least_s=to_s(min(cold_ns, default=0)),
            cold_most_s=to_s(max(cold_ns, default=0)),
            started=len(cold_ns),
            sent_only=sum(each <= quick_ns for each in cold_ns) / len(cold_ns) if cold_ns else 0.0,
            whole_only=fmean(parts == 1 for parts in self._scale_ups.values()) if self._scale_ups else 1.0,
            parts_most=max(self._scale_ups.values(), default=1),
            given_up=self._given_up,
        )
