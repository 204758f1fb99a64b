"""A world: everything that determines a simulated run. The same world gives the same log, byte for byte (law 6).

It separates the core's inputs (application, beliefs, system, nodes) from the truth (service times, links, faults). A
world is immutable; each run makes a new core, cluster and random streams from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

from sloop.app.application import Application, SystemChoice
from sloop.app.scenario import Scenario, ServiceTruth, Truth
from sloop.errors import InputError
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
from sloop.text import listed
from sloop.units import ms
from sloop.workload import Link, Trace, link_from, read_link, trace_from

AS_DECLARED: Final = Truth()
"""The truth of a scenario without a `truth` section."""

BYTES_PER_KB: Final = 1024
"""As in the payload knob of the Sponge specification (§4.3)."""


@dataclass(frozen=True, slots=True)
class World:
    """The definition of one simulated run."""

    seed: int
    application: Application
    """The application: its profiles are the beliefs of policies, its cluster gives the nodes, its system decides."""
    trace: Trace
    """The sending times of requests in ns."""
    duration_ns: int
    """The shortest time that the control loop runs, in ns; the run then waits for open requests."""
    lead_ns: int = 0
    """How long the system runs before the trace begins, in ns; sets the phase of bursts within the planning period."""
    truth: Truth = AS_DECLARED
    link: Link | None = None
    """The clients' link, made from `truth.network`; None if requests arrive when they are sent."""
    slos_ns: tuple[int, ...] = ()
    """Deadlines in ns, one drawn per request; empty for the application's deadline."""
    errors: Mapping[VariantKey, float] = field(default_factory=dict)
    """Ratio of true to believed durations, for variants where it differs from `truth.profile_error`."""
    recorded: RecordedRun = field(default_factory=lambda: NOT_RECORDED)
    """The truth of a recorded run; overrides `truth.service`, `network`, `fan_out` and `shares`."""
    faults: FaultRates = NO_FAULTS
    origin: str = ""
    """The command that simulates this world again."""

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
        """One line per `stage/variant` whose cold start was neither measured nor declared."""
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
        """The parts of a new core; none has access to the truth. Raises InputError as `set_up` does."""
        return set_up(self.application)

    def cluster(self) -> Cluster:
        """A new cluster with its random streams at their start."""
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
        """A new stream of all events from outside the server."""
        declared = self.truth.network
        network = ClientNetwork(
            self.seed,
            slos_ns=self.slos_ns or (self.application.slo_ns,),
            payloads_bytes=[round(kb * BYTES_PER_KB) for kb in declared.payload_kb] if declared else (0,),
            link=self.link,
            semantics=declared.semantics if declared else "delay",
            delays=self.recorded.delays,
        )
        # Not the cluster's sampler: draws must not depend on how the two are interleaved.
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


def recorded_in(log: Path, application: Application) -> RecordedRun:
    """Read the truth of a recorded run, for `World.recorded`.

    Raises InputError if the file is not an event log, or its application has other stages or variants.
    """
    recorded = read_log(log)
    wanted = sorted(f"{stage.name}/{variant.name}" for stage in application.stages for variant in stage.variants)
    found = sorted(recorded.header.profiles)
    if found != wanted:
        raise InputError(
            f"the log is of an application with {listed(found)}, not {listed(wanted)}",
            where=str(log),
            help="give the log of a run of these stages and variants",
        )
    return recorded_run(recorded)


def _link(scenario: Scenario, folder: Path) -> Link | None:
    network = scenario.truth.network
    if network is None:
        return None
    if isinstance(network.link, str):
        return read_link(network.link)
    link = scenario.application.declared("truth.network.link", network.link)
    return link_from(link, seed=scenario.seed, folder=folder)
