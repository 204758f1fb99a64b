"""A world: everything that determines a simulated run. The same world gives the same log, byte for byte (law 6).

Promises to keep two halves apart: what the core is given (application, beliefs, system, nodes) and what is true
(service times, links, faults). A world is a value; each run makes its own core, cluster and streams from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from sloop.app.application import Application, SystemChoice
from sloop.app.scenario import Scenario, ServiceTruth, Truth
from sloop.runlog import read_log
from sloop.runlog.durations import VariantKey
from sloop.sim.cluster import Cluster, Truths
from sloop.sim.truth.branches import BranchSampler
from sloop.sim.truth.cold_start import START_S_ASSUMED, ColdStartSampler, ResizeSampler
from sloop.sim.truth.failure import NO_FAULTS, FaultRates, FaultSampler
from sloop.sim.truth.network import ClientNetwork, Ingress, shifted, with_faults
from sloop.sim.truth.recorded import NOT_RECORDED, RecordedRun, recorded_run
from sloop.sim.truth.service import ServiceSampler
from sloop.systems.setup import Setup, set_up
from sloop.units import ms
from sloop.workload import Link, Trace, link_from, read_link, trace_from

AS_DECLARED: Final = Truth()
"""The truth of a scenario that declares none."""

BYTES_PER_KB: Final = 1024
"""As in the payload knob of the Sponge specification (§4.3)."""


@dataclass(frozen=True, slots=True)
class World:
    """One run, not yet played."""

    seed: int
    application: Application
    """Its profiles are what policies believe, its cluster the nodes, its system what decides."""
    trace: Trace
    """When clients begin to send."""
    duration_ns: int
    """How long the control loop runs at least; requests that are still open then are waited for."""
    lead_ns: int = 0
    """How long everything runs before the trace begins: decides where in a planning period the trace's bursts fall."""
    truth: Truth = AS_DECLARED
    link: Link | None = None
    """The clients' link, made from `truth.network`; None where requests arrive when they are sent."""
    slos_ns: tuple[int, ...] = ()
    """Drawn per request; empty for the application's own."""
    errors: Mapping[VariantKey, float] = field(default_factory=dict)
    """True over believed durations, for variants where this differs from `truth.profile_error`."""
    recorded: RecordedRun = field(default_factory=lambda: NOT_RECORDED)
    """A run that this one is to resemble; overrides `truth.service`, `network`, `fan_out` and `shares`."""
    faults: FaultRates = NO_FAULTS
    origin: str = ""
    """The command that plays this world again."""

    @classmethod
    def from_scenario(cls, scenario: Scenario, choice: SystemChoice | None = None) -> Self:
        """The world that a scenario declares, for one of its systems, by default the first.

        Raises InputError if a trace or a link cannot be read.
        """
        choice = choice or scenario.systems[0]
        application, truth = replace(scenario.application, system=choice), scenario.truth
        folder = Path(application.file).parent
        trace = trace_from(
            application.declared("trace", scenario.trace),
            seed=scenario.seed,
            duration_s=scenario.duration_s,
            folder=folder,
        )
        return cls(
            seed=scenario.seed,
            application=application,
            trace=trace,
            duration_ns=scenario.duration_ns,
            truth=truth,
            link=_link(scenario, folder),
            faults=FaultRates(crash_mtbf_s=truth.failures.mtbf_s) if truth.failures else NO_FAULTS,
            origin=f"sloop simulate {application.file} --system {choice.label} --seed {scenario.seed}",
        )

    @property
    def assumed_starts(self) -> dict[str, str]:
        """Per `stage/variant`, a line for each whose cold starts nobody has measured or declared."""
        if self.truth.cold_start.start_s is not None:
            return {}
        why = "its profile has no `load_s`, the scenario no `truth.cold_start.start_s`"
        return {
            name: f"{name}: cold starts take {START_S_ASSUMED:g} s ({why})"
            for stage in self.application.stages
            for variant in stage.variants
            if variant.profile is not None and not variant.profile.load_s
            for name in [f"{stage.name}/{variant.name}"]
        }

    def setup(self) -> Setup:
        """The parts of a fresh core, none of which knows the truth. Raises InputError as `set_up` does."""
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
        durations_ns = self.recorded.durations_ns
        declared = ServiceTruth() if durations_ns else truth.service
        service = ServiceSampler(
            self.seed,
            profiles,
            shape=declared.shape,
            cv=declared.cv,
            ratio=declared.ratio,
            recorded=durations_ns,
            errors=dict.fromkeys(profiles, truth.profile_error) | dict(self.errors),
        )
        start = truth.cold_start
        truths = Truths(
            service=service,
            cold_start=ColdStartSampler(
                self.seed, profiles, start_s=start.start_s, jitter=start.jitter, warm=start.warm
            ),
            resize=ResizeSampler(self.seed, delay_ns=ms(truth.resize_ms), in_flight=truth.resize),
            faults=FaultSampler(self.seed, self.faults),
            branches=self._branches(),
        )
        return Cluster(truths, [node.name for node in self.application.cluster])

    def ingress(self) -> Ingress:
        """A fresh stream of everything that comes to the server from outside."""
        declared = self.truth.network
        network = ClientNetwork(
            self.seed,
            slos_ns=self.slos_ns or (self.application.slo_ns,),
            payloads_bytes=[round(kb * BYTES_PER_KB) for kb in declared.payload_kb] if declared else (0,),
            link=self.link,
            semantics=declared.semantics if declared else "delay",
            delays=self.recorded.delays,
        )
        # A sampler apart from the cluster's: its draws must not depend on how the two are interleaved.
        faults = FaultSampler(self.seed, self.faults)
        arrivals = network.deliver(self.trace.times_ns())
        if self.application.declared_paths:
            arrivals = self._branches().entering(arrivals)
        if self.lead_ns:
            arrivals = shifted(arrivals, self.lead_ns)
        return with_faults(arrivals, faults, self.lead_ns + self.duration_ns)

    def _branches(self) -> BranchSampler:
        truth, graph = self.truth, self.application.graph
        return BranchSampler(
            self.seed, graph, fan_out=truth.fan_out, shares=truth.shares, recorded=self.recorded.branches
        )


def recorded_in(log: Path) -> RecordedRun:
    """What was true in a logged run, for `World.recorded`. Raises InputError if the file is not an event log."""
    return recorded_run(read_log(log))


def _link(scenario: Scenario, folder: Path) -> Link | None:
    network = scenario.truth.network
    if network is None:
        return None
    if isinstance(network.link, str):
        return read_link(network.link)
    link = scenario.application.declared("truth.network.link", network.link)
    return link_from(link, seed=scenario.seed, folder=folder)
