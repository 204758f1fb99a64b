"""Random worlds, and what must hold in each of them.

A seed determines a world: nodes, graph, profiles, load, deadlines, truth, wrong beliefs and faults are drawn from it.
As in the swarm testing of TigerBeetle and FoundationDB, each world is extreme in a few ways instead of average in all:
a kind of fault is on for the whole run in one world of four and off in the others, beliefs are wrong by a factor of up
to four, and policies are mixed.

`world_around` is a world for given applications on their own cluster. Two others have random applications.
`random_world` is one application on equal nodes that are always there. `random_deployment` is one
application or several, on nodes of several kinds with accelerators, of which some are rented on demand; plans may take
longer than their period; and during the run versions are deployed, promoted and removed. `play` simulates a world under
the checkers, replays its log, and compares the fold's figures with those of the checkers.

Guarantees that a seed and a system give the same world on every machine. The possible draws are listed here instead of
read from the registries, so that a new policy does not change the worlds of old seeds.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

from msgspec import convert, structs

from sloop.actions import Decided
from sloop.app.application import Application, Deployment, Stage, SystemChoice, Variant
from sloop.app.graph import Each, When, declared_name
from sloop.app.scenario import (
    Change,
    ColdStartTruth,
    InterferenceTruth,
    NetworkTruth,
    NodeTruth,
    ServiceTruth,
    TopologyTruth,
    Truth,
)
from sloop.core.protocols import CoreInterface
from sloop.errors import InputError
from sloop.profile.interference import BandwidthLaw, CountLaw, PairLaw, ProcessorSharing, ShareLaw, Slowdown
from sloop.profile.profile import (
    Amdahl,
    DeviceSharing,
    LayerBlock,
    LayerProfile,
    ParametricLatency,
    Profile,
    SizeLatency,
    Startup,
)
from sloop.runlog import MemoryLog, Record, Sink
from sloop.runlog.fold import DeploymentState
from sloop.sim.checkers import Checkers, Violation
from sloop.sim.engine import RunTotals
from sloop.sim.run import rules_of, simulate
from sloop.sim.truth.failure import FaultRates
from sloop.sim.world import Clients, World, with_known_future
from sloop.streams import stream
from sloop.systems import build_system
from sloop.systems.replay import replay_log
from sloop.systems.setup import Setup, build
from sloop.systems.system import is_system_file
from sloop.units import ms, s, to_ms
from sloop.vocabulary import Canary, Device, Node, Outcome
from sloop.vocabulary import Path as PathWithDeadline
from sloop.workload import Link, link_from, trace_from
from sloop.workload.sizes import Numbers, UniformNumbers, WeightedNumbers, drawn

GRAPHS: Final[Sequence[dict[str, tuple[str, ...]]]] = (
    {"a": ()},
    {"a": ()},
    {"a": (), "b": ("a",)},
    {"a": (), "b": ("a",), "c": ("b",)},
    {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")},
    {"a": (), "b": (), "c": ("a", "b")},
)
"""Graphs: stages with their predecessors. A single stage is listed twice, because it is the most common application."""

FAN_OUT: Final = 0.25
"""Share of the stages with `each` whose true number of parts differs from the belief; `most` keeps them small."""

Edges = dict[str, Any]
"""The edges of a stage: keyword arguments of `Stage`."""

BRANCHING: Final[Sequence[dict[str, Edges]]] = (
    {
        "a": {},
        "b": {"after": ("a",), "when": (When("a", "kind", (1,), 0.3),)},
        "c": {"after": ("a",), "when": (When("a", "kind", (2,)),)},
        "d": {"after": ("b", "c")},
    },
    {"a": {}, "b": {"after": ("a",), "each": Each("a", "rows", 3.0, most=20)}, "c": {"after": ("b",), "join": True}},
    {
        "a": {},
        "b": {"after": ("a",), "each": Each("a", "rows", 0.7, most=4)},
        "c": {"after": ("b",), "when": (When("b", "legible", share=0.5),)},
        "d": {"after": ("b", "c")},
        "e": {"after": ("a", "d"), "join": True},
    },
    {
        "a": {},
        "b": {"after": ("a",), "each": Each("a", "boxes", 2.0, most=20), "when": (When("a", "large", share=0.8),)},
        "c": {"after": ("a",), "when": (When("a", "scene"),)},
    },
)
"""Graphs in which requests take different branches and split into different numbers of parts."""

PATHS: Final = (("a", "c", "d"), ("b", "c"), ("b", "c", "d"))
"""Paths with deadlines through the graph a, b → c → d."""

CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "order": ("edf", "fifo"),
    "batch": ("work_conserving", "timeout", "slack", "deadline"),
    "route": ("first_idle", "round_robin", "smooth_weighted", "least_loaded"),
    "drop": ("never", "age", "predictive"),
    "admit": ("open", "bounded", "predictive"),
    "place": ("best_fit", "spread"),
}
"""Policies that may replace the system's, each kind in one world of three."""

FAULTS: Final[dict[str, float]] = {
    "crash_mtbf_s": 3.0,
    "node_mtbf_s": 8.0,
    "failed_start": 0.3,
    "slow_start": 0.3,
    "refused_resize": 0.3,
    "straggler": 0.02,
    "failed_batch": 0.02,
    "lost_finished": 0.005,
    "repeated_finished": 0.05,
    "late_finished": 0.05,
    "stray_wake_rps": 5.0,
    "cancelled": 0.05,
}
"""The rate of each kind of fault in the worlds where it is on."""

REQUEST_FAULTS: Final[dict[str, float]] = {"bad_request": 0.02, "deadly_request": 0.005}
"""The same for faults of requests."""

ERRORS: Final = (0.25, 0.5, 0.8, 1.0, 1.0, 1.25, 2.0, 4.0)
"""True over believed durations."""

PROVISIONS: Final[Sequence[dict[str, Any]]] = (
    {"partition": True},
    {"partition": True, "spare_workers": 0},
    {"partition": True, "store": "per_node", "link_mbps": 1e3, "store_mbps": 1e5, "pieces_max": 2},
)
"""Parameters of `cheapest_start`, which decides in one world of four where replicas start and from where weights come.
Only models with measured layers start in parts."""

LINK: Final = {"kind": "lte"}

REQUESTS_MAX: Final = 1_500
"""Limits a world to below a second of computing, so that many run in a minute."""

PATIENCE_S: Final = 300.0
"""How long a world may take to answer its last requests: some wait for ever because nobody has room for them."""

HARDWARE: Final[dict[str, Node]] = {
    "small": Node("small", "small", 4.0, 16 << 30, usd_per_h=0.2),
    "large": Node("large", "large", 16.0, 64 << 30, usd_per_h=0.7),
    "gpu": Node("gpu", "gpu", 8.0, 32 << 30, (Device("gpu-0", "T4", 16 << 30, 4),), usd_per_h=0.5),
    "gpus": Node(
        "gpus",
        "gpus",
        16.0,
        64 << 30,
        (Device("gpu-0", "T4", 16 << 30), Device("gpu-1", "T4", 16 << 30), Device("gpu-2", "V100", 32 << 30, 2)),
        usd_per_h=3.0,
    ),
}
"""Kinds of nodes of random deployments."""
SPEEDS: Final = {"small": 1.0, "large": 0.7, "gpu": 0.3, "gpus": 0.2}
"""How long a batch takes on a kind, relative to the first."""
NAMES: Final = ("red", "green", "blue", "grey")
"""Applications of random deployments."""
Make = Callable[[int, str], World]

PLAN_MS: Final = (0.0, 5.0, 5.0, 200.0, 1_500.0)

Value = TypeVar("Value")


ROWS: Final[Sequence[Numbers | None]] = (None, WeightedNumbers((3,)), WeightedNumbers((1, 2, 40), (6.0, 3.0, 1.0)))
SIZES: Final[Sequence[Numbers | None]] = (None, UniformNumbers(4, 200), WeightedNumbers((8, 128)))
"""What requests bring in the worlds where it is not one row of the only size."""

LAWS: Final[tuple[Slowdown, ...]] = (
    BandwidthLaw(0.0),
    BandwidthLaw(0.6),
    CountLaw((1.0, 1.3, 2.5)),
    PairLaw({"small": 1.1}, 1.4),
    ProcessorSharing("batches"),
    ShareLaw(),
)
OTHER_INTERFERENCE: Final = InterferenceTruth(BandwidthLaw(0.3), bandwidth=0.8)
"""A truth of which the profiles know nothing."""


def random_world(seed: int, system: str = "static") -> World:
    """The world of a seed, under a system with its published parameters and some of its policies replaced."""
    random = stream(seed, "swarm")
    stages = _stages(random, seed)
    nodes = tuple(
        Node(f"node-{number}", "custom", random.choice((8.0, 16.0, 32.0)), 256 << 30)
        for number in range(random.randint(1, 3))
    )
    slowest_ms = sum(map(_alone_ms, stages))
    slo_ms = round(slowest_ms * random.choice((1.5, 4.0, 10.0, 30.0)), 3)
    rate_rps = sum(node.cores for node in nodes) * 1000.0 / slowest_ms * random.choice((0.1, 0.3, 0.7, 1.2))
    duration_s = float(random.randint(3, 12))
    rate_rps = round(min(rate_rps, REQUESTS_MAX / duration_s), 6)
    spec = _load(random, rate_rps)
    truth, link = _truth(random, seed, _fan_out(stages, seed))
    application = Application(
        f"world-{seed}",
        slo_ms,
        stages,
        SystemChoice(system, _parameters(random, system)),
        nodes,
        declared_paths=_paths(stages, seed, slo_ms),
    )
    trace = trace_from(spec, seed=seed, duration_s=duration_s, folder=Path())
    world = World.of(
        application,
        trace,
        seed=seed,
        duration_ns=s(duration_s),
        truth=truth,
        link=link,
        slos_ns=(ms(slo_ms), ms(slo_ms * 0.5), ms(slo_ms * 2.0)) if random.random() < 0.3 else (),
        errors={
            (stage.name, variant.name, "custom"): random.choice(ERRORS)
            for stage in stages
            for variant in stage.variants
        },
        faults=_faults(random, seed),
    )
    return _mixed(_uncapped(_sharing(_provisioned(world))))


def _stages(random: Random, seed: int) -> tuple[Stage, ...]:
    graph = random.choice(GRAPHS)
    # A separate random stream, so that worlds without such a graph do not change.
    own = stream(seed, "graph")
    chosen: dict[str, Edges] = {name: {"after": after} for name, after in graph.items()}
    if len(graph) > 1 and own.random() < 0.5:
        chosen = own.choice(BRANCHING)
    elif len(graph) > 1 and own.random() < 0.3:
        chosen = {"a": {}, "b": {}, "c": {"after": ("a", "b")}, "d": {"after": ("c",)}}
    return tuple(Stage(name, _variants(random), **edges) for name, edges in chosen.items())


def _paths(stages: Sequence[Stage], seed: int, slo_ms: float) -> tuple[PathWithDeadline, ...]:
    """Tight and loose deadlines for the paths of `PATHS`; empty for every other graph."""
    if tuple(stage.name for stage in stages) != ("a", "b", "c", "d") or stages[1].after:
        return ()
    own = stream(seed, "paths")
    slos_ms = [slo_ms * own.choice((0.7, 1.0, 1.5)) for _ in PATHS]
    return tuple(PathWithDeadline(path, ms(slo), 1 / 3) for path, slo in zip(PATHS, slos_ms, strict=True))


def _fan_out(stages: Sequence[Stage], seed: int) -> dict[str, tuple[int, ...]]:
    """True numbers of parts of the stages where they differ from the belief: none, one, and one more than allowed."""
    own = stream(seed, "parts")
    return {stage.name: (0, 1, stage.each.most + 1) for stage in stages if stage.each and own.random() < FAN_OUT}


def _alone_ms(stage: Stage) -> float:
    """The believed latency of a batch of one on one core."""
    first = stage.variants[0]
    profile = first.profile or next(iter(first.profiles.values()))
    return profile.latency_ms.latency_ms(1, 1.0)


def _variants(random: Random) -> tuple[Variant, ...]:
    return (
        Variant("large", accuracy=80.0, profile=_profile(random)),
        Variant("small", accuracy=70.0, profile=_profile(random)),
    )


def _profile(random: Random) -> Profile:
    return Profile(
        latency_ms=Amdahl(
            gamma=random.uniform(1.0, 40.0),
            epsilon=random.uniform(0.0, 10.0),
            delta=random.uniform(0.0, 5.0),
            eta=random.uniform(0.1, 10.0),
        ),
        max_batch=random.choice((1, 2, 4, 8, 16)),
        max_cores=random.choice((4.0, 16.0)),
        load_s=random.choice((0.0, 0.5, 3.0)),
        memory_bytes=random.choice((0, 1 << 30, 8 << 30)),
    )


def _load(random: Random, rate_rps: float) -> dict[str, Any]:
    return random.choice(
        (
            {"kind": "poisson", "rate": rate_rps},
            {"kind": "equal", "rate": rate_rps},
            {"kind": "burst", "rate": rate_rps},
            {"kind": "gamma", "rate": rate_rps, "cv": 3.0},
            {"kind": "onoff", "rate": rate_rps * 2, "on_s": 1.0, "off_s": 1.0},
            {"kind": "square", "rate": rate_rps / 2, "burst_rate": rate_rps * 2, "period_s": 3.0, "burst_s": 1.0},
        )
    )


def _truth(random: Random, seed: int, fan_out: dict[str, tuple[int, ...]]) -> tuple[Truth, Link | None]:
    network, link = None, None
    if random.random() < 0.3:
        payloads_kb = random.choice(((50.0,), (10.0, 50.0, 200.0)))
        network = NetworkTruth(LINK, payloads_kb, _one(random, "delay", "attach"))
        link = link_from(LINK, seed=seed, folder=Path())
    truth = Truth(
        service=ServiceTruth(ratio=random.choice((1.0, 1.05, 1.1)), cv=random.choice((0.0, 0.03, 0.3))),
        resize_ms=random.choice((0.0, 10.0, 50.0, 500.0)),
        resize=_one(random, "next_batch", "rescale"),
        cold_start=ColdStartTruth(random.choice((0.0, 0.2, 3.0)), random.choice((0.0, 0.5)), random.random() < 0.5),
        network=network,
        fan_out=fan_out,
    )
    return truth, link


def _faults(random: Random, seed: int) -> FaultRates:
    on = {kind: value for kind, value in FAULTS.items() if random.random() < 0.25}
    own = stream(seed, "faults of requests")  # a separate stream, so that worlds without them do not change
    on |= {kind: value for kind, value in REQUEST_FAULTS.items() if own.random() < 0.25}
    return convert(on, FaultRates)


def _parameters(random: Random, system: str) -> dict[str, Any]:
    if not is_system_file(system) and build_system(system).overseer is not None:
        return {}  # each of its systems has its own
    swapped: dict[str, Any] = {verb: random.choice(names) for verb, names in CHOICES.items() if random.random() < 1 / 3}
    if system == "static":
        swapped |= {"replicas": random.randint(1, 4), "cores": random.choice((0.5, 1.0, 2.0))}
    return swapped


def _one(random: Random, *values: Value) -> Value:
    return random.choice(values)


def random_deployment(seed: int, system: str = "static") -> World:
    """The deployment of a seed, its requests and its changes, under a system with some of its policies replaced."""
    random = stream(seed, "deployment")
    nodes = _nodes(random)
    choice = SystemChoice(system, _parameters(random, system))
    duration_s = float(random.randint(5, 15))
    names = NAMES[: random.choice((1, 2, 2, 3, 4))]
    applications = [_application(random, name, choice, nodes) for name in names]
    changes = _changes(random, applications, duration_s)
    if len(names) > 1:
        applications = [application.qualified() for application in applications]
    declared = {change.deploy.name: change for change in reversed(changes) if change.deploy is not None}
    clients = {
        name: _clients(random, seed, name, duration_s - at_s, at_s, nodes)
        for name, at_s in ({name: each.at_s for name, each in declared.items()} | dict.fromkeys(names, 0.0)).items()
        if at_s < duration_s
    }
    truth, _ = _truth(random, seed, {})
    world = World(
        seed=seed,
        deployment=Deployment(f"deployment-{seed}", tuple(applications), choice, nodes),
        clients=clients,
        duration_ns=s(duration_s + random.choice((0.0, 0.0, 0.0, 100.0))),
        truth=replace(
            truth,
            network=None,
            plan_ms=random.choice(PLAN_MS),
            nodes=NodeTruth(random.choice((0.2, 2.0, 5.0)), random.choice((0.0, 0.5)), repair_s=2.0),
        ),
        faults=replace(_faults(random, seed), failed_acquire=_one(random, 0.0, 0.0, 0.3), node_repair_s=2.0),
        changes=changes,
    )
    world = replace(world, errors={key: random.choice(ERRORS) for key in world.profiles})
    return _mixed(_uncapped(_sharing(_provisioned(world))))


RATES: Final = (0.1, 0.5, 1.0, 1.0, 2.0, 4.0)
"""The mean rate of a world around given applications, relative to the rate that somebody expects."""


def world_around(deployment: Deployment, rates_rps: Mapping[str, float], seed: int) -> World:
    """The world of a seed for these applications, on their cluster, under their system with its parameters.

    `rates_rps` are the expected requests per second, by application. Drawn are the load, from a tenth to four times of
    that, the truth of service, starts and network, beliefs that are wrong, faults of all kinds, plans that take long,
    and up to four deployments, promotions and removals of the same applications.
    """
    random, applications = stream(seed, "around"), deployment.applications
    duration_s = float(random.randint(5, 20))
    stages = [stage for application in applications for stage in application.stages]
    truth, link = _truth(random, seed, _fan_out(stages, seed))
    most_rps = REQUESTS_MAX / duration_s / len(applications)
    clients = {}
    for each in applications:
        rate_rps = round(min(most_rps, rates_rps[each.name] * random.choice(RATES)), 6)
        trace = trace_from(_load(random, rate_rps), seed=seed, duration_s=duration_s, folder=Path())
        slos_ns = (each.slo_ns, each.slo_ns // 2, 2 * each.slo_ns) if random.random() < 0.3 else ()
        clients[each.name] = Clients(trace, link, slos_ns)
    world = World(
        seed=seed,
        deployment=with_known_future(deployment, clients),
        clients=clients,
        duration_ns=s(duration_s),
        truth=replace(
            truth,
            plan_ms=random.choice(PLAN_MS),
            nodes=NodeTruth(random.choice((0.2, 2.0, 5.0)), random.choice((0.0, 0.5)), repair_s=2.0),
        ),
        faults=replace(_faults(random, seed), failed_acquire=_one(random, 0.0, 0.0, 0.3), node_repair_s=2.0),
        changes=_changes(random, applications, duration_s, renames=False) if random.random() < 0.5 else (),
    )
    return replace(world, errors={key: random.choice(ERRORS) for key in world.profiles})


def _with_applications(world: World, change: Callable[[Application], Application], **fields: Any) -> World:  # noqa: ANN401
    """The same world with other applications, those that are deployed later included, and with these fields."""
    deployment = replace(world.deployment, applications=tuple(map(change, world.deployment.applications)))
    changes = tuple(replace(each, deploy=each.deploy and change(each.deploy)) for each in world.changes)
    return replace(world, deployment=deployment, changes=changes, **fields)


def _provisioned(world: World) -> World:
    """In one world of four, the same with weights of some size, which come over a network as a policy says. From a
    separate stream, so that the others do not change."""
    own = stream(world.seed, "provision")
    if own.random() >= 0.25:
        return world
    chosen = {"name": "cheapest_start", **own.choice(PROVISIONS)}
    layers = stream(world.seed, "layers")  # separate, so that worlds without layers do not change
    has_layers = layers.random() < 0.5

    def provided(application: Application) -> Application:
        system = replace(application.system, parameters={**application.system.parameters, "provision": chosen})
        heavy = with_weights(application, own)
        return replace(with_layers(heavy, layers) if has_layers else heavy, system=system)

    topology = TopologyTruth(own.choice((2e3, 2e4)), own.choice(("shared", "per_node")), 1e4, 2, 1.5e4)
    network = replace(world.truth.network or NetworkTruth(topology=topology), topology=topology)
    return _with_applications(world, provided, truth=replace(world.truth, network=network))


def _sharing(world: World) -> World:
    """In one world of four, the same on devices whose batches disturb each other, as profiles say or otherwise. From a
    separate stream, so that the others do not change."""
    own = stream(world.seed, "sharing")
    if own.random() >= 0.25:
        return world
    truth = own.choice((InterferenceTruth(), InterferenceTruth(error=own.choice((0.0, 0.5, 3.0))), OTHER_INTERFERENCE))
    sharing = partial(with_sharing, random=own)
    return _with_applications(world, sharing, truth=replace(world.truth, interference=truth))


def _mixed(world: World) -> World:
    """In one world of four, the same with requests of several rows, or of rows of several sizes, which are padded or
    not, and of which profiles know or do not. From a separate stream, so that the others do not change."""
    own = stream(world.seed, "rows")
    if own.random() >= 0.25:
        return world

    def bringing(clients: Clients) -> Clients:
        rows, sizes = own.choice(ROWS), own.choice(SIZES)
        return replace(clients, trace=drawn(clients.trace, seed=world.seed, rows=rows, sizes=sizes))

    def mixed(application: Application) -> Application:
        return replace(application, stages=tuple(with_sizes(stage, own) for stage in application.stages))

    clients = {name: bringing(clients) for name, clients in world.clients.items()}
    return _with_applications(world, mixed, clients=clients)


def with_sizes(stage: Stage, own: Random) -> Stage:
    """The stage, with declared classes of sizes or without, and with variants that pad or do not. Their profiles know
    that rows of size 32 take as long as typical ones, and what others take; or nothing of sizes."""
    knows, pads = own.random() < 0.5, own.random() < 0.5
    ratios = {size: own.uniform(0.6, 1.0) if size < 32 else own.uniform(1.0, 3.0) for size in (8, 128)} | {32: 1.0}

    def sized(profile: Profile) -> Profile:
        latency = profile.latency_ms
        if not (knows and isinstance(latency, Amdahl)):
            return profile
        sizes = tuple(
            SizeLatency(size, structs.replace(latency, gamma=latency.gamma * ratio, epsilon=latency.epsilon * ratio))
            for size, ratio in sorted(ratios.items())
        )
        return structs.replace(profile, sizes=sizes)

    variants = tuple(
        replace(
            variant,
            pad={"ids": 0} if pads else {},
            profile=variant.profile and sized(variant.profile),
            profiles={hardware: sized(profile) for hardware, profile in variant.profiles.items()},
        )
        for variant in stage.variants
    )
    return replace(stage, variants=variants, sizes=own.choice(((), (16, 64, 256), (128,))))


def _uncapped(world: World) -> World:
    """In one world of four, the same with models that share the cores of their nodes: the replicas of `static` have no
    cap, and other systems may plan such. From a separate stream, so that the others do not change."""
    own = stream(world.seed, "uncapped")
    if own.random() >= 0.25:
        return world
    cores = {node.hardware: node.cores for node in world.deployment.cluster}
    group = {"replicas": own.randint(1, 6), "cores": own.choice((0.25, 0.5, 2.0)), "is_capped": False}
    groups = [group, *([{"cores": 1.0}] if own.random() < 0.3 else [])]

    def uncapped(application: Application) -> Application:
        parameters = {**application.system.parameters}
        if application.system.name == "static":
            names = [declared_name(stage.name) for stage in application.stages]
            parameters["stages"] = {name: {"groups": groups} for name in names}
        system = replace(application.system, parameters=parameters)
        return with_uncapped(replace(application, system=system), own, cores)

    return _with_applications(world, uncapped)


def with_sharing(application: Application, random: Random) -> Application:
    """The same application with profiles that say how batches share their device; some say nothing."""

    def sharing(profile: Profile, kind: str) -> Profile:
        law = random.choice((*LAWS, None))
        if law is None:
            return profile
        need = {1: random.uniform(0.05, 0.5), profile.max_batch: random.uniform(0.5, 1.0)}
        found = DeviceSharing(law=law, full_batch=profile.max_batch, bandwidth=random.random(), sm_use=need)
        return structs.replace(profile, sharing=found)

    return _with_profiles(application, sharing)


def with_uncapped(application: Application, random: Random, cores: Mapping[str, float]) -> Application:
    """The same application with profiles that say how replicas without a cap share so many cores, by kind of node."""

    def shared(profile: Profile, kind: str) -> Profile:
        if profile.accelerator:
            return profile
        law, all_cores = random.choice(LAWS), cores.get(kind) or next(iter(cores.values()))
        found = DeviceSharing(law=law, full_batch=profile.max_batch, bandwidth=random.random(), cores=all_cores)
        return structs.replace(profile, sharing=found)

    return _with_profiles(application, shared)


def with_weights(application: Application, random: Random) -> Application:
    """The same application with weights of some size, and starts of several parts."""

    def heavy(profile: Profile, kind: str) -> Profile:
        size_bytes = random.choice((1, 1 << 28, 1 << 30, 4 << 30))
        startup = random.choice((None, Startup(0.1, 1.0, 0.1, 0.3), Startup(0.0, 0.5, 0.0)))
        load_s = profile.load_s if startup is None else startup.sum_s
        return structs.replace(profile, weights_bytes=size_bytes, startup=startup, load_s=load_s)

    return _with_profiles(application, heavy)


def with_layers(application: Application, random: Random) -> Application:
    """The same application with measured layers: as large as the weights together, or without weights, or one with
    all."""

    def layered(profile: Profile, kind: str) -> Profile:
        alone_ms, count = profile.latency_ms.latency_ms(1, 1.0), random.choice((1, 2, 5, 70))
        shares = [random.random() ** 3 for _ in range(count)]
        sizes = [int(profile.weights_bytes * share / sum(shares)) for share in shares]
        sizes = random.choice((sizes, sizes, [0] * count, [*[0] * (count - 1), profile.weights_bytes]))
        blocks = tuple(
            LayerBlock(
                end=f"layer-{number}",
                operators="MatMul",
                layers=1,
                param_bytes=size_bytes,
                output_bytes=1000,
                crossing_bytes=random.choice((0, 1000, 1_000_000)),
                load_ms=1.0,
                latency_ms=ParametricLatency(0.0, alone_ms / count, 0.0, 0.0, 1.0),
            )
            for number, size_bytes in enumerate(sizes)
        )
        whole = ParametricLatency(0.0, alone_ms, 0.0, 0.0, 1.0)
        made = LayerProfile(
            blocks=blocks, load_ms=float(count), latency_ms=whole, input_bytes=1000, move_ms_per_mb=0.5, difference=0.0
        )
        return structs.replace(profile, layers=made)

    return _with_profiles(application, layered)


def _with_profiles(application: Application, change: Callable[[Profile, str], Profile]) -> Application:
    """The same application with other profiles; `change` gets a profile and the kind that it is for, "" for all."""

    def variant(given: Variant) -> Variant:
        profiles = {kind: change(profile, kind) for kind, profile in given.profiles.items()}
        return replace(given, profile=given.profile and change(given.profile, ""), profiles=profiles)

    stages = tuple(replace(stage, variants=tuple(map(variant, stage.variants))) for stage in application.stages)
    return replace(application, stages=stages)


def _nodes(random: Random) -> tuple[Node, ...]:
    """One or two kinds of nodes, of each some; at least one is always there."""
    kinds = random.sample(list(HARDWARE), random.choice((1, 2, 2)))
    nodes = [
        structs.replace(HARDWARE[kind], name=f"{kind}-{number}", on_demand=random.random() < 0.4)
        for kind in kinds
        for number in range(random.randint(1, 3))
    ]
    if all(node.on_demand for node in nodes):
        nodes[0] = structs.replace(nodes[0], on_demand=False)
    return tuple(nodes)


def _application(random: Random, name: str, choice: SystemChoice, nodes: Sequence[Node]) -> Application:
    """An application whose variants can run on at least one kind of the cluster."""
    graph = random.choice(GRAPHS)
    chosen: dict[str, Edges] = {stage: {"after": after} for stage, after in graph.items()}
    if len(graph) > 1 and random.random() < 0.3:
        chosen = random.choice(BRANCHING)
    kinds = list(dict.fromkeys(node.hardware for node in nodes))
    with_profile = random.sample(kinds, random.randint(1, len(kinds)))
    stages = tuple(
        Stage(stage, tuple(_variant_on(random, variant, with_profile) for variant in ("large", "small")), **edges)
        for stage, edges in chosen.items()
    )
    slowest_ms = sum(_alone_ms(stage) for stage in stages)
    made = Application(
        name,
        round(slowest_ms * random.choice((1.5, 4.0, 10.0, 30.0)), 3),
        stages,
        choice,
        tuple(nodes),
        weight=random.choice((1.0, 1.0, 3.0)),
        rest_after_s=random.choice((0.0, 0.0, 1.0)),
    )
    return replace(made, wake_s=8.0 * made.rest_after_s)


def _variant_on(random: Random, name: str, kinds: Sequence[str]) -> Variant:
    """A variant with a profile on each of these kinds; on those with accelerators, perhaps of a model that uses one."""
    base = _profile(random)
    return Variant(
        name, accuracy=random.choice((70.0, 80.0)), profiles={kind: _on(random, base, kind) for kind in kinds}
    )


def _on(random: Random, base: Profile, kind: str) -> Profile:
    node, speed = HARDWARE[kind], SPEEDS[kind]
    accelerator = random.choice(["", *dict.fromkeys(device.kind for device in node.devices)])
    latency = base.latency_ms
    assert isinstance(latency, Amdahl)
    scaled = Amdahl(latency.gamma * speed, latency.epsilon * speed, latency.delta * speed, latency.eta * speed)
    memory_bytes = random.choice((0, 1 << 30, 9 << 30)) if accelerator else 0
    own = {"max_cores": node.cores, "latency_ms": scaled, "accelerator": accelerator}
    return structs.replace(base, **own, device_memory_bytes=memory_bytes)


def _clients(
    random: Random, seed: int, name: str, duration_s: float, begins_s: float, nodes: Sequence[Node]
) -> Clients:
    rate_rps = round(random.choice((1.0, 5.0, 20.0, 100.0)) * random.uniform(0.5, 1.5), 6)
    rate_rps = min(rate_rps, REQUESTS_MAX / duration_s / 3)
    trace = trace_from(_load(random, rate_rps), seed=seed, duration_s=duration_s, folder=Path())
    return Clients(trace, begins_ns=s(begins_s))


def _changes(
    random: Random, applications: Sequence[Application], duration_s: float, *, renames: bool = True
) -> tuple[Change, ...]:
    """Up to four deployments, promotions and removals, also of versions that are not there; with `renames`, also of
    further applications."""
    found: list[Change] = []
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        at_s, kind = round(random.uniform(0.0, duration_s), 3), random.random()
        application = random.choice(applications)
        if kind < 0.6:
            slowed = replace(application, slo_ms=application.slo_ms * random.choice((1.0, 0.5)))
            canary = Canary(random.choice((0.1, 0.5)), random.choice((0.0, 1.0)), 0.05, random.choice((5, 50)))
            error = random.choice((1.0, 3.0))
            found.append(Change(at_s, slowed, canary if random.random() < 0.5 else None, error))
        elif kind < 0.7 and renames:
            new = replace(application, name=f"{application.name}-new")
            found.append(Change(at_s, new))
        elif kind < 0.85:
            found.append(Change(at_s, promote=application.name))
        else:
            found.append(Change(at_s, remove=application.name, version=random.choice(("", "", "1", "2"))))
    return tuple(sorted(found, key=lambda change: change.at_s))


def fitting(make: Make, seed: int, system: str) -> World | None:
    """The world of a seed; None if the system cannot serve its applications. An InputError later is a failure."""
    try:
        world = make(seed, system)
        world.check()
    except InputError:
        return None
    return world


def play(world: World, sinks: Sequence[Sink] = (), core: CoreInterface | None = None) -> RunTotals:
    """Simulate a world under the checkers, and check what else must hold of its log, which also goes to `sinks`. `core`
    is one of this world that nothing has used; by default it is made.

    Raises Violation if an invariant is broken, if a policy failed, if a replay differs, or if the fold and the checkers
    disagree about how long nodes were held, how requests ended and how long they took.
    """
    log = MemoryLog()
    totals = simulate(world, [log, *sinks], core=core, patience_ns=s(PATIENCE_S))
    for now_ns, record in log:
        if isinstance(record, Decided) and record.kind == "planner":
            _fail(world, f"at {now_ns} ns: {record.why}")
    check_replay(world, world.setup(), log, "the replay")
    _compare_figures(world, log.records)
    return totals


def check_replay(world: World, setup: Setup, log: MemoryLog, what: str) -> None:
    """Raise Violation if the core of a fresh setup orders something else than the log says; `what` names the replay."""
    replayed = replay_log(log, setup.core())
    found = replayed.difference
    if found is not None:
        when = f"{what} differs at {to_ms(found.at_ns):.6f} ms: a policy answers otherwise to the same arguments"
        _fail(world, f"{when}\nrecorded: {found.recorded}\nreplayed: {found.replayed}")


def _compare_figures(world: World, records: Sequence[tuple[int, Record]]) -> None:
    """Compare the fold's figures of nodes and requests with those of the checkers."""
    setup = world.setup()
    nodes = world.deployment.cluster
    later = [rules_of(each.setup()) for each in world.later]
    checkers = Checkers([rules_of(each) for each in setup.applications], nodes, later=later)
    state = DeploymentState(setup.parts(), nodes=nodes, build=build if world.changes else None, start_ns=0)
    for now_ns, record in records:
        checkers.append(now_ns, record)
        state.append(now_ns, record)
    state.advance()
    held_ns = {name: record.held_ns for name, record in state.nodes.records.items()}
    if held_ns != checkers.charged_ns:
        _fail(world, f"nodes were held for {held_ns} ns, the checkers say {checkers.charged_ns}")
    found, expected = _ended(state), (checkers.ended, checkers.ended_ns)
    if found != expected:
        _fail(world, f"requests have ended as {found}, the checkers say {expected}")


def _ended(state: DeploymentState) -> tuple[Counter[tuple[str, Outcome]], Counter[tuple[str, Outcome]]]:
    """The fold's figures of requests: their number, second by second, and the sum of their times; see
    `Checkers.ended`."""
    accounts = [(each.key, each.run) for each in state.records]
    if state.unserved is not None:
        accounts.append(("", state.unserved))
    ended, ended_ns = Counter[tuple[str, Outcome]](), Counter[tuple[str, Outcome]]()
    for key, account in accounts:
        times_ns = {Outcome.SERVED: account.served_ns, Outcome.LATE: account.late_ns, **account.missed_ns}
        for outcome, each_ns in times_ns.items():
            ended[key, outcome] += sum(getattr(second, outcome.value) for second in account.seconds)
            ended_ns[key, outcome] += sum(each_ns)
    return ended, ended_ns


def _fail(world: World, what: str) -> None:
    raise Violation(f"{what}\nreproduce with: {world.origin}" if world.origin else what)
