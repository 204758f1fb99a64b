"""Duration of decisions of all systems on published profiles (Sponge specification, check 13).

    python -m benchmarks.decisions [--rounds 200] [--only ipa]

For single models, a core receives one second of requests and then decides; a scaling plan and a batch decision on a
long queue are timed. For applications of several models (those of the publications, and some synthetic hard ones), the
slowest of the decisions that lead to a stable plan is timed at each of many rates. Last come decisions on where
replicas of a model with 55 layers start: 16 at a time on 64 nodes with 8 accelerators each. The queue differs each
time, so that no cached answer is used.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import median
from typing import Final, NamedTuple

from msgspec import structs

from benchmarks.notebook import arguments, publish, say, table
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.views import (
    Bucket,
    ClusterView,
    DeviceView,
    NodeView,
    ProvisionInput,
    ReplicaView,
    Site,
    StageView,
    StartCosts,
    Traffic,
    WeightsView,
)
from sloop.policies import provision, sourcing
from sloop.policies.batch import Deadline
from sloop.policies.place import BestFit
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Amdahl, Profile
from sloop.profile.published import YOLOV5S_S
from sloop.systems.planning.steady import steady_plans
from sloop.systems.registry import build
from sloop.systems.setup import set_up
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import (
    Device,
    Life,
    ModelWeights,
    Node,
    Path,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    Visit,
)
from sloop_systems.biscale.experiments import runs as biscale
from sloop_systems.fa2.experiments import runs as fa2
from sloop_systems.flashpoint import policy as flashpoint_policy
from sloop_systems.flashpoint.experiments import runs as flashpoint
from sloop_systems.flashpoint.experiments.offline import T5
from sloop_systems.ipa.experiments import runs as ipa
from sloop_systems.ipa.experiments.published import PIPELINES as IPA_PIPELINES

BELIEF = Estimate(YOLOV5S_S, variant="v", hardware="local")

TARGETS_MS: Final[Mapping[str, float]] = {"fa2": 20.0, "ipa": 100.0, "biscale": 100.0}
"""The longest time that a decision may take, if the specifications give one."""
BASELINES: Final = ("ds2", "inferline", "grandslam", "rim", "fa2-low", "fa2-high", "vertical-only")
"""Systems that are timed on one application only: they choose among the same plans as those above, by fewer
criteria."""
RATES_RPS: Final = (1, 2, 4, 7, 11, 16, 22, 29, 36, 44, 52, 60)
BEYOND_RPS: Final = (160, 180, 200, 220, 240)
"""About ten times what two nodes of eight cores hold of Biscale's longest pipeline, some 20 requests/s."""


class Timed(NamedTuple):
    """Duration of a decision in ms: median, 99th percentile, and the upper limit of the latter."""

    p50_ms: float
    p99_ms: float
    target_ms: float | None
    is_kept: bool | None


def view_of(count: int, slack_ms: float, random: Random, seconds: int = 60) -> ClusterView:
    """A stage of four replicas with `count` requests in each of the last seconds, and `count` waiting."""
    slack_ns = [[ms(slack_ms * random.uniform(0.9, 1.0)) for _ in range(count)] for _ in range(seconds)]
    buckets = [
        Bucket(s(at), count, NS_PER_S, NS_PER_S, 3 * NS_PER_S, 4 * NS_PER_S, own) for at, own in enumerate(slack_ns)
    ]
    queue = [
        Visit(
            Request(RequestId(n), s(seconds - 1), s(seconds - 1), s(seconds) + left),
            "m",
            s(seconds - 1),
            s(seconds) + left,
        )
        for n, left in enumerate(sorted(slack_ns[0]))
    ]
    spec = ReplicaSpec("m", "v", BELIEF.slot(1.0))
    replicas = tuple(ReplicaView(ReplicaId(n), spec, Life.READY, 0, 0, "n") for n in range(4))
    stage = StageView(
        name="m",
        slo_ns=s(1),
        after=(),
        beliefs={("v", "local"): BELIEF},
        replicas=replicas,
        queue=tuple(queue),
        running=0,
        buckets=buckets,
        bucket_ns=s(1),
    )
    node, rps = NodeView(Node("n", "local", 64, 1 << 30), 64, 1 << 30), float(count)
    ingress = Traffic(buckets=buckets, bucket_ns=s(1))
    return ClusterView((stage,), (node,), None, {"m": rps}, ingress, rps, (Path(("m",), s(1)),))


def timed(decide: Callable[[], object], rounds: int, target_ms: float | None = None) -> Timed:
    """Time `rounds` calls after `rounds` warm-up calls."""
    taken_ms = []
    for _ in range(2 * rounds):
        begun = time.perf_counter()
        decide()
        taken_ms.append((time.perf_counter() - begun) * 1e3)
    ordered = sorted(taken_ms[rounds:])
    p99_ms = ordered[99 * rounds // 100]
    return Timed(ordered[rounds // 2], p99_ms, target_ms, None if target_ms is None else p99_ms <= target_ms)


def scale(name: str, view: ClusterView, rounds: int, target_ms: float | None = None, **parameters: object) -> Timed:
    policy = build("scale", name, parameters)
    return timed(lambda: policy.plan(s(60), view), rounds, target_ms)  # type: ignore[attr-defined]


class Case(NamedTuple):
    """An application, the system that plans for it, and the rates."""

    what: str
    application: Application
    systems: Sequence[str] = tuple(TARGETS_MS)
    rates_rps: Sequence[float] = RATES_RPS


class Planned(NamedTuple):
    """The slowest decision at each rate, in ms: their median, their maximum, and the upper limit of the latter."""

    what: str
    system: str
    median_ms: float
    longest_ms: float
    target_ms: float | None
    is_kept: bool | None


def cases() -> Iterator[Case]:
    """The applications of three publications, then synthetic ones."""
    vision = fa2.world_of(fa2.Fa2Trial(system="fa2", paths=6)).application
    yield Case("FA2's ten models, six paths", vision, (*TARGETS_MS, *BASELINES))
    for name in IPA_PIPELINES:
        yield Case(f"IPA's {name}", ipa.world_of(ipa.IpaTrial(pipeline=name, workload="bursty")).application)
    for name in biscale.PIPELINES:
        yield Case(f"Biscale's {name}", biscale.world_of(biscale.BiscaleTrial(pipeline=name)).application)
    longest = biscale.world_of(biscale.BiscaleTrial(pipeline="nlp")).application
    nodes = tuple(node_of(number, 8) for number in range(2))
    yield Case("Biscale's nlp, 10 × too much", replace(longest, cluster=nodes), rates_rps=BEYOND_RPS)
    yield Case("1 to 8 in parallel to 1", fan_in(8))
    yield Case("1 to 38 in parallel to 1", fan_in(38))
    for count in (3, 8, 11):
        yield Case(f"{count} diamonds in a row, {1 << count} paths", diamonds(count))
    yield Case("a chain of 10 stages, 10 variants each", chain(10, 10), ("ipa",))


def node_of(number: int, cores: float) -> Node:
    return Node(f"n{number}", "invented", cores, 1 << 40)


def variant(name: str, times: float, accuracy: float | None = None) -> Variant:
    """`times` as slow as 20 ms and 5 ms for each request of a batch on one core, and 2 ms on any."""
    form = Amdahl(gamma=5 * times, epsilon=20 * times, delta=0.5 * times, eta=2 * times)
    return Variant(name, accuracy=accuracy, profile=Profile(latency_ms=form, max_batch=8, max_cores=8))


def synthetic(name: str, slo_ms: float, stages: Sequence[Stage]) -> Application:
    """A synthetic application on twenty nodes of sixteen cores."""
    nodes = tuple(node_of(number, 16) for number in range(20))
    return Application(name, slo_ms, tuple(stages), SystemChoice("fa2"), nodes)


def fan_in(width: int) -> Application:
    """One stage, then `width` stages in parallel, then one stage that joins them."""
    parallel = [Stage(f"side{n}", (variant("v", 1 + n / width),), ("first",)) for n in range(width)]
    last = Stage("last", (variant("v", 1),), tuple(stage.name for stage in parallel))
    return synthetic("fan-in", 300, [Stage("first", (variant("v", 1),)), *parallel, last])


def diamonds(count: int) -> Application:
    """A chain in which every other step is two parallel stages; each such step doubles the number of paths."""
    stages = [Stage("d0", (variant("v", 1),))]
    for number in range(count):
        sides = [Stage(f"{side}{number}", (variant("v", 1),), (f"d{number}",)) for side in ("left", "right")]
        stages += [*sides, Stage(f"d{number + 1}", (variant("v", 1),), tuple(stage.name for stage in sides))]
    return synthetic("diamonds", 200 + 150 * count, stages)


def chain(length: int, variants: int) -> Application:
    """A chain of different stages; the slower variants of each are more accurate."""
    stages = []
    for place in range(length):
        times, least = 0.7 + place * 0.6 / length, 0.5 + 0.2 * (place * 3 % length) / length
        offered = tuple(variant(f"v{n}", times * (1 + n / 2), least + 0.03 * n) for n in range(variants))
        stages.append(Stage(f"s{place}", offered, (f"s{place - 1}",) if place else ()))
    return synthetic("chain", 2000, stages)


def planned(case: Case, system: str) -> Planned:
    """Plan for each rate in turn, after one plan that only loads modules."""
    setup = set_up(replace(case.application, system=SystemChoice(system)), must_fit=False)
    name = case.application.name
    steady_plans(setup.applications, {name: 1.0})
    plans = [
        steady_plans(setup.applications, {name: rate_rps}, clock=time.perf_counter_ns) for rate_rps in case.rates_rps
    ]
    took_ms = [plan.solve_ms for plan in plans]
    target_ms = TARGETS_MS.get(system)
    is_kept = None if target_ms is None else max(took_ms) <= target_ms
    return Planned(case.what, system, median(took_ms), max(took_ms), target_ms, is_kept)


def singles(rounds: int, random: Random) -> Mapping[str, Callable[[], Timed]]:
    """Durations of decisions about one stage and about one batch."""
    calm, fade, many = view_of(20, 950, random), view_of(20, 500, random), view_of(200, 950, random)
    costs_ns = [0, *(ms(8 + size) for size in range(1, 33))]
    tight = [
        Visit(Request(RequestId(n), 0, 0, deadline_ns), "m", 0, deadline_ns)
        for n, deadline_ns in enumerate(sorted(ms(random.uniform(10, 60)) for _ in range(10_000)))
    ]
    return {
        "sponge, 16 × 16": lambda: scale("sponge", calm, rounds, 5),
        "sponge, 16 × 16, nothing holds": lambda: scale("sponge", fade, rounds, 5),
        "sponge, budgets by batch, 200 requests": lambda: scale("sponge", many, rounds, 20, budget="per_batch"),
        "fa2_single": lambda: scale("fa2_single", calm, rounds, 20),
        "hpa": lambda: scale("hpa", calm, rounds),
        "kpa": lambda: scale("kpa", calm, rounds),
        "vpa": lambda: scale("vpa", calm, rounds),
        "static": lambda: scale("static", calm, rounds),
        "batch deadline, 10,000 wait, hardly any in time": lambda: timed(
            lambda: Deadline().decide(0, AssumedQueue(tight), AssumedDevice(32, costs_ns)), rounds
        ),
        "batch deadline, enough time": lambda: timed(
            lambda: Deadline().decide(0, AssumedQueue(tight[-20:]), AssumedDevice(16, costs_ns)), rounds
        ),
    }


STARTS, START_NODES, START_DEVICES = 16, 64, 8
STARTS_MS: Final = 1.0
"""What a decision about that many starts may take."""
PRIMED: Final = 3
"""Nodes that have the model, where it is on some."""


def starts_given(queue: int, primed: int) -> ProvisionInput:
    """Sixteen starts of T5-3B, which so many nodes have loaded, each with half its accelerators free."""
    profile = structs.replace(
        flashpoint.profile_of(T5), accelerator="A10", memory_bytes=12 << 30, device_memory_bytes=12 << 30
    )
    belief = Estimate(profile, variant="v", hardware="gpu")
    nodes = []
    for place in range(START_NODES):
        devices = tuple(Device(f"d{number}", "A10", 24 << 30) for number in range(START_DEVICES))
        free = tuple(
            DeviceView(device, float(is_free), (24 << 30) * is_free, int(is_free))
            for number, device in enumerate(devices)
            for is_free in [place >= primed or number % 2 == 0]
        )
        node = Node(f"h{place}", "gpu", 64.0, 400 << 30, devices, rack=f"rack-{place // 20}")
        nodes.append(NodeView(node, 64.0, 400 << 30, free))
    assert profile.layers is not None
    assert profile.startup is not None
    costs = StartCosts(
        ModelWeights(T5, profile.weights_bytes),
        load_s=profile.startup.weights_s,
        send_s=profile.startup.send_s,
        layer_bytes=tuple(each.param_bytes for each in profile.layers.blocks),
    )
    found = [WeightsView(view.node.name, view.node.rack, True, None, 4, True) for view in nodes[:primed]]
    return ProvisionInput(
        stage="m",
        spec=ReplicaSpec("m", "v", Slot(1.0, "gpu", "A10")),
        count=STARTS,
        sites=[Site(view, device) for view in nodes for device in view.devices if device.free_share],
        place=BestFit(),
        costs=costs,
        belief=belief,
        weights=found,
        sends={},
        waiting=queue,
        arrivals_rps=100.0,
        served_rps=80.0,
    )


def starts(rounds: int) -> Iterator[tuple[str, *tuple[object, ...]]]:
    """Durations of provision policies: for the first starts, with which they find all plans; for the first burst; and
    for later bursts."""
    for primed in (0, PRIMED):
        where = f"{primed} nodes have it" if primed else "in the store alone"
        for name, parameters in (
            ("cheapest_start", {}),
            ("cheapest_start, parts", {"partition": True}),
            ("flashpoint", {}),
            ("flashpoint, parts", {"partition": True}),
        ):
            policy = build("provision", name.partition(",")[0], parameters)
            given = starts_given(1, primed)
            queues = iter(range(1, 1 << 30, 7))
            for cached in (sourcing.plans_of, provision._parts, flashpoint_policy._best_cuts):
                cached.cache_clear()
            first_ms, burst_ms = (
                _took_ms(lambda policy=policy, asked=asked: policy.provide(0, asked))  # type: ignore[misc]
                for asked in (structs.replace(given, arrivals_rps=0.0, waiting=0), given)
            )
            target_ms = STARTS_MS if name.startswith("cheapest") else None
            found = timed(
                lambda policy=policy, given=given, queues=queues: policy.provide(  # type: ignore[misc]
                    0, structs.replace(given, waiting=next(queues))
                ),
                rounds,
                target_ms,
            )
            yield name, where, found.p50_ms, found.p99_ms, first_ms, burst_ms, target_ms, found.is_kept


def _took_ms(decide: Callable[[], object]) -> float:
    begun = time.perf_counter()
    decide()
    return (time.perf_counter() - begun) * 1e3


def plans(only: str) -> Iterator[Planned]:
    """The rows whose application or system contains `only`."""
    for case in cases():
        for system in case.systems:
            if only in f"{case.what} {system}":
                say(f"{case.what}: {system}")
                yield planned(case, system)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only rows whose names contain TEXT; nothing is written"
    )
    given = parser.parse_args()
    rounds, random = given.rounds, Random(given.seed)
    rows = [(what, *time_it()) for what, time_it in singles(rounds, random).items() if given.only in what]
    text = f"Each decision was timed {rounds} times after as many warm-up calls, on the profile YOLOv5s-S.\n\n"
    text += table(("decision", "p50 ms", "p99 ms", "at most, ms", "kept"), rows)
    text += f"\n\nApplications of several models, planned for at {len(RATES_RPS)} rates from {RATES_RPS[0]} to "
    text += f"{RATES_RPS[-1]} requests/s, the overloaded one at {BEYOND_RPS[0]} to {BEYOND_RPS[-1]}:\n\n"
    columns = ("application", "system", "median ms", "longest ms", "at most, ms", "kept")
    text += table(columns, list(plans(given.only)))
    text += (
        f"\n\n{STARTS} starts of T5-3B, 55 layers, on {START_NODES} nodes with {START_DEVICES} accelerators each:\n\n"
    )
    heads = ("policy", "weights", "p50 ms", "p99 ms", "first starts, ms", "first burst, ms", "at most, ms", "kept")
    text += table(heads, [row for row in starts(rounds) if given.only in row[0]])
    publish("decisions", "How long a decision takes", text, write=not (given.no_write or given.only))


if __name__ == "__main__":
    main()
