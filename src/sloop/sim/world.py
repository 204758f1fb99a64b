"""A world: everything a simulated run is determined by. The same world gives the same log, byte for byte (law 6).

Promises to keep the two halves apart: what the core is given (application, beliefs, system, nodes) and what is true
(service times, links, faults). A world is a value; each run makes its own core, cluster and streams from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from sloop.app.application import Application, SystemChoice
from sloop.app.scenario import Scenario, ServiceTruth, Truth
from sloop.runlog import read_log
from sloop.sim.cluster import Cluster, Truths
from sloop.sim.outside import Stream, later, outside
from sloop.sim.truth.cold_start import ColdStart
from sloop.sim.truth.failure import NO_FAULTS, Failure, Faults
from sloop.sim.truth.network import Network
from sloop.sim.truth.noise import Shape
from sloop.sim.truth.recorded import as_recorded, runs_of, ways_of
from sloop.sim.truth.resize import Resize
from sloop.sim.truth.service import Runs, Service, Variant
from sloop.sim.truth.ways import Ways, Went
from sloop.systems.setup import Setup, set_up
from sloop.units import ms, s
from sloop.workload import Link, Trace, link_from, read_link, trace_from


class Recorded(Struct, frozen=True):
    """What was true in a run that another one is to resemble."""

    runs: Runs = {}  # msgspec makes a new one for each
    """How long its batches took."""
    ways: Went = {}
    """Which way its requests went."""


NOT_RECORDED: Final = Recorded()

AS_DECLARED = Truth()
"""The truth of a scenario that says nothing of it."""

BYTES_PER_KB = 1024
"""As in the payload knob of the Sponge specification (§4.3)."""


@dataclass(frozen=True, slots=True)
class World:
    """One run, not yet played."""

    seed: int
    application: Application
    """Its profiles are what is believed, its cluster are the nodes, its system is what decides."""
    trace: Trace
    """When clients begin to send."""
    duration_ns: int
    """How long the control loop runs at least; requests still open then are waited for."""
    lead_ns: int = 0
    """How long everything runs before the trace begins: it decides where in a planning period its bursts fall."""
    truth: Truth = AS_DECLARED
    link: Link | None = None
    """The clients' link; None for none, whatever `truth.network` names."""
    slos_ns: tuple[int, ...] = ()
    """Drawn per request; empty for the application's own."""
    errors: Mapping[Variant, float] = field(default_factory=dict)
    """True over believed durations, for variants where this differs from `truth.profile_error`."""
    recorded: Recorded = field(default_factory=lambda: NOT_RECORDED)
    """Of a run that this one is to resemble: goes before `truth.service`, and `fan_out` and `shares`."""
    shape: Shape = "normal"
    faults: Faults = NO_FAULTS
    origin: str = ""
    """The command that plays this world again."""

    @classmethod
    def from_scenario(cls, scenario: Scenario, choice: SystemChoice | None = None) -> Self:
        """The world a scenario declares, for one of its systems, the first if not said.

        InputError where a trace or a link cannot be read.
        """
        choice = choice or scenario.systems[0]
        application, truth = replace(scenario.application, system=choice), scenario.truth
        folder = Path(application.file).parent
        where = f"{application.locate('trace')}: trace"
        trace = trace_from(
            scenario.trace, seed=scenario.seed, duration_s=scenario.duration_s, folder=folder, where=where
        )
        return cls(
            seed=scenario.seed,
            application=application,
            trace=trace,
            duration_ns=scenario.duration_ns,
            truth=truth,
            link=_link(scenario, folder),
            faults=Faults(crash_mtbf_s=truth.failures.mtbf_s) if truth.failures else NO_FAULTS,
            origin=f"sloop simulate {application.file} --system {choice.label} --seed {scenario.seed}",
        )

    def setup(self) -> Setup:
        """What the core is made of, fresh; it knows nothing of what is true. InputError as `set_up`."""
        return set_up(self.application)

    def cluster(self) -> Cluster:
        """A fresh cluster, its streams at their beginning."""
        truth = self.truth
        profiles = {
            (stage.name, variant.name): variant.profile
            for stage in self.application.stages
            for variant in stage.variants
            if variant.profile is not None
        }
        errors = dict.fromkeys(profiles, truth.profile_error) | dict(self.errors)
        runs = self.recorded.runs
        declared = ServiceTruth() if runs else truth.service
        service = Service(
            self.seed,
            as_recorded(profiles, runs),
            shape=self.shape,
            cv=declared.cv,
            ratio=declared.ratio,
            recorded=runs,
            errors=errors,
        )
        start = truth.cold_start
        truths = Truths(
            service=service,
            cold_start=ColdStart(self.seed, start_ns=s(start.start_s), jitter=start.jitter, warm=start.warm),
            resize=Resize(self.seed, delay_ns=ms(truth.resize_ms), in_flight=truth.resize),
            failure=Failure(self.seed, self.faults),
            ways=self._ways(),
        )
        return Cluster(truths, [node.name for node in self.application.cluster])

    def outside(self) -> Stream:
        """A fresh stream of what comes from outside."""
        declared = self.truth.network
        network = Network(
            self.seed,
            slos_ns=self.slos_ns or (self.application.slo_ns,),
            payloads_bytes=[round(kb * BYTES_PER_KB) for kb in declared.payload_kb] if declared else (0,),
            link=self.link,
            semantics=declared.semantics if declared else "delay",
        )
        # Its own generator of faults: how the cluster's are interleaved with these must not matter.
        failure = Failure(self.seed, self.faults)
        arrivals = network.deliver(self.trace.times_ns())
        if self.application.declared_paths:
            arrivals = self._ways().entering(arrivals)
        if self.lead_ns:
            arrivals = later(arrivals, self.lead_ns)
        return outside(arrivals, failure, self.lead_ns + self.duration_ns)

    def _ways(self) -> Ways:
        truth = self.truth
        graph, went = self.application.graph, self.recorded.ways
        return Ways(self.seed, graph, fan_out=truth.fan_out, shares=truth.shares, recorded=went)


def recorded_in(log: Path) -> Recorded:
    """What was true in a logged run, for `World.recorded`. InputError where it is no log."""
    return Recorded(runs_of(read_log(log)), ways_of(read_log(log)))


def _link(scenario: Scenario, folder: Path) -> Link | None:
    network = scenario.truth.network
    if network is None:
        return None
    if isinstance(network.link, str):
        return read_link(network.link)
    where = f"{scenario.application.locate('truth.network.link')}: truth.network.link"
    return link_from(network.link, seed=scenario.seed, folder=folder, where=where)
