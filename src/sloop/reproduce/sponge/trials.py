"""Sponge's evaluation as trials: who serves 20 requests a second of YOLOv5s over a 4G link, and how well.

A trial is a value and its outcome depends on nothing else. Two choices differ from `sloop simulate`'s defaults, because
the published runs differ: beliefs are not corrected online, and the scaler is told the request rate, as the artefact's
is (N is its configured rate); `told=False` leaves it to the monitor, which knows no rate for the first second.

Source: Razavi et al., Sponge (EuroMLSys 2024), evaluation; generator, margin and drop limit as in the public artefact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, structs

from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.scenario import ColdStart, Delivery, NetworkTruth, ServiceTruth, Truth
from sloop.core import Core
from sloop.core.protocols import Scale
from sloop.core.views import Bucket, ClusterView, StageView, Traffic
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.report.metrics import Metrics
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.systems import build_system
from sloop.units import NS_PER_S, s
from sloop.vocabulary import Node, Plan
from sloop.workload import Link, link_from, read_link
from sloop.workload.generate import generated, kind_of
from sloop.workload.link import LinkFile

SLO_MS = 1000.0
RATE_RPS = 20
PAYLOAD_KB = 284.0
BYTES_PER_KB = 1024
SECONDS = 600
STAGE, VARIANT = "detect", "yolov5s"

Parameters = tuple[tuple[str, Any], ...]
"""A system's parameters, hashable."""


class Trial(Struct, frozen=True, kw_only=True):
    """One run of 600 seconds. `ratio` is l/mean: by how much the profile's P99 exceeds the true mean service time."""

    policy: str
    """As reports call it; nothing else depends on it."""
    system: str
    parameters: Parameters = ()
    seed: int = 0
    ratio: float = 1.05
    arrival: Literal["burst", "uniform", "poisson", "equal"] = "burst"
    payload_kb: tuple[float, ...] = (PAYLOAD_KB,)
    semantics: Delivery = "delay"
    drop: float = 3.0
    resize_ms: float = 50.0
    start_s: float = 10.0
    cores: float = 16.0
    told: bool = True
    oracle: bool = False
    correct: bool = False
    profile_error: float = 1.0
    link: str = ""
    """Path of the recorded link; empty for a synthetic one."""


class Outcome(Struct, frozen=True):
    """What came of a trial. Shares are 0 to 100, cores allocated and averaged over the 600 seconds."""

    violations: float
    cores: float
    by_second: tuple[float, ...]
    """Violations of the requests that arrived in each second."""
    cores_by_second: tuple[float, ...]
    cold_starts: int
    p99_ms: float


@dataclass(frozen=True, slots=True)
class KnownRate:
    """A forecast that was told the answer."""

    rate_rps: float

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        return self.rate_rps


@dataclass(frozen=True, slots=True)
class Oracle:
    """A scaler that knows what the link will do to the requests of the coming second, instead of the last one's."""

    inner: Scale
    link: Link
    payload_bytes: int

    @property
    def period_ns(self) -> int:
        return self.inner.period_ns

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        way_ns = self.link.transfer_ns(now_ns, self.payload_bytes)

        def foreseen(stage: StageView) -> StageView:
            bucket = Bucket(start_ns=now_ns, arrivals=RATE_RPS, slack_ns=[stage.slo_ns - way_ns] * RATE_RPS)
            return replace(stage, buckets=[bucket])

        return self.inner.plan(now_ns, replace(view, stages=tuple(foreseen(stage) for stage in view.stages)))


@cache
def link_of(path: str) -> Link:
    """The first 600 seconds of the recorded link, or 600 synthetic ones."""
    if path:
        return read_link(LinkFile(Path(path), rows_max=SECONDS))
    return link_from({"kind": "lte", "seconds": SECONDS}, seed=0, folder=Path())


def play(trial: Trial) -> Outcome:
    """Run a trial under the checkers."""
    world = world_of(trial)
    core = _core(trial, world)
    metrics = Metrics(start_ns=0)
    simulate(world, [metrics], core=core)
    seconds = metrics.seconds()[:SECONDS]
    requests = metrics.requests
    row = metrics.row(system=trial.system, seed=trial.seed)
    assert requests, trial
    return Outcome(
        violations=100.0 * row.violations,
        cores=sum(second.cores for second in seconds) / len(seconds),
        by_second=tuple(100.0 * second.violations for second in seconds),
        cores_by_second=tuple(second.cores for second in seconds),
        cold_starts=row.cold_starts,
        p99_ms=row.p99_ms or 0.0,
    )


def world_of(trial: Trial) -> World:
    """The trial as a world of the simulator."""
    parameters = {"drop": {"limit": trial.drop}, **dict(trial.parameters)}
    application = Application(
        name="sponge",
        slo_ms=SLO_MS,
        stages=(Stage(STAGE, (Variant(VARIANT, profile=YOLOV5S_S),)),),
        system=SystemChoice(trial.system, parameters),
        cluster=(Node("n0", "Intel Xeon Gold 6240R", trial.cores, 192 * 2**30),),
    )
    truth = Truth(
        service=ServiceTruth(ratio=trial.ratio, cv=0.03),
        profile_error=trial.profile_error,
        resize_ms=trial.resize_ms,
        cold_start=ColdStart(start_s=trial.start_s, warm=True),
        network=NetworkTruth(link=trial.link or "lte", payload_kb=trial.payload_kb, semantics=trial.semantics),
    )
    arrivals = kind_of(trial.arrival, {"rate": RATE_RPS}, where="trial")
    return World(
        seed=trial.seed,
        application=application,
        trace=generated(arrivals, seed=trial.seed, duration_ns=SECONDS * NS_PER_S),
        duration_ns=s(SECONDS),
        truth=truth,
        link=link_of(trial.link),
    )


def _core(trial: Trial, world: World) -> Core:
    application = world.application
    choice = application.system
    policies = build_system(choice.name, choice.parameters).policies
    if trial.told:
        policies = replace(policies, forecast=KnownRate(RATE_RPS))
    if trial.oracle:
        payload_bytes = round(max(trial.payload_kb) * BYTES_PER_KB)
        policies = replace(policies, scale=Oracle(policies.scale, link_of(trial.link), payload_bytes))
    beliefs = {(STAGE, VARIANT): Estimate(YOLOV5S_S, correct=trial.correct)}
    return Core(application, beliefs, policies, application.cluster)


class Results:
    """Outcomes by trial, for every seed alike: what experiments read."""

    def __init__(self, outcomes: dict[Trial, Outcome], seeds: Sequence[int], link: str) -> None:
        self._outcomes = outcomes
        self._link = link
        self.seeds = tuple(seeds)

    def of(self, trial: Trial) -> list[Outcome]:
        """One outcome for each seed; the trial's own seed, link and name do not matter."""
        return [self._outcomes[seeded(trial, seed, self._link)] for seed in self.seeds]

    def violations(self, trial: Trial) -> list[float]:
        """Percent, for each seed."""
        return [outcome.violations for outcome in self.of(trial)]

    def cores(self, trial: Trial) -> list[float]:
        """Mean allocation, for each seed."""
        return [outcome.cores for outcome in self.of(trial)]


def seeded(trial: Trial, seed: int, link: str) -> Trial:
    """The same trial in another world, without the name that reports give it: twins are played once."""
    return structs.replace(trial, seed=seed, link=link, policy="")
