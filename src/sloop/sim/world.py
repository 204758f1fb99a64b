"""A world: everything that determines a simulated run. The same world gives the same log, byte for byte (law 6).

It separates the core's inputs (applications, beliefs, system, nodes) from the truth (service times, links, faults). A
world is immutable; each run makes a new core, cluster and random streams from it.

The first application draws from the streams of the world's seed, every other one from streams of its own
(`sloop.streams.seed_of`). So an application that is added changes no draw of the others, and a world of one application
is the same as if there could be no others.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from msgspec import structs

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.graph import declared_name
from sloop.app.hardware import acquire_s
from sloop.app.scenario import Change, Scenario, ServiceTruth, Truth
from sloop.core.protocols import Policies
from sloop.errors import InputError
from sloop.events import Deployed, Promoted, Removed, SystemChanged
from sloop.profile.profile import START_S_ASSUMED, Profile
from sloop.runlog import read_log
from sloop.runlog.durations import VariantKey
from sloop.sim.cluster import Cluster, ClusterTruths
from sloop.sim.replicas import Truths
from sloop.sim.truth.branches import BranchSampler
from sloop.sim.truth.cold_start import AcquisitionSampler, ColdStartSampler, ResizeSampler, SpareWorkers
from sloop.sim.truth.failure import NO_FAULTS, FaultRates, FaultSampler
from sloop.sim.truth.flows import Topology
from sloop.sim.truth.network import (
    ClientNetwork,
    Ingress,
    Numbering,
    merged,
    shifted,
    stray_wakes,
    with_cancellations,
)
from sloop.sim.truth.recorded import NOT_RECORDED, RecordedRun, recorded_run
from sloop.sim.truth.service import ServiceSampler
from sloop.sim.truth.sharing import ProcessesWork, SharingTruth, alone
from sloop.sim.truth.weights import WeightPlaces
from sloop.streams import seed_of
from sloop.systems import build_system
from sloop.systems.mix import WORKS_MAX, refusal_of
from sloop.systems.registry import POLICIES
from sloop.systems.replay import classes_in, require_all, with_beginning
from sloop.systems.setup import (
    ApplicationSetup,
    Setup,
    application_in,
    check_in_place,
    definition_of,
    set_up,
    weights_of,
)
from sloop.text import listed
from sloop.units import ms, to_s
from sloop.workload import Link, Trace, link_from, read_link, trace_from
from sloop.workload.trace import first_works

AS_DECLARED: Final = Truth()
"""The truth of a scenario without a `truth` section."""

BYTES_PER_KB: Final = 1024
"""As in the payload knob of the Sponge specification (§4.3)."""

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Clients:
    """Those who send requests to one application: when, how, and with which deadlines."""

    trace: Trace
    """The sending times of requests in ns."""
    link: Link | None = None
    """Made from `truth.network`; None if requests arrive when they are sent."""
    slos_ns: tuple[int, ...] = ()
    """Deadlines in ns, one drawn per request; empty for the application's deadline."""
    begins_ns: int = 0
    """When the trace begins: later than the run if the application is deployed later."""
    paths: tuple[int, ...] = ()
    """For each request of the trace, the position of the declared path that it is on; empty: drawn by their shares."""


@dataclass(frozen=True, slots=True)
class LaterVersion:
    """An application version that a change deploys during the run."""

    application: Application
    """With qualified stage names, on the deployment's cluster, under the deployment's system."""
    change: Change

    def setup(self) -> ApplicationSetup:
        """Its parts, fresh. Raises InputError as `set_up` does."""
        (made,) = set_up(self.application).applications
        return made


@dataclass(frozen=True)
class World:
    """The definition of one simulated run."""

    seed: int
    deployment: Deployment
    """The applications: their profiles are the beliefs of policies, the cluster gives the nodes, the system decides."""
    clients: Mapping[str, Clients]
    """By application, also of those that are deployed later."""
    duration_ns: int
    """The shortest time that the control loop runs, in ns; the run then waits for open requests."""
    draw: int = 0
    """Worlds that differ in this number only have the same requests, and other draws of the durations of batches."""
    lead_ns: int = 0
    """How long the system runs before the traces begin, in ns; sets the phase of bursts within the planning period."""
    truth: Truth = AS_DECLARED
    errors: Mapping[VariantKey, float] = field(default_factory=dict)
    """Ratio of true to believed durations, for variants where it differs from what `truth` and `changes` declare."""
    recorded: RecordedRun = field(default_factory=lambda: NOT_RECORDED)
    """The truth of a recorded run; overrides `truth.service`, `interference`, `network`, `fan_out` and `shares`."""
    faults: FaultRates = NO_FAULTS
    changes: tuple[Change, ...] = ()
    """In order of time."""
    origin: str = ""
    """The command that simulates this world again."""
    policies: Policies | None = None
    """Policies for the applications of `deployment`, instead of those of their systems. They keep their state, so
    simulate such a world only once, and without `changes`."""

    @classmethod
    def of(
        cls,
        application: Application,
        trace: Trace,
        *,
        link: Link | None = None,
        slos_ns: tuple[int, ...] = (),
        **options: Any,  # noqa: ANN401  # fields of the world
    ) -> Self:
        """The world of a single application; `options` are fields of the world."""
        clients = {application.name: Clients(trace, link, slos_ns)}
        return cls(deployment=Deployment.of(application), clients=clients, **options)

    @classmethod
    def from_scenario(cls, scenario: Scenario, choice: SystemChoice | None = None) -> Self:
        """The world that a scenario declares, for one of its systems, by default the first.

        Raises InputError if a trace or a link cannot be read.
        """
        choice, clients = choice or scenario.systems[0], _clients(scenario)
        deployment, truth = with_known_future(scenario.deployment.under(choice), clients), scenario.truth
        return cls(
            seed=scenario.seed,
            deployment=deployment,
            clients=clients,
            duration_ns=scenario.duration_ns,
            truth=truth,
            faults=faults_of(truth),
            changes=tuple(_under(choice, change, scenario.deployment) for change in scenario.changes),
            origin=f"sloop simulate {deployment.file} --system {choice.label} --seed {scenario.seed}",
        )

    @property
    def application(self) -> Application:
        """The only application. ValueError if there are several."""
        return self.deployment.application

    @property
    def trace(self) -> Trace:
        """The trace of the only application. ValueError if there are several."""
        (clients,) = self.clients.values()
        return clients.trace

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all applications, also of those that are deployed later."""
        later = (change.deploy.name for change in self.changes if change.deploy is not None)
        return tuple(dict.fromkeys((*self.deployment.by_name, *later)))

    @cached_property
    def later(self) -> tuple[LaterVersion, ...]:
        """The versions that the changes deploy, in order of time. A version is numbered by how many of its application
        there were before."""
        versions = dict.fromkeys(self.deployment.by_name, 1)
        found: list[LaterVersion] = []
        for change in self.changes:
            if change.deploy is not None:
                name = change.deploy.name
                versions[name] = version = versions.get(name, 0) + 1
                found.append(LaterVersion(change.deploy.qualified(str(version)), change))
        return tuple(found)

    @cached_property
    def systems(self) -> tuple[tuple[Application, ...], ...]:
        """For each change to another system, in order of time, the versions under it that were deployed before."""
        present, later = [*self.deployment.applications], iter(self.later)
        found: list[tuple[Application, ...]] = []
        for change in self.changes:
            if change.deploy is not None:
                present.append(next(later).application)
            elif change.system is not None:
                own = [each for each in present if each.name == change.application]
                found.append(tuple(replace(each, system=change.system) for each in own))
        return tuple(found)

    @property
    def applications(self) -> tuple[Application, ...]:
        """Every application version of the run, with those that are deployed later."""
        return (*self.deployment.applications, *(each.application for each in self.later))

    @property
    def asks(self) -> bool:
        """Whether a system of the run may ask the simulator."""
        applications = (*self.applications, *chain.from_iterable(self.systems))
        choices = [application.system for application in applications]
        return any(build_system(choice.name, choice.declared).overseer is not None for choice in choices)

    @property
    def profiles(self) -> dict[VariantKey, Profile]:
        """The profiles of all application versions."""
        return {key: profile for each in self.applications for key, profile in profiles_of(each).items()}

    @property
    def assumed_starts(self) -> dict[str, str]:
        """One line per `stage/variant` whose cold start was neither measured nor declared."""
        if self.truth.cold_start.start_s is not None:
            return {}
        why = "its profile has no `load_s`, the scenario no `truth.cold_start.start_s`"
        is_mixed = len({node.hardware for node in self.deployment.cluster}) > 1
        names = [
            f"{stage}/{variant}" + (f" on {hardware}" if is_mixed else "")
            for (stage, variant, hardware), profile in self.profiles.items()
            if not profile.load_s
        ]
        return {name: f"{name}: cold starts take {START_S_ASSUMED:g} s ({why})" for name in names}

    def assumed_sizes(self, sizes: Sequence[int]) -> list[str]:
        """One line per variant of which it is not known what rows of these sizes take, and one per later stage whose
        rows differ in size."""
        if not sizes or not sizes[-1]:
            return []
        lines = []
        for application in self.applications:
            sized, edges = self._sized(application), application.graph.edges.values()
            joins = {edge.target for targets in edges for edge in targets if edge.kind == "join"}
            for each in application.stages:
                if each.after and each.name in sized:
                    size = "of typical size" if each.name in joins else "as large as those of the request"
                    lines.append(f"{each.name}: its rows are {size}")
            for (stage, variant, _), profile in self._true_profiles(application).items():
                if stage not in sized:
                    continue
                if not profile.knows_sizes:
                    why = "rows of all sizes take as long as typical ones (its profile does not know sizes; `sloop "
                    why += "profile --sizes` measures them, `--from-log` takes them from a server's log)"
                    lines.append(f"{stage}/{variant}: {why}")
                elif sizes[-1] > profile.sizes[-1].size:
                    why = f"what rows of up to {sizes[-1]} take is extrapolated from {profile.sizes[-1].size}"
                    lines.append(f"{stage}/{variant}: {why}")
        return list(dict.fromkeys(lines))

    @property
    def all_errors(self) -> dict[VariantKey, float]:
        """Ratio of true to believed durations of all variants."""
        found = dict.fromkeys(self.profiles, self.truth.profile_error)
        for each in self.later:
            found |= {key: found[key] * each.change.profile_error for key in profiles_of(each.application)}
        return found | dict(self.errors)

    @property
    def is_mixed(self) -> bool:
        """Whether requests bring several rows, or rows of a size."""
        return any(clients.trace.works is not None for clients in self.clients.values())

    @property
    def processes(self) -> ProcessesWork | None:
        """What the server's processes take of the cores of its node, the first; None if nothing, and where durations
        are those of a recorded run, in which they took it."""
        declared, nodes = self.truth.processes, self.deployment.cluster
        if declared is None or self.recorded.durations_ns or not nodes:
            return None
        return ProcessesWork(nodes[0].name, nodes[0].cores, 1e3 * (declared.request_us + declared.client_us))

    def setup(self) -> Setup:
        """The parts of a new core; none has access to the truth. Raises InputError as `set_up` does, and ValueError if
        there are `policies` and `changes`."""
        made = set_up(self.deployment)
        if self.policies is not None and self.changes:
            raise ValueError("a world with changes takes the policies of its systems")
        return made if self.policies is None else made.under(self.policies)

    def check(self) -> None:
        """Raise InputError if the deployment, or a version that is deployed later, cannot be set up."""
        self.setup()
        for each in self.later:
            each.setup()
        before = {each.key: each for each in self.applications}
        for application in chain.from_iterable(self.systems):
            check_in_place(before[application.key], application)
            before[application.key] = application

    def cluster(self) -> Cluster:
        """A new cluster with its random streams at their start."""
        return Cluster(self.truths(), self.deployment.cluster)

    def truths(self) -> ClusterTruths:
        """What is true of its cluster, with random streams at their start."""
        truth, nodes = self.truth, self.deployment.cluster
        stages: dict[str, Truths] = {}
        for application in self.deployment.applications:
            stages |= self._truths(application, self._seed(application.name))
        for each in self.later:
            name, version = each.application.name, each.application.version
            seed = self._seed(name) if version == "1" else seed_of(self._seed(name), f"version/{version}")
            stages |= self._truths(each.application, seed)
        declared_s = truth.nodes.acquire_s
        kinds = {node.hardware: acquire_s(node) for node in nodes if node.on_demand}
        warm = truth.cold_start.warm
        return ClusterTruths(
            stages=stages,
            acquisition=AcquisitionSampler(
                self.seed,
                {kind: own_s if declared_s is None else declared_s for kind, own_s in kinds.items()},
                jitter=truth.nodes.jitter,
                warm=warm,
            ),
            faults=FaultSampler(self.seed, self.faults),
            plan_ns=ms(truth.plan_ms),
            is_warm=warm,
            weights=self._weights(),
            processes=self.processes,
            spares=SpareWorkers(truth.cold_start.spare_workers, truth.cold_start.spare_s),
        )

    def _weights(self) -> WeightPlaces:
        """The weights of all variants, none of which is on a node."""
        declared = self.truth.network.topology if self.truth.network is not None else None
        weights = {key: each for application in self.applications for key, each in weights_of(application).items()}
        topology = Topology(declared, self.deployment.cluster) if declared is not None else None
        return WeightPlaces(topology, weights)

    def _truths(self, application: Application, seed: int) -> dict[str, Truths]:
        """The truth of an application version, for each of its stages."""
        truth, start = self.truth, self.truth.cold_start
        profiles, durations_ns = self._true_profiles(application), self.recorded.durations_ns
        sized = self._sized(application)
        node_cores = {node.name: node.cores for node in self.deployment.cluster}
        declared = ServiceTruth() if durations_ns else truth.service
        processes = self.processes
        server = processes.node if processes is not None else None
        if processes is not None:
            profiles = {key: alone(profile, processes.node_cores) for key, profile in profiles.items()}
        service = ServiceSampler(
            seed_of(seed, f"draw/{self.draw}") if self.draw else seed,
            profiles,
            shape=declared.shape,
            cv=declared.cv,
            ratio=declared.ratio,
            recorded=durations_ns,
            errors=self.all_errors,
            quota_ms=truth.quota_ms,
        )
        truths = Truths(
            service=service,
            cold_start=ColdStartSampler(
                seed, profiles, start_s=start.start_s, local_s=start.local_s, jitter=start.jitter, warm=start.warm
            ),
            resize=ResizeSampler(seed, delay_ns=ms(truth.resize_ms), in_flight=truth.resize),
            faults=FaultSampler(seed, self.faults),
            branches=self._branches(application),
            sharing=None if durations_ns else SharingTruth(profiles, truth.interference, node_cores, server),
            pads=sized,
            passed=_passed(application, sized),
        )
        return {stage.name: truths for stage in application.stages}

    def _sized(self, application: Application) -> dict[str, bool]:
        """The stages whose rows differ in size, and whether they pad rows: the first ones, and those of which anything
        says so."""
        knowing = {stage for (stage, _, _), profile in self._true_profiles(application).items() if profile.knows_sizes}
        return {
            stage.name: stage.pads
            for stage in application.stages
            if not stage.after or stage.pads or stage.sizes or stage.name in knowing
        }

    def _true_profiles(self, application: Application) -> dict[VariantKey, Profile]:
        """The profiles of an application version, with the true sizes where they are declared."""
        sizes = _of_stages(self.truth.sizes, application)
        return {
            key: structs.replace(profile, sizes=sizes[key[0]]) if key[0] in sizes else profile
            for key, profile in profiles_of(application).items()
        }

    def ingress(self) -> Ingress:
        """A new stream of all events from outside the server."""
        streams = [self._changes()] if self.changes else []
        streams += map(self._arrivals, self.clients)
        if self.faults.stray_wake_rps:
            until_ns = self.lead_ns + self.duration_ns
            streams.append(stray_wakes(FaultSampler(self.seed, self.faults), until_ns))
        return merged(streams)

    def _arrivals(self, name: str) -> Ingress:
        """The requests of one application, and those that their clients cancel."""
        clients, declared, seed = self.clients[name], self.truth.network, self._seed(name)
        application = next(each for each in self.applications if each.name == name)
        network = ClientNetwork(
            seed,
            slos_ns=clients.slos_ns or (application.slo_ns,),
            payloads_bytes=[round(kb * BYTES_PER_KB) for kb in declared.payload_kb] if declared else (0,),
            link=clients.link,
            semantics=declared.semantics if declared else "delay",
            delays=self.recorded.delays.get(name, ()),
            application="" if self._is_alone else name,
            numbering=self._numbering(name),
        )
        works = clients.trace.works
        arrivals = network.deliver(clients.trace.times_ns(), None if works is None else works())
        if application.declared_paths:
            arrivals = self._branches(application).entering(arrivals)
        if self.lead_ns or clients.begins_ns:
            arrivals = shifted(arrivals, self.lead_ns + clients.begins_ns)
        # Not the cluster's sampler: draws must not depend on how the two are interleaved.
        return with_cancellations(arrivals, FaultSampler(seed, self.faults))

    def _changes(self) -> Ingress:
        """The events of the changes. Definitions are made when their time comes."""
        later, systems = iter(self.later), iter(self.systems)
        newest = {application.name: application.version for application in self.deployment.applications}
        for change in self.changes:
            at_ns = self.lead_ns + change.at_ns
            if change.deploy is not None:
                made = next(later)
                name, version = made.application.name, made.application.version
                newest[name] = version
                yield at_ns, Deployed(name, version, definition_of(made.setup()), change.canary)
            elif change.system is not None:
                for application in next(systems):
                    (changed,) = set_up(application).applications
                    yield at_ns, SystemChanged(application.name, application.version, definition_of(changed))
            elif change.promote:
                yield at_ns, Promoted(change.promote, change.version or newest[change.promote])
            else:
                yield at_ns, Removed(change.remove, change.version)

    @property
    def _is_alone(self) -> bool:
        """Whether there is only one application version in the run, so that requests need not name theirs."""
        return len(self.names) == 1 and not self.changes

    def _seed(self, name: str) -> int:
        return _seed_of(self.seed, name, self.names)

    def _numbering(self, name: str) -> Numbering:
        return Numbering(len(self.names), self.names.index(name))

    def _branches(self, application: Application) -> BranchSampler:
        truth, name = self.truth, application.name
        return BranchSampler(
            self._seed(name),
            application.graph,
            fan_out=_of_stages(truth.fan_out, application),
            shares=_of_stages(truth.shares, application),
            recorded=self.recorded.branches,
            numbering=self._numbering(name),
            paths=self.clients[name].paths if name in self.clients else (),
        )


def profiles_of(application: Application) -> dict[VariantKey, Profile]:
    """The profile of every variant on every kind of hardware where it can run."""
    return {
        (stage.name, variant.name, hardware): profile
        for stage in application.stages
        for variant in stage.variants
        for hardware, profile in application.profiles_of(variant).items()
    }


def _passed(application: Application, sized: Collection[str]) -> dict[str, tuple[bool, ...]]:
    """By stage, for each outgoing edge whether rows go along it that are as large as those of the request. How large
    the rows are that several parts make together, nothing says."""
    found = {
        name: tuple([edge.target in sized and edge.kind != "join" for edge in edges])
        for name, edges in application.graph.edges.items()
    }
    return {name: passed for name, passed in found.items() if any(passed)}


def _of_stages(declared: Mapping[str, V], application: Application) -> dict[str, V]:
    """What is declared for stages of this application: as `NAME/stage`, or with the stage's name alone."""
    found: dict[str, V] = {}
    for stage in application.stages:
        own = declared_name(stage.name)
        for name in (f"{application.name}/{own}", own):
            if name in declared:
                found.setdefault(stage.name, declared[name])
    return found


def recorded_in(log: Path, deployment: Deployment) -> RecordedRun:
    """Read the truth of a recorded run, for `World.recorded`.

    Raises InputError if the file is not an event log, or its applications have other stages or variants.
    """
    recorded = read_log(log)
    require_all(recorded, "a simulation of a recorded run")
    wanted = _variants_of(deployment.applications)
    found = _variants_of([application_in(definition) for definition in recorded.header.definitions.values()])
    if found != wanted:
        raise InputError(
            f"the log is of a deployment with {listed(found)}, not {listed(wanted)}",
            where=str(log),
            help="give the log of a run of these stages and variants",
        )
    names, nodes = tuple(deployment.by_name), recorded.header.cluster
    return recorded_run(with_beginning(recorded), names, nodes, classes_in(recorded))


def faults_of(truth: Truth) -> FaultRates:
    """What fails at random, as a scenario declares it."""
    nodes, failures, background = truth.nodes, truth.failures, truth.background
    found = FaultRates(
        crash_mtbf_s=(failures and failures.mtbf_s) or 0.0,
        bad_request=failures.bad_requests if failures else 0.0,
        deadly_request=failures.deadly_requests if failures else 0.0,
        node_mtbf_s=nodes.mtbf_s or 0.0,
        node_repair_s=nodes.repair_s,
        outage_at_s=nodes.outage_at_s or 0.0,
        outage_s=nodes.outage_s,
    )
    if background is None:
        return found
    return replace(
        found,
        background=background.part,
        background_s=background.phase_s,
        background_factor=background.cores,
        background_device_factor=background.accelerators,
    )


def _variants_of(applications: Iterable[Application]) -> list[str]:
    return sorted(
        f"{stage.name}/{variant.name}"
        for application in applications
        for stage in application.stages
        for variant in stage.variants
    )


def _under(choice: SystemChoice, change: Change, deployment: Deployment) -> Change:
    """The change under another system than that of the scenario's deployment."""
    if change.deploy is None:
        return change
    (application,) = replace(deployment, applications=(change.deploy,)).under(choice).applications
    return replace(change, deploy=application)


def _clients(scenario: Scenario) -> dict[str, Clients]:
    """The clients of every application that has a trace; of one that is deployed later, from then on."""
    later = [(change.deploy.name, change.at_ns) for change in scenario.changes if change.deploy is not None]
    begins_ns = dict(reversed(later)) | dict.fromkeys(scenario.deployment.by_name, 0)
    names = tuple(dict.fromkeys((*scenario.deployment.by_name, *(name for name, _ in later))))
    folder = Path(scenario.deployment.file).parent
    found: dict[str, Clients] = {}
    for name in (name for name in names if name in scenario.traces):
        seed = _seed_of(scenario.seed, name, names)
        duration_s = scenario.duration_s - to_s(begins_ns[name])
        trace = scenario.traces[name]
        if not isinstance(trace, Trace):
            declared = scenario.declared_trace(name)
            trace = trace_from(declared, seed=seed, duration_s=duration_s, folder=folder)
            served = scenario.deployment.by_name.get(name) or next(
                change.deploy for change in scenario.changes if change.deploy is not None and change.deploy.name == name
            )
            if (refused := refusal_of(first_works(trace, WORKS_MAX), served)) is not None:
                declared.mapping().get(refused.key, declared).fail(refused.what, refused.help)
        found[name] = Clients(trace, _link(scenario, seed, folder), begins_ns=begins_ns[name])
    return found


def with_known_future(deployment: Deployment, clients: Mapping[str, Clients]) -> Deployment:
    """The deployment, in which every forecast that knows the future gets the requests of its application, unless they
    are declared. They are parameters of the system, so that they are in the log and a replay has them."""
    applications = []
    for application in deployment.applications:
        made, choice = application, application.system
        system = build_system(choice.name, choice.declared)
        forecast = system.slots["forecast"]
        if system.policies.forecast.knows_future and not forecast["counts"] and made.name in clients:
            known = {**forecast, "counts": list(map(float, clients[made.name].trace.counts_per_s()))}
            if forecast["name"] not in POLICIES["forecast"]:
                del known["name"]  # of a file's own class, which the file itself makes
            inherited = {key: value for key, value in choice.inherited.items() if key != "forecast"}
            parameters = {**choice.parameters, "forecast": known}
            made = replace(made, system=replace(choice, parameters=parameters, inherited=inherited))
        applications.append(made)
    return replace(deployment, applications=tuple(applications))


def _seed_of(seed: int, name: str, names: Sequence[str]) -> int:
    """The seed of an application's streams."""
    return seed if name == names[0] else seed_of(seed, f"application/{name}")


def _link(scenario: Scenario, seed: int, folder: Path) -> Link | None:
    network = scenario.truth.network
    if network is None or network.link is None:
        return None
    if isinstance(network.link, str):
        return read_link(network.link)
    link = scenario.deployment.declared("truth.network.link", network.link)
    return link_from(link, seed=seed, folder=folder)
